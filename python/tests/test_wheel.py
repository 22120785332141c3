"""The wheel: what is in it, and that it works where there is nothing but Python.

    python -m pip wheel . -w build/wheels                      # the wheel and what it depends on
    FLASH_QLA_WHEELS=build/wheels pytest python/tests/test_wheel.py

Nothing is fetched here: the environments are installed from that folder.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import site
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDER = os.environ.get("FLASH_QLA_WHEELS")
COMPILERS = ("cc", "c++", "gcc", "g++", "clang", "clang++", "nvcc", "cmake", "ninja", "ld", "as")

pytestmark = pytest.mark.skipif(
    not FOLDER, reason="FLASH_QLA_WHEELS names no folder; the module's first lines say more"
)


@pytest.fixture(scope="module")
def wheel() -> Path:
    found = list(Path(str(FOLDER)).resolve().glob("flash_qla_cpp-*.whl"))
    assert len(found) == 1, found
    return found[0]


@pytest.fixture(scope="module")
def module(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """_flashqla.so, unpacked."""
    folder = tmp_path_factory.mktemp("unpacked")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder / "flash_qla" / "_flashqla.so"


def make_environment(folder: Path, wheel: Path, with_torch: bool) -> Path:
    """A fresh virtual environment with the wheel; its Python."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    python = folder / "bin" / "python"
    packages = Path(
        subprocess.run(
            [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
            check=True,
            capture_output=True,
            text=True,
        ).stdout.strip()
    )
    # pip of this Python installs into the other: an environment without pip of its own is made in a moment.
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "-q", "--no-index"]
    pip += ["--disable-pip-version-check", "--find-links", str(wheel.parent)]
    if with_torch:
        # torch is too large to install twice. It is found where this Python has it, behind everything of the new
        # environment; a path that is added like this brings no editable installation along.
        subprocess.run([*pip, "--no-deps", str(wheel)], check=True)
        paths = [sysconfig.get_path("purelib"), *(site.getsitepackages())]
        (packages / "torch_of_another.pth").write_text("\n".join(dict.fromkeys(paths)) + "\n", encoding="utf-8")
    else:
        subprocess.run([*pip, str(wheel)], check=True)
    return python


@pytest.fixture(scope="module")
def bare(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_environment(tmp_path_factory.mktemp("bare"), wheel, with_torch=False)


@pytest.fixture(scope="module")
def with_torch(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("torch")
    return make_environment(tmp_path_factory.mktemp("torch"), wheel, with_torch=True)


def run(python: Path, *command: str) -> str:
    """Runs without a compiler within reach and without anything of this process' environment."""
    path = str(python.parent)
    assert not [name for name in COMPILERS if shutil.which(name, path=path)]
    result = subprocess.run(
        [python, *command],
        env={"PATH": path, "OMP_NUM_THREADS": "1", "CC": "/nonexistent", "CXX": "/nonexistent"},
        cwd=python.parents[1],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert result.returncode == 0, f"{result.stdout}\n{result.stderr}"
    return result.stdout


def test_one_wheel_for_every_python(wheel: Path) -> None:
    assert re.fullmatch(
        rf"flash_qla_cpp-\d+\.\d+\.\d+-py3-none-(manylinux\w+|linux)_{platform.machine()}\.whl", wheel.name
    )


def test_contents(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        metadata = archive.read(next(n for n in names if n.endswith(".dist-info/METADATA"))).decode()
    allowed = re.compile(
        r"flash_qla/((testing/)?\w+\.py|py\.typed|_flashqla\.so|lib(gomp|hwy)\.so\.\d+|(testing/cases|licenses)/\w+\.txt)"
        r"|flash_qla_cpp-[\d.]+\.dist-info/(METADATA|WHEEL|RECORD|licenses/[\w.]+)"
    )
    assert [name for name in names if not allowed.fullmatch(name)] == []
    assert {"flash_qla/__init__.py", "flash_qla/py.typed", "flash_qla/_flashqla.so"} <= set(names)
    assert wheel.stat().st_size < 8 << 20

    needs = re.findall(r"^Requires-Dist: ([\w-]+)[^;\n]*$", metadata, re.MULTILINE)
    assert sorted(needs) == ["apache-tvm-ffi", "numpy"]


def test_what_the_module_links_to(module: Path) -> None:
    """The C library of the system; everything else travels in the wheel, or is linked in."""
    readelf = shutil.which("readelf") or pytest.skip("readelf is not installed")
    dynamic = subprocess.run([readelf, "-d", module], check=True, capture_output=True, text=True).stdout
    needed = set(re.findall(r"NEEDED.*\[(.+)\]", dynamic))
    system = {name for name in needed if re.fullmatch(r"lib(c|m|pthread|dl)\.so\.\d+|ld-linux.*", name)}
    assert needed - system <= {path.name for path in module.parent.glob("lib*.so*")}
    assert re.findall(r"R(?:UN)?PATH.*\[(.*)\]", dynamic) == ["$ORIGIN"]

    symbols = subprocess.run([readelf, "--dyn-syms", "-W", module], check=True, capture_output=True, text=True).stdout
    defined = [line.split()[7] for line in symbols.splitlines() if re.match(r"\s*\d+:", line) and " UND " not in line]
    assert defined and [name for name in defined if not name.startswith("__tvm_ffi_")] == []


def test_no_path_of_the_build_machine(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            assert os.fsencode(ROOT) + b"/" not in archive.read(name), name


def test_numpy_without_compiler_and_torch(bare: Path) -> None:
    text = run(bare, str(ROOT / "examples" / "python" / "numpy_prefill_and_decode.py"))
    assert "largest difference" in text


LIBRARIES = """
import sys, flash_qla
assert "numpy" not in sys.modules and "torch" not in sys.modules
flash_qla.info()
assert "torch" not in sys.modules
loaded = {line.split()[-1] for line in open("/proc/self/maps") if ".so" in line}
print(flash_qla.__file__)
print(*sorted(path for path in loaded if "/libgomp" in path or "/libhwy" in path or "_flashqla" in path), sep="\\n")
"""


def test_its_own_libraries_are_loaded(bare: Path) -> None:
    """Not the system's libgomp and libhwy, which may be missing or of another version."""
    package, *libraries = run(bare, "-c", LIBRARIES).split()
    assert {str(Path(path).parent) for path in libraries} == {str(Path(package).parent)}
    assert any(path.endswith("_flashqla.so") for path in libraries)


TORCH = """
import sys
import numpy
import flash_qla
# numpy first: the native module is loaded before there is a torch, and must then take its tensors.
x = numpy.random.default_rng(0).standard_normal((1, 70, 2, 32), dtype=numpy.float32)
gate, ones = -numpy.ones((1, 70, 2), numpy.float32), numpy.ones((1, 70, 2), numpy.float32)
o, _ = flash_qla.chunk_gated_delta_rule(x, x, x, gate, ones, use_qk_l2norm_in_kernel=True)
assert "torch" not in sys.modules

import torch
t = torch.from_numpy(x).requires_grad_()
p, state = flash_qla.chunk_gated_delta_rule(
    t, t, t, torch.from_numpy(gate), torch.from_numpy(ones), use_qk_l2norm_in_kernel=True, output_final_state=True)
assert torch.equal(p.detach(), torch.from_numpy(o))
(p.square().sum() + state.sum()).backward()
assert t.grad.isfinite().all() and t.grad.abs().sum() > 0
print(torch.__version__, flash_qla.__file__)
"""


def test_with_torch(with_torch: Path) -> None:
    version, package = run(with_torch, "-c", TORCH).split()
    assert int(version.split(".")[1]) >= 8 or not version.startswith("2.")
    assert package.startswith(str(with_torch.parents[1]))


def test_threads_beside_those_of_torch(with_torch: Path) -> None:
    """torch brings a libgomp too. The one that is loaded first serves both; some builds of torch rename theirs, and
    then there are two. Work must not wait for the other's threads."""
    run(
        with_torch,
        "-c",
        "import torch, flash_qla\n"
        "torch.set_num_threads(2)\n"
        "x = torch.randn(1, 500, 4, 64)\n"
        "g = -torch.rand(1, 500, 4)\n"
        "for _ in range(50):\n"
        "    o, _ = flash_qla.chunk_gated_delta_rule(x, x, x, g, g.exp(), use_qk_l2norm_in_kernel=True)\n"
        "    x = torch.nn.functional.normalize(o + x, dim=-1)\n"
        "assert x.isfinite().all()\n",
    )
