#!/usr/bin/env python3
"""Checks which room includes which: the line of rooms of the build, seen in the sources themselves.

Also: no file of more than 700 lines, no exception, print or exit in the library, headers have a guard, and every kernel
waits for the ones before it, which the host counts on (src/cuda/device/grid_order.cuh).
"""
import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent

# folder: what its files may include, by the first part of the path between quotes or of a known library
PUBLIC = {"flashqla"}
ROOMS = {
    "include/flashqla": set(),
    "src/base": PUBLIC | {"base"},
    "src/reference": PUBLIC | {"base", "reference"},
    "src/cpu": PUBLIC | {"base", "cpu", "hwy", "omp.h"},
    "src/cuda": PUBLIC | {"base", "cuda", "cuda_runtime_api.h", "cuda_bf16.h", "cuda_fp16.h"},
    "src/api": PUBLIC | {"base", "api"},
    "cli/cases": PUBLIC | {"cases", "cuda_runtime_api.h"},
    "cli/safetensors": PUBLIC | {"safetensors", "nlohmann"},
    "cli": PUBLIC | {"cases", "safetensors", "nlohmann", "CLI"},
    "tests/package": PUBLIC,
    "tests/fuzz": PUBLIC | {"cases", "safetensors"},
    "tests/property": PUBLIC | {"cases", "gtest"},
    "tests/conformance": PUBLIC | {"cases", "safetensors", "gtest"},
    "examples": PUBLIC | {"safetensors", "nlohmann", "CLI", "gtest", "omp.h"},
}
# The one file that sees every backend.
EXCEPTIONS = {"src/api/backends.cpp": {"reference", "cpu", "cuda"}}
KNOWN_LIBRARIES = {"hwy", "omp.h", "nlohmann", "CLI", "gtest", "flashqla", "cuda_runtime_api.h", "cuda_bf16.h",
                   "cuda_fp16.h"}
LIBRARY = ("include/", "src/")
MOST_LINES = 700

INCLUDE = re.compile(r'^\s*#\s*include\s*([<"])([^>"]+)[>"]', re.MULTILINE)
BANNED = re.compile(r"\b(std::cout|std::cerr|printf|fprintf|puts|std::exit|exit|abort|std::abort|assert)\s*\(?\s*[(<]")
THROW = re.compile(r"\bthrow\b")


def room_of(name):
    rooms = [room for room in ROOMS if name.startswith(room + "/")]
    return max(rooms, key=len) if rooms else None


def without_comments(text):
    text = re.sub(r'"(\\.|[^"\\\n])*"', '""', text)
    text = re.sub(r"/\*.*?\*/", "", text, flags=re.DOTALL)
    return re.sub(r"//[^\n]*", "", text)


def check(name, faults):
    text = (ROOT / name).read_text(encoding="utf-8")
    lines = text.count("\n")
    if lines > MOST_LINES:
        faults.append(f"{name} has {lines} lines; at most {MOST_LINES} are readable")
    room = room_of(name)
    if room is not None:
        allowed = ROOMS[room] | EXCEPTIONS.get(name, set())
        folder = (ROOT / name).parent
        for quote, path in INCLUDE.findall(text):
            first = path.split("/")[0]
            beside = quote == '"' and "/" not in path and (folder / path).exists()
            inside = quote == '"' and room == "examples"
            standard = quote == "<" and first not in KNOWN_LIBRARIES
            if not (first in allowed or beside or inside or standard):
                faults.append(f"{name} includes {path}; {room} may include {', '.join(sorted(allowed)) or 'nothing'}")
    code = without_comments(text)
    if name.startswith(LIBRARY):
        if BANNED.search(code):
            faults.append(f"{name} prints or ends the process ({BANNED.search(code).group(0).strip()}...)")
        if THROW.search(code) and name != "include/flashqla/flashqla.hpp":
            faults.append(f"{name} throws; errors are values in the library")
    kernels = code.split("__global__")[1:] if name.startswith("src/cuda/") else []
    if any("wait_for_earlier_grids();" not in kernel for kernel in kernels):
        faults.append(f"{name} has a kernel that does not wait for earlier ones (wait_for_earlier_grids())")
    if name.endswith((".hpp", ".h", ".cuh")) and "#pragma once" not in text and "#ifndef" not in text and "_INL_HPP_" not in text:
        faults.append(f"{name} has no include guard")


def main():
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.cpp", "*.hpp", "*.h", "*.c", "*.cu", "*.cuh"],
        cwd=ROOT, capture_output=True, text=True, check=True)
    names = [name for name in listed.stdout.split() if (ROOT / name).exists()]
    faults = []
    for name in names:
        check(name, faults)
    for fault in faults:
        print(f"error: {fault}")
    print(f"{len(names)} files, {len(faults)} faults")
    return 1 if faults or not names else 0


if __name__ == "__main__":
    sys.exit(main())
