"""What sharing a picture takes and gains, from the shapes of the model and the speed of devices and links.

Published speeds: H100 SXM 989 TFLOP/s dense in bf16, NVLink 900 GB/s in both directions together (NVIDIA H100 data
sheet); RTX 4090 165 TFLOP/s dense in bf16 with fp32 sums (NVIDIA Ada whitepaper). Without peer access a copy goes by
the host's memory, twice over PCIe: 4.0 with 8 lanes has 15.75 GB/s (PCI-SIG), so half of that. A link's latency is
assumed, with its launch and the meeting of the threads.
"""

from __future__ import annotations

from typing import NamedTuple

from ..errors import InputError
from ..latents import CHANNELS, DOWNSCALE, check_side
from ..released import HEAD_DIM, MAX_TOKENS, VARIANTS

EXCHANGES = 2  # in a block
# of the float64 that are summed
SUM_BYTES = 8
# below this it is not worth two cards' memory
LEAST_GAIN = 1.2


class Link(NamedTuple):
    """What devices hand each other tensors by: bytes a second into each, and seconds for one exchange."""

    bandwidth: float
    latency: float


LINKS = {"nvlink": Link(450e9, 10e-6), "pcie": Link(15.75e9 / 2, 50e-6)}
TFLOPS = {"nvlink": 989.0, "pcie": 165.0}


class Cost(NamedTuple):
    """A step of one picture on several devices. Bytes are those of one block: what a device brings of the sums, and one
    row for a neighbour."""

    devices: int
    exchanges: int  # in a step
    sum_bytes: int
    row_bytes: int
    alone: float  # seconds of a step on one device
    computing: float  # and on each of several, with the rows that two compute
    exchanging: float

    @property
    def gain(self) -> float:
        """How many times as fast as one device they are."""
        return self.alone / (self.computing + self.exchanging)


def split_cost(
    variant: str, size: tuple[int, int], devices: int, tflops: float, link: Link, passes: int = 2, element: int = 2
) -> Cost:
    """Return the cost of a step with so many `passes`, 2 where it is guided, in numbers of `element` bytes.

    `size` is width and height in pixels, `tflops` what a device computes in a second. Raises InputError for sides that
    are not multiples of 32, and more devices than rows.
    """
    for field, side in zip(("width", "height"), size, strict=True):
        check_side(field, side)
    columns, rows = (side // DOWNSCALE for side in size)
    if not 1 < devices <= rows:
        raise InputError(f"split: got {devices}, expected from 2 to {rows}, the rows of 32 pixels of the image")
    model = VARIANTS[variant]
    heads, layers = model.width // HEAD_DIM, model.layers
    sums = passes * heads * HEAD_DIM * (HEAD_DIM + 1) * SUM_BYTES
    row = passes * columns * model.width * element
    second = tflops * 1e12
    position, hidden = position_flops(model.width, layers), hidden_flops(model.width)
    own = -(-rows // devices)
    twice = min(2, devices - 1)
    computing = passes * columns * (own * position + twice * layers * hidden) / second
    exchanging = link.latency * EXCHANGES + ((devices - 1) * sums + twice * row) / link.bandwidth
    alone = passes * columns * rows * position / second
    return Cost(devices, EXCHANGES * layers, sums, row, alone, computing, layers * exchanging)


def position_flops(width: int, layers: int) -> int:
    """Return the operations, a product and its sum being two, of a step for one position. Text is computed once."""
    linear = 4 * width**2 + 2 * (HEAD_DIM + 1) * width
    cross = 2 * width**2 + 2 * MAX_TOKENS * width
    inner = int(2.5 * width)
    forward = hidden_flops(width) // 2 + inner * width
    return 2 * (layers * (linear + cross + forward) + 2 * CHANNELS * width)


def hidden_flops(width: int) -> int:
    """Return the operations of the inner convolutions of a feed-forward for one position."""
    inner = int(2.5 * width)
    return 2 * (width * 2 * inner + 2 * inner * 9)
