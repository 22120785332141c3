"""scripts/device_code.py, scripts/ptxas_budget and scripts/gpu_evidence on made-up GPU code."""

import contextlib
import importlib.machinery
import importlib.util
import io
import json
import os
import struct
import sys
import tempfile
import unittest

SCRIPTS = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "scripts")
sys.path.insert(0, SCRIPTS)
import device_code  # noqa: E402


def script(name):
    loader = importlib.machinery.SourceFileLoader(name, os.path.join(SCRIPTS, name))
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader(name, loader))
    loader.exec_module(module)
    return module


budget = script("ptxas_budget")
evidence = script("gpu_evidence")

PLAIN, LOAD, STORE = 0x7210, 0x7983, 0x7387  # instructions: the low 12 bits are the opcode


def elf(kernels, functions=(), sections=()):
    """An ELF image with kernels (name, registers, stack, shared, instructions, constant bytes)."""
    names, strings, symbols = b"\0", b"\0", b"\0" * 24
    info = b""
    contents = []  # name, type, bytes, size
    for i, (name, registers, stack, shared, code, constants) in enumerate(kernels, 1):
        symbols += struct.pack("<IBBHQQ", len(strings), 0x12, 0x10, i, 0, 0)
        strings += name.encode() + b"\0"
        info += struct.pack("<BBHII", 4, 0x2F, 8, i, registers) + struct.pack("<BBHII", 4, 0x11, 8, i, stack)
        text = b"".join(struct.pack("<QQ", word, i) for word in code)
        contents.append((f".text.{name}", 1, text, len(text)))
        contents.append((f".nv.constant0.{name}", 1, b"\0" * 16, 16))
        if constants:
            contents.append((f".nv.constant2.{name}", 1, constants, len(constants)))
        if shared:
            contents.append((f".nv.shared.{name}", 8, b"", shared))
    for name, code in functions:
        text = b"".join(struct.pack("<QQ", word, 0) for word in code)
        contents.append((f".text.{name}", 1, text, len(text)))
    contents += sections
    info = struct.pack("<BBH", 3, 0x1B, 0xFF) + info
    contents += [
        (".nv.info", 1, info, len(info)),
        (".symtab", 2, symbols, len(symbols)),
        (".strtab", 3, strings, len(strings)),
    ]
    body, headers = b"", [struct.pack("<IIQQQQIIQQ", 0, 0, 0, 0, 0, 0, 0, 0, 0, 0)]
    for name, kind, content, size in contents:
        headers.append(struct.pack("<IIQQQQIIQQ", len(names), kind, 0, 0, 64 + len(body), size, 0, 0, 1, 0))
        names += name.encode() + b"\0"
        body += content
    headers.append(struct.pack("<IIQQQQIIQQ", len(names), 3, 0, 0, 64 + len(body), 0, 0, 0, 1, 0))
    names += b".shstrtab\0"
    body += names
    start = b"\x7fELF\x02\x01\x01".ljust(16, b"\0")
    start += struct.pack(
        "<HHIQQQIHHHHHH", 2, 190, 1, 0, 0, 64 + len(body), 0, 64, 0, 0, 64, len(headers), len(headers) - 1
    )
    return start + body + b"".join(headers)


def fatbin(images, flags=0x11):
    entries = b""
    for arch, image in images:
        header = struct.pack("<HHIQI", 2, 0x101, 64, len(image), 0).ljust(28, b"\0") + struct.pack("<I", arch)
        entries += header.ljust(40, b"\0") + struct.pack("<QQQ", flags, 0, 0) + image
    return b"noise" * 7 + struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(entries)) + entries + b"noise"


A = ("_ZN8flashqla4cuda4sm808a_kernelILi64EEEvi", 40, 0, 256, [PLAIN, PLAIN], b"")
B = ("_ZN8flashqla4cuda4sm808b_kernelEi", 96, 16, 0, [PLAIN, LOAD, STORE, LOAD], b"")
A_NAME, B_NAME = "sm80::a_kernel<64>", "sm80::b_kernel"


class WithFiles(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = folder.name

    def file(self, name, content):
        path = os.path.join(self.folder, name)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "wb") as file:
            file.write(content)
        return path

    def kernels(self, *images, flags=0x11):
        return device_code.kernels_of([self.file("x.cu.o", fatbin(images, flags))])


class DeviceCode(WithFiles):
    def test_kernels_of_every_architecture(self):
        found = self.kernels((80, elf([A, B])), (90, elf([A])))
        self.assertEqual({(A_NAME, "sm_80"), (B_NAME, "sm_80"), (A_NAME, "sm_90")}, set(found))
        a, b = found[A_NAME, "sm_80"], found[B_NAME, "sm_80"]
        self.assertEqual((40, 0, 0, 0, 256), (a.registers, a.stack, a.loads, a.stores, a.shared))
        self.assertEqual((96, 16, 2, 1, 0), (b.registers, b.stack, b.loads, b.stores, b.shared))

    def test_shared_memory_of_the_system_does_not_count(self):
        reserved = (".nv.shared.reserved.0", 8, b"", 0)
        kernel = (*A[:3], 1024 + 256, *A[4:])
        found = self.kernels((90, elf([kernel], sections=[reserved])))[A_NAME, "sm_90"]
        self.assertEqual(256, found.shared)

    def test_fingerprint_follows_code_constants_registers_and_called_functions(self):
        def print_of(kernel, functions=()):
            return self.kernels((90, elf([kernel], functions)))[A_NAME, "sm_90"].fingerprint

        name, registers, stack, shared, code, constants = A
        base = print_of(A)
        self.assertEqual(base, print_of(A))
        self.assertEqual(16, len(base))
        others = [
            print_of((name, registers, stack, shared, [*code, PLAIN], constants)),
            print_of((name, registers, stack, shared, code, b"\1\2\3\4")),
            print_of((name, registers + 1, stack, shared, code, constants)),
            print_of((name, registers, stack, shared + 16, code, constants)),
            print_of(A, [("helper", [PLAIN])]),
        ]
        self.assertEqual(6, len({base, *others}))

    def test_another_kernel_in_the_file_changes_nothing(self):
        alone = self.kernels((90, elf([A])))[A_NAME, "sm_90"].fingerprint
        beside = self.kernels((90, elf([A, B])))[A_NAME, "sm_90"].fingerprint
        self.assertEqual(alone, beside)

    def test_unnamed_namespaces_do_not_carry_the_files_path(self):
        one = "_ZN34_GLOBAL__N__daeddd0d_8_spill_cu_go12local_kernelILi32EEEvPfPKi"
        two = "_ZN34_GLOBAL__N__0123abcd_8_spill_cu_go12local_kernelILi32EEEvPfPKi"
        names = device_code.short_names({one, two})
        self.assertEqual({"local_kernel<32>"}, set(names.values()))

    def test_short_names(self):
        for long, short in {
            "void flashqla::cuda::sm90::chunk<(flashqla::DType)3, true>(int)": "sm90::chunk<(DType)3, true>",
            "flashqla::cuda::plain(int)": "plain",
            "void (anonymous namespace)::f<(anonymous namespace)::T>(float*)": "f<T>",
        }.items():
            self.assertEqual(short, device_code.short_name(long))

    def test_the_same_kernel_in_two_files(self):
        first = self.file("a.cu.o", fatbin([(90, elf([A]))]))
        second = self.file("b.cu.o", fatbin([(90, elf([(*A[:4], [PLAIN] * 5, b"")]))]))
        alone = device_code.kernels_of([first])[A_NAME, "sm_90"].fingerprint
        both = device_code.kernels_of([first, second])[A_NAME, "sm_90"].fingerprint
        self.assertNotEqual(alone, both)
        self.assertEqual(both, device_code.kernels_of([second, first])[A_NAME, "sm_90"].fingerprint)
        self.assertEqual(alone, device_code.kernels_of([first, first])[A_NAME, "sm_90"].fingerprint)

    def test_what_cannot_be_read_is_said_in_a_sentence(self):
        for images, flags, word in (
            ([(90, b"\0" * 256)], 0x11, "64-bit ELF"),
            ([(90, elf([A]))], 0x2011, "LZ4"),
            ([(90, elf([A])[:200])], 0x11, "cannot be read"),
        ):
            with self.assertRaisesRegex(device_code.UnreadableError, word):
                self.kernels(*images, flags=flags)
        self.assertEqual({}, device_code.kernels_of([self.file("none.cu.o", b"no GPU code")]))

    def test_objects_before_libraries(self):
        library = self.file("build/src/libflashqla.a", b"")
        self.assertEqual([library], device_code.find_objects(self.folder))
        compiled = self.file("build/src/cuda/x.cu.o", b"")
        self.assertEqual([compiled], device_code.find_objects(self.folder))
        self.assertEqual([library], device_code.find_objects(library))


class Budget(WithFiles):
    def setUp(self):
        super().setUp()
        self.now = budget.Budget.of(self.kernels((80, elf([A, B])), (90, elf([A, B]))), "13.0.88")

    def again(self):
        return budget.Budget.read(self.file("budget.tsv", self.now.text().encode()))

    def test_what_is_written_is_read(self):
        read = self.again()
        self.assertEqual((self.now.rows, self.now.archs, "13.0.88"), (read.rows, read.archs, read.compiler))
        self.assertEqual(([], []), budget.compare(self.now, read))
        self.assertEqual({"sm_80": "96+16:2/1", "sm_90": "96+16:2/1"}, read.rows[B_NAME][1])

    def test_more_of_anything_is_a_fault(self):
        for cell, word in (("39", "40 registers; the budget is 39"),):
            read = self.again()
            read.rows[A_NAME] = (256, {**read.rows[A_NAME][1], "sm_90": cell})
            faults, _ = budget.compare(self.now, read)
            self.assertEqual([f"{A_NAME} on sm_90: {word}"], faults)
        for cell, word in (("96+8:2/1", "stack"), ("96+16:1/1", "loads"), ("96+16:2/0", "stores"), ("96", "spills")):
            read = self.again()
            read.rows[B_NAME] = (0, {**read.rows[B_NAME][1], "sm_80": cell})
            faults, _ = budget.compare(self.now, read)
            self.assertTrue(faults and all("on sm_80" in fault for fault in faults))
            self.assertIn(word, " ".join(faults))
        read = self.again()
        read.rows[A_NAME] = (128, read.rows[A_NAME][1])
        self.assertEqual(
            [f"{A_NAME}: 256 bytes of static shared memory; the budget is 128"], budget.compare(self.now, read)[0]
        )

    def test_less_is_none(self):
        read = self.again()
        read.rows[A_NAME] = (512, {"sm_80": "64", "sm_90": "64+8:1/1"})
        faults, savings = budget.compare(self.now, read)
        self.assertEqual([], faults)
        self.assertEqual(2, len(savings))

    def test_kernels_that_come_and_go(self):
        read = self.again()
        del read.rows[A_NAME]
        self.assertIn("not in the budget", budget.compare(self.now, read)[0][0])
        read = self.again()
        read.rows["gone"] = (0, {"sm_80": "1"})
        self.assertIn("not in the build", budget.compare(self.now, read)[0][0])
        read = self.again()
        read.archs = ["sm_70"]
        self.assertIn("nothing to compare", budget.compare(self.now, read)[0][0])

    def test_a_broken_budget(self):
        with self.assertRaisesRegex(device_code.UnreadableError, "fields"):
            budget.Budget.read(self.file("bad.tsv", b"kernel\tshared\tsm_80\nx\t1\n"))
        with self.assertRaisesRegex(device_code.UnreadableError, "no cell"):
            budget.numbers_of("12+4")


class Evidence(WithFiles):
    def record(self, kernels, runs=None, arch="sm_90"):
        runs = runs or {"forward": {"passed": 3, "failed": 0}}
        return {"date": "2026-01-01", "commit": "abc", "gpu": "G", "arch": arch, "runs": runs, "kernels": kernels}

    def states(self, kernels, records):
        return {name: state for (name, _), (state, _) in evidence.compare(kernels, records).items()}

    def test_closing_lines(self):
        for text, counts in {
            "x\n7 passed, 0 failed\n": {"passed": 7, "failed": 0},
            "7 passed, 2 failed, 1 unsupported\n": {"passed": 7, "failed": 2, "unsupported": 1},
            "1 passed, 9 failed\nmore\nstreams: 4 passed, 0 failed\n": {"passed": 4, "failed": 0},
            "100% tests passed, 0 tests failed out of 12\n": {"passed": 12, "failed": 0},
            "3 passed, 0 failed\n========= ERROR SUMMARY: 2 errors\n": {
                "passed": 3,
                "failed": 0,
                "sanitizer_errors": 2,
            },
            "3 passed, 0 failed\n========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)\n": {
                "passed": 3,
                "failed": 0,
                "sanitizer_errors": 0,
            },
        }.items():
            self.assertEqual(counts, evidence.counts_of(text))
        self.assertEqual(1, evidence.counts_of("Segmentation fault\n")["failed"])
        self.assertEqual(1, evidence.counts_of("========= COMPUTE-SANITIZER\n3 passed, 0 failed\n")["failed"])

    def racecheck(self, reports, summary=None):
        """A log with reports, each a list of where the accesses are."""
        lines = ["========= COMPUTE-SANITIZER"]
        for first, *others in reports:
            lines.append(f"========= Error: Race reported between Write access at {first}+0x10")
            lines += [f"=========     and Read access at {other}+0x20 [64 hazards]" for other in others]
            lines.append("========= ")
        count = len(reports)
        summary = summary or f"{count} hazards displayed ({count} errors, 0 warnings)"
        return "\n".join([*lines, "9 passed, 0 failed", f"========= RACECHECK SUMMARY: {summary}"]) + "\n"

    def test_hazards_at_mbarriers(self):
        hopper = "void flashqla::cuda::sm90::chunk_kernel<Config<Bf16, (int)64>, (ChunkMode)0>(ChunkParams)"
        other = "void flashqla::cuda::sm80::chunk_kernel<Config<flashqla::cuda::sm90::X>>(ChunkParams)"
        for errors, excused, log in (
            (0, 0, self.racecheck([])),
            (0, 2, self.racecheck([[hopper, hopper], [hopper, hopper, hopper]])),
            # One name of another kernel, or one that cannot be read, and it is an error.
            (1, 1, self.racecheck([[hopper, hopper], [other, other]])),
            (1, 1, self.racecheck([[hopper, hopper, other], [hopper, hopper]])),
            (1, 0, self.racecheck([["0x10 in " + hopper, hopper]])),
            (1, 0, self.racecheck([[hopper]])),
            # What was not printed may be of any kernel.
            (51, 0, self.racecheck([[hopper, hopper]], "51 hazards displayed (51 errors, 0 warnings)")),
            (1, 0, self.racecheck([[hopper, hopper]], "1 hazard displayed (1 error, 0 warnings), 7 not displayed")),
            (1, 0, self.racecheck([[hopper, hopper]], "0 hazards displayed (0 errors, 0 warnings)")),
        ):
            counts = {"passed": 9, "failed": 0, "sanitizer_errors": errors}
            if excused:
                counts["hazards_at_mbarriers"] = excused
            self.assertEqual(counts, evidence.counts_of(log))
            record = self.record({}, {"racecheck cases": counts})
            self.assertEqual(errors == 0, evidence.is_good(record))
            text = f"{errors} sanitizer errors in 1" + (f" and {excused} hazards at mbarriers" if excused else "")
            self.assertTrue(evidence.summary_of(record).endswith(text), evidence.summary_of(record))

    def test_what_is_good(self):
        self.assertTrue(evidence.is_good(self.record({})))
        self.assertFalse(evidence.is_good({"runs": {}}))
        self.assertFalse(evidence.is_good(self.record({}, {"a": {"passed": 9, "failed": 1}})))
        self.assertFalse(evidence.is_good(self.record({}, {"a": {"passed": 9, "failed": 0, "sanitizer_errors": 1}})))

    def test_states(self):
        kernels = self.kernels((80, elf([A, B])), (90, elf([A, B])))
        right = kernels[A_NAME, "sm_90"].fingerprint
        bad = {"a": {"passed": 9, "failed": 1}}
        self.assertEqual({A_NAME: "fresh", B_NAME: "never"}, self.states(kernels, [self.record({A_NAME: right})]))
        self.assertEqual("stale", self.states(kernels, [self.record({A_NAME: "0" * 16})])[A_NAME])
        self.assertEqual("failed", self.states(kernels, [self.record({A_NAME: right}, bad)])[A_NAME])
        # The last record of the same code counts; a later record of other code does not make this code stale.
        self.assertEqual(
            "fresh", self.states(kernels, [self.record({A_NAME: right}, bad), self.record({A_NAME: right})])[A_NAME]
        )
        self.assertEqual(
            "failed", self.states(kernels, [self.record({A_NAME: right}), self.record({A_NAME: right}, bad)])[A_NAME]
        )
        self.assertEqual(
            "fresh", self.states(kernels, [self.record({A_NAME: right}), self.record({A_NAME: "0" * 16})])[A_NAME]
        )
        # A record on another architecture says nothing about this one.
        self.assertEqual({}, self.states(kernels, [self.record({A_NAME: right}, arch="sm_120")]))

    def test_the_architecture_that_ran(self):
        kernels = self.kernels((80, elf([A])), (86, elf([A])), (90, elf([A])))
        for capability, arch in (("9.0", "sm_90"), ("8.0", "sm_80"), ("8.9", "sm_86"), ("10.0", None)):
            self.assertEqual(arch, evidence.has_code(kernels, capability))

    def test_status_as_text(self):
        kernels = self.kernels((90, elf([A, B])))
        build = self.file("build/src/cuda/x.cu.o", fatbin([(90, elf([A, B]))]))
        right = kernels[A_NAME, "sm_90"].fingerprint
        path = self.file("e.jsonl", json.dumps(self.record({A_NAME: right, B_NAME: "old"})).encode() + b"\n")
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            sys.argv = ["gpu_evidence", "status", "--build", build, "--evidence", path]
            evidence.main()
        self.assertIn(f"stale  {B_NAME} on sm_90", out.getvalue())
        self.assertIn("2 kernels: 1 fresh, 1 stale, 0 in a failed run, 0 never run", out.getvalue())
        self.assertIn("3 passed, 0 failed in 1 runs", out.getvalue())


if __name__ == "__main__":
    unittest.main()
