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


def _first(candidates: list[pathlib.Path]) -> pathlib.Path | None:
    return next((path for path in candidates if path.is_file()), None)


def library_path() -> str:
    """PERSEUS_FUSED_LIBRARY, else the library in the package, else the build folder of the repository, else the
    system's."""
    named = os.environ.get("PERSEUS_FUSED_LIBRARY")
    if named:
        return named
    path = _first([_HERE / "lib/libperseus-fused.so",
                   *(parent / "build/fused/libperseus-fused.so" for parent in _HERE.parents)])
    return str(path) if path else "libperseus-fused.so"


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
            raise PerseusError(f"perseus: {path} cannot be opened: {e}. Set PERSEUS_FUSED_LIBRARY to "
                               "libperseus-fused.so", -errno.ENOENT) from e
        describe = getattr(self.dll, "prs_fused_header", None)
        if describe is None:
            raise PerseusError(f"perseus: {path} is no libperseus-fused, or one without prs_fused_header(): build it "
                               "again", -errno.ENOSYS)
        describe.restype = ctypes.c_char_p
        header = Header(describe().decode())
        self.path, self.structs, self.constants = path, header.structs, header.constants
        for name, (result, parameters) in header.functions.items():
            function = getattr(self.dll, name)
            function.restype, function.argtypes = result, parameters
            setattr(self, name, function)
        self.emulated = hasattr(self.dll, "hopper_setup")

    def __getattr__(self, name: str) -> Any:
        if name in self.__dict__.get("structs", ()):
            return self.structs[name]
        if name in self.__dict__.get("constants", ()):
            return self.constants[name]
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
