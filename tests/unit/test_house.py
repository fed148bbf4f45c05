"""Rules for the code: each module begins with a sentence, and no modules import each other in a circle."""

import ast
import importlib
from graphlib import TopologicalSorter

import pytest
from setup import ROOT

PATHS = [path for name in ("sana_core", "nodes", "scripts") for path in sorted(ROOT.glob(f"{name}/**/*.py"))]
MODULES = {path.relative_to(ROOT): ast.parse(path.read_text()) for path in PATHS}


@pytest.mark.parametrize("path", MODULES, ids=str)
def test_every_module_begins_with_a_sentence(path):
    first = (ast.get_docstring(MODULES[path]) or "none").splitlines()[0]
    assert len(first.split()) > 1 and (first[0].isupper() or first[0] == "`") and first[-1] in ".:", first


def test_no_module_imports_itself_by_way_of_others():
    TopologicalSorter({name: imports(name) for name in names()}).prepare()


def names():
    """Return {dotted name: path} of the pack's modules."""
    results = {".".join(path.with_suffix("").parts): path for path in MODULES if path.parts[0] != "scripts"}
    return {name.removesuffix(".__init__"): path for name, path in results.items()}


def imports(name):
    """Return the modules of the pack that `name` imports: at once, when a function runs, or for types."""
    items = relative_imports(name)
    return ({f"{base}.{item}" if f"{base}.{item}" in names() else base for base, item in items} & names().keys()) - {
        name
    }


def relative_imports(name):
    """Return the pairs (module, imported name) of the relative imports in the module `name`."""
    path, result = names()[name], set()
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    for node in ast.walk(MODULES[path]):
        if isinstance(node, ast.ImportFrom) and node.level:
            parts = package.split(".")
            # The whole pack is a package above nodes and sana_core.
            base = ".".join([*parts[: len(parts) - node.level + 1], *filter(None, [node.module])]).lstrip(".")
            result |= {(base, alias.name) for alias in node.names}
    return result


def test_the_nodes_import_names_that_the_engine_has():
    """mypy checks the engine only. A node with a wrong import fails when ComfyUI loads the pack."""
    modules = [name for name in names() if name.partition(".")[0] == "nodes"]
    imported = {item for name in modules for item in relative_imports(name) if item[0].partition(".")[0] == "sana_core"}
    missing = [
        f"{base}.{item}"
        for base, item in sorted(imported)
        if f"{base}.{item}" not in names() and not hasattr(importlib.import_module(base), item)
    ]
    assert len(imported) > 200 and not missing
