"""From files to modules."""

from .detect import CheckpointInfo, find_part, follow, inspect_checkpoint
from .load import load_autoencoder, load_controlnet, load_text_encoder, load_transformer

__all__ = [
    "CheckpointInfo",
    "find_part",
    "follow",
    "inspect_checkpoint",
    "load_autoencoder",
    "load_controlnet",
    "load_text_encoder",
    "load_transformer",
]
