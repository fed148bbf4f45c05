"""Which unit tests run which lines, and how long each takes: what `make mutants` chooses its tests by."""

from __future__ import annotations

import ast
import functools
import hashlib
import json
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from forks import STATE, Job, log_of, run_all
from setup import ROOT

# the unit tests that reach the mutants' modules in this process, and take seconds
TESTS = (
    *("accelerator", "batch_local", "batch_queue", "blended_tiles", "checkpoints", "commands", "dc_ae", "decode"),
    *("decode_cancel", "decode_faults", "decode_lite", "errors", "files", "forward", "generate"),
    *("hostile_configs", "hostile_headers", "hostile_pickles", "hostile_places", "latents", "layouts", "memory"),
    *("overwritten_files", "pipelines", "reference", "relatives", "row_partition", "sampling", "softcap", "text"),
    "tokenizer",
)
# of a file whose others start processes
ONLY = {"tests/unit/test_commands.py": ("-k", "convert or inspect")}
# seconds of a test that is tried before those which take longer
QUICK = 0.1
# a test that takes so many times as long has failed; a machine that does something else for a moment is no mutant
SLOWER, GRACE = 10.0, 10.0
MEASURE_SECONDS = 1800
# module, line, and the tests that run it
Lines = dict[str, dict[str, set[str]]]


class Recorder:
    """A plugin of pytest that notes how long each test takes, and with `coverage` which lines it runs."""

    def __init__(self, coverage: Any = None) -> None:
        self.coverage = coverage
        self.seconds: Counter[str] = Counter()
        self.failed: list[str] = []

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        if self.coverage:
            self.coverage.switch_context(nodeid)

    def pytest_runtest_logreport(self, report: Any) -> None:
        self.seconds[report.nodeid] += report.duration
        if report.failed:
            self.failed.append(report.nodeid)

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            self.failed.append(report.nodeid)


class Chooser:
    """A plugin of pytest that runs the given tests {node id: seconds} in their order, each with a time limit."""

    def __init__(self, seconds: dict[str, float]) -> None:
        self.seconds = seconds

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        import pytest

        order = {name: index for index, name in enumerate(self.seconds)}
        items[:] = sorted((item for item in items if item.nodeid in order), key=lambda item: order[item.nodeid])
        for item in items:
            limit = GRACE + SLOWER * self.seconds[item.nodeid]
            item.add_marker(pytest.mark.timeout(limit, method="thread"), append=False)


def run_pytest(tree: Path, files: Iterable[str], plugins: list[Any], *options: str) -> int:
    """Run the tests in `files` of the copy `tree` in this process, a fork, and return pytest's exit status."""
    import pytest

    # the copy's own modules, not those of the tree
    sys.path[:] = [entry for entry in sys.path if Path(entry).resolve() not in (ROOT, ROOT / "scripts")]
    for name in ("setup", "forks", "reach"):
        sys.modules.pop(name, None)
    ini = ["-c", str(tree / "tests" / "pytest.ini"), "-p", "no:cacheprovider", f"--basetemp={tree}.tmp"]
    return int(pytest.main([*ini, "-q", *options, *(str(tree / file) for file in files)], plugins=plugins))


def run_tests(tree: Path, tests: dict[str, float], out: Path) -> int:
    """Run `tests` {node id: seconds} until one fails, write which, and return pytest's exit status."""
    recorder = Recorder()
    files = dict.fromkeys("tests/" + name.partition("::")[0] for name in tests)
    status = run_pytest(tree, files, [Chooser(tests), recorder], "-x")
    out.write_text(json.dumps(recorder.failed[:1]))
    return status


def measure(tree: Path, file: str, out: Path) -> int:
    """Run the tests in `file` and write their seconds, and by module and line the tests that run it, to `out`."""
    import coverage

    cover = coverage.Coverage(data_file=None, config_file=False, include=[f"{tree}/sana_core/*"])
    cover.start()
    recorder = Recorder(cover)
    run_pytest(tree, [file], [recorder], *ONLY.get(file, ()))
    cover.stop()
    data = cover.get_data()
    lines = {
        str(Path(name).relative_to(tree)): {line: sorted(set(tests) - {""}) for line, tests in contexts.items()}
        for name in data.measured_files()
        if (contexts := data.contexts_by_lineno(name))
    }
    good = {name: seconds for name, seconds in recorder.seconds.items() if name not in recorder.failed}
    out.write_text(json.dumps({"seconds": good, "failed": recorder.failed, "lines": lines}))
    return 0


def measure_tests(slots: int) -> tuple[dict[str, float], Lines]:
    """Return the seconds of every test that passes, and who runs which line; only what has changed is measured."""
    shared = digest([*ROOT.glob("sana_core/**/*.py"), *ROOT.glob("tests/*.py"), ROOT / "tests" / "unit" / "tiny.py"])
    outs = {f"tests/unit/test_{name}.py": STATE / f"test_{name}.json" for name in TESTS}
    run_all([job for file, out in outs.items() for job in measuring(file, out, shared)], slots)
    seconds: dict[str, float] = {}
    lines: Lines = {}
    for out in outs.values():
        found = json.loads(out.read_text())
        seconds.update(found["seconds"])
        for module, tests in found["lines"].items():
            own = lines.setdefault(module, {})
            for line, names in tests.items():
                own.setdefault(line, set()).update(name for name in names if name in found["seconds"])
    return seconds, lines


def measuring(file: str, out: Path, shared: str) -> list[Callable[[int], Job]]:
    """Return the job that measures `file` into `out`, none where that has been done."""
    stamp, mark = shared + digest([ROOT / file]), out.with_suffix(".stamp")
    if out.exists() and mark.exists() and mark.read_text() == stamp:
        return []

    def start(slot: int) -> Job:
        def done(status: int | None) -> None:
            if status != 0:
                raise SystemExit(f"{file}: exit status {status}; see {log_of(slot)}")
            mark.write_text(stamp)
            found = json.loads(out.read_text())
            say(f"{file}: {len(found['seconds'])} tests, {sum(found['seconds'].values()):.0f} s")
            if found["failed"]:
                say(f"  left out, for they fail without a mutant: {' '.join(found['failed'])}")

        return Job(slot, lambda tree: measure(tree, file, out), MEASURE_SECONDS, done)

    return [start]


def choose_tests(
    mutant: dict[str, Any], seconds: dict[str, float], lines: Lines, most_seconds: float
) -> dict[str, float]:
    """Return the tests {node id: seconds} that reach a mutant, file by file, as many as `most_seconds` allow."""
    own = lines.get(mutant["module"], {})
    if mutant["names"]:
        wanted = [lines.get(module, {}).get(str(line), set()) for module, line in readers(mutant["names"])]
    else:
        # a class is seen wherever its module works
        wanted = own.values() if mutant["at_import"] else [own.get(str(line), set()) for line in mutant["lines"]]
    total, slowest = 0.0, {}
    chosen = []
    rounds: Counter[str] = Counter()
    turns = {}
    for name in sorted(set().union(*wanted), key=lambda name: (seconds[name], name)):
        function = name.partition("[")[0]
        turns[name] = rounds[function]
        rounds[function] += 1
    # the quick ones, then one case of every test before the second of any, as far as the time goes
    for name in sorted(turns, key=lambda name: (seconds[name] > QUICK, turns[name], seconds[name], name)):
        if chosen and total + seconds[name] > most_seconds:
            continue
        total += seconds[name]
        chosen.append(name)
        slowest[file_of(name)] = max(seconds[name], slowest.get(file_of(name), 0.0))
    # a module's fixtures are made once
    chosen.sort(key=lambda name: (slowest[file_of(name)], file_of(name), seconds[name]))
    return {name: seconds[name] for name in chosen}


def readers(names: list[str]) -> set[tuple[str, int]]:
    """Return module and line of whatever reads one of `names` in a function, or what is made of it at import."""
    found: set[tuple[str, int]] = set()
    waiting, known = list(names), set(names)
    while waiting:
        name = waiting.pop()
        for module, tree in sources().items():
            for statement in tree.body:
                lines = {n.lineno for n in reads(statement, name)}
                for function in (n for n in ast.walk(statement) if isinstance(n, ast.FunctionDef)):
                    # a default runs at import, and is seen where the function runs
                    if any(reads(default, name) for default in [*function.args.defaults, *function.args.kw_defaults]):
                        lines.update(range(function.body[0].lineno, function.end_lineno + 1))
                if isinstance(statement, ast.Assign | ast.AnnAssign):
                    made = {
                        n.id for n in ast.walk(statement) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)
                    }
                    waiting.extend(made - known if lines else ())
                    known.update(made if lines else ())
                else:
                    found.update((module, line) for line in lines)
    return found


def reads(node: ast.AST | None, name: str) -> list[ast.expr]:
    """Return the expressions in `node` that read `name`, of this module or of another one."""
    found = [] if node is None else [n for n in ast.walk(node) if isinstance(n, ast.Name | ast.Attribute)]
    return [n for n in found if name == (n.id if isinstance(n, ast.Name) else n.attr)]


@functools.cache
def sources() -> dict[str, ast.Module]:
    return {str(file.relative_to(ROOT)): ast.parse(file.read_text()) for file in ROOT.glob("sana_core/**/*.py")}


def file_of(test: str) -> str:
    return test.partition("::")[0]


def digest(paths: Iterable[Path]) -> str:
    return hashlib.sha256(b"".join(path.read_bytes() for path in sorted(paths))).hexdigest()


def say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()
