#!/usr/bin/env python3
"""Shows where the warps of a kernel wait, instruction by instruction: what limits a role of a warp-specialised kernel.

    python3 bench/stalls.py CASE [--kernel REGEX] [--flashqla PROGRAM] [--keep FILE.csv] [--least SAMPLES]
    python3 bench/stalls.py --csv FILE.csv [--least SAMPLES]

Runs one call of `flashqla bench` under Nsight Compute's source counters on a GPU, or reads what such a run has kept,
and prints every loop that is executed often: its share of all samples, why its warps waited, and the instructions that
hold --least per mille of a loop's samples or more, with the running sum. All warps are sampled alike, so that a loop of
w of n warps that never ends has w / n of the samples: divide by it for clocks. The figures of
docs/kernels/hopper_forward.md ("What a profile of stalls showed") were taken like this. Needs ncu and the counters,
which some machines keep from their users; Python standard library only.
"""

import argparse
import csv
import io
import os
import subprocess
import sys
import tempfile

APART = 40  # instructions that are hardly ever executed, between two loops


def profile(options):
    """The source page of one launch, as CSV."""
    command = [options.flashqla, "bench", "--device", "cuda", "--one-call", "--min-repeats", "5", "--min-time", "0.01"]
    with tempfile.TemporaryDirectory() as folder:
        report = os.path.join(folder, "report")
        # NOTE: clocks as they are, or the kernel runs in a state that no user sees.
        counters = [
            "--clock-control",
            "none",
            "--section",
            "SourceCounters",
            "--launch-skip",
            "1",
            "--launch-count",
            "1",
        ]
        subprocess.run(
            ["ncu", *counters, "-k", f"regex:{options.kernel}", "-o", report, *command, "--no-check", options.case],
            check=True,
            stdout=subprocess.DEVNULL,
        )
        page = ["--page", "source", "--csv", "--print-units", "base"]
        text = subprocess.run(
            ["ncu", "-i", report + ".ncu-rep", *page], check=True, capture_output=True, text=True
        ).stdout
    if options.keep:
        with open(options.keep, "w", encoding="utf-8") as file:
            file.write(text)
    return text


def number(text):
    return float(text) if text not in ("", "-") else 0.0


def read_instructions(text):
    """Dicts with text, samples, executed and stalls (reason -> samples) of each instruction, in order."""
    rows = list(csv.reader(io.StringIO(text)))
    first = next((i for i, row in enumerate(rows) if "Source" in row and "# Samples" in row), None)
    if first is None:
        raise ValueError("no table with the columns 'Source' and '# Samples'; is this ncu's source page as CSV?")
    names = rows[first]
    # NOTE: the samples of warps that could not issue come a second time, as columns of their own.
    reasons = {i: x[6:] for i, x in enumerate(names) if x.startswith("stall_") and "Not Issued" not in x}
    source, samples, executed = (names.index(x) for x in ("Source", "# Samples", "Instructions Executed"))
    return [
        {
            "text": row[source],
            "samples": number(row[samples]),
            "executed": number(row[executed]),
            "stalls": {reason: number(row[i]) for i, reason in reasons.items()},
        }
        for row in rows[first + 1 :]
        if len(row) == len(names)
    ]


def loops_of(instructions):
    """Ranges of instructions that are executed often. NOTE: a loop that polls is executed most of all, a hundred times
    as often as what it waits for."""
    often = max(x["executed"] for x in instructions) / 400
    loops = []
    for i, x in enumerate(instructions):
        if x["executed"] < often or often == 0:
            continue
        if loops and i - loops[-1][1] <= APART:
            loops[-1][1] = i
        else:
            loops.append([i, i])
    return [(first, last + 1) for first, last in loops]


def most(stalls, whole, least):
    shares = sorted(((value / whole, reason) for reason, value in stalls.items()), reverse=True)
    return "  ".join(f"{reason} {100 * share:.1f}" for share, reason in shares if share >= least)


def show(instructions, least, out=sys.stdout):
    every = sum(x["samples"] for x in instructions) or 1.0
    for first, last in loops_of(instructions):
        loop = instructions[first:last]
        samples = sum(x["samples"] for x in loop)
        if samples < every / 200:
            continue
        stalls = {reason: sum(x["stalls"][reason] for x in loop) for reason in loop[0]["stalls"]}
        print(f"\n{first} to {last}: {100 * samples / every:.1f} % of the samples; of these, %:", file=out)
        print("   " + most(stalls, samples, 0.01), file=out)
        before = 0.0
        for i, x in enumerate(loop, first):
            before += x["samples"]
            if x["samples"] >= least * samples / 1000:
                share, sum_so_far = 1000 * x["samples"] / samples, 1000 * before / samples
                why = most(x["stalls"], x["samples"], 0.1)
                print(f"   {i:7d} {share:5.0f} {sum_so_far:6.0f}  {x['text'].strip()[:64]:64s}  {why}", file=out)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("case", nargs="?")
    parser.add_argument("--kernel", default="forward_kernel", metavar="REGEX")
    parser.add_argument("--flashqla", default="flashqla", metavar="PROGRAM")
    parser.add_argument("--csv", metavar="FILE", help="show this one, and run nothing")
    parser.add_argument("--keep", metavar="FILE", help="keep ncu's table")
    parser.add_argument("--least", type=float, default=4, metavar="SAMPLES", help="of 1000 of a loop, to show [4]")
    options = parser.parse_args()
    if (options.case is None) == (options.csv is None):
        parser.error("a case, or --csv FILE with what an earlier run has kept")
    if options.csv:
        with open(options.csv, encoding="utf-8") as file:
            text = file.read()
    else:
        text = profile(options)
    show(read_instructions(text), options.least)


if __name__ == "__main__":
    main()
