"""The token recurrence in double precision, as a function like any other."""

from __future__ import annotations

from typing import Any

from ..functions import chunk_gated_delta_rule
from ..options import ORACLE, PlanOptions

__all__ = ["oracle"]

_ORACLE = PlanOptions(backend=ORACLE)
_FLOATS = ("initial_state", "A_log", "dt_bias")


def _double(x: Any) -> Any:
    if x is None:
        return None
    if hasattr(x, "double"):
        return x.double()
    import numpy

    return x.astype(numpy.float64)


def oracle(q: Any, k: Any, v: Any, g: Any = None, beta: Any = None, **keywords: Any) -> tuple[Any, Any]:
    """`chunk_gated_delta_rule` in float64: token by token, one thread, nothing rounded on the way.

    Arguments, shapes and errors are those of `chunk_gated_delta_rule` (pass the ones after beta by keyword). Inputs of
    any float dtype are widened; o and the final states are float64. torch tensors get gradients, in the dtypes of the
    inputs, so `torch.autograd.gradcheck` in double works. CPU only, and slow: about 10 ns per state element and token.
    """
    if "options" in keywords:
        raise TypeError("oracle() has no options; the oracle does not choose")
    wide = {name: _double(x) if name in _FLOATS else x for name, x in keywords.items()}
    return chunk_gated_delta_rule(*(_double(x) for x in (q, k, v, g, beta)), **wide, options=_ORACLE)
