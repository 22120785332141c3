"""What is refused, and how: the exception types are FLA's, and each sentence names the argument, what was found and
what is allowed."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from helpers import Arguments, draw

from flash_qla import (
    PlanOptions,
    chunk_gated_delta_rule,
    chunk_gated_delta_rule_bwd,
    chunk_gated_delta_rule_fwd,
    fused_recurrent_gated_delta_rule,
    plan,
)

CHUNK, RECURRENT = chunk_gated_delta_rule, fused_recurrent_gated_delta_rule
BOTH = (CHUNK, RECURRENT)


@dataclasses.dataclass
class Refusal:
    """A change of a good call, the exception that FLA raises for it (or that we add), and words of the sentence."""

    name: str
    change: dict[str, Any]
    exception: type[Exception]
    words: tuple[str, ...]
    functions: tuple[Callable[..., Any], ...] = BOTH
    draw: dict[str, Any] = dataclasses.field(default_factory=dict)


class Context:
    """Stands for FLA's context of a parallel call."""

    def __init__(self, cu_seqlens: Any = None) -> None:
        self.cu_seqlens = cu_seqlens


def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


# The good call: q, k [2,20,2,32], v [2,20,4,16], g, beta [2,20,4], initial_state [2,4,32,16].
PACKED = {"lengths": [12, 8], "T": 20}
NOTHING: dict[str, Any] = {"initial_state": None}

REFUSALS = [
    # ---- FLA's list, in its order (reference: sections 2.2 and 2.3)
    Refusal("both names of the layout", {"state_v_first": True, "transpose_state_layout": True}, ValueError,
            ("state_v_first", "transpose_state_layout")),
    Refusal("both names, the old one false", {"state_v_first": True, "transpose_state_layout": False}, ValueError,
            ("state_v_first", "transpose_state_layout")),
    Refusal("heads of q and k", {"k": zeros(2, 20, 1, 32)}, ValueError, ("q", "k", "2", "1")),
    Refusal("heads of v", {"v": zeros(2, 20, 3, 16), "g": zeros(2, 20, 3), "beta": zeros(2, 20, 3), **NOTHING},
            ValueError, ("v", "3", "multiple of", "2")),
    Refusal("head_first", {"head_first": True}, DeprecationWarning, ("head_first",), (CHUNK,)),
    Refusal("head_first, even False", {"head_first": False}, DeprecationWarning, ("head_first",), (CHUNK,)),
    Refusal("chunk_size", {"chunk_size": 48}, ValueError, ("chunk_size", "48", "16, 32 or 64"), (CHUNK,)),
    Refusal("chunk_size 128", {"chunk_size": 128}, ValueError, ("chunk_size", "128", "16, 32 or 64"), (CHUNK,)),
    Refusal("cp_context with an initial state", {"cp_context": Context([0, 20]), "output_final_state": False},
            AssertionError, ("cp_context", "initial_state"), (CHUNK,)),
    Refusal("cp_context with a final state", {"cp_context": Context([0, 20]), **NOTHING}, AssertionError,
            ("cp_context", "output_final_state"), (CHUNK,)),
    Refusal("cp_context without offsets", {"cp_context": Context(), "output_final_state": False, **NOTHING},
            AssertionError, ("cp_context", "cu_seqlens"), (CHUNK,)),
    Refusal("cp_context", {"cp_context": Context([0, 20]), "output_final_state": False, **NOTHING},
            NotImplementedError, ("cp_context", "not supported"), (CHUNK,)),
    Refusal("batch size of packed sequences", {"cu_seqlens": torch.tensor([0, 12, 20])}, ValueError,
            ("cu_seqlens", "batch size", "2", "1")),
    Refusal("rows of the packed initial state", {"initial_state": zeros(3, 4, 32, 16)}, ValueError,
            ("initial_state", "3", "2"), draw=PACKED),
    Refusal("raw gate without A_log", {"use_gate_in_kernel": True}, AssertionError, ("use_gate_in_kernel", "A_log"),
            (CHUNK,)),
    Refusal("raw gate without A_log (recurrent)", {"use_gate_in_kernel": True}, ValueError,
            ("use_gate_in_kernel", "A_log"), (RECURRENT,)),
    Refusal("raw gate without g", {"use_gate_in_kernel": True, "A_log": zeros(4), "g": None}, ValueError,
            ("use_gate_in_kernel", "g")),
    Refusal("allow_neg_eigval alone", {"allow_neg_eigval": True}, ValueError,
            ("allow_neg_eigval", "use_beta_sigmoid_in_kernel")),
    Refusal("K above 256", {"q": zeros(2, 20, 2, 257), "k": zeros(2, 20, 2, 257), **NOTHING}, AssertionError,
            ("K", "257", "256"), (CHUNK,)),
    # ---- what FLA swallows or reads past
    Refusal("an unknown keyword", {"use_qk_l2norm": True}, TypeError, ("use_qk_l2norm",)),
    Refusal("a misspelt keyword", {"initial_sate": None}, TypeError, ("initial_sate",)),
    Refusal("per-channel decays", {"gk": zeros(2, 20, 4, 32)}, NotImplementedError, ("gk",), (RECURRENT,)),
    Refusal("per-channel decays of v", {"gv": zeros(2, 20, 4, 16)}, NotImplementedError, ("gv",), (RECURRENT,)),
    Refusal("per-channel beta", {"beta": zeros(2, 20, 4, 16)}, NotImplementedError, ("beta", "channel"), (RECURRENT,)),
    Refusal("per-channel beta (chunk)", {"beta": zeros(2, 20, 4, 16)}, ValueError, ("beta", "[2,20,4,16]", "[2,20,4]"),
            (CHUNK,)),
    Refusal("scale 0", {"scale": 0.0}, ValueError, ("scale", "0", "None")),
    Refusal("scale not finite", {"scale": float("nan")}, ValueError, ("scale", "nan")),
    Refusal("q with three dimensions", {"q": zeros(20, 2, 32)}, ValueError, ("q", "3 dimensions", "[B,T,heads,size]")),
    Refusal("k with another batch size", {"k": zeros(1, 20, 2, 32)}, ValueError, ("k", "[1,20,2,32]", "2")),
    Refusal("k with another length", {"k": zeros(2, 19, 2, 32)}, ValueError, ("k", "[2,19,2,32]", "20")),
    Refusal("k with another size", {"k": zeros(2, 20, 2, 16)}, ValueError, ("k", "[2,20,2,16]", "32")),
    Refusal("v with another length", {"v": zeros(2, 19, 4, 16)}, ValueError, ("19", "20")),
    Refusal("g with too few heads", {"g": zeros(2, 20, 2)}, ValueError, ("g", "[2,20,2]", "4")),
    Refusal("g with another length", {"g": zeros(2, 21, 4)}, ValueError, ("g", "[2,21,4]", "20")),
    Refusal("g for each channel", {"g": zeros(2, 20, 4, 32)}, ValueError, ("g", "[2,20,4,32]", "[2,20,4]")),
    Refusal("beta with too few heads", {"beta": zeros(2, 20, 2)}, ValueError, ("beta", "[2,20,2]", "4")),
    Refusal("the other state layout", {"initial_state": zeros(2, 4, 16, 32)}, ValueError,
            ("initial_state", "[2,4,16,32]", "32", "16")),
    Refusal("rows of the initial state", {"initial_state": zeros(1, 4, 32, 16)}, ValueError,
            ("initial_state", "[1,4,32,16]", "2")),
    Refusal("heads of the initial state", {"initial_state": zeros(2, 2, 32, 16)}, ValueError,
            ("initial_state", "[2,2,32,16]", "4")),
    Refusal("an initial state without columns", {"initial_state": zeros(2, 4, 32, 0)}, ValueError,
            ("initial_state", "[2,4,32,0]", "16")),
    Refusal("A_log of another size", {"use_gate_in_kernel": True, "A_log": zeros(2)}, ValueError,
            ("A_log", "[2]", "4")),
    Refusal("dt_bias per channel", {"use_gate_in_kernel": True, "A_log": zeros(4), "dt_bias": zeros(4 * 32)},
            ValueError, ("dt_bias", "[128]", "4")),
    Refusal("offsets that decrease", {"cu_seqlens": torch.tensor([0, 15, 12])}, ValueError,
            ("cu_seqlens", "15", "12"), draw=PACKED),
    Refusal("offsets past the end", {"cu_seqlens": torch.tensor([0, 12, 21])}, ValueError,
            ("cu_seqlens", "21", "20"), draw=PACKED),
    Refusal("offsets that do not start at 0", {"cu_seqlens": torch.tensor([1, 12, 20])}, ValueError,
            ("cu_seqlens", "1", "0"), draw=PACKED),
    Refusal("offsets that are floats", {"cu_seqlens": torch.tensor([0.0, 12.0, 20.0])}, (ValueError, TypeError),
            ("cu_seqlens", "f32", "i64"), draw=PACKED),
    Refusal("offsets in a list", {"cu_seqlens": [0, 12, 20]}, TypeError, ("cu_seqlens", "list"), draw=PACKED),
    Refusal("offsets with two dimensions", {"cu_seqlens": torch.tensor([[0], [12], [20]])}, ValueError,
            ("cu_seqlens", "2 dimensions"), draw=PACKED),
    Refusal("one number as offsets", {"cu_seqlens": torch.tensor(20), **NOTHING}, ValueError, ("cu_seqlens",),
            draw=PACKED),
    Refusal("no offsets at all", {"cu_seqlens": torch.tensor([], dtype=torch.int64), **NOTHING}, ValueError,
            ("cu_seqlens",), draw=PACKED),
    # ---- types
    Refusal("float64 inputs", {"q": zeros(2, 20, 2, 32, dtype=torch.float64)}, TypeError,
            ("q", "float64", "float32, float16 or bfloat16")),
    Refusal("integer inputs", {"v": zeros(2, 20, 4, 16, dtype=torch.int64)}, TypeError, ("v", "int64", "float32")),
    Refusal("complex inputs", {"k": zeros(2, 20, 2, 32, dtype=torch.complex64)}, TypeError, ("k", "complex64")),
    Refusal("float8 inputs", {"q": zeros(2, 20, 2, 32).to(torch.float8_e4m3fn)}, TypeError, ("q", "float8_e4m3fn")),
    Refusal("integer g", {"g": zeros(2, 20, 4, dtype=torch.int64)}, (ValueError, TypeError), ("g", "i64", "f32")),
    Refusal("g in uint16", {"g": zeros(2, 20, 4, dtype=torch.uint16)}, (ValueError, TypeError), ("g", "uint16")),
    Refusal("A_log in uint16", {"use_gate_in_kernel": True, "A_log": zeros(4, dtype=torch.uint16)},
            (ValueError, TypeError), ("A_log", "uint16")),
    Refusal("boolean beta", {"beta": zeros(2, 20, 4, dtype=torch.bool)}, (ValueError, TypeError), ("beta",)),
    Refusal("q is None", {"q": None}, TypeError, ("q", "NoneType")),
    Refusal("k is None", {"k": None}, TypeError, ("k", "NoneType")),
    Refusal("v is None", {"v": None}, TypeError, ("v", "NoneType")),
    Refusal("q is a list", {"q": [[1.0]]}, TypeError, ("q", "list")),
    Refusal("k is a numpy array", {"k": np.zeros((2, 20, 2, 32), np.float32)}, TypeError, ("k", "ndarray", "torch")),
    Refusal("g is a float", {"g": -0.1}, TypeError, ("g", "float")),
    Refusal("initial_state is a numpy array", {"initial_state": np.zeros((2, 4, 32, 16), np.float32)}, TypeError,
            ("initial_state", "ndarray")),
    Refusal("an unknown backend", {"options": PlanOptions(backend="gpu")}, (ValueError, NotImplementedError),
            ("gpu", "cpu")),
    Refusal("threads below 0", {"options": PlanOptions(threads=-1)}, ValueError, ("threads", "-1")),
    Refusal("context_split below 0", {"options": PlanOptions(context_split=-2)}, ValueError, ("context_split", "-2")),
]  # fmt: skip


def good(options: dict[str, Any]) -> Arguments:
    return draw(**{"B": 2, "T": 20, **options})


CASES = [
    pytest.param(refusal, function, id=f"{refusal.name} ({function.__name__.split('_')[0]})")
    for refusal in REFUSALS
    for function in refusal.functions
]


@pytest.mark.parametrize("refusal, function", CASES)
def test_refusal(refusal: Refusal, function: Callable[..., Any]) -> None:
    arguments = good(refusal.draw)
    function(**arguments)
    with pytest.raises(refusal.exception) as caught:
        function(**{**arguments, **refusal.change})
    assert "\n" not in str(caught.value)
    missing = [word for word in refusal.words if word not in str(caught.value)]
    assert not missing, f"{missing} not in: {caught.value}"


def test_order_of_the_checks() -> None:
    """A call with several faults raises what FLA raises: the first of its list."""
    faults: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({"state_v_first": True, "transpose_state_layout": True}, ValueError, "transpose_state_layout"),
        ({"k": zeros(2, 20, 1, 257)}, ValueError, "k has 1"),
        ({"v": zeros(2, 20, 3, 16)}, ValueError, "v has 3 heads"),
        ({"head_first": False}, DeprecationWarning, "head_first"),
        ({"chunk_size": 8}, ValueError, "chunk_size"),
        ({"cp_context": Context([0, 20])}, AssertionError, "cp_context"),
        ({"cu_seqlens": torch.tensor([0, 20])}, ValueError, "batch size"),
        ({"use_gate_in_kernel": True}, AssertionError, "A_log"),
        ({"allow_neg_eigval": True}, ValueError, "allow_neg_eigval"),
        ({"q": zeros(2, 20, 2, 257)}, AssertionError, "K is 257"),
    ]
    for first, (_, exception, words) in enumerate(faults):
        arguments = good({})
        arguments["q"] = arguments["k"] = zeros(2, 20, 2, 257)
        for change, _, _ in faults[first:]:
            arguments.update(change)
        with pytest.raises(exception, match=words):
            CHUNK(**arguments)


@pytest.mark.parametrize("function", BOTH)
def test_deprecated_name_of_the_layout(function: Callable[..., Any]) -> None:
    arguments = draw(state_v_first=True)
    want = function(**arguments)
    del arguments["state_v_first"]
    with pytest.warns(DeprecationWarning, match="transpose_state_layout.*state_v_first"):
        got = function(**arguments, transpose_state_layout=True)
    assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])
    with pytest.warns(DeprecationWarning):
        function(**draw(), transpose_state_layout=False)


def test_nothing_else_warns() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for function in BOTH:
            function(**draw(gate="raw", beta="negative", l2norm=True, lengths=[3, 4]))


def test_accepted_and_without_effect() -> None:
    """Helpers of other implementations."""
    arguments = draw(lengths=[40, 30])
    want = CHUNK(**arguments)
    got = CHUNK(
        **arguments,
        cu_seqlens_cpu=arguments["cu_seqlens"],
        chunk_indices=torch.tensor([[0, 0], [1, 0]]),
        auto_cp=False,
        enable_fwd_cp_cache=False,
        force_intra_cp=True,
        chunk_size=32,
    )
    assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])
    # Without use_gate_in_kernel A_log and dt_bias are dropped, and the recurrent function ignores head_first.
    got = RECURRENT(**arguments, A_log=torch.zeros(99), dt_bias=torch.zeros(99), head_first=True)
    assert torch.equal(got[0], want[0])


def test_positional_order() -> None:
    """FLA's order of arguments in both functions: the fifth is beta in one and gk in the other."""
    a = draw(l2norm=True, beta="negative")
    want = CHUNK(**a)
    got = CHUNK(
        a["q"], a["k"], a["v"], a["g"], a["beta"], None, a["initial_state"], True, True, True, True, False, None
    )
    assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])
    first = (a["q"], a["k"], a["v"], a["g"], None, None, a["beta"], None, a["initial_state"])
    got = RECURRENT(*first, True, True, False, None, None, True, True)
    assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])
    with pytest.raises(NotImplementedError, match="fifth positional argument is gk"):
        RECURRENT(a["q"], a["k"], a["v"], a["g"], a["beta"])
    with pytest.raises(TypeError):
        CHUNK(a["q"], a["k"], a["v"])


def test_tensors_elsewhere() -> None:
    """A device without a backend, and tensors without memory."""
    arguments = {name: x.to("meta") if isinstance(x, torch.Tensor) else x for name, x in draw().items()}
    o, final_state = CHUNK(**arguments)  # shapes and dtypes only
    assert o.is_meta and o.shape == (1, 70, 4, 16) and final_state.shape == (1, 4, 32, 16)
    arguments = draw()
    for name in ("q", "k", "v", "g", "beta", "initial_state"):
        sentence = "k is on cpu; it must be on meta like q" if name == "q" else f"{name} is on meta; it must be on cpu"
        with pytest.raises(ValueError, match=sentence):
            CHUNK(**{**arguments, name: arguments[name].to("meta")})


def test_sparse_and_quantised() -> None:
    arguments = draw()
    with pytest.raises((TypeError, RuntimeError, NotImplementedError)):
        CHUNK(**{**arguments, "v": arguments["v"].to_sparse()})


def test_numpy_gets_the_same_refusals() -> None:
    def arrays(x: Any) -> Any:
        return x.numpy() if isinstance(x, torch.Tensor) else x

    skipped = {"float8 inputs", "k is a numpy array", "initial_state is a numpy array"}
    faults = []
    for refusal in REFUSALS:
        if refusal.name in skipped:
            continue
        arguments = {name: arrays(x) for name, x in good(refusal.draw).items()}
        change = {name: arrays(x) for name, x in refusal.change.items()}
        for function in refusal.functions:
            try:
                function(**{**arguments, **change})
                faults.append(f"{refusal.name}: not refused")
            except Exception as error:
                missing = [word for word in refusal.words if word not in str(error)]
                if not isinstance(error, refusal.exception) or missing:
                    faults.append(f"{refusal.name}: {missing} not in {type(error).__name__}: {error}")
    assert not faults, "\n".join(faults)
    with pytest.raises(TypeError, match=r"k is a Tensor.*numpy"):
        CHUNK(**{**{name: arrays(x) for name, x in draw().items()}, "k": draw()["k"]})


def test_the_two_passes() -> None:
    a = draw()
    names = ("q", "k", "v", "g", "beta")
    tensors = [a[name] for name in names]
    gamma, A, o, *_ = chunk_gated_delta_rule_fwd(*tensors)
    with pytest.raises(TypeError, match="use_qk_l2norm_in_kernel"):
        chunk_gated_delta_rule_fwd(*tensors, use_qk_l2norm_in_kernel=True)
    with pytest.raises(ValueError, match="g and beta"):
        chunk_gated_delta_rule_fwd(a["q"], a["k"], a["v"], None, a["beta"])
    with pytest.raises(AssertionError, match=r"g .*bfloat16.*float32"):
        chunk_gated_delta_rule_bwd(a["q"], a["k"], a["v"], gamma.bfloat16(), a["beta"], A, o)
    with pytest.raises(NotImplementedError, match="cp_context"):
        chunk_gated_delta_rule_fwd(*tensors, cp_context=Context())


def test_plan() -> None:
    sizes = {"tokens": 100, "heads_k": 2, "heads_v": 4, "dim_k": 64, "dim_v": 64}
    assert plan(**sizes).forward_backend == "cpu"
    for change, exception, words in (
        ({"heads_v": 3}, ValueError, ("heads_v", "3", "2")),
        ({"dim_k": 0}, ValueError, ("dim_k", "0")),
        ({"tokens": -1}, ValueError, ("tokens", "-1")),
        ({"dtype": "float64"}, TypeError, ("dtype", "float64", "bfloat16")),
        ({"gate": "vector"}, ValueError, ("gate", "vector", "raw")),
        ({"device": "tpu"}, ValueError, ("device", "tpu", "cuda")),
        ({"device": "cuda"}, NotImplementedError, ("cuda",)),
        ({"sequences": 2, "batch": 3}, ValueError, ("batch", "3", "1")),
        ({"dim_k": 300, "options": PlanOptions(backend="cpu")}, NotImplementedError, ("300", "256")),
    ):
        with pytest.raises(exception) as caught:
            plan(**{**sizes, **change})
        missing = [word for word in words if word not in str(caught.value)]
        assert not missing, f"{change}: {missing} not in: {caught.value}"
