"""The cost of inspecting and loading a 3.2 GB transformer, compared with load_file of safetensors: `make bench`.

Writes benchmarks/load.json. The weights are random, SANA 1.6B in bf16; each measurement runs in a new process, with
the file in the page cache.
"""

from __future__ import annotations

import os
import statistics
import tempfile
from importlib.metadata import version
from pathlib import Path

from benchmarks import ROOT
from benchmarks.machine import host_speed, last_line, write

RUNS = 3

# The sum reads every byte: load_file itself maps the file and reads nothing, ours has looked for NaN.
STEPS = {
    "ours": "model = sana_core.load_transformer(path, dtype=torch.bfloat16)",
    "load_file, read": "tensors = load_file(path); [tensor.sum(dtype=torch.float32) for tensor in tensors.values()]",
    "ours, to fp32": "model = sana_core.load_transformer(path)",
    "read": "tensors = read_file(path)",
    "read, then to fp32": "tensors = read_file(path)\nfor name in tensors: tensors[name] = tensors[name].float()",
    "read to fp32": "tensors = read_file(path, dtype=torch.float32)",
    # The host's part of a load to a GPU: the copies take no time.
    "read to a device": "tensors = read_file(path, device='meta')",
    "inspect": "info = sana_core.inspect_checkpoint(path)",
}
PROCESS = """
import json, sys, time
import accelerate, torch
from diffusers import SanaTransformer2DModel
from safetensors.torch import load_file
from transformers import Gemma2Model
sys.path.insert(0, sys.argv[1])
import sana_core
import sana_core.checkpoints.load
from pathlib import Path
from sana_core.checkpoints.headers import read_file
path = Path(sys.argv[2])

def status(field):
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))

open("/proc/self/clear_refs", "w").write("5")  # Reset the peak of the resident memory.
before = status("VmRSS")
started = time.perf_counter()
{step}
seconds = time.perf_counter() - started
out = {{"seconds": seconds, "peak": status("VmHWM") - before, "anonymous": status("RssAnon")}}
sys.stdout.write("\\n" + json.dumps(out))
"""


def write_file(folder: Path) -> Path:
    """Write a SANA 1.6B of random bf16 numbers, in diffusers' names, with its configuration beside it."""
    import torch
    from accelerate import init_empty_weights
    from diffusers import SanaTransformer2DModel
    from safetensors.torch import save_file

    with init_empty_weights():
        model = SanaTransformer2DModel()
    tensors = {name: torch.empty(t.shape, dtype=torch.bfloat16).normal_() for name, t in model.state_dict().items()}
    path = folder / "diffusion_pytorch_model.safetensors"
    save_file(tensors, path)
    model.save_config(folder)
    # The disk must not write during the measurements.
    os.sync()
    return path


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = write_file(Path(folder))
        size = path.stat().st_size
        runs: dict[str, list[dict]] = {name: [] for name in STEPS}
        for _ in range(RUNS):
            for name, step in STEPS.items():
                command = ("-c", PROCESS.format(step=step), str(ROOT), str(path))
                runs[name].append(last_line(*command))
    results = {
        name: {
            "seconds": round(statistics.median(run["seconds"] for run in all_runs), 4),
            "peak_of_file": round(statistics.median(run["peak"] for run in all_runs) / size, 3),
        }
        for name, all_runs in runs.items()
    }
    figures = host_speed() | {
        "safetensors": version("safetensors"),
        "runs": RUNS,
        "file_gigabytes": round(size / 1e9, 3),
        "results": results,
        "ratio_to_load_file_read": round(results["ours"]["seconds"] / results["load_file, read"]["seconds"], 3),
        "times_as_fast": {
            name: round(results[baseline]["seconds"] / results[name]["seconds"], 2)
            for name, baseline in {"read to fp32": "read, then to fp32", "read to a device": "read"}.items()
        },
    }
    write(__file__, figures)


if __name__ == "__main__":
    main()
