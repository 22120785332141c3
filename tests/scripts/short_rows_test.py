"""bench/short_rows.py: the ablations of a row, and what is said of it."""

import os
import sys
import unittest

BENCH = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "bench")
sys.path.insert(0, BENCH)
import grid  # noqa: E402
import short_rows  # noqa: E402


def record(lens, heads_k, heads_v, ms):
    return {"model": "m", "lens": lens, "heads_k": heads_k, "heads_v": heads_v, "ratio": 1.0, "ms": ms}


class ShortRows(unittest.TestCase):
    def test_cases_are_known_again(self):
        fixed, whole = short_rows.cases_of(record("8192+24576", 4, 16, 0.3))
        self.assertEqual(grid.key_of_case(fixed), ((64, 64), 4, 16, 128, 128))
        self.assertEqual(grid.key_of_case(whole), ((8192, 24576), 4, 16, 128, 128))
        self.assertTrue(whole.endswith(",split=1"))

    def test_chains(self):
        self.assertEqual(short_rows.chain_of([1024], 8), 16)
        self.assertEqual(short_rows.chain_of([1024] * 2, 64), 16)
        self.assertEqual(short_rows.chain_of([1024] * 3, 64), 32)  # 192 items
        self.assertEqual(short_rows.chain_of([65, 1], 8), 2)

    def test_what_is_said(self):
        fixed = short_rows.explain(record("1024", 2, 8, 0.06), 0.025, 0.06)
        self.assertIn("25 of 60 us", fixed["why"])
        cut = short_rows.explain(record("32768", 2, 8, 0.2), 0.025, 1.2)
        self.assertTrue(cut["cut"])
        self.assertIn("instead of 1200", cut["why"])
        full = short_rows.explain(record("8192+8192", 16, 64, 0.345), 0.025, 0.345)
        self.assertFalse(full["cut"])
        self.assertEqual(full["chain"], 128)
        self.assertAlmostEqual(full["step_us"], 320 / 127, places=3)

    def test_rows_of_the_grid_are_read(self):
        rows = short_rows.short_rows(short_rows.ROWS)
        self.assertTrue(rows)
        self.assertTrue(all(r["ratio"] < grid.GOALS["fwd"][0] for r in rows))


if __name__ == "__main__":
    unittest.main()
