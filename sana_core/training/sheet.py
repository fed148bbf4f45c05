"""A run's validations on one sheet, always whole on the disk: a row for each prompt, a column for each validation."""

from __future__ import annotations

import io
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import SanaError
from ..runtime.atomic_files import write_whole
from .pictures import Place, decode_picture, read_place
from .run_log import read_log
from .runs import PICTURES, stranger, writing

if TYPE_CHECKING:
    from PIL.ImageDraw import ImageDraw

SHEET = "validations.png"
# the entry of the PNG by which a sheet is known as one
MARK = "sana_training"
PICTURE = re.compile(r"step-(\d{7,})-(\d{2,})\.png")
# columns at most; pixels: of a picture's larger side, of headings, of the curves, and between all
COLUMNS, SIDE, HEAD, CURVES, GAP = 12, 192, 20, 160, 6
PAPER, TEXT, LOSS, VALIDATION, BEST = "#fafaf8", "#282828", "#becde1", "#285096", "#d06010"


def write_sheet(out: Path, parts: Path) -> None:
    """Write the sheet of the run in `out`, over its earlier one. Raises ExistingFileError for a file of others, and
    OutputError."""
    from PIL import Image, ImageDraw
    from PIL.PngImagePlugin import PngInfo

    file, lines = out / SHEET, read_log(out)
    with writing(file):
        check_own(file)
        found = {(int(match[1]), int(match[2])): path for path, match in pictures_in(out)}
    best = best_step(lines)
    steps, rows = columns_of(sorted({step for step, _ in found}), best), sorted({row for _, row in found})
    thumbs = {}
    for (step, row), path in found.items():
        if step in steps:
            # somebody's folder or file of that name has an empty cell
            with suppress(SanaError):
                thumbs[step, row] = decode_picture(read_place(Place(path), path.name), path.name)
                thumbs[step, row].thumbnail((SIDE, SIDE))
    width = max((each.width for each in thumbs.values()), default=SIDE)
    height = max((each.height for each in thumbs.values()), default=SIDE)
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
    with writing(file):
        write_whole(file, stream.getvalue(), parts, replace=True)


def check_own(file: Path) -> None:
    """Raise ExistingFileError for a file that is no sheet of a run."""
    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(file) as image:
            own = MARK in image.info
    except FileNotFoundError:
        return
    except (UnidentifiedImageError, IsADirectoryError):
        own = False
    if not own:
        raise stranger(file)


def pictures_in(out: Path) -> list[tuple[Path, re.Match[str]]]:
    """Return the validations' pictures in `out`, with step and prompt as they are named."""
    matches = [(path, PICTURE.fullmatch(path.name)) for path in (out / PICTURES).glob("step-*.png")]
    return [(path, match) for path, match in matches if match]


def best_step(lines: Sequence[Mapping[str, Any]]) -> int | None:
    """Return the step of the lowest validation loss in the log's newest phase; what is not trained yet is not it."""
    phases = [(line["phase"], line["step"]) for line in lines if "phase" in line]
    began = max((step for phase, step in phases if phase != phases[-1][0]), default=0)
    own = [line for line in lines if "validation_loss" in line and line["step"] > began]
    found = [(line["validation_loss"], line["step"]) for line in own]
    return min(found)[1] if found else None


def columns_of(steps: Sequence[int], best: int | None) -> list[int]:
    """Return which of `steps` have a column: all, or the first, the last, the best, and others at even distances."""
    if len(steps) <= COLUMNS:
        return list(steps)
    chosen = {steps[round(number * (len(steps) - 1) / (COLUMNS - 2))] for number in range(COLUMNS - 1)}
    return sorted(chosen.union(step for step in steps if step == best))


def draw_losses(
    draw: ImageDraw, lines: Sequence[Mapping[str, Any]], best: int | None, box: tuple[int, int, int, int]
) -> None:
    """Draw the loss of each step and of each validation, with the lowest and the highest in words."""
    curves = [
        (name, colour, [(line["step"], line[name]) for line in lines if name in line])
        for name, colour in (("loss", LOSS), ("validation_loss", VALIDATION))
    ]
    losses = [loss for _, _, points in curves for _, loss in points]
    if not losses:
        return
    left, top, right, bottom = box
    low, high, last = min(losses), max(losses), max(line["step"] for line in lines) or 1

    def place(step: int, loss: float) -> tuple[float, float]:
        return left + step / last * (right - left), top + (high - loss) / max(high - low, 1e-9) * (bottom - top)

    for _, colour, points in curves:
        if len(points) > 1:
            draw.line([place(*point) for point in points], colour, 2)
    for step, loss in curves[1][2]:
        x, y = place(step, loss)
        draw.ellipse((x - 3, y - 3, x + 3, y + 3), BEST if step == best else VALIDATION)
    draw.text((left, bottom + 4), f"loss {low:.4f} to {high:.4f}, validation in blue, step {last}", TEXT)
