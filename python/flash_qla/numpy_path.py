"""numpy arrays -> one native call. Forward only; torch is never imported.

numpy has no bfloat16: arrays of ml_dtypes' bfloat16 are accepted and travel as their bits, uint16.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from . import _modes
from ._native import native
from .options import PlanOptions

__all__ = ["commit", "decode", "forward", "mixed"]

_IO = ("float32", "float16", "bfloat16")


class _Memory:
    """Says to numpy where memory lies."""

    def __init__(self, interface: dict[str, Any]) -> None:
        self.__array_interface__ = interface


def _writable_view(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The same memory without numpy's read-only mark.

    NOTE: the DLPack of numpy cannot say "read-only" and refuses such arrays, memory-mapped weights for example. The
    library never writes to an input.
    """
    address = x.__array_interface__["data"][0]
    memory = _Memory({**x.__array_interface__, "data": (address, False)})
    return np.asarray(memory)


def to_native(function: str, name: str, x: Any, *, inner: int = 1) -> Any:
    """An array as the native module takes it: copied only when one of its last `inner` dimensions is strided."""
    if x is None:
        return None
    if not isinstance(x, np.ndarray):
        raise TypeError(f"{function}: {name} is a {type(x).__name__}; q is a numpy array, so it must be one too")
    if x.dtype.name == "bfloat16":
        x = x.view(np.uint16)
    elif x.dtype.kind == "f" and x.dtype.name not in _IO:
        x = x.astype(np.float32)
    if x.dtype.byteorder == ">":
        x = x.astype(x.dtype.newbyteorder("="))
    expected = x.itemsize
    for axis in range(x.ndim - 1, x.ndim - 1 - min(inner, x.ndim), -1):
        if x.shape[axis] > 1 and x.strides[axis] != expected:
            x = np.ascontiguousarray(x)
            break
        expected *= x.shape[axis]
    if any(stride % x.itemsize for stride in x.strides) or any(stride < 0 for stride in x.strides):
        x = np.ascontiguousarray(x)
    return x if x.flags.writeable else _writable_view(x)


def common_io(function: str, q: Any, k: Any, v: Any) -> np.dtype[Any]:
    """The dtype that q, k and v are computed in: theirs, or float32 when they differ."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.dtype.name not in _IO:
            raise TypeError(
                f"{function}: {name} is {x.dtype.name}; q, k and v may be float32, float16 or bfloat16 "
                "(flash_qla.testing computes in float64)"
            )
    same = q.dtype == k.dtype == v.dtype
    return q.dtype if same else np.dtype(np.float32)


def _bits(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return x.view(np.uint16) if x.dtype.name == "bfloat16" else x


def forward(
    function: str,
    tensors: tuple[Any, ...],
    modes: int,
    scale: float,
    options: PlanOptions,
    context_split: int,
    output_dtype: Any,
) -> tuple[Any, Any]:
    """o and the final states (or None) of `functions.chunk_gated_delta_rule`; `tensors` as in `functions._forward`."""
    q, k, v, g, beta, A_log, dt_bias, cu_seqlens, initial_state = tensors
    for name, x in (("k", k), ("v", v)):
        if not isinstance(x, np.ndarray):
            raise TypeError(f"{function}: {name} is a {type(x).__name__}; q is a numpy array, so it must be one too")
    io = common_io(function, q, k, v)
    q, k, v = (x.astype(io, copy=False) for x in (q, k, v))
    B, T, _, K = q.shape
    Hv, V = v.shape[2:]
    o = np.empty((B, T, Hv, V), io)
    final_state = None
    if modes & _modes.OUTPUT_FINAL_STATE:
        N = B if cu_seqlens is None else cu_seqlens.shape[0] - 1
        inner = (V, K) if modes & _modes.STATE_V_FIRST else (K, V)
        final_state = np.empty((N, Hv, *inner), np.float32)
    native().forward(
        to_native(function, "q", q),
        to_native(function, "k", k),
        to_native(function, "v", v),
        to_native(function, "g", g),
        to_native(function, "beta", beta),
        to_native(function, "A_log", A_log),
        to_native(function, "dt_bias", dt_bias),
        to_native(function, "cu_seqlens", cu_seqlens),
        to_native(function, "initial_state", initial_state, inner=2),
        final_state,
        None,
        None,
        None,
        None,
        None,
        _bits(o),
        (modes & 0xFFFF) | options.modes,
        scale,
        0,
        0,
        options.backend,
        options.threads,
        context_split,
    )
    return (o if o.dtype == output_dtype else o.astype(output_dtype)), final_state


def _in_place(function: str, name: str, x: Any) -> Any:
    """A pool or a buffer: the caller's own memory or nothing."""
    if x is None:
        return None
    if not isinstance(x, np.ndarray):
        raise TypeError(f"{function}: {name} is a {type(x).__name__}; q is a numpy array, so it must be one too")
    if not x.flags.writeable:
        raise ValueError(f"{function}: {name} is read-only, and it would be written to")
    return _bits(x)


_INPUTS = ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "cu_seqlens")


def _inputs(function: str, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    q, k, v, *others = (to_native(function, name, x) for name, x in zip(_INPUTS, inputs))
    io = common_io(function, *inputs[:3])
    if io != q.dtype and io == np.float32:
        q, k, v = (x.astype(io) for x in inputs[:3])
    return (q, k, v, *others)


def _output(function: str, inputs: tuple[Any, ...], out: Any, output_dtype: Any) -> tuple[Any, Any]:
    """The caller's output and how the native module takes it."""
    if out is None:
        q, v = inputs[0], inputs[2]
        io = common_io(function, *inputs[:3])
        dtype = io if output_dtype is None else np.dtype(output_dtype)
        out = np.empty((*q.shape[:2], *v.shape[2:]), dtype)
    return out, _in_place(function, "out", out)


def decode(
    function: str,
    inputs: tuple[Any, ...],
    pools: tuple[Any, ...],
    modes: int,
    scale: float,
    commit_state: bool,
    out: Any,
    output_dtype: Any,
    options: PlanOptions,
) -> Any:
    """`serving.gated_delta_rule_decode` and `..._verify`."""
    state, state_indices, state_indices_out, has_initial_state, num_accepted, buffer, buffer_indices, parents = pools
    arguments = _inputs(function, inputs)
    out, o = _output(function, inputs, out, output_dtype)
    native().decode(
        *arguments,
        _in_place(function, "state", state),
        to_native(function, "state_indices", state_indices, inner=0),
        to_native(function, "state_indices_out", state_indices_out, inner=0),
        to_native(function, "has_initial_state", has_initial_state),
        to_native(function, "num_accepted", num_accepted),
        _in_place(function, "intermediate_states", buffer),
        to_native(function, "intermediate_indices", buffer_indices),
        to_native(function, "parent_tokens", parents),
        o,
        commit_state,
        modes | options.modes,
        scale,
        options.backend,
        options.threads,
    )
    return out


def commit(function: str, tensors: tuple[Any, ...], modes: int) -> None:
    """`serving.gated_delta_rule_commit`."""
    state, state_indices, buffer, buffer_indices, accepted = tensors
    native().commit(
        _in_place(function, "state", state),
        to_native(function, "state_indices", state_indices, inner=0),
        to_native(function, "intermediate_states", buffer, inner=0),
        to_native(function, "intermediate_indices", buffer_indices),
        to_native(function, "accepted", accepted),
        modes,
    )


def mixed(
    function: str,
    inputs: tuple[Any, ...],
    pools: tuple[Any, ...],
    modes: int,
    scale: float,
    numbers: tuple[int, int],
    out: Any,
    output_dtype: Any,
    options: PlanOptions,
) -> Any:
    """`serving.gated_delta_rule_mixed`."""
    state, state_indices, state_indices_out, has_initial_state, checkpoints, checkpoint_list = pools
    arguments = _inputs(function, inputs)
    out, o = _output(function, inputs, out, output_dtype)
    pool = _in_place(function, "state", state)
    native().forward(
        *arguments,
        pool,
        pool,
        to_native(function, "state_indices", state_indices, inner=0),
        to_native(function, "state_indices_out", state_indices_out, inner=0),
        to_native(function, "has_initial_state", has_initial_state),
        _in_place(function, "checkpoints", checkpoints),
        to_native(function, "checkpoint_list", checkpoint_list),
        o,
        modes | options.modes,
        scale,
        *numbers,
        options.backend,
        options.threads,
        options.context_split,
    )
    return out
