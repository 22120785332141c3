"""Chunk-wise quantities that other implementations hand around: gate sums and the triangular inverse. Plain array code
for torch and numpy, for `passes` only; the kernels compute what they need themselves.

Chunks start at token 0, 64, 128, ... of each sequence. `cu_seqlens` is read on the host here.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

__all__ = ["chunk_gate_sums", "chunk_inverse", "chunk_rows", "gates_of_sums"]

# What a gate of -inf adds to a sum. Its exp is 0 in float32, as that of -inf, and the gates behind it stay differences
# of sums; behind a sum of -inf they would be lost.
_FORGET = -104.0

_CHUNKS_AT_ONCE = 64  # 16 MiB of float32 triangles for 16 value heads


def chunk_rows(batch: int, tokens: int, offsets: list[int] | None, size: int) -> list[tuple[int, int]]:
    """(first row, length) of each chunk, with rows counted through [B*T]."""
    if offsets is None:
        sequences = [(b * tokens, tokens) for b in range(batch)]
    else:
        sequences = [(begin, end - begin) for begin, end in pairwise(offsets)]
    return [
        (first + start, min(size, length - start)) for first, length in sequences for start in range(0, length, size)
    ]


class _Arrays:
    """The few functions that torch and numpy spell differently."""

    def __init__(self, like: Any) -> None:
        self.numpy = not hasattr(like, "requires_grad")
        if self.numpy:
            import numpy

            self.module: Any = numpy
        else:
            import torch

            self.module = torch
        self.like = like

    def integers(self, values: list[int]) -> Any:
        if self.numpy:
            return self.module.asarray(values, dtype=self.module.int64)
        return self.module.tensor(values, dtype=self.module.int64, device=self.like.device)

    def zeros(self, shape: tuple[int, ...], dtype: Any) -> Any:
        if self.numpy:
            return self.module.zeros(shape, dtype)
        return self.module.zeros(shape, dtype=dtype, device=self.like.device)

    def cast(self, x: Any, dtype: Any) -> Any:
        return x.astype(dtype) if self.numpy else x.detach().to(dtype)

    def wide(self, x: Any) -> Any:
        return self.cast(x, self.module.float64)

    def inverse(self, lower: Any) -> Any:
        """Of unit lower triangles [..,C,C]."""
        if self.numpy:
            return self.module.linalg.inv(lower)
        eye = self.module.eye(lower.shape[-1], dtype=lower.dtype, device=lower.device)
        return self.module.linalg.solve_triangular(lower, eye.expand_as(lower), upper=False, unitriangular=True)


def _offsets(cu_seqlens: Any) -> list[int] | None:
    return None if cu_seqlens is None else [int(x) for x in cu_seqlens.tolist()]


def _gather(arrays: _Arrays, chunks: list[tuple[int, int]], size: int) -> tuple[Any, Any]:
    """Row of each place of each chunk [chunks,size], and whether the place holds a token."""
    places = arrays.module.arange(size) if arrays.numpy else arrays.module.arange(size, device=arrays.like.device)
    first = arrays.integers([first for first, _ in chunks])[:, None]
    length = arrays.integers([length for _, length in chunks])[:, None]
    inside = places[None] < length
    return arrays.module.where(inside, first + places[None], first), inside


def chunk_gate_sums(g: Any, cu_seqlens: Any, size: int) -> Any:
    """gamma [B,T,Hv] in g's dtype: sums of g [B,T,Hv] from the start of the chunk; zero past the last offset. A gate of
    -inf counts as _FORGET."""
    arrays = _Arrays(g)
    B, T, Hv = g.shape
    result = arrays.zeros((B * T, Hv), g.dtype)
    chunks = chunk_rows(B, T, _offsets(cu_seqlens), size)
    if chunks:
        rows, inside = _gather(arrays, chunks, size)
        values = arrays.wide(g.reshape(B * T, Hv)[rows])  # [chunks,size,Hv]
        values = arrays.module.where(values == -math.inf, _FORGET, values)
        sums = values.cumsum(1)
        result[rows[inside]] = arrays.cast(sums[inside], g.dtype)
    return result.reshape(B, T, Hv)


def gates_of_sums(gamma: Any, cu_seqlens: Any, size: int) -> Any:
    """g [B,T,Hv] in float32 from its sums. NOTE: sums of -inf, which somebody else must have made, say nothing about
    the gates behind them; those become NaN."""
    arrays = _Arrays(gamma)
    B, T, Hv = gamma.shape
    wide = arrays.wide(gamma.reshape(B * T, Hv))
    result = arrays.zeros((B * T, Hv), arrays.module.float64)
    result[:] = wide
    result[1:] -= wide[:-1]
    starts = [first for first, _ in chunk_rows(B, T, _offsets(cu_seqlens), size)]
    if starts:
        at = arrays.integers(starts)
        result[at] = wide[at]
    return arrays.cast(result, arrays.module.float32).reshape(B, T, Hv)


def chunk_inverse(k: Any, beta: Any, cu_seqlens: Any, size: int) -> Any:
    """A [B,T,Hv,size] in k's dtype: row i of (I + stril(diag(beta) K K^T))^-1 of the row's chunk; zero past the last
    offset."""
    arrays = _Arrays(k)
    B, T, Hk, K = k.shape
    Hv = beta.shape[2]
    keys, betas = k.reshape(B * T, Hk, K), beta.reshape(B * T, Hv)
    result = arrays.zeros((B * T, Hv, size), k.dtype)
    chunks = chunk_rows(B, T, _offsets(cu_seqlens), size)
    float32 = arrays.module.float32
    eye = arrays.cast(arrays.module.eye(size), float32)
    if not arrays.numpy:
        eye = eye.to(k.device)
    for i in range(0, len(chunks), _CHUNKS_AT_ONCE):
        rows, inside = _gather(arrays, chunks[i : i + _CHUNKS_AT_ONCE], size)
        x = arrays.cast(keys[rows], float32) * inside[..., None, None]  # [chunks,size,Hk,K]
        gram = arrays.module.einsum("cihk,cjhk->chij", x, x)
        heads = arrays.integers([h // (Hv // Hk) for h in range(Hv)])
        b = arrays.cast(betas[rows], float32) * inside[..., None]  # [chunks,size,Hv]
        b = b.transpose(0, 2, 1) if arrays.numpy else b.transpose(1, 2)
        lower = arrays.module.tril(gram[:, heads] * b[..., None], -1) + eye  # [chunks,Hv,size,size]
        inverse = arrays.inverse(lower)
        inverse = inverse.transpose(0, 2, 1, 3) if arrays.numpy else inverse.transpose(1, 2)
        result[rows[inside]] = arrays.cast(inverse[inside], k.dtype)
    return result.reshape(B, T, Hv, size)
