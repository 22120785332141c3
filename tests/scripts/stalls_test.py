"""bench/stalls.py: it finds loops and reasons in a table as ncu prints it."""

import io
import os
import sys
import unittest

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "bench"))
import stalls

NAMES = '"Address","Source","# Samples","Instructions Executed","stall_wait","stall_long_sb","stall_wait (Not Issued)"'


def table():
    """A loop of three instructions, sixty that are executed once, and another loop."""
    loop = [("FADD R0, R1, R2", 10, 1000, 10, 0), ("LDG R3, [R4]", 0, 1000, 0, 0), ("FMUL R3, R3, R3", 70, 1000, 6, 64)]
    rows = [*loop, *[("NOP", 0, 1, 0, 0)] * 60, ("BAR.SYNC 0", 20, 500, 20, 0)]
    lines = [f'"{i}","{text}","{n}","{e}","{w}","{far}","{w}"' for i, (text, n, e, w, far) in enumerate(rows)]
    return "\n".join(["==PROF== something else", NAMES, *lines, ""])


class Stalls(unittest.TestCase):
    def test_loops(self):
        instructions = stalls.read_instructions(table())
        self.assertEqual(len(instructions), 64)
        self.assertEqual(stalls.loops_of(instructions), [(0, 3), (63, 64)])
        self.assertEqual(instructions[2]["stalls"], {"wait": 6.0, "long_sb": 64.0})

    def test_what_is_shown(self):
        out = io.StringIO()
        stalls.show(stalls.read_instructions(table()), 200, out)
        text = out.getvalue()
        self.assertIn("0 to 3: 80.0 % of the samples", text)
        self.assertIn("long_sb 80.0  wait 20.0", text)
        self.assertIn("FMUL R3, R3, R3", text)
        self.assertNotIn("FADD", text)

    def test_another_table(self):
        with self.assertRaisesRegex(ValueError, "source page"):
            stalls.read_instructions("a,b\n1,2\n")


if __name__ == "__main__":
    unittest.main()
