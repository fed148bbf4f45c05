"""The error of each quantised format, compared with plain weights, on the CPU: `make bench`.

Writes benchmarks/quantised.json. For each format of the loaders' `quantise` it contains the relative error of one
forward in ComfyUI's layers, computed in fp32: the norm of the difference, divided by the norm of the plain model's
velocity. The released weights are not available. One model is the tiny one, which is trained and narrow. The other one
is as wide as the 1.6B model, with two blocks and random weights, which have no outliers. A CPU dequantises fp8, mxfp8
and nvfp4 and computes in fp32. GPUs with the format quantise the layers' inputs too, as int8 does here. Formats that
only GPUs can quantise are rounded here by the plain torch code of the same library.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
from fake_cuda import pack

from benchmarks import ROOT
from benchmarks.machine import write

SIGMAS = (0.9, 0.5, 0.1)
TOKENS = 40
BLOCKS = 2
CELLS = {"sana-tiny": 4, "1.6B wide": 8}


def wide_file(folder: Path) -> Path:
    """Return a file of a random transformer that is as wide as the 1.6B model."""
    from diffusers import SanaTransformer2DModel
    from safetensors.torch import save_file

    torch.manual_seed(0)
    file = folder / "wide.safetensors"
    save_file(SanaTransformer2DModel(num_layers=BLOCKS).bfloat16().state_dict(), file)
    return file


def inputs(width: int, cells: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, 32, cells, cells, generator=generator)
    return x, torch.randn(1, TOKENS, width, generator=generator)


def velocities_in_bf16(file: Path, cells: int) -> torch.Tensor:
    import sana_core

    transformer = sana_core.load_transformer(file, dtype=torch.bfloat16)
    x, context = (tensor.bfloat16() for tensor in inputs(transformer.config.caption_channels, cells))
    times = [torch.tensor([sigma * 1000]) for sigma in SIGMAS]
    return torch.cat([sana_core.predict_velocity(transformer, x, t, context, torch.ones(1, TOKENS)) for t in times])


def velocities(patcher: Any, cells: int) -> torch.Tensor:
    """Return the velocities of the MODEL for noise and a random prompt at SIGMAS."""
    model, prompts = patcher.model, pack("nodes.host.sampling.model")
    x, context = inputs(model.diffusion_model.config.caption_channels, cells)
    prompt = prompts.PromptBatch([prompts.Prompt("positive", context, torch.ones(1, TOKENS), keep=False)])
    sigmas = torch.tensor(SIGMAS)
    x0s = [model.apply_model(x, sigma[None], c_crossattn=context, prompt=prompt) for sigma in sigmas]
    return torch.cat([(x - x0) / sigma for x0, sigma in zip(x0s, sigmas, strict=True)])


def relative(got: torch.Tensor, expected: torch.Tensor) -> float:
    return round(((got.float() - expected.float()).norm() / expected.float().norm()).item(), 5)


def offer_all() -> list[str]:
    """Make all formats available on the CPU, with the library's plain torch code, and return their names."""
    import comfy_kitchen as kitchen
    from comfy_kitchen.backends.eager import quantization

    kitchen.quantize_mxfp8, kitchen.quantize_nvfp4 = quantization.quantize_mxfp8, quantization.quantize_nvfp4
    module = pack("nodes.host.loading.quantise")
    module.is_offered = lambda name: True
    return list(module.FORMATS)


def errors(file: Path, cells: int, forms: list[str]) -> dict[str, float]:
    load = pack("nodes.host.loading.load_model").load_model
    expected = velocities(load(file), cells)
    # For comparison: ComfyUI's plain fp8, whose weights have no scales.
    options = {"weight_dtype fp8_e4m3fn": {"weight_dtype": "fp8_e4m3fn"}} | {form: {"quantise": form} for form in forms}
    figures = {name: relative(velocities(load(file, **values), cells), expected) for name, values in options.items()}
    return figures | {"computed in bf16": relative(velocities_in_bf16(file, cells), expected)}


def main() -> None:
    from in_process import Host

    with tempfile.TemporaryDirectory() as folder, torch.inference_mode():
        Host(Path(folder))
        forms = offer_all()
        files = {"sana-tiny": ROOT / "tests" / "models" / "sana-tiny", "1.6B wide": wide_file(Path(folder))}
        result = {
            "note": "relative errors beside the plain file in fp32; 1.6B wide is two blocks with random weights; what "
            "is not quantised is in fp32 here, on cards in bf16",
            "errors": {name: errors(file, CELLS[name], forms) for name, file in files.items()},
        }
    write(__file__, result)


if __name__ == "__main__":
    main()
