"""How far the models are from NVIDIA's and MIT's code and from diffusers': the largest relative differences in fp32.

Runs the tests that compare them with independent forwards, and writes reference.json from what they print.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

from machine import description

ROOT = Path(__file__).parents[1]
TESTS = ("tests/unit/test_reference.py", "tests/unit/test_dc_ae.py")
BOUND = 1e-4


def main() -> None:
    command = [sys.executable, "-m", "pytest", "-c", "tests/pytest.ini", "-s", *TESTS]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    rows = re.findall(r"^\.*(\S.* x (?:nvidia|diffusers|mit)): (\S+)$", done.stdout, re.MULTILINE)
    differences = {name: float(difference) for name, difference in rows}
    report = {**description(), "bound": BOUND, "largest_relative_difference": differences}
    (ROOT / "benchmarks" / "reference.json").write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
