#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""run.py SOURCE BUILD TEST.py [MODULE]: run a test of the Python package on the emulator, with a Python that has torch:
this one, or that of BUILD/torch-env (tools/setup.sh). MODULE: a framework that the test needs, from there or from
BUILD/frameworks. Where one is missing, the test is skipped."""
import os
import pathlib
import subprocess
import sys

SKIP, LACKS = 77, 78
# Looks and runs in one process, because importing torch takes more than a second. LACKS: a module is missing. argv: the
# test, then the modules.
INSIDE = f"""
import importlib.metadata, os, runpy, sys
test, needs = sys.argv[1], sys.argv[2:]
try:
    from torch import Tensor
    for name in needs:
        importlib.metadata.version(name)
except Exception as e:
    print(f"{{type(e).__name__}}: {{e}}", file=sys.stderr)
    sys.exit({LACKS})
sys.path[0], sys.argv = os.path.dirname(test), [test]
runpy.run_path(test, run_name="__main__")
"""


def environment(source, build):
    library = build / "tools/hopper/libperseus-fused-emulated.so"
    paths = [str(path) for path in (source / "fused/python", source / "fused/python/examples", source / "test/python",
                                    build / "frameworks", source / "build/frameworks")]
    libraries = [path for path in (os.environ.get("LD_LIBRARY_PATH"), "/usr/local/cuda/lib64") if path]
    return dict(os.environ, PYTHONPATH=os.pathsep.join(paths), PERSEUS_FUSED_LIBRARY=str(library),
                LD_LIBRARY_PATH=os.pathsep.join(libraries), PYTHONDONTWRITEBYTECODE="1")


def main():
    source, build, test = map(pathlib.Path, sys.argv[1:4])
    env, needs = environment(source, build), sys.argv[4:]
    for python in (sys.executable, str(build / "torch-env/bin/python"), str(source / "build/torch-env/bin/python")):
        if not os.path.exists(python):
            continue
        status = subprocess.run([python, "-c", INSIDE, str(test), *needs], env=env).returncode
        if status != LACKS:
            return status
    print(f"skipped: needs {' and '.join(['torch', *needs])} (tools/setup.sh installs them into build)")
    return SKIP


if __name__ == "__main__":
    sys.exit(main())
