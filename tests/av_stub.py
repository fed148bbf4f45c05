"""Stands in for PyAV (35 MB) in the bundle of `make gpu`. ComfyUI imports PyAV at its start, and images do not need it.

Every submodule and every name exists. Calls return another placeholder.
"""

import importlib.abc
import importlib.machinery
import sys
import types

__version__ = "18.1.0"
__path__ = []


class Placeholder:
    def __init__(self, *arguments, **options):
        pass

    def __call__(self, *arguments, **options):
        return Placeholder()

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return Placeholder()


class Module(types.ModuleType):
    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (Placeholder,), {})


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path=None, target=None):
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if name.startswith("av.") else None

    def create_module(self, spec):
        return Module(spec.name)

    def exec_module(self, module):
        pass


sys.meta_path.insert(0, Finder())


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return type(name, (Placeholder,), {})
