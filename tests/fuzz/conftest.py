"""The number of examples: a few in `make test`, EXAMPLES in `make fuzz`.

Failed examples are saved in .cache/fuzz and tried first. The test of a fixed fault contains its example as @example.
"""

import json
import logging
import os
import re
import shutil
from collections import Counter
from pathlib import Path

import pytest
from bounded import bounded
from hypothesis import HealthCheck, Phase, settings
from hypothesis.database import DirectoryBasedExampleDatabase
from small import make_checkpoint
from verdicts import check_line, is_ours

ROOT = Path(__file__).parents[2]
common = {
    "database": DirectoryBasedExampleDatabase(ROOT / ".cache" / "fuzz"),
    "deadline": None,  # `survives` has its own, which also ends a hang
    "suppress_health_check": list(HealthCheck),
    # Explaining a failure takes minutes.
    "phases": set(Phase) - {Phase.explain},
}
for profile, examples in (("test", 25), ("all", 60)):
    settings.register_profile(profile, max_examples=examples, **common)
settings.register_profile("fuzz", max_examples=int(os.environ.get("EXAMPLES", "1000")), **common)
settings.load_profile(os.environ.get("FUZZ_PROFILE", "test"))

BOUNDS = re.compile(r"expected a (whole )?number from \S+ to \S+$")
counts: Counter[str] = Counter()


def pytest_sessionfinish():
    """Write how many examples of each kind there were, for run.py."""
    if "FUZZ_COUNTS" in os.environ:
        Path(os.environ["FUZZ_COUNTS"]).write_text(json.dumps(counts))


@pytest.fixture(scope="module")
def count(request):
    """A function that counts an example of the kind that the test's file is named after."""
    kind = request.path.stem.removeprefix("test_fuzzed_")

    def add():
        counts[kind] += 1

    return add


@pytest.fixture(scope="module")
def survives(count):
    """A function that runs `action`. It has to succeed, or to raise one short line of ours.

    `names`: the input is a file. The line contains one of the names and, after a semicolon, the remedy, or the bounds
    of a number that is out of range.
    """

    def run(action, *names):
        count()
        try:
            with bounded():
                return action()
        except Exception as error:
            if not is_ours(error):
                raise
            message = str(error)
        check_line(message)
        if names:
            assert any(name in message for name in names), message
            assert "; " in message or BOUNDS.search(message), message

    return run


@pytest.fixture(autouse=True, scope="module")
def quiet():
    """Nothing is written of the warnings of thousands of examples."""
    logging.disable(logging.WARNING)
    yield
    logging.disable(logging.NOTSET)


@pytest.fixture(scope="session")
def small(tmp_path_factory):
    """A small checkpoint, which no test changes."""
    return make_checkpoint(tmp_path_factory.mktemp("small") / "model")


@pytest.fixture(scope="module")
def folder(small, tmp_path_factory):
    """A copy of the checkpoint, of which each example breaks one file, and mends it."""
    return shutil.copytree(small, tmp_path_factory.mktemp("fuzz") / "model")


@pytest.fixture(scope="module")
def loaded(host, small):
    """MODEL, CLIP and VAE of the small checkpoint, as SANA Loader gives them."""
    folder = shutil.copytree(small, host.models / "diffusers" / "fuzzed")
    graph = {"load": ("SanaNodesLoader", {"model": folder.name})}
    for slot, name in enumerate(("model", "clip", "vae")):
        graph[f"catch {name}"] = ("Catch", {"value": ["load", slot], "name": name})
    caught = host.run(graph)
    yield caught["model"], caught["clip"], caught["vae"]
    shutil.rmtree(folder)
