"""Large pictures decoded into a file by the command, in bf16, with the memory of the whole process.

`python benchmarks/decode_stream.py [PIXELS ...]`, 4096 and 8192 unless said. The real f32c32 configuration with random
weights, on the CPU. Writes benchmarks/decode_stream.json, where sizes that are not measured again stay.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
FILE = ROOT / "benchmarks" / "decode_stream.json"
SECONDS = 0.05  # between two looks at the process
# of a decode beyond the weights, in GB: what 8192 x 8192 may take of a card of 8 GB
BUDGETS = {4096: 2.5, 8192: 6.7}


def measure(pixels: int, folder: Path) -> dict:
    """Decode one picture in a process of its own."""
    import psutil
    import torch
    from safetensors.torch import save_file

    side = pixels // 32
    latents = torch.randn(1, 32, side, side, generator=torch.Generator().manual_seed(1))
    save_file({"latents": latents}, folder / "latents.safetensors")
    command = [sys.executable, "-m", "sana_core", "decode", folder / "latents.safetensors", "--report"]
    command += ["--checkpoint", folder / "vae", "--out", folder / "picture.png", "--overwrite"]
    command += ["--dtype", "bfloat16", "--max-gb", str(BUDGETS[pixels])]
    # glibc keeps freed memory up to twice what is in use, unless tensors are mapped one by one
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "1000000"}
    started, peak = time.perf_counter(), 0
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=environment) as running:
        process = psutil.Process(running.pid)
        while running.poll() is None:
            peak = max(peak, process.memory_info().rss)
            time.sleep(SECONDS)
        report = json.loads(running.stdout.read().splitlines()[-1])
    return {
        "threads": torch.get_num_threads(),
        "seconds": round(time.perf_counter() - started, 1),
        "plan": report["plan"],
        "budget_megabytes": BUDGETS[pixels] * 1000,
        "predicted_megabytes": round(report["predicted_bytes"] / 1e6),
        "measured_megabytes": round(report["peak_bytes"] / 1e6),
        "process_megabytes": round(peak / 1e6),
        "file_megabytes": round((folder / "picture.png").stat().st_size / 1e6),
    }


def main() -> None:
    import torch

    from benchmarks.decode import autoencoder
    from benchmarks.machine import description

    figures = json.loads(FILE.read_text()) if FILE.exists() else {"sizes": {}}
    figures |= description()
    with tempfile.TemporaryDirectory() as name:
        model = autoencoder("cpu", torch.bfloat16, whole=True)
        model.save_pretrained(f"{name}/vae")
        del model
        for pixels in map(int, sys.argv[1:] or BUDGETS):
            figures["sizes"][str(pixels)] = measure(pixels, Path(name))
            FILE.write_text(json.dumps(figures, indent=2) + "\n")
            sys.stdout.write(json.dumps(figures["sizes"][str(pixels)], indent=2) + "\n")


if __name__ == "__main__":
    main()
