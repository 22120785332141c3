"""FLA's two functions: their signatures and rules. What passes goes to `torch_path` or `numpy_path`.

The rule itself, per sequence and value head with state S [K,V], for each token t in this order (docs/math.md):

    1. decay   S <- exp(g_t) S                                      g_t <= 0
    2. delta   d_t = beta_t (v_t - S^T k_t),   S <- S + k_t d_t^T
    3. read    o_t = scale * S^T q_t                                scale defaults to K^-1/2

Letters in shapes: B batch, T tokens, N sequences, Hk key heads, Hv value heads (a multiple of Hk; value head h reads
key head h // (Hv / Hk)), K and V head sizes.
"""

from __future__ import annotations

import warnings
from typing import Any

from . import _modes
from ._paths import path_of, torch_path_at_hand
from .options import DEFAULT_OPTIONS, PlanOptions

__all__ = ["chunk_gated_delta_rule", "chunk_gdn", "fused_recurrent_gated_delta_rule", "fused_recurrent_gdn"]

MAX_K = 256  # the largest K that the fast backends take, and FLA's own limit
CHUNK_SIZES = (16, 32, 64)


def _state_v_first(state_v_first: bool, transpose_state_layout: bool) -> bool:
    """The layout flag under its former name."""
    if state_v_first:
        raise ValueError(
            "state_v_first and its deprecated name transpose_state_layout were both given; pass state_v_first only"
        )
    warnings.warn(
        "transpose_state_layout is deprecated; its name is state_v_first now", DeprecationWarning, stacklevel=3
    )
    return transpose_state_layout


def _check_arrays(function: str, q: Any, k: Any, v: Any) -> int:
    """Ranks and head counts; the library checks everything else against them. Returns K."""
    try:
        # NOTE: once each. torch makes a new tuple every time.
        q_shape, k_shape, v_shape = q.shape, k.shape, v.shape
    except AttributeError:
        for name, x in (("q", q), ("k", k), ("v", v)):
            if not hasattr(x, "shape"):
                kind = type(x).__name__
                raise TypeError(f"{function}: {name} is a {kind}; it must be a torch tensor or a numpy array") from None
        raise
    if not len(q_shape) == len(k_shape) == len(v_shape) == 4:
        for name, shape in (("q", q_shape), ("k", k_shape), ("v", v_shape)):
            if len(shape) != 4:
                raise ValueError(f"{function}: {name} has {len(shape)} dimensions; its shape must be [B,T,heads,size]")
    heads, value_heads = q_shape[2], v_shape[2]
    if heads != k_shape[2]:
        raise ValueError(f"{function}: q has {heads} heads and k has {k_shape[2]}; queries and keys have equally many")
    if heads == 0 or value_heads % heads != 0:
        raise ValueError(
            f"{function}: v has {value_heads} heads; their number must be a multiple of the {heads} heads of q and k"
        )
    K: int = q_shape[3]
    return K


def _check_sequences(function: str, q: Any, cu_seqlens: Any, initial_state: Any) -> None:
    """Packed sequences have batch size 1, and every sequence has a row of the initial state."""
    if cu_seqlens is None:
        return
    if not hasattr(cu_seqlens, "shape"):
        raise TypeError(f"{function}: cu_seqlens is a {type(cu_seqlens).__name__}; it must be a tensor [N+1]")
    if len(cu_seqlens.shape) != 1:
        raise ValueError(f"{function}: cu_seqlens has {len(cu_seqlens.shape)} dimensions; its shape must be [N+1]")
    if cu_seqlens.shape[0] < 2:
        raise ValueError(
            f"{function}: cu_seqlens has {cu_seqlens.shape[0]} entries; it must have N + 1, with one sequence or more"
        )
    if q.shape[0] != 1:
        raise ValueError(
            f"{function}: q has batch size {q.shape[0]}; with cu_seqlens the sequences are packed and it must be 1"
        )
    sequences = cu_seqlens.shape[0] - 1
    if initial_state is not None and len(initial_state.shape) > 0 and initial_state.shape[0] != sequences:
        raise ValueError(
            f"{function}: initial_state has {initial_state.shape[0]} rows and cu_seqlens has {sequences} sequences; "
            "each sequence needs one row"
        )


def _scale(function: str, scale: float | None) -> float:
    """0.0 stands for K^-1/2 further down, so a caller's zero cannot pass."""
    if scale is None:
        return 0.0
    if scale == 0:
        raise ValueError(f"{function}: scale is 0, which makes every output 0; pass None for K^-1/2")
    return float(scale)


def _forward(
    function: str,
    tensors: tuple[Any, ...],
    modes: int,
    scale: float,
    options: PlanOptions,
    context_split: int,
    output_dtype: Any,
) -> tuple[Any, Any]:
    """To the path of the caller's arrays. `tensors` in the order of the native call, q first, initial_state last."""
    result: tuple[Any, Any] = path_of(tensors[0]).forward(
        function, tensors, modes, scale, options, context_split, output_dtype
    )
    return result


def chunk_gated_delta_rule(
    q: Any,
    k: Any,
    v: Any,
    g: Any,
    beta: Any,
    scale: float | None = None,
    initial_state: Any = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Any = None,
    cu_seqlens_cpu: Any = None,
    chunk_indices: Any = None,
    cp_context: Any = None,
    *,
    use_gate_in_kernel: bool = False,
    A_log: Any = None,
    dt_bias: Any = None,
    chunk_size: int = 64,
    auto_cp: bool = True,
    enable_fwd_cp_cache: bool = True,
    force_intra_cp: bool = False,
    transpose_state_layout: bool | None = None,
    head_first: bool | None = None,
    options: PlanOptions = DEFAULT_OPTIONS,
) -> tuple[Any, Any]:
    """Gated delta rule over whole sequences; FLA's and FlashQLA's function of this name. Differentiable (torch).

    Args:
        q, k: [B,T,Hk,K] float32, float16 or bfloat16. Slices of a packed tensor are read in place.
        v: [B,T,Hv,V], as q.
        g: [B,T,Hv] natural logarithm of the decay (at most 0), any float dtype; with `use_gate_in_kernel` the raw
            value before `-exp(A_log) * softplus(g + dt_bias)`. None: no decay.
        beta: [B,T,Hv] write strength, any float dtype; with `use_beta_sigmoid_in_kernel` the value before the sigmoid.
            None: 1.
        scale: factor of the output; None is K^-1/2.
        initial_state: [N,Hv,K,V], or [N,Hv,V,K] with `state_v_first`; any float dtype. None: zeros.
        output_final_state: return the final states too.
        use_qk_l2norm_in_kernel: x / sqrt(sum(x^2) + 1e-6) on the rows of q and k.
        allow_neg_eigval: twice the sigmoid of beta; needs `use_beta_sigmoid_in_kernel`.
        cu_seqlens: [N+1] int32 or int64 offsets of packed sequences (B = 1), from 0 up to at most T. Empty sequences
            are allowed; tokens past the last offset give zeros.
        cu_seqlens_cpu, chunk_indices: helpers of other implementations; this one does not need them.
        A_log, dt_bias: [Hv] any float dtype; used with `use_gate_in_kernel` only. dt_bias may be None.
        chunk_size: 16, 32 or 64; a tiling choice of other implementations that does not change the result.
        auto_cp: False keeps a sequence in one piece (`options.context_split` = 1).
        enable_fwd_cp_cache, force_intra_cp: tuning of the TileLang package; without effect here.
        transpose_state_layout: deprecated name of `state_v_first`.
        options: see `PlanOptions`.

    Returns:
        o [B,T,Hv,V] in q's dtype, and the final states [N,Hv,..] in float32, or None.

    Raises:
        ValueError: shapes, lengths or flags that do not fit together; the sentence names the argument.
        TypeError: an unknown keyword, or a dtype that no backend has.
        AssertionError: `use_gate_in_kernel` without A_log, K above 256, or a `cp_context` with states (as FLA does).
        DeprecationWarning: the argument head_first, which is gone.
        NotImplementedError: `cp_context`, a device without a backend; also second derivatives and vmap.
    """
    name = "chunk_gated_delta_rule"
    if transpose_state_layout is not None:
        state_v_first = _state_v_first(state_v_first, transpose_state_layout)
    modes = _modes.rule(
        g is not None,
        use_gate_in_kernel,
        use_beta_sigmoid_in_kernel,
        allow_neg_eigval,
        use_qk_l2norm_in_kernel,
        state_v_first,
    ) | (_modes.OUTPUT_FINAL_STATE if output_final_state else 0)
    if not use_gate_in_kernel:
        A_log = dt_bias = None
    tensors = (q, k, v, g, beta, A_log, dt_bias, cu_seqlens, initial_state)
    split = options.context_split if auto_cp else 1
    path = torch_path_at_hand(q)
    if (
        path is not None
        and head_first is None
        and cp_context is None
        and chunk_size in CHUNK_SIZES
        and (use_beta_sigmoid_in_kernel or not allow_neg_eigval)
    ):
        result: tuple[Any, Any] | None = path.forward_at_once(tensors, modes, scale, options, split)
        if result is not None:
            return result

    # In FLA's order, for calls with several faults.
    K = _check_arrays(name, q, k, v)
    if head_first is not None:
        raise DeprecationWarning(f"{name}: head_first is gone; inputs are [B,T,heads,size]")
    if chunk_size not in CHUNK_SIZES:
        raise ValueError(f"{name}: chunk_size is {chunk_size}; it must be 16, 32 or 64")
    if cp_context is not None:
        _refuse_cp_context(name, cp_context, initial_state, output_final_state)
    _check_sequences(name, q, cu_seqlens, initial_state)
    if use_gate_in_kernel and A_log is None:
        raise AssertionError(f"{name}: use_gate_in_kernel needs A_log")
    if allow_neg_eigval and not use_beta_sigmoid_in_kernel:
        raise ValueError(f"{name}: allow_neg_eigval needs use_beta_sigmoid_in_kernel")
    if K > MAX_K and not options.backend:
        raise AssertionError(f"{name}: K is {K}; it may be {MAX_K} at most")
    if use_gate_in_kernel and g is None:
        raise ValueError(f"{name}: use_gate_in_kernel needs g")
    return _forward(name, tensors, modes, _scale(name, scale), options, split, q.dtype)


def _refuse_cp_context(function: str, cp_context: Any, initial_state: Any, output_final_state: bool) -> None:
    if initial_state is not None:
        raise AssertionError(f"{function}: initial_state cannot be given with cp_context")
    if output_final_state:
        raise AssertionError(f"{function}: output_final_state cannot be asked for with cp_context")
    if getattr(cp_context, "cu_seqlens", None) is None:
        raise AssertionError(f"{function}: cp_context has no cu_seqlens of its own")
    raise NotImplementedError(f"{function}: cp_context (context parallelism across devices) is not supported yet")


def fused_recurrent_gated_delta_rule(
    q: Any,
    k: Any,
    v: Any,
    g: Any = None,
    gk: Any = None,
    gv: Any = None,
    beta: Any = None,
    scale: float | None = None,
    initial_state: Any = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    A_log: Any = None,
    dt_bias: Any = None,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Any = None,
    *,
    transpose_state_layout: bool | None = None,
    head_first: bool | None = None,
    options: PlanOptions = DEFAULT_OPTIONS,
) -> tuple[Any, Any]:
    """Gated delta rule for short sequences and single tokens; FLA's function of this name.

    NOTE: the fifth positional argument is `gk`, as in FLA. Pass keywords.

    Arguments are those of `chunk_gated_delta_rule`, in another order, and the output has v's dtype. The same backend
    does the work and picks the token recurrence for short sequences by itself. Unlike FLA's function this one has
    gradients.

    Args:
        gk, gv: decays along K and V. No backend has them yet: NotImplementedError unless None.
        beta: [B,T,Hv]; one value for each channel, [B,T,Hv,V], is not supported yet.
        head_first: ignored, as in FLA.

    Returns:
        o [B,T,Hv,V] in v's dtype, and the final states [N,Hv,..] in float32, or None.

    Raises:
        ValueError, TypeError, NotImplementedError: as `chunk_gated_delta_rule`. A missing A_log is a ValueError here.
    """
    name = "fused_recurrent_gated_delta_rule"
    if transpose_state_layout is not None:
        state_v_first = _state_v_first(state_v_first, transpose_state_layout)
    modes = _modes.rule(
        g is not None,
        use_gate_in_kernel,
        use_beta_sigmoid_in_kernel,
        allow_neg_eigval,
        use_qk_l2norm_in_kernel,
        state_v_first,
    ) | (_modes.OUTPUT_FINAL_STATE if output_final_state else 0)
    if not use_gate_in_kernel:
        A_log = dt_bias = None
    tensors = (q, k, v, g, beta, A_log, dt_bias, cu_seqlens, initial_state)
    path = torch_path_at_hand(q)
    if path is not None and gk is None and gv is None and (use_beta_sigmoid_in_kernel or not allow_neg_eigval):
        result: tuple[Any, Any] | None = path.forward_at_once(tensors, modes, scale, options, options.context_split)
        if result is not None:
            return result

    _check_arrays(name, q, k, v)
    _check_sequences(name, q, cu_seqlens, initial_state)
    if use_gate_in_kernel and A_log is None:
        raise ValueError(f"{name}: use_gate_in_kernel needs A_log")
    if use_gate_in_kernel and g is None:
        raise ValueError(f"{name}: use_gate_in_kernel needs g")
    if allow_neg_eigval and not use_beta_sigmoid_in_kernel:
        raise ValueError(f"{name}: allow_neg_eigval needs use_beta_sigmoid_in_kernel")
    if gk is not None or gv is not None:
        raise NotImplementedError(
            f"{name}: gk and gv (decays for each channel) are not supported yet; the fifth positional argument is gk, "
            "so pass beta by keyword"
        )
    if beta is not None and len(beta.shape) == 4:
        raise NotImplementedError(f"{name}: beta with a value for each channel, [B,T,Hv,V], is not supported yet")
    return _forward(name, tensors, modes, _scale(name, scale), options, options.context_split, v.dtype)


# FLA's short names.
chunk_gdn = chunk_gated_delta_rule
fused_recurrent_gdn = fused_recurrent_gated_delta_rule
