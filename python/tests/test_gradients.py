"""Gradients: against finite differences, for every subset of inputs and outputs, in every dtype, and what has none."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from helpers import (
    DIFFERENTIABLE,
    Arguments,
    assert_close,
    doubles,
    draw,
    gradients,
    leaves,
    limit,
    oracle,
    oracle_gradients,
    weights,
)
from torch import Tensor

from flash_qla import PlanOptions, chunk_gated_delta_rule, fused_recurrent_gated_delta_rule, testing

OPTIONS: dict[str, dict[str, Any]] = {
    "log": {},
    "raw": {"gate": "raw", "beta": "logit"},
    "negative eigenvalues": {"gate": "raw", "beta": "negative", "l2norm": True, "state_v_first": True},
    "no gate, no beta": {"gate": "none", "beta": "none", "l2norm": True},
    "no initial state": {"h0": False},
    "packed": {"lengths": [3, 0, 1], "T": 5, "gate": "raw"},
}


def differentiable(arguments: Arguments) -> list[str]:
    return [name for name in DIFFERENTIABLE if isinstance(arguments.get(name), Tensor)]


# ------------------------------------------------------------------------------------------- finite differences


@pytest.mark.parametrize("case", OPTIONS)
def test_gradcheck_of_the_oracle(case: str) -> None:
    """Every element of every gradient in double, with absent gradients of either output."""
    options = {"B": 2, "T": 4, "Hk": 1, "Hv": 2, "K": 3, "V": 2, **OPTIONS[case]}
    arguments = doubles(draw(**options))
    names = differentiable(arguments)

    def function(*tensors: Tensor) -> Any:
        return testing.oracle(**{**arguments, **dict(zip(names, tensors))})

    torch.autograd.gradcheck(function, [arguments[name].requires_grad_() for name in names], nondet_tol=0.0)


@pytest.mark.parametrize("case", OPTIONS)
@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_gradcheck_of_the_backends(case: str, backend: str) -> None:
    """The same with float32 arithmetic inside: steps of 1e-2, which float32 sees, in float64 shells."""
    options = {"B": 1, "T": 5, "Hk": 1, "Hv": 2, "K": 4, "V": 3, **OPTIONS[case]}
    arguments = draw(**options)
    names = differentiable(arguments)

    def function(*tensors: Tensor) -> Any:
        narrow = dict(zip(names, (x.float() for x in tensors)))
        outputs = chunk_gated_delta_rule(**{**arguments, **narrow}, options=PlanOptions(backend=backend))
        return tuple(x.double() for x in outputs)

    inputs = [arguments[name].double().requires_grad_() for name in names]
    torch.autograd.gradcheck(function, inputs, eps=1e-2, atol=2e-3, rtol=2e-3, check_undefined_grad=False)


@pytest.mark.parametrize("case", OPTIONS)
def test_slope_along_a_direction(case: str) -> None:
    """Several chunks, all inputs at once: the slope by the oracle's forward pass equals the backend's gradient."""
    options = {**OPTIONS[case], "T": 140}
    if "lengths" in options:
        options["lengths"] = [70, 0, 65]
    arguments = draw(**options)
    names = differentiable(arguments)
    rng = torch.Generator().manual_seed(5)
    o, final_state, found = gradients(chunk_gated_delta_rule, arguments)
    d_o, d_state = weights(o, final_state)
    wide = doubles(arguments)
    for name in names:
        direction = torch.randn(arguments[name].shape, generator=rng, dtype=torch.float64)
        step = 1e-5
        values = []
        for sign in (step, -step):
            o, final_state = oracle({**wide, name: wide[name] + sign * direction})
            values.append((o * d_o).sum() + (final_state * d_state).sum())
        slope = float(values[0] - values[1]) / (2 * step)
        gradient = found[name].double()
        allowed = 1e-5 * float(gradient.norm()) * float(direction.norm()) / gradient.numel() ** 0.5 + 1e-5 * abs(slope)
        assert abs(float((gradient * direction).sum()) - slope) <= 5 * allowed + 1e-6, name


# ------------------------------------------------------------------------------------------------------- dtypes


@pytest.mark.parametrize("io", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("gates", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("state", [torch.float32, torch.bfloat16], ids=str)
def test_dtypes(io: torch.dtype, gates: torch.dtype, state: torch.dtype) -> None:
    """Each gradient has its input's dtype, whatever the mixture."""
    arguments = draw(gate="raw", beta="logit", l2norm=True, dtype=io, gate_dtype=gates, state_dtype=state)
    o, final_state, found = gradients(chunk_gated_delta_rule, arguments)
    assert o.dtype == io and final_state.dtype == torch.float32
    want = oracle_gradients(arguments)[2]
    for name, gradient in found.items():
        assert gradient.dtype == arguments[name].dtype and gradient.shape == arguments[name].shape
        relative = max(2 * limit(name, io), 2 * limit(name, gradient.dtype) if gradient.dtype != torch.float32 else 0)
        assert_close("d_" + name, gradient, want[name], relative, floor=0.5)


def test_float64_gates_and_states() -> None:
    """Gates, betas and states in float64 are computed in float32; their gradients come back in float64."""
    arguments = draw(gate="raw")
    for name in ("g", "beta", "A_log", "dt_bias", "initial_state"):
        arguments[name] = arguments[name].double()
    found = gradients(chunk_gated_delta_rule, arguments)[2]
    want = oracle_gradients(arguments)[2]
    for name, gradient in found.items():
        assert gradient.dtype == arguments[name].dtype
        assert_close("d_" + name, gradient, want[name], 1e-5, floor=0.5)


def test_mixed_qkv() -> None:
    """q, k and v of different dtypes are computed in float32; every gradient in its own dtype."""
    arguments = draw()
    arguments["q"], arguments["k"] = arguments["q"].half(), arguments["k"].bfloat16()
    o, _, found = gradients(chunk_gated_delta_rule, arguments)
    assert o.dtype == torch.float16
    want = oracle_gradients(arguments)[2]
    assert_close("o", o, oracle(arguments)[0], 1e-3)
    for name, gradient in found.items():
        assert gradient.dtype == arguments[name].dtype
        assert_close("d_" + name, gradient, want[name], 1e-5 if gradient.dtype == torch.float32 else 2**-8, floor=0.5)


# ----------------------------------------------------------------------------------- which inputs, which outputs


def test_subsets_of_inputs() -> None:
    """Each input alone and all but one give the bits that all together give, and None to the others."""
    arguments = draw(gate="raw", beta="logit", l2norm=True, B=2)
    everything = gradients(chunk_gated_delta_rule, arguments)[2]
    for name in DIFFERENTIABLE:
        for names in ((name,), tuple(x for x in DIFFERENTIABLE if x != name)):
            found = gradients(chunk_gated_delta_rule, arguments, names)[2]
            assert set(found) == set(names)
            for x in names:
                assert torch.equal(found[x], everything[x]), (name, x)


def test_no_gradient_for_the_others() -> None:
    arguments = leaves(draw(), ["v"])
    o, final_state = chunk_gated_delta_rule(**arguments)
    (o.sum() + final_state.sum()).backward()
    assert arguments["v"].grad is not None
    assert all(x.grad is None for name, x in arguments.items() if isinstance(x, Tensor) and name != "v")


def test_nothing_requires_a_gradient() -> None:
    o, final_state = chunk_gated_delta_rule(**draw())
    assert not o.requires_grad and not final_state.requires_grad
    with torch.no_grad():
        o, final_state = chunk_gated_delta_rule(**leaves(draw()))
    assert not o.requires_grad and not final_state.requires_grad
    with torch.inference_mode():
        o, _ = chunk_gated_delta_rule(**draw())
    assert o.is_inference()


@pytest.mark.parametrize("used", ["o", "final_state"])
def test_one_output(used: str) -> None:
    """A loss of the outputs alone, or of the final state alone."""
    arguments = draw(gate="raw", B=2)

    def function(rule: Any, **keywords: Any) -> Any:
        o, final_state = rule(**keywords)
        return (o, None) if used == "o" else (final_state, None)

    got = gradients(functools.partial(function, chunk_gated_delta_rule), arguments)[2]
    want = gradients(functools.partial(function, testing.oracle), doubles(arguments))[2]
    for name, gradient in want.items():
        assert_close("d_" + name, got[name], gradient, 1e-5, floor=0.5)
        if used == "final_state" and name == "q":
            assert not got[name].any()


def test_final_state_not_asked_for() -> None:
    arguments = draw()
    arguments["output_final_state"] = False
    _, final_state, found = gradients(chunk_gated_delta_rule, arguments)
    assert final_state is None
    want = oracle_gradients(arguments)[2]
    for name, gradient in want.items():
        assert_close("d_" + name, found[name], gradient, 1e-5, floor=0.1)


def test_empty_sequences() -> None:
    """The gradient of the final state of an empty sequence passes through to its initial state, bit by bit."""
    arguments = leaves(draw(lengths=[0, 5, 0, 70, 0]), ["initial_state"])
    _, final_state = chunk_gated_delta_rule(**arguments)
    incoming = torch.randn_like(final_state)
    final_state.backward(incoming)
    empty = [0, 2, 4]
    assert torch.equal(final_state[empty], arguments["initial_state"][empty])
    assert torch.equal(arguments["initial_state"].grad[empty], incoming[empty])


def test_no_tokens() -> None:
    arguments = draw(B=2, T=0)
    o, final_state, found = gradients(chunk_gated_delta_rule, arguments)
    assert o.shape == (2, 0, 4, 16) and torch.equal(final_state, arguments["initial_state"])
    assert torch.equal(found["initial_state"], weights(o, final_state)[1])
    assert all(found[name].shape == arguments[name].shape for name in found)


def test_rows_past_the_last_offset() -> None:
    """They are zero in outputs and gradients, whatever the inputs hold there."""
    arguments = draw(lengths=[20, 30], T=80, gate="raw")
    clean = gradients(chunk_gated_delta_rule, arguments)
    for name in ("q", "k", "v", "g", "beta"):
        arguments[name][:, 50:] = float("nan")
    dirty = gradients(chunk_gated_delta_rule, arguments)
    assert torch.equal(clean[0], dirty[0]) and not dirty[0][:, 50:].any() and torch.equal(clean[1], dirty[1])
    for name, gradient in dirty[2].items():
        assert torch.equal(gradient, clean[2][name]), name
        if name in ("q", "k", "v", "g", "beta"):
            assert not gradient[:, 50:].any(), name


# ------------------------------------------------------------------------------------------- layouts of gradients


def incoming_like(x: Tensor, layout: str) -> Tensor:
    values = torch.randn(x.shape, generator=torch.Generator().manual_seed(2))
    if layout == "expanded":
        return values[..., :1].expand(x.shape)
    if layout == "zero strides":
        return torch.ones(()).expand(x.shape)
    if layout == "transposed":
        return values.transpose(1, 2).contiguous().transpose(1, 2)
    if layout == "strided last":
        return values.transpose(-1, -2).contiguous().transpose(-1, -2)
    if layout == "gaps":
        return torch.nn.functional.pad(values, (3, 2))[..., 3:-2]
    assert layout == "permuted"
    return values.permute(3, 1, 0, 2).contiguous().permute(2, 1, 3, 0)


@pytest.mark.parametrize("layout", ["expanded", "zero strides", "transposed", "strided last", "gaps", "permuted"])
@pytest.mark.parametrize("state_v_first", [False, True])
def test_strides_of_incoming_gradients(layout: str, state_v_first: bool) -> None:
    arguments = leaves(draw(B=2, state_v_first=state_v_first))
    names = differentiable(arguments)
    outputs = chunk_gated_delta_rule(**arguments)
    incoming = [incoming_like(x, layout) for x in outputs]
    tensors = [arguments[name] for name in names]
    got = torch.autograd.grad(outputs, tensors, incoming, retain_graph=True)
    want = torch.autograd.grad(outputs, tensors, [x.contiguous() for x in incoming])
    for name, a, b in zip(names, got, want):
        assert torch.equal(a, b), name


def test_incoming_gradients_of_another_dtype() -> None:
    """A float32 loss of a bfloat16 output."""
    arguments = leaves(draw(dtype=torch.bfloat16))
    o, _ = chunk_gated_delta_rule(**arguments)
    o.float().square().sum().backward()
    assert arguments["q"].grad.dtype == torch.bfloat16 and arguments["g"].grad.dtype == torch.float32


def test_views_of_one_tensor() -> None:
    """q, k and v are slices of one leaf: its gradient is put together."""
    arguments = draw(K=16, V=16)
    B, T, Hk, K = arguments["q"].shape
    Hv, V = arguments["v"].shape[2:]
    parts = [arguments[name].flatten(2) for name in ("q", "k", "v")]
    packed = torch.cat(parts, -1).requires_grad_()
    q, k, v = (x.view(B, T, -1, 16) for x in packed.split([Hk * K, Hk * K, Hv * V], -1))
    assert q.data_ptr() == packed.data_ptr() and not q.is_contiguous()
    o, final_state = chunk_gated_delta_rule(**{**arguments, "q": q, "k": k, "v": v})
    separate = gradients(chunk_gated_delta_rule, arguments)
    assert torch.equal(o, separate[0])
    d_o, d_state = weights(o, final_state)
    torch.autograd.backward([o, final_state], [d_o, d_state])
    assert torch.equal(packed.grad, torch.cat([separate[2][name].flatten(2) for name in ("q", "k", "v")], -1))


def test_the_same_tensor_twice() -> None:
    """q is k: the gradient is the sum of both."""
    arguments = draw()
    k = arguments["k"].clone().requires_grad_()
    o, final_state = chunk_gated_delta_rule(**{**arguments, "q": k, "k": k})
    d_o, d_state = weights(o, final_state)
    torch.autograd.backward([o, final_state], [d_o, d_state])
    found = gradients(chunk_gated_delta_rule, {**arguments, "q": arguments["k"]})[2]
    torch.testing.assert_close(k.grad, found["q"] + found["k"])


# ------------------------------------------------------------------------------------------- the autograd machine


@pytest.mark.parametrize("function", [chunk_gated_delta_rule, fused_recurrent_gated_delta_rule])
def test_no_second_derivatives(function: Any) -> None:
    arguments = leaves(draw(T=5))
    o, _ = function(**arguments)
    (first,) = torch.autograd.grad(o.sum(), arguments["q"], create_graph=True)
    with pytest.raises(NotImplementedError, match=r"cannot be differentiated again \(no second derivatives\)"):
        first.sum().backward()


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")
def test_no_forward_mode() -> None:
    arguments = draw(T=5)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(arguments["q"], torch.ones_like(arguments["q"]))
        with pytest.raises((NotImplementedError, RuntimeError), match=r"forward.*AD|jvp"):
            chunk_gated_delta_rule(**{**arguments, "q": dual})


def test_twice_through_one_graph() -> None:
    arguments = leaves(draw())
    o, _ = chunk_gated_delta_rule(**arguments)
    loss = o.square().sum()
    loss.backward(retain_graph=True)
    first = arguments["k"].grad.clone()
    loss.backward()
    torch.testing.assert_close(arguments["k"].grad, 2 * first)
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


def test_runs_repeat_bit_by_bit() -> None:
    arguments = draw(B=2, T=130, dtype=torch.bfloat16, gate="raw", beta="logit", l2norm=True)
    first, second = (gradients(chunk_gated_delta_rule, arguments) for _ in range(2))
    assert torch.equal(first[0], second[0]) and torch.equal(first[1], second[1])
    assert all(torch.equal(first[2][name], second[2][name]) for name in first[2])


def test_inputs_are_never_written() -> None:
    arguments = draw(gate="raw", beta="logit", l2norm=True)
    before = {name: x.clone() for name, x in arguments.items() if isinstance(x, Tensor)}
    gradients(chunk_gated_delta_rule, arguments)
    assert all(torch.equal(arguments[name], x) for name, x in before.items())


def test_input_changed_before_backward() -> None:
    """Saved tensors are watched, as everywhere in torch."""
    arguments = leaves(draw())
    v = arguments["v"] * 1
    o, _ = chunk_gated_delta_rule(**{**arguments, "v": v})
    v.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        o.sum().backward()


def test_output_changed_before_backward() -> None:
    """Outputs are not saved, so they may be changed."""
    changed, plain = leaves(draw()), leaves(draw())
    chunk_gated_delta_rule(**changed)[0].mul_(2).sum().backward()
    (2 * chunk_gated_delta_rule(**plain)[0]).sum().backward()
    assert torch.equal(changed["v"].grad, plain["v"].grad)


def test_checkpointing() -> None:
    """torch.utils.checkpoint recomputes the forward pass in backward."""
    from torch.utils.checkpoint import checkpoint

    plain, saving = leaves(draw()), leaves(draw())
    chunk_gated_delta_rule(**plain)[0].square().sum().backward()
    checkpoint(lambda: chunk_gated_delta_rule(**saving)[0].square().sum(), use_reentrant=False).backward()
    for name in differentiable(plain):
        assert torch.equal(plain[name].grad, saving[name].grad), name


def test_saved_tensor_hooks() -> None:
    """Everything that backward needs goes through torch's saved tensors, so that offloading sees it."""
    packed: list[Tensor] = []

    def pack(x: Tensor) -> Tensor:
        packed.append(x)
        return x.clone()

    arguments = leaves(draw(gate="raw"))
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        o, _ = chunk_gated_delta_rule(**arguments)
    assert {x.data_ptr() for x in packed} == {arguments[name].data_ptr() for name in differentiable(arguments)}
    o.sum().backward()
    plain = leaves(draw(gate="raw"))
    chunk_gated_delta_rule(**plain)[0].sum().backward()
    assert torch.equal(plain["A_log"].grad, arguments["A_log"].grad)


def test_functional_gradients() -> None:
    """torch.func.grad gives the gradients, or refuses; torch's registered autograd formulas cannot be transformed."""
    arguments = draw()

    def loss(q: Tensor, v: Tensor) -> Tensor:
        return chunk_gated_delta_rule(**{**arguments, "q": q, "v": v})[0].square().sum()

    try:
        d_q, d_v = torch.func.grad(loss, argnums=(0, 1))(arguments["q"], arguments["v"])
    except (NotImplementedError, RuntimeError) as error:
        assert "functorch transforms" in str(error) or "torch.func" in str(error)
        return
    plain = leaves(arguments, ["q", "v"])
    chunk_gated_delta_rule(**plain)[0].square().sum().backward()
    assert torch.equal(d_q, plain["q"].grad) and torch.equal(d_v, plain["v"].grad)


@pytest.mark.parametrize("split", [1, 2, 3])
def test_context_split(split: int) -> None:
    """A sequence cut into pieces has the gradients of the whole."""
    arguments = draw(T=300, Hk=1, Hv=1)
    arguments["options"] = PlanOptions(context_split=split, threads=2)
    found = gradients(chunk_gated_delta_rule, arguments)
    del arguments["options"]
    want = oracle_gradients(arguments)
    assert_close("o", found[0], want[0], 1e-5)
    for name, gradient in want[2].items():
        assert_close("d_" + name, found[2][name], gradient, 1e-5, floor=0.1)


def test_two_calls_are_one() -> None:
    """Gradients flow through a state that is carried from one call to the next."""
    arguments = draw(T=100, gate="raw")
    whole = gradients(chunk_gated_delta_rule, arguments)

    def in_two(**keywords: Any) -> Any:
        state = keywords.pop("initial_state")
        outputs = []
        for part in (slice(0, 37), slice(37, 100)):
            tokens = {name: keywords[name][:, part] for name in ("q", "k", "v", "g", "beta")}
            o, state = chunk_gated_delta_rule(**{**keywords, **tokens}, initial_state=state)
            outputs.append(o)
        return torch.cat(outputs, 1), state

    parts = gradients(in_two, arguments)
    assert_close("o", parts[0], whole[0], 1e-5)
    for name, gradient in whole[2].items():
        assert_close("d_" + name, parts[2][name], gradient, 1e-5, floor=0.1)
