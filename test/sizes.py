#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Fail on a source file of more than 600 lines, and on a line of C, Python or Meson of more than 120 columns.

usage: sizes.py ROOT [--shrink]. sizes.json says how many lines a longer file may have: an exception, which may only
shrink. --shrink lowers them to what there is now.
"""
import json
import pathlib
import subprocess
import sys

LINES, COLUMNS = 600, 120
SOURCES = (".c", ".h", ".cu", ".cuh", ".cpp", ".py", "meson.build")
EXCEPTIONS = pathlib.Path(__file__).with_name("sizes.json")


def names(root):
    git = ["git", "-C", root, "ls-files", "-co", "--exclude-standard"]
    done = subprocess.run(git, capture_output=True, text=True, check=False)
    if done.returncode == 0:
        listed = done.stdout.splitlines()
    else:  # an unpacked archive has no git
        listed = [path.relative_to(root).as_posix() for path in root.rglob("*")]
    return sorted(name for name in listed if name.endswith(SOURCES) and (root / name).is_file())


def main():
    root = pathlib.Path(sys.argv[1])
    files = {name: (root / name).read_text(errors="replace").splitlines() for name in names(root)}
    long, allowed = {name: len(lines) for name, lines in files.items()}, json.loads(EXCEPTIONS.read_text())
    if "--shrink" in sys.argv:
        smaller = {name: min(most, long[name]) for name, most in allowed.items() if long.get(name, 0) > LINES}
        EXCEPTIONS.write_text(json.dumps(smaller, indent=1, sort_keys=True) + "\n")
        return 0
    wrong = [f"{name}: {number} lines, and there may be {most}" for name, number in long.items()
             if number > (most := allowed.get(name, LINES))]
    wrong += [f"{name}:{number}: {len(line)} columns, and there may be {COLUMNS}" for name, lines in files.items()
              for number, line in enumerate(lines, 1) if len(line) > COLUMNS]
    print("\n".join(wrong) or "sizes: ok")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
