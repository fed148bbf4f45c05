"""How the weights of convolutions lie in memory, beside maps that are channels-last."""

from __future__ import annotations

import torch

# MPS has convolved some channels-last tensors wrong (pytorch issue 180984), and on the CPU the bits would be others
CONTIGUOUS = ("cpu", "mps")


def arrange_convolutions(module: torch.nn.Module) -> None:
    """Lay the weights of the convolutions in `module` out in memory as their device reads them beside such maps.

    cuDNN would rearrange contiguous weights in each call, for each strip of a decode. Values, shapes and bytes stay,
    and what is laid out already is not touched. MIOpen's choice depends on the card, so with ROCm they stay contiguous.
    """
    for child in module.modules():
        if isinstance(child, torch.nn.Conv2d):
            keeps = child.weight.device.type in CONTIGUOUS or torch.version.hip is not None
            layout = torch.contiguous_format if keeps else torch.channels_last
            child.weight.data = child.weight.data.contiguous(memory_format=layout)
