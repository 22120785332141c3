"""Serving in a few lines of numpy: what the functions on pools of states have to compute."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from helpers import Arguments, draw
from torch import Tensor

HK, HV, K, V = 2, 4, 16, 8
NAN = float("nan")
TOKENS = ("q", "k", "v", "g", "beta")


def step(S: np.ndarray, q: np.ndarray, k: np.ndarray, v: np.ndarray, g: float, beta: float) -> tuple[Any, Any]:
    """One token of one head: the new state and o, before the scale."""
    S = math.exp(g) * S
    d = beta * (v - S.T @ k)
    S = S + np.outer(k, d)
    return S, S.T @ q


class Model:
    """Rows of tokens on states in float64 [Hv,K,V]."""

    def __init__(self, x: Arguments, tiled: bool = False) -> None:
        self.x = {name: value.double().numpy() for name, value in x.items() if name in TOKENS}
        self.Hv, self.Hk = x["v"].shape[2], x["q"].shape[2]
        self.scale = x["q"].shape[3] ** -0.5
        self.tiled = tiled

    def token(self, b: int, t: int, state: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        new, o = np.empty_like(state), np.empty((self.Hv, state.shape[2]))
        for h in range(self.Hv):
            hk = h % self.Hk if self.tiled else h // (self.Hv // self.Hk)
            x = self.x
            new[h], o[h] = step(
                state[h], x["q"][b, t, hk], x["k"][b, t, hk], x["v"][b, t, h], x["g"][b, t, h], x["beta"][b, t, h]
            )
        return new, self.scale * o

    def run(self, b: int, begin: int, end: int, state: np.ndarray) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
        """(token, state after it, o) one after another."""
        for t in range(begin, end):
            state, o = self.token(b, t, state)
            yield t, state, o


def inputs(B: int, T: int, **options: Any) -> Arguments:
    x = draw(**{"B": B, "T": T, "Hk": HK, "Hv": HV, "K": K, "V": V, "h0": False, **options})
    return {name: x[name] for name in TOKENS}


def pool_of(slots: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(slots, HV, K, V, generator=torch.Generator().manual_seed(seed)).to(dtype)


def close(got: Tensor, want: Any, relative: float = 1e-5) -> None:
    want = torch.as_tensor(np.asarray(want))
    assert got.shape == want.shape and bool(got.isfinite().all())
    assert float((got.double() - want).norm()) <= relative * float(want.norm()) + 1e-12
