#!/usr/bin/env python3
"""Fits the constants of the segments' model to forced cuts on a GPU, and shows how far it is off.

    python3 bench/fit_segments.py [--fit ROUNDS] [--plot FILE.png]

Reads bench/results/h200_segments.jsonl (`flashqla bench --json` of cases of one sequence with `split=`), asks the
plan's own model (src/cuda/segment_cost.hpp, compiled here through bench/segment_times.cpp) what each cut takes, and
prints measured and predicted times, the choice of the model beside the best cut, and the root mean square of the
logarithms' difference over cuts into four segments or more. Without --fit the constants are those of
src/cuda/chunk_walk.hpp:kSm90Forward; with it they are moved at random, ROUNDS times, and kept when the sum of that
difference and of what the choices cost, weighted, is less. What every call takes besides, whatever the cut, is one more
number, fitted in both ways. Needs a C++ compiler, and matplotlib for the plot.
"""

import argparse
import json
import math
import os
import random
import re
import subprocess
import tempfile

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
NAMES = ("outputs step", "outputs start", "ends step", "ends start", "carry", "carry step", "windows")
MOST_CHANGE = (0.1, 2.0, 0.1, 2.0, 1.0, 0.2, 1.0)  # of a round
NEARLY = 0.02  # of a time
LOSS_WEIGHT = 3
WINDOW = {"published": 7, "strong": 1}  # chunks that a head needs before a cut


def constants_of_plan():
    """kSm90Forward and what stands beside it."""
    with open(os.path.join(ROOT, "src", "cuda", "chunk_walk.hpp"), encoding="utf-8") as file:
        text = file.read()
    family = text[text.index("ChunkFamily kSm90Forward") :]

    def wide_and_start(walk):
        numbers = re.search(rf"\.{walk} = {{([^}}]*)}}", family).group(1)
        return [float(x.rstrip("f ")) for x in numbers.split(",")][2:]

    def constant(name):
        return float(re.search(rf"{name} = ([0-9.]+)f", text).group(1))

    return (
        *wide_and_start("outputs"),
        *wide_and_start("ends"),
        constant("kForwardCarryTime"),
        constant("kForwardCarryStep"),
        constant("kWindowsTime"),
    )


def read_cuts(path):
    """Dicts with the case's name, the model's question (heads, chunks, forgetful, warm, chunks of a segment) and ms."""
    cuts = []
    with open(path, encoding="utf-8") as lines:
        for line in lines:
            record = json.loads(line)
            name, _, split = record["case"].partition(",split=")
            if not split:
                continue
            heads, gates = int(re.search(r"hv(\d+)", name).group(1)), re.search(r",g=(\w+)", name).group(1)
            chunks = -(-int(re.search(r"lens=(\d+)", name).group(1)) // 64)
            forgetful = {"published": heads - heads // 4, "strong": heads}.get(gates, 0)
            question = (heads, chunks, forgetful, forgetful * WINDOW.get(gates, 0), -(-chunks // int(split)))
            cuts.append({"name": name, "split": int(split), "question": question, "us": 1e3 * record["ms"]})
    return cuts


def compile_model(folder, compiler):
    program = os.path.join(folder, "segment_times")
    source, include = os.path.join(ROOT, "bench", "segment_times.cpp"), os.path.join(ROOT, "src")
    command = [compiler, "-std=c++20", "-O1", "-I", include, "-I", os.path.join(ROOT, "include")]
    subprocess.run([*command, source, "-o", program], check=True)
    return program


def predict(program, constants, cuts):
    text = "".join(" ".join(map(str, (*constants, *cut["question"]))) + "\n" for cut in cuts)
    answer = subprocess.run([program], input=text, capture_output=True, text=True, check=True).stdout
    return [float(x) for x in answer.split()]


def besides(times, cuts):
    """The time that the model leaves out, as the median of what is missing."""
    missing = sorted(cut["us"] - time for cut, time in zip(cuts, times) if cut["split"] > 3)
    return missing[len(missing) // 2]


def error(times, cuts):
    rest = besides(times, cuts)
    squares = [math.log((time + rest) / cut["us"]) ** 2 for cut, time in zip(cuts, times) if cut["split"] > 3]
    return math.sqrt(sum(squares) / len(squares))


def loss(times, cuts):
    """What the model's choices cost: the logarithm of the chosen cut's time over the best one's, a mean over cases.
    Cuts that the model finds nearly as good as its choice count too, or a rounded constant takes another one."""
    losses = []
    for name in dict.fromkeys(cut["name"] for cut in cuts):
        some = [(time, cut["us"]) for cut, time in zip(cuts, times) if cut["name"] == name]
        least, best = min(time for time, _ in some), min(us for _, us in some)
        weights = [math.exp(-(time / least - 1) / NEARLY) for time, _ in some]
        costs = [math.log(us / best) for _, us in some]
        losses.append(sum(w * cost for w, cost in zip(weights, costs)) / sum(weights))
    return sum(losses) / len(losses)


def fit(program, constants, cuts, rounds):
    def miss(constants):
        times = predict(program, constants, cuts)
        return error(times, cuts) + LOSS_WEIGHT * loss(times, cuts)

    chosen = random.Random(1)
    least = miss(constants)
    for _ in range(rounds):
        moved = [max(0.0, x + chosen.gauss(0, change)) for x, change in zip(constants, MOST_CHANGE)]
        now = miss(moved)
        if now < least:
            constants, least = moved, now
    return constants


def report(times, cuts):
    rest = besides(times, cuts)
    for name in dict.fromkeys(cut["name"] for cut in cuts):
        some = [(cut["split"], cut["us"], time + rest) for cut, time in zip(cuts, times) if cut["name"] == name]
        print(name)
        print("   segments: measured / predicted us ", "  ".join(f"{n}: {a:.0f}/{b:.0f}" for n, a, b in some))
        taken, best = min(some, key=lambda x: x[2]), min(some, key=lambda x: x[1])
        print(f"   the model takes {taken[0]}, {taken[1]:.0f} us; the best is {best[0]}, {best[1]:.0f} us")
    print(f"besides, in every call: {rest:.1f} us; root mean square error {error(times, cuts):.1%}")


def plot(path, times, cuts):
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rest = besides(times, cuts)
    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    for name in dict.fromkeys(cut["name"] for cut in cuts):
        some = [(cut["split"], (time + rest) / cut["us"] - 1) for cut, time in zip(cuts, times) if cut["name"] == name]
        label = re.sub(r"^fwd:b1,|k128,v128,bf16,gate=log,|,h0=1$", "", name)
        axes.plot(*zip(*some), marker="o", markersize=3, linewidth=1, label=label)
    axes.axhspan(-0.15, 0.15, color="0.93")
    axes.set(xlabel="segments of the sequence", ylabel="predicted / measured - 1", xscale="log")
    axes.legend(fontsize=7)
    figure.savefig(path, dpi=110)
    print(path)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cuts", default=os.path.join(ROOT, "bench", "results", "h200_segments.jsonl"))
    parser.add_argument("--fit", type=int, default=0, metavar="ROUNDS")
    parser.add_argument("--plot", metavar="FILE")
    parser.add_argument("--compiler", default=os.environ.get("CXX", "c++"))
    options = parser.parse_args()

    cuts = read_cuts(options.cuts)
    with tempfile.TemporaryDirectory() as folder:
        program = compile_model(folder, options.compiler)
        constants = constants_of_plan()
        if options.fit:
            constants = fit(program, constants, cuts, options.fit)
        times = predict(program, constants, cuts)
    print(", ".join(f"{name} {value:.2f}" for name, value in zip(NAMES, constants)))
    report(times, cuts)
    if options.plot:
        plot(options.plot, times, cuts)


if __name__ == "__main__":
    main()
