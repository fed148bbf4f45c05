"""The images of validations, which this pack's sampler generates, and a sheet with all of them and the losses."""

from __future__ import annotations

import io
import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from ..batch.pipeline import Conditioning, Models, ResolvedSettings, decode, sample
from ..batch.plan import Embedding, ImageInputs, batch_images
from ..checkpoints import load_autoencoder, load_transformer
from ..errors import ExistingFileError, SanaError
from ..model.controlnet import Control
from ..model.known_models import model_defaults
from ..runtime.atomic_files import digest_of, reason_of, write_whole
from ..runtime.cancellation import Poll
from ..runtime.image_files import LEVEL, levels
from ..runtime.text import get_logger
from ..runtime.user_files import FileRange, read_range
from .cache import EncodePixels, Encoders, ModelIds, Store, Tensors, encode_padded, encode_unpadded
from .dataset import PICTURES, SHEET
from .images import CROP_RULE, Bucket, crop_image, decode_image
from .settings import TrainingSettings
from .states import Line, foreign_file_error, read_log, writing
from .trained_model import adapter_tensors, add_adapter, merged

if TYPE_CHECKING:
    from PIL.ImageDraw import ImageDraw

logger = get_logger(__name__)
# The text entry of a PNG that marks it as a sheet.
MARK = "sana_training"
IMAGE = re.compile(r"step-(\d{7,})-(\d{2,})\.png")
# The largest number of columns of the sheet.
COLUMNS = 12
# The largest number of rows of the sheet.
ROWS = 100
# Pixels of the larger side of an image in the sheet.
SIDE = 192
# Pixels of the height of the headings.
HEAD = 20
# Pixels of the height of the curves.
CURVES = 160
# Pixels between images.
GAP = 6
# Colours of the sheet.
PAPER, TEXT, LOSS, VALIDATION, BEST = "#fafaf8", "#282828", "#becde1", "#285096", "#d06010"


class Inputs(NamedTuple):
    """The encoded inputs of the validation's images."""

    prompts: list[Embedding]
    negative: Embedding
    # [1 or the number of prompts, 32, h, w], in the model's scale. None: no control images.
    control: torch.Tensor | None


def preview_size(settings: TrainingSettings) -> Bucket:
    """Return (width, height) of the validation's images. The default is the resolution of the last phase."""
    validation, side = settings.validation, settings.phase[-1].resolution
    return validation.width or side, validation.height or side


def encode_validation(settings: TrainingSettings, store: Store, ids: ModelIds, encode: Encoders) -> Inputs | None:
    """Encode the inputs of the validation's images, or read them from the cache. None: no images are generated."""
    validation, size = settings.validation, preview_size(settings)
    if not validation.every or not validation.prompts:
        return None

    def read_or_make(kind: str, key_values: list, make: Callable[[], Tensors]) -> Tensors:
        return store.read(store.ensure(store.path(kind, key_values), make))

    def text(kind: str, prompt: str, make: Callable[[], Tensors]) -> Embedding:
        entry = read_or_make("texts", [kind, prompt, ids.text_encoder], make)
        return entry["embeds"][None], entry["mask"][None].long()

    def steering(file: str) -> torch.Tensor:
        data = read_range(FileRange(Path(file)), file)
        key_values = ["validation", digest_of(data), size, CROP_RULE, ids.autoencoder]
        make = partial(encode_control, encode.pixels, data, file, size)
        return read_or_make("latents", key_values, make)["latents"]

    prompts = [
        text("caption", prompt, partial(encode_unpadded, encode.caption, prompt)) for prompt in validation.prompts
    ]
    # All tokens are kept, because NVIDIA's code masks the negative prompt with the mask of the positive one.
    negative_text = validation.negative_prompt
    negative = text("negative prompt", negative_text, partial(encode_padded, encode.caption, negative_text, False))
    control = torch.stack(list(map(steering, validation.control))) if validation.control else None
    return Inputs(prompts, negative, control)


def encode_control(encode: EncodePixels, data: bytes, name: str, size: Bucket) -> Tensors:
    """Return the latents [32, h, w] of a control image cropped to `size`, in ComfyUI's order of operations."""
    image = np.asarray(crop_image(decode_image(data, name), size), dtype=np.float32) / 255
    pixels = torch.from_numpy(image).movedim(-1, 0)[None] * 2 - 1
    return {"latents": encode(pixels)[0].float().cpu().contiguous()}


@contextmanager
def as_saved(settings: TrainingSettings, models: list[Any]) -> Iterator[list[Any]]:
    """Inside the context `models` have exactly the weights that the exported file gives another program.

    The weights are rounded to settings.dtype, and an adapter is merged. An adapter on an 8-bit base is merged into the
    base that was not quantised.
    """
    dtype = getattr(torch, settings.dtype)
    if settings.method.is_adapter:
        (transformer,) = models
        tensors = adapter_tensors(transformer, dtype)
        if settings.method.base != "full":
            transformer = load_transformer(settings.model, transformer.device, dtype, None, settings.reference)
            add_adapter(transformer, settings.method, settings.seed)
        with merged(transformer, tensors):
            yield [transformer]
        return
    trained = [
        (module._parameters, name, parameter)
        for module in models[-1].modules()
        for name, parameter in module._parameters.items()
        if parameter is not None and parameter.requires_grad
    ]
    try:
        # The modules get other parameters for this context. If the dtype of a parameter's own data changed, DDP would
        # not notice its gradients again.
        for parameters, name, parameter in trained:
            parameters[name] = torch.nn.Parameter(parameter.detach().to(dtype), requires_grad=False)
        yield models
    finally:
        for parameters, name, parameter in trained:
            parameters[name] = parameter


def generate_validation(
    settings: TrainingSettings,
    models: Sequence[Any],
    shift: float,
    inputs: Inputs,
    out: Path,
    parts: Path,
    step: int,
    poll: Poll,
) -> list[torch.Tensor]:
    """Generate the validation's prompts, prompt i with seed i, into the run's folder, as step-0000500-00.png and so on.

    `models` are the transformer, and the ControlNet if one is trained. Returns the images [3, H, W] in [-1, 1].
    Unfinished files are in `parts`, and no file is replaced.
    """
    from PIL import Image

    transformer, folder = models[0], out / PICTURES
    validation, defaults = settings.validation, model_defaults(transformer.config)
    width, height = preview_size(settings)
    sampling = ResolvedSettings(
        width=width,
        height=height,
        steps=validation.steps or defaults.steps,
        guidance=defaults.guidance if validation.guidance is None else validation.guidance,
        sampler=defaults.sampler,
        dtype=settings.dtype,
    )
    chunk = [image._replace(seed=image.number) for image in batch_images(len(inputs.prompts), 1, 0)]
    control = None
    if len(models) > 1 and inputs.control is not None:
        control = Control(models[1], inputs.control)
    prompts = Conditioning(inputs.prompts, inputs.negative)
    latents = sample(Models(transformer, None, shift), sampling, tuple(chunk), prompts, poll, ImageInputs(control))
    dtype = getattr(torch, settings.dtype)
    autoencoder = load_autoencoder(settings.source("autoencoder"), transformer.device, dtype)
    images = decode(autoencoder, latents, poll)
    with writing(folder):
        folder.mkdir(exist_ok=True)
    for number, image in enumerate(images):
        stream = io.BytesIO()
        Image.fromarray(levels(image)).save(stream, "PNG", compress_level=LEVEL)
        write_beside(folder / f"step-{step:07d}-{number:02d}.png", stream.getvalue(), parts)
    return images


def write_beside(file: Path, data: bytes, parts: Path) -> None:
    """Write `data` to `file`. If another file has that name, use the first free one of NAME-2, NAME-3 and so on."""
    for number in itertools.count(1):
        path = file if number == 1 else file.with_stem(f"{file.stem}-{number}")
        try:
            with writing(path):
                return write_whole(path, data, parts)
        except ExistingFileError:
            # A run that resumes from an earlier state generates the same images again.
            if path.is_file() and path.read_bytes() == data:
                return None


def write_sheet(out: Path, parts: Path, best: int | None) -> None:
    """Write the sheet of the run in `out`, over its earlier sheet. It marks the step `best`.

    If it cannot be written, the log has the reason, and the next validation writes it again.
    """
    file = out / SHEET
    try:
        with writing(file):
            check_own(file)
            write_whole(file, draw_sheet(out, best), parts, replace=True)
    except ExistingFileError:
        raise
    except OSError as error:
        cause = error.__context__ if isinstance(error.__context__, OSError) else error
        logger.warning("%s is not written now (%s)", SHEET, reason_of(cause))


def draw_sheet(out: Path, best: int | None) -> bytes:
    """Return a PNG with the images of the validations in `out`, a column for each, and the curves of the losses."""
    from PIL import Image, ImageDraw
    from PIL.PngImagePlugin import PngInfo

    lines = read_log(out)
    images = {
        (int(match[1]), int(match[2])): path
        for path in (out / PICTURES).glob("step-*.png")
        if (match := IMAGE.fullmatch(path.name))
    }
    steps, rows = columns_of(sorted({step for step, _ in images}), best), sorted({row for _, row in images})[:ROWS]
    thumbs = {}
    for (step, row), path in images.items():
        if step in steps and row in rows:
            # A folder or another file with that name gets an empty cell.
            with suppress(SanaError):
                thumbs[step, row] = decode_image(read_range(FileRange(path), path.name), path.name)
                thumbs[step, row].thumbnail((SIDE, SIDE))
    width = max((thumb.width for thumb in thumbs.values()), default=SIDE)
    height = max((thumb.height for thumb in thumbs.values()), default=SIDE)
    size = max(len(steps), 3) * (width + GAP) + GAP, HEAD + len(rows) * (height + GAP) + CURVES
    sheet = Image.new("RGB", size, PAPER)
    draw = ImageDraw.Draw(sheet)
    for column, step in enumerate(steps):
        left = GAP + column * (width + GAP)
        draw.text((left, 4), f"step {step}{', best' if step == best else ''}", BEST if step == best else TEXT)
        for row in rows:
            top = HEAD + row * (height + GAP)
            if (step, row) in thumbs:
                sheet.paste(thumbs[step, row], (left, top))
                if step == best:
                    draw.rectangle((left - 2, top - 2, left + width + 1, top + height + 1), outline=BEST, width=2)
    draw_losses(draw, lines, best, (GAP, size[1] - CURVES + GAP, size[0] - GAP, size[1] - HEAD))
    mark, stream = PngInfo(), io.BytesIO()
    mark.add_text(MARK, SHEET)
    sheet.save(stream, "PNG", pnginfo=mark)
    return stream.getvalue()


def check_own(file: Path) -> None:
    """Raise ExistingFileError if `file` exists and is no sheet of a run."""
    from PIL import Image, UnidentifiedImageError

    with writing(file):
        try:
            with Image.open(file) as image:
                is_own_sheet = MARK in image.info
        except FileNotFoundError:
            return
        except (UnidentifiedImageError, Image.DecompressionBombError):
            is_own_sheet = False
        except OSError:
            # Windows raises PermissionError for a folder.
            if not file.is_dir():
                raise
            is_own_sheet = False
    if not is_own_sheet:
        raise foreign_file_error(file)


def columns_of(steps: Sequence[int], best: int | None) -> list[int]:
    """Return the steps with a column: all of them, or the first, the last, the best, and others at even distances."""
    if len(steps) <= COLUMNS:
        return list(steps)
    chosen = {steps[round(number * (len(steps) - 1) / (COLUMNS - 2))] for number in range(COLUMNS - 1)}
    return sorted(chosen.union(step for step in steps if step == best))


def draw_losses(draw: ImageDraw, lines: Sequence[Line], best: int | None, box: tuple[int, int, int, int]) -> None:
    """Draw the curves of the losses of steps and validations, with a text of the lowest and highest loss."""
    steps = [(line["step"], line["loss"]) for line in lines if "loss" in line]
    validations = [(line["step"], line["validation_loss"]) for line in lines if "validation_loss" in line]
    losses = [loss for _, loss in steps + validations]
    if not losses:
        return
    left, top, right, bottom = box
    low, high, last = min(losses), max(losses), max(line["step"] for line in lines) or 1

    def to_pixel(step: int, loss: float) -> tuple[float, float]:
        return left + step / last * (right - left), top + (high - loss) / max(high - low, 1e-9) * (bottom - top)

    for colour, points in ((LOSS, steps), (VALIDATION, validations)):
        if len(points) > 1:
            draw.line([to_pixel(*point) for point in points], colour, 2)
    for step, loss in validations:
        x, y = to_pixel(step, loss)
        draw.ellipse((x - 3, y - 3, x + 3, y + 3), BEST if step == best else VALIDATION)
    draw.text((left, bottom + 4), f"loss {low:.4f} to {high:.4f}, validation in blue, step {last}", TEXT)
