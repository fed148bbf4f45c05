"""Fuzz every kind of input until EXAMPLES examples have run, and count them.

`make fuzz` runs the files of this folder in turn. Each file is one kind. Each run has another seed and adds its number
of examples to benchmarks/fuzz.json, where the next start resumes. A kind ends at the first failing example. hypothesis
saves that example in .cache/fuzz and tries it first the next time. The examples of a failed run are not counted.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
ROOT = FOLDER.parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.machine import description  # noqa: E402

RESULTS = ROOT / "benchmarks" / "fuzz.json"
KINDS = sorted(file.stem.removeprefix("test_fuzzed_") for file in FOLDER.glob("test_fuzzed_*.py"))


def fuzz(kind: str, examples: int, seed: int) -> int | None:
    """Return how many examples of `kind` held, with `examples` of each test; None if one did not."""
    with tempfile.TemporaryDirectory() as folder:
        counts = Path(folder) / "counts.json"
        options = {"FUZZ_PROFILE": "fuzz", "EXAMPLES": str(examples), "FUZZ_COUNTS": str(counts)}
        words = [sys.executable, "-m", "pytest", "-c", ROOT / "tests" / "pytest.ini", "-o", "timeout=0", "--tb=short"]
        words += ["--basetemp", Path(folder) / "pytest", "--hypothesis-seed", seed, FOLDER / f"test_fuzzed_{kind}.py"]
        process = subprocess.run(list(map(str, words)), cwd=ROOT, env={**os.environ, **options})
        return json.loads(counts.read_text())[kind] if process.returncode == 0 else None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--examples", type=int, default=100_000, help="of each kind")
    parser.add_argument("--minutes", type=float, default=1e9, help="begin no part after so long")
    parser.add_argument("--part", type=int, default=3000, help="examples of each test between two notes of the results")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    arguments = parser.parse_args()
    end, failed = time.monotonic() + 60 * arguments.minutes, set[str]()
    while True:
        total = json.loads(RESULTS.read_text())["examples"] if RESULTS.exists() else {}
        remaining = [kind for kind in set(arguments.kinds) - failed if total.get(kind, 0) < arguments.examples]
        # the kind that is the furthest behind
        kind = min(remaining, key=lambda kind: total.get(kind, 0), default=None)
        if kind is None or time.monotonic() > end:
            return len(failed)
        seed, began = random.SystemRandom().randrange(2**32), time.monotonic()
        held = fuzz(kind, arguments.part, seed)
        if held is None:
            failed.add(kind)
            sys.stdout.write(f"{kind}: an example did not hold (seed {seed})\n")
            sys.stdout.flush()
            continue
        total[kind] = total.get(kind, 0) + held
        document = {"machine": description(), "examples": dict(sorted(total.items()))}
        RESULTS.write_text(json.dumps(document, indent=1) + "\n")
        speed = held / (time.monotonic() - began)
        sys.stdout.write(f"{kind}: {held} more, {total[kind]} in all, {speed:.0f} a second (seed {seed})\n")
        sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
