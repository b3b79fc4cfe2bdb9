# SPDX-License-Identifier: Apache-2.0
"""test/gpu/serving.py on emulated GPUs: small models in all forms, and that a wrong result is found. The times mean
nothing there."""
import json
import pathlib
import sys
import tempfile
import unittest
from unittest import mock

import ranks

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "gpu"))
import grid  # noqa: E402
import serving  # noqa: E402
import serving_ways  # noqa: E402

SMALL = {"dense": serving_ways.Sizes(256, 4, 2, 256), "moe": serving_ways.Sizes(128, 2, 1, 64, 8, 2)}
CELLS = [serving.Cell("dense", "decode", 3), serving.Cell("dense", "prefill", 20), serving.Cell("moe", "decode", 5)]


class Serving(unittest.TestCase):
    def setUp(self):
        self.enterContext(mock.patch.object(serving, "MODELS", SMALL))
        self.folder = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))

    def measured(self, cells):
        options = serving.parsed(["--out", str(self.folder), "--rounds", "2", "--no-symm", "--layers", "2", "--context",
                                  "10", "--budget-s", "1e6"])
        options.model, options.cells = list(SMALL), cells
        return ranks.run(2, lambda group: serving.measure(group, grid.Emulated(group), options))

    def test_every_cell_is_timed_and_checked(self):
        rows, left = self.measured(CELLS)[0]
        self.assertEqual((len(rows), left), (3, []))
        for row in rows:
            self.assertTrue(row["checked"], row)
            self.assertNotIn("failed", row)
        self.assertEqual([set(row["ways"]) for row in rows],
                         [{"perseus", "perseus_apart", "perseus_after", "nccl"}] * 2 + [{"perseus", "nccl"}])
        self.assertEqual(len(json.loads((self.folder / "serving-2xemulated.json").read_text())["rows"]), 3)

    def test_a_wrong_result_is_found(self):
        right = serving_ways.Perseus.__call__

        def wrong(way, a, w, residual, norm):
            h, residual = right(way, a, w, residual, norm)
            h[-1, -1] += 8 if way.group.rank == 1 else 0
            return h, residual
        with mock.patch.object(serving_ways.Perseus, "__call__", wrong):
            for rows, _ in self.measured(CELLS[:1]):
                self.assertFalse(rows[0]["checked"])
                self.assertGreater(rows[0]["error"]["perseus"], 1)
                self.assertLessEqual(rows[0]["error"]["nccl"], 1)


if __name__ == "__main__":
    ranks.main()
