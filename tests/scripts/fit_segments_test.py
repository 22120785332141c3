"""bench/fit_segments.py: it reads the plan's constants and asks the plan's model."""

import os
import sys
import tempfile
import unittest

BENCH = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "bench")
sys.path.insert(0, BENCH)
import fit_segments  # noqa: E402

CUTS = os.path.join(BENCH, "results", "h200_segments.jsonl")


class FitSegments(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.folder = tempfile.TemporaryDirectory()
        cls.addClassCleanup(cls.folder.cleanup)
        cls.program = fit_segments.compile_model(cls.folder.name, os.environ.get("CXX", "c++"))
        cls.cuts = fit_segments.read_cuts(CUTS)

    def test_questions(self):
        one = next(cut for cut in self.cuts if "hv32" in cut["name"] and "32768" in cut["name"] and cut["split"] == 8)
        self.assertEqual(one["question"], (32, 512, 24, 24 * 7, 64))
        self.assertTrue(all(cut["us"] > 0 for cut in self.cuts))

    def test_the_model_speaks_of_what_was_measured(self):
        times = fit_segments.predict(self.program, fit_segments.constants_of_plan(), self.cuts)
        self.assertEqual(len(times), len(self.cuts))
        self.assertLess(fit_segments.error(times, self.cuts), 0.1)

    def test_a_fit_comes_closer(self):
        start = (3.0, 5.0, 2.5, 5.0, 4.0, 2.0, 10.0)
        fitted = fit_segments.fit(self.program, start, self.cuts, 20)

        def error(constants):
            return fit_segments.error(fit_segments.predict(self.program, constants, self.cuts), self.cuts)

        self.assertLess(error(fitted), error(start))


if __name__ == "__main__":
    unittest.main()
