"""DC-AE-Lite beside DC-AE at real size: `python benchmarks/decode_lite.py [PIXELS ...]`, 512 and 1024 unless said.

Writes benchmarks/decode_lite.json: whole and in strips, on the CPU in fp32 with one thread, random weights, each decode
a process of its own whose memory is sampled. What is not measured again stays. "authors" is the difference of either
from its authors' arithmetic, which tests/mit_dc_ae.py writes down, in models of full depth with few channels.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from benchmarks.decode import Timeline, give_back_freed  # noqa: E402
from benchmarks.machine import description  # noqa: E402

VARIANTS, METHODS = ("dc-ae-f32c32", "dc-ae-lite-f32c32"), ("whole", "strips")
FILE = ROOT / "benchmarks" / "decode_lite.json"
SIZES = ((1, 2), (3, 5), (7, 6))  # of latents


def written(config, folder: str) -> Path:
    import mit_dc_ae
    from safetensors.torch import save_file

    path = Path(folder) / "model.safetensors"
    save_file(mit_dc_ae.tensors(config), path)
    return path


def measure(variant: str, method: str, pixels: int, saved: str) -> dict:
    """Decode once in this process; the library's own decode for "whole"."""
    import mit_dc_ae

    import sana_core
    from sana_core.decode import DecodeOptions, decode_into
    from sana_core.decode.plan import Planner
    from sana_core.decode.stages import decoder_stages

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        path = written(mit_dc_ae.RELEASED[variant], folder)
        assert sana_core.inspect_checkpoint(path).variant == variant
        model = sana_core.load_autoencoder(path)
        # in memory of its own, not in a file's that is mapped
        for parameter in model.parameters():
            parameter.data = parameter.data.clone()
    del model.encoder
    side = pixels // 32
    latents = torch.randn(1, 32, side, side, generator=torch.Generator().manual_seed(1))
    out, report = torch.ones(1, 3, pixels, pixels), {}
    planner = Planner(decoder_stages(model), side, side, torch.float32, False)
    plan = planner.whole() if method == "whole" else planner.strips(2**40)
    with torch.no_grad():
        model.decode(latents[:, :, :2, :2])  # buffers that the library makes once
        give_back_freed()
        busy = time.process_time()
        with Timeline("cpu") as timeline:
            if method == "whole":
                out.copy_(model.decode(latents).sample)
            else:
                decode_into(out, model, latents, DecodeOptions(max_bytes=2**40), report)
        busy = time.process_time() - busy
    torch.save(out, saved)
    return {
        "plan": report.get("plan", "diffusers' decode"),
        "seconds": round(timeline.seconds, 2),
        "cpu_seconds": round(busy, 2),
        "peak_megabytes": round(timeline.peak / 1e6, 1),
        "predicted_megabytes": round(plan.peak_bytes / 1e6, 1),
    }


def child(variant: str, method: str, pixels: int, saved: str) -> dict:
    # glibc keeps freed memory up to twice what is in use, unless tensors are mapped one by one
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "1000000", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, __file__, str(pixels), "--variants", variant, "--measure", method, saved]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=environment)
    return json.loads(done.stdout.splitlines()[-1])


@torch.no_grad()
def authors(variant: str) -> dict:
    """The largest relative difference from the authors' arithmetic, in fp32 from fp64."""
    import mit_dc_ae

    import sana_core

    config = mit_dc_ae.narrow(mit_dc_ae.RELEASED[variant])
    reference = mit_dc_ae.Reference(config, mit_dc_ae.tensors(config))
    with tempfile.TemporaryDirectory() as folder:
        model = sana_core.load_autoencoder(written(config, folder))
        found: dict[str, list[float]] = {"decode": [], "encode": []}
        for height, width in SIZES:
            latents, pictures = torch.randn(1, 32, height, width), torch.randn(1, 3, 32 * height, 32 * width)
            pairs = {
                "decode": (sana_core.decode_latents(model, latents), reference.decode(latents.double())),
                "encode": (sana_core.encode_images(model, pictures), reference.encode(pictures.double())),
            }
            for name, (got, expected) in pairs.items():
                found[name].append(((got - expected).norm() / expected.norm()).item())
    return {name: max(values) for name, values in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("sizes", nargs="*", type=int, default=[512, 1024])
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=VARIANTS)
    parser.add_argument("--measure", nargs=2, metavar=("METHOD", "FILE"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        method, saved = arguments.measure
        result = measure(arguments.variants[0], method, arguments.sizes[0], saved)
        sys.stdout.write(f"\n{json.dumps(result)}")
        return
    figures = json.loads(FILE.read_text()) if FILE.exists() else {"sizes": {}}
    figures |= description() | {"threads": 1, "authors": {name: authors(name) for name in VARIANTS}}
    for pixels in arguments.sizes:
        results = figures["sizes"].setdefault(str(pixels), {})
        for variant in arguments.variants:
            with tempfile.TemporaryDirectory() as folder:
                own = {method: child(variant, method, pixels, f"{folder}/{method}.pt") for method in METHODS}
                whole, strips = (torch.load(f"{folder}/{method}.pt").double() for method in METHODS)
            own["strips"]["largest_difference"] = (strips - whole).abs().max().item()
            own["strips"]["relative_difference"] = ((strips - whole).norm() / whole.norm()).item()
            results[variant] = own
            sys.stderr.write(f"{pixels} {variant} {json.dumps(own)}\n")
            FILE.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
