"""Decode latents to PNG or TIFF files, row by row, without ever holding a whole image."""

from __future__ import annotations

import argparse
import json
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors import SafetensorError
from safetensors.torch import load

from ..checkpoints import load_autoencoder
from ..checkpoints.files import read_json, readable
from ..checkpoints.schemas import refuse_code
from ..decode import DecodeOptions, decode_rows
from ..decode.devices import BUDGET
from ..decode.group_norms import decode_normed
from ..decode.plan import LARGEST_BUDGET, METHODS, UNBOUNDED
from ..errors import CheckpointError, InputError, first_line
from ..model.latents import DOWNSCALE, check_channels
from ..runtime.accelerator import chosen_device, free_bytes
from ..runtime.atomic_files import check_free, make_folder, output_file
from ..runtime.checks import check_number
from ..runtime.image_files import WRITERS, levels
from ..runtime.text import brief, write_lines
from ..runtime.user_files import read_user_file
from .options import path_of, progress_line

if TYPE_CHECKING:
    from diffusers import AutoencoderDC, AutoencoderKL

EXAMPLE = """example:
  python -m sana_core decode latents.safetensors --checkpoint demo/sana-posters --out output --max-gb 2
  python -m sana_core decode latents.safetensors --vae PixArt-Sigma --max-gb 2

The file contains one tensor "latents" [B, C, h, w] in the VAE's scale, or "latent_tensor", which ComfyUI's Save Latent
writes."""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("latents", type=path_of, help="a .safetensors or .latent file")
    models = parser.add_mutually_exclusive_group(required=True)
    models.add_argument("--checkpoint", type=path_of, help="a VAE file, or a folder or file that contains the VAE")
    models.add_argument(
        "--vae",
        type=path_of,
        help="a folder of diffusers with the AutoencoderKL of another model: SD, SDXL, SD3, FLUX or PixArt",
    )
    parser.add_argument("--out", type=path_of, default=Path("output"), help="folder for PNG files, or one .png or .tif")
    parser.add_argument("--overwrite", action="store_true", help="replace existing images")
    parser.add_argument("--method", choices=METHODS, default="auto")
    parser.add_argument("--max-gb", type=float, help="memory beyond the weights; default: 90 %% of the free memory")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--report", action="store_true", help="print plan, time and memory as JSON")


def run(arguments: argparse.Namespace) -> None:
    if arguments.max_gb is not None:
        check_number("max-gb", arguments.max_gb, 0, LARGEST_BUDGET)
        if arguments.method in UNBOUNDED:
            raise InputError(f"max-gb: got it with method {arguments.method}, which has no budget; leave it out")
    if arguments.vae is not None and arguments.method not in ("auto", "strips"):
        raise InputError(f"method: got {arguments.method} with vae, expected auto or strips; leave it out")
    device = chosen_device(arguments.device)
    latents = read_latents(arguments.latents)
    if arguments.vae is None:
        check_channels("latents", latents.shape)
    names = paths(arguments.out, arguments.latents.stem, len(latents))
    check_free(names, arguments.overwrite)
    make_folder(names[0].parent)
    dtype = getattr(torch, arguments.dtype)
    options = DecodeOptions(arguments.method, None if arguments.max_gb is None else int(arguments.max_gb * 1e9))
    if arguments.vae is None:
        decode = partial(decode_to_file, load_autoencoder(arguments.checkpoint, device, dtype))
    else:
        decode = partial(decode_normed_to_file, load_kl_autoencoder(arguments.vae, latents, dtype).to(device))
    for index, path in enumerate(names):
        report = decode(latents[index : index + 1], path, options, arguments.overwrite)
        write_lines(path)
        if arguments.report:
            write_lines(json.dumps(report))


def decode_to_file(
    autoencoder: AutoencoderDC, latents: torch.Tensor, path: Path, options: DecodeOptions, overwrite: bool
) -> dict:
    report: dict = {}
    _, _, height, width = latents.shape
    with progress_line() as show, output_file(path, overwrite) as part, part.open("wb") as file:
        options = options._replace(progress=lambda row, total: show(f"{row} of {total} rows"))
        rows = (levels(pixels) for _, _, pixels in decode_rows(autoencoder, latents, options, report))
        WRITERS[path.suffix.lower()](file, width * DOWNSCALE, height * DOWNSCALE, rows)
    return report


def decode_normed_to_file(
    vae: AutoencoderKL, latents: torch.Tensor, path: Path, options: DecodeOptions, overwrite: bool
) -> dict:
    report: dict = {}
    z = latents.to(vae.device, vae.dtype)
    max_bytes = BUDGET * free_bytes(z.device) if options.max_bytes is None else options.max_bytes
    ram_bytes = BUDGET * free_bytes(torch.device("cpu"))
    with progress_line() as show, torch.no_grad(), output_file(path, overwrite) as part, part.open("wb") as file:
        z = z if vae.post_quant_conv is None else vae.post_quant_conv(z)
        pixels = decode_normed(
            vae.decoder,
            z,
            max_bytes,
            ram_bytes,
            progress=lambda computed, total: show(f"{100 * computed // total} %"),
            report=report,
        )[0]
        WRITERS[path.suffix.lower()](file, pixels.shape[2], pixels.shape[1], iter([levels(pixels)]))
    return report


def load_kl_autoencoder(folder: Path, latents: torch.Tensor, dtype: torch.dtype) -> AutoencoderKL:
    """Return the AutoencoderKL in `folder`, or in its folder vae, on the CPU. Raises InputError for other latents."""
    from diffusers import AutoencoderKL

    folder = folder / "vae" if (folder / "vae").is_dir() else folder
    with readable(folder):
        config = read_json(folder / "config.json")
    refuse_code(str(folder), config)
    name = "a quantised VAE" if "quantization_config" in config else brief(config.get("_class_name"))
    if name != "AutoencoderKL":
        raise CheckpointError(
            f"vae: {folder} has {name}, expected AutoencoderKL; give SANA's VAE by --checkpoint instead"
        )
    try:
        vae = AutoencoderKL.from_pretrained(folder, torch_dtype=dtype, use_safetensors=True, local_files_only=True)
    except (OSError, ValueError, RuntimeError) as error:
        reason = first_line(error)
        raise CheckpointError(f"vae: {folder} cannot be loaded ({reason:.150}); download it again") from None
    if latents.shape[1] != vae.config.latent_channels:
        raise InputError(
            f"latents: got {latents.shape[1]} channels, expected {vae.config.latent_channels}; use the VAE of the "
            "model that sampled them"
        )
    return vae


def read_latents(path: Path) -> torch.Tensor:
    """Return the latents in `path`."""
    # safetensors reports a file that it may not open as missing, so the file is read here.
    content = read_user_file("latents", path, "a .safetensors or .latent file")
    try:
        tensors = load(content)
    except SafetensorError as error:
        raise InputError(f"latents: {path} is not a safetensors file ({error}); save them with SaveLatent") from None
    latents = tensors.get("latents", tensors.get("latent_tensor"))
    if latents is None:
        names = ", ".join(list(tensors)[:3]) or "nothing"
        raise InputError(f"latents: {path} contains {names}, expected a tensor 'latents'")
    if latents.ndim != 4 or not latents.numel() or not latents.is_floating_point():
        got = f"{str(latents.dtype).removeprefix('torch.')} {list(latents.shape)}"
        raise InputError(f"latents: {path} contains {got}, expected floating-point numbers of an image; save it again")
    return latents.float()


def paths(out: Path, stem: str, count: int) -> list[Path]:
    if out.suffix.lower() in WRITERS:
        if count > 1:
            raise InputError(f"out: got one file for {count} images, expected a folder")
        return [out]
    return [out / f"{stem}_{index:05d}.png" for index in range(count)]
