"""Checks arithmetic without the user's files: kernels, a step of two blocks, and an image of the bundled model.

The reference is float64 on the CPU. A result is right if its error is at most TOLERANCE times the error of plain torch
in the same dtype. The factor is needed because any other rounding in a network changes the error randomly.
"""

from __future__ import annotations

import gc
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.nn.functional as F

from ..kernels.trial import kernels_on
from ..model import block
from ..model.known_models import CROSS_HEADS, DEMO_MODEL, TEXT_WIDTH, Architecture, build_transformer
from ..model.latents import CHANNELS
from ..runtime.accelerator import empty_cache
from ..runtime.atomic_files import digest_file
from .machine import accelerator_dtypes, named
from .report import Report

if TYPE_CHECKING:
    from diffusers import SanaTransformer2DModel
    from diffusers.models.transformers.sana_transformer import SanaTransformerBlock

M = TypeVar("M", bound=torch.nn.Module)

SECTION = "Arithmetic"
TOLERANCE = 1.3
# Allowed in addition, in units of the dtype's epsilon, because several roundings add up.
ROUNDINGS = 4.0
# Side of the latents and tokens of the prompt in `check_step`.
SIDE, TOKENS = 16, 40
# Largest difference of a pixel from the committed image, out of 255, because of roundings of float32.
LEVELS = 2
BUNDLED = Path(__file__).parents[2] / "demo" / DEMO_MODEL
EXPECTED = BUNDLED / "expected.png"


def check_arithmetic(report: Report, device: torch.device) -> None:
    """Add lines about the arithmetic of `device`."""
    dtypes = [torch.float32] if device.type == "cpu" else accelerator_dtypes(device)
    with exact_products():
        for dtype in dtypes:
            check_attention(report, device, dtype)
            for kernel in sorted(kernels_on(device, dtype)):
                check_kernel(report, device, dtype, kernel)
            for width in CROSS_HEADS:
                check_step(report, device, dtype, width)
                release()
        check_bundled(report, device)
    release()


@contextmanager
def exact_products() -> Iterator[None]:
    """Compute float32 products without TF32, whose rounding would hide every other difference."""
    # torch's stubs do not contain fp32_precision.
    cudnn: Any = torch.backends.cudnn
    matmul: Any = torch.backends.cuda.matmul
    exact: object = False
    products, field = [matmul, cudnn], "allow_tf32"
    # torch 2.9 raises on reading allow_tf32 after somebody has set fp32_precision.
    if hasattr(matmul, "fp32_precision"):
        products, field, exact = [matmul, cudnn.conv], "fp32_precision", "ieee"
    before = [getattr(product, field) for product in products]
    try:
        for product in products:
            setattr(product, field, exact)
        yield
    finally:
        for product, value in zip(products, before, strict=True):
            setattr(product, field, value)


def release() -> None:
    """Free memory that is no longer used."""
    gc.collect()
    empty_cache()


def distance(got: torch.Tensor, truth: torch.Tensor) -> float:
    """Return the relative distance of `got` from `truth`; infinite for values that are not finite."""
    if not bool(got.isfinite().all()):
        return float("inf")
    return float((got.cpu().double() - truth).norm() / truth.norm())


def judge_distance(report: Report, subject: str, got: torch.Tensor, plain: torch.Tensor, truth: torch.Tensor) -> None:
    """Add a line about the distance of `got` from `truth`, compared with the distance of `plain`."""
    allowed = TOLERANCE * distance(plain, truth) + ROUNDINGS * torch.finfo(got.dtype).eps
    error = distance(got, truth)
    report.judge(SECTION, subject, f"at most {allowed:.1e} from float64", f"{error:.1e}", error <= allowed)


def noise(*shape: int, seed: int) -> torch.Tensor:
    """Return the same normal random values on every machine, on the CPU."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def check_attention(report: Report, device: torch.device, dtype: torch.dtype) -> None:
    """Compare torch's softmax attention, which other packs may have replaced, with the formula."""
    subject = f"attention, {named(dtype)}"
    with report.checking(SECTION, subject):
        query, key, value = (noise(2, 16, count, 72, seed=seed).to(dtype) for seed, count in enumerate((256, 77, 77)))

        def formula(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
            return (query @ key.mT / query.shape[-1] ** 0.5).softmax(-1) @ value

        truth = formula(query.double(), key.double(), value.double())
        query, key, value = (part.to(device) for part in (query, key, value))
        got = F.scaled_dot_product_attention(query, key, value)
        judge_distance(report, subject, got, formula(query, key, value), truth)


def check_kernel(report: Report, device: torch.device, dtype: torch.dtype, kernel: str) -> None:
    """Compare the parts of a block that use one fused kernel with plain torch."""
    subject = f"kernel {kernel}, {named(dtype)}"
    with report.checking(SECTION, subject), torch.no_grad():
        model = transformer(1152, 1, "rms_norm_across_heads")
        first_block = model.transformer_blocks[0].to(dtype)
        states, tables = (noise(2, 48, 1152, seed=0).to(dtype), noise(4, 1, 1, 1152, seed=1).to(dtype))

        def compute(
            module: SanaTransformerBlock, states: torch.Tensor, tables: torch.Tensor, kernels: frozenset[str]
        ) -> torch.Tensor:
            branch = block.Branch(states.flip(1).contiguous(), tables[0])
            added, normed = block.add_then_norm(states.clone(), branch, module.norm1, tables[1], tables[2], kernels)
            attended = block.self_attention(module.attn1, normed, kernels=kernels)
            return added + attended + block.feed_forward(module.ff, normed, (6, 8), kernels)

        truth = compute(first_block.double(), states.double(), tables.double(), block.NO_KERNELS)
        first_block.to(device, dtype)
        moved = states.to(device), tables.to(device)
        got = compute(first_block, *moved, frozenset({kernel}))
        judge_distance(report, subject, got, compute(first_block, *moved, block.NO_KERNELS), truth)


def transformer(width: int, layers: int, qk_norm: str | None = None) -> SanaTransformer2DModel:
    """Return diffusers' transformer with a released width and random weights, in float32 on the CPU."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return build_transformer(Architecture(width, layers, qk_norm is not None)).requires_grad_(False)


def convert(model: M, dtype: torch.dtype) -> M:
    """Convert the weights of `model` to `dtype`. The `to` of diffusers would warn."""
    return torch.nn.Module.to(model, dtype)


def check_step(report: Report, device: torch.device, dtype: torch.dtype, width: int) -> None:
    """Compare a forward of two blocks of a released width with diffusers in the same dtype."""
    from ..model.forward import prepare, velocity

    subject = f"step of two blocks, width {width}, {named(dtype)}"
    if report.late(SECTION, subject):
        return
    with report.checking(SECTION, subject), torch.no_grad():
        model = convert(transformer(width, 2), dtype)
        x, embeds = noise(2, CHANNELS, SIDE, SIDE, seed=0).to(dtype), noise(2, TOKENS, TEXT_WIDTH, seed=1).to(dtype)
        mask, timestep = torch.ones(2, TOKENS), torch.full((2,), 500.0)
        mask[1, TOKENS // 3 :] = 0
        convert(model, torch.float64)
        truth = model(x.double(), embeds.double(), timestep.double(), encoder_attention_mask=mask.double()).sample
        convert(model, dtype).to(device)
        x, embeds, mask, timestep = (part.to(device) for part in (x, embeds, mask, timestep))
        plain = model(x, embeds, timestep, encoder_attention_mask=mask).sample
        got = velocity(model, x, timestep, prepare(model, embeds, mask, SIDE, SIDE))
        judge_distance(report, subject, got, plain, truth)


def check_bundled(report: Report, device: torch.device) -> None:
    """Generate an image with the bundled model in float32, and compare it with the committed image.

    The committed file contains the settings.
    """
    import numpy as np
    from PIL import Image

    from ..generate import generate
    from ..runtime.image_files import levels

    subject = "image of the bundled model"
    if not EXPECTED.is_file():
        report.skip(SECTION, subject, "the bundled model is not installed")
    if not EXPECTED.is_file() or report.late(SECTION, subject):
        return
    with report.checking(SECTION, subject):
        with Image.open(EXPECTED) as image:
            expected, settings = np.asarray(image).astype(int), json.loads(image.info["sana"])
        digests = settings.pop("digests")
        generated = generate([settings.pop("prompt")], BUNDLED, devices=[device], **settings)
        difference = np.abs(levels(generated[0]).astype(int) - expected)
        got = f"{difference.max()} levels of 255 at most, {difference.mean():.2f} on average"
        report.judge(SECTION, subject, f"at most {LEVELS} levels", got, bool(difference.max() <= LEVELS))
        changed = [name for name, digest in digests.items() if digest_file(BUNDLED / name) != digest]
        report.judge(
            SECTION, "files of the bundled model", "as committed", ", ".join(changed) or "unchanged", not changed
        )
