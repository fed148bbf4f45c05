"""The memory of the decode command for large images, in bf16, according to its report.

`python -m benchmarks.decode_stream [PIXELS ...]`, by default 4096 and 8192. It uses the real f32c32 configuration with
random weights, on the CPU. Writes benchmarks/decode_stream.json. Sizes that are not measured again are not changed.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path

import torch
from decoders import f32c32
from safetensors.torch import save_file

from benchmarks import ROOT
from benchmarks.machine import description, last_line

FILE = ROOT / "benchmarks" / "decode_stream.json"
# {side: memory beyond the weights, in GB}. For 8192 x 8192 it is the budget on a GPU with 8 GB.
BUDGETS = {4096: 2.5, 8192: 6.7}


def measure(pixels: int, folder: Path) -> dict:
    """Decode one image in a separate process."""
    side = pixels // 32
    latents = torch.randn(1, 32, side, side, generator=torch.Generator().manual_seed(1))
    save_file({"latents": latents}, folder / "latents.safetensors")
    command = ["-m", "sana_core", "decode", f"{folder}/latents.safetensors", "--report", "--dtype", "bfloat16"]
    command += ["--checkpoint", f"{folder}/vae", "--out", f"{folder}/picture.png", "--overwrite"]
    started = time.perf_counter()
    # glibc keeps much freed memory, up to twice the used memory, unless each tensor is mapped separately.
    report = last_line(*command, "--max-gb", str(BUDGETS[pixels]), MALLOC_MMAP_THRESHOLD_="1000000")
    return {
        "threads": torch.get_num_threads(),
        "seconds": round(time.perf_counter() - started, 1),
        "plan": report["plan"],
        "budget_megabytes": BUDGETS[pixels] * 1000,
        "predicted_megabytes": round(report["predicted_bytes"] / 1e6),
        "measured_megabytes": round(report["peak_bytes"] / 1e6),
    }


def main() -> None:
    figures = json.loads(FILE.read_text()) if FILE.exists() else {"sizes": {}}
    figures |= description()
    with tempfile.TemporaryDirectory() as name:
        f32c32(1).bfloat16().save_pretrained(f"{name}/vae")
        for pixels in map(int, sys.argv[1:] or BUDGETS):
            figures["sizes"][str(pixels)] = measure(pixels, Path(name))
            FILE.write_text(json.dumps(figures, indent=2) + "\n")
            sys.stdout.write(json.dumps(figures["sizes"][str(pixels)], indent=2) + "\n")


if __name__ == "__main__":
    main()
