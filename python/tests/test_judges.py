"""The package against implementations that other people wrote: values and gradients, head by head."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import (
    Arguments,
    assert_close,
    draw,
    gradients,
    head_axis,
    limit,
    oracle,
    oracle_gradients,
    with_tensors,
)
from judges import JUDGES, judged

from flash_qla import chunk_gated_delta_rule, fused_recurrent_gated_delta_rule

Tensors = dict[str, torch.Tensor]

# name: arguments of `draw`, and further arguments of the function
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({"T": 130, "h0": False}, {}),
    "initial state": ({"T": 65, "B": 2}, {}),
    "one token": ({"T": 1}, {}),
    "as many key heads": ({"T": 70, "Hk": 3, "Hv": 3, "K": 16, "V": 48}, {}),
    "eight value heads each": ({"T": 70, "Hk": 1, "Hv": 8}, {}),
    "raw gate": ({"T": 100, "gate": "raw"}, {}),
    "raw gate without bias": ({"T": 70, "gate": "raw"}, {"dt_bias": None}),
    "no gate": ({"T": 70, "gate": "none"}, {}),
    "beta logits": ({"T": 70, "beta": "logit"}, {}),
    "negative eigenvalues": ({"T": 70, "beta": "negative"}, {}),
    "no beta": ({"T": 20, "beta": "none"}, {}),
    "l2norm": ({"T": 100, "l2norm": True}, {}),
    "as in FLA's layer": (
        {"T": 100, "gate": "raw", "beta": "negative", "l2norm": True, "state_v_first": True},
        {},
    ),
    "scale": ({"T": 70}, {"scale": 0.7}),
    "state [V,K]": ({"T": 70, "state_v_first": True}, {}),
    "packed": ({"lengths": [37, 0, 91, 1, 64]}, {}),
    "packed, int32 offsets, rows left over": ({"lengths": [37, 30], "T": 80, "index_dtype": torch.int32}, {}),
    "packed, raw gate, [V,K], no initial state": (
        {"lengths": [0, 3, 70, 0], "gate": "raw", "state_v_first": True, "h0": False},
        {},
    ),
}


def arguments_of(case: str, **changes: Any) -> Arguments:
    options, extra = CASES[case]
    return {**draw(**{**options, **changes}), **extra}


def compare(case: str, judge: str, dtype: torch.dtype, function: Any = chunk_gated_delta_rule) -> None:
    arguments = arguments_of(case, dtype=dtype)
    # The judge sees the same numbers in float32, and so do its gradients.
    theirs = gradients(judged(JUDGES[judge]), with_tensors(arguments, lambda _, x: x.float()))
    ours = gradients(function, arguments)
    assert ours[0].dtype == dtype and ours[1].dtype == torch.float32
    assert_close("o", ours[0], theirs[0], limit("o", dtype))
    assert_close("final_state", ours[1], theirs[1], limit("final_state", dtype))
    compare_gradients(ours[2], theirs[2], arguments, dtype, by_chunks="chunk" in judge)


def compare_gradients(
    ours: Tensors, theirs: Tensors, arguments: Arguments, dtype: torch.dtype, by_chunks: bool
) -> None:
    assert ours.keys() == theirs.keys()
    for name, want in theirs.items():
        got = ours[name]
        assert got.dtype == arguments[name].dtype
        relative = limit(name, dtype)
        if dtype == torch.float32 and by_chunks and name in ("A_log", "dt_bias"):
            relative = 5e-5  # the judge's own error, seen against the oracle: sums over all tokens that cancel
        elif dtype != torch.float32:
            relative *= 1 + 4 / (want.numel() / want.shape[head_axis(name, want)]) ** 0.5  # few elements scatter
        assert_close("d_" + name, got, want, relative, floor=0.1)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("judge", ["fla-recurrent", "transformers-chunk"])
def test_float32(case: str, judge: str) -> None:
    compare(case, judge, torch.float32)


@pytest.mark.parametrize("case", ["plain", "as in FLA's layer", "packed"])
@pytest.mark.parametrize("judge", ["fla-chunk", "transformers-recurrent"])
def test_float32_by_the_others(case: str, judge: str) -> None:
    compare(case, judge, torch.float32)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "f16"])
@pytest.mark.parametrize("case", CASES)
def test_16_bits(case: str, dtype: torch.dtype) -> None:
    compare(case, "fla-chunk", dtype)


@pytest.mark.parametrize("case", ["plain", "as in FLA's layer", "packed", "one token"])
def test_recurrent_function(case: str) -> None:
    compare(case, "transformers-recurrent", torch.float32, fused_recurrent_gated_delta_rule)


@pytest.mark.parametrize("case", ["initial state", "as in FLA's layer", "packed", "no beta"])
def test_oracle(case: str) -> None:
    """The oracle, which the other tests trust, is judged too. In double the judges' float32 is what differs."""
    arguments = arguments_of(case)
    theirs = gradients(judged(JUDGES["fla-recurrent"]), arguments)
    ours = oracle_gradients(arguments)
    assert ours[0].dtype == torch.float64
    assert_close("o", ours[0], theirs[0].double(), 1e-5)
    assert_close("final_state", ours[1], theirs[1].double(), 1e-5)
    for name, want in theirs[2].items():
        assert ours[2][name].dtype == torch.float64
        assert_close("d_" + name, ours[2][name], want.double(), 1e-5, floor=0.1)


@pytest.mark.parametrize("K, V", [(64, 64), (128, 128), (60, 100), (256, 32), (1, 1)])
def test_head_sizes(K: int, V: int) -> None:
    arguments = draw(T=100, Hk=1, Hv=2, K=K, V=V, dtype=torch.bfloat16)
    theirs = judged(JUDGES["transformers-chunk"])(**arguments)
    ours = chunk_gated_delta_rule(**arguments)
    assert_close("o", ours[0], theirs[0], limit("o", torch.bfloat16) * (1 if K > 1 else 1.5))
    assert_close("final_state", ours[1], theirs[1], limit("final_state", torch.bfloat16))
    want = oracle(arguments)
    assert_close("o", ours[0], want[0], limit("o", torch.bfloat16) * (1 if K > 1 else 1.5))


def test_strong_gates() -> None:
    """g of 0, -50, -1000 and -10000 side by side. The chunk form of the judges overflows; their recurrence does not."""
    arguments = draw(T=150)
    values = torch.tensor([0.0, -1.0, -50.0, -1e3, -1e4])
    arguments["g"] = values[torch.randint(5, arguments["g"].shape, generator=torch.Generator().manual_seed(3))]
    theirs = gradients(judged(JUDGES["fla-recurrent"]), arguments)
    ours = gradients(chunk_gated_delta_rule, arguments)
    assert_close("o", ours[0], theirs[0], 1e-5)
    assert_close("final_state", ours[1], theirs[1], 1e-5)
    for name, want in theirs[2].items():
        assert_close("d_" + name, ours[2][name], want, 1e-5, floor=0.1)


def test_gates_in_16_bits() -> None:
    """g, beta, A_log, dt_bias and the state in bfloat16, as after `model.to(bfloat16)`; arithmetic stays in float32."""
    kinds = {"dtype": torch.float32, "gate_dtype": torch.bfloat16, "state_dtype": torch.bfloat16}
    arguments = draw(T=70, gate="raw", beta="logit", l2norm=True, **kinds)
    theirs = gradients(judged(JUDGES["fla-chunk"]), with_tensors(arguments, lambda _, x: x.float()))
    ours = gradients(chunk_gated_delta_rule, arguments)
    assert_close("o", ours[0], theirs[0], 1e-5)
    assert_close("final_state", ours[1], theirs[1], 1e-5)
    for name, want in theirs[2].items():
        assert ours[2][name].dtype == arguments[name].dtype
        rounding = 1e-5 if arguments[name].dtype == torch.float32 else 2**-8
        assert_close("d_" + name, ours[2][name], want, rounding, floor=0.1)
