"""How kernels are launched: on which device, and how the depthwise kernel divides its output among programs.

This file does not import Triton.
"""

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


# One program of one warp computes a column strip of COLUMNS x CHANNELS outputs from the top to the bottom of its band.
# A wider strip computes fewer SiLUs twice, but its registers leave room for fewer warps.
# These sizes were the fastest of 17 on an H100.
COLUMNS, CHANNELS = 4, 64
# A band has at most this many rows. Two bands both read the two input rows at their border.
BAND_ROWS = 32
# A band has fewer rows if the grid would have fewer programs than this.
PROGRAMS = 1024


def divide_rows(batch: int, rows: int, columns: int, channels: int) -> tuple[int, int]:
    """Divide the `rows` of an output [batch, rows, columns, channels], none of them 0, into bands.

    Returns the number of bands and the rows of each; the last band may have fewer rows.
    """
    strips = batch * -(-columns // COLUMNS) * -(-channels // CHANNELS)
    bands = max(-(-rows // BAND_ROWS), min(-(-PROGRAMS // strips), rows))
    band_rows = -(-rows // bands)
    return -(-rows // band_rows), band_rows
