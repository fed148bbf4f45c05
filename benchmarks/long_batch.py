"""A file of 100,000 prompts: how soon its first picture is there, and what memory does while more are drawn.

`OMP_NUM_THREADS=1 python benchmarks/long_batch.py` writes benchmarks/long_batch.json; pictures of 32 x 32 pixels in one
step, so that the prompts are most of the work.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from machine import ROOT, write

PROMPTS = 100_000


def main() -> None:
    import psutil

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pictures", type=int, default=20_000)
    parser.add_argument("--minutes", type=float, default=1e9, help="stop after so long")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as base:
        file = Path(base) / "prompts.txt"
        file.write_text("".join(f"a red circle on a blue background, picture {i}\n" for i in range(PROMPTS)))
        command = [sys.executable, "-u", "-m", "sana_core", "batch", file, "--out", Path(base) / "out"]
        command += ["--checkpoint", ROOT / "tests" / "models" / "sana-tiny"]
        command += ["--steps", "1", "--width", "32", "--height", "32"]
        started, resident = time.perf_counter(), {}
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as running:
            process = psutil.Process(running.pid)
            for line in running.stdout:
                number = int(re.search(r"\((\d+) of", line)[1])
                if number == 1:
                    first = time.perf_counter() - started
                if number == 1 or number % 500 == 0:
                    resident[number] = round(process.memory_info().rss / 1e6)
                if number >= arguments.pictures or time.perf_counter() - started > 60 * arguments.minutes:
                    break
            seconds = time.perf_counter() - started
            running.terminate()
    document = {
        "prompts": PROMPTS,
        "seconds_to_first_picture": round(first, 1),
        "pictures": number,
        "seconds": round(seconds),
        "resident_megabytes_after": resident,
    }
    write(__file__, document)


if __name__ == "__main__":
    main()
