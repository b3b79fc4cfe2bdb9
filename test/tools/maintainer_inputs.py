#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""maintainer_inputs.py ROOT BUILD: each tool for maintainers says what is wrong with its input, and prints no
traceback."""
import pathlib
import subprocess
import sys

ROOT, BUILD = (pathlib.Path(path).resolve() for path in sys.argv[1:])
ROW = '{"bytes": 8, "usec_p50": 1, "usec_p99": 1, "busbw_GBps": 1}\n'
# (tool, arguments, standard input, what the error must have)
CASES = [
    ("tools/dev/man.py", [], "", "man.py PROGRAM VERSION"),
    ("tools/dev/man.py", ["/nonexistent/program", "1"], "", "/nonexistent/program: No such file"),
    ("tools/dev/man.py", [str(BUILD), "1"], "", f"{BUILD}: Permission denied"),
    ("tools/demo_table.py", [], "", "demo_table.py FIRST LAST FACTOR"),
    ("tools/demo_table.py", ["8", "4K", "2"], "", "'4K' is no number"),
    ("tools/demo_table.py", ["8", "16", "1"], "", "FACTOR 1"),
    ("tools/demo_table.py", ["8", "16", "2"], "{broken\n", "line 1"),
    ("tools/demo_table.py", ["8", "16", "2"], ROW, "errors"),
    ("tools/dev/rooms.py", ["/nonexistent"], "", "/nonexistent: no build folder"),
    ("tools/dev/rooms.py", [str(BUILD), "--rooms-of", "/nonexistent"], "", "--rooms-of /nonexistent: no transport/"),
    ("tools/dev/sample_text.py", ["--comments", "-3"], "", "-3"),
    ("tools/dev/coverage", ["--no-run", "--compare", "/nonexistent"], "", "/nonexistent: No such file"),
    ("tools/dev/pack_deb.py", [], "", "usage"),
    ("tools/dev/pack_deb.py", ["/nonexistent", "/tmp"], "", "/nonexistent: no build folder"),
    ("tools/dev/pack_deb.py", [str(BUILD), "/nonexistent"], "", "/nonexistent: no folder"),
    ("tools/dev/record.py", ["a/b", "--machine", "m", "--command", "c"], ROW, "a/b"),
    ("tools/dev/record.py", ["a", "--machine", "m", "--command", "c", "--commit", "0000000"], ROW, "0000000"),
]


def wrong(tool, arguments, text, want):
    done = subprocess.run([sys.executable, ROOT / tool, *arguments], input=text, capture_output=True, text=True,
                          timeout=60)
    if done.returncode == 0:
        return "exit 0"
    if "Traceback" in done.stderr:
        return f"a traceback: {done.stderr.splitlines()[-1]}"
    return None if want in done.stderr else f"the error lacks {want!r}: {done.stderr.strip()!r}"


def main():
    failed = 0
    for tool, arguments, text, want in CASES:
        if why := wrong(tool, arguments, text, want):
            failed += 1
            print(f"{tool} {' '.join(arguments)}: {why}")
    print(f"{len(CASES)} inputs, {failed} with a wrong answer")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
