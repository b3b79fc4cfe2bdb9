# SPDX-License-Identifier: Apache-2.0
"""Finds and opens libperseus-fused, and turns its results into exceptions."""
from __future__ import annotations

import ctypes
import errno
import functools
import os
import pathlib
from typing import Any

from ._header import ALLGATHER, Header  # noqa: F401

_HERE = pathlib.Path(__file__).resolve().parent


class PerseusError(RuntimeError):
    """A call or a launch failed. `code` is -errno; `rank` is the rank to blame, or None where none is known."""

    def __init__(self, text: str, code: int = -errno.EIO, rank: int | None = None) -> None:
        super().__init__(text)
        self.code, self.rank = code, rank


def _checkout() -> pathlib.Path | None:
    """The repository whose fused/python/perseus this file is; None where it was installed. Other folders above this
    one may belong to anybody, and a library runs code when it is opened."""
    root = _HERE.parents[2] if len(_HERE.parents) > 2 else _HERE
    mine = _HERE == root / "fused/python/perseus" and (root / "include/perseus/fused.h").is_file()
    return root if mine else None


def _find(name: str, built: str) -> pathlib.Path | None:
    """A library of this installation, else of the build folder of this checkout."""
    root = _checkout()
    candidates = [_HERE / "lib" / name] + ([root / "build" / built / name] if root else [])
    return next((path for path in candidates if path.is_file()), None)


def library_path() -> str:
    """PERSEUS_FUSED_LIBRARY, where `emulated` stands for the emulator of Hopper GPUs; else the library in the package,
    else in the build folder of this checkout, else the system's."""
    named = os.environ.get("PERSEUS_FUSED_LIBRARY")
    if named == "emulated":
        emulated = _find("libperseus-fused-emulated.so", "tools/hopper")
        if not emulated:
            raise PerseusError("perseus: PERSEUS_FUSED_LIBRARY=emulated: this installation has no emulated library: "
                               "build it (ninja -C BUILD emulator) before the package is installed", -errno.ENOENT)
        return str(emulated)
    path = _find("libperseus-fused.so", "fused")
    return named or str(path or "libperseus-fused.so")


def bundled(name: str) -> str:
    """Path of a file that wheels may contain beside the library: libnccl-net-perseus.so, softnic-run."""
    path = _HERE / "lib" / name
    if not path.exists():
        raise PerseusError(f"perseus: this installation has no {name}: it was built without it", -errno.ENOENT)
    return str(path)


class Library:
    """Structs, constants and functions of fused.h as attributes, as the library itself describes them. A call releases
    Python's global lock."""

    def __init__(self, path: str) -> None:
        try:
            self.dll = ctypes.CDLL(path)
        except OSError as e:
            cause = ("this installation holds no library, and the system has none: build it with -Dparts=fused and "
                     "install the package again" if path == "libperseus-fused.so"
                     else "is PERSEUS_FUSED_LIBRARY right?")
            raise PerseusError(f"perseus: {path} cannot be opened: {e}: {cause}", -errno.ENOENT) from e
        describe = getattr(self.dll, "prs_fused_header", None)
        if describe is None:
            raise PerseusError(f"perseus: {path} is no libperseus-fused, or one without prs_fused_header(): build it "
                               "again", -errno.ENOSYS)
        describe.restype = ctypes.c_char_p
        header = Header(describe().decode())
        self.path, self.structs, self.constants = path, header.structs, header.constants
        self.__dict__.update(self.constants)
        self.__dict__.update(self.structs)
        for name, (result, parameters) in header.functions.items():  # a function's name may be that of a struct, too
            function = getattr(self.dll, name)
            function.restype, function.argtypes = result, parameters
            setattr(self, name, function)
        self.emulated = hasattr(self.dll, "hopper_setup")

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"the headers of libperseus-fused declare no {name}")

    def error_text(self) -> str:
        return (self.prs_fused_error_text() or b"").decode(errors="replace")

    def check(self, status: int, what: str) -> None:
        if status != 0:
            name = errno.errorcode.get(-status, str(status))
            raise PerseusError(f"{what}: {name}: {self.error_text()}", status)


@functools.lru_cache(maxsize=1)
def library() -> Library:
    """The library, opened at the first call."""
    return Library(library_path())
