"""numpy arrays: the same functions, forward only, and without torch."""

from __future__ import annotations

import mmap
import subprocess
import sys
import tempfile
import textwrap
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from helpers import Arguments, draw
from torch import Tensor

from flash_qla import (
    chunk_gated_delta_rule,
    chunk_gated_delta_rule_bwd,
    chunk_gated_delta_rule_fwd,
    fused_recurrent_gated_delta_rule,
    gated_delta_rule_commit,
    gated_delta_rule_decode,
    gated_delta_rule_mixed,
    gated_delta_rule_verify,
    testing,
)

HK, HV, K, V = 2, 4, 16, 8


def array(x: Any) -> Any:
    if not isinstance(x, Tensor):
        return x
    x = x.detach()
    return x.view(torch.uint16).numpy().view(ml_dtypes.bfloat16) if x.dtype == torch.bfloat16 else x.numpy()


def arrays(arguments: Arguments) -> Arguments:
    return {name: array(x) for name, x in arguments.items()}


def same(got: Any, want: Any) -> bool:
    """The same dtype and bits."""
    want = array(want)
    return got.dtype == want.dtype and got.shape == want.shape and got.tobytes() == np.ascontiguousarray(want).tobytes()


def python(code: str) -> str:
    command = [sys.executable, "-c", textwrap.dedent(code)]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=100).stdout


# -------------------------------------------------------------------------------------------------- without torch


def test_no_torch() -> None:
    """No function imports it, although it is installed; nor does anything else that is heavy."""
    python(
        """
        import sys
        import numpy as np
        import flash_qla
        q, v, g = (np.ones(shape, np.float32) for shape in ((2, 5, 1, 8), (2, 5, 2, 4), (2, 5, 2)))
        g = -g
        flash_qla.chunk_gated_delta_rule(q, q, v, g, -g, output_final_state=True)
        flash_qla.fused_recurrent_gated_delta_rule(q, q, v, g=g, beta=-g)
        flash_qla.chunk_gated_delta_rule_fwd(q, q, v, g, -g, output_h=True)
        pool, buffer = np.zeros((4, 2, 8, 4), np.float32), np.zeros((2, 5, 2, 8, 4), np.float32)
        slots = np.array([3, 0])
        flash_qla.gated_delta_rule_decode(q, q, v, g, -g, state=pool, state_indices=slots)
        flash_qla.gated_delta_rule_verify(q, q, v, g, -g, state=pool, state_indices=slots, intermediate_states=buffer)
        flash_qla.gated_delta_rule_commit(pool, slots, buffer, np.array([2, 1]))
        flash_qla.gated_delta_rule_mixed(
            q[:1], q[:1], v[:1], g[:1], -g[:1], cu_seqlens=np.array([0, 1, 5]), state=pool, state_indices=slots
        )
        flash_qla.plan(tokens=5, heads_k=1, heads_v=2, dim_k=8, dim_v=4).explain()
        flash_qla.info()
        flash_qla.testing.oracle(q, q, v, g, -g)
        flash_qla.testing.case("fwd:t5")
        try:
            flash_qla.chunk_gated_delta_rule(q, q, v, g, None, scale=0.0)
        except ValueError:
            pass
        heavy = [name for name in ("torch", "pandas", "scipy", "jax", "matplotlib") if name in sys.modules]
        assert not heavy, heavy
        """
    )


def test_torch_after_numpy() -> None:
    """A program that starts with arrays may go on with tensors; the module is loaded once."""
    output = python(
        """
        import numpy as np, flash_qla
        q = np.ones((1, 5, 1, 8), np.float32); g = -np.ones((1, 5, 1), np.float32)
        a, _ = flash_qla.chunk_gated_delta_rule(q, q, q, g, -g)
        import torch
        q, g = torch.from_numpy(q), torch.from_numpy(g)
        b, _ = flash_qla.chunk_gated_delta_rule(q.requires_grad_(), q, q, g, -g)
        b.sum().backward()
        print(np.array_equal(a, b.detach().numpy()), bool(q.grad.isfinite().all()))
        """
    )
    assert output.split() == ["True", "True"]


def test_import_time() -> None:
    """Under 60 ms of processor time without torch, the best of several; other programs' work is not counted."""
    code = """
        import time, sys
        begin = time.process_time()
        import flash_qla
        print(time.process_time() - begin, "torch" in sys.modules)
    """
    best = 1.0
    for _ in range(8):
        took, torch_seen = python(code).split()
        assert torch_seen == "False"
        best = min(best, float(took))
        if best < 0.06:
            return
    raise AssertionError(f"import flash_qla took {1e3 * best:.0f} ms at best")


# ------------------------------------------------------------------------------------------------------- equality


CASES: dict[str, dict[str, Any]] = {
    "plain": {"h0": False},
    "everything": {"gate": "raw", "beta": "negative", "l2norm": True, "state_v_first": True},
    "packed": {"lengths": [5, 0, 66], "T": 80, "index_dtype": torch.int32},
    "bare": {"gate": "none", "beta": "none", "B": 2},
    "no tokens": {"T": 0, "B": 2},
    "no sequences' tokens": {"lengths": [0, 0], "T": 3},
    "bfloat16 gates": {"gate_dtype": torch.bfloat16, "state_dtype": torch.bfloat16, "gate": "raw"},
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", CASES)
def test_equals_torch(case: str, dtype: torch.dtype) -> None:
    arguments = draw(Hk=HK, Hv=HV, K=K, V=V, dtype=dtype, **CASES[case])
    for function in (chunk_gated_delta_rule, fused_recurrent_gated_delta_rule):
        want, got = function(**arguments), function(**arrays(arguments))
        assert isinstance(got[0], np.ndarray)
        assert same(got[0], want[0]) and same(got[1], want[1])
    without = {**arguments, "output_final_state": False}
    got = chunk_gated_delta_rule(**arrays(without))
    assert same(got[0], want[0]) and got[1] is None


def test_the_oracle_equals_torch() -> None:
    arguments = draw(gate="raw")
    want, got = testing.oracle(**arguments), testing.oracle(**arrays(arguments))
    assert got[0].dtype == np.float64 and same(got[0], want[0]) and same(got[1], want[1])


def test_mixed_dtypes() -> None:
    """q, k and v of different types are computed in float32; o has q's dtype here and v's in the recurrent function."""
    arguments = draw()
    arguments["q"], arguments["v"] = arguments["q"].half(), arguments["v"].bfloat16()
    for function, dtype in (
        (chunk_gated_delta_rule, np.float16),
        (fused_recurrent_gated_delta_rule, ml_dtypes.bfloat16),
    ):
        want, got = function(**arguments), function(**arrays(arguments))
        assert got[0].dtype == dtype and same(got[0], want[0]) and same(got[1], want[1])


def test_forward_pass() -> None:
    arguments = draw(lengths=[70, 0, 9], T=82)
    names = ("q", "k", "v", "g", "beta")
    keywords = {name: arguments[name] for name in ("initial_state", "cu_seqlens")}
    want = chunk_gated_delta_rule_fwd(*(arguments[name] for name in names), **keywords, output_h=True)
    got = chunk_gated_delta_rule_fwd(*(array(arguments[name]) for name in names), **arrays(keywords), output_h=True)
    assert got[5] is None and want[5] is None
    np.testing.assert_allclose(got[1], want[1].numpy(), rtol=1e-5, atol=1e-6)  # A by LAPACK and by torch
    for position in (0, 2, 3, 4):
        assert same(got[position], want[position]), position


def test_no_gradients() -> None:
    arguments = arrays(draw())
    inputs = [arguments[name] for name in ("q", "k", "v", "g", "beta")]
    with pytest.raises(NotImplementedError, match="no gradients for numpy arrays"):
        chunk_gated_delta_rule_bwd(*inputs, None, arguments["v"])


# --------------------------------------------------------------------------------------------------------- memory


def layouts(x: np.ndarray[Any, Any]) -> dict[str, np.ndarray[Any, Any]]:
    wide = np.zeros((*x.shape[:-1], 2 * x.shape[-1] + 3), x.dtype)
    wide[..., 1 : 1 + x.shape[-1]] = x
    every_other = np.zeros((*x.shape[:-1], 2 * x.shape[-1]), x.dtype)
    every_other[..., ::2] = x
    odd = np.zeros(x.nbytes + 1, np.uint8)
    odd[1:] = np.frombuffer(x.tobytes(), np.uint8)
    read_only = x.copy()
    read_only.flags.writeable = False
    with tempfile.TemporaryFile() as file:
        file.write(x.tobytes())
        file.flush()
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    return {
        "gaps": wide[..., 1 : 1 + x.shape[-1]],
        "Fortran order": np.asfortranarray(x),
        "every other element": every_other[..., ::2],
        "reversed": np.ascontiguousarray(x[:, ::-1])[:, ::-1],
        "reversed twice": np.ascontiguousarray(x[..., ::-1])[..., ::-1],
        "read-only": read_only,
        "big endian": x.astype(x.dtype.newbyteorder(">")),
        "no alignment": odd[1:].view(x.dtype).reshape(x.shape),
        "broadcast": np.broadcast_to(x[:1], x.shape),
        "a file": np.frombuffer(mapped, x.dtype).reshape(x.shape),
        "a subclass": x.view(Subclass),
    }


class Subclass(np.ndarray[Any, Any]):
    pass


KINDS = list(layouts(np.zeros((1, 2, 3, 4), np.float32)))


@pytest.mark.parametrize("kind", KINDS)
def test_layouts(kind: str) -> None:
    """The same values anywhere in memory give the same bits, and no input is written."""
    arguments = arrays(draw(B=1, T=70, gate="raw", Hk=HK, Hv=HV, K=K, V=V))
    want = chunk_gated_delta_rule(**arguments)
    placed = {
        name: layouts(x)[kind] if isinstance(x, np.ndarray) and x.ndim > 2 else x for name, x in arguments.items()
    }
    before = {name: x.copy() for name, x in placed.items() if isinstance(x, np.ndarray)}
    got = chunk_gated_delta_rule(**placed)
    assert np.array_equal(got[0], want[0]) and np.array_equal(got[1], want[1])
    assert got[0].dtype.name == got[1].dtype.name == "float32"
    assert all(np.array_equal(placed[name], x) for name, x in before.items())


def test_float64_gates() -> None:
    arguments = arrays(draw(gate="raw"))
    want = chunk_gated_delta_rule(**arguments)
    for name in ("g", "beta", "A_log", "dt_bias", "initial_state"):
        arguments[name] = arguments[name].astype(np.float64)
    got = chunk_gated_delta_rule(**arguments)
    assert got[0].tobytes() == want[0].tobytes() and got[1].tobytes() == want[1].tobytes()


@pytest.mark.parametrize("kind", ["list", "scalar", "object", "string", "masked"])
def test_not_an_array(kind: str) -> None:
    arguments = arrays(draw(T=3))
    g = arguments["g"]
    arguments["g"] = {
        "list": g.tolist(),
        "scalar": np.float32(-1),
        "object": g.astype(object),
        "string": g.astype(str),
        "masked": np.ma.masked_array(g, mask=g < -0.1),
    }[kind]
    if kind == "masked":
        # A subclass of ndarray: its mask is not looked at, as in numpy's own C functions.
        chunk_gated_delta_rule(**arguments)
        return
    with pytest.raises((TypeError, ValueError), match="g "):
        chunk_gated_delta_rule(**arguments)


# -------------------------------------------------------------------------------------------------------- serving


def serving_inputs(B: int, T: int, dtype: torch.dtype) -> Arguments:
    arguments = draw(B=B, T=T, Hk=HK, Hv=HV, K=K, V=V, dtype=dtype, h0=False)
    return {name: arguments[name] for name in ("q", "k", "v", "g", "beta")}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_serving_equals_torch(dtype: torch.dtype, state_dtype: torch.dtype) -> None:
    """Decode, verify, commit and mixed on pools, in place."""
    pool, slots = torch.randn(7, HV, K, V).to(state_dtype), torch.tensor([5, -1, 0], dtype=torch.int32)

    def both(function: Any, tensors: Arguments, written: tuple[str, ...]) -> None:
        ours = {name: x.clone() if name in written else x for name, x in tensors.items()}
        theirs = {name: array(x.clone()) if name in written else array(x) for name, x in tensors.items()}
        want, got = function(**ours), function(**theirs)
        assert got is None or same(got, want)
        for name in written:
            assert same(theirs[name], ours[name]), name
            assert not torch.equal(ours[name], tensors[name])

    both(
        gated_delta_rule_decode,
        {
            **serving_inputs(3, 2, dtype),
            "state": pool,
            "state_indices": slots,
            "out": torch.zeros(3, 2, HV, V).to(dtype),
        },
        ("state", "out"),
    )
    buffer = torch.zeros(3, 2, HV, K, V).to(state_dtype)
    both(
        gated_delta_rule_verify,
        {**serving_inputs(3, 2, dtype), "state": pool, "state_indices": slots, "intermediate_states": buffer},
        ("intermediate_states",),
    )
    both(
        gated_delta_rule_commit,
        {"state": pool, "state_indices": slots, "intermediate_states": buffer + 1, "accepted": torch.tensor([2, 1, 0])},
        ("state",),
    )
    both(
        gated_delta_rule_mixed,
        {
            **serving_inputs(1, 72, dtype),
            "cu_seqlens": torch.tensor([0, 1, 2, 70]),
            "state": pool,
            "state_indices": slots,
            "has_initial_state": torch.tensor([True, True, False]),
            "checkpoints": torch.zeros(4, HV, K, V).to(state_dtype),
        },
        ("state", "checkpoints"),
    )


def test_pools_are_never_copied() -> None:
    """A pool that cannot be written in place is refused."""
    inputs = arrays(serving_inputs(2, 1, torch.float32))
    pool = np.zeros((4, HV, K, V), np.float32)
    pool.flags.writeable = False
    with pytest.raises(ValueError, match="state is read-only"):
        gated_delta_rule_decode(**inputs, state=pool)
    with pytest.raises((TypeError, ValueError), match="state"):
        gated_delta_rule_decode(**inputs, state=np.zeros((4, HV, K, V), np.float64))
    with pytest.raises(ValueError, match=r"state .*(contiguous|stride of 2)"):
        gated_delta_rule_decode(**inputs, state=np.zeros((4, HV, K, 2 * V), np.float32)[..., ::2])
    with pytest.raises((TypeError, ValueError), match="state"):
        gated_delta_rule_decode(**inputs, state=np.zeros((4, HV, K, V), ">f4"))
