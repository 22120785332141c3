"""The native module: loaded once, on the first call, together with the tvm-ffi runtime.

Each attribute is a tvm-ffi function. They take anything that speaks DLPack (torch tensors, numpy arrays), release the
interpreter lock while they compute, and raise `ValueError`, `TypeError`, `NotImplementedError`, `MemoryError` or
`RuntimeError` with one sentence. `python/binding/calls.cpp` has the arguments in order.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import sys
import threading
from collections.abc import Iterator
from typing import Any, Protocol

__all__ = ["Native", "native"]


class Native(Protocol):
    """The functions of the module."""

    def forward(self, *args: Any) -> int: ...
    def backward(self, *args: Any) -> int: ...
    def decode(self, *args: Any) -> int: ...
    def commit(self, *args: Any) -> None: ...
    def decode_seconds(self, repeats: int, *args: Any) -> float: ...
    def oracle_forward(self, *args: Any) -> None: ...
    def oracle_backward(self, *args: Any) -> None: ...
    def plan(self, *args: Any) -> Any: ...
    def info(self) -> str: ...
    def version(self) -> str: ...
    def case_table(self, path: str) -> Any: ...
    def case_expand(self, sweep: str) -> Any: ...
    def case_make(self, line: str) -> Any: ...
    def case_oracle(self, line: str) -> Any: ...
    def case_tolerance(self, *args: Any) -> Any: ...
    def case_check(self, line: str, verbose: bool) -> Any: ...
    def after_fork(self) -> None: ...
    def use_torch_memory(self, allocate: int, release: int) -> None: ...


class _Functions:
    """Plain attributes: a lookup in a tvm-ffi module costs a microsecond, this one a few nanoseconds."""

    def __init__(self, module: Any) -> None:
        for name in (name for name in vars(Native) if not name.startswith("_")):
            setattr(self, name, module.get_function(name))


_loaded: Native | None = None
_lock = threading.Lock()


@contextlib.contextmanager
def _environment(name: str, value: str) -> Iterator[None]:
    """A variable of the environment for a while, unless the user has set it."""
    if name in os.environ:
        yield
        return
    os.environ[name] = value
    try:
        yield
    finally:
        del os.environ[name]


def _import_beside_torch() -> Any:
    """The tvm_ffi package where torch is imported already. Two things that it does then have to be kept from it.

    It asks torch whether there is a GPU, for which torch starts the CUDA runtime, and after that a forked child cannot
    use CUDA. Through NVML torch finds out without it.

    Before 2.10 torch has no DLPack interface in C, and tvm_ffi compiles one: a minute, and a compiler. Its way through
    Python costs 8 us a call instead. With the package torch-c-dlpack-ext there is nothing to compile; on a machine with
    CUDA the interface is needed (it brings torch's allocator), so there tvm_ffi decides.
    """
    import torch

    with contextlib.ExitStack() as stack:
        stack.enter_context(_environment("PYTORCH_NVML_BASED_CUDA_CHECK", "1"))
        ready = hasattr(torch.Tensor, "__dlpack_c_exchange_api__") or hasattr(torch.Tensor, "__c_dlpack_exchange_api__")
        if not ready and not importlib.util.find_spec("torch_c_dlpack_ext") and not torch.cuda.is_available():
            stack.enter_context(_environment("TVM_FFI_DISABLE_TORCH_C_DLPACK", "1"))
        import tvm_ffi
    return tvm_ffi


def _import_tvm_ffi() -> Any:
    """The tvm_ffi package, without what it would import along.

    NOTE: `import tvm_ffi` imports torch when torch is installed, which takes seconds and is of no use to a caller who
    has numpy arrays. It copes with torch missing, so that is what it sees unless the caller has imported torch.
    """
    if "tvm_ffi" in sys.modules:
        import tvm_ffi

        return tvm_ffi
    if sys.modules.get("torch") is not None:
        return _import_beside_torch()
    sys.modules["torch"] = None  # type: ignore[assignment]
    try:
        import tvm_ffi
    finally:
        if sys.modules.get("torch", ...) is None:
            del sys.modules["torch"]
    return tvm_ffi


def _use_torch_memory(functions: Any) -> None:
    """Workspaces on a GPU come from torch's caching allocator by its C interface, where this torch has it.

    Else they are tensors that tvm_ffi asks torch for, as they are when torch was imported later than this module.
    """
    torch: Any = sys.modules.get("torch")
    if torch is None or torch.version.cuda is None:
        return
    import ctypes

    path = os.path.join(os.path.dirname(torch.__file__), "lib", "libtorch_cuda.so")
    prefix = "aoti_torch_cuda_caching_allocator_raw_"
    try:
        library = ctypes.CDLL(path, mode=os.RTLD_NOLOAD | os.RTLD_NOW)
        allocate, release = (ctypes.cast(library[prefix + name], ctypes.c_void_p).value for name in ("alloc", "delete"))
    except (OSError, AttributeError):
        return
    functions.use_torch_memory(allocate, release)


def _load() -> Native:
    tvm_ffi = _import_tvm_ffi()
    # tvm-ffi turns the kinds that it knows into Python's exceptions; this one it does not know.
    tvm_ffi.register_error("NotImplementedError", NotImplementedError)
    spec = importlib.util.find_spec("flash_qla._flashqla")
    if spec is None or spec.origin is None:
        raise ImportError(
            "flash_qla: the native module _flashqla.so is missing beside the Python files; install the package again "
            "(pip install flash-qla-cpp, or pip install . in the repository)"
        )
    functions: Any = _Functions(tvm_ffi.load_module(spec.origin))
    _use_torch_memory(functions)
    # GNU OpenMP's threads do not survive a fork; a forked child computes with one thread instead of waiting for ever.
    os.register_at_fork(after_in_child=functions.after_fork)
    loaded: Native = functions
    return loaded


def native() -> Native:
    """The native functions; loads them on the first call."""
    global _loaded
    if _loaded is None:
        with _lock:
            if _loaded is None:
                _loaded = _load()
    return _loaded
