#!/usr/bin/env python3
"""Draws the README's comparison: FlashQLA beside other CPU implementations, from the records of peer_bench.

    python3 bench/plot_peers.py [RECORDS.jsonl] [-o IMAGE.png] [--threads N]

A row of the figure for each processor in the file, a panel for each case, a bar for each implementation: microseconds
per token, the median over rounds, shorter is better. Where a record is repeated the last one counts. Needs matplotlib.
"""

import argparse
import json
import os
import sys

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))

CASES = {
    "prefill_T512": "prefill, 512 tokens",
    "prefill_T2048": "prefill, 2048 tokens",
    "decode_same_state": "decode, state in cache",
    "decode_64_states": "decode, 64 states in turn",
}
# implementation: label, colour. Top to bottom.
IMPLEMENTATIONS = {
    "ggml": ("ggml, fp32", "#c9c9c9"),
    "ik_llama": ("ik_llama.cpp, fp32", "#8f8f8f"),
    "flashqla_f32": ("FlashQLA, fp32", "#4477aa"),
    "flashqla_bf16": ("FlashQLA, bf16", "#cc6633"),
    "flashqla_bf16_state_f32": ("FlashQLA, bf16, fp32 state", "#ddaa66"),
    "flashqla_bf16_state_bf16": ("FlashQLA, bf16, bf16 state", "#cc6633"),
}


def read_records(path, threads):
    """{cpu: {case: {impl: record}}}, the last record of each."""
    found = {}
    with open(path, encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                record = json.loads(line)
                cpu, case, impl = record["cpu"], record["case"], record["impl"]
                float(record["median_us_per_token"])
                same_threads = record["threads"] == threads
            except (ValueError, KeyError, TypeError) as error:
                sys.exit(f"{path}:{number}: not a record of peer_bench ({type(error).__name__}: {error})")
            if same_threads and case in CASES and impl in IMPLEMENTATIONS:
                found.setdefault(cpu, {}).setdefault(case, {})[impl] = record
    return found


def draw_panel(axes, records):
    impls = [name for name in IMPLEMENTATIONS if name in records]
    times = [records[name]["median_us_per_token"] for name in impls]
    axes.barh(range(len(impls)), times, color=[IMPLEMENTATIONS[name][1] for name in impls], height=0.72)
    for at, (name, time) in enumerate(zip(impls, times)):
        ratio = records[name].get("ratio_vs_ik_llama")
        text = f"{time:.1f}"
        if ratio and name != "ggml":
            text += f"  ({ratio:.1f}x ik_llama)"
        # Inside a bar that is nearly as long as the panel, behind it otherwise.
        inside = time > 0.6 * max(times)
        axes.annotate(
            text,
            (time, at),
            xytext=(-4 if inside else 4, 0),
            textcoords="offset points",
            va="center",
            ha="right" if inside else "left",
            fontsize=8,
            color="white" if inside and name != "ggml" else "black",
        )
    axes.set_yticks(range(len(impls)), [IMPLEMENTATIONS[name][0] for name in impls], fontsize=8)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.05 * max(times))
    axes.tick_params(axis="x", labelsize=8)
    axes.tick_params(axis="y", length=0)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)


def draw(found, threads, image):
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    cases = [case for case in CASES if any(case in by_case for by_case in found.values())]
    columns = min(2, len(cases))
    bands = -(-len(cases) // columns)
    figure = plt.figure(figsize=(5.4 * columns, 0.5 + len(found) * (0.5 + 1.75 * bands)), layout="constrained")
    for part, (cpu, by_case) in zip(figure.subfigures(len(found), 1, squeeze=False)[:, 0], found.items()):
        some = next(iter(next(iter(by_case.values())).values()))
        thread_text = "one thread" if threads == 1 else f"{threads} threads"
        part.suptitle(
            f"{cpu}, {thread_text}, commit {some.get('commit', 'unknown')}, {some.get('date', '')}",
            fontsize=9,
            x=0.01,
            ha="left",
        )
        panels = part.subplots(bands, columns, squeeze=False).flat
        for axes, case in zip(panels, cases):
            axes.set_title(CASES[case], fontsize=9, loc="left")
            if case in by_case:
                draw_panel(axes, by_case[case])
            else:
                axes.axis("off")
        for axes in list(part.axes)[len(cases) :]:
            axes.axis("off")
        for axes in part.axes[max(0, len(cases) - columns) : len(cases)]:
            axes.set_xlabel("microseconds per token, 16 key and 32 value heads, K = V = 128", fontsize=8)
    os.makedirs(os.path.dirname(os.path.abspath(image)), exist_ok=True)
    figure.savefig(image, dpi=150)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("records", nargs="?", default=os.path.join(ROOT, "bench", "results", "cpu_peers.jsonl"))
    parser.add_argument("-o", "--output", default=os.path.join(ROOT, "docs", "images", "cpu_peers.png"))
    parser.add_argument("--threads", type=int, default=1, help="draw the records with this thread count")
    options = parser.parse_args()

    if not os.path.exists(options.records):
        sys.exit(f"{options.records} does not exist; bench/peers/README.md says how peer_bench writes it")
    found = read_records(options.records, options.threads)
    if not found:
        sys.exit(f"{options.records} has no prefill or decode record with {options.threads} thread(s); nothing to draw")
    try:
        draw(found, options.threads, options.output)
    except ModuleNotFoundError as error:
        sys.exit(f"plot_peers.py needs {error.name}; on Debian it is in the package python3-matplotlib")
    print(f"{options.output}: {len(found)} processor(s)")


if __name__ == "__main__":
    main()
