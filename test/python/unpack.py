#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""unpack.py LIST FOLDER: fetch the wheels of a list by pip, one after the other, and keep of each its Python files and
what pip knows of it. A line of the list: REQUIREMENT FOLDER/ ..., those of the wheel to keep."""
import pathlib
import subprocess
import sys
import tempfile
import zipfile


def lines(text):
    return [line.split() for line in text.splitlines() if line and not line.startswith("#")]


def unpack(wheel, folders, target):
    with zipfile.ZipFile(wheel) as archive:
        kept = [name for name in archive.namelist() if name.endswith(".py") and name.startswith(tuple(folders))
                or name.endswith(".dist-info/METADATA")]
        archive.extractall(target, kept)


def main():
    for requirement, *folders in lines(pathlib.Path(sys.argv[1]).read_text()):
        with tempfile.TemporaryDirectory() as folder:
            subprocess.run([sys.executable, "-m", "pip", "download", "-q", "--disable-pip-version-check", "--no-deps",
                            "--no-cache-dir", "--only-binary", ":all:", "-d", folder, requirement], check=True)
            wheel, = pathlib.Path(folder).iterdir()
            unpack(wheel, folders, sys.argv[2])


if __name__ == "__main__":
    main()
