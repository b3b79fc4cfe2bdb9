#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""test/gpu/nccl_matrix.py, without a GPU: libraries that hold only names, and programs that print what NCCL would.

  test_nccl_matrix.py MATRIX PLUGIN CLAIM
"""
import json
import lzma
import pathlib
import subprocess
import sys
import tempfile

MATRIX, PLUGIN = sys.argv[1:3]
NET = b"NET/Plugin: Loaded net plugin %s (v12)\0"
RMA = b"RMA/Plugin: Loaded rma plugin %s (v16)\0"
NEW = [("Net", 12), ("Net", 11), ("Gin", 14), ("Gin", 13), ("Rma", 16), ("Rma", 15), ("Rma", 14), ("Rma", 13)]
OLD = [("Net", 7), ("Net", 6), ("Net", 5)]
LAUNCH = '#!/bin/sh\nwhile [ "$1" != -- ]; do shift; done\nshift\nexec "$@"\n'
RANKS = """#!/usr/bin/env python3
import os, sys, time
time.sleep({sleep})
log = open(os.environ["NCCL_DEBUG_FILE"].replace("%p", "1"), "w")
print("NCCL INFO NET/Plugin: Loaded net plugin Perseus (v12)", file=log)
print("NCCL INFO RMA/Plugin: Loaded rma plugin Perseus (v{rma})", file=log)
print('{{"op":"all_reduce","wrong":{wrong}}}')
"""


def library(names, *texts):
    return (b"\x7fELF\0" + b"".join(b"nccl%sPlugin_v%d\0" % (kind.encode(), version) for kind, version in names)
            + b"".join(texts))


def run(libraries, *options, **program):
    """Rows and exit status of the matrix over these libraries, {file name: bytes}."""
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        (folder / "nccl").mkdir()
        for file, data in libraries.items():
            (folder / "nccl" / file).write_bytes(data)
        for file, text in (("launch", LAUNCH),
                           ("ranks", RANKS.format(**{"sleep": 0, "rma": 16, "wrong": 0, **program}))):
            (folder / file).write_text(text)
            (folder / file).chmod(0o755)
        done = subprocess.run([sys.executable, MATRIX, folder / "nccl", "--plugin", PLUGIN, "--softnic",
                               folder / "launch", "--ranks", folder / "ranks", *options], capture_output=True,
                              text=True, timeout=120, check=False)
        print(done.stderr, file=sys.stderr)
        return [json.loads(line) for line in done.stdout.splitlines()], done.returncode


def tables_are_foretold():
    rows, status = run({"new.so": library(NEW), "old.so.xz": lzma.compress(library(OLD)),
                        "next.so": library([("Rma", 99), *NEW])}, "--tables")
    new, following, old = rows
    assert status == 0 and [row["nccl"] for row in rows] == ["new", "next", "old"], rows
    assert new["takes"] == {"net": 12, "gin": 13, "rma": 16} and new["device_traffic_over"] == "rma v16", new
    assert following["asks"]["rma"][0] == 99 and following["takes"]["rma"] == 16, following
    assert old["takes"] == {"net": 7, "gin": None, "rma": None} and old["device_traffic_over"] is None, old


def what_was_loaded_is_compared():
    libraries = {"new.so": library(NEW, NET, RMA)}
    rows, status = run(libraries, "--parts", "processes")
    assert status == 0 and rows[0]["loaded"] == {"net": 12, "rma": 16} and rows[0]["processes"]["wrong"] == 0, rows
    rows, status = run(libraries, "--parts", "processes", rma=14)
    assert status == 1 and "rma v16 was expected, and 14 was loaded" in rows[0]["errors"][0], rows


def wrong_data_and_a_hang_are_failures():
    libraries = {"a.so": library(NEW), "b.so": library(NEW)}
    rows, status = run(libraries, "--parts", "processes", wrong=3)
    assert status == 2 and rows[0]["processes"]["wrong"] == 3 and rows[0]["errors"], rows
    rows, status = run({"a.so": library(NEW)}, "--parts", "processes", "--timeout", "6", sleep=60)
    assert status == 1 and "not done within 6 s" in rows[0]["errors"][0], rows


globals()[sys.argv[3]]()
