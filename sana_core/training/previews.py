"""The validation's pictures: drawn with this pack's sampler from what is learnt, as with the file of it."""

from __future__ import annotations

import io
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from ..batch.draw import Embedding, ImageInputs, Models, decode, encode_negative, encode_text, sample
from ..batch.draw import Settings as Drawing
from ..batch.plan import batch_pictures
from ..checkpoints import load_autoencoder
from ..decode import encode_images
from ..errors import ExistingFileError
from ..model.controlnet import Control
from ..model.known_models import model_defaults
from ..model.text import TextEncoder
from ..runtime.atomic_files import write_whole
from ..runtime.cancellation import Poll
from ..runtime.image_files import LEVEL, levels
from .buckets import CROP_RULE, Bucket, crop_picture
from .cache import ModelIds
from .entries import Store, Tensors, digest_of, entry_path, read_entry
from .learner import Learner
from .pictures import Place, decode_picture, read_place
from .runs import writing
from .settings import Settings

if TYPE_CHECKING:
    from diffusers import AutoencoderDC


class Inputs(NamedTuple):
    """What the validation's pictures are drawn from, encoded."""

    prompts: list[Embedding]
    negative: Embedding
    control: torch.Tensor | None  # [1 or as many as prompts, 32, h, w], in the model's scale


def preview_size(settings: Settings) -> Bucket:
    """Return (width, height) of the validation's pictures: where training is at last decides, unless they say."""
    own, side = settings.validation, settings.phase[-1].resolution
    return own.width or side, own.height or side


def encode_validation(
    settings: Settings,
    store: Store,
    ids: ModelIds,
    encoder: Callable[[], TextEncoder],
    autoencoder: Callable[[], AutoencoderDC],
) -> Inputs | None:
    """Return what the validation's pictures are drawn from, kept in the cache; None where none are drawn.

    Raises as `read_place` and `decode_picture` do for a control picture.
    """
    validation = settings.validation
    if not validation.every or not validation.prompts:
        return None

    def find_or(kind: str, parts: list, make: Callable[[], Tensors]) -> Tensors:
        return read_entry(store.find_or(entry_path(store.folder, kind, parts), make))

    def encoded(kind: str, prompt: str, encode: Callable[[], Embedding]) -> Embedding:
        def make() -> Tensors:
            embeds, mask = encode()
            return {"embeds": embeds.contiguous(), "mask": mask.contiguous()}

        entry = find_or("texts", [kind, prompt, ids.text_encoder], make)
        return entry["embeds"], entry["mask"]

    def steering(file: str) -> torch.Tensor:
        data, size = read_place(Place(Path(file)), file), preview_size(settings)
        parts = ["validation", digest_of(data), size, CROP_RULE, ids.autoencoder]
        return find_or("latents", parts, lambda: encode_control(autoencoder(), data, file, size))["latents"]

    prompts = [
        encoded("prompt", each, lambda each=each: encode_text(encoder(), each, True))  # type: ignore[misc]
        for each in validation.prompts
    ]
    text = validation.negative_prompt
    negative = encoded("negative", text, lambda: encode_negative(encoder(), text))
    control = torch.stack(list(map(steering, validation.control))) if validation.control else None
    return Inputs(prompts, negative, control)


def encode_control(autoencoder: AutoencoderDC, data: bytes, name: str, size: Bucket) -> Tensors:
    """Return the latents [32, h, w] of a control picture cropped to `size`, in ComfyUI's order of operations."""
    picture = np.asarray(crop_picture(decode_picture(data, name), size), dtype=np.float32) / 255
    pixels = torch.from_numpy(picture).movedim(-1, 0)[None] * 2 - 1
    latents = encode_images(autoencoder, pixels).float() * autoencoder.config.scaling_factor
    return {"latents": latents[0].cpu().contiguous()}


def draw_validation(
    learner: Learner, inputs: Inputs | None, folder: Path, parts: Path, step: int, poll: Poll
) -> list[torch.Tensor]:
    """Draw the validation's prompts, prompt i with seed i, into `folder` as step-0000500-00.png and so on.

    Returns the pictures [3, H, W] in [-1, 1]. What is not whole lies in `parts`, and no file is replaced. Raises
    OutputError where nothing can be written.
    """
    from PIL import Image

    assert inputs is not None
    settings, transformer = learner.settings, learner.transformer
    own, defaults = settings.validation, model_defaults(transformer.config)
    width, height = preview_size(settings)
    drawing = Drawing(
        width=width,
        height=height,
        steps=own.steps or defaults.steps,
        guidance=defaults.guidance if own.guidance is None else own.guidance,
        sampler=defaults.sampler,
        dtype=settings.dtype,
    )
    chunk = [picture._replace(seed=picture.number) for picture in batch_pictures(len(inputs.prompts), 1, 0)]
    control = None
    if learner.controlnet is not None and inputs.control is not None:
        control = Control(learner.controlnet, inputs.control)
    models = Models(transformer, None, learner.shift)
    latents = sample(models, drawing, tuple(chunk), inputs.prompts, inputs.negative, poll, ImageInputs(control))
    dtype = getattr(torch, settings.dtype)
    autoencoder = load_autoencoder(settings.source("autoencoder"), transformer.device, dtype)
    pictures = decode(autoencoder, latents, poll)
    with writing(folder):
        folder.mkdir(exist_ok=True)
    for number, picture in enumerate(pictures):
        stream = io.BytesIO()
        Image.fromarray(levels(picture)).save(stream, "PNG", compress_level=LEVEL)
        write_beside(folder / f"step-{step:07d}-{number:02d}.png", stream.getvalue(), parts)
    return pictures


def write_beside(file: Path, data: bytes, parts: Path) -> None:
    """Write `data` to `file`, or where that is another file, to the first free of NAME-2, NAME-3 and so on.

    Raises OutputError where nothing can be written.
    """
    for number in itertools.count(1):
        path = file if number == 1 else file.with_stem(f"{file.stem}-{number}")
        try:
            with writing(path):
                return write_whole(path, data, parts)
        except ExistingFileError:
            # a run that goes on from an earlier state draws the same again
            if path.is_file() and path.read_bytes() == data:
                return None
