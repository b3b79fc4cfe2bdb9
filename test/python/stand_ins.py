# SPDX-License-Identifier: Apache-2.0
"""Stand-ins for modules that a framework imports and nothing of a test runs: libraries of HTTP, images, grammars."""
import importlib.abc
import importlib.machinery
import sys
from unittest import mock


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
