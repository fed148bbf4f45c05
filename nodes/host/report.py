"""Lines under a node, warnings and progress for the user. web/notes.js draws the first two."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import comfy.utils
from comfy_execution.utils import get_executing_context
from PIL import Image
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
