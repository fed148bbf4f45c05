"""Give wrong tensors to ComfyUI's nodes and count the errors that are not one line of this pack's:
`python tests/soak/wrong_values.py [WORD]`, with WORD for the cases whose name contains it.

`outcome` in tests/wrong_tensors.py defines a bare error.
"""

from __future__ import annotations

import logging
import sys
import tempfile
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "scripts")]

from in_process import Host  # noqa: E402
from wrong_tensors import cases, outcome  # noqa: E402


def main(word: str = "") -> None:
    logging.disable(logging.CRITICAL)
    counts: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as folder:
        host = Host(Path(folder))
        for case in cases():
            if word not in case.name:
                continue
            kind, message = outcome(host, case)
            counts[kind] += 1
            if kind == "bare" or (kind == "refused" and "\n" in message):
                sys.stdout.write(f"{kind}: {case.name}: {message[:200]!r}\n")
                sys.stdout.flush()
    sys.stdout.write(f"{sum(counts.values())} tries: {dict(counts)}\n")
    sys.exit(bool(counts["bare"]))


if __name__ == "__main__":
    main(*sys.argv[1:])
