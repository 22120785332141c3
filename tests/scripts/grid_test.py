"""bench/grid.py and bench/widths.py: the rows they time, and what is made of the figures."""

import contextlib
import io
import json
import os
import sys
import tempfile
import unittest

BENCH = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "bench")
sys.path.insert(0, BENCH)
import grid  # noqa: E402
import widths  # noqa: E402

PEERS = os.path.join(grid.RESULTS, "peers_h200.csv")


class Grid(unittest.TestCase):
    def test_all_rows(self):
        self.assertEqual(171, len(grid.read_peers(PEERS, "fwd")))
        self.assertEqual(32, len(grid.read_peers(PEERS, "bwd")))

    def test_best_peer_is_the_best(self):
        import csv

        with open(PEERS, encoding="utf-8", newline="") as lines:
            for row in csv.DictReader(lines):
                times = [float(row[name]) for name in row if name.endswith("_ms") and name != "best_ms" and row[name]]
                self.assertLessEqual(float(row["best_ms"]), min(times) * 1.0001, row)

    def test_lengths_and_labels_agree(self):
        for short in grid.PASSES.values():
            for row in grid.read_peers(PEERS, short):
                total, label = sum(row["lens"]), row["label"]
                if short == "bwd":
                    self.assertEqual(f"{total // 1024}k_{len(row['lens'])}seq", label)
                elif "+" in label:
                    self.assertEqual(row["lens"], grid.lengths(label))
                else:
                    first, _, second = label.partition("x")
                    self.assertEqual(total, int(first) * int(second))

    def test_cases_come_back(self):
        keys = set()
        for short in grid.PASSES.values():
            for row in grid.read_peers(PEERS, short):
                case = grid.case_of(row, short)
                self.assertEqual(grid.key_of_row(row), grid.key_of_case(case))
                keys.add((short, case))
        self.assertEqual(203, len(keys))
        # The tool's own form of a line.
        self.assertEqual(
            ((100, 100, 37), 2, 4, 128, 128), grid.key_of_case("fwd:t237,hk2,hv4,k128,v128,bf16,gate=log,lens=100x2+37")
        )
        self.assertEqual(((512,), 3, 3, 96, 192), grid.key_of_case("fwd:b1,t512,hk3,hv3,k96,v192"))

    def test_judging_and_keeping(self):
        row = grid.read_peers(PEERS, "fwd")[0]  # one sequence of 32768, 8 value heads
        record = {"case": "x", "ms": 0.2, "bytes": 1.0}
        judged = grid.judge(row, record, "fwd")
        self.assertEqual(4096, grid.chunk_heads(row))
        self.assertAlmostEqual(0.2e3 * 132 / 4096, judged["us_per_chunk_sm"], places=2)
        self.assertAlmostEqual(row["peer_ms"] / 0.2, judged["ratio"], places=3)
        self.assertAlmostEqual(10.49e6 * 4096 / 790e12 * 1e3, judged["floor_ms"], places=4)
        self.assertGreater(grid.judge(row, {**record, "bytes": 4.3e8}, "fwd")["floor_ms"], 0.0999)
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "out.jsonl")
            grid.keep(path, [judged, {**judged, "heads_v": 99}])
            grid.keep(path, [{**judged, "ms": 0.1}])
            with open(path, encoding="utf-8") as lines:
                self.assertEqual([0.1, 0.2], [json.loads(line)["ms"] for line in lines])
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            grid.report([judged], "fwd")
        self.assertIn("geometric mean", out.getvalue())

    def test_fla_on_the_same_card_counts_when_it_is_faster(self):
        rows = grid.read_peers(PEERS, "fwd")[:1]
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "fla.jsonl")
            with open(path, "w", encoding="utf-8") as lines:
                lines.write(
                    json.dumps({"pass": "fwd", "lens": "32768", "heads_k": 2, "heads_v": 8, "ms": 0.001}) + "\n"
                )
            grid.use_fla_here(path, "fwd", rows)
        self.assertEqual(("fla", 0.001, 0.001), (rows[0]["peer"], rows[0]["peer_ms"], rows[0]["fla_ms"]))


class Widths(unittest.TestCase):
    table = os.path.join(BENCH, "widths.csv")

    def rows(self):
        return [(short, row) for short in grid.PASSES.values() for row in grid.read_peers(self.table, short)]

    def test_each_size_in_both_passes_with_few_and_many_heads(self):
        rows = self.rows()
        self.assertEqual(len(rows), len({(short, grid.key_of_row(row)) for short, row in rows}))
        for short in grid.PASSES.values():
            heads = {}
            for _, row in (item for item in rows if item[0] == short):
                self.assertEqual(grid.key_of_row(row), grid.key_of_case(grid.case_of(row, short)))
                heads.setdefault(row["dims"], set()).add(row["heads"])
            self.assertEqual({(64, 64), (96, 192), (256, 512)}, set(heads))
            self.assertTrue(all(len(each) > 1 for each in heads.values()))

    def test_merging_and_keeping(self):
        rows = self.rows()[:4]
        cases = [grid.case_of(row, short) for short, row in rows]
        ours = [{"case": case, "pass": "fwd", "ms": 0.5, "commit": "abc", "driver": "1"} for case in cases[:2]]
        messages = [f"flashqla: {cases[2]}: no backend: too large", "flashqla: out of memory"]
        fla = {("fwd", grid.key_of_row(rows[0][1])): {"ms": 1.0, "provider": "fla 0.6.0", "driver": "1"}}
        fla["fwd", grid.key_of_row(rows[1][1])] = {"ms": None, "error": "OutOfResources: shared memory"}
        first, second, third, fourth = results = widths.merge(rows, ours, messages, fla, "no time left")
        self.assertEqual((0.5, 1.0, 2.0, "fla 0.6.0"), tuple(first[x] for x in ("ms", "fla_ms", "ratio", "provider")))
        self.assertFalse({"error", "fla_error"} & set(first))
        self.assertEqual((None, "OutOfResources: shared memory"), (second["ratio"], second["fla_error"]))
        self.assertEqual(("no backend: too large", "no time left"), (third["error"], third["fla_error"]))
        self.assertEqual("abc", third["commit"])
        self.assertEqual("out of memory", fourth["error"])
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            widths.report(results)
        self.assertIn("geometric mean 2.000, smallest 2.000, 1 of 4 rows", out.getvalue())
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "out.jsonl")
            grid.keep(path, [*results, {**first, "pass": "bwd"}])
            grid.keep(path, [{**first, "ms": 0.4}])
            with open(path, encoding="utf-8") as lines:
                self.assertEqual([0.4, 0.5, None, None, 0.5], [json.loads(line)["ms"] for line in lines])


if __name__ == "__main__":
    unittest.main()
