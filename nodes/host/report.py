"""Lines under a node, warnings, progress, and charts for the user. web/notes.js draws the first two."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import comfy.utils
import numpy as np
import torch
from comfy_execution.utils import get_executing_context
from PIL import Image, ImageDraw, ImageFont
from server import PromptServer

from ...sana_core.runtime.text import get_logger, one_line

logger = get_logger(__name__)

# The name of the lines in a node's `ui` output.
LINES = "sana"
# The event of a warning: {"text": line, "node": the node under which it is written, or None}.
WARNING = "sana_note"


def shown(text: str, warning: str = "") -> dict[str, list[str]]:
    """Return the `ui` output of a node that shows the lines of `text` and `warning`, and write both into the log.

    ComfyUI keeps the output of a node, so the lines stay after the run. A cached node has them too if its schema sets
    has_intermediate_output. A warning is also a message of the canvas.
    """
    for line in text.splitlines():
        logger.info(line)
    for line in warning.splitlines():
        send_warning(line, None)
    return {LINES: [one_line(line) for line in [*text.splitlines(), *warning.splitlines()]]}


def warn(line: str) -> None:
    """Write a warning under the running node, into a message of the canvas and the log. Other threads: into the log."""
    context = get_executing_context()
    if context is None:
        logger.warning(line)
    else:
        send_warning(line, context.node_id)


def send_warning(line: str, node_id: str | None) -> None:
    logger.warning(line)
    server = PromptServer.instance
    server.send_sync(WARNING, {"text": one_line(line), "node": node_id}, server.client_id)


def show_progress(text: str, node_id: str) -> None:
    """Write the lines of `text` under the node while it runs."""
    PromptServer.instance.send_progress_text("\n".join(map(one_line, text.splitlines())), node_id)


class Notes:
    """Warnings of a sampling, or of a batch of samplings. Any thread may add one.

    Each is written once: under the node that was running when the object was created, on the canvas, and into the log.
    """

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.lock = threading.Lock()
        context = get_executing_context()
        self.node_id = None if context is None else context.node_id

    def add(self, line: str) -> None:
        with self.lock:
            if line in self.lines:
                return
            self.lines.append(line)
        if self.node_id is None:
            logger.warning(line)
        else:
            send_warning(line, self.node_id)


def show_on_running_node(image: Image.Image, bar_total: int) -> None:
    """Show `image` on the running node in place of its previews, and fill its progress bar of `bar_total`."""
    comfy.utils.ProgressBar(bar_total).update_absolute(bar_total, bar_total, ("JPEG", image, None))


def status_under_running_node() -> Callable[[str], None]:
    """Return a function that writes a text under the running node and into the log. Any thread may call it."""
    node_id = get_executing_context().node_id

    def show(text: str) -> None:
        logger.info("SANA: %s", text)
        show_progress(f"SANA: {text}", node_id)

    return show


def progress_under_running_node() -> Callable[[str], None]:
    """Return a function that writes a text under the running node, at most once a second, and not into the log."""
    node_id, last = get_executing_context().node_id, [0.0]

    def show(text: str) -> None:
        if time.monotonic() - last[0] > 1:
            last[0] = time.monotonic()
            show_progress(text, node_id)

    return show


Colour = tuple[int, int, int]

# Sizes in pixels. LEFT is the space for names, RIGHT the space for words after the longest bar. LETTERS is large enough
# to read on a node, which shows the chart at a third of its width.
WIDTH, LEFT, RIGHT, TOP, STEP, BAR, BOTTOM, LETTERS = 900, 205, 190, 100, 50, 34, 50, 22
# Pixels from one line of the title to the next.
TITLE_STEP = 28
TEXT, LINE, PAPER = (40, 40, 40), (190, 50, 50), (250, 250, 248)
BLUE, ORANGE = (91, 122, 166), (226, 150, 74)
# The line is left out if it is farther right than this multiple of the longest bar.
FARTHEST = 2.5


class Bar(NamedTuple):
    """One bar of a chart."""

    # To the left of the bar.
    name: str
    # (length, colour), one after another.
    parts: Sequence[tuple[float, Colour]]
    # To the right of the bar.
    words: str


def draw_bars(
    title: str,
    bars: Sequence[Bar],
    legend: Sequence[tuple[str, Colour]] = (),
    line: tuple[float, str] | None = None,
    right: int = RIGHT,
) -> Image.Image:
    """Return the chart of `bars` on one scale. A long `title` is wrapped. `line` is a length and its name."""
    font = ImageFont.load_default(LETTERS)
    title = wrap(title, font)
    # Up to two lines of the title fit above the bars.
    top = TOP + max(0, len(title.splitlines()) - 2) * TITLE_STEP
    image = Image.new("RGB", (WIDTH, top + len(bars) * STEP + BOTTOM), PAPER)
    draw = ImageDraw.Draw(image)
    longest = max(sum(length for length, _ in bar.parts) for bar in bars) or 1.0
    if line is not None and line[0] > FARTHEST * longest:
        line = None
    scale = (WIDTH - LEFT - right) / max(longest, line[0] if line else 0.0)
    draw.multiline_text((20, 16), title, TEXT, font)
    for index, bar in enumerate(bars):
        x, y = float(LEFT), top + index * STEP
        draw.text((20, y + 4), bar.name, TEXT, font)
        for length, colour in bar.parts:
            draw.rectangle((x, y, x + length * scale, y + BAR), colour)
            x += length * scale
        draw.text((x + 8, y + 4), bar.words, TEXT, font)
    bottom = top + len(bars) * STEP
    if line is not None:
        x = LEFT + line[0] * scale
        draw.line((x, top - 12, x, bottom), LINE, 2)
        # The name of the line ends inside of the image.
        draw.text((min(x - 90, WIDTH - 20 - draw.textlength(line[1], font)), bottom), line[1], LINE, font)
    x = 20.0
    for name, colour in legend:
        draw.text((x, bottom), name, colour, font)
        x += draw.textlength(name, font) + 20
    return image


def wrap(text: str, font: ImageFont.FreeTypeFont | ImageFont.ImageFont) -> str:
    """Return `text` with line breaks, so that no line is wider than the chart."""
    lines: list[str] = []
    for paragraph in text.splitlines():
        line = ""
        for word in paragraph.split():
            longer = f"{line} {word}".strip()
            if line and font.getlength(longer) > WIDTH - 40:
                lines.append(line)
                longer = word
            line = longer
        lines.append(line)
    return "\n".join(lines)


def as_image(image: Image.Image) -> torch.Tensor:
    """Return `image` as an IMAGE [1, H, W, 3] in [0, 1]."""
    return torch.from_numpy(np.asarray(image, np.float32) / 255)[None]
