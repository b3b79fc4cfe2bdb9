# SPDX-License-Identifier: Apache-2.0
"""Puts what is built into the wheel: libperseus-fused, and its emulated form, the NCCL plugin and the software NIC
where they are built too.

PERSEUS_BUILD names the Meson build folder, seen from the repository; default: build. A wheel without the library is
refused, since it would fail at the first call. The library needs no Python and no CUDA runtime, so one wheel serves
every Python, and every driver that its CUDA version runs on.
"""
import os
import pathlib
import shutil
import subprocess
import sys

from setuptools import Distribution, setup
from setuptools.command.build_py import build_py

try:
    from setuptools.command.bdist_wheel import bdist_wheel
except ImportError:
    from wheel.bdist_wheel import bdist_wheel

REPOSITORY = pathlib.Path(__file__).resolve().parents[2]
BUILD = REPOSITORY / os.environ.get("PERSEUS_BUILD", "build")
LIBRARY = BUILD / "fused/libperseus-fused.so"
CONTENTS = {LIBRARY: "libperseus-fused.so",
            BUILD / "tools/hopper/libperseus-fused-emulated.so": "libperseus-fused-emulated.so",
            BUILD / "plugin/libnccl-net-perseus.so": "libnccl-net-perseus.so",
            BUILD / "tools/softnic/softnic-run": "softnic-run", BUILD / "tools/softnic/softnicctl": "softnicctl"}

sys.path.insert(0, str(REPOSITORY / "tools/dev"))
from pack_wheel import platform_tag  # noqa: E402


def built():
    """(file, its name in perseus/lib) for each that exists. softnic's links are for compilers: not in a wheel."""
    found = [(source, name) for source, name in CONTENTS.items() if source.is_file()]
    return found + [(path, f"lib/{path.name}") for path in sorted((BUILD / "tools/softnic/lib").glob("*.so*"))
                    if path.is_file() and not path.is_symlink()]


class Build(build_py):
    def run(self):
        super().run()
        if self.editable_mode:  # the checkout's build folder serves
            return
        if not LIBRARY.is_file():
            sys.exit(f"perseus-fused: no {LIBRARY}: build it first (meson setup {BUILD} -Dparts=fused && ninja -C "
                     f"{BUILD}), or say in PERSEUS_BUILD where it is built")
        package = pathlib.Path(self.build_lib) / "perseus"
        shutil.rmtree(package / "lib", ignore_errors=True)
        for path, name in built():
            (package / "lib" / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, package / "lib" / name)
            # Lines of a kernel come from the emulated library's debug information.
            if shutil.which("strip") and "emulated" not in name:
                subprocess.run(["strip", "--strip-unneeded", package / "lib" / name], check=True)
        shutil.copy(REPOSITORY / "LICENSE", package)


class Wheel(bdist_wheel):
    def get_tag(self):
        files = [path for path, _ in built()]
        return "py3", "none", platform_tag(files) if shutil.which("readelf") and files else super().get_tag()[2]


class Package(Distribution):
    def has_ext_modules(self):
        return True  # so that the wheel belongs to this kind of machine


setup(license="Apache-2.0", cmdclass={"build_py": Build, "bdist_wheel": Wheel}, distclass=Package)
