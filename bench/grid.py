#!/usr/bin/env python3
"""Times the published grid (171 forward and 32 backward rows) on a GPU and prints it beside the other libraries.

    python3 bench/grid.py forward|backward [--flashqla PROGRAM] [--rows TEXT] [--every N] [--budget SECONDS]

The rows and the other libraries' times on an H200 stand in bench/results/peers_h200.csv; times of FLA that
bench/peers_gpu/time_fla.py took on the same card in bench/results/h200_fla.jsonl. `flashqla bench` does the timing,
with the inputs of the published protocol: unit keys and queries, g = logsigmoid(N(0,1)) / 16 with a quarter of the
heads at 0, beta = sigmoid(N(0,1)), a drawn initial state, the final state written; the median of CUDA graph replays of
one call.
Results go to bench/results/h200_forward.jsonl or h200_backward.jsonl, where they replace the same rows' earlier ones.
Needs the Python standard library only.
"""

import argparse
import csv
import json
import math
import os
import re
import subprocess
import sys
import tempfile
import time

from records import driver_version

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
RESULTS = os.path.join(ROOT, "bench", "results")
PASSES = {"forward": "fwd", "backward": "bwd"}
GOALS = {"fwd": (1.25, 2.0), "bwd": (1.5, 2.5)}  # each row, geometric mean
HEAD_SIZE = 128  # K and V where a row or a record names none: the published grid has no others

# An H200. A chunk of one value head needs so many operations at least, 64-token chunks, K = V = 128 (docs/math.md).
MULTIPROCESSORS = 132
CHUNK_FLOP = {"fwd": 10.49e6, "bwd": 31.5e6}
FLOP_PER_SECOND, BYTES_PER_SECOND = 790e12, 4.3e12  # measured: a large matrix product, a large copy


def lengths(text):
    """The grammar's lens=: '4096x8', '8192+24576', '32768' -> a tuple."""
    out = []
    for part in text.split("+"):
        length, _, times = part.partition("x")
        out += [int(length)] * int(times or 1)
    return tuple(out)


def read_peers(path, short):
    """Rows of one pass: dicts with lens, heads, head sizes and the best peer. A table without the column `pass` is of
    both; one without times (bench/widths.csv) has no peer."""

    def milliseconds(text):
        return float(text) if text else None

    rows = []
    with open(path, encoding="utf-8", newline="") as lines:
        for row in csv.DictReader(lines):
            if row.get("pass", short) != short:
                continue
            rows.append(
                {
                    "model": row["model"],
                    "label": row.get("seqlens", row["lens"]),
                    "lens": lengths(row["lens"]),
                    "heads": (int(row["heads_k"]), int(row["heads_v"])),
                    "dims": (int(row.get("dim_k", HEAD_SIZE)), int(row.get("dim_v", HEAD_SIZE))),
                    "peer": row.get("best_peer"),
                    "peer_ms": milliseconds(row.get("best_ms")),
                    "fla_ms": milliseconds(row.get("fla_ms")),
                }
            )
    return rows


def key_of_row(row):
    return row["lens"], *row["heads"], *row["dims"]


def key_of(record):
    """The same of a line of bench/results."""
    sizes = (record.get("dim_k", HEAD_SIZE), record.get("dim_v", HEAD_SIZE))
    return lengths(record["lens"]), record["heads_k"], record["heads_v"], *sizes


def use_fla_here(path, short, rows):
    """FLA's times from the same card, where there are some, instead of the published ones."""
    if not os.path.exists(path):
        return
    here = {}
    with open(path, encoding="utf-8") as lines:
        for line in lines:
            record = json.loads(line)
            if record["pass"] == short and record.get("ms"):
                here[key_of(record)] = record["ms"]
    for row in rows:
        ms = here.get(key_of_row(row))
        if ms is None:
            continue
        row["fla_ms"] = ms
        if ms < row["peer_ms"]:
            row["peer"], row["peer_ms"] = "fla", ms


def case_of(row, short):
    heads_k, heads_v = row["heads"]
    dim_k, dim_v = row["dims"]
    lens = "+".join(map(str, row["lens"]))
    if len(set(row["lens"])) == 1 and len(row["lens"]) > 1:
        lens = f"{row['lens'][0]}x{len(row['lens'])}"
    return f"{short}:lens={lens},hk{heads_k},hv{heads_v},k{dim_k},v{dim_v},bf16,g=published,h0=1"


def key_of_case(case):
    """Of a case as it was asked for, and as the tool writes it: with all sizes, those of one sequence as t."""

    def size(name, default=None):
        found = re.search(rf"[:,]{name}(\d+)", case)
        return int(found.group(1)) if found else default

    lens = re.search(r"lens=([0-9x+]+)", case)
    heads_k, dim_k = size("hk"), size("k", HEAD_SIZE)
    return (
        lengths(lens.group(1)) if lens else (size("t"),),
        heads_k,
        size("hv", heads_k),
        dim_k,
        size("v", dim_k),
    )


def chunk_heads(row):
    return sum(-(-n // 64) for n in row["lens"]) * row["heads"][1]


def judge(row, record, short):
    """The record of `flashqla bench`, beside the peers and the least time that the card could take."""
    n = chunk_heads(row)
    floor = 1e3 * max(CHUNK_FLOP[short] * n / FLOP_PER_SECOND, record["bytes"] / BYTES_PER_SECOND)
    return {
        **record,
        "model": row["model"],
        "lens": "+".join(map(str, row["lens"])),
        "heads_k": row["heads"][0],
        "heads_v": row["heads"][1],
        "us_per_chunk_sm": round(1e3 * record["ms"] * MULTIPROCESSORS / n, 3),
        "peer": row["peer"],
        "peer_ms": row["peer_ms"],
        "fla_ms": row["fla_ms"],
        "ratio": round(row["peer_ms"] / record["ms"], 4),
        "floor_ms": round(floor, 5),
        "share_of_floor": round(floor / record["ms"], 4),
    }


def measure(options, cases, out):
    """Runs `flashqla bench` over all cases, for at most the budget; its JSON lines, and the lines of its messages."""
    with tempfile.TemporaryDirectory() as folder:
        table = os.path.join(folder, "cases.txt")
        with open(table, "w", encoding="utf-8") as lines:
            lines.write("\n".join(cases) + "\n")
        command = [
            options.flashqla,
            "bench",
            "--table",
            table,
            "--device",
            options.device,
            "--no-check",
            "--one-call",
            "--min-time",
            str(options.min_time),
            "--min-repeats",
            "5",
            "--json",
            out,
        ]
        if options.commit:
            command += ["--commit", options.commit]
        begin = time.monotonic()
        with open(os.path.join(folder, "messages.txt"), "w+", encoding="utf-8") as messages:
            try:
                subprocess.run(command, stdout=subprocess.DEVNULL, stderr=messages, timeout=options.budget, check=False)
            except subprocess.TimeoutExpired:
                print(f"# stopped after {options.budget:g} s")
            except OSError as error:
                sys.exit(
                    f"{options.flashqla} cannot be run ({error.strerror}); --flashqla names the command line tool of a "
                    "build with CUDA"
                )
            messages.seek(0)
            text = messages.read().strip().splitlines()
        if text:
            print("\n".join(f"# {line}" for line in text[:5]))
            if len(text) > 5:
                print(f"# and {len(text) - 5} more such lines")
        print(f"# {time.monotonic() - begin:.1f} s of timing")
    if not os.path.exists(out):
        return [], text
    with open(out, encoding="utf-8") as lines:
        return [json.loads(line) for line in lines if line.endswith("\n")], text


def geomean(numbers):
    numbers = list(numbers)
    return math.exp(sum(map(math.log, numbers)) / len(numbers)) if numbers else float("nan")


def shown_lengths(lens):
    """Short enough for a column: '2048x4', and '5 of 8192' for five mixed ones with so many tokens."""
    text = f"{lens[0]}x{len(lens)}" if len(set(lens)) == 1 and len(lens) > 1 else "+".join(map(str, lens))
    return text if len(text) <= 22 else f"{len(lens)} of {sum(lens)}"


def report(results, short):
    print(
        f"{'model':16s} {'lengths':22s} {'Hk/Hv':>6s} {'ms':>9s} {'best peer':>9s} {'':18s} {'ratio':>6s} "
        f"{'FLA':>6s} {'us/chunk/SM':>11s} {'floor':>6s}"
    )
    for r in results:
        fla = f"{r['fla_ms'] / r['ms']:6.2f}" if r["fla_ms"] else f"{'-':>6s}"
        shown = shown_lengths(lengths(r["lens"]))
        print(
            f"{r['model']:16s} {shown:22s} {r['heads_k']:>3d}/{r['heads_v']:<2d} {r['ms']:9.4f} {r['peer_ms']:9.4f} "
            f"{r['peer']:18s} {r['ratio']:6.2f} {fla} {r['us_per_chunk_sm']:11.2f} {r['share_of_floor']:6.0%}"
        )
    each, mean = GOALS[short]
    ratios = [r["ratio"] for r in results]
    below = sum(x < each for x in ratios)
    print(
        f"rows {len(results)}; ratio to the best peer: geometric mean {geomean(ratios):.3f} (goal {mean}), "
        f"smallest {min(ratios):.3f}, median {sorted(ratios)[len(ratios) // 2]:.3f}, "
        f"{below} rows below {each}"
    )
    fla = [r["fla_ms"] / r["ms"] for r in results if r["fla_ms"]]
    print(
        f"ratio to FLA: geometric mean {geomean(fla):.3f}; share of the floor: geometric mean "
        f"{geomean(r['share_of_floor'] for r in results):.1%}"
    )
    for model in dict.fromkeys(r["model"] for r in results):
        some = [r for r in results if r["model"] == model]
        print(
            f"  {model:16s} {len(some):3d} rows, geometric mean {geomean(r['ratio'] for r in some):.3f}, "
            f"smallest {min(r['ratio'] for r in some):.3f}"
        )


def keep(path, results):
    """Replaces the same rows of an earlier file, keeps the others."""

    def key(record):
        return record.get("pass"), *key_of(record)

    old = []
    if os.path.exists(path):
        with open(path, encoding="utf-8") as lines:
            old = [json.loads(line) for line in lines if line.strip()]
    new = {key(r): r for r in results}
    merged = [new.pop(key(r), r) for r in old] + list(new.values())
    with open(path, "w", encoding="utf-8") as lines:
        lines.writelines(json.dumps(r) + "\n" for r in merged)


def add_options_of_measure(parser):
    parser.add_argument("--flashqla", default=os.path.join(ROOT, "build", "cli", "flashqla"), metavar="PROGRAM")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--budget", type=float, default=60.0, metavar="SECONDS", help="stop after so many")
    parser.add_argument("--min-time", type=float, default=0.02, metavar="SECONDS", help="to measure a row at least")
    parser.add_argument("--commit", default="", help="to write down; default: what the program was built from")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("direction", choices=PASSES)
    add_options_of_measure(parser)
    parser.add_argument("--rows", default="", metavar="TEXT", help="only rows whose model and lengths contain this")
    parser.add_argument("--every", type=int, default=1, metavar="N", help="only every N-th row")
    parser.add_argument("--peers", default=os.path.join(RESULTS, "peers_h200.csv"))
    parser.add_argument("--fla", default=os.path.join(RESULTS, "h200_fla.jsonl"), help="times of bench/peers_gpu")
    parser.add_argument("--out", help="default: bench/results/h200_forward.jsonl or h200_backward.jsonl")
    parser.add_argument("--print-cases", action="store_true", help="the case lines, and nothing is run")
    parser.add_argument("--show", action="store_true", help="print what --out already holds, and nothing is run")
    options = parser.parse_args()

    short = PASSES[options.direction]
    rows = read_peers(options.peers, short)
    use_fla_here(options.fla, short, rows)
    rows = [r for r in rows if options.rows in f"{r['model']} {r['label']}"][:: options.every]
    out = options.out or os.path.join(RESULTS, f"h200_{options.direction}.jsonl")
    if options.print_cases:
        print("\n".join(case_of(r, short) for r in rows))
        return
    by_key = {key_of_row(r): r for r in rows}
    if options.show:
        with open(out, encoding="utf-8") as lines:
            records = [json.loads(line) for line in lines]
        report([judge(by_key[key_of(r)], r, short) for r in records if key_of(r) in by_key], short)
        return
    with tempfile.TemporaryDirectory() as folder:
        records, _ = measure(options, [case_of(r, short) for r in rows], os.path.join(folder, "bench.jsonl"))
    results = [judge(by_key[key_of_case(r["case"])], r, short) for r in records]
    driver = driver_version()
    results = [{**r, "driver": driver} for r in results] if driver else results
    if not results:
        sys.exit("bench/grid.py: no row was timed")
    report(results, short)
    keep(out, results)
    print(f"{len(results)} rows in {out}")


if __name__ == "__main__":
    main()
