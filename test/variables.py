#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Fail when doc/variables.md and the code do not name the same environment variables.

A variable is read by transport/util/env.h, getenv() or, in the Python package, os.environ, from a string literal; what
the libraries and the package read must be in doc/variables.md, and the other way round. transport/host/config.c has a
list of our own names too, to warn of others.
"""
import pathlib
import re
import subprocess
import sys

FOLDERS = ("transport/", "plugin/", "fused/")
PACKAGE = "fused/python/perseus/"
ENVIRON = re.compile(r'environ(?:\.get\(|\[)"((?:NCCL|PERSEUS)_[A-Z0-9_]+)"')
LITERAL = re.compile(r'"((?:NCCL|PERSEUS)_[A-Z0-9_]+)"')
NAMED = re.compile(r"`((?:NCCL|PERSEUS)_[A-Z0-9_]+)")


def read_by_code(root):
    listed = subprocess.run(["git", "-C", root, "ls-files", "-co", "--exclude-standard"],
                            capture_output=True, text=True)
    names = (listed.stdout.splitlines() if listed.returncode == 0
             else [p.relative_to(root).as_posix() for p in root.rglob("*")])
    found = {}
    for name in names:
        path = root / name
        if name.startswith(PACKAGE) and path.suffix == ".py":
            for variable in ENVIRON.findall(path.read_text()):
                found.setdefault(variable, name)
        if name.startswith(FOLDERS) and path.suffix in (".c", ".h", ".cu", ".cuh") and path.is_file():
            for variable in LITERAL.findall(path.read_text(errors="replace")):
                found.setdefault(variable, name)
    return found


def known_to_config(root):
    """The names of which transport/host/config.c says that they are ours."""
    text = re.search(r"\*const known\[\] = {(.*?)}", (root / "transport/host/config.c").read_text(), re.S).group(1)
    return {"PERSEUS_" + word for word in re.findall(r'"(\w+)"', text)}


def main():
    root = pathlib.Path(sys.argv[1])
    named, read = set(NAMED.findall((root / "doc/variables.md").read_text())), read_by_code(root)
    for variable in sorted(read.keys() - named):
        print(f"{variable}: read in {read[variable]}, but doc/variables.md does not name it")
    for variable in sorted(named - read.keys()):
        print(f"{variable}: named in doc/variables.md, but nothing reads it")
    ours = {variable for variable in named if variable.startswith("PERSEUS_")}
    for variable in sorted(ours ^ known_to_config(root)):
        print(f"{variable}: either in doc/variables.md or in the list of transport/host/config.c, but not in both")
    return 1 if ours != known_to_config(root) or named != read.keys() or not read else 0


if __name__ == "__main__":
    sys.exit(main())
