"""List mutants by cosmic-ray's operators, in its environment: `scripts/mutations.py EACH SEED MODULE...`, with paths.

Prints JSON: of each module EACH mutants, drawn by a hash of their text, so that a change elsewhere leaves the rest of
the draw as it is. Left out is what no test should hold: type annotations, the words of errors and of the log, and
operators that any test notices, as `+` made `<<`.
"""

from __future__ import annotations

import ast
import difflib
import hashlib
import json
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code
from cosmic_ray.operators.provider import OperatorProvider

BINARY = ("Add_Sub", "Sub_Add", "Mul_Div", "Div_Mul", "FloorDiv_Mul", "FloorDiv_Div", "Mod_FloorDiv", "Pow_Mul")
UNARY = ("USub_UAdd", "Delete_USub", "Delete_Not")
ORDER = ("Lt", "LtE", "Gt", "GtE")
OPERATORS = (
    *(f"ReplaceBinaryOperator_{pair}" for pair in BINARY),
    *(f"ReplaceUnaryOperator_{pair}" for pair in UNARY),
    *(f"ReplaceComparisonOperator_{a}_{b}" for a in ORDER for b in ORDER if a != b),
    "ReplaceComparisonOperator_Eq_NotEq",
    "ReplaceComparisonOperator_NotEq_Eq",
    "ReplaceComparisonOperator_Is_IsNot",
    "ReplaceComparisonOperator_IsNot_Is",
    "AddNot",
    "ReplaceTrueWithFalse",
    "ReplaceFalseWithTrue",
    "ReplaceAndWithOr",
    "ReplaceOrWithAnd",
    "ReplaceBreakWithContinue",
    "ReplaceContinueWithBreak",
    "ExceptionReplacer",
    "NumberReplacer",
    "RemoveDecorator",
    "ZeroIterationForLoop",
)
Place = tuple[int, int]


class Site(NamedTuple):
    """One change that one operator can make: the `occurrence`-th of its places in the module."""

    operator: str
    occurrence: int
    start: Place
    stop: Place


def sites(code: str) -> Iterator[Site]:
    tree = get_ast(code)
    provider = OperatorProvider()
    operators = {name: provider[name]() for name in OPERATORS}
    counts: Counter[str] = Counter()
    for node in ast_nodes(tree):
        for name, operator in operators.items():
            for start, stop in operator.mutation_positions(node):
                yield Site(name, counts[name], start, stop)
                counts[name] += 1


def silent_places(tree: ast.Module) -> list[tuple[Place, Place]]:
    """Return from where to where no mutant is made: annotations, what is raised or logged, imports for types alone."""
    found: list[ast.AST | None] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.arg | ast.AnnAssign):
            found.append(node.annotation)
        elif isinstance(node, ast.FunctionDef):
            found.append(node.returns)
        elif isinstance(node, ast.Raise) or is_for_types(node) or is_log(node):
            found.append(node)
    words = [place(node) for node in found if node is not None]
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    return words + [place(node) for function in functions for node in told(function, words)]


def is_for_types(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"


def is_log(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and ast.unparse(node.func).startswith("logger.")


def told(function: ast.FunctionDef, words: list[tuple[Place, Place]]) -> Iterator[ast.Assign]:
    """Yield the assignments in `function` to names that are read in `words` alone: parts of an error's text."""
    names = [node for node in ast.walk(function) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)]
    for node in ast.walk(function):
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            reads = [(name.lineno, name.col_offset) for name in names if name.id == node.targets[0].id]
            if reads and all(any(start <= read < stop for start, stop in words) for read in reads):
                yield node


def place(node: Any) -> tuple[Place, Place]:
    return (node.lineno, node.col_offset), (node.end_lineno, node.end_col_offset)


def first_line(node: ast.stmt) -> int:
    return min([node.lineno, *(each.lineno for each in getattr(node, "decorator_list", ()))])


def where_run(tree: ast.Module, line: int) -> dict[str, Any]:
    """Return the lines of the statement at `line`, of a function's head those of its body.

    Of what runs at import, `names` are those that it gives a value to, none for a class.
    """
    around = [n for n in ast.walk(tree) if isinstance(n, ast.stmt) and first_line(n) <= line <= n.end_lineno]
    inner = max(around, key=lambda n: (first_line(n), -n.end_lineno))
    body = getattr(inner, "body", None)
    if isinstance(inner, ast.FunctionDef):
        # defaults and decorators matter where the function runs
        return {"at_import": False, "lines": list(range(inner.body[0].lineno, inner.end_lineno + 1)), "names": []}
    last = body[0].lineno - 1 if body else inner.end_lineno
    # an except clause runs without its try's head
    first = line if line > last else first_line(inner)
    at_import = not any(isinstance(n, ast.FunctionDef) for n in around)
    names = [n.id for n in ast.walk(inner) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)]
    in_class = any(isinstance(n, ast.ClassDef) for n in around)
    return {
        "at_import": at_import,
        "lines": list(range(first, max(last, line) + 1)),
        "names": names if at_import and not in_class else [],
    }


def change(before: str, after: str) -> tuple[str, str]:
    """Return the lines that differ, stripped, of the code before and after."""
    old, new = before.splitlines(), after.splitlines()
    out: tuple[list[str], list[str]] = ([], [])
    for tag, a, b, c, d in difflib.SequenceMatcher(None, old, new, autojunk=False).get_opcodes():
        if tag != "equal":
            out[0].extend(line.strip() for line in old[a:b])
            out[1].extend(line.strip() for line in new[c:d])
    return " / ".join(out[0]), " / ".join(out[1])


def mutants(module: str, each: int, seed: str) -> tuple[int, list[dict[str, Any]]]:
    """Return how many places of the module can be changed, and the mutants drawn of them, one a place."""
    code = Path(module).read_text()
    tree, lines = ast.parse(code), code.splitlines()
    silent = silent_places(tree)
    ranked: dict[str, Site] = {}
    same: Counter[str] = Counter()
    for site in sites(code):
        if any(start <= site.start < stop for start, stop in silent):
            continue
        text = f"{seed} {site.operator} {site.start[1]} {lines[site.start[0] - 1]}"
        same[text] += 1
        ranked[hashlib.sha256(f"{text} {same[text]}".encode()).hexdigest()] = site
    drawn: dict[tuple[str, Place, Place], Site] = {}
    for _, site in sorted(ranked.items()):
        drawn.setdefault((site.operator.partition("_")[0], site.start, site.stop), site)
    provider = OperatorProvider()
    found = []
    for site in list(drawn.values()):
        if len(found) == each:
            break
        try:
            mutated = mutate_code(code, provider[site.operator](), site.occurrence)
            ast.parse(mutated)
        except (AttributeError, SyntaxError):
            # an exception with a dot in its name, and the ** of a dict, which cosmic-ray takes for names and powers
            continue
        before, after = change(code, mutated)
        if not before or before == after:
            continue
        found.append(
            {
                "module": module,
                "line": site.start[0],
                "operator": site.operator,
                "before": before,
                "after": after,
                **where_run(tree, site.start[0]),
                "code": mutated,
            }
        )
    return len(drawn), found


if __name__ == "__main__":
    each, seed, *modules = sys.argv[1:]
    out = {module: mutants(module, int(each), seed) for module in modules}
    json.dump(out, sys.stdout)
