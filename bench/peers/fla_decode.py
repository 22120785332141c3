#!/usr/bin/env python3
"""Decode on a GPU beside FLA's fused_recurrent_gated_delta_rule, one token a row, in one run.

    python3 bench/peers/fla_decode.py --flashqla build/cli/flashqla --commit "$(git rev-parse --short HEAD)" \
        --out bench/results/h200_decode.jsonl

Needs torch and the packages fla-core and flash-linear-attention. FlashQLA's times are those of `flashqla bench`: CUDA
graph replays over buffers that rotate past the cache. FLA's calls are timed in the same way, each with its own output
tensors, as FLA makes them; its states are fp32 and not updated in place. Appends the lines of `flashqla bench` with
gpu, driver, copy_gb_per_s (a large copy on the device, bytes read and written) and share_of_copy; where states are
fp32 also peer, peer_ms and ratio (above 1: FlashQLA is faster).
"""

import argparse
import importlib.metadata
import json
import re
import statistics
import subprocess
import tempfile

import torch
from fla.ops.gated_delta_rule.fused_recurrent import fused_recurrent_gated_delta_rule_fwd

HEADS_K, HEADS_V, DIM = 16, 32, 128
# 128 rows are 4096 states; more take the host long to make up, and the share of bandwidth hardly changes.
ROWS = {"f32": (1, 2, 4, 8, 16, 32, 64, 128), "bf16": (1, 16, 128), "f16": (128,)}
CACHE_BYTES = 128 << 20


def milliseconds(replay, calls, groups=15):
    times = []
    for _ in range(groups):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) / calls)
    return statistics.median(times)


def copy_gb_per_s():
    source = torch.randn(1 << 30, device="cuda")
    target = torch.empty_like(source)
    target.copy_(source)
    return 2 * source.nbytes / milliseconds(lambda: target.copy_(source), 1) / 1e6


def fla_inputs(rows, v_first):
    def unit(*shape):
        return torch.nn.functional.normalize(torch.randn(*shape, device="cuda"), dim=-1).bfloat16()

    return {
        "q": unit(rows, 1, HEADS_K, DIM),
        "k": unit(rows, 1, HEADS_K, DIM),
        "v": torch.randn(rows, 1, HEADS_V, DIM, device="cuda").bfloat16(),
        "g": -0.1 * torch.rand(rows, 1, HEADS_V, device="cuda"),
        "beta": torch.rand(rows, 1, HEADS_V, device="cuda"),
        "scale": DIM**-0.5,
        "initial_state": 0.3 * torch.randn(rows, HEADS_V, DIM, DIM, device="cuda"),
        "output_final_state": True,
        "state_v_first": v_first,
    }


def fla_ms(rows, v_first):
    copies = max(1, min(64, CACHE_BYTES // (rows * HEADS_V * DIM * DIM * 4) + 1))
    inputs = [fla_inputs(rows, v_first) for _ in range(copies)]
    calls = max(copies, 8)
    for _ in range(2):
        fused_recurrent_gated_delta_rule_fwd(**inputs[0])
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    results = []
    with torch.cuda.graph(graph):
        for i in range(calls):
            results.append(fused_recurrent_gated_delta_rule_fwd(**inputs[i % copies]))
    for _ in range(3):
        graph.replay()
    return milliseconds(graph.replay, calls)


def flashqla_lines(program, commit):
    cases = [
        f"dec:b{{{'|'.join(map(str, rows))}}},hk{HEADS_K},hv{HEADS_V},k{DIM},bf16,state={state},layout={{kv|vk}},g=weak"
        for state, rows in ROWS.items()
    ]
    with tempfile.NamedTemporaryFile("r", suffix=".jsonl") as file:
        # The tables of tests/cases/ check the same kernels, on small cases; checking these would take minutes.
        command = [program, "bench", "--device", "cuda", "--min-time", "0.03", "--no-check"]
        subprocess.run([*command, "--json", file.name, "--commit", commit, *cases], check=True)
        return [json.loads(line) for line in file]


def main():
    parser = argparse.ArgumentParser(description="Decode beside FLA; see the text at the top of this file.")
    parser.add_argument("--flashqla", required=True, help="the flashqla program, with the CUDA backend")
    parser.add_argument("--commit", default="", help="written into the lines")
    parser.add_argument("--out", required=True, help="lines are appended to this file")
    options = parser.parse_args()
    lines = flashqla_lines(options.flashqla, options.commit)
    gpu = torch.cuda.get_device_name()
    driver = subprocess.run(
        ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"], capture_output=True, text=True
    ).stdout.split("\n")[0]
    copy = copy_gb_per_s()
    peer = "fla-core " + importlib.metadata.version("fla-core") + " fused_recurrent_gated_delta_rule"
    with open(options.out, "a") as out:
        for line in lines:
            line.update(gpu=gpu, driver=driver, copy_gb_per_s=copy, share_of_copy=line["gb_per_s"] / copy)
            if "state=" not in line["case"]:  # fp32 states
                rows = int(re.search(r"dec:b(\d+),", line["case"]).group(1))
                ms = fla_ms(rows, "layout=vk" in line["case"])
                line.update(peer=peer, peer_ms=ms, ratio=ms / line["ms"])
            out.write(json.dumps(line) + "\n")
            extra = f"  FLA {1e3 * line['peer_ms']:8.2f} us, {line['ratio']:.3f}x" if "peer" in line else ""
            print(f"{line['case']:<90} {1e3 * line['ms']:8.2f} us  {100 * line['share_of_copy']:5.1f} %{extra}")
    print(f"copy {copy:.0f} GB/s on {gpu}, driver {driver}")


if __name__ == "__main__":
    main()
