"""The case tables: one line of text says what to compute and on which inputs.

The same line works in `flashqla check` and `flashqla bench`; docs/cli.md of the repository has the grammar. The tables
restate the faults that users of other libraries reported; docs/cases.md says which line guards what.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from .._native import native

__all__ = ["Case", "Tolerance", "case", "check", "expand", "table", "tables", "tolerance"]

_GATES = ("none", "log", "raw", "vector")


def _folder() -> Path:
    # Beside the native module: with an editable installation the Python files are elsewhere.
    spec = importlib.util.find_spec("flash_qla._flashqla")
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).parent / "testing" / "cases"


def tables() -> list[str]:
    """Names of the tables: "forward", "backward", "decode", "edges", "shapes" ..."""
    return sorted(path.stem for path in _folder().glob("*.txt"))


def table(name: str) -> list[str]:
    """The lines of a table, sweeps written out."""
    path = _folder() / f"{name}.txt"
    if not path.is_file():
        raise ValueError(f"flash_qla.testing: there is no table {name!r}; there are {', '.join(tables())}")
    return [str(line) for line in native().case_table(str(path))]


def expand(line: str) -> list[str]:
    """The lines that a sweep such as `fwd:t{1..64},{f32|bf16}` stands for."""
    return [str(text) for text in native().case_expand(line)]


@dataclass(frozen=True)
class Tolerance:
    """How exact an output has to be; cli/cases/tolerance.cpp of the repository has the reasons."""

    per_head: float  # relative L2 error of one head
    whole: float  # relative L2 error of the whole output
    floor: float  # a head whose reference is weaker than floor times the RMS of the whole is judged as if it had that
    absolute: float  # absolute error that every element may have


@dataclass(frozen=True)
class Case:
    """One case: its inputs, and what the oracle says about its outputs."""

    line: str
    """The canonical line."""

    pass_name: str
    """"forward", "backward" or "decode"."""

    inputs: dict[str, np.ndarray[Any, Any]]
    """Name -> values, dense: float32 for float tensors (exact for every dtype that they have), int64 for others. States
    that are updated in place, a pool for example, are in `outputs` and here with their start: `state` of a decode case;
    `final_state` of a forward case, and its copy `initial_state` where sequences start from it."""

    dtypes: dict[str, str]
    """Name -> dtype in the call, "f32", "bf16", "i32" ...; outputs too."""

    shapes: dict[str, tuple[int, ...]]
    """Name -> shape; outputs too."""

    outputs: tuple[str, ...]
    options: dict[str, Any] = field(repr=False)
    """Fields of the problem: gate, beta_mode, beta_factor, qk_l2norm, scale, grouping, state_layout, pad_rule, ..."""

    @cached_property
    def expected(self) -> dict[str, np.ndarray[Any, Any]]:
        """Name -> the oracle's values of each output, computed in double and rounded to float32."""
        answer = {str(name): bytes(values) for name, values in native().case_oracle(self.line)}
        return {
            name: np.frombuffer(values, np.float32).reshape(self.shapes[name])
            for name, values in answer.items()
            if name in self.shapes
        }

    def keywords(self) -> dict[str, Any]:
        """The flags of this case as keywords of `chunk_gated_delta_rule`."""
        options = self.options
        return {
            "scale": options["scale"] or None,
            "use_qk_l2norm_in_kernel": options["qk_l2norm"],
            "use_gate_in_kernel": options["gate"] == "raw",
            "use_beta_sigmoid_in_kernel": options["beta_mode"] == "logit",
            "allow_neg_eigval": options["beta_factor"] == 2.0,
            "state_v_first": options["state_layout"] == "vk",
        }


def case(line: str) -> Case:
    """The case that a line describes, its inputs drawn from its seed.

    Raises:
        ValueError: a line that does not parse; the sentence says where.
    """
    canonical, pass_name, options, tensors = native().case_make(line)
    gate, beta_mode, beta_factor, l2norm, scale, grouping, layout, pad, checkpoints, every, decode_rows, *rest = options
    inputs, dtypes, shapes, outputs = {}, {}, {}, []
    for name, dtype, shape, is_output, has_start, values in tensors:
        name, dtype = str(name), str(dtype)
        dtypes[name] = dtype
        shapes[name] = tuple(int(size) for size in shape)
        if is_output:
            outputs.append(name)
        if has_start:
            kind = np.float32 if dtype in ("f32", "f16", "bf16") else np.int64
            inputs[name] = np.frombuffer(bytes(values), kind).reshape(shapes[name]).copy()
    named = {
        "gate": _GATES[gate],
        "beta_mode": ("value", "logit")[beta_mode],
        "beta_factor": float(beta_factor),
        "qk_l2norm": bool(l2norm),
        "scale": float(scale),
        "grouping": ("interleaved", "tiled")[grouping],
        "state_layout": ("kv", "vk")[layout],
        "pad_rule": ("negative", "non_positive")[pad],
        "checkpoints": ("none", "chunk_starts", "every_n", "listed")[checkpoints],
        "checkpoint_every": int(every),
        "decode_rows": int(decode_rows),
        "commit_state": bool(rest[0]),
        "with_commit": bool(rest[1]),
    }
    return Case(str(canonical), str(pass_name), inputs, dtypes, shapes, tuple(outputs), named)


def tolerance(line: str, output: str, stored: str = "f32", head_elements: int = 1, device: str = "cpu") -> Tolerance:
    """How exact `output` of the case must be when it is stored as `stored` with so many elements a head.

    device: "cpu" or "cuda", whose matrix units round what they multiply.
    """
    on_gpu = device.startswith("cuda")
    return Tolerance(*(float(x) for x in native().case_tolerance(line, output, stored, head_elements, on_gpu)))


def check(line: str, verbose: bool = False) -> tuple[str, str]:
    """Runs the case in C++ on poisoned memory and compares with the oracle, head by head, like `flashqla check`.

    Returns:
        "passed", "failed" or "unsupported", and a text for a person.
    """
    verdict, text = native().case_check(line, verbose)
    return str(verdict), str(text)
