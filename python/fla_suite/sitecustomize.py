"""Import shim: gives FLA's Gated Delta Net functions to every importer as those of another module.

Python imports a module of this name at start, so that a process with this folder first on PYTHONPATH, and every process
that it spawns, gets the replacement. Directly after FLA's module has run, and so before anybody can copy a name out of
it, its public functions are replaced; the originals stay reachable in its submodules `chunk` and `fused_recurrent`.

    GDN_DROPIN         module with the replacements, `flash_qla` in run.py; unset: this file does nothing
    GDN_DROPIN_DEVICE  what FLA's tests take for their device. Without a GPU FLA insists on "cuda"; "cpu" corrects it
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import os
import sys
from collections.abc import Callable, Sequence
from types import ModuleType

MODULE = "fla.ops.gated_delta_rule"
NAMES = (
    "chunk_gated_delta_rule",
    "chunk_gdn",
    "fused_recurrent_gated_delta_rule",
    "fused_recurrent_gdn",
)


def replace_functions(module: ModuleType) -> None:
    ours = importlib.import_module(os.environ["GDN_DROPIN"])
    for name in NAMES:
        setattr(module, name, getattr(ours, name))
    print(f"fla_suite: {module.__name__} has {', '.join(NAMES)} of {ours.__name__}", file=sys.stderr)


def replace_device(module: ModuleType) -> None:
    import torch

    device = os.environ["GDN_DROPIN_DEVICE"]
    for holder in (module, sys.modules.get("fla.utils._device")):
        if holder is not None:
            holder.device = device  # type: ignore[attr-defined]
            holder.device_torch_lib = getattr(torch, device)  # type: ignore[attr-defined]


class After(importlib.abc.Loader):
    """A loader that runs a function after the module has been executed by its own loader."""

    def __init__(self, loader: importlib.abc.Loader, then: Callable[[ModuleType], None]) -> None:
        self.loader = loader
        self.then = then

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self.loader.exec_module(module)
        self.then(module)


class Finder(importlib.abc.MetaPathFinder):
    """Finds the modules of `replacements` where Python would, with another loader around theirs."""

    def __init__(self, replacements: dict[str, Callable[[ModuleType], None]]) -> None:
        self.replacements = replacements

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name not in self.replacements:
            return None
        # NOTE: FLA must be on sys.path: an editable installation has a finder of its own that this one does not ask.
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = After(spec.loader, self.replacements[name])
        return spec


_wanted: dict[str, Callable[[ModuleType], None]] = {}
if os.environ.get("GDN_DROPIN"):
    _wanted[MODULE] = replace_functions
if os.environ.get("GDN_DROPIN_DEVICE"):
    _wanted["fla.utils"] = replace_device
if _wanted:
    sys.meta_path.insert(0, Finder(_wanted))
