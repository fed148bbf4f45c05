"""Time, memory and error of the decode: `python -m benchmarks.decode [PIXELS ...]`, by default 1024 and 2048.

It uses the real f32c32 configuration with random weights, on the CPU in fp32. Each decode runs in a separate process
with the default allocator, and its memory is sampled. Writes benchmarks/decode.json and a chart. Sizes that are not
measured again are not changed. The baseline of each figure is measured in the same run. With `--lite` it measures
DC-AE-Lite, with one thread and an allocator that maps each tensor separately, and writes decode_lite.json.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import re
import sys
import tempfile
import threading
import time
from pathlib import Path

import torch
from decoders import f32c32, lite

from benchmarks import ROOT
from benchmarks.machine import description, last_line
from sana_core.decode import DecodeOptions, decode_into
from sana_core.decode.plan import Planner
from sana_core.decode.stages import decoder_stages
from sana_core.decode.workspace import process_bytes

# Seconds between two samples of the memory.
SECONDS = 0.02
# Points of a timeline in the file.
POINTS = 100
# The undivided decode needs 5 maps of 128 channels: 2.7 GB at 1024 px, 11 GB at 2048 px, 43 GB at 4096 px.
LARGEST_WHOLE = 2048
METHODS = ("whole", "diffusers_tiles", "strips_exact", "strips", "smallest")
LITE = "dc-ae-lite-f32c32"
# glibc keeps much freed memory, up to twice the used memory, unless each tensor is mapped separately.
MAPPED = {"MALLOC_MMAP_THRESHOLD_": "1000000", "OMP_NUM_THREADS": "1"}


class Timeline:
    """The memory of this process, sampled by a thread."""

    def __init__(self) -> None:
        self.points, self.ended = [], threading.Event()

    def __enter__(self) -> Timeline:
        self.base, self.started = process_bytes(), time.perf_counter()
        self.thread = threading.Thread(target=self.watch)
        self.thread.start()
        return self

    def watch(self) -> None:
        while not self.ended.wait(SECONDS):
            self.points.append((time.perf_counter() - self.started, process_bytes() - self.base))

    def __exit__(self, *exception) -> None:
        self.seconds = time.perf_counter() - self.started
        self.ended.set()
        self.thread.join()
        self.peak = max((used for _, used in self.points), default=0)

    def thinned(self) -> list[tuple[float, int]]:
        """At most POINTS samples, each the highest of its stretch, in seconds and MB."""
        step = max(1, len(self.points) // POINTS)
        parts = [self.points[start : start + step] for start in range(0, len(self.points), step)]
        return [(round(part[0][0], 2), round(max(used for _, used in part) / 1e6)) for part in parts]


def measure(method: str, pixels: int, is_lite: bool, saved: str) -> dict:
    """Decode once in this process."""
    model = (lite if is_lite else f32c32)(1)
    del model.encoder
    side = pixels // 32
    latents = torch.randn(1, 32, side, side, generator=torch.Generator().manual_seed(1))
    stages = decoder_stages(model)
    planner = Planner(stages, side, side, torch.float32, False)
    report: dict = {}
    # Allocate the output before the memory is sampled.
    out = torch.ones(1, 3, pixels, pixels)
    floor = planner.floor().peak_bytes
    boundary = stages.boundary_width * (side * stages.scale) ** 2 * torch.float32.itemsize
    options = {
        "strips_exact": DecodeOptions("strips", 2**40),
        # A part of the memory of the undivided decode. It is the same multiple of the boundary map at every size.
        "strips": DecodeOptions(max_bytes=max(8 * boundary, 1.3 * floor)),
        "smallest": DecodeOptions(max_bytes=floor),
    }
    with torch.no_grad():
        # diffusers and torch allocate some buffers only once.
        model.decode(latents[:, :, :4, :4])
        if method == "diffusers_tiles":
            model.enable_tiling()
        give_back_freed()
        busy = time.process_time()
        with Timeline() as timeline:
            if method in options:
                decode_into(out, model, latents, options[method], report)
            else:
                out.copy_(model.decode(latents).sample)
        busy = time.process_time() - busy
    torch.save(out, saved)
    figures = {
        "threads": torch.get_num_threads(),
        "seconds": round(timeline.seconds, 2),
        "peak_megabytes": round(timeline.peak / 1e6, 1),
        # Of all threads. Other programs do not affect it.
        "cpu_seconds": round(busy, 2),
    }
    if method == "whole":
        report = {"plan": "diffusers' decode", "predicted_bytes": planner.whole().peak_bytes}
    if report:
        figures |= {"plan": report["plan"], "predicted_megabytes": round(report["predicted_bytes"] / 1e6, 1)}
    return figures if is_lite else figures | {"timeline": timeline.thinned()}


def give_back_freed() -> None:
    """Return freed memory to the system. Otherwise the decode would reuse it, and seem to need less memory."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").malloc_trim(0)


def size(pixels: int, methods: list[str], is_lite: bool) -> dict[str, dict]:
    """Measure all methods at one size, one after another, and compare each with the first."""
    results: dict[str, dict] = {}
    with tempfile.TemporaryDirectory() as folder:
        for method in methods:
            command = ["-m", "benchmarks.decode", str(pixels), "--method", method, f"{folder}/{method}.pt"]
            results[method] = last_line(*command, *["--lite"] * is_lite, **(MAPPED if is_lite else {}))
            used = f"{results[method]['seconds']} s {results[method]['peak_megabytes']} MB"
            sys.stderr.write(f"{pixels} {method} {used}\n")
        expected = torch.load(f"{folder}/{methods[0]}.pt")
        for method in methods:
            difference = (torch.load(f"{folder}/{method}.pt") - expected).double()
            results[method]["largest_difference"] = difference.abs().max().item()
            results[method]["relative_difference"] = (difference.norm() / expected.double().norm()).item()
            results[method]["against"] = methods[0]
    return results


def draw(figures: dict, path: Path) -> None:
    """Memory over time at each size."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    sizes = sorted(figures["sizes"], key=int)
    _, axes = pyplot.subplots(1, len(sizes), figsize=(6 * len(sizes), 4), squeeze=False)
    for axis, pixels in zip(axes[0], sizes, strict=True):
        for method, result in figures["sizes"][pixels].items():
            seconds, used = zip(*result["timeline"], strict=True)
            axis.plot(seconds, used, label=method.replace("_", " "))
        axis.set(title=f"{pixels} x {pixels}", xlabel="seconds", ylabel="MB beyond weights and output", yscale="log")
        axis.set_ylim(bottom=10)
        axis.legend(fontsize=8)
    pyplot.tight_layout()
    pyplot.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("sizes", nargs="*", type=int, default=[1024, 2048])
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--lite", action="store_true")
    parser.add_argument("--method", nargs=2, metavar=("METHOD", "FILE"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.method:
        method, saved = arguments.method
        sys.stdout.write(f"\n{json.dumps(measure(method, arguments.sizes[0], arguments.lite, saved))}")
        return
    file = ROOT / "benchmarks" / ("decode_lite.json" if arguments.lite else "decode.json")
    figures = json.loads(file.read_text()) if file.exists() else {"sizes": {}}
    figures |= description()
    for pixels in arguments.sizes:
        methods = ["whole", "strips"] if arguments.lite else arguments.methods
        methods = [method for method in methods if method != "whole" or pixels <= LARGEST_WHOLE]
        results = size(pixels, methods, arguments.lite)
        size_figures = figures["sizes"].setdefault(str(pixels), {})
        (size_figures.setdefault(LITE, {}) if arguments.lite else size_figures).update(results)
        # Write each point of a timeline on one line.
        text = re.sub(r"\[\s+([-\d.]+),\s+(-?\d+)\s+\](,?)\s+", r"[\1, \2]\3 ", json.dumps(figures, indent=1))
        file.write_text(text + "\n")
    if not arguments.lite:
        draw(figures, file.with_suffix(".png"))


if __name__ == "__main__":
    main()
