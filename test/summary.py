#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""summary.py CHECK_SUMMARY.py: of a long output of a failed test, "report" prints why it failed before all else."""
import json
import pathlib
import subprocess
import sys
import tempfile

REASONS = {
    "Criterion": "[----] ../test/unit/test_x.c:9: Assertion Failed",
    "Criterion's verdict": "[FAIL] gin::memory_is_released: (5.10s)",
    "CHECK()": "../test/plugin/test_x.c:73: count == 100: 49 were raised",
    "unittest": "FAIL: test_x (__main__.Results)",
    "pytest": "E   AssertionError: 3 != 4",
    "AddressSanitizer": "==7==ERROR: AddressSanitizer: heap-use-after-free on address 0x1",
    "UBSan": "x.c:3:4: runtime error: shift exponent 64 is too large",
    "a rank that was killed": "boxfort-worker: rank 0 shows no life for 5 s: killed",
}


def report(tool, folder, output):
    log = pathlib.Path(folder, "testlog.json")
    log.write_text(json.dumps({"name": "perseus:unit / x", "result": "FAIL", "duration": 1, "stdout": output}) + "\n")
    done = subprocess.run([sys.executable, tool, "report", log], capture_output=True, text=True, check=False)
    assert done.returncode == 1, f"status {done.returncode} for a failed test\n{done.stdout}{done.stderr}"
    return done.stdout.splitlines()


def main(tool):
    noise = [f"NET/Perseus: line {i}" for i in range(100)]
    with tempfile.TemporaryDirectory() as folder:
        for name, reason in REASONS.items():
            lines = report(tool, folder, "\n".join(noise[:90] + [reason] + noise[90:]))
            at = next(i for i, line in enumerate(lines) if "FAIL x (1 s)" in line)
            assert reason in lines[at + 1], f"{name}: the line after the test's name is {lines[at + 1]!r}"
            assert lines[at + 2].endswith(noise[41]), f"{name}: the end of the output is not there"
        short = report(tool, folder, REASONS["CHECK()"])
        assert sum(REASONS["CHECK()"] in line for line in short) == 1, "a short output is printed twice"
    print("summary: ok")


if __name__ == "__main__":
    main(sys.argv[1])
