"""Two implementations of the gated delta rule by other people, in plain torch: they know nothing of this library.

    fla            naive_recurrent_gated_delta_rule and naive_chunk_gated_delta_rule of the package fla-core
    transformers   torch_chunk_gated_delta_rule and torch_recurrent_gated_delta_rule of its Qwen3-Next model

Both compute in float32. What they do not have, gates from raw values, packed sequences and the rest, is done around
them here, by the formulas of docs/math.md.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
import itertools
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

Rule = Callable[..., tuple[Tensor, Tensor]]
"""(q, k, v, g, beta, scale, initial_state) -> (o, final_state), all with Hv heads, states [B,Hv,K,V]."""


def _file_in_package(package: str, *path: str) -> str:
    """A file of an installed package, found without importing it."""
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        pytest.skip(f"the package {package} is not installed")
    return os.path.join(spec.submodule_search_locations[0], *path)


@functools.cache
def _fla_naive() -> Any:
    """fla/ops/gated_delta_rule/naive.py by itself: importing the package `fla` needs triton and takes seconds."""
    path = _file_in_package("fla", "ops", "gated_delta_rule", "naive.py")
    pytest.importorskip("einops")
    spec = importlib.util.spec_from_file_location("fla_gated_delta_rule_naive", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def fla_recurrent(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, scale: float, h0: Tensor | None) -> Any:
    # NOTE: beta comes before g here, and only here.
    return _fla_naive().naive_recurrent_gated_delta_rule(q, k, v, beta, g, scale, h0, True)


def fla_chunk(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, scale: float, h0: Tensor | None) -> Any:
    return _fla_naive().naive_chunk_gated_delta_rule(q, k, v, g, beta, 64, scale, h0, True)


@functools.cache
def _transformers(name: str) -> Any:
    """A function of transformers' Qwen3-Next model, from its source.

    NOTE: not by import. That takes ten seconds, and where FLA is installed the decorators of these functions put FLA's
    Triton kernels in their place.
    """
    path = _file_in_package("transformers", "models", "qwen3_next", "modeling_qwen3_next.py")
    with open(path, encoding="utf-8") as file:
        module = ast.parse(file.read(), path)
    wanted = ("l2norm", "torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule")
    functions = [x for x in module.body if isinstance(x, ast.FunctionDef) and x.name in wanted]
    for function in functions:
        function.decorator_list.clear()
    names = {"torch": torch, "F": torch.nn.functional, "is_torchdynamo_exporting": lambda: False}
    exec(compile(ast.Module(functions, []), path, "exec"), names)
    return names[name]


def _scaled(q: Tensor, scale: float) -> Tensor:
    """transformers has no scale: it always takes K^-1/2."""
    return q.float() * (scale * q.shape[-1] ** 0.5)


def transformers_chunk(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, scale: float, h0: Tensor | None
) -> Any:
    function = _transformers("torch_chunk_gated_delta_rule")
    return function(_scaled(q, scale), k, v, g=g, beta=beta, initial_state=h0, output_final_state=True)


def transformers_recurrent(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, scale: float, h0: Tensor | None
) -> Any:
    function = _transformers("torch_recurrent_gated_delta_rule")
    return function(_scaled(q, scale), k, v, g=g, beta=beta, initial_state=h0, output_final_state=True)


JUDGES: dict[str, Rule] = {
    "fla-recurrent": fla_recurrent,
    "fla-chunk": fla_chunk,
    "transformers-recurrent": transformers_recurrent,
    "transformers-chunk": transformers_chunk,
}


def judged(rule: Rule) -> Callable[..., tuple[Tensor, Tensor]]:
    """`rule` with the signature of `chunk_gated_delta_rule`, in float32 throughout."""

    def function(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor | None,
        beta: Tensor | None,
        *,
        scale: float | None = None,
        initial_state: Tensor | None = None,
        output_final_state: bool = True,
        use_qk_l2norm_in_kernel: bool = False,
        use_beta_sigmoid_in_kernel: bool = False,
        allow_neg_eigval: bool = False,
        state_v_first: bool = False,
        cu_seqlens: Tensor | None = None,
        use_gate_in_kernel: bool = False,
        A_log: Tensor | None = None,
        dt_bias: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        q, k, v = q.float(), k.float(), v.float()
        B, T, Hv, V = v.shape
        Hk, K = q.shape[2:]
        if use_qk_l2norm_in_kernel:
            q, k = (x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for x in (q, k))
        q, k = (x.repeat_interleave(Hv // Hk, dim=2) for x in (q, k))
        if g is None:
            g = v.new_zeros(B, T, Hv)
        elif use_gate_in_kernel:
            bias = 0 if dt_bias is None else dt_bias.float()
            g = -A_log.float().exp() * torch.nn.functional.softplus(g.float() + bias)
        if beta is None:
            beta = v.new_ones(B, T, Hv)
        elif use_beta_sigmoid_in_kernel:
            beta = beta.float().sigmoid() * (2 if allow_neg_eigval else 1)
        scale = K**-0.5 if scale is None else scale
        if initial_state is not None:
            initial_state = initial_state.float()
            if state_v_first:
                initial_state = initial_state.transpose(2, 3)
        arrays = (q, k, v, g.float(), beta.float())
        if cu_seqlens is None:
            o, state = rule(*arrays, scale, initial_state)
        else:
            outputs, states = [], []
            offsets = cu_seqlens.tolist()
            for n, (begin, end) in enumerate(itertools.pairwise(offsets)):
                h0 = v.new_zeros(1, Hv, K, V) if initial_state is None else initial_state[n : n + 1]
                if begin == end:
                    states.append(h0)
                    continue
                o, state = rule(*(x[:, begin:end] for x in arrays), scale, h0)
                outputs.append(o)
                states.append(state)
            outputs.append(v.new_zeros(B, T - offsets[-1], Hv, V))
            o, state = torch.cat(outputs, 1), torch.cat(states)
        return o, state.transpose(2, 3) if state_v_first else state

    return function
