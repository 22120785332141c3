"""The options of a call in one integer; `python/binding/plans.hpp` is the other half of this table.

One integer instead of a dozen booleans: every argument of an operator costs time in each call, and `torch.compile`
guards each of them.
"""

from __future__ import annotations

from typing import Any

GATE_NONE = 0
GATE_LOG = 1
GATE_RAW = 2
GATE_MASK = 3
BETA_LOGIT = 1 << 2
BETA_TWICE = 1 << 3
L2NORM = 1 << 4
TILED = 1 << 5
STATE_V_FIRST = 1 << 6
PAD_NON_POSITIVE = 1 << 7
CHECKPOINT_CHUNK_STARTS = 1 << 8
CHECKPOINT_EVERY_N = 2 << 8
CHECKPOINT_LISTED = 3 << 8
CHECKPOINT_MASK = 3 << 8
FOR_BACKWARD = 1 << 10
DETERMINISTIC = 1 << 11
BATCH_INVARIANT = 1 << 12
BF16_AS_U16 = 1 << 13
"""The arrays are numpy's: uint16 stands for bfloat16."""

# Used on the Python side only.
OUTPUT_FINAL_STATE = 1 << 16
"""The caller wants the final state."""


def rule(gate: bool, gate_raw: bool, beta_logit: bool, beta_twice: bool, l2norm: bool, state_v_first: bool) -> int:
    """The bits of the rule and of how states lie; `gate` says whether there is one."""
    return (
        (GATE_RAW if gate_raw else GATE_LOG if gate else GATE_NONE)
        | (BETA_LOGIT if beta_logit else 0)
        | (BETA_TWICE if beta_twice else 0)
        | (L2NORM if l2norm else 0)
        | (STATE_V_FIRST if state_v_first else 0)
    )


def state_shape(q: Any, v: Any, cu_seqlens: Any, modes: int) -> tuple[int, int, int, int]:
    """[N,Hv,K,V] or [N,Hv,V,K], for torch tensors and numpy arrays."""
    B, _, _, K = q.shape
    _, _, Hv, V = v.shape
    N = B if cu_seqlens is None else cu_seqlens.shape[0] - 1
    return (N, Hv, V, K) if modes & STATE_V_FIRST else (N, Hv, K, V)
