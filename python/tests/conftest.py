"""Fixtures and settings that all tests share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import hypothesis
import pytest
import torch

# Hypothesis: the default profile fits into the suite's time; `--hypothesis-profile=long` is for a night.
# NOTE: no deadline for a single example: the first call on a shape makes a plan, and machines that test are busy. The
# fixture below is made once for all examples of a test, which is what it is for.
_SETTINGS: dict[str, Any] = {
    "deadline": None,
    "print_blob": True,
    "suppress_health_check": [hypothesis.HealthCheck.too_slow, hypothesis.HealthCheck.function_scoped_fixture],
}
hypothesis.settings.register_profile("default", max_examples=200, derandomize=True, **_SETTINGS)
hypothesis.settings.register_profile("long", max_examples=5000, **_SETTINGS)
hypothesis.settings.load_profile("default")


@pytest.fixture(autouse=True)
def poisoned_memory() -> Iterator[None]:
    """torch.empty and its relatives give NaN, so that an element which nobody writes does not pass."""
    torch.manual_seed(0)
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(before[0], warn_only=before[1])
