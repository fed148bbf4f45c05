"""How many small changes of the code the tests notice: `make mutants`, or `.venv/bin/python scripts/mutants.py --help`.

Draws mutants of the modules that decide what a picture is (scripts/mutations.py), puts each into a copy of the tree,
and runs the unit tests that reach its line, the quick ones first, until one fails. A test that takes ten times as long
as without the mutant has failed. What survives is listed in benchmarks/mutants.json with the score. What no test can
tell from the code as it is stands in scripts/equivalent_mutants.json with the reason, and counts neither way.

What is known is kept under .cache/mutants.d: a run that was ended goes on, and --again tries what survived once more.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import itertools
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from forks import RAISED, STATE, Job, copy_tree, log_of, run_all, tree_of
from reach import GRACE, SLOWER, choose_tests, measure_tests, run_tests, say
from setup import CACHE, ROOT

PYTHON_OF_TOOL = CACHE / "mutants" / "bin" / "python"
RESULTS = STATE / "results.jsonl"
EQUIVALENT = Path(__file__).with_name("equivalent_mutants.json")
FIGURES = ROOT / "benchmarks" / "mutants.json"
MODULES = (
    *("sampling.py", "schedules.py", "forward.py", "guidance.py", "text.py"),
    *("checkpoints/*.py", "decode/*.py", "batch/queue.py"),
)
# imported once, before the forks; what a mutant changes is not among them
WARM = (
    "torch",
    "diffusers.models.autoencoders.autoencoder_dc",
    "diffusers.models.transformers.sana_transformer",
    "diffusers.models.controlnets.controlnet_sana",
    "diffusers.pipelines.sana.pipeline_sana",
    "diffusers.pipelines.sana.pipeline_sana_sprint",
    "diffusers.schedulers.scheduling_dpmsolver_multistep",
    "transformers.models.gemma2.modeling_gemma2",
    "hypothesis",
    "safetensors.torch",
    "sentencepiece",
    "tokenizers",
    "pytest",
)
# pytest's exit statuses for an error of its own and for no test; one that a conftest cannot import ends it with 4
INTERNAL_ERROR, NO_TESTS = 3, 5
# to import and collect
START_SECONDS = 60.0
Mutant = dict[str, Any]


def draw(each: int, seed: str, modules: list[str]) -> tuple[dict[str, int], list[Mutant]]:
    """Return how many places each module has, and `each` mutants of every module, one of each in turn."""
    command = [PYTHON_OF_TOOL, ROOT / "scripts" / "mutations.py", str(each), seed, *modules]
    drawn = json.loads(subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout)
    rounds = itertools.zip_longest(*(found for _, found in drawn.values()))
    mutants = [mutant for one_of_each in rounds for mutant in one_of_each if mutant is not None]
    return {module: places for module, (places, _) in drawn.items()}, mutants


def key_of(mutant: Mutant) -> str:
    """Name a mutant by its whole module, so that what is known of another state is not taken for this one."""
    return hashlib.sha256(f"{mutant['module']} {mutant['code']}".encode()).hexdigest()


def try_all(mutants: list[Mutant], known: dict[str, dict], slots: int, most_seconds: float) -> None:
    """Try mutants, and add what became of each to `known` and to RESULTS."""
    sys.dont_write_bytecode = True
    os.environ.update(OMP_NUM_THREADS="1", PYTHONDONTWRITEBYTECODE="1")
    for slot in range(slots):
        copy_tree(slot)
    for name in WARM:
        importlib.import_module(name)
    seconds, lines = measure_tests(slots)
    count = itertools.count(1)

    def note(mutant: Mutant, result: dict[str, Any]) -> None:
        known[key_of(mutant)] = result
        with RESULTS.open("a") as log:
            log.write(json.dumps({"key": key_of(mutant), **result}) + "\n")
        word = "killed  " if result["killed"] else "survived"
        say(f"{next(count)}/{len(mutants)} {word} {mutant['module']}:{mutant['line']}: {mutant['after']}")

    chosen = [(mutant, choose_tests(mutant, seconds, lines, most_seconds)) for mutant in mutants]
    run_all([trying(mutant, tests, note) for mutant, tests in chosen], slots)


def trying(
    mutant: Mutant, tests: dict[str, float], note: Callable[[Mutant, dict[str, Any]], None]
) -> Callable[[int], Job]:
    """Return the job that runs `tests` over a mutant and tells `note` what became of it."""

    def start(slot: int) -> Job:
        file, out, began = tree_of(slot) / mutant["module"], STATE / f"out{slot}.json", time.monotonic()
        out.unlink(missing_ok=True)
        file.write_text(mutant["code"])

        def done(status: int | None) -> None:
            shutil.copy2(ROOT / mutant["module"], file)
            if status in (INTERNAL_ERROR, RAISED):
                raise SystemExit(f"pytest cannot run: exit status {status}; see {log_of(slot)}")
            result = {"killed": status not in (0, NO_TESTS), "tests": len(tests)}
            result["by"] = json.loads(out.read_text()) if out.exists() else [f"exit status {status}"]
            note(mutant, result | {"seconds": round(time.monotonic() - began, 1)})

        limit = START_SECONDS + GRACE * len(tests) + SLOWER * sum(tests.values())
        return Job(slot, lambda tree: run_tests(tree, tests, out) if tests else NO_TESTS, limit, done)

    return start


def is_equivalent(mutant: Mutant) -> bool:
    """Whether EQUIVALENT has the mutant, or its line with no change named, and so all changes of that line."""
    reasons = json.loads(EQUIVALENT.read_text())
    return any(
        all(mutant[name] == each.get(name, mutant[name]) for name in ("module", "before", "after")) for each in reasons
    )


def figures(places: dict[str, int], mutants: list[Mutant], known: dict[str, dict]) -> dict[str, Any]:
    """Return the score, the share of mutants that differ from the code which a test tells from it, and the rest."""
    modules: dict[str, dict[str, Any]] = {
        module: {"places": count, "sampled": 0, "equivalent": 0, "killed": 0, "survivors": []}
        for module, count in places.items()
        if count
    }
    for mutant in sorted(mutants, key=lambda one: one["line"]):
        own = modules[mutant["module"]]
        own["sampled"] += 1
        if is_equivalent(mutant):
            own["equivalent"] += 1
        elif known[key_of(mutant)]["killed"]:
            own["killed"] += 1
        else:
            own["survivors"].append(f"{mutant['module']}:{mutant['line']}: {mutant['before']} -> {mutant['after']}")
    sampled, equivalent, killed = (
        sum(own[name] for own in modules.values()) for name in ("sampled", "equivalent", "killed")
    )
    score = round(killed / (sampled - equivalent), 3)
    return {"score": score, "sampled": sampled, "equivalent": equivalent, "killed": killed, "modules": modules}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--each", type=int, default=30, help="mutants of each module (30)")
    parser.add_argument("--seed", default="0", help="of the draw (0)")
    parser.add_argument("--workers", type=int, default=2, help="processes (2)")
    parser.add_argument("--seconds", type=float, default=30, help="of tests for each, as long as they take alone (30)")
    parser.add_argument("--only", nargs="+", help="modules, like sana_core/text.py; the figures are shown, not written")
    parser.add_argument("--again", action="store_true", help="try what survived once more, with the tests as they are")
    args = parser.parse_args()
    every = [str(file.relative_to(ROOT)) for name in MODULES for file in sorted(ROOT.glob(f"sana_core/{name}"))]
    places, mutants = draw(args.each, args.seed, args.only or every)
    STATE.mkdir(parents=True, exist_ok=True)
    lines = RESULTS.read_text().splitlines() if RESULTS.exists() else []
    known = {result["key"]: result for result in map(json.loads, lines)}

    def waits(mutant: Mutant) -> bool:
        result = known.get(key_of(mutant))
        return not is_equivalent(mutant) and (result is None or (args.again and not result["killed"]))

    waiting = [mutant for mutant in mutants if waits(mutant)]
    say(f"{len(mutants)} mutants, {len(waiting)} to try")
    if waiting:
        try_all(waiting, known, args.workers, args.seconds)
    found = figures(places, mutants, known)
    for module, own in found["modules"].items():
        say(f"{own['killed']:4d} of {own['sampled'] - own['equivalent']:4d} {module}")
        for survivor in own["survivors"]:
            say(f"       {survivor}")
    say(f"{found['killed']} of {found['sampled'] - found['equivalent']} killed: {found['score']:.1%}")
    if not args.only:
        sys.path.append(str(ROOT / "benchmarks"))
        from machine import description

        result = {"machine": description(), "each": args.each, "seed": args.seed, **found}
        FIGURES.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
