"""Launches kernels on the right device."""

from __future__ import annotations

import contextlib
from typing import Any

import torch


def launch(kernel: Any, grid: tuple[int, ...], like: torch.Tensor, *arguments: Any, **options: Any) -> None:
    """Launch a Triton kernel on the device of `like`, whichever device is the current one."""
    if like.device.type == "cpu" or torch.compiler.is_compiling():
        # Triton's interpreter and compiled graphs need no current device.
        device: Any = contextlib.nullcontext()
    else:
        device = torch.get_device_module(like.device).device(like.device)
    with device:
        kernel[grid](*arguments, **options)


def power_of_two(count: int) -> int:
    """Return the smallest power of two that is not below `count`."""
    return 1 << (count - 1).bit_length()
