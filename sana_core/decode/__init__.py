"""Latents to pixels and back."""

from .encode import encode_images
from .run import decode_latents, decode_rows

__all__ = ["decode_latents", "decode_rows", "encode_images"]
