"""The two passes by themselves, with the contracts and the return values of FlashQLA 0.1.3 (the TileLang package).

For programs that wrap them in an autograd function of their own. What its kernels hand from forward to backward, gamma
and A, this package does not need: gamma is computed because the backward pass takes the gate in this form, A because
callers expect it.

    gamma_t = sum of g from the start of t's chunk to t         chunks of 64 tokens from the start of each sequence;
                                                                -104, whose exp is 0 in float32, in place of -inf
    A       = (I + stril(diag(beta) K K^T))^-1                  per chunk and value head; no gate (docs/math.md)
"""

from __future__ import annotations

from typing import Any

from . import _modes
from ._paths import path_of
from .chunks import chunk_gate_sums, chunk_inverse, gates_of_sums
from .functions import _check_arrays, _check_sequences, _scale
from .options import DEFAULT_OPTIONS, PlanOptions

__all__ = ["chunk_gated_delta_rule_bwd", "chunk_gated_delta_rule_fwd"]

CHUNK = 64


def _refuse_context(function: str, cp_context: Any) -> None:
    if cp_context is not None:
        raise NotImplementedError(f"{function}: cp_context (context parallelism across devices) is not supported yet")


def chunk_gated_delta_rule_fwd(
    q: Any,
    k: Any,
    v: Any,
    g: Any,
    beta: Any,
    scale: float | None = None,
    initial_state: Any = None,
    cu_seqlens: Any = None,
    output_final_state: bool = True,
    output_h: bool = False,
    auto_cp: bool = True,
    state_v_first: bool = False,
    enable_fwd_cp_cache: bool = False,
    cp_context: Any = None,
    is_train: bool | None = None,
    *,
    options: PlanOptions = DEFAULT_OPTIONS,
) -> tuple[Any, Any, Any, Any, Any, None]:
    """The forward pass. No autograd.

    Args:
        q, k, v, g, beta, scale, initial_state, cu_seqlens, state_v_first: as in `chunk_gated_delta_rule`; g and beta
            must be given.
        output_final_state, output_h: return the final states; the states that enter each chunk.
        auto_cp: False keeps a sequence in one piece.
        enable_fwd_cp_cache, is_train: tuning of the TileLang package; without effect here.

    Returns:
        gamma [B,T,Hv] in g's dtype, A [B,T,Hv,64] in k's dtype, o [B,T,Hv,V] in q's dtype, h [B,chunks,Hv,K,V] in k's
        dtype or None (packed: the chunks of all sequences, one after another), the final states [N,Hv,K,V] in float32
        or None, and None where the TileLang package has its cache. States are [..,V,K] with `state_v_first`. Rows past
        the last offset are zero.

    Raises:
        ValueError, TypeError, NotImplementedError: as `chunk_gated_delta_rule`.
    """
    name = "chunk_gated_delta_rule_fwd"
    _check_arrays(name, q, k, v)
    _check_sequences(name, q, cu_seqlens, initial_state)
    _refuse_context(name, cp_context)
    if g is None or beta is None:
        raise ValueError(f"{name}: g and beta must be given")
    modes = _modes.GATE_LOG | (_modes.STATE_V_FIRST if state_v_first else 0)
    if output_h:
        modes |= _modes.CHECKPOINT_CHUNK_STARTS
    split = options.context_split if auto_cp else 1
    options = PlanOptions(options.backend, options.threads, split, options.deterministic, options.batch_invariant)
    inputs = (q, k, v, g, beta, None, None, cu_seqlens)
    o, h, state = path_of(q).forward_pass(name, inputs, initial_state, modes, _scale(name, scale), options)
    gamma = chunk_gate_sums(g, cu_seqlens, CHUNK)
    A = chunk_inverse(k, beta, cu_seqlens, CHUNK)
    return gamma, A, o, h, state if output_final_state else None, None


def chunk_gated_delta_rule_bwd(
    q: Any,
    k: Any,
    v: Any,
    g: Any,
    beta: Any,
    A: Any,
    do: Any,
    dht: Any = None,
    scale: float | None = None,
    initial_state: Any = None,
    cu_seqlens: Any = None,
    state_v_first: bool = False,
    auto_cp: bool = True,
    cp_cache: Any = None,
    cp_context: Any = None,
    *,
    options: PlanOptions = DEFAULT_OPTIONS,
) -> tuple[Any, Any, Any, Any, Any, Any]:
    """The backward pass: gradients of <do, o> + <dht, final state>. torch tensors only; no autograd.

    Args:
        q, k, v, beta, scale, initial_state, cu_seqlens, state_v_first: as given to the forward pass.
        g: gamma, the first result of the forward pass, in float32. NOTE: sums, not g itself.
        A, cp_cache: results of the forward pass; not needed here.
        do: [B,T,Hv,V]. dht: [N,Hv,..] or None.

    Returns:
        dq, dk, dv, dbeta in the dtypes of their inputs, dg [B,T,Hv] in float32 (of g itself, not of gamma), and dh0 in
        float32 or None without an initial state.

    Raises:
        AssertionError: g is not float32. ValueError, TypeError, NotImplementedError: as `chunk_gated_delta_rule`.
    """
    name = "chunk_gated_delta_rule_bwd"
    _check_arrays(name, q, k, v)
    _check_sequences(name, q, cu_seqlens, initial_state)
    _refuse_context(name, cp_context)
    if not hasattr(q, "requires_grad"):
        raise NotImplementedError(f"{name}: there are no gradients for numpy arrays; use torch tensors")
    import torch

    from . import torch_path

    if g.dtype != torch.float32:
        raise AssertionError(f"{name}: g (the gamma of the forward pass) is {g.dtype}; it must be float32")
    modes = _modes.GATE_LOG | (_modes.STATE_V_FIRST if state_v_first else 0)
    inputs = (q, k, v, gates_of_sums(g, cu_seqlens, CHUNK), beta, None, None, cu_seqlens, initial_state)
    split = options.context_split if auto_cp else 1
    return torch_path.backward_pass(name, inputs, do, dht, modes, _scale(name, scale), options, split)
