"""What the house asks of its own code: short functions, few parameters, sentences, and no circle of imports."""

import ast
import re
from graphlib import TopologicalSorter

import pytest
from setup import ROOT

import sana_core

MOST_PARAMETERS = 8
MOST_OPEN_TYPES = 130  # lines with Any
PATHS = [path for name in ("sana_core", "nodes", "scripts") for path in sorted(ROOT.glob(f"{name}/**/*.py"))]
MODULES = {path.relative_to(ROOT): ast.parse(path.read_text()) for path in PATHS}
FUNCTIONS = ast.FunctionDef | ast.AsyncFunctionDef


def functions():
    """Yield each function with its module's path and the class that it is a method of, if it is one."""
    for path, module in MODULES.items():
        owners = {each: node for node in ast.walk(module) if isinstance(node, ast.ClassDef) for each in node.body}
        for node in ast.walk(module):
            # the parameters of a kernel are pointers and sizes, which its launch alone names
            if isinstance(node, FUNCTIONS) and not any("jit" in ast.unparse(each) for each in node.decorator_list):
                yield path, owners.get(node), node


def parameters(function):
    listed = function.args
    plain = [*listed.posonlyargs, *listed.args, *listed.kwonlyargs, listed.vararg, listed.kwarg]
    return [each.arg for each in plain if each is not None]


def is_called_by_the_host(path, owner):
    """Whether others write the signature: that of a method, in nodes, of a class with a base of theirs."""
    bases = [ast.unparse(base) for base in owner.bases] if owner is not None else []
    return path.parts[0] == "nodes" and any(base not in ("NamedTuple", "Protocol") for base in bases)


def test_few_lines_leave_a_type_open():
    lines = [
        line
        for path in PATHS
        if path.relative_to(ROOT).parts[0] != "scripts"
        for line in path.read_text().splitlines()
        if re.search(r"\bAny\b", line)
    ]
    assert len(lines) < MOST_OPEN_TYPES


def test_no_function_but_public_ones_and_those_that_the_host_calls_has_many_parameters():
    many = {
        f"{path}: {node.name}": parameters(node)
        for path, owner, node in functions()
        if len(parameters(node)) > MOST_PARAMETERS
        and not is_called_by_the_host(path, owner)
        and node.name not in sana_core.__all__
    }
    assert many == {}


@pytest.mark.parametrize("path", MODULES, ids=str)
def test_every_module_begins_with_a_sentence(path):
    first = (ast.get_docstring(MODULES[path]) or "none").splitlines()[0]
    assert len(first.split()) > 1 and (first[0].isupper() or first[0] == "`") and first[-1] in ".:", first


def test_no_module_imports_itself_by_way_of_others():
    TopologicalSorter({name: imports(name) for name in names()}).prepare()


def names():
    """Return {dotted name: path} of the pack's modules."""
    found = {".".join(path.with_suffix("").parts): path for path in MODULES if path.parts[0] != "scripts"}
    return {name.removesuffix(".__init__"): path for name, path in found.items()}


def imports(name):
    """Return the modules of the pack that `name` imports, at once or when a function runs; types alone do not count."""
    path, found = names()[name], set()
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    everything = list(ast.walk(MODULES[path]))
    checks = [node for node in everything if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"]
    typed = {each for check in checks for each in ast.walk(check)}
    for node in everything:
        if isinstance(node, ast.ImportFrom) and node.level and node not in typed:
            parts = package.split(".")
            # the whole pack is a package above both
            base = ".".join([*parts[: len(parts) - node.level + 1], *filter(None, [node.module])])
            each = {f"{base}.{alias.name}".lstrip(".") for alias in node.names}
            found |= {full if full in names() else base for full in each}
    return (found & names().keys()) - {name}
