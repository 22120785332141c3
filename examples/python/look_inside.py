#!/usr/bin/env python3
"""Looks into the sixteen value heads of the trained model of examples/qwen3_next while it reads Python source.

    python examples/python/look_inside.py [--bytes 400] [--image docs/images/python_heads.png]

A script in cells (# %%) for editors that run them like a notebook. The layers of transformers' model call flash_qla;
what each one hands over is kept, and the rule is computed again on it with the state after every fourth byte written
out. The figure shows, for each layer and head: which share of the state a byte erases, how large the state is, and how
large the head's output is. Needs torch, transformers, safetensors and matplotlib.
"""

# %% The model and its text
from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import Qwen3NextForCausalLM
from transformers.models.qwen3_next import modeling_qwen3_next

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path.insert(0, str(HERE))

from qwen3_next_rule import CHUNK, for_transformers  # noqa: E402

import flash_qla  # noqa: E402

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--bytes", type=int, default=400, help="of the held-out text")
parser.add_argument("--every", type=int, default=4, help="keep the state after every so many bytes")
parser.add_argument("--image", type=Path, default=ROOT / "docs/images/python_heads.png")
arguments = parser.parse_args()

folder = ROOT / "examples/qwen3_next/model"
model = Qwen3NextForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
text = (folder / "heldout.txt").read_bytes()[: arguments.bytes]
ids = torch.tensor([list(text)])

# %% What each layer hands to the rule
seen: list[dict[str, Any]] = []
rule = for_transformers(flash_qla.chunk_gated_delta_rule)


def keep(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **rest: Any) -> Any:
    o, state = rule(q, k, v, **rest)
    seen.append({"q": q, "k": k, "v": v, "g": rest["g"], "beta": rest["beta"], "o": o})
    return o, state


setattr(modeling_qwen3_next, CHUNK, keep)
with torch.inference_mode():
    logits = model(input_ids=ids, use_cache=False).logits[0]
bits = torch.nn.functional.cross_entropy(logits[:-1], ids[0, 1:]).item() / 0.693147
print(f"{len(text)} bytes at {bits:.3f} bits per byte; {len(seen)} layers seen")

# %% The rule once more, with states: a packed batch of one sequence that starts from an empty slot
T = len(text)
for layer in seen:
    Hv, K, V = layer["v"].shape[2], layer["k"].shape[3], layer["v"].shape[3]
    layer["states"] = torch.empty(T // arguments.every, Hv, K, V)
    again = flash_qla.gated_delta_rule_mixed(
        *(layer[name] for name in ("q", "k", "v", "g", "beta")),
        cu_seqlens=torch.tensor([0, T]),
        state=torch.zeros(1, Hv, K, V),
        checkpoints=layer["states"],
        checkpoint_every=arguments.every,
        use_qk_l2norm_in_kernel=True,
    )
    assert (again - layer["o"]).abs().max() < 1e-4 * layer["o"].abs().max()

# %% Is it right? transformers' own result for layer 1 on the first 320 bytes is kept beside the model.
reference = load_file(folder / "layer_inputs.safetensors")
n = min(T, reference["o_ref"].shape[1])
error = (seen[1]["o"][:, :n] - reference["o_ref"][:, :n]).norm() / reference["o_ref"][:, :n].norm()
print(f"layer 1 against transformers on {n} bytes: relative difference {error:.1e} (its inputs are rounded to bf16)")
assert error < 2e-2

# %% Figures of every head
print(f"\n{'layer':>5}{'head':>6}{'median decay per byte':>24}{'bytes to 1/e':>15}{'largest |S|':>13}{'mean |o|':>10}")
for index, layer in enumerate(seen):
    for head in range(layer["v"].shape[2]):
        decay = layer["g"][0, :, head].median().exp().item()
        memory = -1 / layer["g"][0, :, head].median().item()
        size = layer["states"][:, head].flatten(1).norm(dim=1).max().item()
        output = layer["o"][0, :, head].norm(dim=1).mean().item()
        print(f"{index:5d}{head:6d}{decay:24.4f}{memory:15.1f}{size:13.2f}{output:10.3f}")

# %% The picture
import matplotlib  # noqa: E402

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402

colours = ("#4477aa", "#cc6633", "#228833", "#aa3377")
figure, panels = plt.subplots(len(seen), 3, figsize=(13, 2.1 * len(seen)), sharex=True, squeeze=False)
line_ends = [i for i, byte in enumerate(text) if byte == ord("\n")]
states_at = torch.arange(1, T // arguments.every + 1) * arguments.every
for index, layer in enumerate(seen):
    decay_axes, state_axes, output_axes = panels[index]
    for head in range(layer["v"].shape[2]):
        dots = {"color": colours[head % len(colours)], "linestyle": "", "marker": ".", "markersize": 1.6}
        decay_axes.semilogy(-layer["g"][0, :, head].expm1(), **dots)
        state_axes.plot(
            states_at,
            layer["states"][:, head].flatten(1).norm(dim=1),
            color=dots["color"],
            linewidth=1,
            label=f"head {head}",
        )
        output_axes.semilogy(layer["o"][0, :, head].norm(dim=1), **dots)
    decay_axes.set_ylim(3e-5, 1.5)
    output_axes.set_ylim(1e-3, 1)
    state_axes.set_ylim(bottom=0)
    decay_axes.set_ylabel(f"layer {index}")
    for axes in panels[index]:
        axes.spines[["top", "right"]].set_visible(False)
        for at in line_ends:
            axes.axvline(at, color="#d8d8d8", linewidth=0.8, zorder=0)
titles = ("share of the state that a byte erases, 1 - exp(g)", "size of the state, |S|", "size of the output, |o|")
for axes, title in zip(panels[0], titles, strict=True):
    axes.set_title(title, fontsize=10)
for axes in panels[-1]:
    axes.set_xlabel("byte of the text; grey: line ends")
panels[0][1].legend(frameon=False, fontsize=8, ncols=2, loc="center right")
figure.tight_layout()
figure.savefig(arguments.image, dpi=80)
print(f"\n{arguments.image}")
