"""The output of SANA Dataset, and a contact sheet of its images as they are cropped."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import comfy.model_management
import torch
from PIL import Image, ImageDraw, ImageFont

from ....sana_core.runtime.cancellation import Poll
from ....sana_core.training.dataset import Sample, open_image, read_dataset
from ....sana_core.training.images import Bucket, choose_bucket, crop_box, is_smaller
from ..bars import PAPER, TEXT, as_image

FAINT = (120, 120, 120)
# Sizes on the contact sheet in pixels. A cell has a thumbnail and two lines of text below it.
CELL, THUMBNAIL, LINE, MARGIN = (200, 222), (184, 176), 20, 16
COLUMNS = 6
# Rows of cells, unless there are more buckets. Every bucket has at least one row.
ROWS = 10
# Characters of a caption that fit into the width of a cell.
CAPTION_LENGTH = 28


@dataclass(frozen=True)
class Dataset:
    """The data for SANA Train."""

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
    height = 2 * MARGIN + sum(2 * LINE + count * CELL[1] for count in rows.values())
    # The sheet is wide enough for the titles.
    sheet = Image.new("RGB", (2 * MARGIN + max(columns, 3) * CELL[0], height), PAPER)
    draw, top = ImageDraw.Draw(sheet), MARGIN
    for bucket, samples in shown.items():
        total = len(members[bucket])
        more = f", the first {len(samples)} of them" if len(samples) < total else ""
        title = f"{bucket[0]} x {bucket[1]}: {total} image{'s' if total > 1 else ''}{more}"
        draw.text((MARGIN, top), title, TEXT, ImageFont.load_default(16))
        top += 2 * LINE
        for index, sample in enumerate(samples):
            poll()
            corner = (MARGIN + index % COLUMNS * CELL[0], top + index // COLUMNS * CELL[1])
            draw_cell(sheet, corner, sample, bucket)
        top += rows[bucket] * CELL[1]
    return sheet


def draw_cell(sheet: Image.Image, corner: tuple[int, int], sample: Sample, bucket: Bucket) -> None:
    """Draw the cropped image, its size, whether it has a mask, and the beginning of its caption."""
    scale = min(THUMBNAIL[0] / bucket[0], THUMBNAIL[1] / bucket[1])
    size = (max(1, round(bucket[0] * scale)), max(1, round(bucket[1] * scale)))
    box = crop_box(sample.size, bucket)
    sheet.paste(open_image(sample).resize(size, Image.Resampling.BOX, box=box, reducing_gap=2.0), corner)
    draw, font = ImageDraw.Draw(sheet), ImageFont.load_default(12)
    words = " ".join(sample.caption.split()) or "(no caption)"
    caption = words if len(words) <= CAPTION_LENGTH else f"{words[:CAPTION_LENGTH]}..."
    notes = f"{sample.size[0]} x {sample.size[1]}{', masked' if sample.mask else ''}"
    draw.text((corner[0], corner[1] + THUMBNAIL[1] + 2), notes, FAINT, font)
    draw.text((corner[0], corner[1] + THUMBNAIL[1] + LINE), caption, TEXT, font)
