"""How far an adapter's weights are from those of the trainer that made it, for each trainer and each way of drawing.

Runs the test that compares them, and writes adapters.json from what it prints: differences relative to what the adapter
adds to a weight, by their Frobenius norms, in fp32.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

from machine import description

ROOT = Path(__file__).parents[1]
TESTS = "tests/graph/test_adapters.py"
BOUND = 1e-6


def main() -> None:
    command = [sys.executable, "-m", "pytest", "-c", "tests/pytest.ini", "-s", TESTS]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    table: dict[str, dict[str, float | str]] = {}
    for name, way, result in re.findall(r"^\.*(\S+) x (.+): (\S+)$", done.stdout, re.MULTILINE):
        table.setdefault(name, {})[way] = result if result.isalpha() else float(result)
    report = {**description(), "bound": BOUND, "relative_difference": table}
    (ROOT / "benchmarks" / "adapters.json").write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
