"""What the doctor takes, with and without --time: `make bench`.

Writes benchmarks/doctor.json. Each run is the command on the CPU, in a process of its own, over the demo model and its
LoRA; the baseline is a process that imports the libraries. No check begins after 110 s, with --time 900 s: where a
machine is busy some are skipped.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from machine import ROOT, write

DOCTOR = ("-m", "sana_core", "doctor", "demo/sana-posters", "demo/sana-posters-cyanotype.safetensors")
RUNS = {
    "imports": ("-c", "import diffusers, transformers, torch; diffusers.SanaPipeline, transformers.Gemma2Model"),
    "doctor": DOCTOR,
    "doctor --time": (*DOCTOR, "--time"),
}


def measure(words: tuple[str, ...], folder: Path) -> dict[str, Any]:
    """Return seconds and peak memory of this Python with `words`, and of a doctor what it found."""
    file = folder / "report.json"
    file.unlink(missing_ok=True)
    options = ("--device", "cpu", "--json", str(file)) if words[0] == "-m" else ()
    started = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, *words, *options], cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = status
    if status:
        raise RuntimeError(f"{' '.join(words)} ended with {status}")
    found = {
        "seconds": round(time.perf_counter() - started, 1),
        "seconds_of_processors": round(usage.ru_utime + usage.ru_stime, 1),
        "peak_gigabytes": round(usage.ru_maxrss * 1024 / 1e9, 2),
    }
    if not file.is_file():
        return found
    checks, faults, skipped = map(int, re.findall(r"\d+", json.loads(file.read_text())["summary"]))
    return found | {"checks": checks, "faults": faults, "skipped": skipped}


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        document = {name: measure(words, Path(folder)) for name, words in RUNS.items()}
    write(__file__, document)


if __name__ == "__main__":
    main()
