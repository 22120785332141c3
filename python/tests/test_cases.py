"""Lines of the case tables through the Python functions: faults that other libraries had, as a user would meet them.

The C++ tests run every line of every table; here a sample of each goes through torch, autograd and the bindings.
"""

from __future__ import annotations

import math
import re
from typing import Any

import numpy as np
import pytest
import torch
from helpers import head_axis
from torch import Tensor

from flash_qla import (
    PlanOptions,
    chunk_gated_delta_rule,
    gated_delta_rule_commit,
    gated_delta_rule_decode,
    gated_delta_rule_mixed,
    gated_delta_rule_verify,
    testing,
)

DTYPES = {
    "f32": torch.float32,
    "f16": torch.float16,
    "bf16": torch.bfloat16,
    "i32": torch.int32,
    "i64": torch.int64,
    "u8": torch.bool,
}
# Not in these functions: forward passes on pools (test_line_on_a_pool) and with checkpoints (test_mixed.py), lines that
# must be refused.
ELSEWHERE = {
    "fwd": ("pool", "ckpt", "inplace", "hasinit", "slots", "group=tiled", "gate=vector", "drows", "expect"),
    "bwd": ("group=tiled", "gate=vector", "expect"),
    "dec": ("steps", "gate=vector", "expect", "noh0"),
    "pool": ("hasinit", "gate=vector", "expect", "noh0", "nofinal"),
}
TOKENS = ("q", "k", "v", "g", "beta")
MOST_WORK = 2e7  # multiplications: what the oracle does in half a second


def lines(table: str, pass_name: str, count: int) -> list[str]:
    """Lines spread over a table. "pool": forward passes that update states in place."""
    found = []
    start = "fwd" if pass_name == "pool" else pass_name
    for line in testing.table(table):
        items = line.split(":", 1)[1].split(",")
        # Twice a beta that is no logit is not a thing here, as in FLA.
        twice = "neg" in items and "beta=logit" not in items
        elsewhere = any(item.startswith(word) for item in items for word in ELSEWHERE[pass_name])
        wanted = line.startswith(start) and not twice and not elsewhere and work(items) < MOST_WORK
        if wanted and (pass_name != "pool" or "inplace" in items or any(item.startswith("pool=") for item in items)):
            found.append(line)
    return found[:: max(1, len(found) // count)]


def work(items: list[str]) -> float:
    """Multiplications, roughly."""
    sizes = {"b": 1, "t": 1, "hk": 1, "k": 128}
    for item in items:
        if match := re.fullmatch(r"(b|t|hk|hv|k|v)(\d+)", item):
            sizes[match[1]] = int(match[2])
        elif item.startswith("lens="):
            parts = (part.partition("x") for part in item[5:].split("+"))
            sizes["t"] = max(sizes["t"], sum(int(length) * int(times or 1) for length, _, times in parts))
    return math.prod((sizes["b"], sizes["t"], sizes.get("hv", sizes["hk"]), sizes["k"], sizes.get("v", sizes["k"])))


def tensors_of(case: testing.Case, strided: bool, device: str) -> dict[str, Tensor]:
    result = {}
    for name, values in case.inputs.items():
        x = torch.from_numpy(values).to(device, DTYPES[case.dtypes[name]])
        if strided and x.dim() > 2:
            x = torch.nn.functional.pad(x, (1, 2))[..., 1 : 1 + x.shape[-1]]
        result[name] = x
    return result


def compare(case: testing.Case, name: str, got: Tensor, stored: str) -> None:
    """Each head by the tolerance of the C++ tests for that device."""
    device, got = got.device.type, got.cpu()
    axis = 0 if name in ("d_A_log", "d_dt_bias") else head_axis(name, got)
    want = torch.from_numpy(np.array(case.expected[name])).double()
    if stored == "f16":
        want = torch.where(want.half().isinf(), want.half().double(), want)  # what float16 cannot hold
    if name == "intermediate_states":
        want = want.flatten(0, 1)  # [M*T,Hv,..]
    assert got.shape == want.shape, name
    heads = want.shape[axis]
    a, b = (x.detach().double().movedim(axis, 0).reshape(heads, -1) for x in (got, want))
    assert torch.equal(a.isfinite(), b.isfinite()), f"{name}: NaN or infinite where the other is not"
    a, b = a.nan_to_num(0, 0, 0), b.nan_to_num(0, 0, 0)  # memory that nobody writes
    tolerance = testing.tolerance(case.line, name, stored, max(b.shape[1], 1), device)
    squares = b.square().sum(1)
    scale = squares.clamp(min=tolerance.floor**2 * float(squares.mean())).sqrt() if heads else squares
    errors = (a - b).norm(dim=1)
    bad = errors > tolerance.per_head * scale + tolerance.absolute * b.shape[1] ** 0.5
    relative = (errors / (scale + 1e-300)).tolist()
    assert not bad.any(), f"{name}: relative errors by head {relative}, allowed is {tolerance.per_head}"


def options_of(line: str) -> PlanOptions:
    items = dict(item.partition("=")[::2] for item in line.split(":", 1)[1].split(","))
    return PlanOptions(
        backend=items.get("backend", ""),
        threads=int(items.get("threads", 0)),
        context_split=int(items.get("split", 0)),
        deterministic="det" in items,
        batch_invariant="inv" in items,
    )


SELECTED = [
    *(line for table in ("forward", "edges", "shapes") for line in lines(table, "fwd", 40)),
    *(line for table in ("backward", "edges", "shapes") for line in lines(table, "bwd", 40)),
]
SELECTED_POOL = [line for table in ("edges", "shapes") for line in lines(table, "pool", 40)]
SELECTED_DECODE = [line for table in ("decode", "edges", "shapes") for line in lines(table, "dec", 80)]


@pytest.mark.parametrize("line", SELECTED)
def test_line(line: str) -> None:
    check_line(line, "cpu")


def check_line(line: str, device: str) -> None:
    case = testing.case(line)
    tensors = tensors_of(case, "strided" in line, device)
    arguments: dict[str, Any] = {"g": None, "beta": None, **tensors, **case.keywords(), "options": options_of(line)}
    d_o, d_final_state = arguments.pop("d_o", None), arguments.pop("d_final_state", None)
    if case.pass_name == "forward":
        arguments["output_final_state"] = "final_state" in case.outputs
        o, final_state = chunk_gated_delta_rule(**arguments)
        # With out=f32 the library does not round o; the Python functions always do, to q's dtype.
        compare(case, "o", o, case.dtypes["q"])
        if final_state is not None:
            compare(case, "final_state", final_state, "f32")
        return
    arguments["output_final_state"] = d_final_state is not None
    wanted = {name: tensors[name[2:]].requires_grad_() for name in case.outputs}
    outputs = chunk_gated_delta_rule(**arguments)
    pairs = [(x, d.to(x.dtype)) for x, d in zip(outputs, (d_o, d_final_state)) if d is not None]
    if not pairs:
        return
    found = torch.autograd.grad([x for x, _ in pairs], list(wanted.values()), [d for _, d in pairs], allow_unused=True)
    for name, gradient in zip(wanted, found):
        compare(case, name, gradient, case.dtypes[name[2:]])


@pytest.mark.parametrize("line", SELECTED_POOL)
def test_line_on_a_pool(line: str) -> None:
    check_line_on_a_pool(line, "cpu")


def check_line_on_a_pool(line: str, device: str) -> None:
    """Fixed sequences are packed ones of one length; `gated_delta_rule_mixed` knows only those."""
    case = testing.case(line)
    tensors = tensors_of(case, False, device)
    torch.testing.assert_close(tensors["final_state"], tensors["initial_state"], rtol=0, atol=0, equal_nan=True)
    state = tensors.pop("final_state")
    del tensors["initial_state"]
    if "strided" in line:
        tensors.update({name: x for name, x in tensors_of(case, True, device).items() if name in TOKENS})
    B, T = tensors["q"].shape[:2]
    if "cu_seqlens" not in tensors:
        tensors["cu_seqlens"] = torch.arange(0, B * T + 1, T, dtype=torch.int32, device=device)
        tensors.update({name: x.flatten(0, 1)[None] for name, x in tensors.items() if x.dim() > 2})
    if "checkpoints" in case.shapes:
        dtype = DTYPES[case.dtypes["checkpoints"]]
        tensors["checkpoints"] = torch.full(case.shapes["checkpoints"], float("nan"), dtype=dtype, device=device)
    o = gated_delta_rule_mixed(
        **{"g": None, **tensors},
        **case.keywords(),
        state=state,
        checkpoint_every=case.options["checkpoint_every"] or None,
        decode_rows=case.options["decode_rows"],
        grouping=case.options["grouping"],
        pad_slots=case.options["pad_rule"],
        output_dtype=DTYPES[case.dtypes["o"]],
        options=options_of(line),
    )
    compare(case, "o", o.view(B, T, *o.shape[2:]), case.dtypes["o"])
    compare(case, "final_state", state, case.dtypes["final_state"])
    if "checkpoints" in tensors:
        compare(case, "checkpoints", tensors["checkpoints"], case.dtypes["checkpoints"])


@pytest.mark.parametrize("line", SELECTED_DECODE)
def test_decode_line(line: str) -> None:
    check_decode_line(line, "cpu")


def check_decode_line(line: str, device: str) -> None:
    case = testing.case(line)
    tensors = tensors_of(case, False, device)
    if "strided" in line:
        tensors.update({name: x for name, x in tensors_of(case, True, device).items() if name in TOKENS})
    accepted = tensors.pop("accepted", None)
    state, indices = tensors["state"], tensors.get("state_indices")
    keywords = {
        **case.keywords(),
        "grouping": case.options["grouping"],
        "pad_slots": case.options["pad_rule"],
        "options": options_of(line),
        "output_dtype": DTYPES[case.dtypes["o"]],
    }
    if "intermediate_states" in case.shapes:
        # NOTE: NaN where nothing is written, as in the expectation.
        dtype = DTYPES[case.dtypes["intermediate_states"]]
        shape = case.shapes["intermediate_states"]
        tensors["intermediate_states"] = torch.full(shape, float("nan"), dtype=dtype, device=device)
    plain = "intermediate_states" not in tensors and (indices is None or indices.dim() == 1)
    if plain and case.options["commit_state"]:
        o = gated_delta_rule_decode(**tensors, **keywords)
    else:
        o = gated_delta_rule_verify(**tensors, **keywords, commit_state=case.options["commit_state"])
    if case.options["with_commit"]:
        buffer, places = tensors["intermediate_states"], tensors.get("intermediate_indices")
        common = {name: keywords[name] for name in ("state_v_first", "pad_slots")}
        gated_delta_rule_commit(state, indices, buffer, accepted, places, **common)
    compare(case, "o", o, case.dtypes["o"])
    compare(case, "state", state, case.dtypes["state"])
    if "intermediate_states" in tensors:
        got = tensors["intermediate_states"].flatten(0, 1)
        compare(case, "intermediate_states", got, case.dtypes["intermediate_states"])
