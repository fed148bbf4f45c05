"""Time, memory and error of the decode: `python benchmarks/decode.py [PIXELS ...]`, 1024 and 2048 unless said.

The real f32c32 configuration with random weights, each decode in a process of its own whose memory is sampled. On the
CPU in fp32; with `--device cuda` on an accelerator in bf16. On a CPU with the allocator as a user has it, and with one
that maps tensors one by one (`--allocator`). Writes benchmarks/decode.json, where sizes that are not measured again
stay, and the pictures beside it. The baseline of each figure is measured in the same run.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.machine import description  # noqa: E402

FILE = ROOT / "benchmarks" / "decode.json"
SECONDS = 0.02  # between two samples of the memory
POINTS = 100  # of a timeline that are kept
# whole needs 5 maps of 128 channels: 2.7 GB at 1024 px, 11 GB at 2048 px, 43 GB at 4096 px
LARGEST_WHOLE = 2048
# glibc keeps freed memory up to twice what is in use, unless tensors are mapped one by one
ALLOCATORS = {"default": {}, "mapped": {"MALLOC_MMAP_THRESHOLD_": "1000000"}}
METHODS = ("whole_fp32", "whole", "diffusers_tiles", "strips_exact", "strips", "smallest", "tiles")


def autoencoder(device: str, dtype: torch.dtype, whole: bool = False):
    """DC-AE f32c32 as SANA has it, with random weights; its decoder alone, unless `whole`."""
    from diffusers import AutoencoderDC

    torch.manual_seed(0)
    blocks = ("ResBlock",) * 3 + ("EfficientViTBlock",) * 3
    widths, scales = (128, 256, 512, 512, 1024, 1024), ((), (), (), (5,), (5,), (5,))
    model = AutoencoderDC(
        attention_head_dim=32,
        encoder_block_types=blocks,
        decoder_block_types=blocks,
        encoder_block_out_channels=widths,
        decoder_block_out_channels=widths,
        encoder_layers_per_block=(2, 2, 2, 3, 3, 3),
        decoder_layers_per_block=(3,) * 6,
        encoder_qkv_multiscales=scales,
        decoder_qkv_multiscales=scales,
        upsample_block_type="interpolate",
        downsample_block_type="Conv",
        scaling_factor=0.41407,
    )
    if not whole:
        del model.encoder
    return model.requires_grad_(False).to(device, dtype)


class Timeline:
    """The memory of this process, or of the device, sampled by a thread."""

    def __init__(self, device: str) -> None:
        self.device, self.points, self.ended = device, [], threading.Event()

    def used(self) -> int:
        if self.device != "cpu":
            return torch.get_device_module(self.device).memory_allocated(self.device)
        from sana_core.decode.device_memory import process_bytes

        return process_bytes()

    def __enter__(self) -> Timeline:
        self.base, self.started = self.used(), time.perf_counter()
        if self.device != "cpu":
            torch.get_device_module(self.device).reset_peak_memory_stats(self.device)
        self.thread = threading.Thread(target=self.watch)
        self.thread.start()
        return self

    def watch(self) -> None:
        while not self.ended.wait(SECONDS):
            self.points.append((time.perf_counter() - self.started, self.used() - self.base))

    def __exit__(self, *exception) -> None:
        if self.device != "cpu":
            torch.get_device_module(self.device).synchronize()
        self.seconds = time.perf_counter() - self.started
        self.ended.set()
        self.thread.join()
        self.peak = max((used for _, used in self.points), default=0)
        if self.device != "cpu":
            self.peak = torch.get_device_module(self.device).max_memory_allocated(self.device) - self.base

    def thinned(self) -> list[tuple[float, int]]:
        """At most POINTS samples, each the highest of its stretch, in seconds and MB."""
        step = max(1, len(self.points) // POINTS)
        parts = [self.points[start : start + step] for start in range(0, len(self.points), step)]
        return [(round(part[0][0], 2), round(max(used for _, used in part) / 1e6)) for part in parts]


def measure(method: str, pixels: int, device: str, saved: str | None) -> dict:
    """Decode once in this process."""
    from sana_core.decode import DecodeOptions, decode_into
    from sana_core.decode.plan import Planner
    from sana_core.decode.stages import decoder_stages

    dtype = torch.float32 if device == "cpu" or method == "whole_fp32" else torch.bfloat16
    model = autoencoder(device, dtype)
    side = pixels // 32
    latents = torch.randn(1, 32, side, side, generator=torch.Generator().manual_seed(1)).to(device, dtype)
    planner = Planner(decoder_stages(model), side, side, dtype, device != "cpu")
    report: dict = {}
    # the pictures are fp32 on the CPU, as in ComfyUI, and there before the sampling of the memory begins
    out = torch.ones(1, 3, pixels, pixels)
    floor = planner.floor().peak_bytes
    # a share of what the undivided decode needs at 1024 px, at every size the same multiple of the boundary map
    budgets = {"strips": max(8 * planner.boundary_bytes, 1.3 * floor), "smallest": floor}

    def work(latents: torch.Tensor, out: torch.Tensor) -> None:
        if method.startswith("whole"):
            out.copy_(model.decode(latents).sample)
        elif method == "diffusers_tiles":
            model.enable_tiling()
            out.copy_(model.decode(latents).sample)
        elif method == "tiles":
            decode_into(out, model, latents, DecodeOptions("tiles"), report)
        elif method == "strips_exact":
            decode_into(out, model, latents, DecodeOptions("strips", 2**40), report)
        else:
            decode_into(out, model, latents, DecodeOptions(max_bytes=budgets[method]), report)

    with torch.no_grad():
        # buffers that the library makes once
        model.decode(latents[:, :, :4, :4])
        give_back_freed()
        busy = time.process_time()
        with Timeline(device) as timeline:
            work(latents, out)
        busy = time.process_time() - busy
    figures = {"seconds": round(timeline.seconds, 2), "peak_megabytes": round(timeline.peak / 1e6, 1)}
    if device == "cpu":
        # of all threads: what other programs do to the clock does not show in it
        figures["cpu_seconds"] = round(busy, 2)
    if report:
        figures |= {"plan": report["plan"], "predicted_megabytes": round(report["predicted_bytes"] / 1e6, 1)}
    if saved:
        torch.save(out, saved)
    return figures | {"timeline": timeline.thinned()}


def give_back_freed() -> None:
    """Let the system have what is freed: the decode would begin in it, and seem to take less than it does."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").malloc_trim(0)


def child(method: str, pixels: int, device: str, saved: str, allocator: str) -> dict:
    command = [sys.executable, __file__, str(pixels), "--device", device, "--method", method, "--save", saved]
    environment = os.environ | ALLOCATORS[allocator]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=environment)
    return json.loads(done.stdout.splitlines()[-1])


def size(pixels: int, device: str, methods: list[str], allocator: str) -> dict:
    """All methods at one size, in turn."""
    results: dict[str, dict] = {}
    with tempfile.TemporaryDirectory() as folder:
        for method in methods:
            saved = f"{folder}/{method}.pt"
            results[method] = child(method, pixels, device, saved, allocator)
            sys.stderr.write(
                f"{pixels} {method} {results[method]['seconds']} s {results[method]['peak_megabytes']} MB\n"
            )
        reference = next((name for name in ("whole_fp32", "whole", "strips_exact") if name in methods), methods[0])
        expected = torch.load(f"{folder}/{reference}.pt")
        for method in methods:
            difference = (torch.load(f"{folder}/{method}.pt") - expected).double()
            results[method]["largest_difference"] = difference.abs().max().item()
            results[method]["relative_difference"] = (difference.norm() / expected.double().norm()).item()
            results[method]["against"] = reference
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
            if result.get("timeline"):
                seconds, used = zip(*result["timeline"], strict=True)
                axis.plot(seconds, used, label=method.replace("_", " "))
            else:
                axis.axhline(result["predicted_megabytes"], linestyle="--", color="grey", label=f"{method}, predicted")
        axis.set(title=f"{pixels} x {pixels}", xlabel="seconds", ylabel="MB beyond weights and output", yscale="log")
        axis.set_ylim(bottom=10)
        axis.legend(fontsize=8)
    pyplot.tight_layout()
    pyplot.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("sizes", nargs="*", type=int, default=[1024, 2048])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--allocator", choices=ALLOCATORS, default="default")
    parser.add_argument("--method", choices=METHODS, help=argparse.SUPPRESS)
    parser.add_argument("--save", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.method:
        json.dump(measure(arguments.method, arguments.sizes[0], arguments.device, arguments.save), sys.stdout)
        return
    file = FILE if arguments.device == "cpu" else FILE.with_name("decode_accelerator.json")
    figures = json.loads(file.read_text()) if file.exists() else {"sizes": {}}
    own = description()
    figures |= own | {"machine": f"{own['machine']}, {arguments.device}"}
    for pixels in arguments.sizes:
        # in fp32, whole is the reference anyway; in bf16, fp32 is
        impossible = {"whole_fp32"} if arguments.device == "cpu" else set()
        impossible |= {"whole", "whole_fp32"} if pixels > LARGEST_WHOLE else set()
        methods = [method for method in arguments.methods if method not in impossible]
        results = size(pixels, arguments.device, methods, arguments.allocator)
        how = {"threads": torch.get_num_threads(), "allocator": arguments.allocator}
        results = {method: how | result for method, result in results.items()}
        if "whole" not in methods:
            # 5.1 maps of 128 channels in fp32, as measured at the smaller sizes
            results["whole"] = {"predicted_megabytes": round(5.1 * 128 * pixels**2 * 4 / 1e6), "timeline": []}
        mapped = "" if arguments.allocator == "default" else ", mapped"
        figures["sizes"].setdefault(str(pixels), {}).update({f"{key}{mapped}": one for key, one in results.items()})
        # a timeline on one line
        text = re.sub(r"\[\s+([-\d.]+),\s+(-?\d+)\s+\](,?)\s+", r"[\1, \2]\3 ", json.dumps(figures, indent=1))
        file.write_text(text + "\n")
    draw(figures, file.with_suffix(".png"))


if __name__ == "__main__":
    main()
