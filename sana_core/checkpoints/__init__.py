"""From files to modules."""

from .checkpoint import Checkpoint
from .detect import follow, inspect_checkpoint
from .load import load_autoencoder, load_controlnet, load_text_encoder, load_transformer, load_video_transformer
from .parts import find_part

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
