#!/usr/bin/env python3
"""Times head sizes other than the published grid's, forward and backward on a GPU, and FLA on the same card in the
same run.

    python3 bench/widths.py [--flashqla PROGRAM] [--table FILE] [--budget SECONDS]

The rows stand in bench/widths.csv, each of both passes: K = V = 64, K = 96 with V = 192, K = 256 with V = 512. FLA is
timed first, by bench/peers_gpu/time_fla.py in a process of its own, then this library by `flashqla bench`, as
bench/grid.py does it: the same inputs, the median of CUDA graph replays of one call. A row that either of them refuses
stays in the table and says why.
Results go to bench/results/h200_widths.jsonl, where they replace the same rows' earlier ones.
Needs what time_fla.py needs.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile

import grid
from records import driver_version


def measure_fla(options, out):
    """FLA's lines by pass and row, and why there is none of the other rows."""
    script = os.path.join(grid.ROOT, "bench", "peers_gpu", "time_fla.py")
    command = [sys.executable, script, "--warm", "--peers", options.table, "--out", out]
    command += ["--budget", str(options.budget)]
    try:
        code = subprocess.run(command, timeout=options.budget + 60, check=False).returncode
        why = f"time_fla.py ended with {code}" if code else f"no time left of {options.budget:g} s"
    except subprocess.TimeoutExpired:
        why = f"time_fla.py did not end in {options.budget + 60:g} s"
    if not os.path.exists(out):
        return {}, why
    with open(out, encoding="utf-8") as lines:
        found = [json.loads(line) for line in lines if line.endswith("\n")]
    return {(r["pass"], grid.key_of(r)): r for r in found}, why


def refusal(messages, short, row):
    """Why `flashqla bench` has no time for a row. It says 'flashqla: CASE: why' where a plan is refused and goes on;
    after any other error it ends, so that the last line holds for all rows that are still to come."""
    for line in messages:
        said = re.match(r"flashqla: ((?:fwd|bwd):\S+): (.*)", line)
        if said and said[1].startswith(short) and grid.key_of_case(said[1]) == grid.key_of_row(row):
            return said[2]
    return messages[-1].removeprefix("flashqla: ") if messages else "not timed"


def merge(rows, ours, messages, fla, why_no_fla):
    """A record for each pass and row: that of `flashqla bench`, with FLA's time beside it."""
    ours = {(r["pass"], grid.key_of_case(r["case"])): r for r in ours}
    shared = ("commit", "gpu", "driver", "date")
    of_this_run = {name: value for r in ours.values() for name, value in r.items() if name in shared}
    results = []
    for short, row in rows:
        key = short, grid.key_of_row(row)
        own = ours.get(key, {"case": grid.case_of(row, short), "pass": short, "ms": None, **of_this_run})
        peer = fla.get(key, {"ms": None, "error": why_no_fla})
        record = {
            **own,
            "model": row["model"],
            "lens": "+".join(map(str, row["lens"])),
            "heads_k": row["heads"][0],
            "heads_v": row["heads"][1],
            "dim_k": row["dims"][0],
            "dim_v": row["dims"][1],
            "fla_ms": peer["ms"],
            "ratio": round(peer["ms"] / own["ms"], 4) if peer["ms"] and own["ms"] else None,
            **{name: peer[name] for name in ("provider", "torch", "triton") if name in peer},
        }
        if not own["ms"]:
            record["error"] = refusal(messages, short, row)
        if not peer["ms"]:
            record["fla_error"] = peer.get("error", why_no_fla)
        results.append(record)
    return results


def report(results):
    def number(x, form):
        return format(x, form) if x else format("-", f">{form.split('.')[0]}")

    print(
        f"{'pass':4s} {'K/V':>7s} {'model':22s} {'lengths':>10s} {'Hk/Hv':>6s} {'ms':>9s} {'FLA':>9s} {'ratio':>6s} "
        f"{'us/token':>9s}"
    )
    for r in results:
        lens = grid.lengths(r["lens"])
        print(
            f"{r['pass']:4s} {r['dim_k']:>3d}/{r['dim_v']:<3d} {r['model']:22s} {grid.shown_lengths(lens):>10s} "
            f"{r['heads_k']:>3d}/{r['heads_v']:<2d} {number(r['ms'], '9.4f')} {number(r['fla_ms'], '9.4f')} "
            f"{number(r['ratio'], '6.2f')} {number(r['ms'] and 1e3 * r['ms'] / sum(lens), '9.4f')}"
        )
        for name, who in (("error", "ours"), ("fla_error", "FLA")):
            if name in r:
                print(f"     {who}: {r[name]}")
    print("times faster than FLA:")
    for size in dict.fromkeys((r["dim_k"], r["dim_v"]) for r in results):
        for short in dict.fromkeys(r["pass"] for r in results):
            some = [r for r in results if (r["dim_k"], r["dim_v"]) == size and r["pass"] == short]
            ratios = [r["ratio"] for r in some if r["ratio"]]
            if ratios:
                print(
                    f"  K {size[0]:3d}, V {size[1]:3d}, {short}: geometric mean {grid.geomean(ratios):.3f}, smallest "
                    f"{min(ratios):.3f}, {len(ratios)} of {len(some)} rows"
                )


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    grid.add_options_of_measure(parser)
    parser.set_defaults(budget=200.0)  # of each of the two; FLA's has Triton's compiling in it
    parser.add_argument("--table", default=os.path.join(grid.ROOT, "bench", "widths.csv"), metavar="FILE")
    parser.add_argument("--out", default=os.path.join(grid.RESULTS, "h200_widths.jsonl"))
    parser.add_argument("--print-cases", action="store_true", help="the case lines, and nothing is run")
    parser.add_argument("--show", action="store_true", help="print what --out already holds, and nothing is run")
    options = parser.parse_args()

    if options.show:
        with open(options.out, encoding="utf-8") as lines:
            report([json.loads(line) for line in lines])
        return
    rows = [(short, row) for short in grid.PASSES.values() for row in grid.read_peers(options.table, short)]
    cases = [grid.case_of(row, short) for short, row in rows]
    if options.print_cases:
        print("\n".join(cases))
        return
    with tempfile.TemporaryDirectory() as folder:
        fla, why_no_fla = measure_fla(options, os.path.join(folder, "fla.jsonl"))
        ours, messages = grid.measure(options, cases, os.path.join(folder, "bench.jsonl"))
    driver = driver_version()
    ours = [{**r, "driver": driver} for r in ours] if driver else ours
    results = merge(rows, ours, messages, fla, why_no_fla)
    report(results)
    grid.keep(options.out, results)
    print(f"{len(results)} rows in {options.out}")


if __name__ == "__main__":
    main()
