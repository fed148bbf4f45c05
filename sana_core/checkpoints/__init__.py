"""From files to modules."""

from .checkpoint import Checkpoint, find_part
from .detect import follow, inspect_checkpoint
from .load import load_autoencoder, load_controlnet, load_text_encoder, load_transformer, load_video_transformer

__all__ = [
    "Checkpoint",
    "find_part",
    "follow",
    "inspect_checkpoint",
    "load_autoencoder",
    "load_controlnet",
    "load_text_encoder",
    "load_transformer",
    "load_video_transformer",
]
