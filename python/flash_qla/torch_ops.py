"""The operators `torch.ops.flash_qla.*`: schemas, fake implementations, autograd.

    forward     o and final states; differentiable once
    backward    its gradients; not differentiable
    decode, mixed, commit    in place on pools of states; no gradients

Schemas state what is mutated, fake implementations give shapes and dtypes for `torch.compile` and `torch.export`. What
cannot work, second derivatives and vmap, is refused in a sentence.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from . import _modes, torch_kernels
from .options import ORACLE

__all__ = ["backward", "forward", "is_plain", "refuse_tangents"]

PLAIN_TYPES = frozenset((Tensor, torch.nn.Parameter))

LIBRARY: Any = torch.library.Library("flash_qla", "DEF")  # type: ignore[no-untyped-call]

_INPUTS = "Tensor q, Tensor k, Tensor v, Tensor? g, Tensor? beta, Tensor? A_log, Tensor? dt_bias, Tensor? cu_seqlens"
_PLAN = "int modes, float scale, str? backend, int threads, int context_split"


NO_VMAP = "flash_qla::{} has no vmap rule; put the mapped dimension into the batch dimension of the tensors"
NO_FORWARD_MODE = "flash_qla: the gated delta rule has no forward-mode AD (jvp); use reverse mode (backward, vjp)"


def define(name: str, schema: str, kernel: Callable[..., Any], fake: Callable[..., Any]) -> None:
    """An operator with one kernel for every device; the library refuses a device that it has no backend for."""
    LIBRARY.define(f"{name}{schema}", tags=(torch.Tag.pt2_compliant_tag,))
    for key in ("CPU", "CUDA"):
        LIBRARY.impl(name, kernel, key)
    torch.library.register_fake(f"flash_qla::{name}", fake, lib=LIBRARY)

    def no_vmap(*_: Any) -> Any:
        raise NotImplementedError(NO_VMAP.format(name))

    torch.library.register_vmap(f"flash_qla::{name}", no_vmap, lib=LIBRARY)


def _forward_fake(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor | None,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    cu_seqlens: Tensor | None,
    initial_state: Tensor | None,
    modes: int,
    scale: float,
    backend: str | None,
    threads: int,
    context_split: int,
) -> tuple[Tensor, Tensor]:
    dtype = torch.float64 if backend == ORACLE else torch.float32
    shape = _modes.state_shape(q, v, cu_seqlens, modes) if modes & _modes.OUTPUT_FINAL_STATE else (0,)
    return torch_kernels.like(v, v.dtype), v.new_empty(shape, dtype=dtype)


def _backward_fake(*arguments: Any) -> tuple[Tensor, ...]:
    inputs = (*arguments[:7], arguments[8])
    wanted = arguments[11]
    empty = arguments[0].new_empty(0)
    return tuple(
        torch_kernels.like(x, x.dtype) if x is not None and wanted & (1 << i) else empty.clone()
        for i, x in enumerate(inputs)
    )


def _nothing(*_: Any) -> None:
    """The fake of an operator that only writes to its arguments."""


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs[:9])
    ctx.plan = inputs[9:]
    ctx.set_materialize_grads(False)


def _gradients(ctx: Any, d_o: Tensor | None, d_final_state: Tensor | None) -> tuple[Any, ...]:
    if not ctx.plan[0] & _modes.OUTPUT_FINAL_STATE:
        d_final_state = None  # of the empty tensor that stands for it
    tensors = ctx.saved_tensors
    needs = ctx.needs_input_grad
    # In the order of torch_kernels.backward's results; cu_seqlens has no gradient.
    positions = (0, 1, 2, 3, 4, 5, 6, 8)
    wanted = sum(1 << i for i, position in enumerate(positions) if needs[position])
    result: list[Tensor | None] = [None] * len(needs)
    if (d_o is None and d_final_state is None) or wanted == 0:
        return tuple(result)
    gradients = backward(*tensors, d_o, d_final_state, wanted, *ctx.plan)
    for position, gradient in zip(positions, gradients):
        if needs[position]:
            result[position] = gradient
    return tuple(result)


def _no_second_derivative(ctx: Any, *_: Any) -> Any:
    raise NotImplementedError(
        "flash_qla: the gradient of the gated delta rule cannot be differentiated again (no second derivatives); "
        "use it without create_graph, or detach its gradients"
    )


define(
    "forward", f"({_INPUTS}, Tensor? initial_state, {_PLAN}) -> (Tensor, Tensor)", torch_kernels.forward, _forward_fake
)
define(
    "backward",
    f"({_INPUTS}, Tensor? initial_state, Tensor? d_o, Tensor? d_final_state, int wanted, {_PLAN}) -> "
    "(Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    torch_kernels.backward,
    _backward_fake,
)
define(
    "decode",
    f"({_INPUTS}, Tensor(a!) state, Tensor? state_indices, Tensor? state_indices_out, Tensor? has_initial_state, "
    "Tensor? num_accepted, Tensor(b!)? intermediate_states, Tensor? intermediate_indices, Tensor? parent_tokens, "
    "Tensor(c!) o, bool commit_state, int modes, float scale, str? backend, int threads) -> ()",
    torch_kernels.decode,
    _nothing,
)
define(
    "mixed",
    f"({_INPUTS}, Tensor(a!) state, Tensor? state_indices, Tensor? state_indices_out, Tensor? has_initial_state, "
    "Tensor(b!)? checkpoints, Tensor? checkpoint_list, Tensor(c!) o, int modes, float scale, int checkpoint_every, "
    "int decode_rows, str? backend, int threads, int context_split) -> ()",
    torch_kernels.mixed,
    _nothing,
)
define(
    "commit",
    "(Tensor(a!) state, Tensor? state_indices, Tensor intermediate_states, Tensor? intermediate_indices, "
    "Tensor accepted, int modes) -> ()",
    torch_kernels.commit,
    _nothing,
)
torch.library.register_autograd("flash_qla::forward", _gradients, setup_context=_setup_context, lib=LIBRARY)
torch.library.register_autograd("flash_qla::backward", _no_second_derivative, lib=LIBRARY)


class _Differentiable(torch.autograd.Function):
    """Base of the two operators as autograd functions for eager mode.

    torch.library has registered the same formulas with the operators, which serves torch.compile. In eager mode its
    Python layers take 130 us a call, and it does not know torch.func.grad and vjp; these functions do.
    """

    @staticmethod
    def vmap(info: Any, in_dims: Any, *arguments: Any) -> Any:
        raise NotImplementedError(NO_VMAP.format("forward"))

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        raise NotImplementedError(NO_FORWARD_MODE)


class _Forward(_Differentiable):
    @staticmethod
    def forward(*arguments: Any) -> Any:
        if is_plain(arguments[:9]):
            return torch_kernels.forward(*arguments)
        return torch.ops.flash_qla.forward(*arguments)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        _setup_context(ctx, inputs, output)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return _gradients(ctx, *gradients)


class _Backward(_Differentiable):
    @staticmethod
    def forward(*arguments: Any) -> Any:
        return torch.ops.flash_qla.backward(*arguments)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return _no_second_derivative(ctx)


def forward(*arguments: Any) -> Any:
    """The operator `forward`, with gradients in every mode."""
    if torch.compiler.is_compiling():
        return torch.ops.flash_qla.forward(*arguments)
    return _Forward.apply(*arguments)  # type: ignore[no-untyped-call]


def backward(*arguments: Any) -> Any:
    """The operator `backward`; it refuses to be differentiated in every mode."""
    if torch.compiler.is_compiling():
        return torch.ops.flash_qla.backward(*arguments)
    if is_plain(arguments[:11]):
        return torch_kernels.backward(*arguments)
    return _Backward.apply(*arguments)  # type: ignore[no-untyped-call]


def refuse_tangents(tensors: tuple[Any, ...]) -> None:
    """Forward-mode derivatives would be dropped without a word."""
    if torch.compiler.is_compiling() or torch.autograd.forward_ad._current_level < 0:
        return
    unpack: Any = torch.autograd.forward_ad.unpack_dual
    for x in tensors:
        if isinstance(x, Tensor) and unpack(x).tangent is not None:
            raise NotImplementedError(NO_FORWARD_MODE)


def _plain_test() -> Callable[[tuple[Any, ...]], bool]:
    """Makes `is_plain`, around private functions of torch that say whether something would see an operator go by.

    NOTE: where one of these is missing nothing counts as plain, and every call takes the operator.
    """
    try:
        c = torch._C
        dispatch_modes = c._len_torch_dispatch_stack  # FakeTensorMode, FlopCounterMode, make_fx ...
        function_modes = c._len_torch_function_stack
        functorch = c._functorch.peek_interpreter_stack  # grad, vmap, functionalize
        tracing = c._is_tracing  # torch.jit.trace
        forward_ad = torch.autograd.forward_ad
        _ = forward_ad._current_level
    except AttributeError:
        return lambda tensors: False
    gradients = torch.is_grad_enabled

    def is_plain(tensors: tuple[Any, ...]) -> bool:
        """Whether these are ordinary tensors in ordinary eager mode, none of which needs a gradient. The first is q."""
        if (
            dispatch_modes()
            or function_modes()
            or tracing()
            or functorch() is not None
            or forward_ad._current_level >= 0
        ):
            return False
        differentiable = gradients()
        for x in tensors:
            if x is not None:
                # NOTE: `is` before `in`, which asks for a hash and takes longer.
                if type(x) is not Tensor and type(x) not in PLAIN_TYPES:
                    return False
                if differentiable and x.requires_grad:
                    return False
        q: Tensor = tensors[0]
        return q.is_cuda or q.is_cpu

    return is_plain


is_plain = _plain_test()
