"""Lines of bench/results/: where their figures come from, and how they get into a file.

Needs the Python standard library, and torch for what it is asked about torch.
"""

from __future__ import annotations

import datetime
import json
import os
import subprocess
from pathlib import Path
from typing import Any


def driver_version() -> str:
    """Of the first GPU; nothing where there is none."""
    try:
        text = subprocess.run(
            ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=20,
            check=True,
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return ""
    return text.split("\n")[0].strip()


def provenance(gpu: bool) -> dict[str, Any]:
    """torch, the commit that FQLA_COMMIT names, the date; with `gpu` the GPU and its driver."""
    import torch

    return {
        **({"gpu": torch.cuda.get_device_name(), "driver": driver_version()} if gpu else {}),
        "torch": torch.__version__,
        "commit": os.environ.get("FQLA_COMMIT", ""),
        "date": datetime.date.today().isoformat(),
    }


def append(path: str | Path | None, *records: dict[str, Any]) -> None:
    """A line of JSON for each; nothing without a path."""
    if path:
        with open(path, "a", encoding="utf-8") as file:
            file.writelines(json.dumps(record) + "\n" for record in records)
