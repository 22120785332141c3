"""Inputs, the oracle's answers and the comparison that the tests share.

An instance is a dictionary of keyword arguments of `chunk_gated_delta_rule`, so that a test may change one and call
again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from flash_qla import testing, torch_kernels

Arguments = dict[str, Any]

# What may have a gradient, in the order of the reports.
DIFFERENTIABLE = ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "initial_state")


def draw(
    *,
    B: int = 1,
    T: int = 70,
    Hk: int = 2,
    Hv: int = 4,
    K: int = 32,
    V: int = 16,
    dtype: torch.dtype = torch.float32,
    gate_dtype: torch.dtype = torch.float32,
    state_dtype: torch.dtype = torch.float32,
    gate: str = "log",
    beta: str = "value",
    lengths: Iterable[int] | None = None,
    index_dtype: torch.dtype = torch.int64,
    h0: bool = True,
    l2norm: bool = False,
    state_v_first: bool = False,
    seed: int = 0,
) -> Arguments:
    """An instance with values such as models have. With `lengths` it is packed, and T rows at least.

    gate: "log", "raw" or "none"; beta: "value", "logit", "negative" (twice the sigmoid) or "none".
    """
    rng = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=rng)

    def uniform(*shape: int) -> Tensor:
        return torch.rand(shape, generator=rng)

    arguments: Arguments = {"output_final_state": True}
    N = B
    if lengths is not None:
        lengths = list(lengths)
        N, B = len(lengths), 1
        T = max(T, sum(lengths))
        offsets = [sum(lengths[:i]) for i in range(N + 1)]
        arguments["cu_seqlens"] = torch.tensor(offsets, dtype=index_dtype)
    q, k = normal(B, T, Hk, K), normal(B, T, Hk, K)
    if not l2norm:
        q, k = torch.nn.functional.normalize(q, dim=-1), torch.nn.functional.normalize(k, dim=-1)
    arguments.update(q=q.to(dtype), k=k.to(dtype), v=normal(B, T, Hv, V).to(dtype))
    if gate == "raw":
        arguments.update(
            g=normal(B, T, Hv).to(gate_dtype),
            A_log=(uniform(Hv) * 4 - 3).to(gate_dtype),
            dt_bias=normal(Hv).to(gate_dtype),
            use_gate_in_kernel=True,
        )
    else:
        arguments["g"] = None if gate == "none" else torch.nn.functional.logsigmoid(normal(B, T, Hv) + 2).to(gate_dtype)
    if beta == "none":
        arguments["beta"] = None
    elif beta == "value":
        arguments["beta"] = uniform(B, T, Hv).to(gate_dtype)
    else:
        arguments["beta"] = normal(B, T, Hv).to(gate_dtype)
        arguments["use_beta_sigmoid_in_kernel"] = True
        arguments["allow_neg_eigval"] = beta == "negative"
    if h0:
        arguments["initial_state"] = (0.3 * normal(N, Hv, *((V, K) if state_v_first else (K, V)))).to(state_dtype)
    if l2norm:
        arguments["use_qk_l2norm_in_kernel"] = True
    if state_v_first:
        arguments["state_v_first"] = True
    return arguments


def with_tensors(arguments: Arguments, change: Callable[[str, Tensor], Tensor]) -> Arguments:
    """The instance with `change(name, tensor)` for each floating-point tensor."""
    return {
        name: change(name, x) if isinstance(x, Tensor) and x.is_floating_point() else x for name, x in arguments.items()
    }


def leaves(arguments: Arguments, names: Iterable[str] = DIFFERENTIABLE) -> Arguments:
    """The instance with fresh leaves that require a gradient for `names`, in the layout of the originals."""
    names = tuple(names)
    return with_tensors(arguments, lambda name, x: x.detach().clone().requires_grad_(name in names))


def doubles(arguments: Arguments) -> Arguments:
    return with_tensors(arguments, lambda name, x: x.detach().double())


def weights(o: Tensor, final_state: Tensor | None, seed: int = 1) -> tuple[Tensor, Tensor | None]:
    """Incoming gradients. In float32 and rounded to bfloat16, so that any dtype of the output holds them."""
    rng = torch.Generator().manual_seed(seed)
    d_o = torch.randn(o.shape, generator=rng).bfloat16().float()
    d_state = None if final_state is None else torch.randn(final_state.shape, generator=rng).bfloat16().float()
    return d_o, d_state


def gradients(
    function: Callable[..., tuple[Tensor, Tensor | None]], arguments: Arguments, names: Iterable[str] = DIFFERENTIABLE
) -> tuple[Tensor, Tensor | None, dict[str, Tensor]]:
    """o, the final state, and the gradients of <weights, both> by name."""
    arguments = leaves(arguments, names)
    o, final_state = function(**arguments)
    d_o, d_state = weights(o, final_state)
    outputs, incoming = [o], [d_o.to(o)]
    if final_state is not None:
        outputs.append(final_state)
        incoming.append(d_state.to(final_state))
    wanted = {name: x for name, x in arguments.items() if isinstance(x, Tensor) and x.requires_grad}
    found = torch.autograd.grad(outputs, list(wanted.values()), incoming, allow_unused=True)
    return o.detach(), None if final_state is None else final_state.detach(), dict(zip(wanted, found))


def oracle(arguments: Arguments) -> tuple[Tensor, Tensor | None]:
    """o and the final state, float64."""
    with torch.no_grad():
        return testing.oracle(**doubles(arguments))


def oracle_gradients(arguments: Arguments, names: Iterable[str] = DIFFERENTIABLE) -> Any:
    """As `gradients`, by the oracle."""
    return gradients(testing.oracle, doubles(arguments), names)


def head_axis(name: str, x: Tensor) -> int:
    """Where the heads are: token tensors [B,T,H,..], states [N,H,..], parameters [H]."""
    if x.dim() == 1:
        return 0
    return 1 if "state" in name else 2


# Relative L2 error of a head. float32: the library's own limit, cli/cases/tolerance.cpp; 16 bits: twice the errors of
# the best other implementations listed there, since one head has fewer roundings to average over than a whole tensor.
_LIMITS_BF16 = {"o": 8e-3, "q": 8e-3, "k": 1.1e-2, "v": 8e-3, "beta": 1e-2, "g": 1.2e-2, "initial_state": 6e-3}


def limit(name: str, dtype: torch.dtype) -> float:
    if dtype == torch.float64:
        return 1e-12
    if dtype == torch.float32:
        return 1e-5
    bf16 = _LIMITS_BF16.get(name, 1e-2)
    return bf16 if dtype == torch.bfloat16 else max(bf16 / 8, 1e-5)


def assert_close(
    name: str, got: Tensor, want: Tensor, relative: float, floor: float = 1e-2, absolute: float = 1e-7
) -> None:
    """Relative L2 error of each head; `floor` times the norm of an average head counts where a head is nearly zero."""
    assert got.shape == want.shape, f"{name} has shape {list(got.shape)}, wanted {list(want.shape)}"
    axis = head_axis(name, want)
    got, want = (x.detach().double().movedim(axis, 0).reshape(want.shape[axis], -1) for x in (got, want))
    assert torch.equal(got.isfinite(), want.isfinite()), f"{name}: NaN or infinite where the other is not"
    norms = want.norm(dim=1)
    scale = torch.maximum(norms, floor * norms.square().mean().sqrt())
    errors = (got - want).norm(dim=1) / (scale + absolute * want.shape[1] ** 0.5 / max(relative, 1e-300))
    worst = int(errors.argmax()) if errors.numel() else 0
    if errors.numel() and float(errors[worst]) > relative:
        at = int((got[worst] - want[worst]).abs().argmax())
        raise AssertionError(
            f"{name}: head {worst} has a relative error of {float(errors[worst]):.3g}, allowed is {relative:.3g}; "
            f"worst element {at} is {float(got[worst, at]):.6g}, wanted {float(want[worst, at]):.6g}"
        )


@contextlib.contextmanager
def native_calls() -> Iterator[list[tuple[Any, ...]]]:
    """The arguments of each native call."""
    calls: list[tuple[Any, ...]] = []

    class Spy:
        def __init__(self, native: Any) -> None:
            self.native = native

        def __getattr__(self, name: str) -> Any:
            def call(*arguments: Any) -> Any:
                calls.append(arguments)
                return getattr(self.native, name)(*arguments)

            return call

    original = torch_kernels.native
    torch_kernels.native = lambda: Spy(original())
    try:
        yield calls
    finally:
        torch_kernels.native = original
