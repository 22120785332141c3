"""Mixed batches, checkpoints, and everything that the functions on pools refuse."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from helpers import Arguments, assert_close, limit, native_calls, oracle
from pools import HV, NAN, K, Model, V, close, inputs, pool_of
from torch import Tensor

from flash_qla import (
    PlanOptions,
    chunk_gated_delta_rule,
    gated_delta_rule_commit,
    gated_delta_rule_decode,
    gated_delta_rule_mixed,
    gated_delta_rule_verify,
)


def mixed_batch(lengths: list[int], **options: Any) -> tuple[Arguments, Tensor]:
    return inputs(1, sum(lengths) + 3, **options), torch.tensor(np.cumsum([0, *lengths]))


@pytest.mark.parametrize("decode_rows", [0, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_mixed(decode_rows: int, dtype: torch.dtype) -> None:
    """Decode rows first, prefill rows after, empty and padding rows among them; the tail is zero."""
    lengths, slots = [1, 3, 1, 70, 0, 129, 64, 5], torch.tensor([4, 0, 7, 2, 9, 1, -1, 3])
    x, offsets = mixed_batch(lengths, dtype=dtype)
    pool = pool_of(10)
    before = pool.clone()
    o = gated_delta_rule_mixed(**x, cu_seqlens=offsets, state=pool, state_indices=slots, decode_rows=decode_rows)
    live = [n for n in range(8) if n != 6]
    want = oracle({**x, "cu_seqlens": offsets, "initial_state": before[slots.clamp(min=0)], "output_final_state": True})
    padding = slice(int(offsets[6]), int(offsets[7]))
    want[0][:, padding] = 0
    assert_close("o", o, want[0], limit("o", dtype))
    assert not o[:, padding].any() and not o[:, int(offsets[-1]) :].any()
    assert_close("state", pool[slots[live]], want[1][live], 1.5 * limit("state", dtype))
    assert torch.equal(pool[[5, 6, 8, 9]], before[[5, 6, 8, 9]])  # 9 belongs to the empty sequence


def test_decode_rows_are_a_promise_about_speed_only() -> None:
    x, offsets = mixed_batch([1, 1, 2, 40])
    first, second = pool_of(4), pool_of(4)
    with native_calls() as calls:
        a = gated_delta_rule_mixed(**x, cu_seqlens=offsets, state=first, decode_rows=3)
    assert calls[-1][-4] == 3
    b = gated_delta_rule_mixed(**x, cu_seqlens=offsets, state=second)
    torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(first, second, rtol=1e-5, atol=1e-6)


def test_checkpoints_at_chunk_starts() -> None:
    lengths = [1, 64, 0, 130]
    x, offsets = mixed_batch(lengths)
    pool = pool_of(4)
    before = pool.double().numpy().copy()
    checkpoints = torch.full((1 + 1 + 0 + 3, HV, K, V), NAN)
    gated_delta_rule_mixed(**x, cu_seqlens=offsets, state=pool, checkpoints=checkpoints)
    model = Model(x)
    row = 0
    for n, length in enumerate(lengths):
        states = [before[n], *(state for _, state, _ in model.run(0, int(offsets[n]), int(offsets[n + 1]), before[n]))]
        for t in range(0, length, 64):
            close(checkpoints[row], states[t])
            row += 1
        close(pool[n], states[-1])
    assert row == 5


def test_checkpoints_every_n() -> None:
    lengths = [7, 2, 20]
    x, offsets = mixed_batch(lengths)
    pool = pool_of(3)
    before = pool.double().numpy().copy()
    checkpoints = torch.full((2 + 0 + 6, HV, K, V), NAN)
    gated_delta_rule_mixed(**x, cu_seqlens=offsets, state=pool, checkpoints=checkpoints, checkpoint_every=3)
    model = Model(x)
    row = 0
    for n, length in enumerate(lengths):
        states = [state for _, state, _ in model.run(0, int(offsets[n]), int(offsets[n + 1]), before[n])]
        for t in range(3, length + 1, 3):
            close(checkpoints[row], states[t - 1])
            row += 1


def test_checkpoints_of_a_list() -> None:
    x, offsets = mixed_batch([7, 2, 20])
    pool = pool_of(3)
    before = pool.clone()
    pairs = torch.tensor([[2, 20], [0, 0], [2, 3], [-1, 5], [0, 7], [2, 3]])
    checkpoints = torch.full((6, HV, K, V), 7.0, dtype=torch.bfloat16)
    gated_delta_rule_mixed(**x, cu_seqlens=offsets, state=pool, checkpoints=checkpoints, checkpoint_list=pairs)
    assert torch.equal(checkpoints[0], pool[2].bfloat16()) and torch.equal(checkpoints[4], pool[0].bfloat16())
    assert torch.equal(checkpoints[1], before[0].bfloat16())
    assert bool((checkpoints[3] == 7).all()) and torch.equal(checkpoints[2], checkpoints[5])


def test_prefix_caching() -> None:
    """A request that starts from a checkpoint gives what the whole request gives."""
    x, offsets = mixed_batch([200])
    pool = torch.zeros(2, HV, K, V)
    checkpoints = torch.zeros(4, HV, K, V)
    o = gated_delta_rule_mixed(
        **x, cu_seqlens=offsets, state=pool, state_indices=torch.tensor([0]), checkpoints=checkpoints
    )
    pool[1] = checkpoints[2]
    rest = {name: value[:, 128:200] for name, value in x.items()}
    again = gated_delta_rule_mixed(
        **rest, cu_seqlens=torch.tensor([0, 72]), state=pool, state_indices=torch.tensor([1])
    )
    torch.testing.assert_close(again, o[:, 128:200], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(pool[1], pool[0], rtol=1e-5, atol=1e-6)


def test_prefill_then_decode() -> None:
    """Equals one longer prefill."""
    x, pool = inputs(1, 100), torch.zeros(1, HV, K, V)
    outputs = [
        gated_delta_rule_mixed(
            **{name: a[:, :90] for name, a in x.items()}, cu_seqlens=torch.tensor([0, 90]), state=pool
        )
    ]
    for t in range(90, 100):
        outputs.append(gated_delta_rule_decode(**{name: a[:, t : t + 1] for name, a in x.items()}, state=pool))
    want = chunk_gated_delta_rule(**x, output_final_state=True)
    torch.testing.assert_close(torch.cat(outputs, 1), want[0], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(pool, want[1], rtol=1e-5, atol=1e-6)


def test_batch_invariance() -> None:
    """A row's bits do not depend on its neighbours."""
    options = PlanOptions(batch_invariant=True)
    x, pool = inputs(7, 2, dtype=torch.bfloat16), pool_of(7)
    alone = pool.clone()
    o = gated_delta_rule_decode(**x, state=pool, options=options)
    for row in (0, 3, 6):
        one = {name: value[row : row + 1] for name, value in x.items()}
        got = gated_delta_rule_decode(**one, state=alone, state_indices=torch.tensor([row]), options=options)
        assert torch.equal(got[0], o[row]) and torch.equal(alone[row], pool[row])


def test_every_length() -> None:
    """Prefill of 1 to 70 tokens, all in one call, equals the recurrence."""
    lengths = list(range(1, 71))
    x, offsets = mixed_batch(lengths, K=4, V=4, Hk=1, Hv=1)
    x["g"] = -torch.rand(x["g"].shape, generator=torch.Generator().manual_seed(3)) * 2
    pool = torch.zeros(len(lengths), 1, 4, 4)
    o = gated_delta_rule_mixed(**x, cu_seqlens=offsets, state=pool)
    model = Model(x)
    for n in range(len(lengths)):
        end = np.zeros((1, 4, 4))
        for t, state, want in model.run(0, int(offsets[n]), int(offsets[n + 1]), end):
            assert float((o[0, t].double() - torch.from_numpy(want)).abs().max()) < 1e-5
            end = state
        close(pool[n], end)


def test_nothing_but_empty_sequences() -> None:
    x, pool = inputs(1, 4), pool_of(3)
    before = pool.clone()
    o = gated_delta_rule_mixed(**x, cu_seqlens=torch.zeros(4, dtype=torch.int64), state=pool)
    assert not o.any() and torch.equal(pool, before)
    # No tokens at all. No sequences at all are refused.
    none = {name: value[:, :0] for name, value in x.items()}
    o = gated_delta_rule_mixed(**none, cu_seqlens=torch.zeros(4, dtype=torch.int64), state=pool)
    assert o.shape == (1, 0, HV, V) and torch.equal(pool, before)
    with pytest.raises(ValueError, match="cu_seqlens has 1 entries"):
        gated_delta_rule_mixed(**x, cu_seqlens=torch.zeros(1, dtype=torch.int64), state=pool)


def test_many_ragged_sequences() -> None:
    """1024 of them, and more rows times heads than 65535."""
    rng = np.random.default_rng(0)
    lengths = rng.integers(0, 6, 1024).tolist()
    x, offsets = mixed_batch(lengths, K=4, V=4, Hk=1, Hv=1)
    pool = torch.zeros(1024, 1, 4, 4)
    o = gated_delta_rule_mixed(**x, cu_seqlens=offsets, state=pool)
    want = oracle({**x, "cu_seqlens": offsets, "output_final_state": True})
    assert_close("o", o, want[0], 1e-5)
    assert_close("state", pool, want[1], 1e-5)
    x, pool = inputs(33000, 1, K=2, V=2, Hk=1, Hv=2), torch.zeros(33000, 2, 2, 2)
    o = gated_delta_rule_decode(**x, state=pool)
    want = oracle({**x, "output_final_state": True})
    assert_close("o", o, want[0], 1e-5)
    assert_close("state", pool, want[1], 1e-5)


def test_offsets_edited_in_place() -> None:
    """Plans keep no contents: the same tensor with other numbers is another call."""
    x, offsets = mixed_batch([30, 40])
    for lengths in ([30, 40], [1, 69], [70, 0], [0, 12]):
        offsets.copy_(torch.tensor(np.cumsum([0, *lengths])))
        pool = pool_of(2)
        o = gated_delta_rule_mixed(**x, cu_seqlens=offsets, state=pool)
        initial = pool_of(2)
        want = oracle({**x, "cu_seqlens": offsets, "initial_state": initial, "output_final_state": True})
        assert_close("o", o, want[0], 1e-5)
        assert_close("state", pool, want[1], 1e-5)


@pytest.mark.parametrize("K_, V_", [(96, 192), (128, 64), (100, 60)])
def test_head_sizes(K_: int, V_: int) -> None:
    x, offsets = mixed_batch([1, 70], K=K_, V=V_, dtype=torch.bfloat16)
    for state_v_first in (False, True):
        pool = torch.zeros(2, HV, *((V_, K_) if state_v_first else (K_, V_)), dtype=torch.bfloat16)
        o = gated_delta_rule_mixed(**x, cu_seqlens=offsets, state=pool, state_v_first=state_v_first)
        want = oracle({**x, "cu_seqlens": offsets, "output_final_state": True, "state_v_first": state_v_first})
        assert_close("o", o, want[0], limit("o", torch.bfloat16) * 1.5)
        assert_close("state", pool, want[1], limit("state", torch.bfloat16) * 1.5)


# ----------------------------------------------------------------------------------------------------- refusals


def good() -> Arguments:
    return {**inputs(3, 2), "state": pool_of(5), "state_indices": torch.tensor([4, -1, 0])}


@pytest.mark.parametrize(
    "change, exception, words",
    [
        ({"state_indices": torch.tensor([4, 5, 0])}, ValueError, ("state_indices", "5")),
        ({"state_indices": torch.tensor([4, 2, 4])}, ValueError, ("state_indices", "4")),
        ({"state_indices": torch.tensor([4, 2])}, ValueError, ("state_indices", "[2]", "3")),
        ({"state_indices": torch.tensor([4.0, 2.0, 1.0])}, (ValueError, TypeError), ("state_indices", "f32", "i32")),
        ({"state_indices": [4, 2, 1]}, TypeError, ("state_indices", "list")),
        ({"state": torch.zeros(5, HV, V, K)}, ValueError, ("state", f"[5,{HV},{V},{K}]")),
        ({"state": torch.zeros(5, HV, K, V, dtype=torch.float64)}, (ValueError, TypeError), ("state",)),
        ({"state": None}, (ValueError, TypeError), ("state",)),
        ({"state": torch.zeros(5, HV, K, 2 * V)[..., ::2]}, ValueError, ("state", "stride")),
        ({"state": torch.zeros(1, 1, 1, 1).expand(5, HV, K, V)}, ValueError, ("state",)),
        ({"has_initial_state": torch.ones(2, dtype=torch.bool)}, ValueError, ("has_initial_state", "[2]", "3")),
        ({"pad_slots": "zero"}, ValueError, ("pad_slots", "zero", "negative")),
        ({"use_gate_in_kernel": True}, ValueError, ("A_log",)),
        ({"allow_neg_eigval": True}, ValueError, ("allow_neg_eigval", "use_beta_sigmoid_in_kernel")),
        ({"out": torch.zeros(3, 2, HV, V + 1)}, ValueError, ("o", f"[3,2,{HV},{V + 1}]")),
        ({"out": torch.zeros(3, 2, HV, V, dtype=torch.int32)}, (ValueError, TypeError), ("o",)),
        ({"scale": 0}, ValueError, ("scale",)),
        ({"initial_state": pool_of(3)}, TypeError, ("initial_state",)),
        ({"output_final_state": True}, TypeError, ("output_final_state",)),
    ],
)
def test_refusals(change: dict[str, Any], exception: Any, words: tuple[str, ...]) -> None:
    arguments = good()
    gated_delta_rule_decode(**arguments)
    before = arguments["state"].clone()
    with pytest.raises(exception) as caught:
        gated_delta_rule_decode(**{**arguments, **change})
    assert torch.equal(arguments["state"], before)
    missing = [word for word in words if word not in str(caught.value)]
    assert not missing and "\n" not in str(caught.value), f"{missing} not in: {caught.value}"


def test_more_refusals() -> None:
    with pytest.raises(ValueError, match=r"17.*16"):
        gated_delta_rule_decode(**inputs(1, 17), state=pool_of(1))
    with pytest.raises(ValueError, match="checkpoint"):
        x, offsets = mixed_batch([3])
        gated_delta_rule_mixed(**x, cu_seqlens=offsets, state=pool_of(1), checkpoint_every=2)
    with pytest.raises(ValueError, match="both given"):
        gated_delta_rule_mixed(
            **x,
            cu_seqlens=offsets,
            state=pool_of(1),
            checkpoints=pool_of(1),
            checkpoint_every=2,
            checkpoint_list=torch.tensor([[0, 1]]),
        )
    with pytest.raises(ValueError, match=r"checkpoints.*\[1"):
        x, offsets = mixed_batch([70])
        gated_delta_rule_mixed(**x, cu_seqlens=offsets, state=pool_of(1), checkpoints=pool_of(1))
    with pytest.raises(ValueError, match="parent_tokens"):
        gated_delta_rule_verify(**inputs(1, 2), state=pool_of(1), parent_tokens=torch.tensor([[-1, 0]]))
    with pytest.raises(ValueError, match="intermediate_indices"):
        gated_delta_rule_verify(
            **inputs(2, 2),
            state=pool_of(2),
            intermediate_states=torch.zeros(2, 2, HV, K, V),
            intermediate_indices=torch.tensor([1, 1]),
        )
    with pytest.raises(ValueError, match=r"4 dimensions.*\[M,T,Hv"):
        gated_delta_rule_commit(pool_of(2), None, pool_of(2), torch.tensor([1, 1]))


@pytest.mark.parametrize("function", ["decode", "mixed"])
def test_no_gradients(function: str) -> None:
    x, pool = inputs(1, 2), pool_of(1)
    x["v"].requires_grad_()

    def call() -> Tensor:
        if function == "decode":
            return gated_delta_rule_decode(**x, state=pool)
        return gated_delta_rule_mixed(**x, cu_seqlens=torch.tensor([0, 2]), state=pool)

    with pytest.raises(NotImplementedError, match=r"requires a gradient.*no_grad"):
        call()
    with torch.no_grad():
        call()
    with torch.inference_mode():
        call()


def test_autograd_sees_the_writing() -> None:
    """A pool that autograd has saved may not be changed under its feet."""
    x, pool = inputs(1, 1), pool_of(1)
    weight = torch.ones(1, requires_grad=True)
    product = pool * weight
    version = pool._version
    gated_delta_rule_decode(**x, state=pool)
    assert pool._version > version
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.sum().backward()
