"""Hypothesis: any shape, dtype, layout in memory and combination of options, against the oracle in double."""

from __future__ import annotations

import itertools
from typing import Any

import ml_dtypes
import numpy as np
import torch
from helpers import (
    Arguments,
    assert_close,
    doubles,
    draw,
    gradients,
    head_axis,
    limit,
    native_calls,
    oracle,
    oracle_gradients,
    with_tensors,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from flash_qla import (
    PlanOptions,
    chunk_gated_delta_rule,
    fused_recurrent_gated_delta_rule,
    gated_delta_rule_decode,
)

DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])
SIZES = st.one_of(st.integers(1, 40), st.sampled_from([60, 64, 96, 100, 128, 192, 256]))
TOKENS = st.one_of(st.integers(0, 20), st.sampled_from([63, 64, 65, 127, 128, 129, 190]))


@st.composite
def instances(draw_: Any, packed: bool | None = None) -> Arguments:
    """Arguments of `chunk_gated_delta_rule`, contiguous."""
    Hk = draw_(st.integers(1, 3))
    Hv = Hk * draw_(st.integers(1, 3))
    # NOTE: not K = 1. All keys are the same there up to their sign: each token replaces the one before, gradients
    # cancel to zero exactly, and nothing can be said about relative errors. test_judges.py has the case.
    K, V = draw_(SIZES.filter(lambda size: size > 1)), draw_(SIZES)
    options: dict[str, Any] = {
        "dtype": draw_(DTYPES),
        "gate_dtype": draw_(DTYPES),
        "state_dtype": draw_(DTYPES),
        "gate": draw_(st.sampled_from(["log", "raw", "none"])),
        "beta": draw_(st.sampled_from(["value", "logit", "negative", "none"])),
        "h0": draw_(st.booleans()),
        "l2norm": draw_(st.booleans()),
        "state_v_first": draw_(st.booleans()),
        "seed": draw_(st.integers(0, 2**16)),
    }
    if draw_(st.booleans()) if packed is None else packed:
        options["lengths"] = draw_(st.lists(TOKENS, min_size=1, max_size=4))
        options["T"] = sum(options["lengths"]) + draw_(st.integers(0, 3))
        options["index_dtype"] = draw_(st.sampled_from([torch.int32, torch.int64]))
    else:
        options["B"], options["T"] = draw_(st.integers(1, 3)), draw_(TOKENS)
    arguments = draw(Hk=Hk, Hv=Hv, K=K, V=V, **options)
    arguments["scale"] = draw_(st.sampled_from([None, 1.0, 0.3]))
    arguments["output_final_state"] = draw_(st.booleans())
    if arguments.get("dt_bias") is not None and draw_(st.booleans()):
        arguments["dt_bias"] = None
    return arguments


def few(x: Tensor, axis: int, dtype: torch.dtype) -> float:
    """What the limits are multiplied by: errors of 16-bit inputs are averages over the elements of a head, and few
    elements scatter."""
    return 1.0 if dtype == torch.float32 else 1 + 4 / max(x.numel() / max(x.shape[axis], 1), 1) ** 0.5


def check(got: Any, want: Any, arguments: Arguments) -> None:
    dtype = arguments["q"].dtype
    o, final_state = got
    assert o.dtype == dtype
    assert_close("o", o, want[0], 1.5 * limit("o", dtype) * few(o, 2, dtype), floor=0.1)
    assert (final_state is None) == (not arguments["output_final_state"])
    if final_state is not None:
        assert final_state.dtype == torch.float32
        relative = 1.5 * limit("final_state", dtype) * few(final_state, 1, dtype)
        assert_close("final_state", final_state, want[1], relative, floor=0.1)


@given(instances())
def test_forward(arguments: Arguments) -> None:
    check(chunk_gated_delta_rule(**arguments), oracle(arguments), arguments)


@settings(max_examples=settings.default.max_examples // 3)  # the oracle's backward pass is slow
@given(instances())
def test_gradients(arguments: Arguments) -> None:
    dtype = arguments["q"].dtype
    got, want = gradients(chunk_gated_delta_rule, arguments), oracle_gradients(arguments)
    check(got[:2], want[:2], arguments)
    for name, gradient in want[2].items():
        x = arguments[name]
        assert got[2][name].dtype == x.dtype
        # 16-bit storage of the gradient, and of the inputs.
        relative = 2 * max(limit(name, dtype), 0 if x.dtype == torch.float32 else limit(name, x.dtype))
        relative *= few(gradient, head_axis(name, x), dtype)
        gate = name in ("g", "A_log", "dt_bias")
        floor, absolute = (1.0, 1e-4) if gate else (0.3, 1e-5)
        # NOTE: no relative statement about numbers that float16 cannot hold.
        if x.dtype == torch.float16:
            absolute = max(absolute, 1e-4)
        assert_close("d_" + name, got[2][name], gradient, relative, floor=floor, absolute=absolute)


# -------------------------------------------------------------------------------------------------------- memory


def place(kind: str, x: Tensor) -> Tensor:
    """The values of x in another layout."""
    if kind == "odd offset":
        return torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape)
    if kind == "gaps":
        return torch.nn.functional.pad(x, (1, 3))[..., 1 : 1 + x.shape[-1]]
    if kind == "heads first":
        return x.transpose(1, 2).contiguous().transpose(1, 2)
    if kind == "broadcast batch":
        return x[:1].expand(x.shape)
    if kind == "last first":
        return x.movedim(-1, 0).contiguous().movedim(0, -1)
    assert kind == "contiguous"
    return x


LAYOUTS = st.sampled_from(["contiguous", "odd offset", "gaps", "heads first", "broadcast batch", "last first"])
INPUTS = ("q", "k", "v", "g", "beta")


@given(instances(packed=False), st.data())
def test_layouts_do_not_matter(arguments: Arguments, data: st.DataObject) -> None:
    """The same values in any layout give the same bits, forward and backward."""
    layouts = {name: data.draw(LAYOUTS, name) for name in (*INPUTS, "initial_state")}
    placed = with_tensors(arguments, lambda name, x: place(layouts[name], x) if name in layouts and x.numel() else x)
    dense = with_tensors(placed, lambda _, x: x.contiguous())

    def run(inputs: Arguments) -> Any:
        inputs = with_tensors(inputs, lambda _, x: x.detach().requires_grad_())
        outputs = [x for x in chunk_gated_delta_rule(**inputs) if x is not None]
        wanted = [x for x in inputs.values() if isinstance(x, Tensor) and x.requires_grad]
        return outputs, torch.autograd.grad(outputs, wanted, [torch.ones_like(x) for x in outputs], allow_unused=True)

    for got, want in zip(run(placed), run(dense)):
        for a, b in zip(got, want):
            assert (a is None) == (b is None) and (a is None or torch.equal(a, b))


@given(instances(packed=False), LAYOUTS, st.booleans())
def test_copies(arguments: Arguments, layout: str, backward: bool) -> None:
    """What the kernel reads is the caller's own memory, unless the last dimension is strided."""
    names = [name for name in INPUTS if arguments[name] is not None and arguments[name].numel()]
    inputs = {name: place(layout, arguments[name]).detach().requires_grad_(backward) for name in names}
    for step in ("forward", "backward"):
        with native_calls() as calls:
            if step == "forward":
                o, _ = chunk_gated_delta_rule(**{**arguments, **inputs})
            elif backward and names:
                o.sum().backward()
            else:
                break
        for position, name in enumerate(INPUTS):
            if name in names:
                x = inputs[name]
                readable = x.stride(-1) == 1 or x.shape[-1] == 1
                # A call may be the question whether something has to be copied; the last one computes.
                assert (calls[-1][position].data_ptr() == x.data_ptr()) == readable, name


@given(st.integers(1, 3), st.integers(1, 3), st.integers(1, 40), st.integers(1, 40), TOKENS, DTYPES, st.booleans())
def test_packed_qkv(Hk: int, group: int, K: int, V: int, T: int, dtype: torch.dtype, gaps: bool) -> None:
    """Slices of one [B,T,2*Hk*K+Hv*V] tensor, as models make them: not copied, and the same bits."""
    arguments = draw(B=2, T=T, Hk=Hk, Hv=Hk * group, K=K, V=V, dtype=dtype)
    parts = [arguments[name].flatten(2) for name in ("q", "k", "v")]
    if gaps:
        parts.append(parts[0])
    packed = torch.cat(parts, -1)
    q, k, v, *_ = packed.split([x.shape[-1] for x in parts], -1)
    views = {"q": q.unflatten(-1, (Hk, K)), "k": k.unflatten(-1, (Hk, K)), "v": v.unflatten(-1, (Hk * group, V))}
    with native_calls() as calls:
        got = chunk_gated_delta_rule(**{**arguments, **views})
    assert len(calls) == 1 and [x.data_ptr() for x in calls[0][:3]] == [x.data_ptr() for x in views.values()]
    want = chunk_gated_delta_rule(**arguments)
    assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])


# ----------------------------------------------------------------------------------------------------- equalities


@given(instances())
def test_torch_numpy_and_recurrent_agree(arguments: Arguments) -> None:
    """Bit by bit: the same numbers through the numpy path, and through the function for short sequences."""

    def array(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        return x.view(torch.uint16).numpy().view(ml_dtypes.bfloat16) if x.dtype == torch.bfloat16 else x.numpy()

    want = chunk_gated_delta_rule(**arguments)
    recurrent = fused_recurrent_gated_delta_rule(**arguments)
    assert torch.equal(recurrent[0], want[0])
    assert (recurrent[1] is None and want[1] is None) or torch.equal(recurrent[1], want[1])
    got = chunk_gated_delta_rule(**{name: array(x) for name, x in arguments.items()})
    assert got[0].dtype == array(want[0]).dtype
    np.testing.assert_array_equal(got[0], array(want[0]))
    if want[1] is not None:
        np.testing.assert_array_equal(got[1], want[1].numpy())


@given(instances(packed=True))
def test_packed_equals_separate(arguments: Arguments) -> None:
    """Bit by bit with `batch_invariant`: sequences do not see each other."""
    arguments["options"] = PlanOptions(batch_invariant=True)
    o, final_state = chunk_gated_delta_rule(**arguments)
    offsets = arguments["cu_seqlens"].tolist()
    for n, (begin, end) in enumerate(itertools.pairwise(offsets)):
        alone = {**arguments, "cu_seqlens": None}
        for name in ("q", "k", "v", "g", "beta"):
            if alone[name] is not None:
                alone[name] = alone[name][:, begin:end]
        if alone.get("initial_state") is not None:
            alone["initial_state"] = alone["initial_state"][n : n + 1]
        o_alone, state_alone = chunk_gated_delta_rule(**alone)
        assert torch.equal(o[:, begin:end], o_alone)
        assert final_state is None or torch.equal(final_state[n : n + 1], state_alone)
    assert not o[:, offsets[-1] :].any()


@given(instances(packed=False), st.data())
def test_one_call_equals_two(arguments: Arguments, data: st.DataObject) -> None:
    """A sequence cut anywhere, with the state carried over."""
    T = arguments["q"].shape[1]
    cut = data.draw(st.integers(0, T), "cut")
    arguments["output_final_state"] = True
    state, outputs = arguments.get("initial_state"), []
    for part in (slice(0, cut), slice(cut, T)):
        tokens = {name: x[:, part] for name, x in arguments.items() if name != "initial_state" and rank(x) > 2}
        o, state = chunk_gated_delta_rule(**{**arguments, **tokens, "initial_state": state})
        outputs.append(o)
    check((torch.cat(outputs, 1), state), oracle(arguments), arguments)


def rank(x: Any) -> int:
    return x.dim() if isinstance(x, Tensor) else 0


@given(
    st.integers(1, 4),
    st.integers(1, 16),
    st.integers(1, 2),
    st.integers(1, 3),
    SIZES,
    SIZES,
    DTYPES,
    DTYPES,
    st.booleans(),
)
def test_decode(
    N: int, T: int, Hk: int, group: int, K: int, V: int, dtype: torch.dtype, state_dtype: torch.dtype, v_first: bool
) -> None:
    """Decode on a pool equals the chunk function on the gathered states; other slots keep their bits."""
    arguments = draw(B=N, T=T, Hk=Hk, Hv=Hk * group, K=K, V=V, dtype=dtype, state_v_first=v_first, l2norm=True)
    h0 = arguments["initial_state"].to(state_dtype)
    pool = torch.randn(2 * N + 1, *h0.shape[1:], generator=torch.Generator().manual_seed(N)).to(state_dtype)
    slots = torch.randperm(2 * N + 1, generator=torch.Generator().manual_seed(T))[:N]
    pool[slots] = h0
    before = pool.clone()
    wanted = ("q", "k", "v", "g", "beta", "state_v_first", "use_qk_l2norm_in_kernel")
    o = gated_delta_rule_decode(
        **{name: x for name, x in arguments.items() if name in wanted}, state=pool, state_indices=slots
    )
    want = oracle({**arguments, "initial_state": h0})
    assert_close("o", o, want[0], 1.5 * limit("o", dtype) * few(o, 2, dtype), floor=0.1)
    relative = max(1.5 * limit("final_state", dtype), 0 if state_dtype == torch.float32 else 2**-8)
    assert_close("state", pool[slots], want[1], relative, floor=0.1)
    others = [slot for slot in range(2 * N + 1) if slot not in slots.tolist()]
    assert torch.equal(pool[others], before[others])


def test_doubles_are_exact() -> None:
    """What this file trusts: the oracle sees the very numbers of the instance."""
    arguments = draw(dtype=torch.bfloat16, gate="raw")
    for name, x in doubles(arguments).items():
        if isinstance(x, Tensor) and x.is_floating_point():
            assert x.dtype == torch.float64 and torch.equal(x.to(arguments[name].dtype), arguments[name])
