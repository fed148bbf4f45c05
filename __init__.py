"""SANA for ComfyUI: the nodes, and where their help pages are."""

from .nodes import comfy_entrypoint

WEB_DIRECTORY = "./web"

__all__ = ["WEB_DIRECTORY", "comfy_entrypoint"]
