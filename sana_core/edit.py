"""Images edited by sentences with VIBE, in one call, without a host."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .batch.pipeline import Conditioning, SamplingSettings, load_models, resolve_settings, sample
from .batch.pipeline import decode as decode_images
from .batch.plan import ImageInputs, batch_images
from .checkpoints import find_part, inspect_checkpoint
from .checkpoints.checkpoint import Source
from .checkpoints.generation import latent_scale, record_of
from .checkpoints.load import load_instruction_reader
from .decode import encode_images
from .errors import InputError
from .model.instruction import empty_instruction, encode_instruction
from .model.known_models import VIBE, ImageModel, edit_size
from .runtime.checks import check_finite, check_number
from .runtime.image_files import levels
from .sampling.guidance import LARGEST_GUIDANCE, EditImage


def resize(pixels: torch.Tensor, size: tuple[int, int]) -> torch.Tensor:
    """Return `pixels`, uint8 [3, H, W], at `size` (width, height)."""
    import numpy as np
    from PIL import Image

    image = Image.fromarray(pixels.movedim(0, -1).numpy()).resize(size, Image.Resampling.LANCZOS)
    return torch.from_numpy(np.array(image)).movedim(-1, 0)


@torch.no_grad()
def edit_images(
    prompts: str | Sequence[str],
    checkpoint: Source,
    image: torch.Tensor | None = None,
    seed: int = 0,
    count: int = 1,
    settings: SamplingSettings | None = None,
    image_guidance: float | None = None,
    device: str | torch.device = "cpu",
) -> torch.Tensor:
    """Return images [len(prompts) * count, 3, H, W] in [-1, 1], float32 on the CPU: `image` changed by each prompt.

    `image` is uint8 [3, H, W]. The results have its size, and `settings` have no effect on it. Without an image, the
    prompts describe the images. Image i of each prompt uses seed + i. `image_guidance` None: the model's, 1.2. At 1 and
    below, a step has two passes in place of three. Raises InputError for settings that VIBE does not have, and as the
    loaders do.
    """
    prompts = [prompts] if isinstance(prompts, str) else list(prompts)
    settings, device = settings or SamplingSettings(), torch.device(device)
    specs, info = batch_images(len(prompts), count, seed), inspect_checkpoint(checkpoint)
    part = find_part(info, "transformer")
    record = record_of(part)
    if not isinstance(record, ImageModel) or not record.architecture.edits:
        raise InputError(f"checkpoint: got {record.title}, expected {VIBE.title} to edit images; choose its folder")
    if settings.negative_prompt:
        raise InputError("negative_prompt: got a text for VIBE, which has no negative prompt; leave it out")
    image_guidance = record.image_guidance if image_guidance is None else image_guidance
    check_number("image_guidance", image_guidance, 0, LARGEST_GUIDANCE)
    if image is not None:
        if image.dtype != torch.uint8 or image.ndim != 3 or len(image) != 3:
            got = f"{image.dtype} {list(image.shape)}"
            raise InputError(f"image: got {got}, expected torch.uint8 [3, height, width]; convert it")
        width, height = edit_size(image.shape[2], image.shape[1])
        settings = settings._replace(width=width, height=height)
    resolved = resolve_settings(settings, info)

    # Qwen3-VL and DC-AE overflow in float16.
    safe = torch.float32 if settings.dtype == "float32" else torch.bfloat16
    reader = load_instruction_reader(info, device, safe)
    texts = [encode_instruction(reader, prompt, image) for prompt in prompts]
    embeddings = [(text, torch.ones(text.shape[:2])) for text in (*texts, empty_instruction(reader.head, texts[0]))]
    del reader
    models = load_models(info, device, resolved, find_part(info, "autoencoder"))
    assert models.autoencoder is not None
    scale, inputs = latent_scale(info), ImageInputs()
    if image is not None:
        pixels = resize(image, (resolved.width, resolved.height))[None].to(device) / 255 * 2 - 1
        latents = encode_images(models.autoencoder, pixels.to(safe)).float() * scale
        inputs = ImageInputs(edit=EditImage(latents, image_guidance))
    images = []
    for spec in specs:
        prompt = Conditioning([embeddings[spec.prompt]], embeddings[-1])
        latents = sample(models, resolved, (spec,), prompt, images=inputs)
        check_finite("samples", latents)
        (edited,) = decode_images(models.autoencoder, latents, scale=scale)
        if image is not None and image.shape != edited.shape:
            shown = torch.from_numpy(levels(edited)).movedim(-1, 0)
            edited = resize(shown, (image.shape[2], image.shape[1])) / 127.5 - 1
        images.append(edited)
    return torch.stack(images)
