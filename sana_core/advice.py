"""Says which model and which settings fit a GPU, and predicts how long an image takes.

README, docs, SANA Plan, `plan` and the notes and cards of the templates take their numbers from here. `gpu_table` and
`model_table` are the tables of the documents; scripts/tables.py writes them.

No number for a GPU that is sold is measured. The speeds of devices:

H100 SXM: measured on one GPU (benchmarks/gpu/nvidia-h100-80gb-hbm3.json). A product in bf16 reaches 735 TFLOP/s, of 989
published. A step of the 1.6B model at 4096 px takes 172 ms, so the kernels between the products move their 55 GB at
1.13 TB/s, of 3.35 published. With these two rates, the prediction for the kernels of a step at 1024 px is 10.7 ms,
which equals the measured time.
GeForce: published figures (NVIDIA Ada whitepaper), of which the H100's share of products is assumed.
Host: a launch took Python 42 us on one machine with an H100 (12.1 ms for the 287 launches of the 1.6B model at 1024 px)
and 87 us on another (34 ms for the 391 launches of the 0.6B model at 512 px). So a prediction has two values.
Launches and bytes are counted for the fused kernels. Tests compare them with tests/fake_accelerator.py.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from .checkpoints.generation import DOWNLOADS, GEMMA_FILE
from .kernels.support import divide_rows
from .memory import CONTEXT, ImagePlan, plan_memory, quantised_bytes
from .model.known_models import (
    DEFAULT_RESOLUTION,
    DEFAULTS,
    GPU_SIZES,
    HEAD_DIM,
    MAX_TOKENS,
    SPRINT_DEFAULTS,
    VARIANTS,
    Architecture,
)
from .model.latents import CHANNELS, DOWNSCALE
from .runtime.accelerator import current_accelerator, has_bf16, memory_info

# Kernel launches: outside the blocks, in a block, and of the norms of query and key in a block.
OUTSIDE, BLOCK, NORMS = 27, 13, 3
# Seconds of Python for a launch, on a fast host and on a slow one.
LAUNCHES = (42e-6, 87e-6)
# The share of the published TFLOP/s that an H100 reaches in a product. GeForce GPUs are assumed to reach the same share
# of both published rates.
REACHED = 0.74


class GpuSpeed(NamedTuple):
    # TFLOP/s of a matrix product.
    tflops: float
    # Bytes per second that the kernels between the products move.
    bandwidth: float
    # Seconds of Python for a launch.
    launch: float


class ExampleGpu(NamedTuple):
    """A GPU that is sold."""

    name: str
    # Published TFLOP/s, dense in bf16 with fp32 sums, and bytes per second.
    tflops: float
    bandwidth: float
    # Shares of the published rates that products and the kernels between them reach.
    product_share: float = REACHED
    bandwidth_share: float = REACHED

    @property
    def speeds(self) -> tuple[GpuSpeed, GpuSpeed]:
        """The speed on a fast host and on a slow one."""
        rates = self.product_share * self.tflops, self.bandwidth_share * self.bandwidth
        return GpuSpeed(*rates, LAUNCHES[0]), GpuSpeed(*rates, LAUNCHES[1])


H100 = ExampleGpu("H100", 989.0, 3.35e12, 735 / 989, 1.13 / 3.35)
RTX_4090 = ExampleGpu("RTX 4090", 165.0, 1008e9)


class Work(NamedTuple):
    """The work of one device in a step."""

    launches: int
    # Floating-point operations of the matrix products.
    operations: float
    # Bytes that the matrix products and the other kernels move.
    product_bytes: float
    other_bytes: float

    @property
    def moved(self) -> float:
        return self.product_bytes + self.other_bytes

    def seconds(self, gpu: GpuSpeed) -> float:
        products = max(self.operations / (gpu.tflops * 1e12), self.product_bytes / gpu.bandwidth)
        return max(self.launches * gpu.launch, products + self.other_bytes / gpu.bandwidth)


def work_of(model: Architecture, columns: int, rows: int, passes: int, element: int) -> Work:
    """Return the work of a step with `passes` passes over `columns` x `rows` positions.

    `passes` is 2 with guidance, else 1. `element` is the size of a number in bytes. The factors below count the maps of
    the model's width that the operations of a block read and write.
    """
    width, layers = model.width, model.layers
    positions = passes * columns * rows
    # Query, key and value move 4, their sums 2 and outputs 2. The other products of attention move 2 each, and the
    # softmax 2. The products of the feed-forward move 6 and 3.5.
    products = 25.5 * positions
    # The three norms and gates move 11. The depthwise convolution writes 2.5 and reads 5. It reads the rows at the
    # border of two bands twice.
    bands, _ = divide_rows(passes, rows, columns, int(2.5 * width))
    other = (13.5 + 2 * NORMS * model.qk_norm) * positions + 5 * (positions + 2 * (bands - 1) * passes * columns)
    matrices = layers * (13.5 * width + 2 * passes * MAX_TOKENS) * width + 7 * width**2
    operations = positions * position_flops(width, layers)
    block = BLOCK + NORMS * model.qk_norm
    scale = layers * width * element
    return Work(OUTSIDE + layers * block, operations, products * scale + matrices * element, other * scale)


def position_flops(width: int, layers: int) -> int:
    """Return the FLOPs of a step for one position, two per multiply-add. Excludes the text, which is computed once."""
    linear = 4 * width**2 + 2 * (HEAD_DIM + 1) * width
    cross = 2 * width**2 + 2 * MAX_TOKENS * width
    inner = int(2.5 * width)
    # The first two convolutions of the feed-forward, then the third one.
    forward = width * 2 * inner + 2 * inner * 9 + inner * width
    return 2 * (layers * (linear + cross + forward) + 2 * CHANNELS * width)


PREDICTED = (
    "Seconds are predicted, not measured: 20 steps (Sprint: 2) and the decode, with the models loaded. Two values are "
    "for a fast and a slow CPU. Downloads include the text encoder and the VAE. VRAM includes 0.6 GB for the driver. "
    "GB are 10^9 bytes, so a GPU that is sold as 8 GB has 8.6."
)
DC_AE = "dc-ae-f32c32-sana-1.1.safetensors"
# The decode by DC-AE f32c32. Operations per pixel, counted by torch's FlopCounterMode.
DECODE_FLOPS = 7_980_930
# Bytes per pixel that its products and its other kernels move in strips, counted at 1024 to 8192 px
# (benchmarks/accelerator_counts.json).
DECODE_PRODUCT_BYTES, DECODE_OTHER_BYTES = 13_300, 17_500
# Kernel launches of a decode in strips: a fixed number, and a number per row of pixels. From WIDE pixels on, the strips
# have 512 rows instead of 1024, because torch limits the size of a tensor.
DECODE_LAUNCHES, ROW_LAUNCHES, WIDE_ROW_LAUNCHES, WIDE = 61, 0.67, 0.797, 8000
# The only model that few GPUs hold in bf16.
LARGEST_MODEL = "1.5-4.8B"
# Without a GPU the plan is for this GPU.
USUAL_GPU = 8


# GeForce GPUs since Ampere: 512 operations per clock and multiprocessor. SMs and boost clocks are NVIDIA's.
EXAMPLES = {
    6: ExampleGpu("RTX 3050 6 GB", 18 * 1.47 * 0.512, 168e9),
    8: ExampleGpu("RTX 4060", 24 * 2.46 * 0.512, 272e9),
    12: ExampleGpu("RTX 3060", 28 * 1.78 * 0.512, 360e9),
    16: ExampleGpu("RTX 4060 Ti 16 GB", 34 * 2.54 * 0.512, 288e9),
    24: RTX_4090,
}


class Released(NamedTuple):
    """A released model: what to download, and the size of its images."""

    name: str
    variant: str
    pixels: int
    # A name in DOWNLOADS, or a whole folder for models/diffusers.
    file: str
    # Size of the file or folder in GB (10^9 bytes).
    gigabytes: float

    @property
    def download(self) -> float:
        """GB of everything that the model needs."""
        if self.file not in DOWNLOADS:
            return self.gigabytes
        return self.gigabytes + sum(DOWNLOADS[name].gigabytes or 0 for name in (GEMMA_FILE, DC_AE))


def released(name: str, variant: str, pixels: int, file: str) -> Released:
    return Released(name, variant, pixels, file, DOWNLOADS[file].gigabytes or 0)


MODELS = (
    released("SANA 0.6B", "0.6B", 1024, "Sana_600M_1024px.safetensors"),
    released("SANA 1.6B", "1.6B", 1024, "Sana_1600M_1024px_BF16.safetensors"),
    released("SANA 1.6B 2K", "1.6B", 2048, "Sana_1600M_2Kpx_BF16.safetensors"),
    released("SANA 1.6B 4K", "1.6B", 4096, "Sana_1600M_4Kpx_BF16.safetensors"),
    released("SANA-Sprint 1.6B", "sprint-1.6B", 1024, "Sana_Sprint_1.6B_1024px.safetensors"),
    # Its transformer has 9.4 GB. The folder also contains the text encoder and the VAE.
    Released("SANA-1.5 4.8B", LARGEST_MODEL, 1024, "SANA1.5_4.8B_1024px_diffusers", 9.4 + 5.2 + 1.25),
)
STANDARD, FOUR_K = MODELS[1], MODELS[3]


class Gpu(NamedTuple):
    """The GPU of a plan. Its memory is in bytes, its name in an answer such as "This GPU (8 GB)"."""

    name: str
    memory: int
    dtype: str = "bfloat16"
    # The reason for another dtype than bfloat16, as words of the answer.
    reason: str = ""

    @property
    def gigabytes(self) -> int:
        """The size that it is sold with: an "8 GB" GPU has 8 GiB, which are 8.6 GB of 10^9 bytes."""
        return round(self.memory / 2**30)

    @property
    def usable(self) -> int:
        """Bytes that remain beside the driver."""
        return self.memory - CONTEXT

    def describe(self) -> str:
        """Return a sentence about the memory, in the unit of all other figures."""
        return (
            f"A GPU sold as {self.gigabytes} GB has {self.memory / 1e9:.1f} GB of 10^9 bytes, "
            f"of which the driver takes about {CONTEXT / 1e9:.1f} GB."
        )

    @property
    def example(self) -> ExampleGpu | None:
        return EXAMPLES.get(self.gigabytes)


def sold_gpu(gigabytes: int) -> Gpu:
    return Gpu(f"A GPU of {gigabytes} GB", gigabytes * 2**30)


def this_gpu() -> Gpu:
    device = current_accelerator()
    if device is None:
        return usual_gpu()
    return gpu_of(memory_info(device)[1], has_bf16(device))


def gpu_of(memory: int, bf16: bool) -> Gpu:
    gigabytes = round(memory / 2**30)
    gpu = Gpu(f"This GPU ({gigabytes} GB)", memory)
    return gpu if bf16 else gpu._replace(dtype="float32", reason=" (it has no bf16)")


def usual_gpu() -> Gpu:
    return sold_gpu(USUAL_GPU)._replace(name=f"No GPU here; with one of {USUAL_GPU} GB")


class Fit(NamedTuple):
    variant: str
    plan: ImagePlan
    # Setting that it needs, "" if it needs none. None: it does not fit.
    setting: str | None
    # Whether the text encoder is on the GPU as a whole.
    text_fits: bool


INT8 = "quantise int8"


def fit(gpu: Gpu, variant: str, width: int, height: int, batch: int = 1, vae: str = "dc-ae-f32c32") -> Fit:
    """Return how `batch` images of `width` x `height` pixels, each with its own prompt, fit `gpu`.

    The stages run one after another. If the text encoder does not fit, ComfyUI keeps part of it in RAM, so only the
    sampling and the decode decide.
    """
    plan = plan_memory(variant, width, height, batch, gpu.dtype, vae=vae, prompts=batch)
    text, step = plan["text"], plan["transformer"]
    decode = plan["decode"]["weights"] + (plan["decode"]["methods"]["smallest"] or 0)
    setting: str | None = None
    if max(quantised_bytes(VARIANTS[variant], gpu.dtype) + step["activations"], decode) <= gpu.usable:
        setting = INT8
    if max(step["weights"] + step["activations"], decode) <= gpu.usable:
        setting = ""
    return Fit(variant, plan, setting, text["weights"] + text["activations"] <= gpu.usable)


def answer(
    gpu: Gpu,
    variant: str | None = None,
    width: int = DEFAULT_RESOLUTION,
    height: int = DEFAULT_RESOLUTION,
    batch: int = 1,
    vae: str = "dc-ae-f32c32",
) -> tuple[str, Fit]:
    """Return one sentence for the user, and how the image fits. With `variant` None the sentence recommends a model."""
    image = (width, height, batch, vae)
    fitting = fit(gpu, variant or STANDARD.variant, *image)
    if variant is None and fitting.setting is None:
        # If no model fits, the sentence names the GPU that the usual model needs.
        smaller = fit(gpu, "0.6B", *image)
        fitting = fitting if smaller.setting is None else smaller
    size = f"{width} px" if width == height else f"{width} x {height} px"
    kind = "bf16" if gpu.dtype == "bfloat16" else f"fp32{gpu.reason}"
    words = f"at {size} in {kind}" + (f", {batch} images at once," if batch > 1 else "")
    setting = f" with {fitting.setting}" if fitting.setting else ""
    if fitting.setting is None:
        parts = [f"{fitting.variant} {words} does not fit", f"it needs {needed_gpu(fitting.variant, *image)}"]
    elif variant is None:
        parts = [f"use {file_for(fitting.variant, width, height)} {words.removesuffix(',')}{setting}"]
    else:
        parts = [f"{variant} {words} fits{setting}"]
    if fitting.setting is not None and not fitting.text_fits:
        parts.append("part of the text encoder stays in RAM, which is slower")
    if variant is None and fitting.setting is not None:
        if max(width, height) < FOUR_K.pixels:
            large = fit(gpu, FOUR_K.variant, FOUR_K.pixels, FOUR_K.pixels)
            parts.append(f"for {FOUR_K.pixels} px {remedy(large, file_for(FOUR_K.variant, *[FOUR_K.pixels] * 2))}")
        if file_for(STANDARD.variant, width, height) == STANDARD.name.removeprefix("SANA "):
            largest = fit(gpu, LARGEST_MODEL, width, height, batch, vae)
            parts.append({None: "4.8B does not fit", "": "4.8B fits too"}.get(largest.setting, f"4.8B needs {INT8}"))
    return f"{gpu.name}: {'; '.join(parts)}.", fitting


def remedy(fitting: Fit, name: str) -> str:
    """Return the clause about another image: the model and the setting, or the GPU that it needs."""
    if fitting.setting is None:
        return f"you need {needed_gpu(fitting.variant, fitting.plan['width'], fitting.plan['height'])}"
    return f"use {name}" + (f" with {fitting.setting}" if fitting.setting else "")


def needed_gpu(variant: str, width: int, height: int, batch: int = 1, vae: str = "dc-ae-f32c32") -> str:
    for gigabytes in GPU_SIZES:
        setting = fit(sold_gpu(gigabytes), variant, width, height, batch, vae).setting
        if setting is not None:
            return f"a GPU of {gigabytes} GB" + (f" with {setting}" if setting else "")
    return f"a GPU of more than {GPU_SIZES[-1]} GB"


def file_for(variant: str, width: int, height: int) -> str:
    """Return the name of the model that was trained nearest to an image's size, such as "1.6B 4K"."""
    pixels = math.sqrt(width * height)
    models = [model for model in MODELS if model.variant == variant]
    nearest = min(models, key=lambda model: abs(math.log(pixels / model.pixels)))
    return nearest.name.removeprefix("SANA ")


def image_seconds(gpu: ExampleGpu, variant: str, width: int, height: int) -> list[float]:
    """Return the predicted seconds of sampling and decoding an image, with loaded models and an encoded prompt.

    The first value is for a fast host, the second one for a slow host. Steps and guidance are the model's defaults.
    """
    model = VARIANTS[variant]
    steps, passes = (SPRINT_DEFAULTS.steps, 1) if model.guidance_embeds else (DEFAULTS.steps, 2 + model.edits)
    step = work_of(model, width // DOWNSCALE, height // DOWNSCALE, passes, torch.bfloat16.itemsize)
    decode = decode_work(width, height)
    return [steps * step.seconds(speed) + decode.seconds(speed) for speed in gpu.speeds]


def decode_work(width: int, height: int) -> Work:
    pixels = width * height
    launches = DECODE_LAUNCHES + int((ROW_LAUNCHES if width < WIDE else WIDE_ROW_LAUNCHES) * height)
    return Work(launches, DECODE_FLOPS * pixels, DECODE_PRODUCT_BYTES * pixels, DECODE_OTHER_BYTES * pixels)


def as_seconds(seconds: list[float]) -> str:
    """Return `seconds` with two digits each: a prediction is not more precise. Equal values are one."""
    return " to ".join(dict.fromkeys(f"{float(f'{value:.2g}'):g}" for value in seconds)) + " s"


def needed_bytes(model: Released) -> int:
    return plan_memory(model.variant, model.pixels, model.pixels)["smallest"] + CONTEXT


def gpu_table() -> list[list[str]]:
    """Return the table "your GPU": a header, and a row for each GPU of EXAMPLES."""
    rows = [["VRAM", "for example", "file", "download", "1024 px", "4096 px", "SANA-1.5 4.8B"]]
    for gigabytes, example in EXAMPLES.items():
        gpu = sold_gpu(gigabytes)
        seconds = [
            as_seconds(image_seconds(example, model.variant, model.pixels, model.pixels))
            for model in (STANDARD, FOUR_K)
        ]
        large = fit(gpu, LARGEST_MODEL, DEFAULT_RESOLUTION, DEFAULT_RESOLUTION).setting
        words = {None: "no", "": "yes", INT8: "with *quantise* int8"}[large]
        file, download = f"`{STANDARD.file}`", f"{STANDARD.download:.1f} GB"
        rows.append([f"{gigabytes} GB", example.name, file, download, *seconds, words])
    return rows


def model_table() -> list[list[str]]:
    """Return the table of the models: a header, and a row for each of MODELS."""
    shown = (USUAL_GPU, 24)
    rows = [["model", "image", "VRAM", "smallest GPU", "file", "download", *(EXAMPLES[gb].name for gb in shown)]]
    for model in MODELS:
        size = (model.variant, model.pixels, model.pixels)
        seconds = [
            as_seconds(image_seconds(EXAMPLES[gb], *size)) if fit(sold_gpu(gb), *size).setting == "" else "too large"
            for gb in shown
        ]
        memory = f"{needed_bytes(model) / 1e9:.1f} GB"
        card = f"{next((gb for gb, fits in plan_memory(*size)['fits'].items() if fits), None)} GB"
        rows.append(
            [model.name, f"{model.pixels} px", memory, card, f"`{model.file}`", f"{model.download:.1f} GB", *seconds]
        )
    return rows


def markdown(rows: list[list[str]]) -> str:
    """Return `rows`, the header first, as a table in Markdown."""
    header, *body = rows
    lines = [header, ["---"] * len(header), *body]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines).replace(" --- ", "---")
