"""The parts of benchmarks/gpu.py. Each part is a function that runs in a separate process and writes figures.

Models have the released sizes and random weights, except where noted. Steps are guided (two rows), in bf16,
with 300 prompt tokens and with query, key and value in one product, as `load_models` loads them.
"""

from __future__ import annotations

import contextlib
import gc
import json
import logging
import shutil
import statistics
import sys
import tempfile
import time
import traceback
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.nn.functional as F

from benchmarks import ROOT
from benchmarks.machine import host_speed, random_transformer
from sana_core.batch.pipeline import Conditioning, Models, ResolvedSettings, sample
from sana_core.batch.plan import ImageSpec
from sana_core.model.block import Constants
from sana_core.model.forward import prepare, velocity
from sana_core.model.known_models import VARIANTS, Architecture
from sana_core.model.layers import arrange_convolutions, join_projections
from sana_core.sampling.step_graph import Recorder as StepRecorder

TOKENS = 300
BF16 = torch.bfloat16
GB = 1e9


class Recorder:
    """Appends one JSON line per figure to `figures.jsonl`, so that a part that is stopped keeps its figures so far."""

    def __init__(self, part: str, out: Path, small: bool) -> None:
        self.part, self.out, self.small = part, out, small
        self.device = torch.device("cuda", 0)

    def figure(self, label: str, **values: Any) -> None:
        line = json.dumps({"part": self.part, "what": label, **values})
        with (self.out / "figures.jsonl").open("a") as file:
            file.write(line + "\n")
        sys.stdout.write(line + "\n")

    def attempt(self, label: str, measure: Callable[[], dict[str, Any]]) -> None:
        """Record what `measure` returns, or the error that it raises. An error ends no other measurement."""
        try:
            self.figure(label, **measure())
        except Exception as error:
            traceback.print_exc()
            self.figure(label, failed=f"{type(error).__name__}: {str(error)[:300]}")
        gc.collect()
        torch.cuda.empty_cache()


def run_part(name: str, out: Path, small: bool) -> int:
    """Run a part. Returns the number of its figures that failed."""
    logging.basicConfig(level=logging.INFO)  # Retries and refused kernels are logged at this level.
    recorder = Recorder(name, out, small)
    properties = torch.cuda.get_device_properties(recorder.device)
    recorder.figure(
        "machine",
        gpu=properties.name,
        gpus=torch.accelerator.device_count(),
        memory_gb=round(properties.total_memory / GB, 1),
        torch=torch.__version__,
        driver=torch.version.cuda or torch.version.hip,
        **host_speed(),
    )
    if small:
        VARIANTS["0.6B"] = VARIANTS["1.6B"] = VARIANTS["0.6B"]._replace(layers=1)
        VARIANTS["1.5-4.8B"] = VARIANTS["0.6B"]
    with torch.enable_grad() if name in ("train", "train_compiled") else torch.no_grad():
        PART_FUNCTIONS[name](recorder)
    lines = (out / "figures.jsonl").read_text().splitlines()
    return sum("failed" in figure for figure in map(json.loads, lines) if figure["part"] == name)


def measure(call: Callable[[], Any], runs: int = 10) -> dict[str, float]:
    """Return the median milliseconds of warm calls, and their memory.

    `host_ms` is the time until the host has launched all kernels. If it is as long as `ms`, the host is the limit.
    `peak_gb` counts from the bytes before the call. `reserved_gb` is the memory that torch holds, used or not.
    """
    for _ in range(2):
        call()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    total, host = [], []
    for _ in range(runs):
        started = time.perf_counter()
        call()
        host.append(time.perf_counter() - started)
        torch.cuda.synchronize()
        total.append(time.perf_counter() - started)
    return {
        "ms": round(1000 * statistics.median(total), 3),
        "host_ms": round(1000 * statistics.median(host), 3),
        "peak_gb": round((torch.cuda.max_memory_allocated() - before) / GB, 3),
        "reserved_gb": round(torch.cuda.memory_reserved() / GB, 2),
    }


def kernel_ms(call: Callable[[], Any], small: bool) -> float:
    """Median milliseconds that the GPU takes for `call`, with a cold L2 cache and without the host's time."""
    if small:
        return measure(call, 1)["ms"]
    from triton.testing import do_bench

    return round(do_bench(call, warmup=5, rep=30, return_mode="median"), 4)


def profile(recorder: Recorder, label: str, call: Callable[[], Any], rows: int = 14) -> None:
    """Record the kernels of `call` with the most GPU time: milliseconds and launches."""
    if recorder.small:
        return
    from torch.profiler import ProfilerActivity

    call()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as profiler:
        call()
        torch.cuda.synchronize()
    kernels = [event for event in profiler.key_averages() if event.device_type == torch.autograd.DeviceType.CUDA]
    kernels.sort(key=lambda kernel: -kernel.self_device_time_total)
    recorder.figure(
        f"profile of {label}",
        gpu_ms=round(sum(kernel.self_device_time_total for kernel in kernels) / 1000, 2),
        launches=sum(kernel.count for kernel in kernels),
        kernels={k.key[:70]: [round(k.self_device_time_total / 1000, 3), k.count] for k in kernels[:rows]},
    )


def noise(recorder: Recorder, *shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.randn(shape, device=recorder.device, dtype=dtype)


@contextlib.contextmanager
def built_as(dtype: torch.dtype, device: torch.device) -> Iterator[None]:
    """Build modules in `dtype` on `device`, without a float32 copy on the CPU."""
    default = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with device:
            yield
    finally:
        torch.set_default_dtype(default)


class Step(NamedTuple):
    transformer: Any
    x: torch.Tensor  # [2, 32, h, w]
    timestep: torch.Tensor  # [2]
    embeds: torch.Tensor  # [2, TOKENS, 2304]
    mask: torch.Tensor  # [2, TOKENS]
    constants: Constants

    def velocity(self) -> torch.Tensor:
        return velocity(self.transformer, self.x, self.timestep, self.constants)


def build_step(recorder: Recorder, variant: str, pixels: int) -> Step:
    with built_as(BF16, recorder.device):
        transformer = random_transformer(VARIANTS[variant].width, VARIANTS[variant].layers)
    join_projections(transformer)
    cells = pixels // 32
    embeds, mask = noise(recorder, 2, TOKENS, 2304), torch.ones(2, TOKENS, dtype=torch.long, device=recorder.device)
    timestep = torch.full((2,), 500.0, device=recorder.device)
    constants = prepare(transformer, embeds, mask, cells, cells)
    return Step(transformer, noise(recorder, 2, 32, cells, cells), timestep, embeds, mask, constants)


def teraflops(model: Architecture, pixels: int, rows: int = 2) -> float:
    """Teraflop of a step, without the preparation of its prompt (SANA paper, section 2.2)."""
    width, hidden, positions = model.width, int(2.5 * model.width), (pixels // 32) ** 2
    self_attention = 4 * width**2 + 2 * 33 * width  # projections, and two products of 32 x 33 per head
    cross_attention = 2 * width**2 + 2 * TOKENS * width
    feed_forward = 2 * width * hidden + 9 * 2 * hidden + hidden * width
    per_position = model.layers * (self_attention + cross_attention + feed_forward) + 64 * width
    return 2e-12 * rows * positions * per_position


def step_sizes(small: bool) -> list[tuple[str, int]]:
    return [("1.6B", 128)] if small else [("1.6B", 1024), ("0.6B", 512), ("1.6B", 4096)]


def begin(recorder: Recorder) -> None:
    from sana_core.kernels.trial import TRIALS, refused_kernels

    for dtype in (BF16, torch.float16, torch.float32):
        recorder.attempt(
            f"kernels, {dtype}",
            lambda dtype=dtype: {"kernels": len(TRIALS), "refused": refused_kernels(recorder.device, dtype)},
        )
    side = 256 if recorder.small else 8192
    # A square product, then the products of a step of 1.6B: 2048 rows for one image of 1024 px, 4096 for two images,
    # 32768 for one image of 4096 px.
    shapes = [(side, side, side)]
    if not recorder.small:
        sides = ((2240, 2240), (2240, 6720), (2240, 11200), (5600, 2240))
        shapes += [(rows, *pair) for rows in (2048, 4096, 32768) for pair in sides]
    for rows, inner, outer in shapes:
        a, weight = noise(recorder, rows, inner), noise(recorder, outer, inner)
        ms = kernel_ms(lambda a=a, weight=weight: F.linear(a, weight), recorder.small)
        recorder.figure(f"product {rows} x {inner} x {outer}", ms=ms, tflops=round(2e-9 * rows * inner * outer / ms, 1))
    source = noise(recorder, 2**20 if recorder.small else 2**30)
    target = torch.empty_like(source)
    ms = kernel_ms(lambda: target.copy_(source), recorder.small)
    recorder.figure("copy", gb_per_s=round(2e-6 * source.nbytes / ms))


def trained(recorder: Recorder) -> None:
    """The bundled model's committed image, which was generated in float32 on a CPU."""
    import numpy as np
    from PIL import Image

    from sana_core import generate
    from sana_core.doctor.files import BUNDLED
    from sana_core.runtime.image_files import levels

    with Image.open(BUNDLED / "expected.png") as image:
        expected, settings = np.asarray(image).astype(int), json.loads(image.info["sana"])
    settings.pop("digests")
    prompt = settings.pop("prompt")
    for dtype in ("float32", "bfloat16", "float16")[: 1 if recorder.small else 3]:

        def compare(dtype: str = dtype) -> dict[str, Any]:
            started = time.perf_counter()
            image = generate([prompt], BUNDLED, devices=[recorder.device], **settings | {"dtype": dtype})[0]
            seconds = time.perf_counter() - started
            Image.fromarray(levels(image)).save(recorder.out / f"trained-{dtype}.png")
            difference = np.abs(levels(image).astype(int) - expected)
            return {
                "seconds": round(seconds, 2),
                "largest_difference": int(difference.max()),  # The differences are in levels from 0 to 255.
                "mean_difference": round(float(difference.mean()), 3),
            }

        recorder.attempt(f"image, {dtype}", compare)


def step(recorder: Recorder) -> None:
    from sana_core.memory import plan_memory

    for variant, pixels in step_sizes(recorder.small):
        s = build_step(recorder, variant, pixels)
        planned = plan_memory(variant, pixels, pixels, 1, "bfloat16", True)["transformer"]["activations"]
        sizes = {"tflop": round(teraflops(VARIANTS[variant], pixels), 2), "planned_gb": round(planned / GB, 3)}
        plain = s._replace(constants=s.constants._replace(kernels=frozenset()))

        def diffusers(s: Step = s) -> torch.Tensor:
            return s.transformer(s.x, s.embeds, s.timestep, encoder_attention_mask=s.mask).sample

        ways = {"pack": s.velocity, "pack without kernels": plain.velocity, "diffusers": diffusers}
        for name, call in ways.items():
            label = f"{variant}, {pixels} px, {name}"

            def compare(call: Callable[[], torch.Tensor] = call, sizes: dict[str, float] = sizes) -> dict[str, Any]:
                return measure(call) | sizes | {"finite": bool(call().isfinite().all())}

            recorder.attempt(label, compare)
            if name != "pack without kernels":
                profile(recorder, label, call)


def decode(recorder: Recorder) -> None:
    from layouts import f32c32

    from sana_core.decode import DecodeOptions, decode_into
    from sana_core.decode.plan import Planner
    from sana_core.decode.stages import decoder_stages

    with built_as(BF16, recorder.device):
        model = f32c32(8 if recorder.small else 1)
    arrange_convolutions(model)
    for pixels in (128,) if recorder.small else (4096, 1024):
        latents = noise(recorder, 1, 32, pixels // 32, pixels // 32)
        out = torch.empty(1, 3, pixels, pixels)

        def decode_image(method: str, budget: int | None, latents: torch.Tensor = latents, out: Any = out) -> dict:
            report: dict = {}
            decode_into(out, model, latents, DecodeOptions(method, budget), report)
            return report

        floor = Planner(decoder_stages(model), pixels // 32, pixels // 32, BF16, True).floor().peak_bytes
        smallest = int(1.2 * floor)
        for method, budget in (("auto", None), ("auto", smallest), ("tiles", None), ("whole", None)):

            def compare(method: str = method, budget: int | None = budget, out: Any = out) -> dict[str, Any]:
                report = decode_image(method, budget)
                figures = measure(lambda: decode_image(method, budget), 1 if recorder.small else 3)
                return figures | {
                    "method": report["method"],
                    "strips": report["strips"],
                    "predicted_gb": round(report["predicted_bytes"] / GB, 3),
                    "predicted_of_peak": round(report["predicted_bytes"] / report["peak_bytes"], 3),
                    "retries": len(report["events"]),
                    "finite": bool(out.isfinite().all()),
                }

            limit = "" if budget is None else " in the smallest budget"
            if method != "whole" or pixels < 4096:  # whole at 4096 px needs tensors of 2^32 elements and is refused
                recorder.attempt(f"{pixels} px, {method}{limit}", compare)
        profile(recorder, f"{pixels} px, auto", lambda: decode_image("auto", None))
        for name, switch in (("diffusers' tiles", model.enable_tiling), ("diffusers whole", model.disable_tiling)):
            switch()
            recorder.attempt(
                f"{pixels} px, {name}", lambda latents=latents: measure(lambda: model.decode(latents).sample.cpu(), 1)
            )


def plain_gate(depth: torch.nn.Module, maps: torch.Tensor) -> torch.Tensor:
    """Return value * silu(gate) of the depthwise convolution of silu(`maps`) [B, h, w, 2 C], without a kernel."""
    value, gate = depth(F.silu(maps).permute(0, 3, 1, 2)).chunk(2, dim=1)
    return (value * F.silu(gate)).permute(0, 2, 3, 1)


def kernels(recorder: Recorder) -> None:
    from sana_core.kernels import channels
    from sana_core.kernels.channels import add_then_norm
    from sana_core.kernels.gated_depthwise import silu_depthwise_gate
    from sana_core.kernels.linear_attention import relu_attention
    from sana_core.model import block

    def compare(label: str, fused: Callable[[], Any], plain: Callable[[], Any], moved: float) -> None:
        def both() -> dict[str, Any]:
            ms = kernel_ms(fused, recorder.small)
            return {
                "ms": ms,
                "plain_ms": kernel_ms(plain, recorder.small),
                "gb_per_s": round(1e-6 * moved / ms),
                "host_ms": measure(fused, 20)["host_ms"],
            }

        recorder.attempt(label, both)

    for width, side in ((64, 4),) if recorder.small else ((2240, 32), (2240, 128)):
        x = noise(recorder, 2, side, side, 5 * width)
        with built_as(BF16, recorder.device):
            depth = torch.nn.Conv2d(5 * width, 5 * width, 3, padding=1, groups=5 * width)
        compare(
            f"gated depthwise, {5 * width} channels at {side} x {side}",
            lambda x=x, depth=depth: silu_depthwise_gate(x, depth.weight, depth.bias),
            lambda x=x, depth=depth: plain_gate(depth, x),
            1.5 * x.nbytes,
        )
        qkv = noise(recorder, 2, side * side, 3 * width)
        q, k, v = qkv.chunk(3, -1)
        compare(
            f"linear attention, {width} channels at {side} x {side}",
            lambda parts=(q, k, v), heads=width // 32: relu_attention(*parts, heads, 1e-15),
            lambda parts=(q, k, v), heads=width // 32: block.linear_attention(
                *parts, heads, 1e-15, block.attention_sums
            ),
            4 / 3 * qkv.nbytes,
        )
        hidden, update = noise(recorder, 2, side * side, width), noise(recorder, 2, side * side, width)
        tables = noise(recorder, 3, 2, 1, width)
        norm = torch.nn.LayerNorm(width, 1e-6, False)
        compare(
            f"modulation, {width} channels at {side} x {side}",
            lambda h=hidden, u=update, t=tables: add_then_norm(h, (u, t[2]), t[0], t[1], 1e-6),
            lambda h=hidden, u=update, t=tables, norm=norm: block.add_then_norm(
                h, block.Branch(u, t[2]), norm, t[0], t[1]
            ),
            4 * hidden.nbytes,
        )
    for width, count in ((128, 64),) if recorder.small else ((128, 2**21), (1024, 2**15)):
        rows, weight = noise(recorder, count, width), noise(recorder, width)
        compare(
            f"RMS norm, {count} x {width}",
            lambda r=rows, w=weight: channels.rms_norm(r, w, w, 1e-5, r),
            lambda r=rows, w=weight: F.rms_norm(r, w.shape, w, 1e-5) + w + r,
            3 * rows.nbytes,
        )
        compare(
            f"bias and SiLU, {count} x {width}",
            lambda r=rows, w=weight: channels.add_bias(r, w, r, "silu"),
            lambda r=rows, w=weight: F.silu(r + w),
            2 * rows.nbytes,
        )


def run_tests(recorder: Recorder, *arguments: str) -> None:
    """Run pytest in this process, and record each test as it ends."""
    import pytest

    class Lines:
        def pytest_runtest_logreport(self, report: Any) -> None:
            if report.when == "call" or not report.passed:
                failed = {"failed": str(report.longrepr)[-600:]} if report.failed else {}
                recorder.figure(report.nodeid, outcome=report.outcome, seconds=round(report.duration, 1), **failed)

    options = ["-c", "tests/pytest.ini", "-p", "no:cacheprovider", "-q", "--tb=short", "-s"]
    with contextlib.suppress(ImportError):
        import xdist  # noqa: F401

        options += ["-n", "1" if recorder.small else "4"]
    status = pytest.main([*options, *arguments], plugins=[Lines()])
    if status == pytest.ExitCode.NO_TESTS_COLLECTED or status > pytest.ExitCode.TESTS_FAILED:
        recorder.figure("pytest", failed=f"ended with status {int(status)}")


def correctness(recorder: Recorder) -> None:
    # A compiled step takes a minute; the part "compile" has it.
    run_tests(recorder, "tests/gpu", "-k", "not compiled")
    if not recorder.small:
        run_tests(recorder, "tests/unit/kernel_numbers.py")


def canvas(recorder: Recorder) -> None:
    run_tests(recorder, "tests/graph/test_templates.py", *(("-k", "1K or Sprint") if recorder.small else ()))


def pipeline(recorder: Recorder) -> None:
    """The whole program on a folder in diffusers' layout, then SanaPipeline, then memory that really runs out."""
    from sana_core import generate

    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "released-shapes"
        started = time.perf_counter()
        save_released_folder(recorder, folder)
        size = sum(file.stat().st_size for file in folder.rglob("*.safetensors"))
        recorder.figure("folder", seconds=round(time.perf_counter() - started, 1), gb=round(size / GB, 2))
        pixels, steps = (128, 2) if recorder.small else (1024, 20)
        prompts = [f"a red circle number {i}" for i in range(16)]

        def images(count: int, **changes: Any) -> dict[str, Any]:
            options = {"width": pixels, "height": pixels, "steps": steps, "dtype": "bfloat16"} | changes
            torch.cuda.reset_peak_memory_stats()
            started = time.perf_counter()
            result = generate(prompts[:count], folder, devices=[recorder.device], **options)
            return {
                "seconds_with_loading": round(time.perf_counter() - started, 2),
                "finite": bool(result.isfinite().all()),
                "peak_gb": round(torch.cuda.max_memory_allocated() / GB, 2),
            }

        recorder.attempt("1 image, cold", lambda: images(1))
        recorder.attempt("1 image", lambda: images(1))
        recorder.attempt("2 images" if recorder.small else "8 images", lambda: images(2 if recorder.small else 8))
        if recorder.small:
            return

        def images_in_little_memory() -> dict[str, Any]:
            free, _ = torch.cuda.mem_get_info()
            ballast = torch.empty(max(0, free - 9 * 10**9), dtype=torch.uint8, device=recorder.device)
            figures = images(16, chunk=16, width=2048, height=2048, steps=4)
            return figures | {"ballast_gb": round(ballast.nbytes / GB, 1)}

        recorder.attempt("16 images of 2048 px at once in 9 GB", images_in_little_memory)

        def sana_pipeline() -> dict[str, Any]:
            from diffusers import SanaPipeline

            started = time.perf_counter()
            pipe = SanaPipeline.from_pretrained(folder, torch_dtype=BF16).to(recorder.device)
            pipe.set_progress_bar_config(disable=True)
            figures: dict[str, Any] = {"loading_seconds": round(time.perf_counter() - started, 2)}
            for count in (1, 1, 8):  # the first call is a warm-up
                torch.cuda.reset_peak_memory_stats()
                started = time.perf_counter()
                pipe(
                    prompts[:count],
                    width=pixels,
                    height=pixels,
                    num_inference_steps=steps,
                    guidance_scale=4.5,
                    output_type="pt",
                    complex_human_instruction=None,
                )
                torch.cuda.synchronize()
                figures[f"seconds_{count}"] = round(time.perf_counter() - started, 2)
                figures[f"peak_gb_{count}"] = round(torch.cuda.max_memory_allocated() / GB, 2)
            return figures

        recorder.attempt("SanaPipeline, warm, without loading", sana_pipeline)


def save_released_folder(recorder: Recorder, folder: Path) -> None:
    """Save random weights of the released shapes of 1.6B, with the tokenizer of the test model."""
    from layouts import f32c32
    from transformers import Gemma2Config, Gemma2Model

    model = ROOT / "tests" / "models" / "sana-tiny"
    shutil.copytree(model, folder, ignore=lambda _, names: [name for name in names if name.endswith(".safetensors")])
    config = Gemma2Config()
    if recorder.small:
        config = Gemma2Config(num_hidden_layers=1, hidden_size=2304, intermediate_size=64, vocab_size=1000)
    with built_as(BF16, torch.device("cpu") if recorder.small else recorder.device):
        builders: dict[str, Callable[[], Any]] = {
            "transformer": lambda: random_transformer(VARIANTS["1.6B"].width, VARIANTS["1.6B"].layers),
            "vae": lambda: f32c32(8 if recorder.small else 1),
            "text_encoder": lambda: Gemma2Model(config),
        }
        for name, build in builders.items():
            build().save_pretrained(folder / name)
    torch.cuda.empty_cache()


def build_models(recorder: Recorder, variant: str) -> Models:
    """Return a transformer with random weights as `load_models` returns it."""
    with built_as(BF16, recorder.device):
        transformer = random_transformer(VARIANTS[variant].width, VARIANTS[variant].layers)
    join_projections(transformer)
    return Models(transformer.eval().requires_grad_(False), None, 3.0)


def sampling(models: Models, pixels: int, steps: int, counts: Counter[str] | None) -> torch.Tensor:
    """Return the latents of a guided sampling. With `counts`, its steps may be recorded, as on the command line."""
    generator = torch.Generator().manual_seed(0)
    texts = [(torch.randn(1, TOKENS, 2304, generator=generator), torch.ones(1, TOKENS)) for _ in range(2)]
    settings = ResolvedSettings(width=pixels, height=pixels, steps=steps, guidance=4.5, sampler="flow_dpmpp_2m")
    return sample(models, settings, (ImageSpec(0, 0, 3),), Conditioning(texts[:1], texts[1]), counts=counts)


@contextlib.contextmanager
def counted_graphs() -> Iterator[weakref.WeakSet[Any]]:
    """Yield the set of the CUDA graphs that were created inside the context and are alive."""
    alive: weakref.WeakSet[Any] = weakref.WeakSet()

    class Counted(torch.cuda.CUDAGraph):
        def __new__(cls, *arguments: Any, **options: Any) -> Any:
            graph = super().__new__(cls, *arguments, **options)
            alive.add(graph)
            return graph

    with mock.patch.object(torch.cuda, "CUDAGraph", Counted):
        yield alive


def recording(recorder: Recorder) -> None:
    """The first part, because the recorder of CUDA graphs has no other test on a GPU."""
    pixels, steps = (64, 5) if recorder.small else (512, 20)
    models = build_models(recorder, "0.6B")
    expected = sampling(models, pixels, steps, None)

    def record(forced: bool) -> dict[str, Any]:
        counts: Counter[str] = Counter()
        torch.cuda.empty_cache()
        before = torch.cuda.memory_reserved()
        force = mock.patch.object(StepRecorder, "waits_for_host", lambda self: True)
        with counted_graphs() as graphs, force if forced else contextlib.nullcontext():
            same_bits = torch.equal(sampling(models, pixels, steps, counts), expected)
        gc.collect()
        torch.cuda.empty_cache()
        problems = {
            "not recorded; log.txt has the reason": forced and counts["recorded"] != 1,
            "a recording failed; log.txt has the reason": counts["failed"] > 0,
            "other bits": not same_bits,
            "a graph is alive": len(graphs) > 0,
        }
        failed = ", ".join(problem for problem, is_present in problems.items() if is_present)
        return {
            "recorded": counts["recorded"],
            "replayed": counts["replayed"],
            "same_bits": same_bits,
            "graphs_alive": len(graphs),
            "kept_mb": round((torch.cuda.memory_reserved() - before) / 1e6),
        } | ({"failed": failed} if failed else {})

    recorder.attempt("always recorded", lambda: record(True))
    recorder.attempt("recorded if the host is the limit", lambda: record(False))


def graph(recorder: Recorder) -> None:
    sizes = [("0.6B", 512), ("1.6B", 1024), ("1.6B", 512), ("1.5-4.8B", 1024)]
    steps = 5 if recorder.small else 20
    for variant, pixels in [("1.6B", 64)] if recorder.small else sizes:
        models = build_models(recorder, variant)

        def compare(models: Models = models, pixels: int = pixels) -> dict[str, Any]:
            counts: Counter[str] = Counter()
            same = torch.equal(sampling(models, pixels, steps, None), sampling(models, pixels, steps, counts))
            runs = 1 if recorder.small else 3
            eager = measure(lambda: sampling(models, pixels, steps, None), runs)
            figures = measure(lambda: sampling(models, pixels, steps, Counter()), runs)
            plain = {f"eager_{name}": figure for name, figure in eager.items()}
            return figures | plain | {"same_bits": same, "steps": steps, "replayed": counts["replayed"]}

        recorder.attempt(f"{variant}, {pixels} px", compare)


def compare_workers(recorder: Recorder) -> None:
    """Threads of one process share Python's lock. Processes do not."""
    from benchmarks.host_bound import make_job, steps_per_second, workers_of
    from sana_core.engine.process import Processes

    seconds = 0.2 if recorder.small else 4
    for variant, pixels in [("0.6B", 64)] if recorder.small else [("0.6B", 512), ("1.6B", 1024)]:
        processes = Processes()
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary) / variant
            with built_as(BF16, recorder.device):
                random_transformer(VARIANTS[variant].width, VARIANTS[variant].layers).save_pretrained(folder)
            torch.cuda.empty_cache()
            job = make_job(folder, pixels)
            for way in ("1 thread", "2 threads", "1 process", "2 processes"):

                def rate(way: str = way, job: Any = job, processes: Any = processes) -> dict[str, Any]:
                    with workers_of(way, processes, recorder.device) as workers:
                        steps, busy = steps_per_second(job, workers, seconds, width=2304)
                    return {"steps_per_s": round(steps, 1), "cores_per_worker": round(busy, 2)}

                recorder.attempt(f"{variant}, {pixels} px, {way}", rate)
        processes.end()


def rows(recorder: Recorder) -> None:
    from layouts import f32c32

    from sana_core.decode import decode_latents, plan

    with built_as(BF16, recorder.device):
        model = f32c32(8 if recorder.small else 1)
    arrange_convolutions(model)
    for pixels in (128,) if recorder.small else (512, 1024, 2048, 4096):
        latents = noise(recorder, 1, 32, pixels // 32, pixels // 32)
        first: list[torch.Tensor] = []
        for height, attention in ((256, 16), (512, 32), (1024, 32)):

            def compare(height: int = height, attention: int = attention, z: Any = latents, first: Any = first) -> dict:
                report: dict[str, Any] = {}
                with mock.patch.multiple(plan, TALL_ROWS=(height,), TALL_ATTENTION_ROWS=attention):
                    first.append(decode_latents(model, z, report=report))
                    figures = measure(lambda: decode_latents(model, z), 1 if recorder.small else 3)
                difference = (first[-1].float() - first[0].float()).norm() / first[0].float().norm()
                del first[1:]
                predicted = {"predicted_gb": round(report["predicted_bytes"] / GB, 3), "strips": report["strips"]}
                return figures | predicted | {"difference": float(f"{float(difference):.1e}")}

            recorder.attempt(f"{pixels} px, strips of {height}, attention {attention}", compare)


def loading(recorder: Recorder) -> None:
    from safetensors.torch import save_file

    from sana_core.checkpoints.headers import read_file
    from sana_core.checkpoints.load import check_finite

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "model.safetensors"
        width, count = (256, 4) if recorder.small else (2304, 72)
        save_file({f"layer{i}.weight": torch.zeros(width, 9216, dtype=BF16) for i in range(count)}, file)
        size = file.stat().st_size

        def rate(label: str, call: Callable[[], Any]) -> None:
            def measure_twice() -> dict[str, Any]:
                rates = []
                for _ in range(2):
                    started = time.perf_counter()
                    result = call()
                    torch.cuda.synchronize()
                    rates.append(round(1e-9 * size / (time.perf_counter() - started), 2))
                    del result
                return {"gb_per_s": rates, "gb": round(size / GB, 2)}

            recorder.attempt(label, measure_twice)

        rate("read_file", lambda: read_file(file))
        tensors = read_file(file)
        rate("check_finite on the CPU", lambda: [check_finite("file", key, part) for key, part in tensors.items()])
        rate("to the GPU", lambda: [tensor.to(recorder.device, copy=True) for tensor in tensors.values()])
        tensors.clear()
        for threads in (1, 2, 4, 8):
            rate(f"pinned buffers of {threads} threads, to the GPU", lambda n=threads: read_by(recorder, file, n))


def read_by(recorder: Recorder, file: Path, threads: int) -> torch.Tensor:
    """Read `file` into the GPU's memory. Each thread has one reused buffer, which is pinned."""
    block, size = 64 << 20, file.stat().st_size
    target = torch.empty(size, dtype=torch.uint8, device=recorder.device)

    def work(offsets: range) -> None:
        buffer = torch.empty(block, dtype=torch.uint8, pin_memory=not recorder.small)
        stream = None if recorder.small else torch.cuda.Stream(recorder.device)
        inside = contextlib.nullcontext() if stream is None else torch.cuda.stream(stream)
        with file.open("rb", buffering=0) as source, inside:
            for offset in offsets:
                source.seek(offset)
                count = source.readinto(memoryview(buffer.numpy()))  # type: ignore[arg-type]
                target[offset : offset + count].copy_(buffer[:count], non_blocking=True)
                if stream is not None:
                    # The buffer must not change before the copy has ended.
                    stream.synchronize()

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(work, [range(i * block, size, threads * block) for i in range(threads)]))
    return target


def train(recorder: Recorder, compiled: bool = False) -> None:
    """LoRA steps of 1.6B. A compile takes about a minute, so it is a part of its own."""
    from trainers import make_trainer, take_step

    from benchmarks.train_memory import SAMPLES, empty_prompt, fake_batch, make_settings, predict, transformer
    from sana_core.training.schedule import TrainProgress
    from sana_core.training.settings import Method

    pixels = 128 if recorder.small else 1024
    cases: dict[str, dict[str, Any]] = {
        "LoRA": {},
        "no checkpointing": {"checkpoint": False},
        "no checkpointing, batch 4": {"checkpoint": False, "batch": 4},
    }
    if compiled:
        cases = {"no checkpointing, compiled": {"checkpoint": False}}
    for name, changes in list(cases.items())[: 1 if recorder.small else None]:

        def learn(changes: dict[str, Any] = changes, name: str = name) -> dict[str, Any]:
            settings = make_settings(pixels=pixels, method=Method(rank=16), **changes)
            model = transformer(VARIANTS["1.6B"], BF16, pixels).to(recorder.device)
            state = make_trainer(model, 3.0, settings, recorder.device)
            if compiled:
                state.is_compiled = True
                for block in model.transformer_blocks:
                    block.compile(dynamic=False)

            def load(indices: list[int]) -> Any:
                batch = fake_batch(len(indices), pixels // 32, BF16)
                return batch._replace(latents=torch.randn_like(batch.latents), embeds=torch.randn_like(batch.embeds))

            data = SimpleNamespace(cache=SimpleNamespace(load=load, empty=empty_prompt(BF16)), samples=SAMPLES)
            group, steps = [list(range(settings.phase[0].batch))], iter(range(1000))

            def one_step() -> None:
                take_step(state, data, group, TrainProgress(next(steps)), 1e-4)

            figures = measure(one_step, 1 if recorder.small else 4)
            allocated = torch.cuda.max_memory_allocated() / GB
            profile(recorder, name, one_step)
            planned = predict("1.6B", settings) / GB
            return figures | {"allocated_gb": round(allocated, 2), "planned_gb": round(planned, 2)}

        recorder.attempt(name, learn)


def quantised(recorder: Recorder) -> None:
    """The MODEL of our loader inside ComfyUI. As a CUDA graph only as an experiment: the canvas records none."""
    from in_process import Host

    with torch.enable_grad():  # tests/fake_accelerator.py computes a gradient when it is imported
        from benchmarks.host_time import step_in_comfyui

    cells = 4 if recorder.small else 32
    with tempfile.TemporaryDirectory() as temporary:
        base, folder = Path(temporary) / "host", Path(temporary) / "1.6B"
        with built_as(BF16, recorder.device):
            random_transformer(VARIANTS["1.6B"].width, VARIANTS["1.6B"].layers).save_pretrained(folder)
        torch.cuda.empty_cache()
        base.mkdir()
        Host(base)
        x = noise(recorder, 1, 32, cells, cells, dtype=torch.float32)
        cond, uncond = ((torch.randn(1, TOKENS, 2304), torch.ones(1, TOKENS)) for _ in range(2))
        for form in ("off", "fp8") if recorder.small else ("off", "fp8", "int8"):

            def compare(form: str = form) -> dict[str, Any]:
                # ComfyUI computes so. Only inference tensors may be changed in place later.
                with torch.inference_mode():
                    step = step_in_comfyui(folder, x, cond, uncond, quantise=form)
                    figures = measure(step, 1 if recorder.small else 10)
                    if recorder.small:
                        return figures
                    profile(recorder, form, step)
                    try:
                        recording = StepRecorder(recorder.device).record(step)
                    except Exception as error:
                        return figures | {"graph": f"{type(error).__name__}: {str(error)[:200]}"}
                    assert recording is not None
                    return figures | {"graph_ms": measure(recording.replay)["ms"]}

            recorder.attempt(f"quantise {form}", compare)


def compile_step(recorder: Recorder) -> None:
    variant, pixels = step_sizes(recorder.small)[0]
    s = build_step(recorder, variant, pixels)
    for mode in (None, "reduce-overhead"):

        def compare(mode: str | None = mode) -> dict[str, Any]:
            torch.compiler.reset()
            exact = s.velocity().float()
            started = time.perf_counter()
            compiled = torch.compile(velocity, fullgraph=True, mode=mode)
            error = (compiled(s.transformer, s.x, s.timestep, s.constants).float() - exact).norm() / exact.norm()
            seconds = time.perf_counter() - started
            figures = measure(lambda: compiled(s.transformer, s.x, s.timestep, s.constants))
            return figures | {"compile_seconds": round(seconds, 1), "error": round(float(error), 5)}

        recorder.attempt(f"{variant}, {pixels} px, {mode or 'default'}", compare)
    if not recorder.small:
        run_tests(recorder, "tests/gpu", "-k", "compiled")


PART_FUNCTIONS: dict[str, Callable[[Recorder], None]] = {
    "recording": recording,
    "graph": graph,
    "processes": compare_workers,
    "rows": rows,
    "loading": loading,
    "train": train,
    "quantised": quantised,
    "canvas": canvas,
    "correctness": correctness,
    "begin": begin,
    "trained": trained,
    "step": step,
    "decode": decode,
    "kernels": kernels,
    "pipeline": pipeline,
    "compile": compile_step,
    "train_compiled": partial(train, compiled=True),
}
