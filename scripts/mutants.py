"""Measure how many small changes of the code the unit tests detect: `make mutants`, or see --help.

cosmic-ray makes one change at a time in a copy of the tree. It then runs the unit tests that reach the changed line,
the quickest first, until one fails or the tests have taken 30 seconds. benchmarks/mutants.json contains the score and
the changes that survived. scripts/equivalent_mutants.json lists changes that no test could detect. They do not count.

Results are saved in .cache/mutants.d. An interrupted run resumes. After a change of the code it starts again.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import re
import shlex
import shutil
import sqlite3
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from xml.etree import ElementTree

from setup import CACHE, ROOT

STATE = CACHE / "mutants.d"
TREE, REACHED, TIMES = STATE / "tree", STATE / "coverage", STATE / "times.xml"
TOOL = CACHE / "mutants" / "bin" / "cosmic-ray"
EQUIVALENT = Path(__file__).with_name("equivalent_mutants.json")
FIGURES = ROOT / "benchmarks" / "mutants.json"
MODULES = ("sampling/*.py", "model/forward.py", "model/text.py", "checkpoints/*.py", "decode/*.py", "engine/loop.py")
PYTEST = (sys.executable, "-m", "pytest", "-c", "tests/pytest.ini", "-p", "no:cacheprovider")
SECONDS = 30.0
# The kinds of changes. Kinds that every test detects are left out, such as `+` to `<<`.
OPERATORS = re.compile(
    r"core/(ReplaceBinaryOperator_(Add_Sub|Sub_Add|Mul_Div|Div_Mul|FloorDiv_Mul|FloorDiv_Div|Mod_FloorDiv|Pow_Mul)"
    r"|ReplaceUnaryOperator_(USub_UAdd|Delete_USub|Delete_Not)|ReplaceComparisonOperator_[LG]tE?_[LG]tE?"
    r"|ReplaceComparisonOperator_(Eq_NotEq|NotEq_Eq|Is_IsNot|IsNot_Is)|AddNot|Replace(TrueWithFalse|FalseWithTrue)"
    r"|Replace(AndWithOr|OrWithAnd|BreakWithContinue|ContinueWithBreak)|ExceptionReplacer|NumberReplacer"
    r"|RemoveDecorator|ZeroIterationForLoop)"
)


def measure() -> None:
    """Copy the tree and run all quick unit tests in it, to record their times and the lines that they reach."""
    shutil.rmtree(STATE, ignore_errors=True)
    shutil.copytree(ROOT, TREE, ignore=shutil.ignore_patterns(".git", ".venv", ".cache", "__pycache__", "output"))
    settings = STATE / "coverage.ini"
    settings.write_text(f"[run]\ndynamic_context = test_function\ndata_file = {REACHED}\ninclude = sana_core/*\n")
    command = [sys.executable, "-m", "coverage", "run", f"--rcfile={settings}", *PYTEST[1:]]
    subprocess.run([*command, "-m", "not slow", f"--junitxml={TIMES}", "tests/unit"], cwd=TREE, check=True)


def prose(module: str) -> list[range]:
    """Return the lines that tests need not check: texts of errors and logs, and imports for type checking."""

    def is_prose(node: ast.AST) -> bool:
        code = ast.unparse(node) if isinstance(node, ast.Raise | ast.Call | ast.If) else ""
        return code.startswith(("raise ", "logger.", "if TYPE_CHECKING"))

    nodes = filter(is_prose, ast.walk(ast.parse((ROOT / module).read_text())))
    return [range(node.lineno, node.end_lineno + 1) for node in nodes]


def sample(session: Path, modules: list[str], per_module: int, seed: str) -> None:
    """Fill `session` with `per_module` changes of every module. A hash of the change chooses them."""
    tests = shlex.join([sys.executable, str(Path(__file__).resolve()), "--nearest"])
    settings = {"module-path": modules, "timeout": 60 + 10 * SECONDS, "excluded-modules": [], "test-command": tests}
    # Strings, numbers and lists have the same syntax in JSON and TOML.
    lines = [f"{key} = {json.dumps(value)}" for key, value in settings.items()]
    session.with_suffix(".toml").write_text("\n".join(["[cosmic-ray]", *lines, 'distributor.name = "local"\n']))
    subprocess.run([TOOL, "init", session.with_suffix(".toml"), session], cwd=TREE, check=True)
    changes, silent = defaultdict(list), {module: prose(module) for module in modules}
    with sqlite3.connect(session) as database:
        columns = "job_id, module_path, operator_name, start_pos_row, start_pos_col, occurrence"
        for job, module, name, line, *position in database.execute(f"select {columns} from mutation_specs"):
            if OPERATORS.fullmatch(name) and not any(line in lines for lines in silent[module]):
                key = f"{seed} {module} {name} {line} {position}"
                changes[module].append((hashlib.sha256(key.encode()).hexdigest(), job))
        sampled = [(job,) for jobs in changes.values() for _, job in sorted(jobs)[:per_module]]
        database.execute("create temp table sampled (job_id)")
        database.executemany("insert into sampled values (?)", sampled)
        for table in ("mutation_specs", "work_items"):
            database.execute(f"delete from {table} where job_id not in sampled")


def nearest() -> list[str]:
    """Return the unit tests that reach the changed line of the copy, the quickest first, for up to SECONDS."""
    from coverage import CoverageData

    changed = [file for file in TREE.glob("sana_core/**/*.py") if differing(file)]
    reached = CoverageData(str(REACHED))
    reached.read()
    contexts = reached.contexts_by_lineno(str(changed[0]))
    # Coverage records the first line of a statement with several lines. A line that runs at import belongs to no test,
    # so all tests of the module are chosen then.
    first_line = max((line for line in contexts if line <= differing(changed[0])), default=0)
    names = set(contexts.get(first_line, ())) - {""} or set().union(*contexts.values()) - {""}
    seconds: dict[str, float] = defaultdict(float)
    for case in ElementTree.parse(TIMES).iter("testcase"):
        module, test = case.get("classname").rpartition(".")[2], case.get("name").partition("[")[0]
        seconds[f"{module}.{test}"] += float(case.get("time"))
    chosen, total = [], 0.0
    for name in sorted(names & seconds.keys(), key=lambda name: seconds[name]):
        total += seconds[name]
        if not chosen or total < SECONDS:
            chosen.append("tests/unit/{}.py::{}".format(*name.split(".", 1)))
    return chosen


def differing(file: Path) -> int:
    """Return the number of the first line that differs between `file` of the copy and the tree, or 0."""
    pairs = zip(file.read_text().splitlines(), (ROOT / file.relative_to(TREE)).read_text().splitlines(), strict=False)
    return next((number for number, (new, old) in enumerate(pairs, 1) if new != old), 0)


def figures(session: Path, modules: Iterable[str]) -> dict:
    """Return the score, which is the share of detectable changes that a test detects, and the counts per module."""
    equivalent = json.loads(EQUIVALENT.read_text())
    counts = {module: {"sampled": 0, "equivalent": 0, "killed": 0, "survivors": []} for module in modules}
    columns = "module_path, start_pos_row, test_outcome, diff"
    query = f"select {columns} from mutation_specs join work_results using (job_id) order by module_path, start_pos_row"
    for module, line, outcome, diff in sqlite3.connect(session).execute(query).fetchall():
        before, after = (
            " ".join(row[1:].strip() for row in diff.splitlines() if re.match(rf"\{sign}(?!\{sign})", row))
            for sign in "-+"
        )
        count, mutant = counts[module], {"module": module, "before": before, "after": after}
        count["sampled"] += 1
        if any(all(mutant[key] == entry.get(key, mutant[key]) for key in mutant) for entry in equivalent):
            count["equivalent"] += 1
        elif outcome == "SURVIVED":
            count["survivors"].append(f"{module}:{line}: {before} -> {after}")
        else:
            count["killed"] += 1
    totals = {name: sum(count[name] for count in counts.values()) for name in ("sampled", "equivalent", "killed")}
    score = round(totals["killed"] / (totals["sampled"] - totals["equivalent"]), 3)
    return {"score": score, **totals, "modules": counts}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--each", type=int, default=10, help="changes per module (10)")
    parser.add_argument("--seed", default="0", help="seed of the choice (0)")
    parser.add_argument(
        "--only", nargs="+", help="modules, such as sana_core/model/text.py; the figures are shown, not written"
    )
    parser.add_argument("--again", action="store_true", help="repeat the surviving changes with the current tests")
    parser.add_argument("--nearest", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.nearest:  # cosmic-ray's test command, in the copy
        tests = nearest()
        raise SystemExit(subprocess.run([*PYTEST, "-x", *tests]).returncode if tests else 0)
    modules = args.only or [
        str(file.relative_to(ROOT)) for name in MODULES for file in sorted(ROOT.glob(f"sana_core/{name}"))
    ]
    key = hashlib.sha256(repr((args.each, args.seed, modules)).encode())
    key.update(b"".join(path.read_bytes() for path in sorted(ROOT.glob("sana_core/**/*.py"))))
    session = STATE / f"{key.hexdigest()[:16]}.sqlite"
    if args.again:
        shutil.copytree(ROOT / "tests", TREE / "tests", dirs_exist_ok=True)
        with sqlite3.connect(session) as database:
            database.execute("delete from work_results where test_outcome = 'SURVIVED'")
    elif not session.exists():
        measure()
        sample(session, modules, args.each, args.seed)
    subprocess.run([TOOL, "exec", session.with_suffix(".toml"), session], cwd=TREE, check=True)
    results = figures(session, modules)
    sys.stdout.write(json.dumps(results, indent=1) + "\n")
    if not args.only:
        sys.path.append(str(ROOT))
        from benchmarks.machine import description

        settings = {"machine": description(), "each": args.each, "seed": args.seed}
        FIGURES.write_text(json.dumps(settings | results, indent=1) + "\n")


if __name__ == "__main__":
    main()
