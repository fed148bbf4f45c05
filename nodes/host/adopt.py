"""How library models run in ComfyUI: whose leaf layers they have, and in which precision."""

from __future__ import annotations

import comfy.model_management
import torch


def adopt(module: torch.nn.Module, operations: type) -> None:
    """Turn every exact Linear and Conv2d below `module` into that of `operations`, a namespace of comfy.ops.

    Casting, offloading and LoRA patches reach only those. Under dynamic VRAM, ComfyUI ignores patches on plain torch
    layers without a word.
    """
    for child in module.modules():
        if type(child) is torch.nn.Linear:
            child.__class__ = operations.Linear
        elif type(child) is torch.nn.Conv2d:
            child.__class__ = operations.Conv2d


def wide_dtype(device: torch.device) -> torch.dtype:
    """Return bf16 where `device` has it, else fp32: Gemma 2 and DC-AE overflow in fp16."""
    return torch.bfloat16 if comfy.model_management.should_use_bf16(device) else torch.float32
