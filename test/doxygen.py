#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""doxygen.py ROOT: every function, structure, enumeration and macro of the public headers has a comment that Doxygen
takes for its documentation, and Doxygen has no other complaint. A field whose name says all needs none."""
import os
import re
import shutil
import subprocess
import sys
import tempfile

FIELD = re.compile(r"Member .* \(variable\) of struct .* is not documented")


def main(root):
    if not shutil.which("doxygen"):
        print("skipped: doxygen is not installed")
        return 77
    with tempfile.TemporaryDirectory(prefix="perseus-doxygen-") as out:
        done = subprocess.run(["doxygen", "Doxyfile"], cwd=os.path.join(root, "doc"), env=dict(os.environ, OUT=out),
                              stdin=subprocess.DEVNULL, capture_output=True, text=True)
        pages = len(os.listdir(os.path.join(out, "html")))
    wrong = [line for line in done.stderr.splitlines() if line.strip() and not FIELD.search(line)]
    print("\n".join(wrong) or f"{pages} files of documentation")
    return 1 if wrong or done.returncode or pages < 20 else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
