"""Differences of transformers and ControlNets from NVIDIA's code and diffusers, and of adapters from their trainers.

Runs the tests that compare them in fp32, and writes the printed numbers to reference.json and adapters.json. They are
relative differences by Frobenius norms. The difference of an adapter is relative to its change of the weight.
tests/unit/test_dc_ae.py compares the autoencoders with their authors' code.
"""

from __future__ import annotations

import re

from benchmarks import ROOT
from benchmarks.machine import printed_by, write

BOUND, ADAPTERS_BOUND = 1e-4, 1e-6


def main() -> None:
    printed = printed_by("tests/unit/test_reference.py")
    rows = re.findall(r"^\.*(\S.* x (?:nvidia|diffusers)): (\S+)$", printed, re.MULTILINE)
    differences = {name: float(difference) for name, difference in rows}
    write(__file__, {"bound": BOUND, "largest_relative_difference": differences})
    table: dict[str, dict[str, float | str]] = {}
    printed = printed_by("tests/graph/test_adapters.py")
    for name, way, result in re.findall(r"^\.*(\S+) x (.+): (\S+)$", printed, re.MULTILINE):
        table.setdefault(name, {})[way] = result if result.isalpha() else float(result)
    write(f"{ROOT}/benchmarks/adapters", {"bound": ADAPTERS_BOUND, "relative_difference": table})


if __name__ == "__main__":
    main()
