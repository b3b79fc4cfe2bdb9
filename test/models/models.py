#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Protocols whose barriers matter on processors that reorder, checked by spin in all executions: each model holds, and
fails without each of its rules. doc/barriers.md says where the rules are.

usage: models.py CC
"""
import os
import re
import shutil
import subprocess
import sys
import tempfile

HERE = os.path.dirname(os.path.abspath(__file__))


def check(cc, model, mutant):
    """Does the model hold? Raise if it cannot be checked."""
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(["spin", f"-DMUTANT={mutant}", "-a", os.path.join(HERE, model)], cwd=folder, check=True,
                       stdout=subprocess.DEVNULL)
        subprocess.run([*cc, "-DSAFETY", "-w", "-o", "pan", "pan.c"], cwd=folder, check=True)
        said = subprocess.run(["./pan", "-m10000"], cwd=folder, check=True, capture_output=True, text=True).stdout
    if "max search depth too small" in said:
        raise RuntimeError(f"{model}: not all executions were looked at")
    return int(re.search(r"errors: (\d+)", said)[1]) == 0


def main():
    cc = sys.argv[1].split()
    if not shutil.which("spin"):
        print("skipped: spin is not installed")
        return 77
    good = True
    for model in sorted(name for name in os.listdir(HERE) if name.endswith(".pml")):
        text = open(os.path.join(HERE, model), encoding="utf-8").read()
        rules = re.findall(r"^ \*   (\d+)  (.*)", text, re.M)
        for mutant, rule in [("0", "holds"), *rules]:
            right = check(cc, model, mutant) == (mutant == "0")
            good = good and right
            claim = rule if mutant == "0" else "fails without: " + rule.removesuffix(" */")
            print("ok" if right else "FAIL", model, claim)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
