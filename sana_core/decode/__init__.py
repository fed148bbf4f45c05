"""Latents to pixels and back."""

from .whole import decode_latents, encode_images

__all__ = ["decode_latents", "encode_images"]
