"""The import shim, and FLA's own suite through it.

The shim is tested on a package that is made up here, and on fla-core where that is installed. FLA's suite itself runs
when FLA_CHECKOUT names a clone of fla-org/flash-linear-attention: a part of it, or all of it with FLA_SUITE=all (six
minutes). docs/python.md has the figures of the whole.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SHIM = ROOT / "python" / "fla_suite"
CHECKOUT = os.environ.get("FLA_CHECKOUT")

# The cases that are cheap on a CPU: every test function, without the largest shapes.
PART = "(chunk_size or varlen or gqa or state_v_first or gate_in_kernel or sigmoid) and not (D128 or 2048 or 8192)"


def python(code: str, *paths: Path | str, **variables: str) -> str:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, paths))} | variables
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.fixture
def made_up_fla(tmp_path: Path) -> Path:
    """A package that copies names around as FLA does."""
    operators = tmp_path / "fla" / "ops" / "gated_delta_rule"
    operators.mkdir(parents=True)
    names = ("chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule")
    for file, name in zip(("chunk", "fused_recurrent"), names, strict=True):
        short = name.replace("gated_delta_rule", "gdn")
        (operators / f"{file}.py").write_text(f"def {name}(): return 'fla'\n{short} = {name}\n")
    (operators / "__init__.py").write_text(
        "from .chunk import chunk_gated_delta_rule, chunk_gdn\n"
        "from .fused_recurrent import fused_recurrent_gated_delta_rule, fused_recurrent_gdn\n"
    )
    (operators.parent / "__init__.py").write_text("from .gated_delta_rule import chunk_gated_delta_rule, chunk_gdn\n")
    (tmp_path / "fla" / "utils.py").write_text("device = 'cuda'\ndevice_torch_lib = None\n")
    (tmp_path / "fla" / "__init__.py").write_text("from . import ops\nfrom .utils import device\n")
    return tmp_path


WHOSE = """
    import fla, fla.ops.gated_delta_rule as m, fla.ops.gated_delta_rule.chunk as c
    names = "chunk_gated_delta_rule", "chunk_gdn", "fused_recurrent_gated_delta_rule", "fused_recurrent_gdn"
    print(*(getattr(m, n).__module__.split(".")[0] for n in names), fla.ops.chunk_gdn.__module__.split(".")[0],
          c.chunk_gdn.__module__.split(".")[0])
"""


def test_shim_replaces_before_anyone_copies(made_up_fla: Path) -> None:
    assert set(python(WHOSE, SHIM, made_up_fla).split()) == {"fla"}
    found = python(WHOSE, SHIM, made_up_fla, GDN_DROPIN="flash_qla").split()
    assert found == ["flash_qla"] * 5 + ["fla"]  # the last one is the original, in its own module


def test_shim_reaches_a_spawned_child(made_up_fla: Path, tmp_path: Path) -> None:
    (tmp_path / "worker.py").write_text(
        "def whose(_):\n    from fla.ops import chunk_gdn\n    return chunk_gdn.__module__\n"
    )
    code = """
        import multiprocessing, worker
        if __name__ == "__main__":
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                print(pool.map(worker.whose, [0])[0])
    """
    assert python(code, SHIM, tmp_path, GDN_DROPIN="flash_qla").strip() == "flash_qla.functions"


def test_shim_corrects_the_device(made_up_fla: Path) -> None:
    code = "import fla.utils; print(fla.utils.device, fla.utils.device_torch_lib.__name__)"
    found = python(code, SHIM, made_up_fla, GDN_DROPIN="flash_qla", GDN_DROPIN_DEVICE="cpu")
    assert found.split() == ["cpu", "torch.cpu"]


@pytest.mark.skipif(importlib.util.find_spec("fla") is None, reason="fla-core is not installed")
def test_shim_on_fla_core() -> None:
    folder = Path(str(importlib.util.find_spec("fla").origin)).parents[1]  # type: ignore[union-attr]
    code = """
        import torch
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule
        x = torch.randn(1, 70, 2, 16)
        o, state = chunk_gated_delta_rule(x, x, x, -x[..., 0].abs(), x[..., 1].sigmoid(), use_qk_l2norm_in_kernel=True)
        print(chunk_gated_delta_rule.__module__, *o.shape)
    """
    assert python(code, SHIM, folder, GDN_DROPIN="flash_qla").split() == ["flash_qla.functions", "1", "70", "2", "16"]


def test_run_says_what_it_needs(tmp_path: Path) -> None:
    result = subprocess.run(
        [sys.executable, SHIM / "run.py", tmp_path], capture_output=True, text=True, timeout=60, check=False
    )
    assert result.returncode == 2
    assert "give the folder of a clone of fla-org/flash-linear-attention" in result.stderr


@pytest.mark.skipif(not CHECKOUT, reason="FLA_CHECKOUT names no clone of fla-org/flash-linear-attention")
def test_fla_suite(tmp_path: Path) -> None:
    record = tmp_path / "record.json"
    command = [sys.executable, SHIM / "run.py", str(CHECKOUT), "--record", record]
    if os.environ.get("FLA_SUITE") != "all":
        command += ["-k", PART]
    result = subprocess.run(command, capture_output=True, text=True, timeout=3600, check=False)
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-2000:]
    counts = json.loads(record.read_text())
    assert sum(count.get("passed", 0) for count in counts.values()) >= 20
    assert sum(count.get("failed", 0) + count.get("skipped", 0) for count in counts.values()) == 0
