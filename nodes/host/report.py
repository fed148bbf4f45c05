"""Shows text under a node and an image on it."""

import threading
import time
from collections.abc import Callable

import comfy.utils
from comfy_execution.utils import get_executing_context
from PIL import Image
from server import PromptServer

from ...sana_core.runtime.text import get_logger, one_line

logger = get_logger(__name__)


def show_under_node(text: str, node_id: str) -> None:
    """Write the lines of `text` under the node and into the log."""
    for line in text.splitlines():
        logger.info(line)
    write_under_node(text, node_id)


def write_under_node(text: str, node_id: str) -> None:
    """Write the lines of `text` under the node."""
    PromptServer.instance.send_progress_text("\n".join(map(one_line, text.splitlines())), node_id)


def show_under_running_node(text: str) -> None:
    """Write `text` under the currently executing node and into the log. In other threads, write only into the log."""
    context = get_executing_context()
    if context is None:
        logger.warning(text)
    else:
        show_under_node(text, context.node_id)


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
            text = "\n".join(self.lines)
        logger.warning(line)
        if self.node_id is not None:
            write_under_node(text, self.node_id)
            server = PromptServer.instance
            server.send_sync("sana_note", {"text": one_line(line)}, server.client_id)


def show_on_running_node(image: Image.Image, bar_total: int) -> None:
    """Show `image` on the running node in place of its previews, and fill its progress bar of `bar_total`."""
    comfy.utils.ProgressBar(bar_total).update_absolute(bar_total, bar_total, ("JPEG", image, None))


def status_under_running_node() -> Callable[[str], None]:
    """Return a function that writes a text under the running node and into the log. Any thread may call it."""
    node_id = get_executing_context().node_id
    return lambda text: show_under_node(f"SANA: {text}", node_id)


def progress_under_running_node() -> Callable[[str], None]:
    """Return a function that writes a text under the running node, at most once a second, and not into the log."""
    node_id, shown = get_executing_context().node_id, [0.0]

    def show(text: str) -> None:
        if time.monotonic() - shown[0] > 1:
            shown[0] = time.monotonic()
            write_under_node(text, node_id)

    return show
