#!/usr/bin/env python3
"""Says of every row of the published grid that misses its goal where its time goes, by two ablations on the GPU.

    python3 bench/short_rows.py [--flashqla PROGRAM] [--budget SECONDS] [--show | --again]

Takes the rows of bench/results/h200_forward.jsonl (bench/grid.py) whose ratio to the best peer is below the goal, and
times each of them twice more:

    fixed   every sequence cut short to 64 tokens: launches, the table, the first item, states in and out
    whole   the same call with split=1: no sequence is cut into segments

What `whole` takes more than `fixed`, divided by the chunks that one multiprocessor takes more, one after the other, is
the `step` of a call that is not cut. One JSON object a row goes to bench/results/h200_short_rows.jsonl, with `why` in
words and what would be `next`. Python standard library only.
"""

import argparse
import json
import os
import sys
import tempfile

import grid

ROWS = os.path.join(grid.RESULTS, "h200_forward.jsonl")
OUT = os.path.join(grid.RESULTS, "h200_short_rows.jsonl")
CHUNK = 64
MOSTLY_FIXED = 0.3  # of the time
# A call that takes this much less than the same without segments has been cut.
CUT = 0.95


def short_rows(path):
    with open(path, encoding="utf-8") as lines:
        records = [json.loads(line) for line in lines if line.strip()]
    return [r for r in records if r["ratio"] < grid.GOALS["fwd"][0]]


def row_of(record, lens):
    heads, sizes = (record["heads_k"], record["heads_v"]), (grid.HEAD_SIZE, grid.HEAD_SIZE)
    return {"lens": lens, "heads": heads, "dims": sizes}


def cases_of(record):
    """The row's two ablations, as cases."""
    lens = grid.lengths(record["lens"])
    fixed = grid.case_of(row_of(record, tuple(min(n, CHUNK) for n in lens)), "fwd")
    return fixed, grid.case_of(row_of(record, lens), "fwd") + ",split=1"


def chain_of(lens, heads_v):
    """Chunks that the busiest multiprocessor takes one after the other, where nothing is cut: whole items, the longest
    first, to whoever has least."""
    loads = [0] * grid.MULTIPROCESSORS
    for n in sorted(lens, reverse=True):
        for _ in range(heads_v):
            i = loads.index(min(loads))
            loads[i] += -(-n // CHUNK)
    return max(loads)


def explain(record, fixed_ms, whole_ms):
    """The row's line."""
    ms, lens = record["ms"], grid.lengths(record["lens"])
    chain, shortest = chain_of(lens, record["heads_v"]), chain_of([CHUNK] * len(lens), record["heads_v"])
    items = len(lens) * record["heads_v"]
    step = 1e3 * (whole_ms - fixed_ms) / max(chain - shortest, 1)
    cut = ms < CUT * whole_ms
    if fixed_ms > MOSTLY_FIXED * ms:
        why = (
            f"{1e3 * fixed_ms:.0f} of {1e3 * ms:.0f} us do not depend on the length: launches, the table of segments, "
            "instructions and pages that come for the first time, states in and out"
        )
        after = "a smaller table, fewer instructions before the first chunk"
    elif cut:
        why = (
            f"cut into segments, {1e3 * ms:.0f} us instead of {1e3 * whole_ms:.0f}: heads that forget nothing take the "
            f"ends, a carry over all cuts and outputs one after the other; {1e3 * fixed_ms:.0f} us are fixed"
        )
        after = "a list of what can be done now instead of a fixed order; a faster step of the carry"
    else:
        why = (
            f"{items} items on {grid.MULTIPROCESSORS} multiprocessors, {chain} steps one after the other of {step:.2f} "
            f"us each: the chain of the walk, and with all at work the power of the card; {1e3 * fixed_ms:.0f} us are "
            "fixed"
        )
        after = "fewer instructions and reads of shared memory in the walk; products shared by the heads of a group"
    return {
        "model": record["model"],
        "lens": record["lens"],
        "heads_k": record["heads_k"],
        "heads_v": record["heads_v"],
        "ratio": record["ratio"],
        "ms": ms,
        "fixed_ms": fixed_ms,
        "whole_ms": whole_ms,
        "chain": chain,
        "step_us": round(step, 3),
        "cut": cut,
        "why": why,
        "next": after,
    }


def report(lines):
    for r in lines:
        lens = grid.shown_lengths(grid.lengths(r["lens"]))
        print(f"{lens:22s} {r['heads_k']:>3d}/{r['heads_v']:<2d} {r['ratio']:6.2f}  {r['why']}")
    print(f"{len(lines)} rows below {grid.GOALS['fwd'][0]}")


def write(lines):
    with open(OUT, "w", encoding="utf-8") as out:
        out.writelines(json.dumps(line) + "\n" for line in lines)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    grid.add_options_of_measure(parser)
    parser.add_argument("--show", action="store_true", help="print what was written down, and nothing is run")
    parser.add_argument("--again", action="store_true", help="say it anew of the times that were written down")
    options = parser.parse_args()
    if options.show or options.again:
        with open(OUT, encoding="utf-8") as file:
            lines = [json.loads(line) for line in file]
        if options.again:
            lines = [{**r, **explain(r, r["fixed_ms"], r["whole_ms"])} for r in lines]
            write(lines)
        report(lines)
        return
    records = short_rows(ROWS)
    cases = list(dict.fromkeys(case for record in records for case in cases_of(record)))
    with tempfile.TemporaryDirectory() as folder:
        timed, _ = grid.measure(options, cases, os.path.join(folder, "bench.jsonl"))
    times = {(grid.key_of_case(t["case"]), ",split=1" in t["case"]): t for t in timed}
    lines, driver = [], grid.driver_version()
    for record in records:
        found = [times.get((grid.key_of_case(case), ",split=1" in case)) for case in cases_of(record)]
        if None in found:
            continue
        from_run = {name: found[0][name] for name in ("commit", "date", "gpu")}
        lines.append({**explain(record, *(t["ms"] for t in found)), **from_run, "driver": driver})
    if not lines:
        sys.exit("bench/short_rows.py: no row was timed")
    report(lines)
    write(lines)
    print(f"{len(lines)} of {len(records)} rows in {OUT}")


if __name__ == "__main__":
    main()
