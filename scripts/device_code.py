"""GPU code inside objects, libraries and programs: which kernels there are, what each needs, and a fingerprint of each.

Reads what nvcc embeds (fat binaries that hold one ELF image an architecture) without any CUDA tool, so it works on a
machine that has neither a GPU nor the toolkit. Python standard library only.
"""

import ctypes
import ctypes.util
import dataclasses
import hashlib
import os
import re
import struct
import subprocess

FATBIN_MAGIC = struct.pack("<IHH", 0xBA55ED50, 1, 16)
KIND_ELF, LZ4, ZSTD = 2, 0x2000, 0x8000
REGISTERS, FRAME_SIZE = 0x2F, 0x11  # attributes of .nv.info
SYSTEM_SHARED = 1024  # bytes of a block that the system keeps, from sm_90 on
LOAD_LOCAL, STORE_LOCAL = 0x983, 0x387  # opcodes, the low 12 bits of a 16-byte instruction


class UnreadableError(Exception):
    """One sentence that says what is wrong with a file."""


@dataclasses.dataclass(frozen=True)
class Kernel:
    name: str  # short, for people: short_names()
    arch: str  # "sm_90"
    registers: int
    stack: int  # bytes a thread
    loads: int  # instructions that read local memory: spilled registers, or arrays that are no registers
    stores: int
    shared: int  # static bytes a block
    fingerprint: str  # of the instructions and constants


def find_objects(path):
    """A file, or the compiled .cu files (else the libraries and programs) of a build folder."""
    if os.path.isfile(path):
        return [path]
    objects, others = [], []
    for folder, _, names in os.walk(path):
        for name in sorted(names):
            full = os.path.join(folder, name)
            if name.endswith((".cu.o", ".cu.obj")):
                objects.append(full)
            elif re.fullmatch(r"libflashqla\.(a|so)|flashqla", name) and os.path.isfile(full):
                others.append(full)
    return objects or others


def kernels_of(paths):
    """Every kernel of the files, by (name, arch). The same kernel in two files has to be the same code."""
    found = {}
    raw = [kernel for path in paths for kernel in raw_kernels(path)]
    names = short_names({mangled for mangled, _ in raw})
    for mangled, kernel in raw:
        kernel = dataclasses.replace(kernel, name=names[mangled])
        other = found.setdefault((kernel.name, kernel.arch), kernel)
        if other.fingerprint != kernel.fingerprint:
            both = sorted([other.fingerprint, kernel.fingerprint])
            mixed = hashlib.sha256("".join(both).encode()).hexdigest()[:16]
            worst = {
                field: max(getattr(other, field), getattr(kernel, field))
                for field in ("registers", "stack", "loads", "stores", "shared")
            }
            found[kernel.name, kernel.arch] = dataclasses.replace(kernel, fingerprint=mixed, **worst)
    return found


def raw_kernels(path):
    with open(path, "rb") as file:
        data = file.read()
    try:
        return [item for arch, image in images(data) for item in kernels_of_image(image, arch)]
    except (struct.error, IndexError) as error:
        raise UnreadableError(f"{path}: its GPU code cannot be read ({error})") from None
    except UnreadableError as error:
        raise UnreadableError(f"{path}: {error}") from None


def images(data):
    """(arch, ELF image) of every fat binary in the bytes of a file, whatever kind of file it is."""
    at = data.find(FATBIN_MAGIC)
    while at >= 0:
        (size,) = struct.unpack_from("<Q", data, at + 8)
        begin, end = at + 16, at + 16 + size
        while begin < end:
            kind, _, header, stored, packed = struct.unpack_from("<HHIQI", data, begin)
            arch, flags = struct.unpack_from("<I", data, begin + 28)[0], struct.unpack_from("<Q", data, begin + 40)[0]
            if header < 64:
                raise UnreadableError(f"a fat binary's entry has a header of {header} bytes; at least 64 are needed")
            if kind == KIND_ELF:
                image = data[begin + header : begin + header + stored]
                if flags & ZSTD:
                    image = unzstd(image[:packed], struct.unpack_from("<Q", data, begin + 56)[0])
                elif flags & LZ4:
                    raise UnreadableError("its GPU code is compressed with LZ4; compile without --compress-mode=speed")
                yield f"sm_{arch}", image
            begin += header + stored
        at = data.find(FATBIN_MAGIC, end if end > at else at + 1)


def unzstd(packed, size):
    name = ctypes.util.find_library("zstd") or "libzstd.so.1"
    try:
        library = ctypes.CDLL(name)
    except OSError:
        raise UnreadableError(
            "its GPU code is compressed, and there is no libzstd here; compile with --compress-mode=none"
        ) from None
    library.ZSTD_decompress.restype = ctypes.c_size_t
    library.ZSTD_decompress.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p, ctypes.c_size_t]
    buffer = ctypes.create_string_buffer(size)
    if library.ZSTD_decompress(buffer, size, packed, len(packed)) != size:
        raise UnreadableError("its compressed GPU code is damaged")
    return buffer.raw


@dataclasses.dataclass
class Section:
    name: str
    size: int
    content: bytes


def sections_of(image):
    if image[:5] != b"\x7fELF\x02":
        raise UnreadableError("an image in its fat binary is no 64-bit ELF file")
    (table,) = struct.unpack_from("<Q", image, 40)
    entry, count, names_at = struct.unpack_from("<HHH", image, 58)
    headers = [struct.unpack_from("<IIQQQQIIQQ", image, table + i * entry) for i in range(count)]
    names = headers[names_at][4]
    sections = []
    for name, kind, _, _, offset, size, *_ in headers:
        begin = names + name
        text = image[begin : image.index(b"\0", begin)].decode()
        content = b"" if kind == 8 else image[offset : offset + size]  # 8: memory without bytes in the file
        sections.append(Section(text, size, content))
    return sections


def attributes_of(info, wanted):
    """{symbol: value} of an attribute in .nv.info."""
    values, at = {}, 0
    while at + 4 <= len(info):
        form, attribute, size = struct.unpack_from("<BBH", info, at)
        at += 4
        if form != 4:  # a value in place of the size
            continue
        if attribute == wanted and size >= 8:
            symbol, value = struct.unpack_from("<II", info, at)
            values[symbol] = value
        at += size
    return values


def kernels_of_image(image, arch):
    sections = sections_of(image)
    by_name = {section.name: section for section in sections}
    symbols, strings = by_name[".symtab"].content, by_name[".strtab"].content
    index = {}
    for i in range(len(symbols) // 24):
        (name,) = struct.unpack_from("<I", symbols, 24 * i)
        index.setdefault(strings[name : strings.index(b"\0", name)].decode(), []).append(i)
    info = by_name[".nv.info"].content if ".nv.info" in by_name else b""
    registers, frames = attributes_of(info, REGISTERS), attributes_of(info, FRAME_SIZE)

    texts = {s.name[len(".text.") :]: s for s in sections if s.name.startswith(".text.")}
    entries = [name for name in texts if f".nv.constant0.{name}" in by_name]
    # A function that is no kernel may be called by any kernel of the image.
    functions = b"".join(texts[name].content for name in sorted(texts) if name not in entries)
    for name in entries:
        code = texts[name].content
        opcodes = [word & 0xFFF for word, _ in struct.iter_unpack("<QQ", code[: len(code) // 16 * 16])]
        constant = re.compile(rf"\.nv\.constant[1-9]\.{re.escape(name)}")
        constants = b"".join(section.content for section in sections if constant.fullmatch(section.name))
        shared = by_name[f".nv.shared.{name}"].size if f".nv.shared.{name}" in by_name else 0
        if ".nv.shared.reserved.0" in by_name:
            shared = max(shared - SYSTEM_SHARED, 0)
        used = max((registers.get(i, 0) for i in index.get(name, [])), default=0)
        digest = hashlib.sha256(b"\0".join([code, functions, constants, f"{used} {shared}".encode()]))
        yield (
            name,
            Kernel(
                name=name,
                arch=arch,
                registers=used,
                stack=max((frames.get(i, 0) for i in index.get(name, [])), default=0),
                loads=opcodes.count(LOAD_LOCAL),
                stores=opcodes.count(STORE_LOCAL),
                shared=shared,
                fingerprint=digest.hexdigest()[:16],
            ),
        )


def without_file_names(mangled):
    """Unnamed namespaces carry a hash of the file's path; here they are all alike."""
    while True:
        match = re.search(r"(\d+)(?=_GLOBAL__N__)", mangled)
        if not match:
            return mangled
        mangled = mangled[: match.start()] + "12_GLOBAL__N_1" + mangled[match.end() + int(match.group()) :]


def short_names(mangled):
    """Demangled, without what every kernel has in common: return type, namespaces of the project, arguments."""
    ordered = sorted(mangled)
    if not ordered:
        return {}
    text = "\n".join(map(without_file_names, ordered))
    try:
        lines = subprocess.run(["c++filt"], input=text, capture_output=True, text=True, check=True).stdout.split("\n")
    except (OSError, subprocess.CalledProcessError):
        raise UnreadableError("c++filt cannot be run; it belongs to the compiler's binutils") from None
    return {name: short_name(line) for name, line in zip(ordered, lines)}


def short_name(demangled):
    text = demangled.replace("(anonymous namespace)::", "")
    depth, end = 0, len(text)
    for i, char in enumerate(text):
        if char == "<":
            depth += 1
        elif char == ">":
            depth -= 1
        elif char == "(" and depth == 0:
            end = i
            break
    text = re.sub(r"\bflashqla::(cuda::)?", "", text[:end])
    return re.sub(r"^(void|auto) ", "", text.strip())
