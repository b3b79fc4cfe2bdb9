# SPDX-License-Identifier: Apache-2.0
"""test/gpu/grid.py and rows.py on emulated GPUs: small cells in all forms, and that a wrong result is found. The times
mean nothing there."""
import json
import pathlib
import sys
import tempfile
import unittest
from unittest import mock

import ranks
import torch

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "gpu"))
import grid  # noqa: E402
import grid_ways  # noqa: E402
import rows as rows_script  # noqa: E402

SMALL = {"tiny": (("up", grid.GATHER, 512, 128), ("down", grid.SCATTER, 128, 256))}
TIERS = (((128, 200), "forward", True, "nk"), ((64,), "both", False, "kn"), ((64,), "both", True, "nk"))


def options_of(folder, *arguments):
    options = grid.parsed(["--out", str(folder), "--rounds", "1", "--no-symm", "--budget-s", "1e6", *arguments])
    options.model, options.rotate, options.warmup = ["tiny"], 1, 1
    return options


class Grid(unittest.TestCase):
    def setUp(self):
        for name, value in (("MODELS", SMALL), ("TIERS", TIERS), ("POWERS", (128,))):
            self.enterContext(mock.patch.object(grid, name, value))
        self.enterContext(mock.patch.object(grid.cells_of, "__defaults__", (TIERS,)))
        self.folder = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))

    def measured(self, *arguments):
        options = options_of(self.folder, *arguments)
        return ranks.run(2, lambda group: grid.measure(group, grid.Emulated(group), options))

    def test_every_cell_is_timed_and_checked(self):
        rows, left = self.measured()[0]
        self.assertEqual((len(rows), left), (8, []))
        for row in rows:
            self.assertTrue(row["checked"], row)
            self.assertTrue(all(row[f"{name}_us"] > 0 for name in grid.NAMES if name != "symm"), row)
            self.assertGreaterEqual(row["limit_us"], row["product_us"])
        file = json.loads((self.folder / "grid-2xemulated.json").read_text())
        self.assertEqual(len(file["rows"]), 12)  # with the layers
        self.assertTrue(any("8 cells within 2 %" in line for line in grid.summary(rows)))

    def test_e4m3_has_the_same_rows(self):
        def multiply(numbers, a, b):  # torch has only a tensor's scale on CPUs
            return (numbers.wide(a) @ numbers.wide(b)).to(grid_ways.TYPE)
        self.enterContext(mock.patch.object(grid_ways.E4m3, "multiply", multiply))
        for scaling, number in grid_ways.SCALINGS.items():
            rows, left = self.measured("--dtype", "e4m3", "--scaling", scaling, "--tokens", "128")[0]
            self.assertEqual((len(rows), left), (2, []))
            for row in rows:
                self.assertTrue(row["checked"], row)
                self.assertEqual(row["scaling"], number)
                self.assertTrue(all(row[f"{name}_us"] > 0 for name in grid.NAMES if name != "symm"), row)
            lines = list(grid.table_lines(self.folder / "grid-fp8-2xemulated.json"))
            self.assertEqual([line.split()[-3] for line in lines], [str(number)] * 2)

    def test_a_plan_is_launched_with_fewer_rows(self):
        self.enterContext(mock.patch.multiple(rows_script, MOST=1024, TIERS=(((128, 600), "forward", True, "nk"),)))
        options = options_of(self.folder)
        rows, left = ranks.run(2, lambda group: grid.measure(group, grid.Emulated(group), options, rows_script.RUN))[0]
        self.assertEqual((len(rows), left), (4, []))
        for row in rows:
            self.assertTrue(row["checked"], row)
            self.assertTrue(all(row[f"{name}_us"] > 0 for name in rows_script.WAYS), row)
            self.assertIn(row["path"], (grid.FUSED, grid.UNFUSED))
        file = json.loads((self.folder / "rows-2xemulated.json").read_text())
        self.assertEqual((len(file["rows"]), file["command"].split()[0]), (4, "test/gpu/rows.py"))
        fused = sum(row["path"] == grid.FUSED for row in rows)
        self.assertEqual(sum(int(line.split()[2]) for line in rows_script.summary(rows)), fused)

    def test_a_wrong_result_is_found(self):
        right = grid_ways.Planned._launch

        def wrong(way, op, a, b, c, gathered=None):
            right(way, op, a, b, c, gathered)
            if way.tuning["path"] == grid.FUSED and way.x.group.rank == 1:
                c[-1, -1] += 4
            return c

        def unwritten(way, op, a, b, c, gathered=None):
            if way.calls > 3:
                return c
            way.calls += 1
            return right(way, op, a, b, c, gathered)
        for launch in (wrong, unwritten):
            with mock.patch.multiple(grid_ways.Planned, create=True, _launch=launch, calls=0):
                for rows, _ in self.measured("--tokens", "128", "--op", "up"):
                    self.assertFalse(rows[0]["checked"], launch.__name__)
                    self.assertGreater(rows[0]["errors"]["fused"], 1, launch.__name__)

    def test_a_sweep_times_the_candidates(self):
        self.measured("--tokens", "128")
        rows, left = self.measured("--sweep", "--tokens", "128", "--from", str(self.folder / "grid-2xemulated.json"))[1]
        self.assertEqual(len(left), 0)
        for row in rows:
            self.assertTrue(row["checked"], row)
            self.assertGreater(row["candidates"], 4)
            self.assertEqual(len({json.dumps({**best, "us": 0, "first_us": 0}) for best in row["best"]}),
                             len(row["best"]))
            self.assertEqual([best["us"] for best in row["best"]], sorted(best["us"] for best in row["best"]))
        self.assertEqual(len(list(grid.table_lines(self.folder / "grid-2xemulated.json"))), 2)
        lines = list(grid.table_lines(self.folder / "sweep-2xemulated.json"))
        self.assertEqual(len(lines), len(rows))
        for line, row in zip(lines, rows):
            self.assertRegex(line, r"^v8 emulated_GPU \d+ [12] 128 \d+ \d+ [01] 2 1 : [12]( \d+){7} \d+\.\d+ 0 "
                                   r"\d+\.\d+ \d+$")
            self.assertGreater(row["other_us"], 0)
            self.assertIn(f" 128 {row['n']} {row['k']} ", line)

    def test_the_table_of_the_library_has_only_entries(self):
        shapes = set()
        for line in (grid.ROOT / "fused/gemm/table.txt").read_text().splitlines():
            if not line.startswith("#"):
                entry = r"\S+ \d+ [123]( [1-9]\d*){3} [01] [248] [1-9]\d* : [12]( \d+){7} \d+(\.\d+)?"
                last = r"( [0-3]( \d+\.\d+( (0|192|256))?)?)?"
                self.assertRegex(line, rf"^v[5-8] {entry}{last}$")
                self.assertEqual(len(line.split()), {"v5": 20, "v6": 21, "v7": 22, "v8": 23}[line[:2]])
                numbers = line.split(": ")[1].split()
                key = (line.partition(":")[0].partition(" ")[2], numbers[9] if len(numbers) > 9 else "0")
                self.assertNotIn(key, shapes)
                shapes.add(key)
        self.assertGreater(len(shapes), 0)

    def test_what_the_budget_leaves_out_is_named(self):
        rows, left = self.measured("--budget-s", "0")[0]
        self.assertEqual((rows, len(left)), ([], 8))
        self.assertIn("tiny up 128 forward graph nk", left)


if __name__ == "__main__":
    torch.set_num_threads(1)
    ranks.main()
