"""A data set as SANA Dataset hands it on, and as a sheet of its images, each in the shape that it is learned in."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import comfy.model_management
import torch
from PIL import Image, ImageDraw, ImageFont

from ....sana_core.runtime.cancellation import Poll
from ....sana_core.training.dataset import Sample, open_image, read_dataset
from ....sana_core.training.images import Bucket, choose_bucket, is_smaller, part_of
from ..bars import PAPER, TEXT, as_image

FAINT = (120, 120, 120)
# of the sheet, in pixels: a cell with a thumbnail at its top and two lines of text, and the line above a shape's cells
CELL, THUMBNAIL, LINE, MARGIN = (200, 222), (184, 176), 20, 16
COLUMNS = 6
# rows of cells, when the shapes are few; each shape has at least one
ROWS = 10
# of a caption, about as many characters as a cell is wide
BEGINNING = 28


class Dataset(NamedTuple):
    """What SANA Train learns: the images of a folder, cropped to shapes of about `resolution` pixels a side."""

    folder: str
    resolution: int


def look_at(folder: Path, resolution: int) -> tuple[Dataset, torch.Tensor, str]:
    """Return the data set, its contact sheet as IMAGE [1, H, W, 3], and what it holds in a line for the user.

    Raises InputError for a resolution that is no multiple of 32, and SanaError for the first image or caption that
    cannot be used.
    """
    poll = comfy.model_management.throw_exception_if_processing_interrupted
    samples = read_dataset(folder, poll)
    buckets = [choose_bucket(sample.size, resolution) for sample in samples]
    members: dict[Bucket, list[Sample]] = {}
    for sample, bucket in zip(samples, buckets, strict=True):
        members.setdefault(bucket, []).append(sample)
    members = dict(sorted(members.items(), key=lambda item: (-len(item[1]), item[0])))
    return Dataset(str(folder), resolution), as_image(draw_sheet(members, poll)), describe(members)


def describe(members: dict[Bucket, list[Sample]]) -> str:
    """Return how many images there are in which shapes, and how many of them have to be enlarged."""
    total = sum(map(len, members.values()))
    shapes = ", ".join(f"{len(samples)} of {width} x {height}" for (width, height), samples in members.items())
    enlarged = sum(is_smaller(sample.size, bucket) for bucket, samples in members.items() for sample in samples)
    note = f"; {enlarged} are smaller than that and will be blurred" if enlarged else ""
    return f"{total} images: {shapes}{note}"


def draw_sheet(members: dict[Bucket, list[Sample]], poll: Poll) -> Image.Image:
    """Return the contact sheet: for each shape its number of images, and as many of them as there is room for."""
    most = COLUMNS * max(1, ROWS // len(members))
    shown = {bucket: samples[:most] for bucket, samples in members.items()}
    rows = {bucket: -(-len(samples) // COLUMNS) for bucket, samples in shown.items()}
    columns = max(min(len(samples), COLUMNS) for samples in shown.values())
    height = 2 * MARGIN + sum(2 * LINE + count * CELL[1] for count in rows.values())
    # wide enough for the line above
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
            place = (MARGIN + index % COLUMNS * CELL[0], top + index // COLUMNS * CELL[1])
            draw_cell(sheet, place, sample, bucket)
        top += rows[bucket] * CELL[1]
    return sheet


def draw_cell(sheet: Image.Image, place: tuple[int, int], sample: Sample, bucket: Bucket) -> None:
    """Draw an image as it is cropped, its size and mask, and the beginning of its caption."""
    scale = min(THUMBNAIL[0] / bucket[0], THUMBNAIL[1] / bucket[1])
    size = (max(1, round(bucket[0] * scale)), max(1, round(bucket[1] * scale)))
    image = open_image(sample)
    sheet.paste(image.resize(size, Image.Resampling.BOX, box=part_of(sample.size, bucket), reducing_gap=2.0), place)
    draw, font = ImageDraw.Draw(sheet), ImageFont.load_default(12)
    words = " ".join(sample.caption.split()) or "(no caption)"
    caption = words if len(words) <= BEGINNING else f"{words[:BEGINNING]}..."
    notes = f"{sample.size[0]} x {sample.size[1]}{', masked' if sample.mask else ''}"
    draw.text((place[0], place[1] + THUMBNAIL[1] + 2), notes, FAINT, font)
    draw.text((place[0], place[1] + THUMBNAIL[1] + LINE), caption, TEXT, font)
