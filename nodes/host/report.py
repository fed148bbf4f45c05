"""Words under a node: what it found out that its widgets do not show."""

import logging

from server import PromptServer

logger = logging.getLogger(__name__)


def show_under_node(text: str, node_id: str) -> None:
    """Write `text` under the node and into the log."""
    logger.info(text)
    PromptServer.instance.send_progress_text(text, node_id)
