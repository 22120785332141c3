"""torch tensors: dtypes, then the operator. Imported only when a caller has torch tensors.

Two ways lead to `torch_kernels`, which makes the native call:

    torch.ops.flash_qla.forward(...)   autograd, torch.compile, torch.func, every dispatch mode
    torch_kernels.forward_eager(...)   plain tensors in eager mode without gradients

The second exists because the dispatcher's round trip through two Python kernels (autograd, then CPU) costs several
times what the native call does; `torch_ops.is_plain` says when nobody could tell the difference.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import _modes, torch_kernels, torch_ops
from .functions import MAX_K
from .options import ORACLE, PlanOptions

__all__ = ["backward_pass", "commit", "decode", "forward", "forward_at_once", "forward_pass", "mixed"]

# NOTE: True only where the compiler reads this. (Whatever else traces has tensors of its own, or a mode.)
is_dynamo_compiling = torch.compiler.is_dynamo_compiling

# Under names of this module, which are found sooner than attributes of another.
is_plain = torch_ops.is_plain
forward_eager = torch_kernels.forward_eager
decode_eager = torch_kernels.decode_eager
empty, allocator_of = torch_kernels.empty, torch_kernels.allocator_of
cpu_threads = torch_kernels.cpu_threads

_IO = (torch.float32, torch.float16, torch.bfloat16)


def check_tensors(function: str, names: tuple[str, ...], tensors: tuple[Any, ...]) -> None:
    """Every argument that is given must be a tensor."""
    for name, x in zip(names, tensors):
        if x is not None and not isinstance(x, Tensor):
            raise TypeError(f"{function}: {name} is a {type(x).__name__}; it must be a torch tensor like the others")


def check_devices(function: str, names: tuple[str, ...], tensors: tuple[Any, ...]) -> None:
    """All tensors are where the first one is. NOTE: the operator would answer one on `meta` with shapes alone."""
    device = tensors[0].device
    for name, x in zip(names, tensors):
        if x is not None and x.device != device:
            raise ValueError(f"{function}: {name} is on {x.device}; it must be on {device} like {names[0]}")


def common_io(function: str, q: Tensor, k: Tensor, v: Tensor, backend: str) -> torch.dtype:
    """The dtype that q, k and v are computed in: theirs, or float32 when they differ."""
    io = q.dtype
    if io is k.dtype and io is v.dtype and io in _IO:
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


def narrow(tensors: tuple[Any, ...], backend: str) -> tuple[Any, ...]:
    """float64 gates, betas and states as float32; the library has no wider type. q, k and v come first, and stay."""
    if backend == ORACLE:
        return tensors
    for x in tensors[3:]:
        if x is not None and x.dtype is torch.float64:
            rest = (x.float() if x is not None and x.dtype == torch.float64 else x for x in tensors[3:])
            return (*tensors[:3], *rest)
    return tensors


NAMES = ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "cu_seqlens", "initial_state")


def forward_at_once(
    tensors: tuple[Any, ...], modes: int, scale: float | None, options: PlanOptions, context_split: int
) -> tuple[Tensor, Tensor | None] | None:
    """What `forward` gives for plain tensors that the library takes as they are; None for all others.

    Little is asked beforehand: before it computes, the library checks all that Python would, in a fraction of the time.
    Whatever fails is for `forward` and the checks before it, which convert, or raise what FLA raises.
    """
    backend = options.backend
    if backend == ORACLE or is_dynamo_compiling() or not is_plain(tensors):
        return None
    if scale is None:
        scale = 0.0
    elif isinstance(scale, (float, int)) and scale:
        scale = float(scale)
    else:
        return None
    q = tensors[0]
    try:
        # NOTE: the library would say so too, but an exception takes 15 us, and callers who mix these two exist.
        if q.dtype is not tensors[2].dtype:
            return None
        # FLA refuses a larger K, as the library does on a GPU; on the CPU it has the reference backend for it.
        if not q.is_cuda and q.shape[3] > MAX_K:
            return None
        return forward_eager(tensors, modes | options.modes, scale, backend or None, options.threads, context_split)
    except Exception:  # NOTE: no input has been written, so that the second attempt meets what the first one met
        return None


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
    plain = not is_dynamo_compiling() and is_plain(tensors)
    if not plain:
        check_tensors(function, NAMES, tensors)
        torch_ops.refuse_tangents(tensors)
    check_devices(function, NAMES, tensors)
    q, k, v = tensors[0], tensors[1], tensors[2]
    backend = options.backend
    io = common_io(function, q, k, v, backend)
    if q.dtype is not io or k.dtype is not io or v.dtype is not io:
        tensors = (q.to(io), k.to(io), v.to(io), *tensors[3:])
    tensors = narrow(tensors, backend)
    settings = (modes | options.modes, scale, backend or None, options.threads, context_split)
    o, final_state = forward_eager(tensors, *settings) if plain else torch_ops.forward(*tensors, *settings)
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


def _check_serving(function: str, names: tuple[str, ...], tensors: tuple[Any, ...]) -> None:
    """What the operators must not get: other things than tensors, and inputs that want a gradient."""
    check_tensors(function, names, tensors)
    torch_ops.refuse_tangents(tensors)
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors):
        raise NotImplementedError(
            f"{function}: an input requires a gradient, and functions on pools of states have none; call it under "
            "torch.no_grad() or torch.inference_mode(), or use chunk_gated_delta_rule"
        )


def decode(
    function: str,
    tensors: tuple[Any, ...],
    modes: int,
    scale: float,
    commit_state: bool,
    out: Any,
    output_dtype: torch.dtype | None,
    options: PlanOptions,
) -> Tensor:
    """`serving.gated_delta_rule_decode` and `..._verify`; `tensors` in the order of the operator."""
    plain = not is_dynamo_compiling() and is_plain(tensors if out is None else (*tensors, out))
    if not plain:
        _check_serving(function, _DECODE_NAMES, (*tensors, out))
    q, k, v = tensors[0], tensors[1], tensors[2]
    io = q.dtype
    if io is not k.dtype or io is not v.dtype or io not in _IO:
        io = common_io(function, q, k, v, options.backend)
        tensors = (q.to(io), k.to(io), v.to(io), *tensors[3:])
    o: Tensor = out
    if o is None:
        o = (
            empty(allocator_of(v), v, v.shape, output_dtype or io)
            if plain
            else torch_kernels.like(v, output_dtype or io)
        )
    modes |= options.modes
    if plain:
        threads = options.threads or cpu_threads()
        decode_eager((*tensors, o, commit_state, modes, scale, options.backend or None, threads))
    else:
        torch.ops.flash_qla.decode(*tensors, o, commit_state, modes, scale, options.backend or None, options.threads)
    return o


def mixed(
    function: str,
    tensors: tuple[Any, ...],
    modes: int,
    scale: float,
    numbers: tuple[int, int],
    out: Any,
    output_dtype: torch.dtype | None,
    options: PlanOptions,
) -> Tensor:
    """`serving.gated_delta_rule_mixed`; `tensors` in the order of the operator."""
    plain = not is_dynamo_compiling() and is_plain(tensors if out is None else (*tensors, out))
    if not plain:
        _check_serving(function, _MIXED_NAMES, (*tensors, out))
    q, k, v = tensors[0], tensors[1], tensors[2]
    io = common_io(function, q, k, v, options.backend)
    if q.dtype is not io or k.dtype is not io or v.dtype is not io:
        tensors = (q.to(io), k.to(io), v.to(io), *tensors[3:])
    o: Tensor = torch_kernels.like(v, output_dtype or io) if out is None else out
    settings = (modes | options.modes, scale, *numbers, options.backend or None, options.threads, options.context_split)
    if plain:
        torch_kernels.mixed_eager(tensors, o, *settings)
    else:
        torch.ops.flash_qla.mixed(*tensors, o, *settings)
    return o


def commit(function: str, tensors: tuple[Any, ...], modes: int) -> None:
    """`serving.gated_delta_rule_commit`."""
    check_tensors(function, _COMMIT_NAMES, tensors)
    if is_dynamo_compiling() or not is_plain(tensors):
        torch.ops.flash_qla.commit(*tensors, modes)
    else:
        torch_kernels.commit(*tensors, modes)  # type: ignore[call-arg]


@torch.no_grad()
def forward_pass(
    function: str,
    inputs: tuple[Any, ...],
    initial_state: Tensor | None,
    modes: int,
    scale: float,
    options: PlanOptions,
) -> tuple[Tensor, Tensor | None, Tensor]:
    """o, h (or None) and the final states of `passes.chunk_gated_delta_rule_fwd`."""
    q, k, v, cu_seqlens = inputs[0], inputs[1], inputs[2], inputs[7]
    shape = _modes.state_shape(q, v, cu_seqlens, modes)
    # The start in float32, overwritten by the end.
    if initial_state is None:
        state = q.new_zeros(shape, dtype=torch.float32)
    else:
        state = initial_state.detach().to(torch.float32, memory_format=torch.contiguous_format, copy=True)
    h = None
    rows = 0
    if modes & _modes.CHECKPOINT_MASK:
        lengths = [q.shape[1]] * q.shape[0] if cu_seqlens is None else cu_seqlens.diff().tolist()
        rows = sum(-(-length // 64) for length in lengths)
        # On a GPU the library does not see the lengths, and wants room for the worst ones.
        T, N = q.shape[1], len(lengths)
        room = rows if q.is_cpu or cu_seqlens is None else (T + 63 * min(N, T)) // 64
        h = k.new_empty((room, *shape[1:]))
    tensors = (*inputs, state, None, None, None, h, None)
    o = mixed(function, tensors, modes, scale, (0, 0), None, None, options)
    return o.to(q.dtype), h if h is None else h[:rows].view(q.shape[0], -1, *shape[1:]), state


@torch.no_grad()
def backward_pass(
    function: str,
    inputs: tuple[Any, ...],
    d_o: Tensor | None,
    d_final_state: Tensor | None,
    modes: int,
    scale: float,
    options: PlanOptions,
    context_split: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None]:
    """The results of `passes.chunk_gated_delta_rule_bwd`."""
    check_tensors(function, (*NAMES, "do", "dht"), (*inputs, d_o, d_final_state))
    q, k, v, g, beta, A_log, dt_bias, cu_seqlens, h0 = inputs
    io = common_io(function, q, k, v, options.backend)
    state = None if h0 is None else h0.float()
    k_ = torch_kernels
    wanted = k_.D_Q | k_.D_K | k_.D_V | k_.D_G | k_.D_BETA | (0 if h0 is None else k_.D_INITIAL_STATE)
    gradients = torch_ops.backward(
        *(x.to(io) for x in (q, k, v)),
        g,
        beta,
        A_log,
        dt_bias,
        cu_seqlens,
        state,
        d_o,
        d_final_state,
        wanted,
        modes | options.modes,
        scale,
        options.backend or None,
        options.threads,
        context_split,
    )
    dq, dk, dv, dg, dbeta, _, _, dh0 = gradients
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), dbeta, dg, None if h0 is None else dh0
