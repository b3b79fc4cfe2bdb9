#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Fail when a source has no test that a reader can find: one with the same stem (test_STEM.*), or a row of a
README.md of tests that names the source.

usage: findable.py ROOT [BUILD]. Tests are what lies below a folder "test". Also fails when a README.md there names a
test that does not exist. With a build folder also when the --filter of a test fits nothing (the program would then
run nothing, and pass), and when no --filter fits a test whose suite others name, so that it never runs.
"""
import json
import pathlib
import re
import subprocess
import sys

FOLDERS = ("transport/", "plugin/", "fused/", "tools/softnic/", "tools/hopper/", "tools/common/")
SOURCES = (".c", ".cpp", ".cu", ".cuh")
ROW = re.compile(r"^\| (.+?) \| (.+?) \|$", re.M)
NAME = re.compile(r"`([\w./-]+)`")
TEST = re.compile(r"^(?:Test|ParameterizedTest)\((?:[^,()]*\*\w+, )?(\w+), (\w+)", re.M)
MADE_BY_MACRO = re.compile(r"^[A-Z]+\((\w+)[,)]", re.M)  # of the suite that the file is named after


def listed(root):
    done = subprocess.run(["git", "-C", root, "ls-files", "-co", "--exclude-standard"], capture_output=True, text=True)
    if done.returncode == 0:
        names = done.stdout.splitlines()
    else:  # an unpacked archive has no git
        names = [path.relative_to(root).as_posix() for path in root.rglob("*")]
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


def criterion_tests(root, names):
    """All as "suite/test", with the name of their folder."""
    for source in (pathlib.PurePath(name) for name in names if is_test(name) and name.endswith((".c", ".cpp"))):
        text = (root / source).read_text()
        yield from ((f"{suite}/{name}", source.parent.name) for suite, name in TEST.findall(text))
        yield from ((f"{source.stem.removeprefix('test_')}/{name}", source.parent.name)
                    for name in MADE_BY_MACRO.findall(text))


def wrong_filters(root, names, build):
    patterns, whole = [], set()  # whole: names of programs that also run without a filter
    for test in json.loads((build / "meson-info/intro-tests.json").read_text()):
        command = test["cmd"]
        if "--filter" in command:
            at = command.index("--filter")
            patterns.append((test["name"], command[at - 1], command[at + 1]))
        else:
            whole.update(pathlib.PurePath(word).name for word in command)
    tests = set(criterion_tests(root, names))
    for name, _, pattern in patterns:
        if not any(expression(pattern).fullmatch(test) for test, _ in tests):
            yield f"{name}: --filter '{pattern}' fits no test"
    for test, folder in sorted(tests):
        suite = test.split("/")[0]
        named = [(pathlib.PurePath(program).name, pattern) for _, program, pattern in patterns
                 if pattern.split("/")[0] == suite]
        # Another program of the same source may run the whole suite: test_transport_fault does, and wide_fault a part.
        if f"test_{folder}_{suite}" in whole:
            continue
        if named and not any(program in whole or expression(pattern).fullmatch(test) for program, pattern in named):
            yield f"{test}: no --filter fits it, so it never runs"


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
        source = name.startswith(FOLDERS) and not is_test(name) and path.suffix in SOURCES
        if source and f"test_{path.stem}" not in stems and name not in named:
            print(f"{name}: no test_{path.stem}.*, and no README.md of tests names it")
            failed = True
    for line in wrong_filters(root, names, pathlib.Path(sys.argv[2])) if len(sys.argv) > 2 else ():
        print(line)
        failed = True
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
