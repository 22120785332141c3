#!/usr/bin/env python3
"""Trains the small Qwen3-Next model of examples/qwen3_next with two implementations of the gated delta rule.

    python examples/python/train_qwen3_next.py [--steps 300] [--batch 2] [--window 256]
    python examples/python/train_qwen3_next.py --plot-only
    python examples/python/train_qwen3_next.py --device cuda --steps 1000 --batch 32 --window 1024 --lines FILE.jsonl

The same seed, the same batches, the same optimizer, everything in fp32 on the CPU; only the function that computes the
rule differs: transformers' torch code, or flash_qla. If gradients are right the two loss curves lie on each other, and
what separates them is rounding. To say how much rounding may do, a third run uses the torch code with a chunk of 32
tokens where it has 64: the same mathematics in another order.

On a GPU the rule is flash_qla's or FLA's, with bf16 autocast around the model, and a step is timed from the end of the
one before it to its own on the GPU. The torch code computes the rule in fp32 there and says what rounding may do; it is
slow, hence --stop. --lines appends one JSON object for each run, with every loss, and one that compares with
flash_qla's, also the runs of the same settings that are in the file already.

The text is the source of this Python's standard library; model and text come from examples/qwen3_next/train.py. Writes
the losses as JSON and the figure as PNG (docs/images/python_training.*), on the CPU. Needs torch, transformers,
safetensors, numpy, and matplotlib for the figure; fla-core for FLA's kernels.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import platform
import statistics
import sys
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
RUNS = {"torch": "transformers' torch code", "flash_qla": "flash_qla", "torch_chunk_32": "torch code, chunk of 32"}


def run(
    which: str,
    text: Any,
    steps: int,
    batch: int,
    window: int,
    seed: int,
    lr: float = 3e-3,
    report: bool = True,
    device: str = "cpu",
    stop: int = 0,
    warm_up: int = 100,
) -> dict[str, Any]:
    """One training from fresh weights, or its first `stop` steps: the loss of every step in nats per byte, the seconds,
    and on a GPU the median time of a step after `warm_up` of them."""
    import torch
    from qwen3_next_rule import CHUNK, gated_delta_rule
    from train import gated_delta_rule_in_fp32, nats, new_model
    from transformers.models.qwen3_next import modeling_qwen3_next

    torch.manual_seed(seed)
    on_gpu = device.startswith("cuda")
    model, text = new_model(device).train(), text.to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, betas=(0.9, 0.95), weight_decay=0.0)
    batches = torch.Generator().manual_seed(seed)
    offsets = torch.arange(window + 1)
    losses, ends, rule_calls = [], [], 0
    last = stop or steps
    autocast = torch.autocast("cuda", torch.bfloat16) if on_gpu else contextlib.nullcontext()
    begin = time.monotonic()
    with gated_delta_rule("torch" if which.startswith("torch") else which) as calls:
        if which == "torch_chunk_32":
            rule = getattr(modeling_qwen3_next, CHUNK)
            setattr(modeling_qwen3_next, CHUNK, lambda *tensors, **rest: rule(*tensors, **rest, chunk_size=32))
        elif which == "torch" and on_gpu:
            setattr(modeling_qwen3_next, CHUNK, gated_delta_rule_in_fp32(getattr(modeling_qwen3_next, CHUNK)))
        for step in range(last):
            rate = min(1.0, (step + 1) / 20) * 0.5 * (1 + math.cos(math.pi * step / steps))
            for group in optimizer.param_groups:
                group["lr"] = lr * rate
            first = torch.randint(len(text) - window, (batch, 1), generator=batches)
            with autocast:
                loss = nats(model, text[(first + offsets).to(device)])
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            # NOTE: on a GPU nobody waits for a step, so that its time is the GPU's or Python's, whichever is longer.
            losses.append(loss.detach() if on_gpu else loss.item())
            if on_gpu:
                ends.append(torch.cuda.Event(enable_timing=True))
                ends[-1].record()
            if report and (step + 1) % (100 if on_gpu else 20) == 0:
                print(
                    f"{which:16} step {step + 1:4d}  {float(losses[-1]):.4f}  {time.monotonic() - begin:6.1f} s",
                    flush=True,
                )
        rule_calls = calls[CHUNK]
    if rule_calls != last * len(model.model.layers):
        raise RuntimeError(f"the layers called the rule {rule_calls} times in {last} steps; it was not replaced")
    found: dict[str, Any] = {"loss": [round(float(x), 6 if on_gpu else 7) for x in losses]}
    if len(ends) > warm_up + 1:
        times = [one.elapsed_time(other) for one, other in zip(ends[warm_up:-1], ends[warm_up + 1 :])]
        found["ms_per_step"] = round(statistics.median(times), 3)
    return {"seconds": round(time.monotonic() - begin, 1), **found}


def differences(one: list[float], other: list[float]) -> list[float]:
    return [abs(a - b) for a, b in zip(one, other, strict=True)]


def summary(record: dict[str, Any]) -> dict[str, Any]:
    runs = record["runs"]
    base = runs["torch"]["loss"]
    found: dict[str, Any] = {}
    for name in ("flash_qla", "torch_chunk_32"):
        if name in runs:
            gap = differences(base, runs[name]["loss"])
            found[name] = {
                "largest_difference": max(gap),
                "mean_difference": sum(gap) / len(gap),
                "mean_loss_of_last_50": sum(runs[name]["loss"][-50:]) / len(runs[name]["loss"][-50:]),
            }
    found["torch"] = {"mean_loss_of_last_50": sum(base[-50:]) / len(base[-50:])}
    return found


def compared(lines: list[dict[str, Any]]) -> dict[str, Any]:
    """Each run against flash_qla's, over the steps that both have."""
    runs = {line["rule"]: line["loss"] for line in lines if "loss" in line}
    ours, found = runs["flash_qla"], {}
    for name, losses in runs.items():
        if name != "flash_qla":
            gap = [abs(a - b) for a, b in zip(ours, losses)]
            found[name] = {
                "steps": len(gap),
                "largest_difference": round(max(gap), 7),
                "mean_difference": round(sum(gap) / len(gap), 7),
                "mean_loss_of_last_50": round(sum(losses[-50:]) / len(losses[-50:]), 5),
                "mean_loss_of_last_50_here": round(sum(ours[: len(losses)][-50:]) / len(losses[-50:]), 5),
            }
    return found


def run_on_gpu(arguments: argparse.Namespace, text: Any) -> None:
    """The wanted runs, one after another, as lines of JSON."""
    import transformers
    import triton

    sys.path.insert(0, str(ROOT / "bench"))
    import records

    settings = {name: getattr(arguments, name) for name in ("steps", "batch", "window", "seed", "lr")}
    common = {
        "autocast": "bf16",
        "triton": triton.__version__,
        "transformers": transformers.__version__,
        **records.provenance(gpu=True),
    }
    lines: list[dict[str, Any]] = []

    def keep(line: dict[str, Any]) -> None:
        lines.append(line)
        records.append(arguments.lines, line)

    earlier = []
    if arguments.lines and arguments.lines.is_file():
        every = map(json.loads, arguments.lines.read_text(encoding="utf-8").splitlines())
        earlier = [line for line in every if settings.items() <= line.items() and line["rule"] not in arguments.runs]
    for which in arguments.runs:
        found = run(which, text, **settings, device=arguments.device, stop=arguments.stop, warm_up=arguments.warm_up)
        if which == "fla":
            import fla

            found["fla"] = fla.__version__
        keep({"what": "training", "rule": which, **settings, **found, **common})
        print(which, "median step", found.get("ms_per_step"), "ms", flush=True)
    if "flash_qla" in arguments.runs and len(earlier + lines) > 1:
        keep({"what": "comparison with flash_qla", "runs": compared(earlier + lines), **common})
        print(json.dumps(lines[-1]["runs"], indent=2))


def plot(record: dict[str, Any], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    runs = record["runs"]
    steps = range(1, len(runs["torch"]["loss"]) + 1)
    figure, (top, bottom) = plt.subplots(2, 1, figsize=(8, 6), sharex=True, height_ratios=(3, 2))
    top.plot(steps, runs["torch"]["loss"], color="#bbbbbb", linewidth=5, label=RUNS["torch"])
    top.plot(steps, runs["flash_qla"]["loss"], color="#cc6633", linewidth=1, label=RUNS["flash_qla"])
    top.set_ylabel("loss, nats per byte")
    top.legend(frameon=False)
    top.set_title(
        f"A Qwen3-Next model of {record['parameters'] / 1e6:.2f} million parameters, "
        f"{record['batch']} x {record['window']} bytes a step, fp32, CPU"
    )
    for name, colour in (("torch_chunk_32", "#888888"), ("flash_qla", "#cc6633")):
        if name in runs:
            gap = differences(runs["torch"]["loss"], runs[name]["loss"])
            bottom.semilogy(steps, [max(x, 1e-8) for x in gap], color=colour, linewidth=1, label=RUNS[name])
    bottom.set_ylabel("distance from the\ntorch run, nats")
    bottom.set_xlabel("step")
    bottom.legend(frameon=False)
    for axes in (top, bottom):
        axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--window", type=int, default=256, help="bytes of a sequence")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--lr", type=float, default=5e-4, help="largest learning rate")
    parser.add_argument("--record", type=Path, default=ROOT / "docs/images/python_training.json")
    parser.add_argument("--image", type=Path, default=ROOT / "docs/images/python_training.png")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--runs", nargs="+", default=["flash_qla", "fla"], help="on a GPU: flash_qla, fla, torch")
    parser.add_argument("--stop", type=int, default=0, metavar="N", help="on a GPU: the first N steps alone")
    parser.add_argument("--warm-up", type=int, default=100, metavar="N", help="on a GPU: steps that are not timed")
    parser.add_argument("--lines", type=Path, metavar="FILE", help="on a GPU: append the results here")
    parser.add_argument("--plot-only", action="store_true", help="draw the record that is there")
    arguments = parser.parse_args()

    if not arguments.plot_only:
        import torch
        import transformers
        from train import new_model, split_text, tokens

        text = tokens(split_text()[0])
        if arguments.device != "cpu":
            run_on_gpu(arguments, text)
            return
        record: dict[str, Any] = {
            "steps": arguments.steps,
            "batch": arguments.batch,
            "window": arguments.window,
            "seed": arguments.seed,
            "lr": arguments.lr,
            "parameters": sum(p.numel() for p in new_model("cpu").parameters()),
            "text_bytes": len(text),
            "threads": torch.get_num_threads(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "python": platform.python_version(),
            "runs": {},
        }
        for which in RUNS:
            record["runs"][which] = run(
                which, text, arguments.steps, arguments.batch, arguments.window, arguments.seed, arguments.lr
            )
        record["summary"] = summary(record)
        arguments.record.write_text(json.dumps(record) + "\n", encoding="utf-8")
        print(json.dumps(record["summary"], indent=2))
    plot(json.loads(arguments.record.read_text(encoding="utf-8")), arguments.image)


if __name__ == "__main__":
    # Model and text are those of the other example; imported here so that `--help` needs neither.
    sys.path[:0] = [str(HERE), str(ROOT / "examples" / "qwen3_next")]
    main()
