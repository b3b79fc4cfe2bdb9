#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Check every MUTANT marker in the tree (mutants_lib.py): its edit fits the statement below it, its kind is known, and
its test exists.

usage: rules_present.py ROOT
"""
import importlib.util
import pathlib
import re
import sys


def load(path):
    sys.path.insert(0, str(path.parent))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def problems(root):
    sys.path.insert(0, str(root / "test"))
    import mutants_lib
    programs = load(root / "test/fused/mutants.py").PROGRAMS
    # Criterion's Test(suite, name, ...), by the kind of the rules that name it.
    tests = {kind: "".join(p.read_text() for p in (root / folder).glob("test_*.c"))
             for kind, folder in (("emulator", "test/hopper"), ("connect", "test/transport"))}
    names = [p.relative_to(root).as_posix() for folder in ("transport", "fused", "test")
             for p in sorted((root / folder).rglob("*.*")) if p.suffix in (".c", ".h", ".cu", ".cuh")]
    marked = {name: text for name in names if "MUTANT(" in (text := (root / name).read_text())}
    whole = sum(len(mutants_lib.MARKER.findall(text)) for text in marked.values())
    count = sum(text.count("MUTANT(") for text in marked.values())
    if whole != count:
        yield f"{count - whole} of {count} markers are not written as mutants_lib.py says"
    edits = 0
    for kind in ("order", "peer", "connect", "model", "emulator"):
        for rule in mutants_lib.rules(root, kind, marked):
            edits += len(rule.edits)
            try:
                mutants_lib.mutated(root, rule)
            except mutants_lib.Outdated as outdated:
                yield f"{rule.name}: {outdated}"
            if kind == "model" and rule.target not in programs:
                yield f"{rule.name}: test/fused/mutants.py has no program {rule.target}"
            if kind in tests and not re.search(rf", {rule.target.rpartition('/')[2]}[,)]", tests[kind]):
                yield f"{rule.name}: no test {rule.target}"
    if edits != whole:
        yield f"{whole - edits} markers are of no known kind"


def main():
    found = list(problems(pathlib.Path(sys.argv[1])))
    print("\n".join(found) or "each marker fits its code and its test")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
