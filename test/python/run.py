#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""run.py SOURCE BUILD TEST.py [MODULE]: run a test of the Python package on the emulator, with a Python that has torch:
this one, or that of BUILD/torch-env (tools/setup.sh). MODULE: a framework that the test needs, from there or from
BUILD/frameworks. Where one is missing, the test is skipped."""
import os
import pathlib
import subprocess
import sys

SKIP = 77


def environment(source, build):
    library = build / "tools/hopper/libperseus-fused-emulated.so"
    paths = [str(path) for path in (source / "fused/python", source / "fused/python/examples", source / "test/python",
                                    build / "frameworks", source / "build/frameworks")]
    libraries = [path for path in (os.environ.get("LD_LIBRARY_PATH"), "/usr/local/cuda/lib64") if path]
    return dict(os.environ, PYTHONPATH=os.pathsep.join(paths), PERSEUS_FUSED_LIBRARY=str(library),
                LD_LIBRARY_PATH=os.pathsep.join(libraries), PYTHONDONTWRITEBYTECODE="1")


def main():
    source, build, test = map(pathlib.Path, sys.argv[1:4])
    env, said, needs = environment(source, build), "no torch", ["torch", *sys.argv[4:]]
    wanted = f"from torch import Tensor; import importlib.metadata as m; [m.version(name) for name in {needs}]"
    for python in (sys.executable, str(build / "torch-env/bin/python"), str(source / "build/torch-env/bin/python")):
        if not os.path.exists(python):
            continue
        found = subprocess.run([python, "-c", wanted], env=env, capture_output=True, text=True)
        if found.returncode == 0:
            return subprocess.run([python, str(test)], env=env).returncode
        said = (found.stderr.strip().splitlines() or [said])[-1]
    print(f"skipped: needs {' and '.join(needs)} (tools/setup.sh installs them into build): {said}")
    return SKIP


if __name__ == "__main__":
    sys.exit(main())
