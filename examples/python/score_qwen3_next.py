#!/usr/bin/env python3
"""Scores the trained model of examples/qwen3_next with flash_qla in transformers' layers, on the CPU or a GPU.

    python examples/python/score_qwen3_next.py [--device cuda] [--dtype bfloat16] [--bytes 65536] [--decode 1024]

Prefill and decode, each against what the folder of the model holds, which transformers computed in fp32 on a CPU: the
logits of 256 bytes, the greedy continuation of a prompt, bits per byte of the held-out text as one sequence and in
windows of 1,024 bytes. Token by token the text goes through the recurrent function, with the states that transformers
keeps; those logits are compared with the ones of the prefill. --lines appends the figures as a JSON object. In fp32 the
exit status says whether all of them are the committed ones. Needs torch, transformers, safetensors.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import DynamicCache, Qwen3NextForCausalLM

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(HERE), str(ROOT / "bench")]

import records  # noqa: E402
from qwen3_next_rule import CHUNK, RECURRENT, gated_delta_rule  # noqa: E402

FOLDER = ROOT / "examples/qwen3_next/model"
# Of logits in fp32: relative L2 difference. Of bits per byte: as they are printed.
LOGITS, BITS = 1e-3, 1e-4


def bits(logits: Tensor, ids: Tensor) -> float:
    """Bits per byte: of every byte but the first, by the logits of those before it."""
    return cross_entropy(logits[:, :-1].float().flatten(0, 1), ids[:, 1:].flatten()).item() / math.log(2)


def relative(got: Tensor, want: Tensor) -> float:
    return float((got.double() - want.double()).norm() / want.double().norm())


def in_windows(model: Any, ids: Tensor, length: int) -> float:
    """Mean over windows that share a byte, each from a zero state."""
    rows = ids[0].unfold(0, length + 1, length)
    return sum(bits(model(input_ids=row[None], use_cache=False).logits, row[None]) for row in rows) / len(rows)


class Reader:
    """The model with the states that transformers keeps between two calls."""

    def __init__(self, model: Any) -> None:
        self.model, self.cache, self.seen = model, DynamicCache(config=model.config), 0

    def logits(self, ids: Tensor) -> Tensor:
        T = ids.shape[1]
        positions = torch.arange(self.seen, self.seen + T, device=ids.device)[None]
        self.seen += T
        # NOTE: transformers asks an attention layer how much has been read. There is none; positions and masks that are
        # given here need no answer.
        masks = {"full_attention": None, "linear_attention": None}
        rest = {"position_ids": positions, "attention_mask": masks, "past_key_values": self.cache, "use_cache": True}
        return self.model(input_ids=ids, **rest).logits


def token_by_token(model: Any, ids: Tensor) -> Tensor:
    """Logits of the first byte as prefill, of every other one as decode."""
    reader = Reader(model)
    return torch.cat([reader.logits(ids[:, t : t + 1]) for t in range(ids.shape[1])], 1)


def greedy(model: Any, prompt: Tensor, count: int) -> list[int]:
    reader, token, found = Reader(model), prompt, []
    for _ in range(count):
        token = reader.logits(token)[:, -1:].argmax(-1)
        found.append(int(token))
    return found


@torch.inference_mode()
def measure(device: str, dtype: torch.dtype, count: int, decode: int) -> dict[str, Any]:
    torch.backends.cudnn.allow_tf32 = False  # convolutions in fp32 are in fp32, as matrix products are anyway
    model = Qwen3NextForCausalLM.from_pretrained(FOLDER, dtype=dtype).eval().to(device)
    text = (FOLDER / "heldout.txt").read_bytes()[:count]
    ids = torch.tensor([list(text)], device=device)
    reference = load_file(FOLDER / "reference.safetensors")
    found: dict[str, Any] = {}
    with gated_delta_rule("flash_qla") as calls:
        logits = model(input_ids=reference["input_ids"].long()[None].to(device), use_cache=False).logits[0].cpu()
        found["logits_relative"] = relative(logits, reference["logits"])
        found["logits_largest_difference"] = float((logits.float() - reference["logits"]).abs().max())
        whole = model(input_ids=ids, use_cache=False).logits
        found["bytes"], found["bits_per_byte"] = len(text), bits(whole, ids)
        found["bits_per_byte_windows_of_1024"] = in_windows(model, ids, 1024)
        prefills = calls[CHUNK]
        part = ids[:, :decode]
        stepwise = token_by_token(model, part)
        found["decoded_bytes"] = decode
        found["decode_logits_relative"] = relative(stepwise, whole[:, :decode])
        found["bits_per_byte_decode"] = bits(stepwise, part)
        found["bits_per_byte_prefill_same_bytes"] = bits(whole[:, :decode], part)
        prompt, wanted = reference["prompt_ids"].long()[None].to(device), reference["greedy_ids"].tolist()
        got = greedy(model, prompt, len(wanted))
        found["greedy_bytes_as_committed"] = next((i for i, (a, b) in enumerate(zip(got, wanted)) if a != b), len(got))
        found["greedy_bytes"] = len(wanted)
    layers = len(model.model.layers)
    if calls[CHUNK] != prefills + 2 * layers or calls[RECURRENT] != layers * (decode - 1 + len(wanted) - 1):
        raise RuntimeError(f"the layers called the rule {calls}; it was not replaced")
    return found


def problems(found: dict[str, Any], committed: dict[str, Any]) -> list[str]:
    """What is not as committed, for fp32."""
    faults = []
    for name in ("logits_relative", "decode_logits_relative"):
        if not found[name] <= LOGITS:
            faults.append(f"{name} is {found[name]:.2e}, allowed is {LOGITS:g}")
    pairs = [("bits_per_byte_decode", found["bits_per_byte_prefill_same_bytes"])]
    if found["bytes"] == committed["heldout_bytes"]:
        pairs += [(name, committed[name]) for name in ("bits_per_byte", "bits_per_byte_windows_of_1024")]
    for name, want in pairs:
        if not abs(found[name] - want) <= BITS:
            faults.append(f"{name} is {found[name]:.4f}, wanted {want:.4f}")
    if found["greedy_bytes_as_committed"] != found["greedy_bytes"]:
        faults.append(f"the greedy continuation parts at byte {found['greedy_bytes_as_committed']}")
    return faults


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="of the whole model")
    parser.add_argument("--bytes", type=int, default=65536, help="of the held-out text")
    parser.add_argument("--decode", type=int, default=1024, help="so many of them token by token")
    parser.add_argument("--lines", type=Path, metavar="FILE", help="append the figures here")
    arguments = parser.parse_args()

    found = measure(arguments.device, getattr(torch, arguments.dtype), arguments.bytes, arguments.decode)
    record = {
        "what": "the model of examples/qwen3_next",
        "device": arguments.device,
        "dtype": arguments.dtype,
        **{name: float(f"{x:.6g}") if isinstance(x, float) else x for name, x in found.items()},
        "transformers": transformers.__version__,
        **records.provenance(gpu=arguments.device.startswith("cuda")),
    }
    print(json.dumps(record, indent=2))
    records.append(arguments.lines, record)
    committed = json.loads((FOLDER / "metrics.json").read_text())
    faults = problems(found, committed) if arguments.dtype == "float32" else []
    for fault in faults:
        print(f"score_qwen3_next.py: {fault}", file=sys.stderr)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
