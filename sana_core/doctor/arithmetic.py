"""Known answers that need no file of the user: kernels, a step of two blocks, and the image of the bundled model.

The truth is float64 on the CPU. What is right is no farther from it than plain torch in the same type, but for CHANCE:
another rounding anywhere in a network moves its distance by chance.
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
from ..model.known_models import CROSS_HEADS, DEMO_MODEL, HEAD_DIM, TEXT_WIDTH
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
CHANCE = 1.3
# of the smallest relative error that is told from none: roundings of the type that add up
ROUNDINGS = 4.0
# positions of the two maps that a step is tried on, and tokens of its prompt
SIDE, TOKENS = 16, 40
# levels of 255 that an image may be away from the committed one: roundings of float32
LEVELS = 2
BUNDLED = Path(__file__).parents[2] / "demo" / DEMO_MODEL
EXPECTED = BUNDLED / "expected.png"


def check_arithmetic(report: Report, device: torch.device) -> None:
    """Add lines on what `device` computes."""
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
    # torch's stubs do not know fp32_precision.
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
    """Give the memory of what is no longer used back."""
    gc.collect()
    empty_cache()


def distance(got: torch.Tensor, truth: torch.Tensor) -> float:
    """Return the relative distance of `got` from `truth`; infinite for values that are not finite."""
    if not bool(got.isfinite().all()):
        return float("inf")
    return float((got.cpu().double() - truth).norm() / truth.norm())


def judge_distance(report: Report, what: str, got: torch.Tensor, plain: torch.Tensor, truth: torch.Tensor) -> None:
    """Add a line: `got` has to be as near to `truth` as `plain` is."""
    allowed = CHANCE * distance(plain, truth) + ROUNDINGS * torch.finfo(got.dtype).eps
    error = distance(got, truth)
    report.judge(SECTION, what, f"at most {allowed:.1e} from float64", f"{error:.1e}", error <= allowed)


def noise(*shape: int, seed: int) -> torch.Tensor:
    """Return the same normal random values on every machine, on the CPU."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def check_attention(report: Report, device: torch.device, dtype: torch.dtype) -> None:
    """Softmax attention as torch has it here, which other packs replace, beside the formula."""
    what = f"attention, {named(dtype)}"
    with report.checking(SECTION, what):
        query, key, value = (noise(2, 16, count, 72, seed=seed).to(dtype) for seed, count in enumerate((256, 77, 77)))

        def formula(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
            return (query @ key.mT / query.shape[-1] ** 0.5).softmax(-1) @ value

        truth = formula(query.double(), key.double(), value.double())
        query, key, value = (part.to(device) for part in (query, key, value))
        got = F.scaled_dot_product_attention(query, key, value)
        judge_distance(report, what, got, formula(query, key, value), truth)


def check_kernel(report: Report, device: torch.device, dtype: torch.dtype, kernel: str) -> None:
    """The parts of a block that go through one fused kernel, beside plain torch."""
    what = f"kernel {kernel}, {named(dtype)}"
    with report.checking(SECTION, what), torch.no_grad():
        model = transformer(1152, 1, "rms_norm_across_heads")
        one = model.transformer_blocks[0].to(dtype)
        states, tables = (noise(2, 48, 1152, seed=0).to(dtype), noise(4, 1, 1, 1152, seed=1).to(dtype))

        def compute(
            module: SanaTransformerBlock, states: torch.Tensor, tables: torch.Tensor, kernels: frozenset[str]
        ) -> torch.Tensor:
            branch = block.Branch(states.flip(1).contiguous(), tables[0])
            added, normed = block.add_then_norm(states.clone(), branch, module.norm1, tables[1], tables[2], kernels)
            attended = block.self_attention(module.attn1, normed, kernels=kernels)
            return added + attended + block.feed_forward(module.ff, normed, (6, 8), kernels)

        truth = compute(one.double(), states.double(), tables.double(), block.NO_KERNELS)
        one.to(device, dtype)
        moved = states.to(device), tables.to(device)
        got = compute(one, *moved, frozenset({kernel}))
        judge_distance(report, what, got, compute(one, *moved, block.NO_KERNELS), truth)


def transformer(width: int, layers: int, qk_norm: str | None = None) -> SanaTransformer2DModel:
    """Return the library's module of a released width with random weights, float32 on the CPU."""
    from diffusers import SanaTransformer2DModel

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return SanaTransformer2DModel(
            num_attention_heads=width // HEAD_DIM,
            attention_head_dim=HEAD_DIM,
            num_layers=layers,
            num_cross_attention_heads=CROSS_HEADS[width],
            cross_attention_head_dim=width // CROSS_HEADS[width],
            cross_attention_dim=width,
            qk_norm=qk_norm,
        ).requires_grad_(False)


def convert(model: M, dtype: torch.dtype) -> M:
    """Return `model` with its weights in `dtype`, where the library's own method would warn."""
    return torch.nn.Module.to(model, dtype)


def check_step(report: Report, device: torch.device, dtype: torch.dtype, width: int) -> None:
    """A call of two blocks of a released width, beside diffusers' own in the same type."""
    from ..model.forward import prepare, velocity

    what = f"step of two blocks, width {width}, {named(dtype)}"
    if report.late(SECTION, what):
        return
    with report.checking(SECTION, what), torch.no_grad():
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
        judge_distance(report, what, got, plain, truth)


def check_bundled(report: Report, device: torch.device) -> None:
    """The image that the bundled model generates in float32, beside the committed one, whose file says how."""
    import numpy as np
    from PIL import Image

    from ..generate import generate
    from ..runtime.image_files import levels

    what = "image of the bundled model"
    if not EXPECTED.is_file():
        report.skip(SECTION, what, "it is not here")
    if not EXPECTED.is_file() or report.late(SECTION, what):
        return
    with report.checking(SECTION, what):
        with Image.open(EXPECTED) as image:
            expected, settings = np.asarray(image).astype(int), json.loads(image.info["sana"])
        digests = settings.pop("digests")
        generated = generate([settings.pop("prompt")], BUNDLED, devices=[device], **settings)
        difference = np.abs(levels(generated[0]).astype(int) - expected)
        got = f"{difference.max()} levels of 255 at most, {difference.mean():.2f} in the mean"
        report.judge(SECTION, what, f"at most {LEVELS} levels", got, bool(difference.max() <= LEVELS))
        changed = [name for name, digest in digests.items() if digest_file(BUNDLED / name) != digest]
        report.judge(
            SECTION, "files of the bundled model", "as committed", ", ".join(changed) or "the same", not changed
        )
