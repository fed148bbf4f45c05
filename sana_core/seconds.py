"""Predicts how long a step takes on a GPU that is sold, or on one of this speed.

H100 SXM: measured on one GPU (benchmarks/gpu/nvidia-h100-80gb-hbm3.json). A product in bf16 reaches 735 TFLOP/s, of 989
published. A step of the 1.6B model at 4096 px takes 172 ms, so the kernels between the products move their 55 GB at
1.13 TB/s, of 3.35 published. With these two rates, the prediction for the kernels of a step at 1024 px is 10.7 ms,
which equals the measured time.
GeForce: published figures (NVIDIA Ada whitepaper), of which the H100's share of products is assumed.
Host: a launch took Python 42 us on one machine with an H100 (12.1 ms for the 287 launches of the 1.6B model at 1024 px)
and 87 us on another (34 ms for the 391 launches of the 0.6B model at 512 px). So a prediction has two values.
Launches and bytes are counted for the fused kernels. Tests compare them with tests/fake_accelerator.py.
"""

from __future__ import annotations

from typing import NamedTuple

from .kernels.support import divide_rows
from .model.known_models import HEAD_DIM, MAX_TOKENS, Architecture
from .model.latents import CHANNELS

# Kernel launches: outside the blocks, in a block, and of the norms of query and key in a block.
OUTSIDE, BLOCK, NORMS = 27, 13, 3
# Seconds of Python for a launch, on a fast host and on a slow one.
LAUNCHES = (42e-6, 87e-6)
# The share of the published TFLOP/s that an H100 reaches in a product. GeForce GPUs are assumed to reach the same share
# of both published rates.
REACHED = 0.74


class GpuSpeed(NamedTuple):
    """Speed of one device."""

    # TFLOP/s of a matrix product.
    tflops: float
    # Bytes per second that the kernels between the products move.
    bandwidth: float
    # Seconds of Python for a launch.
    launch: float


class ExampleGpu(NamedTuple):
    """A GPU that is sold."""

    name: str
    # Published TFLOP/s, dense in bf16 with fp32 sums, and bytes per second.
    tflops: float
    bandwidth: float
    # Shares of the published rates that products and the kernels between them reach.
    product_share: float = REACHED
    bandwidth_share: float = REACHED

    @property
    def speeds(self) -> tuple[GpuSpeed, GpuSpeed]:
        """The speed on a fast host and on a slow one."""
        rates = self.product_share * self.tflops, self.bandwidth_share * self.bandwidth
        return GpuSpeed(*rates, LAUNCHES[0]), GpuSpeed(*rates, LAUNCHES[1])


H100 = ExampleGpu("H100", 989.0, 3.35e12, 735 / 989, 1.13 / 3.35)
RTX_4090 = ExampleGpu("RTX 4090", 165.0, 1008e9)


class Work(NamedTuple):
    """The work of one device in a step."""

    launches: int
    # Floating-point operations of the matrix products.
    operations: float
    # Bytes that the matrix products and the other kernels move.
    product_bytes: float
    other_bytes: float

    @property
    def moved(self) -> float:
        return self.product_bytes + self.other_bytes

    def seconds(self, gpu: GpuSpeed) -> float:
        """Return the time of the step."""
        products = max(self.operations / (gpu.tflops * 1e12), self.product_bytes / gpu.bandwidth)
        return max(self.launches * gpu.launch, products + self.other_bytes / gpu.bandwidth)


def work_of(model: Architecture, columns: int, rows: int, passes: int, element: int) -> Work:
    """Return the work of a step with `passes` passes over `columns` x `rows` positions.

    `passes` is 2 with guidance, else 1. `element` is the size of a number in bytes. The factors below count the maps of
    the model's width that the operations of a block read and write.
    """
    width, layers = model.width, model.layers
    positions = passes * columns * rows
    # Query, key and value move 4, their sums 2 and outputs 2. The other products of attention move 2 each, and the
    # softmax 2. The products of the feed-forward move 6 and 3.5.
    products = 25.5 * positions
    # The three norms and gates move 11. The depthwise convolution writes 2.5 and reads 5. It reads the rows at the
    # border of two bands twice.
    bands, _ = divide_rows(passes, rows, columns, int(2.5 * width))
    other = (13.5 + 2 * NORMS * model.qk_norm) * positions + 5 * (positions + 2 * (bands - 1) * passes * columns)
    matrices = layers * (13.5 * width + 2 * passes * MAX_TOKENS) * width + 7 * width**2
    operations = positions * position_flops(width, layers)
    block = BLOCK + NORMS * model.qk_norm
    scale = layers * width * element
    return Work(OUTSIDE + layers * block, operations, products * scale + matrices * element, other * scale)


def position_flops(width: int, layers: int) -> int:
    """Return the FLOPs of a step for one position, two per multiply-add. Excludes the text, which is computed once."""
    linear = 4 * width**2 + 2 * (HEAD_DIM + 1) * width
    cross = 2 * width**2 + 2 * MAX_TOKENS * width
    inner = int(2.5 * width)
    # The first two convolutions of the feed-forward, then the third one.
    forward = width * 2 * inner + 2 * inner * 9 + inner * width
    return 2 * (layers * (linear + cross + forward) + 2 * CHANNELS * width)
