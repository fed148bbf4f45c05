"""How long the fuzzing goes on: a few examples in `make test`, as many as asked for in `make fuzz`.

What has failed once is kept in .cache/fuzz and tried first; a fault that was found stands as an @example in the test.
"""

import os
from pathlib import Path

import pytest
from bounded import bounded
from hypothesis import HealthCheck, settings
from hypothesis.database import DirectoryBasedExampleDatabase

from sana_core import SanaError

ROOT = Path(__file__).parents[2]
LONGEST_MESSAGE = 400  # with the names of a test's folders in it

common = {
    "database": DirectoryBasedExampleDatabase(ROOT / ".cache" / "fuzz"),
    "deadline": None,  # `survives` has its own, which also ends a hang
    "suppress_health_check": list(HealthCheck),
}
settings.register_profile("test", max_examples=60, **common)
settings.register_profile("fuzz", max_examples=int(os.environ.get("EXAMPLES", "100000")), **common)
settings.load_profile(os.environ.get("FUZZ_PROFILE", "test"))


@pytest.fixture(scope="session")
def survives():
    """A function that runs `action` and wants a good end, or one short line of ours with one of `names` in it."""

    def run(action, *names):
        try:
            with bounded():
                return action()
        except SanaError as error:
            message = str(error)
        assert any(name in message for name in names), message
        assert len(message) < LONGEST_MESSAGE and "\n" not in message and "; " in message, message
        message.encode()

    return run
