"""The operators: opcheck, schemas, and torch's transforms of programs that call them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import Arguments, draw, gradients, leaves
from layer import Layer
from torch import Tensor

from flash_qla import (
    _modes,
    chunk_gated_delta_rule,
    torch_ops,
)

OPS = torch.ops.flash_qla  # defined by the import of flash_qla.torch_ops
N, HK, HV, K, V = 3, 2, 4, 16, 8


# ------------------------------------------------------------------------------------------------------- opcheck


def op_inputs(arguments: Arguments) -> list[Any]:
    names = ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "cu_seqlens")
    return [arguments.get(name) for name in names]


def op_plan(arguments: Arguments) -> list[Any]:
    modes = _modes.OUTPUT_FINAL_STATE
    log = _modes.GATE_NONE if arguments["g"] is None else _modes.GATE_LOG
    modes |= _modes.GATE_RAW if "A_log" in arguments else log
    modes |= _modes.L2NORM if "use_qk_l2norm_in_kernel" in arguments else 0
    modes |= _modes.BETA_LOGIT if "use_beta_sigmoid_in_kernel" in arguments else 0
    modes |= _modes.STATE_V_FIRST if "state_v_first" in arguments else 0
    return [modes, 0.0, "", 0, 0]


OP_CASES: dict[str, dict[str, Any]] = {
    "plain": {"h0": False},
    "everything": {"gate": "raw", "beta": "logit", "l2norm": True, "state_v_first": True, "dtype": torch.bfloat16},
    "packed": {"lengths": [5, 0, 66]},
    "bare": {"gate": "none", "beta": "none", "B": 2},
}


@pytest.mark.parametrize("case", OP_CASES)
def test_opcheck_forward(case: str) -> None:
    arguments = leaves(draw(Hk=HK, Hv=HV, K=K, V=V, **OP_CASES[case]))
    h0 = arguments.get("initial_state")
    torch.library.opcheck(OPS.forward, (*op_inputs(arguments), h0, *op_plan(arguments)))


def test_opcheck_forward_without_final_state() -> None:
    arguments = leaves(draw(T=3))
    torch.library.opcheck(OPS.forward, (*op_inputs(arguments), None, _modes.GATE_LOG, 0.5, "reference", 1, 1))


@pytest.mark.parametrize("case", OP_CASES)
@pytest.mark.parametrize("wanted", [0xFF, 0b00010101])
def test_opcheck_backward(case: str, wanted: int) -> None:
    arguments = draw(Hk=HK, Hv=HV, K=K, V=V, **OP_CASES[case])
    o, final_state = chunk_gated_delta_rule(**arguments)
    plan = op_plan(arguments)
    h0 = arguments.get("initial_state")
    for incoming in ((torch.ones_like(o), torch.ones_like(final_state)), (None, torch.ones_like(final_state))):
        torch.library.opcheck(OPS.backward, (*op_inputs(arguments), h0, *incoming, wanted, *plan))


def pool_of(slots: int) -> Tensor:
    return torch.randn(slots, HV, K, V)


def test_opcheck_decode() -> None:
    arguments = draw(B=N, T=2, Hk=HK, Hv=HV, K=K, V=V, h0=False)
    plan = [_modes.GATE_LOG, 0.0, "", 0]
    o = torch.empty(N, 2, HV, V)
    slots = torch.tensor([4, -1, 0])
    torch.library.opcheck(
        OPS.decode, (*op_inputs(arguments), pool_of(5), slots, None, None, None, None, None, None, o, True, *plan)
    )
    buffer, flags = torch.zeros(N, 2, HV, K, V), torch.tensor([True, False, True])
    torch.library.opcheck(
        OPS.decode,
        (*op_inputs(arguments), pool_of(5), slots, None, flags, None, buffer, None, None, o, False, *plan),
    )


def test_opcheck_mixed() -> None:
    arguments = draw(lengths=[1, 1, 70], Hk=HK, Hv=HV, K=K, V=V, h0=False)
    o = torch.empty(1, 72, HV, V)
    plan = [_modes.GATE_LOG | _modes.CHECKPOINT_CHUNK_STARTS, 0.0, 0, 2, "", 0, 0]
    slots = torch.tensor([4, 1, 0])
    torch.library.opcheck(
        OPS.mixed, (*op_inputs(arguments), pool_of(5), slots, None, None, torch.zeros(4, HV, K, V), None, o, *plan)
    )


def test_opcheck_commit() -> None:
    buffer = torch.randn(N, 2, HV, K, V)
    torch.library.opcheck(OPS.commit, (pool_of(5), torch.tensor([4, -1, 0]), buffer, None, torch.tensor([2, 1, 0]), 0))


def test_operators_are_documented_by_schemas() -> None:
    """What is written is marked."""

    def written(op: Any) -> list[str]:
        arguments = op.default._schema.arguments
        return [x.name for x in arguments if x.alias_info is not None and x.alias_info.is_write]

    assert written(OPS.forward) == [] and written(OPS.backward) == []
    assert written(OPS.decode) == ["state", "intermediate_states", "o"]
    assert written(OPS.mixed) == ["state", "checkpoints", "o"]
    assert written(OPS.commit) == ["state"]
    for name in ("forward", "backward", "decode", "mixed", "commit"):
        assert torch.Tag.pt2_compliant_tag in getattr(OPS, name).default.tags
    assert torch_ops.LIBRARY.ns == "flash_qla"


# ------------------------------------------------------------------------------------------------------ transforms


def test_autocast() -> None:
    """Under autocast linear layers give bfloat16, parameters stay float32: any mixture of the two is computed."""
    layer = Layer()
    x = torch.randn(2, 70, 24)
    with torch.autocast("cpu", torch.bfloat16):
        o = layer(x)
    assert o.dtype == torch.bfloat16
    o.sum().backward()
    assert layer.A_log.grad.dtype == torch.float32 and layer.project.weight.grad.dtype == torch.float32
    assert (o - layer(x)).norm() < 0.02 * o.norm()
    # float32 inputs stay float32: the rule's precision is the caller's choice, not autocast's.
    with torch.autocast("cpu", torch.bfloat16):
        arguments = draw()
        o, _ = chunk_gated_delta_rule(**arguments)
    assert o.dtype == torch.float32 and torch.equal(o, chunk_gated_delta_rule(**arguments)[0])


@pytest.mark.parametrize("gradient", [False, True])
def test_vmap_is_refused(gradient: bool) -> None:
    arguments = draw(B=2, T=5)
    stacked = torch.stack([arguments["v"], arguments["v"]]).requires_grad_(gradient)
    with pytest.raises((NotImplementedError, RuntimeError), match=r"flash_qla::forward has no vmap rule"):
        torch.vmap(lambda v: chunk_gated_delta_rule(**{**arguments, "v": v})[0])(stacked)


def test_fake_tensors() -> None:
    """Shapes without memory."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode() as mode:
        fake = {name: mode.from_tensor(x) if isinstance(x, Tensor) else x for name, x in draw().items()}
        o, final_state = chunk_gated_delta_rule(**fake)
    assert o.shape == (1, 70, 4, 16) and final_state.shape == (1, 4, 32, 16) and type(o) is not Tensor


def test_functions_of_the_operators_are_seen() -> None:
    """Modes see the operator go by although plain calls take a shorter way."""
    from torch.utils._python_dispatch import TorchDispatchMode

    seen = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(str(function))
            return function(*args, **(kwargs or {}))

    arguments = draw()
    with Watch():
        o, _ = chunk_gated_delta_rule(**arguments)
    assert "flash_qla.forward.default" in seen
    assert torch.equal(o, chunk_gated_delta_rule(**arguments)[0])


def test_subclasses_of_tensor() -> None:
    """They go through the operator, and their __torch_function__ decides."""

    class Named(torch.Tensor):
        pass

    arguments = draw()
    want, _ = chunk_gated_delta_rule(**arguments)
    got, _ = chunk_gated_delta_rule(**{**arguments, "v": arguments["v"].as_subclass(Named)})
    assert torch.equal(got.as_subclass(torch.Tensor), want)
    parameter = torch.nn.Parameter(arguments["v"], requires_grad=False)
    assert torch.equal(chunk_gated_delta_rule(**{**arguments, "v": parameter})[0], want)


def test_both_ways_give_the_same_bits() -> None:
    """The short way of plain calls and the operator."""
    for options in ({}, {"gate": "raw", "beta": "logit", "l2norm": True, "dtype": torch.bfloat16}):
        arguments = draw(**options)
        short = chunk_gated_delta_rule(**arguments)
        long = gradients(chunk_gated_delta_rule, arguments)
        assert torch.equal(short[0], long[0]) and torch.equal(short[1], long[1])
