#!/usr/bin/env python3
"""Trains the small Qwen3-Next model of examples/qwen3_next with two implementations of the gated delta rule.

    python examples/python/train_qwen3_next.py [--steps 300] [--batch 2] [--window 256]
    python examples/python/train_qwen3_next.py --plot-only

The same seed, the same batches, the same optimizer, everything in fp32 on the CPU; only the function that computes the
rule differs: transformers' torch code, or flash_qla. If gradients are right the two loss curves lie on each other, and
what separates them is rounding. To say how much rounding may do, a third run uses the torch code with a chunk of 32
tokens where it has 64: the same mathematics in another order.

The text is the source of this Python's standard library; model and text come from examples/qwen3_next/train.py. Writes
the losses as JSON and the figure as PNG (docs/images/python_training.*). Needs torch, transformers, safetensors, numpy,
and matplotlib for the figure.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import sys
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
RUNS = {"torch": "transformers' torch code", "flash_qla": "flash_qla", "torch_chunk_32": "torch code, chunk of 32"}


def run(
    which: str, text: Any, steps: int, batch: int, window: int, seed: int, lr: float = 3e-3, report: bool = True
) -> dict[str, Any]:
    """One training from fresh weights: the loss of every step in nats per byte, and the seconds."""
    import torch
    from qwen3_next_rule import CHUNK, gated_delta_rule
    from train import nats, new_model
    from transformers.models.qwen3_next import modeling_qwen3_next

    torch.manual_seed(seed)
    model = new_model("cpu").train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, betas=(0.9, 0.95), weight_decay=0.0)
    batches = torch.Generator().manual_seed(seed)
    offsets = torch.arange(window + 1)
    losses, rule_calls = [], 0
    begin = time.monotonic()
    with gated_delta_rule("torch" if which.startswith("torch") else which) as calls:
        if which == "torch_chunk_32":
            rule = getattr(modeling_qwen3_next, CHUNK)
            setattr(modeling_qwen3_next, CHUNK, lambda *tensors, **rest: rule(*tensors, **rest, chunk_size=32))
        for step in range(steps):
            rate = min(1.0, (step + 1) / 20) * 0.5 * (1 + math.cos(math.pi * step / steps))
            for group in optimizer.param_groups:
                group["lr"] = lr * rate
            first = torch.randint(len(text) - window, (batch, 1), generator=batches)
            loss = nats(model, text[first + offsets])
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            losses.append(loss.item())
            if report and (step + 1) % 20 == 0:
                print(f"{which:16} step {step + 1:4d}  {losses[-1]:.4f}  {time.monotonic() - begin:6.1f} s", flush=True)
        rule_calls = calls[CHUNK]
    if rule_calls != steps * len(model.model.layers):
        raise RuntimeError(f"the layers called the rule {rule_calls} times in {steps} steps; it was not replaced")
    return {"seconds": round(time.monotonic() - begin, 1), "loss": [round(x, 7) for x in losses]}


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
    parser.add_argument("--plot-only", action="store_true", help="draw the record that is there")
    arguments = parser.parse_args()

    if not arguments.plot_only:
        import torch
        import transformers
        from train import new_model, split_text, tokens

        text = tokens(split_text()[0])
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
