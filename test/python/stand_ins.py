# SPDX-License-Identifier: Apache-2.0
"""Stand-ins for modules that a framework imports and nothing of a test runs: libraries of HTTP, images, grammars."""
import contextlib
import importlib.abc
import importlib.machinery
import pathlib
import sys
import tempfile
import tomllib
from unittest import mock

PYPROJECT = pathlib.Path(__file__).resolve().parents[2] / "fused/python/pyproject.toml"


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, names):
        self.names = names

    def find_spec(self, name, path=None, target=None):
        if any(name == known or name.startswith(known + ".") for known in self.names):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        return mock.MagicMock(name=spec.name, __name__=spec.name, __path__=[], __spec__=spec)

    def exec_module(self, module):
        pass


def stand_in(*names):
    """From now on these modules, and all below them, are mocks."""
    sys.meta_path.insert(0, _Finder(names))


@contextlib.contextmanager
def installed():
    """Meanwhile Python finds what pip would leave of our package: its entry points."""
    groups = tomllib.loads(PYPROJECT.read_text())["project"]["entry-points"]
    with tempfile.TemporaryDirectory() as folder, mock.patch.object(sys, "path", [folder, *sys.path]):
        info = pathlib.Path(folder, "perseus_fused-0.dist-info")
        info.mkdir()
        info.joinpath("METADATA").write_text("Name: perseus-fused\nVersion: 0\n")
        info.joinpath("entry_points.txt").write_text("".join(
            f"[{group}]\n" + "".join(f"{name} = {value}\n" for name, value in points.items())
            for group, points in groups.items()))
        importlib.invalidate_caches()
        yield
