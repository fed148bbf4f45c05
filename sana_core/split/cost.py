"""Predicts how long a step takes on one device and on several that share it.

H100 SXM: measured on one GPU (benchmarks/gpu/nvidia-h100-80gb-hbm3.json). A product in bf16 reaches 735 TFLOP/s, of 989
published. A step of the 1.6B model at 4096 px takes 172 ms, so the kernels between the products move their 55 GB at
1.13 TB/s, of 3.35 published. With these two rates, the prediction for the kernels of a step at 1024 px is 10.7 ms,
which equals the measured time. NVLink: 900 GB/s for both directions together (NVIDIA H100 data sheet).
GeForce: published figures (NVIDIA Ada whitepaper), of which the H100's share of products is assumed. Without peer
access, a copy passes the host's memory and uses PCIe twice. PCIe 4.0 with 8 lanes has 15.75 GB/s (PCI-SIG), so a copy
has half of that.
Host: a launch took Python 42 us on one machine with an H100 (12.1 ms for the 287 launches of the 1.6B model at 1024 px)
and 87 us on another (34 ms for the 391 launches of the 0.6B model at 512 px). So a prediction has two values.
The latency of a link is an assumption. It includes the launch of the copy and the wait for the other threads. Launches
and bytes are counted for the fused kernels. Tests compare them with tests/fake_accelerator.py.
"""

from __future__ import annotations

from typing import NamedTuple

from ..errors import InputError
from ..kernels.bands import divide_rows
from ..model.known_models import HEAD_DIM, MAX_TOKENS, VARIANTS, Architecture
from ..model.latents import CHANNELS, DOWNSCALE, check_side
from ..model.row_shards import find_groups

# Exchanges in a block: the all-reduce and the halo.
EXCHANGES = 2
# Bytes of a float64, the dtype of the sums.
SUM_BYTES = 8
# A smaller gain is not worth the memory of two GPUs.
LEAST_GAIN = 1.2
# Kernel launches: outside the blocks, in a block, and of the norms of query and key in a block. A block of a shard has
# SHARDED more, and another one for each other member.
OUTSIDE, BLOCK, NORMS, SHARDED = 27, 13, 3, 4
# Seconds of Python for a launch, on a fast host and on a slow one.
LAUNCHES = (42e-6, 87e-6)
# The share of the published TFLOP/s that an H100 reaches in a product. GeForce GPUs are assumed to reach the same share
# of both published rates.
REACHED = 0.74


class Link(NamedTuple):
    """The connection between devices."""

    # Bytes per second into each device.
    bandwidth: float
    # Seconds of an exchange in addition to the copy.
    latency: float


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
LINKS = {"nvlink": Link(450e9, 10e-6), "pcie": Link(15.75e9 / 2, 50e-6)}
# The GPU of each link.
LINKED = {"nvlink": H100, "pcie": RTX_4090}


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

    def seconds(self, gpu: GpuSpeed, threads: int) -> float:
        """Return the time of the step. `threads` of one process launch in turn, because Python has one lock."""
        products = max(self.operations / (gpu.tflops * 1e12), self.product_bytes / gpu.bandwidth)
        return max(threads * self.launches * gpu.launch, products + self.other_bytes / gpu.bandwidth)


class Cost(NamedTuple):
    """The cost of a step of one image on several devices, compared with a single device ("alone")."""

    devices: int
    # Groups of devices. Each group computes an equal part of the passes.
    groups: int
    # Exchanges in a step.
    exchanges: int
    # Bytes that a device sends in a block: its sums, and one row for a neighbour.
    sum_bytes: int
    row_bytes: int
    # Launches of a single device, and of each of several.
    launches_alone: int
    launches: int
    # Bytes of memory that a single device moves, and each of several.
    moved_alone: float
    moved: float
    # Seconds of the step on a single device.
    alone: float
    # Seconds of the step on each of several devices, without the exchanges. They are threads of one process. The rows
    # at a border are computed by two devices, and counted for both.
    computing: float
    # Seconds of the exchanges.
    exchanging: float

    @property
    def gain(self) -> float:
        """The speed of the devices together, as a multiple of the speed of one."""
        return self.alone / (self.computing + self.exchanging)


def split_cost(
    variant: str, size: tuple[int, int], devices: int, gpu: GpuSpeed, link: Link, passes: int = 2, element: int = 2
) -> Cost:
    """Return the cost of a step of an image on `devices` devices.

    `size` is (width, height) in pixels. `gpu` is the speed of each device. `passes` is 2 with guidance, else 1.
    `element` is the size of a number in bytes. Raises InputError for sides that are not multiples of 32, and for more
    devices than rows.
    """
    for field, side in zip(("width", "height"), size, strict=True):
        check_side(field, side)
    columns, rows = (side // DOWNSCALE for side in size)
    if not 1 < devices <= rows:
        raise InputError(f"split: got {devices}, expected from 2 to {rows}, the rows of 32 pixels of the image")
    model = VARIANTS[variant]
    groups = find_groups(passes, [1.0] * devices)
    members, group_passes = devices // groups, passes // groups
    sums = row = exchanges = 0
    # At the end, the velocities are copied to the first device.
    exchanging = link.latency + passes * columns * rows * CHANNELS * element / link.bandwidth
    if members > 1:
        exchanges, sums = EXCHANGES * model.layers, sum_bytes(model, group_passes)
        row = group_passes * columns * model.width * element
        block = link.latency * EXCHANGES + ((members - 1) * sums + neighbours(members) * row) / link.bandwidth
        exchanging += model.layers * block
    alone = work_of(model, columns, rows, passes, 1, element)
    shared = work_of(model, columns, -(-rows // members), group_passes, members, element)
    counts = alone.launches, shared.launches, alone.moved, shared.moved
    seconds = alone.seconds(gpu, 1), shared.seconds(gpu, devices)
    return Cost(devices, groups, exchanges + 1, sums, row, *counts, *seconds, exchanging)


def neighbours(members: int) -> int:
    """Return the largest number of rows of other members that a member computes too."""
    return min(2, members - 1)


def work_of(model: Architecture, columns: int, rows: int, passes: int, members: int, element: int) -> Work:
    """Return the work of one of `members` members for its `rows` rows of a step with `passes` passes.

    The factors below count the maps of the model's width that the operations of a block read and write.
    """
    width, layers = model.width, model.layers
    positions, window = passes * columns * rows, passes * columns * (rows + neighbours(members))
    # Query, key and value move 4, their sums 2 and outputs 2. The other products of attention move 2 each, and the
    # softmax 2. The last product of the feed-forward moves 3.5. Its first product moves 6, also for the neighbours'
    # rows.
    products = 19.5 * positions + 6 * window
    # The three norms and gates move 11. The depthwise convolution writes 2.5 and reads 5. It reads the rows at the
    # border of two bands twice.
    bands, _ = divide_rows(passes, rows, columns, int(2.5 * width))
    other = (13.5 + 2 * NORMS * model.qk_norm) * positions + 5 * (window + 2 * (bands - 1) * passes * columns)
    sums = 0
    if members > 1:
        # Joining the rows with the neighbours' rows reads and writes one map.
        other += 2 * window
        # A member writes its sums, reads the total, and for each other member writes a copy and adds it.
        sums = (2 + 4 * (members - 1)) * layers * sum_bytes(model, passes)
    matrices = layers * (13.5 * width + 2 * passes * MAX_TOKENS) * width + 7 * width**2
    operations = positions * position_flops(width, layers) + (window - positions) * layers * hidden_flops(width)
    block = BLOCK + NORMS * model.qk_norm + (SHARDED + members - 1 if members > 1 else 0)
    scale = layers * width * element
    return Work(OUTSIDE + layers * block, operations, products * scale + matrices * element, other * scale + sums)


def sum_bytes(model: Architecture, passes: int) -> int:
    """Return the bytes of the sums of one block."""
    return passes * (model.width // HEAD_DIM) * HEAD_DIM * (HEAD_DIM + 1) * SUM_BYTES


def position_flops(width: int, layers: int) -> int:
    """Return the FLOPs of a step for one position, two per multiply-add. Excludes the text, which is computed once."""
    linear = 4 * width**2 + 2 * (HEAD_DIM + 1) * width
    cross = 2 * width**2 + 2 * MAX_TOKENS * width
    inner = int(2.5 * width)
    forward = hidden_flops(width) // 2 + inner * width
    return 2 * (layers * (linear + cross + forward) + 2 * CHANNELS * width)


def hidden_flops(width: int) -> int:
    """Return the FLOPs of the first two convolutions of a feed-forward for one position."""
    inner = int(2.5 * width)
    return 2 * (width * 2 * inner + 2 * inner * 9)
