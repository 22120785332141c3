"""Which module handles the caller's arrays: `torch_path` or `numpy_path`, each imported when it is first needed."""

from __future__ import annotations

import sys
from typing import Any

_torch_path: Any = None
_numpy_path: Any = None
_Tensor: Any = None


def _is_numpy(x: Any) -> bool:
    """Whether x is an array of a class that somebody derived."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(x, numpy.ndarray)


def torch_path_at_hand(x: Any) -> Any:
    """`torch_path` when x is a torch tensor and an earlier call has imported it, else None. Imports nothing."""
    return _torch_path if type(x) is _Tensor else None


def path_of(x: Any) -> Any:
    """The module for arrays like x. NOTE: kept in globals, an import statement in every call takes a microsecond."""
    global _torch_path, _numpy_path, _Tensor
    if type(x) is _Tensor:
        return _torch_path
    module = type(x).__module__
    if module == "numpy" or (not module.startswith("torch") and _is_numpy(x)):
        if _numpy_path is None:
            from . import numpy_path

            _numpy_path = numpy_path
        return _numpy_path
    if _torch_path is None:
        import torch

        from . import torch_path

        _torch_path, _Tensor = torch_path, torch.Tensor
    return _torch_path
