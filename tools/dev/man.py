#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""man.py PROGRAM VERSION: a manual page of a program, made of what its --help prints. Exit 1 when it prints none."""
import os
import pathlib
import re
import subprocess
import sys


def roff(line):
    """The line as text that troff prints unchanged."""
    line = line.replace("\\", "\\e").replace("-", "\\-")
    return "\\&" + line if line[:1] in (".", "'") else line


def summary(text):
    """The first sentence after the usage, without its full stop: what apropos looks through."""
    lines = text.splitlines()
    start = next(i for i, line in enumerate(lines) if i and line and not line.startswith(("usage", " ")))
    paragraph = " ".join(" ".join(lines[start:start + 4]).split())
    return re.split(r"[.:;](?: |$)", paragraph)[0]


def page(name, version, text):
    lines = [f'.TH {name.upper().replace("-", chr(92) + "-")} 1 "" "Perseus {version}"', ".SH NAME",
             roff(f"{name} - {summary(text)}"), ".SH SYNOPSIS AND OPTIONS", ".nf",
             *map(roff, text.rstrip().splitlines()), ".fi", ".SH SEE ALSO",
             roff("The documents that are installed with Perseus, in share/doc/perseus.")]
    return "\n".join(lines) + "\n"


def main(program, version):
    try:
        done = subprocess.run([program, "--help"], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60,
                              env={"PATH": "/usr/bin:/bin", "COLUMNS": "100", "LC_ALL": "C.UTF-8",
                                   **{name: value for name, value in os.environ.items() if name.startswith("QEMU_")}})
    except OSError as e:
        sys.exit(f"man.py: {program}: {e.strerror}")
    except subprocess.TimeoutExpired:
        sys.exit(f"man.py: {program} --help: has not ended within 60 s")
    if done.returncode != 0 or not done.stdout.strip():
        sys.exit(f"{program} --help: exit {done.returncode}, {done.stderr.strip() or 'no text'}")
    sys.stdout.write(page(pathlib.Path(program).name, version, done.stdout))


if __name__ == "__main__":
    if len(sys.argv) != 3 or sys.argv[1] == "--help":
        sys.exit(__doc__)
    main(*sys.argv[1:])
