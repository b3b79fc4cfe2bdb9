#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Fail when a source has no test that a reader can find: one with the same stem (test_STEM.*), or a row of a README.md of
tests that names the source.

usage: findable.py ROOT. Tests are what lies below a folder "test". Also fails when a README.md there names a test that does
not exist, or a --filter of a meson.build fits no test: the program would then run nothing, and pass.
"""
import pathlib
import re
import subprocess
import sys

FOLDERS = ("transport/", "plugin/", "fused/", "tools/softnic/", "tools/hopper/", "tools/common/")
SOURCES = (".c", ".cpp", ".cu", ".cuh")
ROW = re.compile(r"^\| (.+?) \| (.+?) \|$", re.M)
NAME = re.compile(r"`([\w./-]+)`")
FILTER = re.compile(r"'--filter', '([^']+)'\s*[\],]")
TEST = re.compile(r"^(?:Test|ParameterizedTest)\((?:[^,()]*\*\w+, )?(\w+), (\w+)", re.M)
MADE_BY_MACRO = re.compile(r"^[A-Z]+\((\w+)[,)]", re.M)  # of the suite that the file is named after


def listed(root):
    done = subprocess.run(["git", "-C", root, "ls-files", "-co", "--exclude-standard"], capture_output=True, text=True)
    names = done.stdout.splitlines() if done.returncode == 0 else [p.relative_to(root).as_posix() for p in root.rglob("*") if p.is_file()]
    return [name for name in names if (root / name).is_file()]


def is_test(name):
    return "test" in pathlib.PurePath(name).parts[:-1]


def expression(pattern):
    """The regular expression of a pattern of Criterion: *, ?, and @(a|b), +(a|b), !(a)."""
    text, ends = "", []
    for part in re.findall(r"[@+!]\(|.", pattern):
        if part[1:] == "(":
            text += "(?!(?:" if part[0] == "!" else "(?:"
            ends.append({"@": ")", "+": ")+", "!": ")$).*"}[part[0]])
        elif part == ")" and ends:
            text += ends.pop()
        else:
            text += {"*": ".*", "?": ".", "|": "|"}.get(part, re.escape(part))
    return re.compile(text)


def filters_that_fit_nothing(root, names):
    tests = []
    for source in (pathlib.PurePath(name) for name in names if is_test(name) and name.endswith((".c", ".cpp"))):
        text = (root / source).read_text()
        tests += [f"{suite}/{name}" for suite, name in TEST.findall(text)]
        tests += [f"{source.stem.removeprefix('test_')}/{name}" for name in MADE_BY_MACRO.findall(text)]
    for name in names:
        if is_test(name) and name.endswith("meson.build"):
            for pattern in FILTER.findall((root / name).read_text()):
                if not any(expression(pattern).fullmatch(test) for test in tests):
                    yield name, pattern


def main():
    root = pathlib.Path(sys.argv[1])
    names = listed(root)
    stems = {pathlib.PurePath(n).stem for n in names if is_test(n) and pathlib.PurePath(n).name.startswith("test_")}
    named, failed = set(), False
    for page in (name for name in names if is_test(name) and name.endswith("/README.md")):
        _, tables, text = (root / page).read_text().partition("## Which test covers a source")
        for sources, tests in ROW.findall(text) if tables else ():
            named.update(NAME.findall(sources))
            for test in NAME.findall(tests):
                if "." in test and not any((folder / test).is_file() for folder in (root, (root / page).parent)):
                    print(f"{page} names {test}, which does not exist")
                    failed = True
    for name in names:
        path = pathlib.PurePath(name)
        if (name.startswith(FOLDERS) and not is_test(name) and path.suffix in SOURCES and f"test_{path.stem}" not in stems
                and name not in named):
            print(f"{name}: no test_{path.stem}.*, and no README.md of tests names it")
            failed = True
    for name, pattern in filters_that_fit_nothing(root, names):
        print(f"{name}: --filter '{pattern}' fits no test")
        failed = True
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
