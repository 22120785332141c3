#!/usr/bin/env python3
"""Runs FLA's own tests of the Gated Delta Net functions with flash_qla in their place, on the CPU or a GPU.

    python python/fla_suite/run.py CHECKOUT [--device cuda] [--parity] [--suite FILE ...] [--record FILE.json]
                                            [--lines FILE.jsonl] [...]

CHECKOUT is a clone of the repository fla-org/flash-linear-attention; this script fetches nothing. What it does not know
goes to pytest. It is run by a Python that has flash_qla, torch, triton, einops, packaging and pytest (transformers
makes `import fla` complete but is not needed). Results by test function are printed at the end and, with --record,
written as JSON; --lines appends an object for each, with the commits that FQLA_COMMIT and FLA_COMMIT name.
docs/python.md has the figures and says why some tests are left out.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
SUITE = "tests/ops/test_gdn.py"
# With --parity: FLA's tests of its FlashQLA backend, but those of the check that decides for or against it.
PARITY = "flash_qla and not verifier"
NEEDED = ("flash_qla", "torch", "triton", "einops", "packaging", "pytest")

# Tests of FLA's Triton kernels themselves, which need a GPU and which nobody replaces, and tests that assert that FLA
# dispatched to the TileLang package.
LEFT_OUT = ("flash_qla", "prepare_wy", "blackwell")
LEFT_OUT_BY_NAME = "tests/ops/test_gdn.py::test_gate"  # as a part of a name it would be test_gated_deltanet.py too


def refuse(sentence: str) -> None:
    print(f"run.py: {sentence}", file=sys.stderr)
    sys.exit(2)


def append_lines(path: Path, counts: dict[str, dict[str, int]], arguments: argparse.Namespace) -> None:
    """One object for each test function: what ran where, and how it ended."""
    import torch
    import triton

    sys.path.insert(0, str(HERE.parents[1] / "bench"))
    import records

    common = {
        "device": "cuda" if arguments.parity else arguments.device,
        "triton": triton.__version__,
        "fla_commit": os.environ.get("FLA_COMMIT", ""),
        **records.provenance(gpu=torch.cuda.is_available()),
    }
    how = "by FLA's registry" if arguments.parity else "in place of FLA's"
    lines = (
        {"suite": "fla", "functions": how, "test": test, **count, **common} for test, count in sorted(counts.items())
    )
    records.append(path, *lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path, help="a clone of fla-org/flash-linear-attention")
    parser.add_argument(
        "--parity",
        action="store_true",
        help="without the shim: FLA's registry finds this package by the name of the TileLang one and calls it; needs "
        "a Hopper or Blackwell GPU",
    )
    parser.add_argument(
        "--suite", nargs="+", default=[SUITE], help=f"test files of the checkout, or FILE::TEST; default: {SUITE}"
    )
    parser.add_argument("--record", type=Path, help="write the counts here")
    parser.add_argument("--lines", type=Path, help="append one JSON object for each test function here")
    parser.add_argument("-k", dest="only", help="as pytest's: run these tests only")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="where FLA's tests put their tensors")
    arguments, for_pytest = parser.parse_known_args()

    checkout = arguments.checkout.resolve()
    for suite in arguments.suite:
        if not (checkout / suite.partition("::")[0]).is_file():
            refuse(f"{checkout} has no {suite}; give the folder of a clone of fla-org/flash-linear-attention")
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        refuse(f"{sys.executable} lacks {', '.join(missing)}")

    with tempfile.TemporaryDirectory() as folder:
        record = Path(folder) / "record.json"
        environment = os.environ | {
            "GDN_DROPIN_RECORD": str(record),
            "PYTHONPATH": os.pathsep.join(filter(None, (str(HERE), str(checkout), os.environ.get("PYTHONPATH", "")))),
        }
        if not arguments.parity:
            environment["GDN_DROPIN"] = "flash_qla"
            environment["GDN_DROPIN_DEVICE"] = arguments.device
            # Read when fla is imported. Without it FLA's suite skips every case with Hv != Hk.
            environment["FLA_DISABLE_BACKEND_DISPATCH"] = "1"
        # Turns FLA's failures into warnings when set.
        environment.pop("FLA_CI_ENV", None)
        command = [sys.executable, "-m", "pytest", "-q", "-o", "log_cli=false", "-p", "no:cacheprovider"]
        chosen = [PARITY] if arguments.parity else [f"not {name}" for name in LEFT_OUT]
        chosen += [f"({arguments.only})"] if arguments.only else []
        command += [] if arguments.parity else ["--deselect", LEFT_OUT_BY_NAME]
        command += ["-p", "suite_plugin", *arguments.suite, "-k", " and ".join(chosen), *for_pytest]
        result = subprocess.run(command, cwd=checkout, env=environment, check=False).returncode
        if not record.is_file():
            return result or 1
        counts: dict[str, dict[str, int]] = json.loads(record.read_text(encoding="utf-8"))
        if arguments.record:
            arguments.record.write_bytes(record.read_bytes())
        if arguments.lines:
            append_lines(arguments.lines, counts, arguments)

    kinds = ("passed", "failed", "skipped", "left out")
    print(f"\n{'':54}" + "".join(f"{kind:>10}" for kind in kinds))
    for test, count in sorted(counts.items()):
        print(f"{test:54}" + "".join(f"{count.get(kind, 0):10d}" for kind in kinds))
    print(f"{'together':54}" + "".join(f"{sum(c.get(kind, 0) for c in counts.values()):10d}" for kind in kinds))
    return result


if __name__ == "__main__":
    sys.exit(main())
