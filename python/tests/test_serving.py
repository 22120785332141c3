"""Decode and verification on pools of states, against a model in a few lines of numpy.


The list of section names is what inference engines need and what has failed in some deployed kernel: sequence lengths,
padding, garbage in unused memory, indices, gates, views, shapes, splitting.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from helpers import assert_close, draw, limit, oracle
from pools import HK, HV, NAN, TOKENS, K, Model, V, close, inputs, pool_of

from flash_qla import (
    chunk_gated_delta_rule,
    gated_delta_rule_commit,
    gated_delta_rule_decode,
    gated_delta_rule_verify,
)

# ------------------------------------------------------------------------------------------------------- decode


@pytest.mark.parametrize("pad_slots", ["negative", "non_positive"])
@pytest.mark.parametrize("T", [1, 3])
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
def test_decode(pad_slots: str, T: int, index_dtype: torch.dtype) -> None:
    """Right states in the right slots, zeros for padding rows, no other slot touched."""
    slots = [3, -1, 5, -1, 2, 7, 0, -1]
    x, pool = inputs(8, T), pool_of(9)
    before = pool.double().numpy().copy()
    o = gated_delta_rule_decode(
        **x, state=pool, state_indices=torch.tensor(slots, dtype=index_dtype), pad_slots=pad_slots
    )
    after = before.copy()
    model = Model(x)
    for row, slot in enumerate(slots):
        if slot < 0 or (slot == 0 and pad_slots == "non_positive"):
            assert not o[row].any()
            continue
        for t, state, want in model.run(row, 0, T, before[slot]):
            close(o[row, t], want)
            after[slot] = state
        close(pool[slot], after[slot])
    untouched = [i for i in range(9) if np.array_equal(after[i], before[i])]
    assert set(untouched) == {1, 4, 6, 8} | ({0} if pad_slots == "non_positive" else set())
    assert torch.equal(pool[untouched].double(), torch.from_numpy(before[untouched]))


def test_a_full_pool() -> None:
    """Every slot in use and padding rows in the batch: byte for byte nothing but the named slots changes."""
    x, pool = inputs(4, 1), pool_of(3)
    before = pool.clone()
    gated_delta_rule_decode(**x, state=pool, state_indices=torch.tensor([1, -1, -7, -1]))
    assert torch.equal(pool[[0, 2]], before[[0, 2]]) and not torch.equal(pool[1], before[1])
    gated_delta_rule_decode(**x, state=before, state_indices=torch.tensor([-1, -1, -1, -1]))
    assert torch.equal(before, pool_of(3))


def test_memory_around_the_pool() -> None:
    """Canaries before, between and behind the slots."""
    whole = torch.full((5, 3 + HV * K * V + 5), 7.0)
    pool = whole[1:4, 3 : 3 + HV * K * V].view(3, HV, K, V)
    pool.copy_(pool_of(3))
    gated_delta_rule_decode(**inputs(3, 2), state=pool, state_indices=torch.tensor([2, 0, 1]))
    outside = whole.clone()
    outside[1:4, 3 : 3 + HV * K * V] = 7.0
    assert bool((outside == 7.0).all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("state_v_first", [False, True])
def test_decode_dtypes(dtype: torch.dtype, state_dtype: torch.dtype, state_v_first: bool) -> None:
    x, pool = inputs(3, 1, dtype=dtype), pool_of(4, state_dtype)
    want = oracle({**x, "initial_state": pool[:3].clone(), "output_final_state": True})
    stored = pool.transpose(2, 3).contiguous() if state_v_first else pool
    o = gated_delta_rule_decode(**x, state=stored, state_v_first=state_v_first)
    assert o.dtype == dtype
    assert_close("o", o, want[0], 2 * limit("o", dtype))
    state = stored.transpose(2, 3) if state_v_first else stored
    assert_close("state", state[:3], want[1], 2 * max(limit("state", dtype), limit("state", state_dtype)))


def test_without_indices() -> None:
    """Row n works on slot n; the pool may be larger than the batch."""
    x, pool = inputs(2, 1), pool_of(5)
    want = pool.clone()
    o = gated_delta_rule_decode(**x, state=want, state_indices=torch.arange(2))
    assert torch.equal(gated_delta_rule_decode(**x, state=pool), o) and torch.equal(pool, want)


def test_another_slot_to_write() -> None:
    x, pool = inputs(3, 1), pool_of(9)
    before = pool.clone()
    read, write = torch.tensor([3, 5, 1]), torch.tensor([2, -1, 1])
    o = gated_delta_rule_decode(**x, state=pool, state_indices=read, state_indices_out=write)
    alone = before.clone()
    want = gated_delta_rule_decode(**x, state=alone, state_indices=read)
    assert torch.equal(pool[[2, 1]], alone[[3, 1]])
    assert torch.equal(pool[[0, 3, 4, 5, 6, 7, 8]], before[[0, 3, 4, 5, 6, 7, 8]])
    assert torch.equal(o[[0, 2]], want[[0, 2]])


@pytest.mark.parametrize("dtype", [torch.bool, torch.int32])
def test_garbage_in_slots(dtype: torch.dtype) -> None:
    """NaN in the slot of a row without an initial state, in unused slots and in the inputs of padding rows."""
    x, pool = inputs(4, 2), pool_of(8)
    clean_x, clean = {name: value.clone() for name, value in x.items()}, pool.clone()
    clean[5] = 0
    pool[5] = NAN
    pool[[1, 6]] = NAN
    for value in x.values():
        value[3] = NAN
    slots, flags = torch.tensor([0, 5, 3, -1]), torch.tensor([1, 0, 1, 0], dtype=dtype)
    o = gated_delta_rule_decode(**x, state=pool, state_indices=slots, has_initial_state=flags)
    want = gated_delta_rule_decode(**clean_x, state=clean, state_indices=slots)
    assert torch.equal(o, want) and torch.equal(pool[[0, 5, 3]], clean[[0, 5, 3]])
    assert bool(pool[[1, 6]].isnan().all())


def test_packed_rows() -> None:
    """Rows of different length, an empty one, and tokens left over."""
    lengths, slots = [1, 5, 0, 16], [2, 0, 4, 1]
    x, pool = inputs(1, 25), pool_of(5)
    before = pool.double().numpy().copy()
    offsets = np.cumsum([0, *lengths])
    o = gated_delta_rule_decode(
        **x, state=pool, state_indices=torch.tensor(slots), cu_seqlens=torch.tensor(offsets, dtype=torch.int32)
    )
    model = Model(x)
    for n, slot in enumerate(slots):
        end = before[slot]
        for t, state, want in model.run(0, offsets[n], offsets[n + 1], before[slot]):
            close(o[0, t], want)
            end = state
        close(pool[slot], end)
    assert not o[0, 22:].any() and np.array_equal(pool[[4, 3]].double().numpy(), before[[4, 3]])


def test_grouping() -> None:
    x, pool = inputs(2, 2), pool_of(2)
    before = pool.double().numpy().copy()
    o = gated_delta_rule_decode(**x, state=pool, grouping="tiled")
    model = Model(x, tiled=True)
    for row in range(2):
        for t, _, want in model.run(row, 0, 2, before[row]):
            close(o[row, t], want)
    with pytest.raises(ValueError, match=r"grouping is 'other'.*'interleaved' or 'tiled'"):
        gated_delta_rule_decode(**x, state=pool, grouping="other")


def test_output_of_the_caller() -> None:
    """`out` may have gaps; `output_dtype` keeps what float16 cannot hold."""
    x, pool = inputs(2, 1, dtype=torch.float16), pool_of(2) * 1e6
    again = pool.clone()
    wide = torch.full((2, 1, HV, V + 4), 7.0)
    out = wide[..., 2 : 2 + V]
    assert gated_delta_rule_decode(**x, state=pool, out=out) is out
    assert bool((wide[..., :2] == 7).all()) and bool((wide[..., 2 + V :] == 7).all())
    o = gated_delta_rule_decode(**x, state=again, output_dtype=torch.float32)
    assert o.dtype == torch.float32 and torch.equal(o, out)
    assert float(o.abs().max()) > 65504 and bool(o.isfinite().all())


def test_every_option_of_the_rule() -> None:
    """Raw gates, logits, l2norm, scale: as the chunk function."""
    a = draw(B=3, T=4, Hk=HK, Hv=HV, K=K, V=V, gate="raw", beta="negative", l2norm=True, state_v_first=True)
    a["scale"] = 0.3
    want = chunk_gated_delta_rule(**a)
    keywords = {name: value for name, value in a.items() if name not in ("initial_state", "output_final_state")}
    pool = a["initial_state"].clone()
    o = gated_delta_rule_decode(**keywords, state=pool)
    torch.testing.assert_close(o, want[0], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(pool, want[1], rtol=1e-5, atol=1e-6)
    # No gate and no beta.
    bare = {name: a[name] for name in ("q", "k", "v")}
    pool = a["initial_state"].clone()
    o = gated_delta_rule_decode(**bare, state=pool, state_v_first=True)
    want = chunk_gated_delta_rule(
        **bare, g=None, beta=None, initial_state=a["initial_state"], state_v_first=True, output_final_state=True
    )
    torch.testing.assert_close(o, want[0], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(pool, want[1], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("value", [0.0, -50.0, -1e4, -float("inf")])
def test_gates(value: float) -> None:
    """No decay, strong decay and a decay to exactly zero stay finite, also in 16 bits."""
    for dtype in (torch.float32, torch.bfloat16):
        x, pool = inputs(2, 3, dtype=dtype), pool_of(2)
        x["g"][:] = value
        want = oracle({**x, "initial_state": pool.clone(), "output_final_state": True})
        o = gated_delta_rule_decode(**x, state=pool)
        assert_close("o", o, want[0], 2 * limit("o", dtype))
        assert_close("state", pool, want[1], 2 * limit("state", dtype))


def test_many_steps() -> None:
    """Errors do not grow with the number of steps."""
    steps = 1500
    x = inputs(1, steps, dtype=torch.bfloat16)
    x["g"] = torch.rand(x["g"].shape, generator=torch.Generator().manual_seed(1)).mul(0.01).add(0.99).log()
    pool = torch.zeros(1, HV, K, V)
    for t in range(steps):
        gated_delta_rule_decode(**{name: value[:, t : t + 1] for name, value in x.items()}, state=pool)
    _, want = oracle({**x, "output_final_state": True})
    assert_close("state", pool, want, 1e-5)


def test_views_of_a_packed_projection() -> None:
    """q, k, v, g and beta as slices of one tensor, at odd element offsets."""
    x, pool = inputs(3, 1, dtype=torch.bfloat16, gate_dtype=torch.bfloat16), pool_of(3)
    parts = [x[name].flatten(2) for name in TOKENS]
    packed = torch.cat([parts[0].new_zeros(3, 1, 1), *parts], -1)
    views = dict(zip(TOKENS, packed.split([1, *(part.shape[-1] for part in parts)], -1)[1:]))
    views = {name: view.unflatten(-1, x[name].shape[2:]) for name, view in views.items()}
    want = pool.clone()
    o = gated_delta_rule_decode(**x, state=want)
    assert torch.equal(gated_delta_rule_decode(**views, state=pool), o) and torch.equal(pool, want)


# ------------------------------------------------------------------------------------------------------- verify


@pytest.mark.parametrize("T", [1, 4, 16])
def test_a_slot_for_each_token(T: int) -> None:
    """The run starts from slot [n, accepted - 1]; accepted outside 1..S makes a padding row."""
    accepted = [1, T, 0, T + 3]
    slots = torch.arange(4 * T, dtype=torch.int32).view(4, T)
    if T > 1:
        slots[1, 0] = -1  # this state is not kept
    x, pool = inputs(4, T), pool_of(4 * T + 1)
    before = pool.double().numpy().copy()
    o = gated_delta_rule_verify(
        **x, state=pool, state_indices=slots, num_accepted=torch.tensor(accepted, dtype=torch.int32)
    )
    after, model = before.copy(), Model(x)
    for row in range(2):
        for t, state, want in model.run(row, 0, T, before[int(slots[row, accepted[row] - 1])]):
            close(o[row, t], want)
            if slots[row, t] >= 0:
                after[int(slots[row, t])] = state
    assert not o[2:].any()
    close(pool, after)
    changed = {int(slot) for slot in slots[:2].flatten() if slot >= 0}
    others = [slot for slot in range(len(pool)) if slot not in changed]
    assert np.array_equal(pool[others].double().numpy(), before[others])


def test_wider_indices() -> None:
    """S above T: the columns behind T may name the start, and are not written."""
    x, pool = inputs(2, 2), pool_of(12)
    slots = torch.tensor([[0, 1, 2, 3], [4, 5, 6, 7]])
    before = pool.clone()
    o = gated_delta_rule_verify(**x, state=pool, state_indices=slots, num_accepted=torch.tensor([4, 1]))
    want = oracle({**x, "initial_state": before[[3, 4]], "output_final_state": True})
    assert_close("o", o, want[0], 1e-5)
    assert_close("state", pool[[1, 5]], want[1], 1e-5)
    assert torch.equal(pool[[2, 3, 6, 7, 8]], before[[2, 3, 6, 7, 8]])


@pytest.mark.parametrize("buffer_dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_buffer_and_commit(buffer_dtype: torch.dtype) -> None:
    """The pool stays as it is until commit; rejected and padding rows are left alone."""
    T, slots = 4, torch.tensor([6, -1, 2, 0, 3])
    places, accepted = torch.tensor([3, 1, -1, 0, 5]), torch.tensor([2, 4, 4, 0, 4])
    x, pool = inputs(5, T), pool_of(8)
    before = pool.clone()
    buffer = torch.full((6, T + 1, HV, K, V), NAN).to(buffer_dtype)
    o = gated_delta_rule_verify(
        **x, state=pool, state_indices=slots, intermediate_states=buffer, intermediate_indices=places
    )
    assert torch.equal(pool, before)
    model = Model(x)
    rounding = 1e-5 if buffer_dtype == torch.float32 else 2**-8
    for row, (slot, place) in enumerate(zip(slots.tolist(), places.tolist())):
        if slot < 0:
            assert not o[row].any()
            continue
        for t, state, want in model.run(row, 0, T, before[slot].double().numpy()):
            close(o[row, t], want)
            if place >= 0:
                close(buffer[place, t], state, rounding)
    written = {3, 0, 5}
    assert bool(buffer[[place for place in range(6) if place not in written]].isnan().all())
    assert bool(buffer[:, T].isnan().all())
    gated_delta_rule_commit(pool, slots, buffer, accepted, places)
    assert torch.equal(pool[6], buffer[3, 1].float()) and torch.equal(pool[3], buffer[5, 3].float())
    assert torch.equal(pool[[0, 1, 2, 4, 5, 7]], before[[0, 1, 2, 4, 5, 7]])


def test_commit_out_of_range() -> None:
    """Numbers outside 1..T leave the slot as it is."""
    pool, buffer = pool_of(6), torch.randn(6, 3, HV, K, V)
    before = pool.clone()
    gated_delta_rule_commit(pool, None, buffer, torch.tensor([-1, 0, 3, 4, 1000, 1]))
    assert torch.equal(pool[[0, 1, 3, 4]], before[[0, 1, 3, 4]])
    assert torch.equal(pool[2], buffer[2, 2]) and torch.equal(pool[5], buffer[5, 0])
    pool = before.clone()
    gated_delta_rule_commit(
        pool, torch.tensor([0, 1, 2, -1, 4, 5]), buffer, torch.full((6,), 2), pad_slots="non_positive"
    )
    assert torch.equal(pool[[0, 3]], before[[0, 3]]) and torch.equal(pool[1], buffer[1, 1])


def test_a_tree() -> None:
    """Each token continues from its parent's state."""
    parents = torch.tensor([[-1, 0, 0, 2, 1, -1], [-1, -1, 0, 1, 2, 4]], dtype=torch.int32)
    x, pool, buffer = inputs(2, 6), pool_of(2), torch.zeros(2, 6, HV, K, V)
    before = pool.double().numpy().copy()
    o = gated_delta_rule_verify(**x, state=pool, intermediate_states=buffer, parent_tokens=parents)
    model = Model(x)
    for row in range(2):
        states: list[np.ndarray] = []
        for t, parent in enumerate(parents[row].tolist()):
            state, want = model.token(row, t, before[row] if parent < 0 else states[parent])
            states.append(state)
            close(o[row, t], want)
            close(buffer[row, t], state)
    assert np.array_equal(pool.double().numpy(), before)


def test_verify_with_commit() -> None:
    """commit_state writes the last state too; without it a plain verification does."""
    x, pool = inputs(2, 3), pool_of(2)
    slots, buffer = torch.tensor([1, 0]), torch.zeros(2, 3, HV, K, V)
    gated_delta_rule_verify(**x, state=pool, state_indices=slots, intermediate_states=buffer, commit_state=True)
    assert torch.equal(pool[slots], buffer[:, 2])
    plain = pool_of(2)
    gated_delta_rule_verify(**x, state=plain, state_indices=slots)
    assert torch.equal(plain, pool)
