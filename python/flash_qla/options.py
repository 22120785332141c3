"""Choices about how a call is planned, beyond what it computes."""

from __future__ import annotations

from dataclasses import dataclass, field

from . import _modes

ORACLE = "oracle"
"""Not a backend of the library: `flash_qla.testing`'s way to float64."""


@dataclass(frozen=True)
class PlanOptions:
    """How a call is planned. The mathematics does not depend on any of these; the bits of a result may.

    Every function takes one as `options=`; the defaults are right unless you know otherwise.
    """

    backend: str = ""
    """"" for the best one that can do the call, or a name from `flash_qla.info()`: "cpu", "reference", "cuda-sm80"."""

    threads: int = 0
    """CPU threads. 0: torch.get_num_threads() for torch tensors, as many as OpenMP would use for numpy arrays."""

    context_split: int = 0
    """Pieces that a sequence is cut into so that few heads keep many cores busy: 0 automatic, 1 never, n at most."""

    deterministic: bool = False
    """Bits do not depend on the number of threads either. (They never depend on chance.)"""

    batch_invariant: bool = False
    """A sequence's bits depend neither on its neighbours in the batch nor on the number of threads."""

    modes: int = field(init=False, repr=False, compare=False)
    """The two promises as bits of `flash_qla._modes`. Computed once: every call asks for them."""

    def __post_init__(self) -> None:
        promises = (_modes.DETERMINISTIC if self.deterministic else 0) | (
            _modes.BATCH_INVARIANT if self.batch_invariant else 0
        )
        object.__setattr__(self, "modes", promises)


DEFAULT_OPTIONS = PlanOptions()
