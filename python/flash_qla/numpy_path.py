"""numpy arrays -> one native call. Forward only; torch is never imported.

numpy has no bfloat16: arrays of ml_dtypes' bfloat16 are accepted and travel as their bits, uint16.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from . import _modes
from ._native import native
from .options import ORACLE, PlanOptions

__all__ = ["commit", "decode", "forward", "forward_pass", "mixed"]

_INPUTS = ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "cu_seqlens")
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


# What the native module takes as it is.
_PLAIN = frozenset(np.dtype(name) for name in ("float32", "float16", "int32", "int64", "bool", "uint8"))


def to_native(function: str, name: str, x: Any, *, inner: int = 1, wide: bool = False) -> Any:
    """An array as the native module takes it: copied only when one of its last `inner` dimensions is strided."""
    if x is None:
        return None
    if type(x) is np.ndarray and x.dtype in _PLAIN and x.flags.carray:
        return x
    if not isinstance(x, np.ndarray):
        raise TypeError(f"{function}: {name} is a {type(x).__name__}; it must be a numpy array like the others")
    if x.dtype.name == "bfloat16":
        x = x.view(np.uint16)
    elif x.dtype.kind == "f":
        if x.dtype.name not in _IO and not (wide and x.dtype.name == "float64"):
            x = x.astype(np.float32)
    elif x.dtype.newbyteorder("=") not in _PLAIN:
        raise TypeError(f"{function}: {name} is {x.dtype}; allowed are floats, and int32, int64 and bool for indices")
    if not x.dtype.isnative:
        x = x.astype(x.dtype.newbyteorder("="))
    expected = x.itemsize
    for axis in range(x.ndim - 1, x.ndim - 1 - min(inner, x.ndim), -1):
        if x.shape[axis] > 1 and x.strides[axis] != expected:
            x = np.array(x, order="C")
            break
        expected *= x.shape[axis]
    if not x.flags.aligned or any(stride % x.itemsize or stride < 0 for stride in x.strides):
        x = np.array(x, order="C")
    return x if x.flags.writeable else _writable_view(x)


def common_io(function: str, q: Any, k: Any, v: Any) -> np.dtype[Any]:
    """The dtype that q, k and v are computed in: theirs, or float32 when they differ."""
    if q.dtype is k.dtype is v.dtype and q.dtype.kind == "f" and q.dtype in _PLAIN:
        io: np.dtype[Any] = q.dtype
        return io
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.dtype.name not in _IO:
            raise TypeError(
                f"{function}: {name} is {x.dtype.name}; q, k and v may be float32, float16 or bfloat16 "
                "(flash_qla.testing computes in float64)"
            )
    same = q.dtype == k.dtype == v.dtype
    return q.dtype.newbyteorder("=") if same else np.dtype(np.float32)


def _bits(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return x.view(np.uint16) if x.dtype.name == "bfloat16" else x


def _done(function: str, bits: int) -> None:
    """The native call refuses, with bits for the arguments, what `to_native` has not made contiguous: pools."""
    if bits:
        raise ValueError(f"{function}: the inner two dimensions of state must be contiguous")


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
    for name, x in (("k", tensors[1]), ("v", tensors[2])):
        if not isinstance(x, np.ndarray):
            raise TypeError(f"{function}: {name} is a {type(x).__name__}; it must be a numpy array like the others")
    wide = options.backend == ORACLE
    io = np.dtype(np.float64) if wide else common_io(function, *tensors[:3])
    q, k, v = (x.astype(io, copy=False) for x in tensors[:3])
    names = (*_INPUTS[3:], "initial_state")
    others = (
        to_native(function, name, x, inner=2 if name == "initial_state" else 1, wide=wide)
        for name, x in zip(names, tensors[3:])
    )
    inputs = (*(to_native(function, name, x, wide=wide) for name, x in zip(_INPUTS, (q, k, v))), *others)
    o = np.empty((*q.shape[:2], *v.shape[2:]), io)
    final_state = None
    if modes & _modes.OUTPUT_FINAL_STATE:
        final_state = np.empty(_modes.state_shape(q, v, tensors[7], modes), np.float64 if wide else np.float32)
    bits = (modes & 0xFFFF) | options.modes | _modes.BF16_AS_U16
    if wide:
        native().oracle_forward(*inputs, final_state, o, bits, scale)
    else:
        nothing = (None,) * 5
        settings = (bits, scale, 0, 0, options.backend, options.threads, context_split)
        _done(function, native().forward(*inputs, final_state, *nothing, _bits(o), *settings))
    return (o if o.dtype == output_dtype else o.astype(output_dtype)), final_state


def forward_pass(
    function: str, inputs: tuple[Any, ...], initial_state: Any, modes: int, scale: float, options: PlanOptions
) -> tuple[Any, Any, Any]:
    """o, h (or None) and the final states of `passes.chunk_gated_delta_rule_fwd`."""
    q, k, v, cu_seqlens = inputs[0], inputs[1], inputs[2], inputs[7]
    shape = _modes.state_shape(q, v, cu_seqlens, modes)
    # The start in float32, overwritten by the end.
    state = np.zeros(shape, np.float32) if initial_state is None else np.array(initial_state, np.float32, order="C")
    h = None
    if modes & _modes.CHECKPOINT_MASK:
        lengths = [q.shape[1]] * q.shape[0] if cu_seqlens is None else np.diff(cu_seqlens)
        rows = sum(-(-int(length) // 64) for length in lengths)
        h = np.empty((rows, *shape[1:]), k.dtype)
    tensors = (*inputs, state, None, None, None, h, None)
    o = mixed(function, tensors, modes, scale, (0, 0), None, None, options)
    return o.astype(q.dtype, copy=False), h if h is None else h.reshape(q.shape[0], -1, *shape[1:]), state


def _in_place(function: str, name: str, x: Any) -> Any:
    """A pool or a buffer: the caller's own memory or nothing."""
    if x is None:
        return None
    if not isinstance(x, np.ndarray):
        raise TypeError(f"{function}: {name} is a {type(x).__name__}; it must be a numpy array like the others")
    if x.dtype not in _PLAIN and x.dtype.name != "bfloat16":
        raise TypeError(f"{function}: {name} is {x.dtype}; allowed are float32, float16 and bfloat16")
    if not x.flags.writeable:
        raise ValueError(f"{function}: {name} is read-only, and it would be written to")
    return _bits(x)


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
    tensors: tuple[Any, ...],
    modes: int,
    scale: float,
    commit_state: bool,
    out: Any,
    output_dtype: Any,
    options: PlanOptions,
) -> Any:
    """`serving.gated_delta_rule_decode` and `..._verify`."""
    inputs = tensors[:8]
    state, state_indices, state_indices_out, has_initial_state = tensors[8:12]
    num_accepted, buffer, buffer_indices, parents = tensors[12:16]
    arguments = _inputs(function, inputs)
    out, o = _output(function, inputs, out, output_dtype)
    bits = native().decode(
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
        modes | options.modes | _modes.BF16_AS_U16,
        scale,
        options.backend,
        options.threads,
    )
    _done(function, bits)
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
        modes | _modes.BF16_AS_U16,
    )


def mixed(
    function: str,
    tensors: tuple[Any, ...],
    modes: int,
    scale: float,
    numbers: tuple[int, int],
    out: Any,
    output_dtype: Any,
    options: PlanOptions,
) -> Any:
    """`serving.gated_delta_rule_mixed`."""
    inputs = tensors[:8]
    state, state_indices, state_indices_out, has_initial_state, checkpoints, checkpoint_list = tensors[8:]
    arguments = _inputs(function, inputs)
    out, o = _output(function, inputs, out, output_dtype)
    pool = _in_place(function, "state", state)
    bits = native().forward(
        *arguments,
        pool,
        pool,
        to_native(function, "state_indices", state_indices, inner=0),
        to_native(function, "state_indices_out", state_indices_out, inner=0),
        to_native(function, "has_initial_state", has_initial_state),
        _in_place(function, "checkpoints", checkpoints),
        to_native(function, "checkpoint_list", checkpoint_list),
        o,
        modes | options.modes | _modes.BF16_AS_U16,
        scale,
        *numbers,
        options.backend,
        options.threads,
        options.context_split,
    )
    _done(function, bits)
    return out
