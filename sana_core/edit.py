"""Images edited by sentences with VIBE, in one call, without a host."""

from __future__ import annotations

from collections.abc import Generator, Sequence

import torch

from .batch.pipeline import Request, SamplingSettings, load_decoder, local_devices, resolve_settings
from .batch.plan import FailedImage, Generated, ImageInputs, Workload, batch_images, no_status
from .checkpoints import find_part, inspect_checkpoint
from .checkpoints.checkpoint import Source
from .checkpoints.generation import record_of
from .checkpoints.load import config_of, load_instruction_reader
from .decode import encode_images
from .errors import InputError
from .generate import collect, find_backend
from .model.instruction import empty_instruction, encode_instruction
from .model.known_models import VIBE, edit_size, edits_images
from .runtime.accelerator import empty_cache
from .runtime.checks import check_number
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
    devices: Sequence[str | torch.device] | None = None,
    split: bool = False,
) -> torch.Tensor:
    """Return images [len(prompts) * count, 3, H, W] in [-1, 1], float32 on the CPU: `image` changed by each prompt.

    `image` is uint8 [3, H, W]. The results have its size, and `settings` have no effect on it. Without an image, the
    prompts describe the images. Image i of each prompt uses seed + i. `image_guidance` None: the model's, 1.2. At 1 and
    below, a step has two passes in place of three. `devices` and `split`: as in `generate`; the first device reads the
    prompts and the image. Raises InputError for settings that VIBE does not have, and as the loaders do.
    """
    prompts = [prompts] if isinstance(prompts, str) else list(prompts)
    settings, used_devices = settings or SamplingSettings(), local_devices(devices)
    specs, info = batch_images(len(prompts), count, seed), inspect_checkpoint(checkpoint)
    part = find_part(info, "transformer")
    if not edits_images(config_of(part)):
        raise InputError(
            f"checkpoint: got {record_of(part).title}, expected {VIBE.title} to edit images; choose its folder"
        )
    if settings.negative_prompt:
        raise InputError("negative_prompt: got a text for VIBE, which has no negative prompt; leave it out")
    image_guidance = VIBE.image_guidance if image_guidance is None else image_guidance
    check_number("image_guidance", image_guidance, 0, LARGEST_GUIDANCE)
    if image is not None:
        if image.dtype != torch.uint8 or image.ndim != 3 or len(image) != 3:
            got = f"{image.dtype} {list(image.shape)}"
            raise InputError(f"image: got {got}, expected torch.uint8 [3, height, width]; convert it")
        width, height = edit_size(image.shape[2], image.shape[1])
        settings = settings._replace(width=width, height=height)
    resolved = resolve_settings(settings, info)

    # Qwen3-VL overflows in float16.
    safe = torch.float32 if settings.dtype == "float32" else torch.bfloat16
    reader = load_instruction_reader(info, used_devices[0], safe)
    texts = [encode_instruction(reader, prompt, image) for prompt in prompts]
    texts.append(empty_instruction(reader.head, texts[0]))
    *embeddings, negative = [(embeds.cpu(), torch.ones(embeds.shape[:2])) for embeds in texts]
    del reader
    # The worker of this device is another process, which cannot use memory that this one reserves.
    empty_cache(used_devices[0])
    inputs = ImageInputs()
    if image is not None:
        autoencoder = load_decoder(info, used_devices[0], settings.dtype)
        pixels = resize(image, (resolved.width, resolved.height))[None] / 255 * 2 - 1
        latents = encode_images(autoencoder, pixels.to(autoencoder.dtype)).float() * autoencoder.config.scaling_factor
        inputs = ImageInputs(edit=EditImage(latents, image_guidance))
        del autoencoder
        empty_cache(used_devices[0])
    workload = Workload(prompts, specs, encoded=(dict(zip(prompts, embeddings, strict=True)), negative), inputs=inputs)
    generated = find_backend(None, no_status, split)

    def in_size_of_image(request: Request) -> Generator[Generated, None, None]:
        for spec, edited in generated(request):
            if image is None or isinstance(edited, FailedImage) or edited.shape == image.shape:
                yield spec, edited
                continue
            shown = torch.from_numpy(levels(edited)).movedim(-1, 0)
            yield spec, resize(shown, (image.shape[2], image.shape[1])) / 127.5 - 1

    return collect(in_size_of_image, Request(workload, info, resolved, used_devices))
