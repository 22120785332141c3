"""Gated Delta Net (GDN) linear attention, ahead-of-time compiled.

    from flash_qla import chunk_gated_delta_rule

    o, final_state = chunk_gated_delta_rule(q, k, v, g, beta, output_final_state=True)

The functions take torch tensors (autograd, `torch.compile`) or numpy arrays (forward only). Signatures and semantics
are those of FLA (flash-linear-attention) and of the TileLang package FlashQLA, whose import name this package shares.

Nothing heavy is imported here: torch only if the caller's tensors are torch's, the native module on the first call.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from ._conflict import refuse_conflicting_package

refuse_conflicting_package()

# Where each public name lives.
_HOMES = {
    "chunk_gated_delta_rule": "functions",
    "chunk_gdn": "functions",
    "fused_recurrent_gated_delta_rule": "functions",
    "fused_recurrent_gdn": "functions",
    "chunk_gated_delta_rule_fwd": "passes",
    "chunk_gated_delta_rule_bwd": "passes",
    "gated_delta_rule_decode": "serving",
    "gated_delta_rule_verify": "serving",
    "gated_delta_rule_commit": "serving",
    "gated_delta_rule_mixed": "serving",
    "PlanOptions": "options",
    "Plan": "planning",
    "plan": "planning",
    "info": "planning",
}
__all__ = [
    "Plan",
    "PlanOptions",
    "__version__",
    "chunk_gated_delta_rule",
    "chunk_gated_delta_rule_bwd",
    "chunk_gated_delta_rule_fwd",
    "chunk_gdn",
    "fused_recurrent_gated_delta_rule",
    "fused_recurrent_gdn",
    "gated_delta_rule_commit",
    "gated_delta_rule_decode",
    "gated_delta_rule_mixed",
    "gated_delta_rule_verify",
    "info",
    "plan",
]

if TYPE_CHECKING:
    __version__: str
    from .functions import (
        chunk_gated_delta_rule,
        chunk_gdn,
        fused_recurrent_gated_delta_rule,
        fused_recurrent_gdn,
    )
    from .options import PlanOptions
    from .passes import chunk_gated_delta_rule_bwd, chunk_gated_delta_rule_fwd
    from .planning import Plan, info, plan
    from .serving import (
        gated_delta_rule_commit,
        gated_delta_rule_decode,
        gated_delta_rule_mixed,
        gated_delta_rule_verify,
    )


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        value = getattr(importlib.import_module(f".{_HOMES[name]}", __name__), name)
        globals()[name] = value
        return value
    if name == "__version__":
        from ._native import native

        return str(native().version())
    if name == "testing":
        return importlib.import_module(".testing", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, "testing"})
