#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""abi.py [--update] FOLDER HEADERS LIBRARY...: no library has lost or changed anything that its public headers declare,
compared with FOLDER/NAME.abi, which libabigail wrote. What is new is welcome.

--update writes the files: with the commit that is to change the interface, so that a review sees it. The libraries need
debug information. Without libabigail: skipped (77)."""
import pathlib
import shutil
import subprocess
import sys
import tempfile

SKIP = 77
# Nothing of the machine or of lines in the file. Types get names of their own, so that a change moves few lines.
WRITE = ["--no-corpus-path", "--no-comp-dir-path", "--drop-private-types", "--exported-interfaces-only",
         "--no-show-locs", "--no-elf-needed", "--type-id-style", "hash"]


def name_of(library):
    return pathlib.Path(library).name.split(".so")[0]


def write(headers, library, file):
    subprocess.run(["abidw", *WRITE, "--headers-dir", headers, "--out-file", str(file), library], check=True)


def difference(folder, headers, library):
    """What has changed, as text; None: nothing. Two files are compared: of a file and a library, abidiff takes types of
    the file for private ones, as it has no lines."""
    with tempfile.TemporaryDirectory() as scratch:
        new = pathlib.Path(scratch, "new.abi")
        write(headers, library, new)
        done = subprocess.run(["abidiff", "--no-added-syms", str(folder / f"{name_of(library)}.abi"), str(new)],
                              capture_output=True, text=True)
    if done.returncode == 0:
        return None
    return (f"{name_of(library)}: programs that were built for it may not run any more (abidiff: {done.returncode}; "
            f"CONTRIBUTING.md, \"Stability\"; test/abi.py --update when it is meant)\n{done.stdout}{done.stderr}")


def main(arguments):
    is_update = arguments[:1] == ["--update"]
    folder, headers, *libraries = arguments[1:] if is_update else arguments
    if not shutil.which("abidiff"):
        print("skipped: abidiff (abigail-tools) is not installed")
        return SKIP
    if is_update:
        for library in libraries:
            write(headers, library, pathlib.Path(folder, f"{name_of(library)}.abi"))
        return 0
    wrong = [text for text in (difference(pathlib.Path(folder), headers, library) for library in libraries) if text]
    print("\n".join(wrong) or f"{len(libraries)} libraries: nothing is lost or changed")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
