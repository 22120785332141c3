"""The package from the outside: every public function once, on numpy arrays and torch tensors; import, plan, info."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import draw

import flash_qla
from flash_qla import chunk_gated_delta_rule, fused_recurrent_gated_delta_rule, testing

REFERENCE = flash_qla.PlanOptions(backend="reference")


def arrays(arguments: dict[str, Any]) -> dict[str, Any]:
    """The same call with numpy arrays."""
    return {name: x.numpy() if isinstance(x, torch.Tensor) else x for name, x in arguments.items()}


def run(code: str, *options: str, **environment: str) -> str:
    """What a fresh interpreter prints."""
    done = subprocess.run([sys.executable, *options, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


# ------------------------------------------------------------------------------------------------------- numpy


@pytest.mark.parametrize("options", [flash_qla.PlanOptions(), REFERENCE])
@pytest.mark.parametrize("gate", ["log", "raw", "none"])
def test_numpy_equals_torch(gate: str, options: flash_qla.PlanOptions) -> None:
    arguments = draw(gate=gate, beta="logit", l2norm=True, lengths=[30, 0, 17], state_v_first=True)
    o, state = chunk_gated_delta_rule(**arguments, options=options)
    o_np, state_np = chunk_gated_delta_rule(**arrays(arguments), options=options)
    assert isinstance(o_np, np.ndarray) and o_np.dtype == np.float32 and state_np.dtype == np.float32
    np.testing.assert_array_equal(o_np, o.numpy())
    np.testing.assert_array_equal(state_np, state.numpy())


def test_numpy_bfloat16() -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    arguments = draw(T=90)
    as_torch = {**arguments, **{n: arguments[n].bfloat16() for n in ("q", "k", "v", "g", "initial_state")}}
    as_numpy = arrays(arguments)
    for name in ("q", "k", "v", "g", "initial_state"):
        as_numpy[name] = as_numpy[name].astype(ml_dtypes.bfloat16)
    o, state = chunk_gated_delta_rule(**as_torch)
    o_np, state_np = chunk_gated_delta_rule(**as_numpy)
    assert o_np.dtype == ml_dtypes.bfloat16 and state_np.dtype == np.float32
    np.testing.assert_array_equal(o_np.astype(np.float32), o.float().numpy())
    np.testing.assert_array_equal(state_np, state.numpy())


@pytest.mark.parametrize("change", ["read-only", "big endian", "reversed", "float64 gates", "fortran", "misaligned"])
def test_numpy_memory(change: str) -> None:
    arguments = arrays(draw())
    want, _ = chunk_gated_delta_rule(**arguments)
    for name, x in arguments.items():
        if not isinstance(x, np.ndarray):
            continue
        if change == "read-only":
            x.flags.writeable = False
        elif change == "big endian":
            arguments[name] = x.astype(x.dtype.newbyteorder(">"))
        elif change == "reversed":
            arguments[name] = np.flip(np.flip(x, 1).copy(), 1)
        elif change == "float64 gates" and name in ("g", "beta", "initial_state"):
            arguments[name] = x.astype(np.float64)
        elif change == "fortran":
            arguments[name] = np.asfortranarray(x)
        elif change == "misaligned":
            raw = np.zeros(x.nbytes + 1, np.uint8)
            arguments[name] = raw[1:].view(x.dtype).reshape(x.shape)
            arguments[name][...] = x
    o, _ = chunk_gated_delta_rule(**arguments)
    np.testing.assert_array_equal(o, want)


def test_numpy_and_torch_do_not_mix() -> None:
    arguments = draw()
    with pytest.raises(TypeError, match=r"\bk is a ndarray"):
        chunk_gated_delta_rule(**{**arguments, "k": arguments["k"].numpy()})
    with pytest.raises(TypeError, match=r"\bg is a Tensor"):
        chunk_gated_delta_rule(**{**arrays(arguments), "g": arguments["g"]})


def test_recurrent_is_the_same_rule() -> None:
    arguments = draw(T=9, gate="raw", beta="negative", l2norm=True)
    want, state = chunk_gated_delta_rule(**arguments)
    o, final = fused_recurrent_gated_delta_rule(**arguments)
    assert torch.equal(o, want) and torch.equal(final, state)
    arguments = draw(T=9)
    o, _ = fused_recurrent_gated_delta_rule(**{**arguments, "v": arguments["v"].half()})
    assert o.dtype == torch.float16


# ----------------------------------------------------------------------------------------------------- passes


@pytest.mark.parametrize("function", [chunk_gated_delta_rule, fused_recurrent_gated_delta_rule])
def test_the_library_looks_first(function: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python's checks are for calls that the library does not take: they would be a quarter of a call's time."""

    def never(*_: Any) -> None:
        raise AssertionError("checked in Python")

    calls = [draw(), draw(gate="raw", beta="logit", l2norm=True, lengths=[30, 0, 17], state_v_first=True)]
    calls.append({**calls[0], "scale": 1, "initial_state": None})
    want = [function(**arguments) for arguments in calls]
    monkeypatch.setattr("flash_qla.functions._check_arrays", never)
    for arguments, (o, state) in zip(calls, want):
        got, got_state = function(**arguments)
        assert torch.equal(got, o) and torch.equal(got_state, state)
    for change in ({"q": calls[0]["q"].bfloat16()}, {"g": calls[0]["g"].double()}, {"cu_seqlens": torch.zeros(0)}):
        with pytest.raises(AssertionError, match="checked in Python"):
            function(**{**calls[0], **change})


@pytest.mark.parametrize("lengths", [None, [70, 0, 63]])
@pytest.mark.parametrize("state_v_first", [False, True])
def test_the_two_passes(lengths: list[int] | None, state_v_first: bool) -> None:
    arguments = draw(B=2, T=150, lengths=lengths, state_v_first=state_v_first)
    names = ("q", "k", "v", "g", "beta", "initial_state")
    for name in names:
        arguments[name].requires_grad_()
    o, state = chunk_gated_delta_rule(**arguments)
    d_o, d_state = torch.randn_like(o), torch.randn_like(state)
    want = torch.autograd.grad([o, state], [arguments[name] for name in names], [d_o, d_state])

    cu, h0 = arguments.get("cu_seqlens"), arguments["initial_state"]
    q, k, v, g, beta = (arguments[name] for name in names[:5])
    gamma, A, o2, h, state2, cache = flash_qla.chunk_gated_delta_rule_fwd(
        q, k, v, g, beta, None, h0, cu, output_h=True, state_v_first=state_v_first
    )
    assert cache is None and gamma.dtype == g.dtype and A.dtype == k.dtype
    torch.testing.assert_close(o2, o)
    torch.testing.assert_close(state2, state)
    assert h.shape == (q.shape[0], 3, *state.shape[1:])
    torch.testing.assert_close(h[0, 0], h0[0])
    # gamma of the first chunk, and its triangle times the inverse.
    torch.testing.assert_close(gamma[0, :64], g[0, :64].cumsum(0))
    keys = k[0, :64, 0].detach()
    triangle = torch.eye(64) + (beta[0, :64, 1, None].detach() * (keys @ keys.T)).tril(-1)
    torch.testing.assert_close(A[0, :64, 1] @ triangle, torch.eye(64), atol=1e-5, rtol=0)

    dq, dk, dv, d_beta, dg, dh0 = flash_qla.chunk_gated_delta_rule_bwd(
        q, k, v, gamma, beta, A, d_o, d_state, None, h0, cu, state_v_first
    )
    for name, got, wanted in zip(("q", "k", "v", "g", "beta", "h0"), (dq, dk, dv, dg, d_beta, dh0), want):
        torch.testing.assert_close(got, wanted, atol=2e-5, rtol=1e-4, msg=name)


@pytest.mark.parametrize("lengths", [None, [70, 0, 63]])
def test_a_gate_that_forgets_everything_between_the_passes(lengths: list[int] | None) -> None:
    """g = -inf at the start, in the middle and twice in a row: the gates behind it can still be told from gamma."""
    arguments = draw(T=150, lengths=lengths)
    arguments["g"][0, [0, 5, 6, 64, 100]] = -torch.inf
    names = ("q", "k", "v", "g", "beta", "initial_state")
    for name in names:
        arguments[name].requires_grad_()
    o, state = chunk_gated_delta_rule(**arguments)
    d_o, d_state = torch.randn_like(o), torch.randn_like(state)
    want = torch.autograd.grad([o, state], [arguments[name] for name in names], [d_o, d_state])
    q, k, v, g, beta, h0 = (arguments[name] for name in names)
    cu = arguments.get("cu_seqlens")
    gamma, A, o2, *_ = flash_qla.chunk_gated_delta_rule_fwd(q, k, v, g, beta, None, h0, cu)
    assert bool(gamma.isfinite().all())
    torch.testing.assert_close(o2, o)
    got = flash_qla.chunk_gated_delta_rule_bwd(q, k, v, gamma, beta, A, d_o, d_state, None, h0, cu)
    for name, x, wanted in zip(("q", "k", "v", "beta", "g", "h0"), got, (*want[:3], want[4], want[3], want[5])):
        torch.testing.assert_close(x, wanted, atol=5e-5, rtol=2e-4, msg=name)
    gamma_numpy, *_ = flash_qla.chunk_gated_delta_rule_fwd(
        *(x.detach().numpy() for x in (q, k, v, g, beta)), cu_seqlens=None if cu is None else cu.numpy()
    )
    torch.testing.assert_close(torch.from_numpy(gamma_numpy), gamma)


# ---------------------------------------------------------------------------------------------------- serving


def pool_like(state: torch.Tensor, slots: int) -> torch.Tensor:
    return torch.randn(slots, *state.shape[1:])


@pytest.mark.parametrize("numpy", [False, True])
@pytest.mark.parametrize("pad", ["negative", "non_positive"])
def test_decode_on_a_pool(pad: str, numpy: bool) -> None:
    arguments = draw(B=4, T=1, gate="raw", beta="logit", l2norm=True)
    rule = {n: x for n, x in arguments.items() if n not in ("initial_state", "output_final_state")}
    pool = pool_like(arguments["initial_state"], 9)
    slots = torch.tensor([7, -1, 2, 4] if pad == "negative" else [7, 0, 2, 4], dtype=torch.int32)
    live = [0, 2, 3]
    want, state = chunk_gated_delta_rule(**{**arguments, "initial_state": pool[slots.clamp(min=0).long()]})
    after = pool.clone()
    if numpy:
        o = torch.from_numpy(
            flash_qla.gated_delta_rule_decode(
                **arrays(rule), state=after.numpy(), state_indices=slots.numpy(), pad_slots=pad
            )
        )
    else:
        o = flash_qla.gated_delta_rule_decode(**rule, state=after, state_indices=slots, pad_slots=pad)
    torch.testing.assert_close(o[live], want[live])
    assert not o[1].any()
    torch.testing.assert_close(after[slots[live].long()], state[live])
    untouched = [slot for slot in range(9) if slot not in (7, 2, 4)]
    assert torch.equal(after[untouched], pool[untouched])


def test_verify_and_commit() -> None:
    arguments = draw(B=3, T=4)
    rule = {n: x for n, x in arguments.items() if n not in ("initial_state", "output_final_state")}
    pool = pool_like(arguments["initial_state"], 12)
    start = torch.tensor([0, 5, 7])
    want, state = chunk_gated_delta_rule(**{**arguments, "initial_state": pool[start]})

    buffer, kept = torch.zeros(3, 4, *pool.shape[1:]), pool.clone()
    o = flash_qla.gated_delta_rule_verify(**rule, state=kept, state_indices=start, intermediate_states=buffer)
    torch.testing.assert_close(o, want)
    torch.testing.assert_close(buffer[:, 3], state)
    assert torch.equal(kept, pool)
    flash_qla.gated_delta_rule_commit(kept, start, buffer, torch.tensor([4, 0, 2]))
    torch.testing.assert_close(kept[0], state[0])
    assert torch.equal(kept[5], pool[5]) and torch.equal(kept[7], buffer[2, 1])

    slots = torch.tensor([[0, 1, 2, 3], [4, 5, 6, -1], [7, 8, 9, -1]])
    kept = pool.clone()
    o = flash_qla.gated_delta_rule_verify(**rule, state=kept, state_indices=slots, num_accepted=torch.tensor([1, 2, 9]))
    torch.testing.assert_close(o[:2], want[:2])
    assert not o[2].any()
    torch.testing.assert_close(kept[3], state[0])


def test_mixed_batch_with_checkpoints() -> None:
    arguments = draw(lengths=[1, 1, 70, 0, 30])
    rule = {n: x for n, x in arguments.items() if n not in ("initial_state", "output_final_state")}
    pool, slots = pool_like(arguments["initial_state"], 10), torch.tensor([3, 1, 9, 0, 4])
    want, state = chunk_gated_delta_rule(**{**arguments, "initial_state": pool[slots]})
    after, checkpoints = pool.clone(), torch.zeros(5, *pool.shape[1:])
    out = torch.full_like(want, float("nan"))
    o = flash_qla.gated_delta_rule_mixed(
        **rule, state=after, state_indices=slots, decode_rows=2, checkpoints=checkpoints, out=out
    )
    assert o is out
    torch.testing.assert_close(o, want)
    torch.testing.assert_close(after[slots], state)
    torch.testing.assert_close(checkpoints[2], pool[9])


def test_serving_has_no_gradients() -> None:
    arguments = draw(T=1)
    rule = {n: x for n, x in arguments.items() if n not in ("initial_state", "output_final_state")}
    rule["q"].requires_grad_()
    pool = arguments["initial_state"].clone()
    with pytest.raises(NotImplementedError, match="gradient"):
        flash_qla.gated_delta_rule_decode(**rule, state=pool)
    version = pool._version
    with torch.no_grad():
        flash_qla.gated_delta_rule_decode(**rule, state=pool)
    assert pool._version > version, "autograd has to know that the pool was written"


# ---------------------------------------------------------------------------------------------------- testing


def test_cases_of_the_table() -> None:
    assert {"forward", "backward", "decode", "edges", "shapes"} <= set(testing.tables())
    assert testing.expand("fwd:t{1|2},{f32|bf16}") == ["fwd:t1,f32", "fwd:t1,bf16", "fwd:t2,f32", "fwd:t2,bf16"]
    line = "fwd:b2,t70,hk2,hv4,k64,v32,gate=raw,g=mixed,h0,beta=logit,neg,l2norm,layout=vk"
    case = testing.case(line)
    tensors = {name: torch.from_numpy(x) for name, x in case.inputs.items()}
    o, state = chunk_gated_delta_rule(**tensors, output_final_state=True, **case.keywords())
    for name, got in (("o", o), ("final_state", state)):
        want = torch.from_numpy(case.expected[name].copy())
        allowed = testing.tolerance(line, name, "f32", want.numel() // 4).whole
        assert (got - want).norm() <= allowed * want.norm()
    assert testing.check(line)[0] == "passed"
    with pytest.raises(ValueError, match="character 9"):
        testing.case("fwd:t70,foo")
    with pytest.raises(ValueError, match="there is no table"):
        testing.table("nothing")


def test_every_line_of_the_edges_parses() -> None:
    for line in testing.table("edges")[::37]:
        assert testing.case(line).line


# ---------------------------------------------------------------------------------------- import, plan, info


def test_import_takes_no_torch_and_little_time() -> None:
    code = (
        "import time, sys; begin = time.perf_counter(); import flash_qla; took = time.perf_counter() - begin\n"
        "import numpy as np; q = np.zeros((1, 3, 1, 8), np.float32); g = q[..., 0]\n"
        "flash_qla.chunk_gated_delta_rule(q, q, q, g, g); print(took, 'torch' in sys.modules)"
    )
    took, torch_seen = min(run(code).split() for _ in range(3))
    assert torch_seen == "False"
    assert float(took) < 0.060


def test_names_are_there() -> None:
    for name in flash_qla.__all__:
        assert getattr(flash_qla, name) is not None
        assert name in dir(flash_qla)
    assert flash_qla.chunk_gdn is flash_qla.chunk_gated_delta_rule
    with pytest.raises(AttributeError, match="nothing"):
        flash_qla.nothing  # noqa: B018


def test_the_other_package_of_this_name(tmp_path: Path) -> None:
    (tmp_path / "flash_qla" / "ops").mkdir(parents=True)
    code = (
        f"import sys; sys.path.append({str(tmp_path)!r})\n"
        "try:\n    import flash_qla\nexcept ImportError as error:\n    print(error)"
    )
    assert "pip uninstall flash-qla flash-qla-cpp" in run(code)


def test_plan_and_info() -> None:
    plan = flash_qla.plan(tokens=512, heads_k=2, heads_v=4, dim_k=128, dim_v=128, dtype=torch.bfloat16, backward=True)
    assert plan.forward_backend in flash_qla.info()["backends"].split(", ")
    assert plan.backward_workspace_bytes > 0 and plan.decode_backend == ""
    assert "forward" in plan.explain() and str(plan) == plan.explain()
    with pytest.raises(NotImplementedError, match="cuda"):
        flash_qla.plan(tokens=512, heads_k=2, heads_v=4, dim_k=128, dim_v=128, device="cuda")
    with pytest.raises(ValueError, match="heads_v is 3"):
        flash_qla.plan(tokens=512, heads_k=2, heads_v=3, dim_k=128, dim_v=128)
    with pytest.raises(ValueError, match="this build has"):
        flash_qla.plan(
            tokens=1, heads_k=1, heads_v=1, dim_k=8, dim_v=8, options=flash_qla.PlanOptions(backend="nothing")
        )


def test_plans_are_kept() -> None:
    arguments = draw(T=13)
    chunk_gated_delta_rule(**arguments)
    before = flash_qla.info()
    chunk_gated_delta_rule(**arguments)
    after = flash_qla.info()
    assert int(after["plans found"]) == int(before["plans found"]) + 1
    for T in range(1, 400):
        flash_qla.plan(tokens=T, heads_k=1, heads_v=1, dim_k=8, dim_v=8)
    assert int(flash_qla.info()["plans kept"]) <= 256
