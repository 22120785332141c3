#!/usr/bin/env python3
"""Trains the small byte-level Qwen3-Next model of this example and writes its reference data.

The model is transformers' own Qwen3NextForCausalLM with Gated Delta Net layers only, run by transformers' torch code.
The text is the source of the Python standard library, with some files held out.

    python3 train.py --out model --seconds 285

Needs torch, transformers, safetensors and numpy. What is written to the output folder:

    config.json, model.safetensors   the model, bf16, as transformers writes it
    heldout.txt                      text that the model never saw
    reference.safetensors            logits and a greedy continuation computed by transformers in fp32
    layer_inputs.safetensors         inputs and outputs of one layer's gated delta rule on held-out text
    metrics.json                     bits per byte and how it was trained
"""

import argparse
import bz2
import gzip
import hashlib
import json
import lzma
import math
import platform
import signal
import sysconfig
import time
from pathlib import Path

import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import load_file, save_file
from transformers import Qwen3NextConfig, Qwen3NextForCausalLM
from transformers.models.qwen3_next import modeling_qwen3_next as qwen3_next

LAYERS = 4
WINDOW = 1024  # training length
HELDOUT_BYTES = 64 * 1024
BYTES_PER_FILE = 8 * 1024  # at most this much of one held-out file
REFERENCE_TOKENS = 256
LAYER_INDEX, LAYER_TOKENS = 1, 320
PROMPT = 'def read_text(path, encoding="utf-8"):\n    """'
CONTINUATION = 64
SKIPPED = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__", "encodings"}
ONE_MACHINE = ("config-", "_sysconfigdata")  # written when Python was built, full of that machine's paths


def model_config() -> Qwen3NextConfig:
    return Qwen3NextConfig(
        vocab_size=256,
        hidden_size=256,
        intermediate_size=576,
        num_hidden_layers=LAYERS,
        layer_types=["linear_attention"] * LAYERS,
        mlp_only_layers=list(range(LAYERS)),
        num_experts=0,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        linear_conv_kernel_dim=4,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        tie_word_embeddings=True,
    )


# ---- text ------------------------------------------------------------------------------------------------------------


def long_lines(text: str) -> list[str]:
    return [line.strip() for line in text.splitlines() if len(line.strip()) >= 32]


def share_of_lines_in(known: set[str], text: str) -> float:
    lines = long_lines(text)
    return sum(line in known for line in lines) / max(1, len(lines))


def standard_library() -> dict[str, str]:
    """Relative path -> text of every source file; of identical files only the first is kept."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files, seen = {}, set()
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root)
        if SKIPPED & set(name.parts) or name.parts[0].startswith(ONE_MACHINE):
            continue
        raw = path.read_bytes()
        digest = hashlib.sha256(raw).digest()
        if digest in seen:
            continue
        seen.add(digest)
        try:
            files[name.as_posix()] = raw.decode("utf-8")
        except UnicodeDecodeError:
            pass
    return files


def split_text() -> tuple[bytes, bytes, bytes, dict]:
    """Training, development and held-out text. The hash of a file's path decides where it goes.

    A held-out file that shares more than a tenth of its lines with the training files is dropped altogether.
    """
    bucket = lambda name: int(hashlib.sha256(name.encode()).hexdigest(), 16)
    files = dict(sorted(standard_library().items(), key=lambda item: bucket(item[0])))
    train = {n: t for n, t in files.items() if bucket(n) % 16 > 1}
    known = {line for text in train.values() for line in long_lines(text)}

    pools = ([], [])
    for name, text in files.items():
        usable = text.isascii() and len(text) >= 2048 and share_of_lines_in(known, text) <= 0.1
        if bucket(name) % 16 <= 1 and usable:
            pools[bucket(name) % 16].append((name, text[: text.rfind("\n", 0, BYTES_PER_FILE) + 1]))
    heldout = "\n".join(text for _, text in pools[0])[:HELDOUT_BYTES]
    dev = "\n".join(text for _, text in pools[1])
    used, size = [], 0
    for name, text in pools[0]:
        if size < len(heldout):
            used.append(name)
        size += len(text) + 1
    about = {
        "train_files": len(train),
        "train_bytes": sum(len(text.encode()) for text in train.values()),
        "heldout_files": used,
        "heldout_lines_also_in_training": round(share_of_lines_in(known, heldout), 4),
    }
    return "\n".join(train.values()).encode(), dev.encode(), heldout.encode(), about


def tokens(text: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


# ---- training --------------------------------------------------------------------------------------------------------


def new_model(device: str) -> Qwen3NextForCausalLM:
    """Fresh weights. Gates start with memories from one to a thousand tokens, not with transformers' near-zero ones."""
    model = Qwen3NextForCausalLM(model_config())
    with torch.no_grad():
        for layer in model.model.layers:
            gdn = layer.linear_attn
            gdn.conv1d.reset_parameters()
            gdn.A_log.copy_(torch.linspace(0, math.log(16), gdn.num_v_heads))
            step = torch.logspace(-3, -1, gdn.num_v_heads)
            gdn.dt_bias.copy_(step + torch.log(-torch.expm1(-step)))  # softplus(dt_bias) = step
    return model.to(device)


def add_dropout(model: Qwen3NextForCausalLM, p: float) -> None:
    """Dropout on what every block adds to the residual stream: the text is read many times."""
    drop = lambda module, inputs, output: F.dropout(output, p, module.training)
    for layer in model.model.layers:
        layer.linear_attn.register_forward_hook(drop)
        layer.mlp.register_forward_hook(drop)


def gated_delta_rule_in_fp32(rule):
    """The same rule outside autocast, which would run its matrix products in bf16 (here they are TF32)."""

    def wrapped(*args, **kwargs):
        with torch.autocast("cuda", enabled=False), torch.autocast("cpu", enabled=False):
            return rule(*args, **kwargs)

    return wrapped


def optimizers(model, muon_lr: float, adamw_lr: float):
    """Muon for the large matrices; AdamW for the embedding, norms, convolutions and gates."""
    is_matrix = lambda name: name.endswith(("proj.weight", "in_proj_qkvz.weight"))
    matrices = [p for n, p in model.named_parameters() if is_matrix(n)]
    others = [p for n, p in model.named_parameters() if not is_matrix(n)]
    both = [
        torch.optim.Muon(matrices, lr=muon_lr, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=adamw_lr, betas=(0.9, 0.95), weight_decay=0.0),
    ]
    for optimizer in both:
        for group in optimizer.param_groups:
            group["peak_lr"] = group["lr"]
    return both


def windows(text: torch.Tensor, length: int) -> torch.Tensor:
    """All full windows of a text, one a row; neighbours share a byte, so every byte but the first is predicted."""
    return text.unfold(0, length + 1, length)


def nats(model, batch: torch.Tensor) -> torch.Tensor:
    logits = model(input_ids=batch[:, :-1].long(), use_cache=False).logits
    return F.cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].long().flatten())


def train(text: torch.Tensor, dev: torch.Tensor, args) -> tuple[Qwen3NextForCausalLM, dict]:
    torch.manual_seed(args.seed)
    torch.set_float32_matmul_precision("high")
    cuda = args.device.startswith("cuda")
    model = new_model(args.device).train()
    add_dropout(model, args.dropout)
    opts = optimizers(model, args.muon_lr, args.adamw_lr)
    autocast = torch.autocast("cuda" if cuda else "cpu", dtype=torch.bfloat16)
    text, dev_batch = text.to(args.device), windows(dev, args.window)[:64].to(args.device)
    offsets = torch.arange(args.window + 1, device=args.device)

    stop = []
    signal.signal(signal.SIGTERM, lambda *_: stop.append(True))
    original_rule = qwen3_next.torch_chunk_gated_delta_rule
    qwen3_next.torch_chunk_gated_delta_rule = gated_delta_rule_in_fp32(original_rule)

    best, best_dev, history = None, math.inf, []
    average, step, start, next_dev = None, 0, time.monotonic(), 0.05
    progress = 0.0
    while progress < 1 and not stop:
        rate = min(1.0, progress / 0.02 + 0.01) * (0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * progress)))
        for optimizer in opts:
            for group in optimizer.param_groups:
                group["lr"] = group["peak_lr"] * rate
        first = torch.randint(len(text) - args.window, (args.batch, 1), device=args.device)
        with autocast:
            loss = nats(model, text[first + offsets])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in opts:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        average = loss.detach() if average is None else average.lerp(loss.detach(), 0.02)
        step += 1
        elapsed = time.monotonic() - start
        progress = max(elapsed / args.seconds, step / args.steps if args.steps else 0)

        if progress >= min(next_dev, 1):
            next_dev += 0.05
            model.eval()
            with torch.no_grad(), autocast:
                dev_bits = nats(model, dev_batch).item() / math.log(2)
            model.train()
            train_bits = average.item() / math.log(2)
            if dev_bits < best_dev:
                best_dev, best = dev_bits, {n: p.detach().clone() for n, p in model.named_parameters()}
            history.append(f"{step} {train_bits:.4f} {dev_bits:.4f}")
            speed = step * args.batch * args.window / elapsed
            print(f"{elapsed:6.1f} s  step {step:6d}  {speed / 1e3:7.1f} kB/s  "
                  f"train {train_bits:.4f}  dev {dev_bits:.4f}", flush=True)

    qwen3_next.torch_chunk_gated_delta_rule = original_rule
    seconds = time.monotonic() - start
    if best is not None:
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(best[name])
    about = {
        "steps": step,
        "seconds": round(seconds, 1),
        "batch": args.batch,
        "window": args.window,
        "bytes_seen": step * args.batch * args.window,
        "passes_over_text": round(step * args.batch * args.window / len(text), 2),
        "dropout": args.dropout,
        "muon_lr": args.muon_lr,
        "adamw_lr": args.adamw_lr,
        "train_bits_per_byte": round(average.item() / math.log(2), 4),
        "dev_bits_per_byte": round(best_dev, 4),
        "history_of_step_train_dev": history,
        "device": torch.cuda.get_device_name() if cuda else platform.processor() or "cpu",
        "peak_memory_gib": round(torch.cuda.max_memory_allocated() / 2**30, 1) if cuda else None,
    }
    return model, about


# ---- reference data, all in fp32 on the CPU from the saved bf16 weights ----------------------------------------------


@torch.no_grad()
def greedy(model, prompt: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Continuation without a cache: every step is a full forward pass. Also the lead of each choice over the second."""
    ids, margins = prompt.long()[None], []
    for _ in range(count):
        top = model(input_ids=ids, use_cache=False).logits[0, -1].topk(2)
        margins.append(top.values[0] - top.values[1])
        ids = torch.cat([ids, top.indices[None, :1]], dim=1)
    return ids[0, len(prompt):], torch.stack(margins)


@torch.no_grad()
def layer_inputs(model, text: torch.Tensor) -> dict[str, torch.Tensor]:
    """What one layer hands to the gated delta rule, rounded to bf16 (q, k, v), and what transformers' rule returns."""
    gdn = model.model.layers[LAYER_INDEX].linear_attn
    seen, projected = [], {}
    rule = qwen3_next.torch_chunk_gated_delta_rule

    def recorded(query, key, value, **kwargs):
        seen.append((query, key, value))
        return rule(query, key, value, **kwargs)

    keep = lambda name: lambda module, inputs, output: projected.update({name: output})
    hooks = [gdn.in_proj_qkvz.register_forward_hook(keep("qkvz")), gdn.in_proj_ba.register_forward_hook(keep("ba"))]
    qwen3_next.torch_chunk_gated_delta_rule = recorded
    model(input_ids=text.long()[None], use_cache=False)
    qwen3_next.torch_chunk_gated_delta_rule = rule
    for hook in hooks:
        hook.remove()

    _, _, _, _, b, a = gdn.fix_query_key_value_ordering(projected["qkvz"], projected["ba"])
    group = gdn.num_v_heads // gdn.num_k_heads
    q, k, v = seen[LAYER_INDEX]
    q, k = q[:, :, ::group], k[:, :, ::group]  # transformers repeats q and k for the value heads; the file does not
    q, k, v = (x.to(torch.bfloat16) for x in (q, k, v))
    wide = lambda x: x.float().repeat_interleave(group, dim=2)
    g = -gdn.A_log.exp() * F.softplus(a + gdn.dt_bias)
    o, state = rule(wide(q), wide(k), v.float(), g=g, beta=b.sigmoid(), output_final_state=True,
                    use_qk_l2norm_in_kernel=True)
    found = {"q": q, "k": k, "v": v, "g": a, "beta": b, "A_log": gdn.A_log, "dt_bias": gdn.dt_bias,
             "o_ref": o, "state_ref": state}
    return {name: x.detach().clone().contiguous() for name, x in found.items()}


@torch.no_grad()
def bits_per_byte(model, text: torch.Tensor, length: int) -> float:
    total = count = 0
    for batch in windows(text, length).split(16):
        total += nats(model, batch).double().item() * batch[:, 1:].numel()
        count += batch[:, 1:].numel()
    return total / count / math.log(2)


def write_reference(out: Path, heldout: bytes, about: dict) -> None:
    torch.set_float32_matmul_precision("highest")
    torch.set_default_device("cpu")
    model = Qwen3NextForCausalLM.from_pretrained(out, dtype=torch.float32).eval()
    text, prompt = tokens(heldout), tokens(PROMPT.encode())

    with torch.no_grad():
        logits = model(input_ids=text[:REFERENCE_TOKENS].long()[None], use_cache=False).logits[0]
    continuation, margins = greedy(model, prompt, CONTINUATION)
    reference = {
        "input_ids": text[:REFERENCE_TOKENS].int(),
        "logits": logits.float().contiguous(),
        "prompt_ids": prompt.int(),
        "greedy_ids": continuation.int(),
        "greedy_margin": margins.float(),
    }
    save_file(reference, out / "reference.safetensors", metadata={
        "about": "transformers in fp32 on the bf16 weights; input_ids are the first bytes of heldout.txt; "
                 "greedy_ids continue prompt_ids; greedy_margin is the best logit minus the second",
        "prompt": PROMPT,
        "continuation": bytes(continuation.tolist()).decode("utf-8", "replace"),
    })

    layer = layer_inputs(model, text[:LAYER_TOKENS])
    save_file(layer, out / "layer_inputs.safetensors", metadata={
        "about": f"gated delta rule of layer {LAYER_INDEX} (from 0) on the first {LAYER_TOKENS} bytes of heldout.txt",
        "q,k,v": "after convolution and silu, before the l2 norm; [B,T,Hk,K], [B,T,Hk,K], [B,T,Hv,V]",
        "g": "raw gate input a [B,T,Hv]: log decay = -exp(A_log) softplus(a + dt_bias)",
        "beta": "logit [B,T,Hv]: beta = sigmoid(logit)",
        "o_ref": "output of the rule with scale K^-0.5, before the gated norm; [B,T,Hv,V]",
        "state_ref": "final state, [B,Hv,K,V] with V fastest",
    })

    whole = bits_per_byte(model, text, len(text) - 1)
    packed = {"gzip_9": gzip.compress(heldout, 9, mtime=0), "bz2_9": bz2.compress(heldout, 9),
              "xz_9e": lzma.compress(heldout, preset=9 | lzma.PRESET_EXTREME)}
    metrics = {
        "heldout_bytes": len(heldout),
        "bits_per_byte": round(whole, 4),
        "bits_per_byte_protocol": "heldout.txt as one sequence from a zero state; mean over every byte but the first "
                                  "of -log2 p(byte | all bytes before it); transformers in fp32 on the saved bf16 "
                                  "weights",
        f"bits_per_byte_windows_of_{WINDOW}": round(bits_per_byte(model, text, WINDOW), 4),
        "compressors_bits_per_byte": {n: round(8 * len(c) / len(heldout), 4) for n, c in packed.items()},
        "parameters": sum(p.numel() for p in model.parameters()),
        "model_bytes": (out / "model.safetensors").stat().st_size,
        "training": about,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python_of_the_text": platform.python_version(),
    }
    (out / "metrics.json").write_text(json.dumps(metrics, indent=2) + "\n")
    print(json.dumps({n: v for n, v in metrics.items() if n != "training"}, indent=2))
    print(PROMPT + bytes(continuation.tolist()).decode("utf-8", "replace"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument("--seconds", type=float, default=285, help="training time, which the schedule follows")
    parser.add_argument("--steps", type=int, default=0, help="end after this many steps (0: by time alone)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--window", type=int, default=WINDOW)
    parser.add_argument("--muon-lr", type=float, default=4e-3)
    parser.add_argument("--adamw-lr", type=float, default=3e-3)
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)

    text, dev, heldout, corpus = split_text()
    print(f"{len(text)} bytes to train on, {len(dev)} to watch, {len(heldout)} held out: {corpus}", flush=True)
    (args.out / "heldout.txt").write_bytes(heldout)
    model, about = train(tokens(text), tokens(dev), args)

    model.to("cpu", torch.bfloat16).save_pretrained(args.out)
    (args.out / "generation_config.json").unlink(missing_ok=True)
    assert all(x.dtype == torch.bfloat16 for x in load_file(args.out / "model.safetensors").values())
    write_reference(args.out, heldout, corpus | about)


if __name__ == "__main__":
    main()
