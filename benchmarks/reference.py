"""How far transformers and ControlNets are from NVIDIA's code and from diffusers': relative differences in fp32.

Runs the tests that compare them with independent forwards, and writes reference.json from what they print. Those of the
autoencoders are in decode_lite.json, under "authors".
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

from machine import description

ROOT = Path(__file__).parents[1]
TESTS = "tests/unit/test_reference.py"
BOUND = 1e-4


def main() -> None:
    command = [sys.executable, "-m", "pytest", "-c", "tests/pytest.ini", "-s", TESTS]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    rows = re.findall(r"^\.*(\S.* x (?:nvidia|diffusers)): (\S+)$", done.stdout, re.MULTILINE)
    differences = {name: float(difference) for name, difference in rows}
    report = {**description(), "bound": BOUND, "largest_relative_difference": differences}
    (ROOT / "benchmarks" / "reference.json").write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
