"""Leaf layers of library models become ComfyUI's, so that casting, offloading and LoRA patches reach them."""

from __future__ import annotations

import torch


def adopt(module: torch.nn.Module, operations: type) -> None:
    """Turn every exact Linear and Conv2d below `module` into that of `operations`, a namespace of comfy.ops.

    Under dynamic VRAM, ComfyUI ignores patches on plain torch layers without a word.
    """
    for child in module.modules():
        if type(child) is torch.nn.Linear:
            child.__class__ = operations.Linear
        elif type(child) is torch.nn.Conv2d:
            child.__class__ = operations.Conv2d
