#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The rules that are taken away by hand (fused/mutants.py, hopper/mutate.py), which takes minutes: is the text of each still there, and its test?
A list that does not follow the code would say nothing until somebody runs it.

usage: rules_present.py ROOT
"""
import importlib.util
import pathlib
import sys


def load(path):
    sys.path.insert(0, str(path.parent))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def outdated_models(root, rules):
    for name, _, file, old, _ in rules:
        count = (root / file).read_text().count(old)
        if count != 1:
            yield f"fused/mutants.py: {name}: its text is {count} times in {file}"


def outdated_kernels(root, mutations):
    tests = "".join(p.read_text() for p in (root / "test/hopper").glob("test_*.c"))
    for name, file, old, _, test in mutations:
        files = [root / "fused" / file] if file else (root / "fused").rglob("*.cuh")
        if not any(old in p.read_text() for p in files):
            yield f"hopper/mutate.py: {name}: its text is not in {file or 'fused/*.cuh'}"
        if f", {test.rpartition('/')[2]}, " not in tests:
            yield f"hopper/mutate.py: {name}: no test {test}"


def main():
    root = pathlib.Path(sys.argv[1])
    found = [*outdated_models(root, load(root / "test/fused/mutants.py").RULES), *outdated_kernels(root, load(root / "test/hopper/mutate.py").MUTATIONS)]
    print("\n".join(found) or "each rule's text and test are there")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
