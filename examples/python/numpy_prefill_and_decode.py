#!/usr/bin/env python3
"""Prefill and decode with numpy arrays: no torch, no compiler, nothing but this package and numpy.

A batch of three packed sequences of different lengths is computed at once. Their final states go into a pool, and each
sequence then grows token by token in its own slot. The program checks itself: the tokens that were decoded must be
those that a prefill of the whole text computes.
"""

import numpy as np

from flash_qla import chunk_gated_delta_rule, gated_delta_rule_decode, info

Hk, Hv, K, V = 2, 4, 64, 64
LENGTHS, MORE = [300, 0, 41], 5  # tokens of the prompts, tokens that follow
rng = np.random.default_rng(1)
flags = {"use_qk_l2norm_in_kernel": True, "use_beta_sigmoid_in_kernel": True}


def draw(*shape: int) -> np.ndarray:
    return rng.standard_normal(shape, dtype=np.float32)


def inputs(tokens: int) -> dict[str, np.ndarray]:
    """What a model's projections would give, for one sequence of the batch."""
    return {
        "q": draw(1, tokens, Hk, K),
        "k": draw(1, tokens, Hk, K),
        "v": draw(1, tokens, Hv, V),
        "g": -np.abs(draw(1, tokens, Hv)),  # natural logarithm of the decay
        "beta": draw(1, tokens, Hv),  # before the sigmoid
    }


texts = [inputs(length + MORE) for length in LENGTHS]

# Prefill: the prompts side by side, with their offsets. An empty prompt is allowed.
prompts = {name: np.concatenate([text[name][:, :n] for text, n in zip(texts, LENGTHS)], axis=1) for name in texts[0]}
cu_seqlens = np.cumsum([0, *LENGTHS], dtype=np.int64)
o, states = chunk_gated_delta_rule(**prompts, cu_seqlens=cu_seqlens, output_final_state=True, **flags)
print(f"prefill: o {o.shape}, states {states.shape} {states.dtype}")

# Decode: a pool of 8 slots; sequence n lives in slots[n]. A fourth row of the batch is padding (slot -1).
pool = np.zeros((8, Hv, K, V), dtype=np.float32)
slots = np.array([5, 0, 3, -1], dtype=np.int32)
pool[slots[:3]] = states
decoded = []
for step in range(MORE):
    token = {name: np.concatenate([text[name][:, n + step] for text, n in zip(texts, LENGTHS)]) for name in texts[0]}
    token = {name: np.concatenate([x, np.zeros_like(x[:1])])[:, None] for name, x in token.items()}  # [4,1,...]
    decoded.append(gated_delta_rule_decode(**token, state=pool, state_indices=slots, **flags))

worst = 0.0
for n, text in enumerate(texts):
    whole, final = chunk_gated_delta_rule(**text, output_final_state=True, **flags)
    grown = np.stack([o[n, 0] for o in decoded])
    worst = max(worst, np.abs(whole[0, LENGTHS[n] :] - grown).max(), np.abs(final[0] - pool[slots[n]]).max())
assert worst < 1e-5, worst
assert all((o[3] == 0).all() for o in decoded)
print(f"decode: {MORE} tokens for each of {len(texts)} sequences; largest difference from one long prefill {worst:.1e}")
print(f"backends: {info().get('backends', info())}")
