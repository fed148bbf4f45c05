"""Two workers on two cores against one worker on one core, and whether they agree.

The real f32c32 configuration in fp32 on the CPU, each run in a process of its own with one thread a worker.
Writes benchmarks/decode_devices.json.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PIXELS, RUNS = 768, 3


def measure(workers: int, saved: str) -> float:
    """Decode in this process and return the seconds."""
    os.sched_setaffinity(0, set(range(workers)))
    import torch
    from decode import autoencoder

    from sana_core import decode_latents

    torch.set_num_threads(1)
    model = autoencoder("cpu", torch.float32)
    latents = torch.randn(1, 32, PIXELS // 32, PIXELS // 32, generator=torch.Generator().manual_seed(1))
    decode_latents(model, latents[:, :, :4, :4])
    started = time.perf_counter()
    pictures = decode_latents(model, latents, devices=["cpu"] * workers)
    seconds = time.perf_counter() - started
    torch.save(pictures, saved)
    return seconds


def main() -> None:
    if len(sys.argv) == 3:
        sys.path.insert(0, str(ROOT))
        sys.stdout.write(str(measure(int(sys.argv[1]), sys.argv[2])))
        return
    import torch
    from machine import description

    seconds: dict[int, list[float]] = {1: [], 2: []}
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(RUNS):
            for workers in seconds:
                command = [sys.executable, __file__, str(workers), f"{folder}/{workers}.pt"]
                done = subprocess.run(
                    command, env=os.environ | {"OMP_NUM_THREADS": "1"}, stdout=subprocess.PIPE, check=True
                )
                seconds[workers].append(float(done.stdout.split()[-1]))
        equal = torch.equal(torch.load(f"{folder}/1.pt"), torch.load(f"{folder}/2.pt"))
    one, two = (round(statistics.median(times), 2) for times in seconds.values())
    figures = {
        **description(),
        "pixels": PIXELS,
        "runs": RUNS,
        "one_worker_seconds": one,
        "two_workers_seconds": two,
        "speedup": round(one / two, 2),
        "equal": equal,
    }
    text = json.dumps(figures, indent=2) + "\n"
    (ROOT / "benchmarks" / "decode_devices.json").write_text(text)
    sys.stdout.write(text)


if __name__ == "__main__":
    main()
