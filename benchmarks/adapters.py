"""How far an adapter's weights are from those of the trainer that made it, for each trainer and each way of drawing.

Runs the test that compares them, and writes adapters.json from what it prints: differences relative to what the adapter
adds to a weight, by their Frobenius norms, in fp32.
"""

from __future__ import annotations

import re

from machine import printed_by, write

TESTS = "tests/graph/test_adapters.py"
BOUND = 1e-6


def main() -> None:
    table: dict[str, dict[str, float | str]] = {}
    for name, way, result in re.findall(r"^\.*(\S+) x (.+): (\S+)$", printed_by(TESTS), re.MULTILINE):
        table.setdefault(name, {})[way] = result if result.isalpha() else float(result)
    report = {"bound": BOUND, "relative_difference": table}
    write(__file__, report)


if __name__ == "__main__":
    main()
