#!/usr/bin/env python3
"""Draws the published grid from bench/results/h200_forward.jsonl and h200_backward.jsonl: how many times faster than
the best other library each row is.

    python3 bench/plot_grid.py [-o FOLDER]      docs/images/h200_forward.png, docs/images/h200_backward.png

A row for each model, a column for each set of lengths; blue is faster than the best peer, red slower. Needs matplotlib.
"""

import argparse
import json
import math
import os
import sys

import grid


def read_results(path):
    with open(path, encoding="utf-8") as lines:
        return [json.loads(line) for line in lines if line.strip()]


def draw(results, direction, image):
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.colors import TwoSlopeNorm

    labels = {}
    for row in grid.read_peers(os.path.join(grid.RESULTS, "peers_h200.csv"), grid.PASSES[direction]):
        labels[grid.key_of_row(row)] = row["label"]
    columns = list(dict.fromkeys(labels.values()))
    models = list(dict.fromkeys(r["model"] for r in results))
    ratios = [[math.nan] * len(columns) for _ in models]
    for r in results:
        label = labels.get(grid.key_of(r))
        if label:
            ratios[models.index(r["model"])][columns.index(label)] = r["ratio"]

    figure, axes = plt.subplots(figsize=(2.2 + 0.62 * len(columns), 1.8 + 0.42 * len(models)), layout="constrained")
    logs = [[math.log2(x) if x == x else math.nan for x in row] for row in ratios]
    axes.imshow(logs, cmap="RdBu", norm=TwoSlopeNorm(0, -2, 2), aspect="auto")
    for i, row in enumerate(ratios):
        for j, x in enumerate(row):
            if x == x:
                text = f"{x:.2f}" if x < 10 else f"{x:.0f}"
                axes.text(
                    j,
                    i,
                    text,
                    ha="center",
                    va="center",
                    fontsize=8,
                    color="white" if abs(math.log2(x)) > 1.3 else "black",
                )
    names = {(r["model"]): f"{r['model']}\n{r['heads_k']}/{r['heads_v']} heads" for r in results}
    axes.set_xticks(range(len(columns)), columns, rotation=45, ha="right", fontsize=8)
    axes.set_yticks(range(len(models)), [names[m] for m in models], fontsize=8)
    axes.tick_params(length=0)
    for side in axes.spines.values():
        side.set_visible(False)
    mean = grid.geomean(r["ratio"] for r in results)
    last = results[-1]
    gpu = last.get("gpu", "H200").split(",")[0].split(" ", 1)[-1]
    title = f"{direction}: times faster than the best of FlashQLA (TileLang), FlashInfer and FLA; {len(results)} rows, "
    title += f"geometric mean {mean:.2f}\none {gpu}, bf16, K = V = 128, commit {last['commit']}, {last['date']}"
    axes.set_title(title, fontsize=9, loc="left")
    os.makedirs(os.path.dirname(os.path.abspath(image)), exist_ok=True)
    figure.savefig(image, dpi=130)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", default=os.path.join(grid.ROOT, "docs", "images"), metavar="FOLDER")
    parser.add_argument("--results", default=grid.RESULTS, metavar="FOLDER")
    options = parser.parse_args()
    drawn = 0
    for direction in grid.PASSES:
        path = os.path.join(options.results, f"h200_{direction}.jsonl")
        results = read_results(path) if os.path.exists(path) else []
        if not results:
            print(f"{path} has no results; bench/grid.py {direction} writes them")
            continue
        image = os.path.join(options.output, f"h200_{direction}.png")
        try:
            draw(results, direction, image)
        except ModuleNotFoundError as error:
            sys.exit(f"plot_grid.py needs {error.name}; on Debian it is in the package python3-matplotlib")
        print(f"{image}: {len(results)} rows")
        drawn += 1
    sys.exit(drawn == 0)


if __name__ == "__main__":
    main()
