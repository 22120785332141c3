"""torch tensors: dtypes, then the operator. Imported only when a caller has torch tensors.

Two ways lead to `torch_kernels`, which makes the native call:

    torch.ops.flash_qla.forward(...)   autograd, torch.compile, torch.func, every dispatch mode
    torch_kernels.forward_eager(...)         plain tensors in eager mode without gradients

The second exists because the dispatcher's round trip through two Python kernels (autograd, then CPU) costs several
times what the native call does; `is_plain` says when nobody could tell the difference.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import _modes, torch_kernels, torch_ops
from .options import PlanOptions

__all__ = ["commit", "decode", "forward", "mixed"]

_IO = (torch.float32, torch.float16, torch.bfloat16)
ORACLE = "oracle"  # not a backend of the library: flash_qla.testing's way to float64


def check_tensors(function: str, names: tuple[str, ...], tensors: tuple[Any, ...]) -> None:
    """Every argument that is given must be a tensor."""
    for name, x in zip(names, tensors):
        if x is not None and not isinstance(x, Tensor):
            raise TypeError(f"{function}: {name} is a {type(x).__name__}; q is a torch tensor, so it must be one too")


def common_io(function: str, q: Tensor, k: Tensor, v: Tensor, backend: str) -> torch.dtype:
    """The dtype that q, k and v are computed in: theirs, or float32 when they differ."""
    io = q.dtype
    if io == k.dtype and io == v.dtype and io in _IO:
        return io
    allowed = (*_IO, torch.float64) if backend == ORACLE else _IO
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.dtype not in allowed:
            raise TypeError(
                f"{function}: {name} is {x.dtype}; q, k and v may be float32, float16 or bfloat16 "
                "(flash_qla.testing computes in float64)"
            )
    if backend == ORACLE:
        return torch.promote_types(torch.promote_types(q.dtype, k.dtype), v.dtype)
    return io if io == k.dtype and io == v.dtype else torch.float32


def narrow(x: Tensor | None, backend: str) -> Tensor | None:
    """float64 gates, betas and states as float32; the library has no wider type."""
    if x is None or x.dtype != torch.float64 or backend == ORACLE:
        return x
    return x.float()


def is_plain(tensors: tuple[Any, ...]) -> bool:
    """Whether these are ordinary tensors in ordinary eager mode, none of which needs a gradient."""
    if torch_ops.something_watches():
        return False
    grad = torch.is_grad_enabled()
    for x in tensors:
        if x is not None and (type(x) not in torch_ops.PLAIN_TYPES or (grad and x.requires_grad)):
            return False
    return True


NAMES = ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "cu_seqlens", "initial_state")


def forward(
    function: str,
    tensors: tuple[Any, ...],
    modes: int,
    scale: float,
    options: PlanOptions,
    context_split: int,
    output_dtype: torch.dtype,
) -> tuple[Tensor, Tensor | None]:
    """o and the final states (or None) of `functions.chunk_gated_delta_rule`; `tensors` as in `functions._forward`."""
    check_tensors(function, NAMES, tensors)
    q, k, v, g, beta, A_log, dt_bias, cu_seqlens, initial_state = tensors
    backend = options.backend
    io = common_io(function, q, k, v, backend)
    arguments = (
        q if q.dtype == io else q.to(io),
        k if k.dtype == io else k.to(io),
        v if v.dtype == io else v.to(io),
        narrow(g, backend),
        narrow(beta, backend),
        narrow(A_log, backend),
        narrow(dt_bias, backend),
        cu_seqlens,
        narrow(initial_state, backend),
    )
    modes |= options.modes
    if torch.compiler.is_compiling() or not is_plain(arguments):
        o, final_state = torch.ops.flash_qla.forward(*arguments, modes, scale, backend, options.threads, context_split)
    else:
        o, final_state = torch_kernels.forward_eager(*arguments, modes, scale, backend, options.threads, context_split)
    if o.dtype != output_dtype:
        o = o.to(output_dtype)
    return o, final_state if modes & _modes.OUTPUT_FINAL_STATE else None


_POOLS = ("state", "state_indices", "state_indices_out", "has_initial_state")
_DECODE_NAMES = (
    *NAMES[:8],
    *_POOLS,
    "num_accepted",
    "intermediate_states",
    "intermediate_indices",
    "parent_tokens",
    "out",
)
_MIXED_NAMES = (*NAMES[:8], *_POOLS, "checkpoints", "checkpoint_list", "out")
_COMMIT_NAMES = ("state", "state_indices", "intermediate_states", "intermediate_indices", "accepted")


def _serving_arguments(
    function: str,
    names: tuple[str, ...],
    inputs: tuple[Any, ...],
    pools: tuple[Any, ...],
    out: Any,
    output_dtype: torch.dtype | None,
    backend: str,
) -> tuple[Any, ...]:
    """Inputs, pools and the output, in the order of the operators."""
    check_tensors(function, names, (*inputs, *pools, out))
    q, k, v = inputs[:3]
    io = common_io(function, q, k, v, backend)
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (*inputs, *pools)):
        raise NotImplementedError(
            f"{function}: an input requires a gradient, and functions on pools of states have none; call it under "
            "torch.no_grad() or torch.inference_mode(), or use chunk_gated_delta_rule"
        )
    if out is None:
        out = v.new_empty((*q.shape[:2], *v.shape[2:]), dtype=io if output_dtype is None else output_dtype)
    if q.dtype == io and k.dtype == io and v.dtype == io:
        return (*inputs, *pools, out)
    return (q.to(io), k.to(io), v.to(io), *inputs[3:], *pools, out)


def decode(
    function: str,
    inputs: tuple[Any, ...],
    pools: tuple[Any, ...],
    modes: int,
    scale: float,
    commit_state: bool,
    out: Any,
    output_dtype: torch.dtype | None,
    options: PlanOptions,
) -> Tensor:
    """`serving.gated_delta_rule_decode` and `..._verify`."""
    arguments = _serving_arguments(function, _DECODE_NAMES, inputs, pools, out, output_dtype, options.backend)
    settings = (commit_state, modes | options.modes, scale, options.backend, options.threads)
    if torch.compiler.is_compiling() or not is_plain(arguments):
        torch.ops.flash_qla.decode(*arguments, *settings)
    else:
        torch_kernels.decode(*arguments, *settings)
    result: Tensor = arguments[-1]
    return result


def mixed(
    function: str,
    inputs: tuple[Any, ...],
    pools: tuple[Any, ...],
    modes: int,
    scale: float,
    numbers: tuple[int, int],
    out: Any,
    output_dtype: torch.dtype | None,
    options: PlanOptions,
) -> Tensor:
    """`serving.gated_delta_rule_mixed`."""
    arguments = _serving_arguments(function, _MIXED_NAMES, inputs, pools, out, output_dtype, options.backend)
    settings = (
        modes | options.modes,
        scale,
        *numbers,
        options.backend,
        options.threads,
        options.context_split,
    )
    if torch.compiler.is_compiling() or not is_plain(arguments):
        torch.ops.flash_qla.mixed(*arguments, *settings)
    else:
        torch_kernels.mixed(*arguments, *settings)
    result: Tensor = arguments[-1]
    return result


def commit(function: str, tensors: tuple[Any, ...], modes: int) -> None:
    """`serving.gated_delta_rule_commit`."""
    check_tensors(function, _COMMIT_NAMES, tensors)
    if torch.compiler.is_compiling() or not is_plain(tensors):
        torch.ops.flash_qla.commit(*tensors, modes)
    else:
        torch_kernels.commit(*tensors, modes)
