#!/usr/bin/env python3
"""Times FLA (flash-linear-attention, Triton) on the rows of the published grid, by the same protocol as bench/grid.py.

    python3 bench/peers_gpu/time_fla.py [--warm] [--peers TABLE] [--out bench/results/h200_fla.jsonl]

Needs a GPU, torch, triton and fla-core 0.6 without tilelang; nothing of this project but bench/grid.py. --warm first
runs one row of each number and size of heads, each in a process of its own, so that Triton compiles on all cores and
finds the programs in its cache later. bench/widths.py runs this for the table of other head sizes.
"""

import argparse
import datetime
import os
import subprocess
import sys
import time

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
sys.path.insert(0, os.path.join(ROOT, "bench"))
import grid  # noqa: E402
import records  # noqa: E402


def inputs(lens, heads_k, heads_v, dim_k=grid.HEAD_SIZE, dim_v=grid.HEAD_SIZE, seed=0):
    import torch
    from torch.nn import functional

    generator = torch.Generator(device="cuda").manual_seed(seed)
    tokens = sum(lens)

    def normal(*shape):
        return torch.randn(*shape, device="cuda", generator=generator)

    g = functional.logsigmoid(normal(1, tokens, heads_v)) / 16
    g[:, :, torch.randperm(heads_v, device="cuda", generator=generator)[-(-3 * heads_v // 4) :]] = 0
    return {
        "q": functional.normalize(normal(1, tokens, heads_k, dim_k), dim=-1).bfloat16(),
        "k": functional.normalize(normal(1, tokens, heads_k, dim_k), dim=-1).bfloat16(),
        "v": normal(1, tokens, heads_v, dim_v).bfloat16(),
        "g": g,
        "beta": normal(1, tokens, heads_v).sigmoid(),
        "initial_state": normal(len(lens), heads_v, dim_k, dim_v),
        "do": normal(1, tokens, heads_v, dim_v).bfloat16(),
        "dht": normal(len(lens), heads_v, dim_k, dim_v) / 8,
        "cu_seqlens": torch.tensor([0, *torch.tensor(lens).cumsum(0).tolist()], dtype=torch.int32, device="cuda"),
    }


def calls_of(short, x):
    """What is timed: the kernels of one pass, without autograd and without what Python does around them."""
    from fla.ops.gated_delta_rule.chunk import chunk_gated_delta_rule_bwd, chunk_gated_delta_rule_fwd

    scale = x["q"].shape[-1] ** -0.5

    def forward():
        return chunk_gated_delta_rule_fwd(
            x["q"],
            x["k"],
            x["v"],
            x["g"],
            x["beta"],
            scale=scale,
            initial_state=x["initial_state"],
            output_final_state=True,
            cu_seqlens=x["cu_seqlens"],
        )

    if short == "fwd":
        return forward
    g, _, A = forward()[:3]

    def backward():
        return chunk_gated_delta_rule_bwd(
            x["q"],
            x["k"],
            x["v"],
            g,
            x["beta"],
            A,
            scale,
            x["initial_state"],
            x["do"],
            x["dht"],
            cu_seqlens=x["cu_seqlens"],
        )

    return backward


def median_ms(call, milliseconds=15.0):
    """The median of CUDA graph replays, with an event before and behind each."""
    import torch

    call()
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()

    def timed():
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end)

    timed()
    repeats = max(5, min(60, int(milliseconds / max(timed(), 1e-3))))
    return sorted(timed() for _ in range(repeats))[repeats // 2]


def shorten_tuning(first_only):
    """Triton times each candidate for a tenth of a second; less does, and less still where only compiling counts."""
    try:
        from triton.runtime import driver
        from triton.testing import do_bench

        warm_up, repeat = (1, 1) if first_only else (5, 25)
        driver.active.get_benchmarker = lambda: (
            lambda kernel, quantiles: do_bench(kernel, warmup=warm_up, rep=repeat, quantiles=quantiles)
        )
    except (ImportError, AttributeError) as error:
        print("# tuning takes its usual time:", error)


def heads_and_sizes(row):
    """What Triton compiles for: '16/32:128/128' has 16 key heads, 32 value heads, K = V = 128."""
    return "{}/{}:{}/{}".format(*row["heads"], *row["dims"])


def rows_of(options):
    for short in ("fwd", "bwd"):
        if options.direction in ("all", short):
            for row in grid.read_peers(options.peers, short):
                if options.heads in ("", heads_and_sizes(row)):
                    yield short, row


def warm(options):
    """One short row of each number and size of heads, in processes of their own."""
    jobs = {(short, heads_and_sizes(row)) for short, row in rows_of(options)}
    command = [sys.executable, os.path.abspath(__file__), "--peers", options.peers, "--first-only"]
    children = [
        subprocess.Popen([*command, "--direction", short, "--heads", heads], stdout=subprocess.DEVNULL)
        for short, heads in sorted(jobs)
    ]
    codes = [child.wait() for child in children]
    print(f"# {len(codes)} processes compiled, {sum(c != 0 for c in codes)} failed", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", default=os.path.join(grid.RESULTS, "peers_h200.csv"))
    parser.add_argument("--out", help="appends one JSON object a row")
    parser.add_argument("--direction", choices=("all", "fwd", "bwd"), default="all")
    parser.add_argument("--heads", default="", help="only rows with these, such as 16/32:128/128")
    parser.add_argument("--first-only", action="store_true", help="one row, the one with the fewest tokens")
    parser.add_argument("--warm", action="store_true", help="compile everything first, on all cores")
    parser.add_argument("--budget", type=float, default=200.0, metavar="SECONDS", help="stop after so many")
    options = parser.parse_args()

    begin = time.monotonic()
    os.environ["FLA_FLASH_QLA"] = "0"  # FLA itself, not a backend that it would hand over to
    os.environ["FLA_CACHE_RESULTS"] = "0"  # choices made while other processes use the GPU must not be kept
    if options.warm:
        warm(options)
    shorten_tuning(options.first_only)
    import fla
    import torch
    import triton

    # NOTE: on Hopper its backward refuses an older Triton for a fault in results (FLA's issue 640) that K = V = 128
    # does not meet. Other head sizes are timed without a look at the results.
    try:
        import fla.ops.common.chunk_o as chunk_o

        chunk_o.TRITON_ABOVE_3_7_1 = True
    except ImportError:
        pass
    common = {
        "provider": f"fla {fla.__version__}",
        "torch": torch.__version__,
        "triton": triton.__version__,
        "gpu": torch.cuda.get_device_name(),
        "driver": records.driver_version(),
        "date": datetime.date.today().isoformat(),
    }
    print("#", common, f"{time.monotonic() - begin:.1f} s", flush=True)
    rows = list(rows_of(options))
    if options.first_only:
        rows = [min(rows, key=lambda item: sum(item[1]["lens"]))]
    for short, row in rows:
        if time.monotonic() - begin > options.budget:
            print(f"# stopped after {options.budget:g} s")
            break
        (heads_k, heads_v), (dim_k, dim_v) = row["heads"], row["dims"]
        record = {
            "pass": short,
            "model": row["model"],
            "lens": "+".join(map(str, row["lens"])),
            "heads_k": heads_k,
            "heads_v": heads_v,
            "dim_k": dim_k,
            "dim_v": dim_v,
            "ms": None,
            "published_ms": row["fla_ms"],
            **common,
        }
        try:
            x = inputs(row["lens"], heads_k, heads_v, dim_k, dim_v)
            record["ms"] = round(median_ms(calls_of(short, x)), 5)
        except Exception as error:
            record["error"] = f"{type(error).__name__}: {str(error)[:200]}"
        print(short, row["model"], row["label"], record["ms"], record.get("error", ""), flush=True)
        records.append(options.out, record)
        x = None
        torch.cuda.empty_cache()
    print(f"# {time.monotonic() - begin:.1f} s", flush=True)


if __name__ == "__main__":
    main()
