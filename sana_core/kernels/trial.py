"""Finds out which fused kernels run on a device. Each kernel is tried once, on a few elements, before its first use."""

from __future__ import annotations

import functools

import torch

from ..errors import first_line
from ..runtime.accelerator import is_out_of_memory
from ..runtime.text import get_logger

WITHOUT = ("cpu", "meta")
CHANNELS = 64


def kernels_on(device: torch.device, dtype: torch.dtype) -> frozenset[str]:
    """Return the fused kernels that build and run on `device` with tensors of `dtype`. On a CPU there are none.

    Plain torch replaces all other kernels.
    """
    return frozenset() if device.type in WITHOUT else frozenset(TRIALS) - refused_kernels(device, dtype).keys()


@functools.cache
def refused_kernels(device: torch.device, dtype: torch.dtype) -> dict[str, str]:
    """Return {kernel: reason} of the kernels that do not build or run on the accelerator `device` with `dtype`.

    Reasons are a missing Triton, a missing compiler or an old GPU. They are also logged. Errors about memory are
    raised, because they say nothing about the kernel.
    """
    reasons: dict[str, str] = {}
    for name, attempt in TRIALS.items():
        try:
            attempt(torch.zeros(8, CHANNELS, device=device, dtype=dtype))
        except Exception as error:
            if is_out_of_memory(error):
                raise
            reasons[name] = first_line(error)
    if reasons:
        why = "; ".join(dict.fromkeys(reasons.values()))
        get_logger(__name__).warning(
            "no fused kernels for %s on %s in %s (%.400s); plain torch", ", ".join(reasons), device, dtype, why
        )
    return reasons


def try_channels(rows: torch.Tensor) -> None:
    from .channels import add_bias, rms_norm

    rms_norm(rows, rows[0], rows[0], 1e-5, rows)
    add_bias(rows, rows[0], rows, "silu")


def try_gated_depthwise(rows: torch.Tensor) -> None:
    from .gated_depthwise import silu_depthwise_gate

    silu_depthwise_gate(rows.view(1, 2, 4, CHANNELS), rows.new_zeros(CHANNELS, 1, 3, 3), rows[0])


def try_linear_attention(rows: torch.Tensor) -> None:
    from .linear_attention import relu_attention

    relu_attention(rows[None], rows[None], rows[None], 2, 1e-15)


def try_modulation(rows: torch.Tensor) -> None:
    from .channels import add_gated, add_then_norm

    table = rows[:1, None]
    add_gated(rows[None], rows[None], table)
    for branch in ((None, None), (rows[None], None), (rows[None], table)):
        add_then_norm(rows[None], branch, table, table, 1e-6)


# One function for each file of kernels.
TRIALS = {
    "channels": try_channels,
    "gated_depthwise": try_gated_depthwise,
    "linear_attention": try_linear_attention,
    "modulation": try_modulation,
}
