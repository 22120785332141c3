"""Training with flash_qla follows training with transformers' torch code: the short form of
examples/python/train_qwen3_next.py, whose figure is in docs/python.md."""

from __future__ import annotations

import inspect
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
pytest.importorskip("transformers")
pytest.importorskip("safetensors")

STEPS, BATCH, WINDOW = 20, 2, 128


@pytest.fixture(scope="module")
def example() -> Any:
    added = [str(ROOT / "examples" / "python"), str(ROOT / "examples" / "qwen3_next")]
    sys.path[:0] = added
    import train_qwen3_next

    yield train_qwen3_next
    for folder in added:
        sys.path.remove(folder)


@pytest.fixture(scope="module")
def text() -> torch.Tensor:
    # NOTE: not the standard library of the machine, so that the figures are the same everywhere.
    raw = (ROOT / "examples/qwen3_next/model/heldout.txt").read_bytes()
    return torch.frombuffer(bytearray(raw), dtype=torch.uint8)


@pytest.fixture(scope="module")
def torch_run(example: Any, text: torch.Tensor) -> list[float]:
    return example.run("torch", text, STEPS, BATCH, WINDOW, seed=1, report=False)["loss"]


def test_loss_curves_lie_on_each_other(example: Any, text: torch.Tensor, torch_run: list[float]) -> None:
    ours = example.run("flash_qla", text, STEPS, BATCH, WINDOW, seed=1, report=False)["loss"]
    assert torch_run[0] - torch_run[-1] > 1.5, "it does not learn"
    assert max(example.differences(torch_run, ours)) < 2e-4


def test_a_lost_gradient_would_be_seen(
    example: Any, text: torch.Tensor, torch_run: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same with the gradient of g dropped, the smallest one of all: the curves part."""
    import flash_qla

    rule = flash_qla.chunk_gated_delta_rule

    def without_gate_gradient(q: Any, k: Any, v: Any, g: Any, **rest: Any) -> Any:
        return rule(q, k, v, g.detach(), **rest)

    without_gate_gradient.__signature__ = inspect.signature(rule)  # type: ignore[attr-defined]
    monkeypatch.setattr(flash_qla, "chunk_gated_delta_rule", without_gate_gradient)
    wrong = example.run("flash_qla", text, STEPS, BATCH, WINDOW, seed=1, report=False)["loss"]
    assert max(example.differences(torch_run, wrong)) > 2e-3
