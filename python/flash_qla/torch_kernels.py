"""The kernels behind the operators: outputs from torch's allocator, then one native call.

They see plain tensors, below autograd and every mode. Inputs are read in place with any strides as long as the last one
is 1 (slices of a packed q|k|v tensor); a tensor with another last stride is copied. The device and its current stream
travel with the tensors, through DLPack.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from . import _modes
from ._native import native
from .options import ORACLE

__all__ = ["backward", "commit", "decode", "decode_eager", "forward", "forward_eager", "mixed", "mixed_eager"]

# Which gradients are wanted, as bits of the operator's argument `wanted`, in the order of the inputs.
D_Q, D_K, D_V, D_G, D_BETA, D_A_LOG, D_DT_BIAS, D_INITIAL_STATE = (1 << i for i in range(8))

# The position of the pool among the arguments of native().forward, where it is written in place and never copied.
STATE_BIT = 1 << 8


# NOTE: before 2.10 torch exports a tensor that requires a gradient through DLPack only in some of tvm_ffi's ways.
_DETACH = not hasattr(Tensor, "__dlpack_c_exchange_api__")


def exportable(tensors: tuple[Any, ...]) -> tuple[Any, ...]:
    """The tensors as every DLPack takes them."""
    return tuple(x.detach() if x is not None and x.requires_grad else x for x in tensors) if _DETACH else tensors


def copied(arguments: tuple[Any, ...], bits: int) -> tuple[Any, ...]:
    """The arguments, contiguous where a bit is set."""
    return tuple(x.contiguous() if bits >> i & 1 else x for i, x in enumerate(arguments))


def call(function: Callable[..., int], arguments: tuple[Any, ...]) -> None:
    """The native call. It answers, before it computes, with bits for the tensors that have to be contiguous first."""
    bits = function(*arguments)
    if bits:
        function(*copied(arguments, bits))


# torch.set_num_threads holds for this package too, unless the caller asked for a number. (GPUs have no use for it.)
cpu_threads = torch.get_num_threads


def like(x: Tensor, dtype: torch.dtype) -> Tensor:
    """An output. NOTE: torch.empty(shape, dtype=, device=) takes three times as long, and keywords a third more."""
    if dtype is x.dtype and x.is_contiguous():
        return torch.empty_like(x)
    return torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format)


Allocate = Callable[[tuple[int, ...], tuple[int, ...], torch.dtype], Tensor]


def _find_allocators() -> tuple[Allocate | None, Callable[[Tensor], Allocate | None]]:
    """`cpu_allocator` and `gpu_allocator`, private functions of torch that the code of torch.compile allocates with.

    They ask the same allocator for the same stream, past the dispatcher. NOTE: where one of them is missing torch's
    public function does it. They are for plain tensors and below every mode; none sees them.
    """
    try:
        guards: Any = torch._C._dynamo.guards
        on_cpu: Allocate = guards._empty_strided_cpu
        on_gpu: Allocate = guards._empty_strided_cuda
    except AttributeError:
        return None, lambda x: None
    # NOTE: a torch without CUDA does not have these.
    current_gpu: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", lambda: -1)
    count_gpus: Callable[[], int] = getattr(torch._C, "_cuda_getDeviceCount", lambda: 0)
    gpus = 0  # until a tensor on one has come: asking initialises CUDA

    def gpu_allocator(x: Tensor) -> Allocate | None:
        """What makes outputs on the GPU of x, if there is something faster than x.new_empty."""
        nonlocal gpus
        gpus = gpus or count_gpus()
        # NOTE: asked beforehand: it allocates on the current GPU, which might get a context for that.
        return on_gpu if gpus == 1 or x.get_device() == current_gpu() else None

    return on_cpu, gpu_allocator


cpu_allocator, gpu_allocator = _find_allocators()


def allocator_of(x: Tensor) -> Allocate | None:
    """What makes outputs on the device of x, if there is something faster than x.new_empty."""
    return gpu_allocator(x) if x.is_cuda else cpu_allocator if x.is_cpu else None


def empty(allocate: Allocate | None, x: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """A contiguous output on the device of x, whose allocator this is."""
    if allocate is not None and len(shape) == 4:
        a, b, c, d = shape
        matrix = c * d
        outer = b * matrix
        if outer:  # NOTE: else torch has other strides for it
            return allocate((a, b, c, d), (outer, matrix, d, 1), dtype)  # NOTE: no torch.Size
    return x.new_empty(shape, dtype=dtype)


# Tells autograd that these were written in place, as torch's own in-place operators do.
touched: Callable[[tuple[Tensor, ...]], None] = torch._C._increment_version


def forward_eager(
    tensors: tuple[Any, ...], modes: int, scale: float, backend: str | None, threads: int, context_split: int
) -> tuple[Tensor, Tensor | None]:
    """o [B,T,Hv,V] in v's dtype; final states [N,Hv,..] in float32, or None. `tensors` are those of the operator."""
    if _DETACH:
        tensors = exportable(tensors)
    q, k, v, g, beta, A_log, dt_bias, cu_seqlens, initial_state = tensors
    shape = v.shape
    if v.is_cuda:
        allocate = gpu_allocator(v)
    else:
        allocate = cpu_allocator
        threads = threads or cpu_threads()
    o = empty(allocate, v, shape, v.dtype)
    final_state = None
    if modes & _modes.OUTPUT_FINAL_STATE:
        # NOTE: _modes.state_shape() written out, which would ask the tensors for their shapes again.
        # The library refuses an initial state of another shape.
        B, _, Hv, V = shape
        N = B if cu_seqlens is None else cu_seqlens.shape[0] - 1
        K = q.shape[3]
        final_shape = (N, Hv, V, K) if modes & _modes.STATE_V_FIRST else (N, Hv, K, V)
        final_state = empty(allocate, v, final_shape, torch.float64 if backend == ORACLE else torch.float32)
    bits = modes & 0xFFFF
    if backend == ORACLE:
        native().oracle_forward(*(x if x is None else x.contiguous() for x in tensors), final_state, o, bits, scale)
        return o, final_state
    # NOTE: not by way of call(), which would put 23 arguments into a tuple and out again.
    copies = native().forward(
        q, k, v, g, beta, A_log, dt_bias, cu_seqlens, initial_state, final_state, None, None, None, None, None, o,
        bits, scale, 0, 0, backend, threads, context_split,
    )  # fmt: skip
    if copies:
        native().forward(
            *copied(tensors, copies), final_state, None, None, None, None, None, o,
            bits, scale, 0, 0, backend, threads, context_split,
        )  # fmt: skip
    return o, final_state


def forward(*arguments: Any) -> tuple[Tensor, Tensor]:
    """`forward_eager` as an operator: an empty tensor instead of None."""
    o, final_state = forward_eager(arguments[:9], *arguments[9:])
    return o, o.new_empty(0, dtype=torch.float32) if final_state is None else final_state


def backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor | None,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    cu_seqlens: Tensor | None,
    initial_state: Tensor | None,
    d_o: Tensor | None,
    d_final_state: Tensor | None,
    wanted: int,
    modes: int,
    scale: float,
    backend: str | None,
    threads: int,
    context_split: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v, g, beta, A_log, dt_bias and initial_state, each in its input's shape and dtype; those that
    are not wanted are empty tensors."""
    inputs = (q, k, v, g, beta, A_log, dt_bias, initial_state)
    gradients = tuple(like(x, x.dtype) if x is not None and wanted & (1 << i) else None for i, x in enumerate(inputs))
    tensors = (q, k, v, g, beta, A_log, dt_bias, cu_seqlens, initial_state, d_o, d_final_state)
    bits = modes & 0xFFFF
    if backend == ORACLE:
        dense = (x if x is None else x.contiguous() for x in exportable(tensors))
        native().oracle_backward(*dense, *gradients, bits, scale)
    else:
        settings = (bits, scale, backend, threads or cpu_threads(), context_split)
        call(native().backward, (*exportable((*tensors, *gradients)), *settings))
    empty = [x if x is not None else torch.empty(0, dtype=q.dtype, device=q.device) for x in gradients]
    return tuple(empty)  # type: ignore[return-value]


# Positions among the arguments of decode and mixed.
STATE = 8
INTERMEDIATE_STATES = 13
OUTPUT = 16
DECODE_TENSORS = 17
CHECKPOINTS = 12


def decode_eager(arguments: tuple[Any, ...]) -> None:
    """`arguments` are those of `decode`; writes `o`, `state` and `intermediate_states`."""
    if _DETACH:
        arguments = (*exportable(arguments[:DECODE_TENSORS]), *arguments[DECODE_TENSORS:])
    call(native().decode, arguments)
    o, state, buffer = arguments[OUTPUT], arguments[STATE], arguments[INTERMEDIATE_STATES]
    touched((o, state) if buffer is None else (o, state, buffer))


def decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor | None,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    cu_seqlens: Tensor | None,
    state: Tensor,
    state_indices: Tensor | None,
    state_indices_out: Tensor | None,
    has_initial_state: Tensor | None,
    num_accepted: Tensor | None,
    intermediate_states: Tensor | None,
    intermediate_indices: Tensor | None,
    parent_tokens: Tensor | None,
    o: Tensor,
    commit_state: bool,
    modes: int,
    scale: float,
    backend: str | None,
    threads: int,
) -> None:
    """`decode_eager` as an operator."""
    arguments = (
        q, k, v, g, beta, A_log, dt_bias, cu_seqlens, state, state_indices, state_indices_out, has_initial_state,
        num_accepted, intermediate_states, intermediate_indices, parent_tokens, o, commit_state, modes, scale, backend,
        threads or cpu_threads(),
    )  # fmt: skip
    decode_eager(arguments)


def mixed_eager(
    tensors: tuple[Any, ...],
    o: Tensor,
    modes: int,
    scale: float,
    checkpoint_every: int,
    decode_rows: int,
    backend: str | None,
    threads: int,
    context_split: int,
) -> None:
    """`tensors` are the fourteen before `o` of `mixed`; writes `o`, `state` and `checkpoints`."""
    state = tensors[STATE]
    settings = (modes, scale, checkpoint_every, decode_rows, backend, threads or cpu_threads(), context_split)
    # The pool is where rows start and where they end.
    arguments = exportable((*tensors[:STATE], state, *tensors[STATE:], o))
    bits = native().forward(*arguments, *settings)
    if bits & STATE_BIT:
        raise ValueError(
            f"gated_delta_rule_mixed: state has shape {list(state.shape)} and strides {list(state.stride())}; its "
            "inner two dimensions must be contiguous"
        )
    if bits:
        native().forward(*copied(arguments, bits), *settings)
    checkpoints = tensors[CHECKPOINTS]
    touched((o, state) if checkpoints is None else (o, state, checkpoints))


def mixed(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor | None,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    cu_seqlens: Tensor,
    state: Tensor,
    state_indices: Tensor | None,
    state_indices_out: Tensor | None,
    has_initial_state: Tensor | None,
    checkpoints: Tensor | None,
    checkpoint_list: Tensor | None,
    o: Tensor,
    *settings: Any,
) -> None:
    """`mixed_eager` as an operator."""
    tensors = (
        q, k, v, g, beta, A_log, dt_bias, cu_seqlens,
        state, state_indices, state_indices_out, has_initial_state, checkpoints, checkpoint_list,
    )  # fmt: skip
    mixed_eager(tensors, o, *settings)


def commit(
    state: Tensor,
    state_indices: Tensor | None,
    intermediate_states: Tensor,
    intermediate_indices: Tensor | None,
    accepted: Tensor,
    modes: int,
) -> None:
    """Writes `state`."""
    native().commit(state, state_indices, intermediate_states, intermediate_indices, accepted.contiguous(), modes)
    touched((state,))
