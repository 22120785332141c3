"""The Python snippets of the documents run, and print what they say; the examples run.

All blocks marked `python` of README.md and docs/python.md, each by itself. A line `print(...)  # text` promises its
output.
"""

from __future__ import annotations

import contextlib
import io
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = ("README.md", "docs/python.md")


def snippets() -> list[tuple[str, str]]:
    """(document:line, code) of each block."""
    found = []
    for document in DOCUMENTS:
        text = (ROOT / document).read_text(encoding="utf-8")
        for match in re.finditer(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
            found.append((f"{document}:{text[: match.start()].count(chr(10)) + 2}", match[1]))
    return found


def promised(code: str) -> list[str]:
    return [match[1].strip() for match in re.finditer(r"^ *print\(.*\)  # (.+)$", code, re.MULTILINE)]


@pytest.mark.parametrize(("place", "code"), snippets(), ids=[place for place, _ in snippets()])
def test_snippet(place: str, code: str) -> None:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(code, place, "exec"), {"__name__": "__main__"})
    assert printed.getvalue().splitlines() == promised(code)


def test_there_are_snippets() -> None:
    """That the pattern finds them, and that somebody would notice if it did not."""
    places = [place for place, _ in snippets()]
    assert sum(place.startswith("README.md") for place in places) >= 3
    assert sum(place.startswith("docs/python.md") for place in places) >= 2
    assert all(promised(code) for _, code in snippets())


def run_example(name: str, *arguments: str) -> str:
    result = subprocess.run(
        [sys.executable, ROOT / "examples" / "python" / name, *arguments],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def test_numpy_example() -> None:
    assert "largest difference from one long prefill" in run_example("numpy_prefill_and_decode.py")


def test_look_inside(tmp_path: Path) -> None:
    """The real model: its heads against transformers' own result, and the figure."""
    for package in ("transformers", "safetensors", "matplotlib"):
        pytest.importorskip(package)
    image = tmp_path / "heads.png"
    text = run_example("look_inside.py", "--bytes", "96", "--image", str(image))
    assert "layer 1 against transformers on 96 bytes" in text
    assert image.stat().st_size > 10_000


def test_score() -> None:
    """The trained model in transformers' layers: its committed logits, and decode as prefill."""
    for package in ("transformers", "safetensors"):
        pytest.importorskip(package)
    text = run_example("score_qwen3_next.py", "--bytes", "2048", "--decode", "48")
    assert '"greedy_bytes_as_committed": 64' in text


def test_training_figure(tmp_path: Path) -> None:
    """The committed record gives the committed figure, and the curves in it lie on each other."""
    pytest.importorskip("matplotlib")
    image = tmp_path / "training.png"
    run_example("train_qwen3_next.py", "--plot-only", "--image", str(image))
    assert image.stat().st_size > 10_000
