"""Gives transformers' Qwen3-Next layer the gated delta rule of flash_qla.

    with gated_delta_rule("flash_qla"):
        logits = model(input_ids=ids).logits

The layer looks its two functions up in its own module on every call, so replacing them there reaches every model that
exists already. For good, and without a `with`, replace them the same way:

    modeling_qwen3_next.torch_chunk_gated_delta_rule = for_transformers(flash_qla.chunk_gated_delta_rule)

Tested with transformers 5.24.
"""

from __future__ import annotations

import contextlib
import inspect
import os
from collections.abc import Callable, Iterator
from typing import Any

from transformers.models.qwen3_next import modeling_qwen3_next

import flash_qla

CHUNK, RECURRENT = "torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule"


def for_transformers(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function without the keywords that it does not know.

    The layer hands on every keyword of the model's forward (`use_cache` for one), which transformers itself filters out
    on the way to other packages. flash_qla refuses unknown keywords, since a misspelt one would be lost without a word.
    """
    known = set(inspect.signature(function).parameters)

    def rule(query: Any, key: Any, value: Any, **keywords: Any) -> Any:
        return function(query, key, value, **{name: x for name, x in keywords.items() if name in known})

    return rule


def rules_of_fla() -> dict[str, Callable[..., Any]]:
    """The Triton kernels of the package fla, and nothing that it would hand over to."""
    os.environ["FLA_FLASH_QLA"] = "0"
    import fla.ops.common.chunk_o as chunk_o
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule, fused_recurrent_gated_delta_rule

    # NOTE: on Hopper its backward pass refuses Triton 3.4 to 3.7.0, for a fault that it has met with some shapes. The
    # loss shows whether this is one of them.
    chunk_o.TRITON_ABOVE_3_7_1 = True
    return {
        CHUNK: for_transformers(chunk_gated_delta_rule),
        RECURRENT: for_transformers(fused_recurrent_gated_delta_rule),
    }


@contextlib.contextmanager
def gated_delta_rule(which: str) -> Iterator[dict[str, int]]:
    """With "torch": transformers' own torch code, whatever else is installed. With "flash_qla": this library. With
    "fla": FLA's Triton kernels, which need a GPU.

    Yields how often each of the two functions was called, so that a caller can see that the replacement was used.
    """
    before = {name: getattr(modeling_qwen3_next, name) for name in (CHUNK, RECURRENT)}
    if which == "torch":
        # transformers wraps its functions to prefer the fla package where that is installed.
        rules = {name: for_transformers(inspect.unwrap(function)) for name, function in before.items()}
    elif which == "flash_qla":
        rules = {
            CHUNK: for_transformers(flash_qla.chunk_gated_delta_rule),
            RECURRENT: for_transformers(flash_qla.fused_recurrent_gated_delta_rule),
        }
    elif which == "fla":
        rules = rules_of_fla()
    else:
        raise ValueError(f"gated_delta_rule: {which!r}; allowed are 'torch', 'flash_qla' and 'fla'")
    calls = dict.fromkeys(rules, 0)

    def counted(name: str) -> Callable[..., Any]:
        def call(*arguments: Any, **keywords: Any) -> Any:
            calls[name] += 1
            return rules[name](*arguments, **keywords)

        return call

    for name in rules:
        setattr(modeling_qwen3_next, name, counted(name))
    try:
        yield calls
    finally:
        for name, function in before.items():
            setattr(modeling_qwen3_next, name, function)
