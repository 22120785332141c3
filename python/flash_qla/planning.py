"""What the library decided and what it is: `plan` and `info`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from . import _modes
from ._native import native
from .options import DEFAULT_OPTIONS, PlanOptions

__all__ = ["Plan", "info", "plan"]

_DTYPES = {"float32": "f32", "float16": "f16", "bfloat16": "bf16", "f32": "f32", "f16": "f16", "bf16": "bf16"}
_GATES = ("none", "log", "raw")
_DEVICES = {"cpu": 1, "cuda": 2}  # DLPack's numbers


@dataclass(frozen=True)
class Plan:
    """The decisions about one problem. Made by `plan`; calls make and keep their own by themselves."""

    text: str
    forward_backend: str
    backward_backend: str
    decode_backend: str
    forward_workspace_bytes: int
    backward_workspace_bytes: int
    decode_workspace_bytes: int
    checkpoint_rows: int

    def explain(self) -> str:
        """The choice for each pass, why each better backend refused, and the map of the workspace."""
        return self.text

    def __str__(self) -> str:
        return self.text


def _dtype_name(argument: str, dtype: Any) -> str:
    name = _DTYPES.get(str(getattr(dtype, "name", dtype)).removeprefix("torch."))
    if name is None:
        raise TypeError(f"plan: {argument} is {dtype}; allowed are float32, float16 and bfloat16")
    return name


def plan(
    *,
    tokens: int,
    heads_k: int,
    heads_v: int,
    dim_k: int,
    dim_v: int,
    batch: int = 1,
    sequences: int = 0,
    dtype: Any = "bfloat16",
    output_dtype: Any = None,
    gate: Literal["none", "log", "raw"] = "log",
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    state_v_first: bool = False,
    scale: float | None = None,
    backward: bool = False,
    decode_rows: int = 0,
    device: str = "cpu",
    device_index: int = 0,
    options: PlanOptions = DEFAULT_OPTIONS,
) -> Plan:
    """Plans a problem without running it: which backend would do it, how the work is cut, how much memory it takes.

    Args:
        tokens: T; when packed, the rows of the token dimension.
        sequences: 0 for sequences of fixed length, or the number of packed ones (batch 1).
        dtype: of q, k, v; a torch or numpy dtype or its name.
        output_dtype: of o; None is `dtype`.
        backward: plan the gradients too.
        decode_rows: the first rows of a packed batch that are short (`gated_delta_rule_mixed`).
        device: "cpu" or "cuda".

    Raises:
        ValueError: sizes that do not fit together. NotImplementedError: no backend can do it; the sentence says why.
    """
    if device not in _DEVICES:
        raise ValueError(f"plan: device is {device!r}; it must be 'cpu' or 'cuda'")
    if gate not in _GATES:
        raise ValueError(f"plan: gate is {gate!r}; it must be 'none', 'log' or 'raw'")
    modes = (
        _modes.rule(
            gate != "none",
            gate == "raw",
            use_beta_sigmoid_in_kernel,
            allow_neg_eigval,
            use_qk_l2norm_in_kernel,
            state_v_first,
        )
        | (_modes.FOR_BACKWARD if backward else 0)
        | options.modes
    )
    answer = native().plan(
        batch,
        tokens,
        sequences,
        heads_k,
        heads_v,
        dim_k,
        dim_v,
        _dtype_name("dtype", dtype),
        "" if output_dtype is None else _dtype_name("output_dtype", output_dtype),
        _DEVICES[device],
        device_index,
        modes,
        0.0 if scale is None else float(scale),
        0,
        decode_rows,
        options.backend,
        options.threads,
        options.context_split,
    )
    text, forward, backward_, decode = (str(part) for part in answer[:4])
    return Plan(text, forward, backward_, decode, *(int(size) for size in answer[4:]))


def info() -> dict[str, str]:
    """The build, the backends, the processor's features and the plans that are kept, as `name: value`."""
    lines = (line.partition(": ") for line in str(native().info()).splitlines())
    return {name: value for name, _, value in lines}
