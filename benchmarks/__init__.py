"""What is measured, from the project's folder: `python -m benchmarks.NAME`, which writes benchmarks/NAME.json."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# helpers of the tests and of the scripts
sys.path += [str(ROOT / folder) for folder in ("tests", "tests/unit", "scripts")]
