"""What the training nodes show: a data set's contact sheet, and the bar, text, images and curve of a training."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import comfy.model_management
import comfy.utils
import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont

from ....sana_core.runtime.cancellation import Poll
from ....sana_core.runtime.image_files import levels
from ....sana_core.training.dataset import SHEET, Sample, open_image, read_dataset
from ....sana_core.training.images import Bucket, choose_bucket, crop_box, is_smaller
from ....sana_core.training.states import Eta, Line, describe_validation
from ..charts import PAPER, TEXT, as_image
from ..report import show_progress

# A data set

FAINT = (120, 120, 120)
# Sizes on the contact sheet in pixels. A cell has a thumbnail and two lines of text below it.
CELL, THUMBNAIL, LINE_HEIGHT, MARGIN = (200, 222), (184, 176), 20, 16
COLUMNS = 6
# Rows of cells, unless there are more buckets. Every bucket has at least one row.
ROWS = 10
# Characters of a caption that fit into the width of a cell.
CAPTION_LENGTH = 28


@dataclass(frozen=True)
class Dataset:
    folder: str = field(repr=False)
    # Images are cropped to buckets of about resolution x resolution pixels.
    resolution: int
    # The caption of images that have none.
    caption: str


def look_at(folder: Path, resolution: int, caption: str) -> tuple[Dataset, torch.Tensor, str]:
    """Return the data set, its contact sheet as IMAGE [1, H, W, 3], and a line about its images for the user."""
    poll = comfy.model_management.throw_exception_if_processing_interrupted
    samples = read_dataset(folder, poll, caption=caption)
    buckets = [choose_bucket(sample.size, resolution) for sample in samples]
    members: dict[Bucket, list[Sample]] = {}
    for sample, bucket in zip(samples, buckets, strict=True):
        members.setdefault(bucket, []).append(sample)
    members = dict(sorted(members.items(), key=lambda item: (-len(item[1]), item[0])))
    enlarged = sum(is_smaller(sample.size, bucket) for sample, bucket in zip(samples, buckets, strict=True))
    shapes = ", ".join(f"{len(images)} of {width} x {height}" for (width, height), images in members.items())
    note = f"; {enlarged} are smaller than that and will be blurred" if enlarged else ""
    text = f"{len(samples)} images: {shapes}{note}"
    return Dataset(str(folder), resolution, caption), as_image(draw_sheet(members, poll)), text


def draw_sheet(members: dict[Bucket, list[Sample]], poll: Poll) -> Image.Image:
    """Return the contact sheet: for each bucket, its number of images and the first images."""
    most = COLUMNS * max(1, ROWS // len(members))
    shown = {bucket: samples[:most] for bucket, samples in members.items()}
    rows = {bucket: -(-len(samples) // COLUMNS) for bucket, samples in shown.items()}
    columns = max(min(len(samples), COLUMNS) for samples in shown.values())
    height = 2 * MARGIN + sum(2 * LINE_HEIGHT + count * CELL[1] for count in rows.values())
    # The sheet is wide enough for the titles.
    sheet = Image.new("RGB", (2 * MARGIN + max(columns, 3) * CELL[0], height), PAPER)
    draw, top = ImageDraw.Draw(sheet), MARGIN
    for bucket, samples in shown.items():
        total = len(members[bucket])
        more = f", the first {len(samples)} of them" if len(samples) < total else ""
        title = f"{bucket[0]} x {bucket[1]}: {total} image{'s' if total > 1 else ''}{more}"
        draw.text((MARGIN, top), title, TEXT, ImageFont.load_default(16))
        top += 2 * LINE_HEIGHT
        for index, sample in enumerate(samples):
            poll()
            corner = (MARGIN + index % COLUMNS * CELL[0], top + index // COLUMNS * CELL[1])
            draw_cell(sheet, corner, sample, bucket)
        top += rows[bucket] * CELL[1]
    return sheet


def draw_cell(sheet: Image.Image, corner: tuple[int, int], sample: Sample, bucket: Bucket) -> None:
    scale = min(THUMBNAIL[0] / bucket[0], THUMBNAIL[1] / bucket[1])
    size = (max(1, round(bucket[0] * scale)), max(1, round(bucket[1] * scale)))
    box = crop_box(sample.size, bucket)
    sheet.paste(open_image(sample).resize(size, Image.Resampling.BOX, box=box, reducing_gap=2.0), corner)
    draw, font = ImageDraw.Draw(sheet), ImageFont.load_default(12)
    words = " ".join(sample.caption.split()) or "(no caption)"
    caption = words if len(words) <= CAPTION_LENGTH else f"{words[:CAPTION_LENGTH]}..."
    notes = f"{sample.size[0]} x {sample.size[1]}{', masked' if sample.mask else ''}"
    draw.text((corner[0], corner[1] + THUMBNAIL[1] + 2), notes, FAINT, font)
    draw.text((corner[0], corner[1] + THUMBNAIL[1] + LINE_HEIGHT), caption, TEXT, font)


# A training

# As ComfyUI's progress takes it: format, image, and the largest side or None for the image's size.
Preview = tuple[str, Image.Image, None]
# The stage of the bar that counts steps.
STEPS = "steps"
# Seconds between two lines of text, and between two curves.
WORDS, CURVES = 0.5, 2.0
# In pixels: the width of the preview, the height of the curve, and the largest height of the images.
WIDTH, CURVE, LARGEST = 512, 128, 512
CURVE_COLOUR, AVERAGE = (190, 205, 225), (40, 80, 150)
# The decay of the moving average over the losses. Single losses vary with the random timesteps.
DECAY = 0.95


class View:
    """The node `node_id` on the canvas while its training runs."""

    def __init__(self, node_id: str, losses: Sequence[float], steps: int) -> None:
        """`losses` are the losses of the steps before a resume, `steps` is the total."""
        self.node_id = node_id
        # A text about GPU memory, which begins with a semicolon, or "".
        self.fit = ""
        self.stage, self.bar = "", comfy.utils.ProgressBar(1)
        self.eta = Eta()
        self.losses = list(losses)
        self.steps = steps
        self.images: Image.Image | None = None
        self.validation = ""
        self.said, self.drawn = 0.0, 0.0

    def progress(self, stage: str, count: int, total: int) -> None:
        self.status(f"{stage}: {count} of {total}{self.fit}", count == total)
        self.advance(stage, count, total)

    def report(self, line: Line) -> None:
        """Show a step or a validation, given as a line of the log."""
        if "validation_loss" in line:
            self.validation = describe_validation(line)
            self.status(self.validation, True)
            return
        # A run that was killed resumes at its last state, so some steps are in the log already.
        self.losses[line["step"] - 1 :] = [line["loss"]]
        last = line["step"] == line["steps"]
        self.status(self.eta.describe(line), last)
        now = time.monotonic()
        due = last or now - self.drawn >= CURVES
        self.drawn = now if due else self.drawn
        self.advance(STEPS, line["step"], line["steps"], self.preview() if due else None)

    def advance(self, stage: str, count: int, total: int, preview: Preview | None = None) -> None:
        """Move the bar. Each stage has a new one, because ComfyUI's bar drops values below its last one."""
        if stage != self.stage or total != self.bar.total or count < self.bar.current:
            self.stage, self.bar = stage, comfy.utils.ProgressBar(total)
        self.bar.update_absolute(count, total, preview)

    def stop(self, step: int) -> None:
        """Show that the run was cancelled, and its last saved step, which ComfyUI's message does not contain."""
        stopped = f"stopped and saved at step {step}; Run resumes from there" if step else "stopped before a step"
        self.status(stopped, True)

    def show(self, step: int, images: Sequence[torch.Tensor]) -> None:
        """Show the images [3, H, W] in [-1, 1] of a validation, side by side."""
        row = Image.fromarray(np.concatenate([levels(image) for image in images], axis=1))
        scale = min(WIDTH / row.width, LARGEST / row.height)
        self.images = row.resize((round(row.width * scale), round(row.height * scale)), Image.Resampling.BOX)
        self.advance(STEPS, step, self.steps, self.preview())

    def status(self, text: str, now: bool) -> None:
        """Write `text` under the node, but not sooner than WORDS after the last text, unless it must be seen `now`."""
        if now or time.monotonic() - self.said >= WORDS:
            self.said = time.monotonic()
            show_progress(text, self.node_id)

    def preview(self) -> Preview:
        """Return the latest images above the curve, as ComfyUI's progress takes a preview: at its own size."""
        top = self.images.height if self.images is not None else 0
        canvas = Image.new("RGB", (WIDTH, top + CURVE), PAPER)
        if self.images is not None:
            canvas.paste(self.images, ((WIDTH - self.images.width) // 2, 0))
        draw_curve(ImageDraw.Draw(canvas), self.losses, top)
        return "JPEG", canvas, None


def draw_curve(draw: ImageDraw.ImageDraw, losses: Sequence[float], top: int) -> None:
    if len(losses) < 2:
        return
    low, high = min(losses), max(losses)
    averages, total, weight = [], 0.0, 0.0
    for loss in losses:
        total, weight = DECAY * total + loss, DECAY * weight + 1
        averages.append(total / weight)
    for values, colour in ((losses, CURVE_COLOUR), (averages, AVERAGE)):
        points = [
            (
                8 + index * (WIDTH - 16) / (len(values) - 1),
                top + 20 + (high - value) / max(high - low, 1e-9) * (CURVE - 40),
            )
            for index, value in enumerate(values)
        ]
        draw.line(points, colour, 2)
    font = ImageFont.load_default(12)
    draw.text((8, top + 2), f"{high:.4f}", TEXT, font)
    draw.text((8, top + CURVE - 16), f"{low:.4f}", TEXT, font)
    draw.text((WIDTH // 2, top + CURVE - 16), f"loss, {len(losses)} steps", TEXT, font)


def read_sheet(out: Path) -> torch.Tensor | None:
    """Return the sheet of validation images of the run in `out` as IMAGE [1, H, W, 3], or None if there is none."""
    if not (out / SHEET).exists():
        return None
    with Image.open(out / SHEET) as sheet:
        return as_image(sheet.convert("RGB"))
