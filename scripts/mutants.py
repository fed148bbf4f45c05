"""How many small changes of the code the unit tests notice: `make mutants`, or see --help.

cosmic-ray changes a copy of the tree in one place at a time, and runs the unit tests that reach the changed line, the
quick ones first, until one fails or 30 seconds of them have passed. What survives is listed in benchmarks/mutants.json
with the score. What no test can tell from the code as it is stands in scripts/equivalent_mutants.json and does not
count.

All that is known lies in .cache/mutants.d: a run that was ended resumes, and changed code begins again.
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
MODULES = ("sampling/*.py", "model/forward.py", "model/text.py", "checkpoints/*.py", "decode/*.py", "batch/queue.py")
PYTEST = (sys.executable, "-m", "pytest", "-c", "tests/pytest.ini", "-p", "no:cacheprovider")
SECONDS = 30.0
# without what any test notices, as `+` made `<<`
OPERATORS = re.compile(
    r"core/(ReplaceBinaryOperator_(Add_Sub|Sub_Add|Mul_Div|Div_Mul|FloorDiv_Mul|FloorDiv_Div|Mod_FloorDiv|Pow_Mul)"
    r"|ReplaceUnaryOperator_(USub_UAdd|Delete_USub|Delete_Not)|ReplaceComparisonOperator_[LG]tE?_[LG]tE?"
    r"|ReplaceComparisonOperator_(Eq_NotEq|NotEq_Eq|Is_IsNot|IsNot_Is)|AddNot|Replace(TrueWithFalse|FalseWithTrue)"
    r"|Replace(AndWithOr|OrWithAnd|BreakWithContinue|ContinueWithBreak)|ExceptionReplacer|NumberReplacer"
    r"|RemoveDecorator|ZeroIterationForLoop)"
)


def measure() -> None:
    """Copy the tree, and run all quick unit tests in it once: what they take, and which lines each of them reaches."""
    shutil.rmtree(STATE, ignore_errors=True)
    shutil.copytree(ROOT, TREE, ignore=shutil.ignore_patterns(".git", ".venv", ".cache", "__pycache__", "output"))
    settings = STATE / "coverage.ini"
    settings.write_text(f"[run]\ndynamic_context = test_function\ndata_file = {REACHED}\ninclude = sana_core/*\n")
    command = [sys.executable, "-m", "coverage", "run", f"--rcfile={settings}", *PYTEST[1:]]
    subprocess.run([*command, "-m", "not slow", f"--junitxml={TIMES}", "tests/unit"], cwd=TREE, check=True)


def prose(module: str) -> list[range]:
    """Return the lines that no test should hold: what is raised or logged, and imports for types alone."""

    def is_prose(node: ast.AST) -> bool:
        code = ast.unparse(node) if isinstance(node, ast.Raise | ast.Call | ast.If) else ""
        return code.startswith(("raise ", "logger.", "if TYPE_CHECKING"))

    nodes = filter(is_prose, ast.walk(ast.parse((ROOT / module).read_text())))
    return [range(node.lineno, node.end_lineno + 1) for node in nodes]


def draw(session: Path, modules: list[str], each: int, seed: str) -> None:
    """Fill `session` with `each` changes of every module, drawn by a hash of what they change."""
    tests = shlex.join([sys.executable, str(Path(__file__).resolve()), "--nearest"])
    settings = {"module-path": modules, "timeout": 60 + 10 * SECONDS, "excluded-modules": [], "test-command": tests}
    # JSON's strings, numbers and lists are TOML's
    lines = [f"{key} = {json.dumps(value)}" for key, value in settings.items()]
    session.with_suffix(".toml").write_text("\n".join(["[cosmic-ray]", *lines, 'distributor.name = "local"\n']))
    subprocess.run([TOOL, "init", session.with_suffix(".toml"), session], cwd=TREE, check=True)
    found, silent = defaultdict(list), {module: prose(module) for module in modules}
    with sqlite3.connect(session) as known:
        columns = "job_id, module_path, operator_name, start_pos_row, start_pos_col, occurrence"
        for job, module, name, line, *place in known.execute(f"select {columns} from mutation_specs"):
            if OPERATORS.fullmatch(name) and not any(line in lines for lines in silent[module]):
                key = f"{seed} {module} {name} {line} {place}"
                found[module].append((hashlib.sha256(key.encode()).hexdigest(), job))
        drawn = [(job,) for jobs in found.values() for _, job in sorted(jobs)[:each]]
        known.execute("create temp table drawn (job_id)")
        known.executemany("insert into drawn values (?)", drawn)
        for table in ("mutation_specs", "work_items"):
            known.execute(f"delete from {table} where job_id not in drawn")


def nearest() -> list[str]:
    """Return the unit tests that reach the line in which the copy differs, the quick ones first, for SECONDS."""
    from coverage import CoverageData

    changed = [file for file in TREE.glob("sana_core/**/*.py") if differing(file)]
    reached = CoverageData(str(REACHED))
    reached.read()
    contexts = reached.contexts_by_lineno(str(changed[0]))
    # of a statement of several lines the first is known; what runs at import is seen wherever the module works
    at = max((line for line in contexts if line <= differing(changed[0])), default=0)
    names = set(contexts.get(at, ())) - {""} or set().union(*contexts.values()) - {""}
    seconds: dict[str, float] = defaultdict(float)
    for case in ElementTree.parse(TIMES).iter("testcase"):
        place = case.get("classname").replace(".", "/"), case.get("name").partition("[")[0]
        seconds[f"{place[0].rpartition('/')[2]}.{place[1]}"] += float(case.get("time"))
    chosen, total = [], 0.0
    for name in sorted(names & seconds.keys(), key=lambda name: seconds[name]):
        total += seconds[name]
        if not chosen or total < SECONDS:
            chosen.append("tests/unit/{}.py::{}".format(*name.split(".", 1)))
    return chosen


def differing(file: Path) -> int:
    """Return the first line in which `file` of the copy is not as in the tree, 0 for none."""
    pairs = zip(file.read_text().splitlines(), (ROOT / file.relative_to(TREE)).read_text().splitlines(), strict=False)
    return next((number for number, (new, old) in enumerate(pairs, 1) if new != old), 0)


def figures(session: Path, modules: Iterable[str]) -> dict:
    """Return the share of changes that a test tells from the code, of those that one could, and the rest."""
    equivalent = json.loads(EQUIVALENT.read_text())
    found = {module: {"sampled": 0, "equivalent": 0, "killed": 0, "survivors": []} for module in modules}
    columns = "module_path, start_pos_row, test_outcome, diff"
    query = f"select {columns} from mutation_specs join work_results using (job_id) order by module_path, start_pos_row"
    for module, line, outcome, diff in sqlite3.connect(session).execute(query).fetchall():
        before, after = (
            " ".join(row[1:].strip() for row in diff.splitlines() if re.match(rf"\{sign}(?!\{sign})", row))
            for sign in "-+"
        )
        own, mutant = found[module], {"module": module, "before": before, "after": after}
        own["sampled"] += 1
        if any(all(mutant[key] == each.get(key, mutant[key]) for key in mutant) for each in equivalent):
            own["equivalent"] += 1
        elif outcome == "SURVIVED":
            own["survivors"].append(f"{module}:{line}: {before} -> {after}")
        else:
            own["killed"] += 1
    totals = {name: sum(own[name] for own in found.values()) for name in ("sampled", "equivalent", "killed")}
    score = round(totals["killed"] / (totals["sampled"] - totals["equivalent"]), 3)
    return {"score": score, **totals, "modules": found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--each", type=int, default=10, help="changes of each module (10)")
    parser.add_argument("--seed", default="0", help="of the draw (0)")
    parser.add_argument(
        "--only", nargs="+", help="modules, like sana_core/model/text.py; the figures are shown, not written"
    )
    parser.add_argument("--again", action="store_true", help="try what survived once more, with the tests as they are")
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
        with sqlite3.connect(session) as known:
            known.execute("delete from work_results where test_outcome = 'SURVIVED'")
    elif not session.exists():
        measure()
        draw(session, modules, args.each, args.seed)
    subprocess.run([TOOL, "exec", session.with_suffix(".toml"), session], cwd=TREE, check=True)
    found = figures(session, modules)
    sys.stdout.write(json.dumps(found, indent=1) + "\n")
    if not args.only:
        sys.path.append(str(ROOT))
        from benchmarks.machine import description

        own = {"machine": description(), "each": args.each, "seed": args.seed}
        FIGURES.write_text(json.dumps(own | found, indent=1) + "\n")


if __name__ == "__main__":
    main()
