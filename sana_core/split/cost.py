"""Predicts how long a step takes on one device and on several that share it.

H100 SXM: measured on one GPU (benchmarks/gpu/nvidia-h100-80gb-hbm3.json). A product of bf16 reaches 735 TFLOP/s, of 989
published. A step of the 1.6B model at 4096 px takes 172 ms, so the kernels between the products move their 55 GB at
1.13 TB/s, of 3.35 published. With these two rates, the 10.7 ms that the kernels of a step take at 1024 px are 10.7 here
too. That step spends 12.1 ms in Python, 42 us for each of its 287 launches. NVLink: 900 GB/s in both directions
together (NVIDIA H100 data sheet).
RTX 4090: published, 165 TFLOP/s dense in bf16 with fp32 sums and 1008 GB/s (NVIDIA Ada whitepaper). The time of a
launch is the one of the H100's machine. Without peer access a copy goes through the host's memory, twice over PCIe: 4.0
with 8 lanes has 15.75 GB/s (PCI-SIG), so half of that.
The latency of a link is assumed, with its launch and the meeting of the threads. Launches and bytes are those of the
fused kernels, compared with tests/fake_accelerator.py.
"""

from __future__ import annotations

from typing import NamedTuple

from ..errors import InputError
from ..kernels.bands import divide_rows
from ..model.known_models import HEAD_DIM, MAX_TOKENS, VARIANTS, Architecture
from ..model.latents import CHANNELS, DOWNSCALE, check_side
from ..model.row_shards import find_groups

EXCHANGES = 2  # in a block
# of the float64 that are summed
SUM_BYTES = 8
# below this it is not worth two GPUs' memory
LEAST_GAIN = 1.2
# launches outside the blocks and in one; of a norm; and in a block of a shard, besides one for each other member
OUTSIDE, BLOCK, NORMS, SHARDED = 27, 13, 3, 4


class Link(NamedTuple):
    """What devices hand each other tensors by: bytes a second into each, and seconds for one exchange."""

    bandwidth: float
    latency: float


class GpuSpeed(NamedTuple):
    """Speed of one device."""

    tflops: float  # TFLOP/s of a product of matrices
    bandwidth: float  # bytes a second of the kernels between the products
    launch: float  # seconds of Python for a launch


LINKS = {"nvlink": Link(450e9, 10e-6), "pcie": Link(15.75e9 / 2, 50e-6)}
GPU_SPEEDS = {"nvlink": GpuSpeed(735.0, 1.13e12, 42e-6), "pcie": GpuSpeed(165.0, 1.008e12, 42e-6)}


class Work(NamedTuple):
    """What one device does in a step."""

    launches: int
    operations: float
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
    """A step of one image on several devices, in groups that compute equal parts of its passes. `sum_bytes` and
    `row_bytes` are those of one block: what a device brings of the sums, and one row for a neighbour."""

    devices: int
    groups: int
    exchanges: int  # in a step
    sum_bytes: int
    row_bytes: int
    launches_alone: int
    launches: int  # of each device
    moved_alone: float  # bytes of its memory
    moved: float
    alone: float  # seconds of a step on one device
    computing: float  # seconds on each of several, in threads of one process, with the rows that two compute
    exchanging: float  # seconds

    @property
    def gain(self) -> float:
        """How many times as fast as one device they are."""
        return self.alone / (self.computing + self.exchanging)


def split_cost(
    variant: str, size: tuple[int, int], devices: int, gpu: GpuSpeed, link: Link, passes: int = 2, element: int = 2
) -> Cost:
    """Return the cost of a step with so many `passes`, 2 where it is guided, in numbers of `element` bytes.

    `size` is width and height in pixels, `gpu` each of the devices. Raises InputError for sides that are not multiples
    of 32, and more devices than rows.
    """
    for field, side in zip(("width", "height"), size, strict=True):
        check_side(field, side)
    columns, rows = (side // DOWNSCALE for side in size)
    if not 1 < devices <= rows:
        raise InputError(f"split: got {devices}, expected from 2 to {rows}, the rows of 32 pixels of the image")
    model = VARIANTS[variant]
    groups = find_groups(passes, [1.0] * devices)
    members, own = devices // groups, passes // groups
    sums = row = exchanges = 0
    # the velocities, on the first device at the end
    exchanging = link.latency + passes * columns * rows * CHANNELS * element / link.bandwidth
    if members > 1:
        exchanges, sums = EXCHANGES * model.layers, sum_bytes(model, own)
        row = own * columns * model.width * element
        block = link.latency * EXCHANGES + ((members - 1) * sums + neighbours(members) * row) / link.bandwidth
        exchanging += model.layers * block
    whole = work_of(model, columns, rows, passes, 1, element)
    each = work_of(model, columns, -(-rows // members), own, members, element)
    counts = whole.launches, each.launches, whole.moved, each.moved
    seconds = whole.seconds(gpu, 1), each.seconds(gpu, devices)
    return Cost(devices, groups, exchanges + 1, sums, row, *counts, *seconds, exchanging)


def neighbours(members: int) -> int:
    """Return how many rows of others a member computes too, at most."""
    return min(2, members - 1)


def work_of(model: Architecture, columns: int, rows: int, passes: int, members: int, element: int) -> Work:
    """Return what one of so many `members` does for its `rows` of a step's `passes`.

    Maps are counted in the model's width: what each operation of a block reads and writes.
    """
    width, layers = model.width, model.layers
    own, window = passes * columns * rows, passes * columns * (rows + neighbours(members))
    # query, key and value 4, their sums 2 and outputs 2, the other products of attention 2 each and its softmax 2, the
    # feed-forward's last 3.5, and its first 6 with the neighbours' rows
    products = 19.5 * own + 6 * window
    # The three norms and gates move 11. The depthwise writes 2.5 and reads 5, and the rows at a border of bands twice.
    bands, _ = divide_rows(passes, rows, columns, int(2.5 * width))
    others = (13.5 + 2 * NORMS * model.qk_norm) * own + 5 * (window + 2 * (bands - 1) * passes * columns)
    sums = 0
    if members > 1:
        # the rows together with the neighbours'
        others += 2 * window
        # A member writes its sums, reads the total, and for each other member writes a copy and adds it.
        sums = (2 + 4 * (members - 1)) * layers * sum_bytes(model, passes)
    matrices = layers * (13.5 * width + 2 * passes * MAX_TOKENS) * width + 7 * width**2
    operations = own * position_flops(width, layers) + (window - own) * layers * hidden_flops(width)
    block = BLOCK + NORMS * model.qk_norm + (SHARDED + members - 1 if members > 1 else 0)
    scale = layers * width * element
    return Work(OUTSIDE + layers * block, operations, products * scale + matrices * element, others * scale + sums)


def sum_bytes(model: Architecture, passes: int) -> int:
    """Return the bytes of the sums of one block."""
    return passes * (model.width // HEAD_DIM) * HEAD_DIM * (HEAD_DIM + 1) * SUM_BYTES


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
