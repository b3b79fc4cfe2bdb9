# SPDX-License-Identifier: Apache-2.0
"""Puts what is built into the wheel: libperseus-fused, and the NCCL plugin and the software NIC where they are built
too.

PERSEUS_BUILD names the Meson build folder; default: build/ of the repository. Without a built library the wheel has
none, and the package looks for one at run time (PERSEUS_FUSED_LIBRARY, or the system's). The library needs no Python
and no CUDA runtime, so one wheel serves every Python, and every driver that its CUDA version runs on.
"""
import os
import pathlib
import shutil

from setuptools import Distribution, setup
from setuptools.command.build_py import build_py

try:
    from setuptools.command.bdist_wheel import bdist_wheel
except ImportError:
    from wheel.bdist_wheel import bdist_wheel

REPOSITORY = pathlib.Path(__file__).resolve().parents[2]
BUILD = pathlib.Path(os.environ.get("PERSEUS_BUILD", REPOSITORY / "build"))
CONTENTS = {"fused/libperseus-fused.so": "libperseus-fused.so",
            "plugin/libnccl-net-perseus.so": "libnccl-net-perseus.so",
            "tools/softnic/softnic-run": "softnic-run", "tools/softnic/softnicctl": "softnicctl"}


def built():
    """(file, its name in perseus/lib) for each that exists."""
    found = [(BUILD / source, name) for source, name in CONTENTS.items() if (BUILD / source).is_file()]
    return found + [(path, f"lib/{path.name}") for path in sorted((BUILD / "tools/softnic/lib").glob("*.so*"))
                    if path.is_file()]


class Build(build_py):
    def run(self):
        super().run()
        folder = pathlib.Path(self.build_lib) / "perseus/lib"
        shutil.rmtree(folder, ignore_errors=True)
        for path, name in built():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, folder / name)
        if not (folder / "libperseus-fused.so").exists():
            self.announce(f"perseus: no {BUILD}/fused/libperseus-fused.so: this package will look for the library at "
                          "run time", 3)


class Wheel(bdist_wheel):
    def get_tag(self):
        return ("py3", "none", super().get_tag()[2])


class Package(Distribution):
    def has_ext_modules(self):
        return bool(built())  # so that the wheel belongs to this kind of machine


setup(cmdclass={"build_py": Build, "bdist_wheel": Wheel}, distclass=Package)
