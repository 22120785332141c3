"""What inference engines call: decode, speculative verification and mixed batches on a pool of states, in place.

A pool is [slots,Hv,K,V], or [slots,Hv,V,K] with `state_v_first`, in float32, float16 or bfloat16; the two inner
dimensions are contiguous, the stride between slots is free. Row n of the batch works on slot `state_indices[n]`. A
padding slot (`pad_slots`: "negative" is < 0, "non_positive" is <= 0) makes a padding row: its outputs are zero and no
slot is touched. Slots that are written must be unique in a call.

None of these has gradients. Letters in shapes are those of `functions`.
"""

from __future__ import annotations

from typing import Any, Literal

from . import _modes
from ._paths import path_of
from .functions import _scale
from .options import DEFAULT_OPTIONS, PlanOptions

__all__ = [
    "gated_delta_rule_commit",
    "gated_delta_rule_decode",
    "gated_delta_rule_mixed",
    "gated_delta_rule_verify",
]

PadSlots = Literal["negative", "non_positive"]
Grouping = Literal["interleaved", "tiled"]


def _modes_of(
    function: str,
    g: Any,
    A_log: Any,
    raw_gate: bool,
    sigmoid: bool,
    twice: bool,
    l2norm: bool,
    state_v_first: bool,
    pad_slots: str,
    grouping: str,
) -> int:
    """The options that decode and mixed batches share, as bits. One flat function: a decode call is microseconds."""
    if raw_gate and A_log is None:
        raise ValueError(f"{function}: use_gate_in_kernel needs A_log")
    if twice and not sigmoid:
        raise ValueError(f"{function}: allow_neg_eigval needs use_beta_sigmoid_in_kernel")
    if raw_gate and g is None:
        raise ValueError(f"{function}: use_gate_in_kernel needs g")
    modes = _modes.rule(g is not None, raw_gate, sigmoid, twice, l2norm, state_v_first)
    if pad_slots != "negative":
        modes |= _padding(function, pad_slots)
    if grouping != "interleaved":
        if grouping != "tiled":
            raise ValueError(f"{function}: grouping is {grouping!r}; it must be 'interleaved' or 'tiled'")
        modes |= _modes.TILED
    return modes


def _padding(function: str, pad_slots: str) -> int:
    if pad_slots not in ("negative", "non_positive"):
        raise ValueError(f"{function}: pad_slots is {pad_slots!r}; it must be 'negative' or 'non_positive'")
    return _modes.PAD_NON_POSITIVE if pad_slots == "non_positive" else 0


def _need(function: str, **arguments: Any) -> None:
    """Arguments that no call can do without."""
    for name, x in arguments.items():
        if x is None:
            raise TypeError(f"{function}: {name} is None; it must be given")


def gated_delta_rule_decode(
    q: Any,
    k: Any,
    v: Any,
    g: Any = None,
    beta: Any = None,
    *,
    state: Any,
    state_indices: Any = None,
    state_indices_out: Any = None,
    has_initial_state: Any = None,
    cu_seqlens: Any = None,
    scale: float | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    A_log: Any = None,
    dt_bias: Any = None,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    pad_slots: PadSlots = "negative",
    grouping: Grouping = "interleaved",
    out: Any = None,
    output_dtype: Any = None,
    options: PlanOptions = DEFAULT_OPTIONS,
) -> Any:
    """One token, or a run of at most 16, for each row; `state` is updated in place.

    Args:
        q, k, v: [B,T,heads,size] with one row for each batch element (T at most 16), or packed [1,T,heads,size] with
            `cu_seqlens`.
        g, beta, A_log, dt_bias, scale and the flags: as in `chunk_gated_delta_rule`.
        state: the pool; see the top of this module.
        state_indices: [N] int32 or int64. None: row n uses slot n.
        state_indices_out: [N]; write here instead of the slot that was read.
        has_initial_state: [N] bool or int32; 0: start from zeros, whatever the slot holds.
        grouping: "interleaved": value head h reads key head h // (Hv / Hk); "tiled": h % Hk.
        out: [B,T,Hv,V] to write into; its last stride is 1, the others are free.
        output_dtype: of the output when there is no `out`: q's dtype (None) or float32.

    Returns:
        o [B,T,Hv,V], or `out`.

    Raises:
        ValueError: an argument that does not fit; a slot outside the pool, or written twice.
        NotImplementedError: no backend can do it, or an input needs a gradient.
    """
    name = "gated_delta_rule_decode"
    if q is None or k is None or v is None or state is None:
        _need(name, q=q, k=k, v=v, state=state)
    modes = _modes_of(
        name,
        g,
        A_log,
        use_gate_in_kernel,
        use_beta_sigmoid_in_kernel,
        allow_neg_eigval,
        use_qk_l2norm_in_kernel,
        state_v_first,
        pad_slots,
        grouping,
    )
    if not use_gate_in_kernel:
        A_log = dt_bias = None
    tensors = (
        q, k, v, g, beta, A_log, dt_bias, cu_seqlens,
        state, state_indices, state_indices_out, has_initial_state, None, None, None, None,
    )  # fmt: skip
    scale = 0.0 if scale is None else _scale(name, scale)
    return path_of(q).decode(name, tensors, modes, scale, True, out, output_dtype, options)


def gated_delta_rule_verify(
    q: Any,
    k: Any,
    v: Any,
    g: Any = None,
    beta: Any = None,
    *,
    state: Any,
    state_indices: Any = None,
    num_accepted: Any = None,
    intermediate_states: Any = None,
    intermediate_indices: Any = None,
    parent_tokens: Any = None,
    commit_state: bool | None = None,
    has_initial_state: Any = None,
    cu_seqlens: Any = None,
    scale: float | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    A_log: Any = None,
    dt_bias: Any = None,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    pad_slots: PadSlots = "negative",
    grouping: Grouping = "interleaved",
    out: Any = None,
    output_dtype: Any = None,
    options: PlanOptions = DEFAULT_OPTIONS,
) -> Any:
    """A run of at most 16 draft tokens for each row, with the state after every token kept. Two contracts:

    A slot for each token: `state_indices` is [N,S] with S at least T, and the state after token t goes to slot
    `state_indices[n,t]`. The run starts from slot `state_indices[n, num_accepted[n] - 1]`; a `num_accepted` outside
    1..S makes a padding row.

    An intermediate buffer: `state_indices` is [N], and the state after token t goes to `intermediate_states[m,t]` with
    m = `intermediate_indices[n]` (None: n). The pool stays as it is until `gated_delta_rule_commit`.

    Args:
        intermediate_states: [M,>=T,Hv,..] in the pool's layout, float32, float16 or bfloat16.
        parent_tokens: [N,>=T] int32 or int64; makes the run a tree: token t continues from the state after token
            `parent_tokens[n,t]` < t, or from the start state when that is negative. Needs `intermediate_states`.
        commit_state: also write the last state to the pool. None: only without `intermediate_states`.
        Others: as in `gated_delta_rule_decode`.

    Returns:
        o [B,T,Hv,V], or `out`.

    Raises:
        ValueError, NotImplementedError: as `gated_delta_rule_decode`.
    """
    name = "gated_delta_rule_verify"
    if q is None or k is None or v is None or state is None:
        _need(name, q=q, k=k, v=v, state=state)
    modes = _modes_of(
        name,
        g,
        A_log,
        use_gate_in_kernel,
        use_beta_sigmoid_in_kernel,
        allow_neg_eigval,
        use_qk_l2norm_in_kernel,
        state_v_first,
        pad_slots,
        grouping,
    )
    if not use_gate_in_kernel:
        A_log = dt_bias = None
    tensors = (
        q, k, v, g, beta, A_log, dt_bias, cu_seqlens, state, state_indices, None, has_initial_state,
        num_accepted, intermediate_states, intermediate_indices, parent_tokens,
    )  # fmt: skip
    if commit_state is None:
        commit_state = intermediate_states is None
    scale = 0.0 if scale is None else _scale(name, scale)
    return path_of(q).decode(name, tensors, modes, scale, commit_state, out, output_dtype, options)


def gated_delta_rule_commit(
    state: Any,
    state_indices: Any,
    intermediate_states: Any,
    accepted: Any,
    intermediate_indices: Any = None,
    *,
    state_v_first: bool = False,
    pad_slots: PadSlots = "negative",
) -> None:
    """After a verification with an intermediate buffer: the pool takes the state after the last accepted token.

    `state[state_indices[n]] <- intermediate_states[m, accepted[n] - 1]` with m = `intermediate_indices[n]` (None: n).
    Rows with a padding slot, m < 0, or `accepted` outside 1..T stay as they are.

    Args:
        state: the pool; see the top of this module.
        state_indices: [N] int32 or int64, or None: slot n.
        intermediate_states: [M,T,Hv,..].
        accepted: [N] int32 or int64.

    Raises:
        ValueError: an argument that does not fit.
    """
    name = "gated_delta_rule_commit"
    _need(name, state=state, intermediate_states=intermediate_states, accepted=accepted)
    modes = (_modes.STATE_V_FIRST if state_v_first else 0) | _padding(name, pad_slots)
    path_of(state).commit(name, (state, state_indices, intermediate_states, intermediate_indices, accepted), modes)


def gated_delta_rule_mixed(
    q: Any,
    k: Any,
    v: Any,
    g: Any = None,
    beta: Any = None,
    *,
    cu_seqlens: Any,
    state: Any,
    state_indices: Any = None,
    state_indices_out: Any = None,
    has_initial_state: Any = None,
    decode_rows: int = 0,
    checkpoints: Any = None,
    checkpoint_every: int | None = None,
    checkpoint_list: Any = None,
    scale: float | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    A_log: Any = None,
    dt_bias: Any = None,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    pad_slots: PadSlots = "negative",
    grouping: Grouping = "interleaved",
    out: Any = None,
    output_dtype: Any = None,
    options: PlanOptions = DEFAULT_OPTIONS,
) -> Any:
    """One packed batch, decode rows first and prefill rows after, in one call; `state` is updated in place.

    Args:
        q, k, v, g, beta: packed, [1,T,..].
        cu_seqlens: [N+1] int32 or int64; empty sequences are allowed.
        state, state_indices, state_indices_out, has_initial_state, grouping, out, output_dtype: as in
            `gated_delta_rule_decode`.
        decode_rows: how many of the first sequences have at most 16 tokens. A promise that helps planning; results do
            not depend on it.
        checkpoints: [rows,Hv,..] to write states into, for prefix caching. Alone: the state entering token 0, 64, 128,
            ... of each sequence, ceil(length / 64) rows each, one sequence after another.
        checkpoint_every: n; instead: the state after n, 2n, ... tokens, floor(length / n) rows each.
        checkpoint_list: [rows,2] int32 or int64; instead: the state after `token` tokens of `sequence`, one row for
            each pair (sequence, token).

    Returns:
        o [1,T,Hv,V], or `out`. Tokens past the last offset are zero.

    Raises:
        ValueError, NotImplementedError: as `gated_delta_rule_decode`.
    """
    name = "gated_delta_rule_mixed"
    _need(name, q=q, k=k, v=v, state=state)
    modes = _modes_of(
        name,
        g,
        A_log,
        use_gate_in_kernel,
        use_beta_sigmoid_in_kernel,
        allow_neg_eigval,
        use_qk_l2norm_in_kernel,
        state_v_first,
        pad_slots,
        grouping,
    )
    if checkpoints is None:
        if checkpoint_every is not None or checkpoint_list is not None:
            raise ValueError(
                f"{name}: checkpoint_every and checkpoint_list say which states go to checkpoints; give it"
            )
    elif checkpoint_every is not None and checkpoint_list is not None:
        raise ValueError(f"{name}: checkpoint_every and checkpoint_list were both given; pass one of them")
    elif checkpoint_list is not None:
        modes |= _modes.CHECKPOINT_LISTED
    else:
        modes |= _modes.CHECKPOINT_CHUNK_STARTS if checkpoint_every is None else _modes.CHECKPOINT_EVERY_N
    if not use_gate_in_kernel:
        A_log = dt_bias = None
    tensors = (
        q, k, v, g, beta, A_log, dt_bias, cu_seqlens,
        state, state_indices, state_indices_out, has_initial_state, checkpoints, checkpoint_list,
    )  # fmt: skip
    numbers = (checkpoint_every or 0, decode_rows)
    return path_of(q).mixed(name, tensors, modes, _scale(name, scale), numbers, out, output_dtype, options)
