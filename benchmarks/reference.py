"""How far transformers and ControlNets are from NVIDIA's code and from diffusers': relative differences in fp32.

Runs the tests that compare them with independent forwards, and writes reference.json from what they print. Those of the
autoencoders are in decode_lite.json, under "authors".
"""

from __future__ import annotations

import re

from machine import printed_by, write

TESTS = "tests/unit/test_reference.py"
BOUND = 1e-4


def main() -> None:
    rows = re.findall(r"^\.*(\S.* x (?:nvidia|diffusers)): (\S+)$", printed_by(TESTS), re.MULTILINE)
    differences = {name: float(difference) for name, difference in rows}
    report = {"bound": BOUND, "largest_relative_difference": differences}
    write(__file__, report)


if __name__ == "__main__":
    main()
