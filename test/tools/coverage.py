#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""tools/dev/coverage counts the lines of a rank that ends by _exit(), which gcc's own runtime loses.

usage: coverage.py ROOT CC. Skips (77) without gcov, or where the compiler is not gcc.
"""
import importlib.machinery
import importlib.util
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

PROGRAM = r"""
#include <sys/wait.h>
#include <unistd.h>

static volatile int sum;

static void rank(int n)
{
    sum += n; /* executed */
}

int main(void)
{
    if (fork() == 0) {
        rank(1);
        _exit(0);
    }
    wait(0);
    return sum;
}
"""


def load(path):
    sys.dont_write_bytecode = True
    loader = importlib.machinery.SourceFileLoader("coverage_tool", str(path))
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader("coverage_tool", loader))
    loader.exec_module(module)
    return module


def times_executed(folder):
    text = subprocess.run(["gcov", "-t", "-o", ".", "program.gcda"], cwd=folder, capture_output=True, text=True,
                          check=True).stdout
    return re.search(r"^ *(\S+):.*/\* executed \*/", text, re.M).group(1).rstrip("*")


def main():
    root, cc = pathlib.Path(sys.argv[1]), sys.argv[2]
    if not shutil.which("gcov") or "Free Software" not in subprocess.run([*cc.split(), "--version"], text=True,
                                                                          capture_output=True, check=True).stdout:
        print("skipped: needs gcc and gcov")
        return 77
    tool = load(root / "tools/dev/coverage")
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        hook, preload = tool.hooks(folder, cc)
        (folder / "program.c").write_text(PROGRAM)
        subprocess.run([*cc.split(), "--coverage", "-c", "program.c", "-o", "program.o"], cwd=folder, check=True)
        subprocess.run([*cc.split(), "--coverage", "program.o", hook, "-ldl", "-o", "program"], cwd=folder, check=True)
        subprocess.run(["./program"], cwd=folder, check=True)
        without = times_executed(folder)
        subprocess.run(["./program"], cwd=folder, check=True, env={**os.environ, "LD_PRELOAD": str(preload)})
        counted = times_executed(folder)
    print(f"the rank's line, as gcov prints it: {without} without the tool, {counted} with it")
    return 0 if counted == "1" else 1


if __name__ == "__main__":
    sys.exit(main())
