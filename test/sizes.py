#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Fail on a source file of more than 600 lines, and on lines of C, Python or Meson of more than 120 columns.

usage: sizes.py ROOT [--shrink]. sizes.json has the exceptions, which may only shrink: how many lines a longer file
may have, and how many of its lines may be longer. --shrink lowers them to what there is now.
"""
import json
import pathlib
import subprocess
import sys

LINES, COLUMNS = 600, 120
SOURCES = (".c", ".h", ".cu", ".cuh", ".cpp", ".py", "meson.build")
WHAT = {"lines": "lines", "columns": f"lines of more than {COLUMNS} columns"}
MOST = {"lines": LINES, "columns": 0}
EXCEPTIONS = pathlib.Path(__file__).with_name("sizes.json")


def names(root):
    git = ["git", "-C", root, "ls-files", "-co", "--exclude-standard"]
    done = subprocess.run(git, capture_output=True, text=True, check=False)
    if done.returncode == 0:
        listed = done.stdout.splitlines()
    else:  # an unpacked archive has no git
        listed = [path.relative_to(root).as_posix() for path in root.rglob("*")]
    return sorted(name for name in listed if name.endswith(SOURCES) and (root / name).is_file())


def measured(root):
    """{"lines": {file: number}, "columns": {file: number of its long lines}} of the files that are too long or have
    some."""
    found = {"lines": {}, "columns": {}}
    for name in names(root):
        lines = (root / name).read_text(errors="replace").splitlines()
        wide = sum(len(line) > COLUMNS for line in lines)
        if len(lines) > LINES:
            found["lines"][name] = len(lines)
        if wide:
            found["columns"][name] = wide
    return found


def main():
    root = pathlib.Path(sys.argv[1])
    found, allowed = measured(root), json.loads(EXCEPTIONS.read_text())
    if "--shrink" in sys.argv:
        smaller = {kind: {name: min(most, found[kind][name]) for name, most in rows.items() if name in found[kind]}
                   for kind, rows in allowed.items()}
        EXCEPTIONS.write_text(json.dumps(smaller, indent=1, sort_keys=True) + "\n")
        return 0
    wrong = [f"{name}: {number} {WHAT[kind]}, and there may be {allowed[kind].get(name, MOST[kind])}"
             for kind, rows in found.items() for name, number in rows.items() if number > allowed[kind].get(name, 0)]
    print("\n".join(wrong) or "sizes: ok")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
