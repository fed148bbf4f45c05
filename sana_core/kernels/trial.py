"""Where the fused kernels run: each is tried once, on a few elements, before any work is done."""

from __future__ import annotations

import functools
import logging

import torch

from ..accelerator import is_out_of_memory

WITHOUT = ("cpu", "meta")
CHANNELS = 64


@functools.cache
def runs(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the fused kernels build and run on `device` with tensors of `dtype`; tried once, on a few elements.

    Where they do not, as without Triton, without a compiler or on an old card, one line in the log says why, and plain
    torch does the work. On a CPU it always does.
    """
    if device.type in WITHOUT:
        return False
    try:
        try_all(device, dtype)
    except Exception as error:
        if is_out_of_memory(error):
            raise
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        logging.getLogger(__name__).warning("no fused kernels on %s in %s (%.200s); plain torch", device, dtype, reason)
        return False
    return True


def try_all(device: torch.device, dtype: torch.dtype) -> None:
    """Launch each kernel. Raises what Triton raises, ImportError where there is none."""
    from .channels import add_bias, rms_norm
    from .gated_depthwise import silu_depthwise_gate
    from .linear_attention import relu_attention
    from .modulation import add_gated, add_then_norm, modulated_norm

    rows = torch.zeros(8, CHANNELS, device=device, dtype=dtype)
    own = rows[0]
    rms_norm(rows, own, own, 1e-5, rows)
    add_bias(rows, own, rows, "silu")
    hidden, table = rows[None], rows[:1, None]
    modulated_norm(hidden, table, table, 1e-6)
    add_gated(hidden, hidden, table)
    add_then_norm(hidden, hidden, table, table, 1e-6)
    relu_attention(hidden, hidden, hidden, 2, 1e-15)
    weight = torch.zeros(CHANNELS, 1, 3, 3, device=device, dtype=dtype)
    silu_depthwise_gate(rows.view(1, 2, 4, CHANNELS), weight, own)
