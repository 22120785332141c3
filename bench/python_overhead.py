#!/usr/bin/env python3
"""What a call from Python costs above the same call from C++: decode of one token.

    python bench/python_overhead.py [--device cpu|cuda] [--rounds N] [--calls N] [--json FILE] [--limit MICROSECONDS]
                                    [--fla]
    python bench/python_overhead.py --first N [--device cuda] [--json FILE]

Rows, from the inside out: flashqla::decode in a C++ loop; the native function with torch tensors (DLPack, plan lookup,
workspace); the kernel of the operator; flash_qla.gated_delta_rule_decode in eager mode, and with `out` given; the same
through torch.ops, as under a dispatch mode; chunk_gated_delta_rule on the same token; with numpy arrays. A round times
every row once, so that a change of the machine's speed meets all of them. Figures are the best and the median over
rounds; where other programs run only the best one says something. --limit makes the exit status say whether the eager
row keeps to it. Needs the package and torch.

Keywords are written out in every call, as a caller would: passing them on as **flags takes half a microsecond itself.

On CUDA the figures are the host's time: calls are issued one after another and nobody waits for the GPU until the round
is over. What counts there is the time itself, since the host only has to be faster than the GPU. More rows are 256
tokens through the chunk function: in bf16, with both states, with gradients of all inputs, and in fp32, where a call
has more launches; --fla adds the rows in bf16 of FLA's function and needs fla-core.

--first measures the first call of N processes each in place of all that, with torch at work on the device before:
importing what the package puts off until then, the call until it returns, and until the device is done.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import records
import torch

import flash_qla
from flash_qla import _modes, chunk_gated_delta_rule, gated_delta_rule_decode, torch_kernels
from flash_qla._native import native

CASES = {
    # name: rows, key heads, value heads, K, V, dtype
    "tiny": (1, 1, 1, 64, 64, torch.float32),
    "Qwen3-Next layer": (1, 16, 32, 128, 128, torch.bfloat16),
}


def seconds_of(call: Callable[[], object], calls: int) -> float:
    begin = time.perf_counter()
    for _ in range(calls):
        call()
    return (time.perf_counter() - begin) / calls


# Calls of many kernels that may be issued before the GPU's queue is full and the host has to wait.
MANY_KERNELS = 30


def prefill_rows(name: str, function: Callable[..., Any], label: str, fp32: bool) -> dict[str, Callable[[int], float]]:
    """256 tokens on a GPU: the forward pass, with states, in fp32, and with the backward pass."""
    B, Hk, Hv, K, V, _ = CASES[name]
    options = {"device": "cuda", "dtype": torch.bfloat16}
    q, k = (torch.nn.functional.normalize(torch.randn(B, 256, Hk, K, **options), dim=-1) for _ in "qk")
    v, d_o = (torch.randn(B, 256, Hv, V, **options) for _ in range(2))
    g, beta = -torch.rand(B, 256, Hv, device="cuda"), torch.rand(B, 256, Hv, device="cuda")
    state = torch.zeros(B, Hv, K, V, device="cuda")
    leaves = [x.detach().requires_grad_() for x in (q, k, v, g, beta)]
    wide = [x.float() for x in (q, k, v)]

    def with_gradients() -> object:
        with torch.enable_grad():
            return torch.autograd.grad(function(*leaves)[0], leaves, d_o)

    calls: dict[str, Callable[[], object]] = {
        "256 tokens": lambda: function(q, k, v, g, beta),
        "256 tokens, states": lambda: function(q, k, v, g, beta, initial_state=state, output_final_state=True),
        "256 tokens, gradients": with_gradients,
    }
    if fp32:
        calls["256 tokens, fp32"] = lambda: function(*wide, g, beta)
    return {
        f"{label}, {what}": lambda calls, call=call: seconds_of(call, min(calls, MANY_KERNELS))
        for what, call in calls.items()
    }


def rows_of_case(name: str, device: str, fla: bool) -> dict[str, Callable[[int], float]]:
    """Row -> seconds of one call, measured over so many calls."""
    B, Hk, Hv, K, V, dtype = CASES[name]
    torch.manual_seed(0)
    unit = torch.nn.functional.normalize
    with torch.device(device):
        q = unit(torch.randn(B, 1, Hk, K), dim=-1).to(dtype)
        k = unit(torch.randn(B, 1, Hk, K), dim=-1).to(dtype)
        v = torch.randn(B, 1, Hv, V).to(dtype)
        a, b = torch.randn(B, 1, Hv).to(dtype), torch.randn(B, 1, Hv).to(dtype)
        A_log, dt_bias = torch.rand(Hv), torch.randn(Hv)
        state, slots = torch.zeros(B + 3, Hv, K, V), torch.arange(1, B + 1, dtype=torch.int32)
        out, start = torch.empty_like(v), state[:B]
    modes = _modes.GATE_RAW | _modes.BETA_LOGIT | _modes.L2NORM
    threads = torch.get_num_threads()
    module = native()
    nothing = (None,) * 6
    inputs = (q, k, v, a, b, A_log, dt_bias, None)
    settings = (True, modes, 0.0, None, threads)

    def eager() -> object:
        return gated_delta_rule_decode(
            q,
            k,
            v,
            a,
            b,
            state=state,
            state_indices=slots,
            A_log=A_log,
            dt_bias=dt_bias,
            use_gate_in_kernel=True,
            use_beta_sigmoid_in_kernel=True,
            use_qk_l2norm_in_kernel=True,
        )

    def eager_out() -> object:
        return gated_delta_rule_decode(
            q,
            k,
            v,
            a,
            b,
            state=state,
            state_indices=slots,
            A_log=A_log,
            dt_bias=dt_bias,
            out=out,
            use_gate_in_kernel=True,
            use_beta_sigmoid_in_kernel=True,
            use_qk_l2norm_in_kernel=True,
        )

    def chunk() -> object:
        return chunk_gated_delta_rule(
            q,
            k,
            v,
            a,
            b,
            initial_state=start,
            output_final_state=True,
            A_log=A_log,
            dt_bias=dt_bias,
            use_gate_in_kernel=True,
            use_beta_sigmoid_in_kernel=True,
            use_qk_l2norm_in_kernel=True,
        )

    rows: dict[str, Callable[[int], float]] = {
        "C++": lambda calls: module.decode_seconds(
            calls, q, k, v, a, b, A_log, dt_bias, state, slots, out, modes, threads
        ),
        "native function": lambda calls: seconds_of(
            lambda: module.decode(*inputs, state, slots, *nothing, out, *settings), calls
        ),
        "kernel": lambda calls: seconds_of(
            lambda: torch_kernels.decode(*inputs, state, slots, *nothing, out, *settings), calls
        ),
        "eager": lambda calls: seconds_of(eager, calls),
        "eager, out": lambda calls: seconds_of(eager_out, calls),
        "operator": lambda calls: seconds_of(
            lambda: torch.ops.flash_qla.decode(*inputs, state, slots, *nothing, out, *settings), calls
        ),
        "chunk function": lambda calls: seconds_of(chunk, calls),
    }
    if device == "cuda":
        rows |= prefill_rows(name, chunk_gated_delta_rule, "chunk function", True)
    if fla:
        os.environ["FLA_FLASH_QLA"] = "0"  # FLA itself, not what it would hand over to
        import fla.ops.common.chunk_o as chunk_o
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule as of_fla

        chunk_o.TRITON_ABOVE_3_7_1 = True  # NOTE: an older Triton is refused for its results; here only time counts
        rows |= prefill_rows(name, of_fla, "FLA", False)
    if dtype == torch.float32 and device == "cpu":
        q_, k_, v_, a_, b_, A_log_, dt_bias_, state_, slots_ = (
            x.numpy() for x in (q, k, v, a, b, A_log, dt_bias, state, slots)
        )

        def numpy() -> object:
            return gated_delta_rule_decode(
                q_,
                k_,
                v_,
                a_,
                b_,
                state=state_,
                state_indices=slots_,
                A_log=A_log_,
                dt_bias=dt_bias_,
                use_gate_in_kernel=True,
                use_beta_sigmoid_in_kernel=True,
                use_qk_l2norm_in_kernel=True,
            )

        rows["numpy"] = lambda calls: seconds_of(numpy, calls)
    return rows


def measure(name: str, device: str, rounds: int, calls: int, fla: bool) -> dict[str, tuple[float, float]]:
    """Row -> best and median microseconds of a call."""
    rows = rows_of_case(name, device, fla)
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    for row in rows.values():
        row(calls // 10 + 1)
    times: dict[str, list[float]] = {row: [] for row in rows}
    for _ in range(rounds):
        for row, run in rows.items():
            wait()
            times[row].append(run(calls))
    return {row: (min(values) * 1e6, statistics.median(values) * 1e6) for row, values in times.items()}


# A process of its own, in which torch has used the device and the package has been imported. The layer of CASES.
FIRST = """
import sys, time, torch
import flash_qla
what, device = sys.argv[1:]
size = {"device": device, "dtype": torch.bfloat16}
T = 1 if what == "decode" else 4096 if device == "cuda" else 64
q, k = (torch.nn.functional.normalize(torch.randn(1, T, 16, 128, **size), dim=-1) for _ in "qk")
v, g, beta = torch.randn(1, T, 32, 128, **size), -torch.rand(1, T, 32, **size), torch.rand(1, T, 32, **size)
pool, d_o = torch.zeros(1, 32, 128, 128, device=device), torch.randn(1, T, 32, 128, **size)
if what == "gradients":
    v.requires_grad_()
    (v * v).backward(d_o)  # torch imports sympy for it
wait = torch.cuda.synchronize if device == "cuda" else lambda: None
wait()
times = [time.perf_counter()]
from flash_qla import torch_path
from flash_qla._native import native
native()
times.append(time.perf_counter())
if what == "decode":
    flash_qla.gated_delta_rule_decode(q, k, v, g, beta, state=pool)
else:
    o, _ = flash_qla.chunk_gated_delta_rule(q, k, v, g, beta)
if what == "gradients":
    o.backward(d_o)
times.append(time.perf_counter())
wait()
times.append(time.perf_counter())
print(*(1e3 * (t - times[0]) for t in times[1:]))
"""


def first_calls(device: str, processes: int) -> list[dict[str, Any]]:
    """Medians over processes, in milliseconds: modules imported; the call back, and done, both after the import."""
    rows = []
    for what in ("prefill", "gradients", "decode"):
        times = []
        for _ in range(processes):
            command = [sys.executable, "-c", FIRST, what, device]
            printed = subprocess.run(command, capture_output=True, text=True, check=True, timeout=200).stdout
            imported, back, done = map(float, printed.split())
            times.append((imported, back - imported, done - imported))
        imported, back, done = (round(statistics.median(values), 1) for values in zip(*times))
        rows.append({"row": f"first {what}", "import_ms": imported, "back_ms": back, "done_ms": done})
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--calls", type=int, default=200, help="calls of a row in each round")
    parser.add_argument("--json", metavar="FILE", help="append one JSON object for each row")
    parser.add_argument("--fla", action="store_true", help="on a GPU: FLA's function too")
    parser.add_argument("--first", type=int, default=0, metavar="N", help="first calls, of so many processes each")
    parser.add_argument("--limit", type=float, help="microseconds that the eager row may be above C++ (tiny case)")
    options = parser.parse_args()

    torch.set_num_threads(1)
    processor = flash_qla.info()["cpu"]
    where = processor if options.device == "cpu" else f"{torch.cuda.get_device_name()} on {processor}"
    print(f"{where}; torch {torch.__version__}, Python {platform.python_version()}, 1 thread")
    common = {
        "device": options.device,
        "cpu": processor,
        "python": platform.python_version(),
        **records.provenance(gpu=options.device == "cuda"),
    }
    if options.first:
        for row in first_calls(options.device, options.first):
            print("  {row:16s} import {import_ms} ms; back after {back_ms} ms, done {done_ms} ms".format(**row))
            records.append(options.json, {**row, "processes": options.first, **common})
        return 0
    above = 0.0
    with torch.no_grad():
        for name in CASES:
            times = measure(name, options.device, options.rounds, options.calls, options.fla)
            base = times["C++"][0]
            print(f"{name}: {CASES[name][0]} row, {CASES[name][1]}/{CASES[name][2]} heads, {CASES[name][5]}")
            for row, (best, median) in times.items():
                print(f"  {row:36s} {best:8.2f} us (median {median:8.2f})   {best - base:+8.2f} us above C++")
                record = {
                    "case": name,
                    "row": row,
                    "best_us": round(best, 3),
                    "median_us": round(median, 3),
                    "best_us_above_cpp": round(best - base, 3),
                    "rounds": options.rounds,
                    "calls": options.calls,
                }
                records.append(options.json, record | common)
            if name == "tiny":
                above = times["eager"][0] - base
    if options.limit is not None and above > options.limit:
        print(f"the eager call is {above:.2f} us above C++; the limit is {options.limit:g}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
