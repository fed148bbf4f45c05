"""How an image is decoded, and the bytes that takes: counted from the shapes, before anything is allocated.

Bytes are those beyond weights, latents and output. Measured against real decodes in benchmarks/decode.json, and counted
on accelerators in benchmarks/accelerator_counts.json. The workspace of an accelerator's convolutions is not in them:
cuDNN does with less where there is none, and whoever gives the budget leaves a part of the free memory.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch

from ..errors import InputError
from .row_partition import LARGEST_TENSOR
from .stages import Stages
from .strips import FEW_POSITIONS, PIECE, StripSize
from .workspace import COPIES, CPU_PIECE, LayerShape, WorkspaceSize, buffer_elements, piece_elements

UNBOUNDED = ("whole", "tiles")  # methods without a budget
METHODS = ("auto", "strips", "tiles", "whole")
LARGEST_BUDGET = 1024.0  # GB
# rows of pixels in a strip, the preferred first: on a CPU they should stay near its caches, on an accelerator kernels
# should be large
CPU_ROWS = (64, 32, 16, 8)
ACCELERATOR_ROWS = (256, 128, 64, 32, 16, 8)
# rows of latents that the attention stages take at a time, None for all of them at once: bit for bit the library's
# attention on the CPU; more rows than these take as long there, and memory that an allocator keeps
CPU_ATTENTION_ROWS = (None, PIECE)
# of latents, up to which all rows at once are the fastest on a CPU: at 512 px, but not at 1024 px (decode.json)
WHOLE_ATTENTION_CELLS = 512
ACCELERATOR_ATTENTION_ROWS = (16, 8, 4, PIECE)
# the library's attention stage and the whole local stage hold so many times the stage's, or the finest stage's, map
UNDIVIDED_ATTENTION = 25
UNDIVIDED_LOCAL = {torch.float32: 5.1, torch.bfloat16: 6.0, torch.float16: 6.0}
UNDIVIDED_SHUFFLE = {torch.float32: 4.5, torch.bfloat16: 6.0, torch.float16: 6.0}
# the first map of a decoder without attention, with what it is made of
FIRST_MAPS = 3
# on a CPU, what oneDNN makes once: code and buffers, beside a few small tensors
ONCE = 15 * 10**6
ALIGNED = 64  # elements
MEBIBYTE = 2**20


@dataclass(frozen=True)
class Plan:
    """What `method` does, and its predicted peak."""

    method: str
    rows: int = 0  # of the boundary map, completed by one strip
    columns: int | None = None  # of the boundary map, in one panel; None for all
    attention_rows: int | None = None  # of latents, at a time; None for all
    tile: int = 0  # rows and columns of latents
    overlap: int = 0
    peak_bytes: int = 0
    workspace: WorkspaceSize = WorkspaceSize(0, 0, 0)
    largest: int = 0  # elements of the largest tensor

    @property
    def strip(self) -> StripSize:
        return StripSize(self.rows, self.columns)

    def words(self, stages: Stages) -> str:
        """Return the plan as a person reads it."""
        if self.method == "whole":
            return "whole"
        if self.method == "tiles":
            return f"tiles of {self.tile * stages.downscale} px, overlapping by {self.overlap * stages.downscale} px"
        width = "" if self.columns is None else f", {self.columns * stages.stride} px wide"
        strips = f"strips of {self.rows * stages.stride} px{width}"
        if not stages.attends:
            return strips
        attention = "whole" if self.attention_rows is None else f"{self.attention_rows} latent rows at a time"
        return f"{strips}; attention {attention}"

    def report(self, stages: Stages) -> dict[str, object]:
        """Return what the report of a decode says of the plan."""
        return {"method": self.method, "plan": self.words(stages), "predicted_bytes": self.peak_bytes}


class Demand(NamedTuple):
    """What a stage needs, in elements: in each buffer of the workspace, kept in it, beside it, the largest tensor."""

    buffer: int
    kept: int
    beside: float
    largest: int


def layer_shapes(stages: Stages) -> list[LayerShape]:
    """Return the shapes of the layers between the boundary map and the pixels, in the order in which they run."""
    # an empty stage has only what makes RGB of the coarser one, or makes that of RGB
    widths = [width if layers else 3 for width, layers in zip(stages.widths, stages.layers, strict=True)]
    shapes = [LayerShape(widths[0], 3, 3, carried=2)] if stages.layers[0] else []
    for stage, (inner, outer) in enumerate(itertools.pairwise([*widths[: stages.local], stages.boundary_width])):
        shapes += [LayerShape(inner, inner, inner, carried=4)] * stages.layers[stage]
        if stage == stages.boundary_stage:
            break
        if stages.encodes:
            shapes.append(LayerShape(inner, outer, outer, 0.5, 3))
        else:
            made, carried = (4 * inner, 2) if stages.shuffles else (inner, 1)
            shapes.append(LayerShape(outer, inner, made, 2, carried, not stages.shuffles))
    if not stages.encodes:
        shapes.reverse()
    elif stages.layers[0]:
        shapes[0] = LayerShape(3, widths[0], widths[0], carried=2)
    return shapes


def local_demand(
    stages: Stages, height: int, width: int, strip: StripSize, accelerator: bool, buffer: int = 0
) -> Demand:
    """Return what the local layers need for a boundary map of `height` x `width`, in buffers of `buffer` or more.

    Each panel has a halo on both sides, and carries rows of its own.
    """
    panels, panel = 1, width
    if strip.columns is not None:
        panels, panel = -(-width // strip.columns), min(width, strip.columns + 2 * stages.halo)
    rows = stages.strip_rows(min(strip.rows, height))
    pixels = 2 * 3 * rows * stages.stride * width * stages.stride
    if stages.encodes:
        rows, panel, pixels = (rows + 1) * stages.stride + stages.rows_above, panel * stages.stride, 0
    shapes, passing, carried = layer_shapes(stages), 0, 0
    buffer = max(buffer, buffer_elements(shapes, stages.rows_above, rows, panel))
    for shape in shapes:
        passing = max(passing, shape.passing(rows, panel, piece_elements(buffer, accelerator), accelerator))
        carried += shape.carried * shape.inner * panel
        rows, panel = int(rows * shape.scale), int(panel * shape.scale)
    return Demand(buffer, panels * carried, passing + pixels, 2 * buffer + panels * carried)


def global_demand(stages: Stages, height: int, width: int, rows: int | None, item: int, accelerator: bool) -> Demand:
    """Return what the attention stages need for a boundary map of `height` x `width`, `rows` rows at a time."""
    buffer, beside, largest = 0, 0.0, 0
    if not stages.attends:
        return Demand(0, 0, 0, stages.boundary_width * height * width)
    for stage in range(stages.local, len(stages.widths)):
        channels, step = stages.widths[stage], 2 ** (stage - stages.local)
        h, w = height // step, width // step
        high = min(h, max((rows or PIECE) * stages.downscale // 2**stage, 0 if rows else -(-FEW_POSITIONS // w)))
        row, whole, own = channels * w, channels * h * w, 1 if stages.encodes else 2
        windows = [8 * (high + 6) * row, 2 * (h + 6) * row if rows is None else 0]
        # of a strip, and of the map that it is upsampled to
        layer = own * (stages.rows_above + own * high + 2) * row
        buffer = max(buffer, -(-max(windows) // 2), layer)
        # the map, which a block changes in place
        summed = (h if rows is None else high) * row
        # with the weights of key and value in one
        held = attention_elements(stages.scales, summed, (high + 3) * row, item, accelerator) + 2 * channels**2
        beside = max(beside, whole + held)
        largest = max(largest, *windows)
    # rows of keys, values, queries, and of what is gated
    return Demand(buffer, 24 * stages.boundary_width * width, beside, largest)


def resampled_elements(stages: Stages, height: int, width: int, rows: int, buffer: int, accelerator: bool) -> int:
    """Return what is held beside a workspace of two `buffer`s while a map of the attention stages changes its
    resolution: the map of either, and what the convolution makes at once. Other arguments are as in `global_demand`."""
    most, piece = 0, piece_elements(buffer, accelerator)
    for stage in range(stages.local, len(stages.widths) - 1):
        fine, coarse = stages.widths[stage : stage + 2]
        step, high = 2 ** (stage - stages.local), rows * stages.downscale // 2**stage
        h, w = height // step, width // step
        maps = fine * h * w + coarse * (h // 2) * (w // 2)
        if stages.encodes:
            passing = LayerShape(fine, coarse, coarse, 0.5).passing(high, w, piece, accelerator)
        else:
            shape = LayerShape(coarse, fine, fine, 2, interpolates=not stages.shuffles)
            passing = shape.passing(high, w // 2, piece, accelerator)
        most = max(most, maps + passing)
    return most


def attention_elements(scales: int, summed: int, strip: int, item: int, accelerator: bool) -> float:
    """Return what a block holds beside its map and the workspace, of which it sums `summed` elements at once, and takes
    `strip` then."""
    fp32 = 4 / item
    # of each further scale keys and values; one scale's in fp32, and its values with a row of ones
    sums = summed * (2 * (scales - 1) + (1 if fp32 == 1 and not accelerator else 3) * fp32)
    if accelerator:
        # queries and what comes of them, of all scales in fp32; or what is gated
        return max(sums, strip * max(1 + 2.03 * scales * fp32, 7))
    piece = min(8 * strip, CPU_PIECE)
    return max(sums + piece, 6 * strip, 3 * strip + 1.7 * piece)


def whole_demand(stages: Stages, height: int, width: int, dtype: torch.dtype, accelerator: bool) -> Demand:
    """Return what the undivided decode needs for a boundary map of `height` x `width`."""
    pixels = height * width * stages.stride**2
    if stages.shuffles and not stages.layers[0]:
        # the finest map, at half the resolution, is what the last upsampling makes too
        finest = stages.widths[1] * pixels / 4
        pairs = zip(stages.widths[1:], stages.widths[2:], strict=False)
        weights = 0 if accelerator else max(9 * COPIES * above * 4 * channels for channels, above in pairs)
        return Demand(0, 0, max(UNDIVIDED_SHUFFLE[dtype] * finest, weights), int(finest))
    finest = stages.widths[0] * pixels
    attention = UNDIVIDED_ATTENTION * stages.boundary_width * height * width if stages.attends else 0
    return Demand(0, 0, max(UNDIVIDED_LOCAL[dtype] * finest, attention), stages.widths[1] * pixels)


class Planner:
    """Plans for one image of `height` x `width` rows and columns of latents, the fastest first.

    With `same_bits` a plan that gives the library's bits goes before a faster one. Of several devices that share a
    image out, each needs no more than one alone.
    """

    def __init__(
        self,
        stages: Stages,
        height: int,
        width: int,
        dtype: torch.dtype,
        accelerator: bool,
        same_bits: bool = False,
    ) -> None:
        self.stages, self.dtype, self.accelerator = stages, dtype, accelerator
        self.whole_attention = same_bits or height * width <= WHOLE_ATTENTION_CELLS
        self.height, self.width = height * stages.scale, width * stages.scale

    def strips(self, max_bytes: float) -> Plan:
        """Return the best plan in strips within `max_bytes`. Raises InputError if none is."""
        plan = self.fitting(max_bytes)
        if plan is None:
            floor = self.floor().peak_bytes
            megabytes = -(-floor // MEBIBYTE)
            raise InputError(
                f"max_bytes: got {max_bytes:.0f}, expected at least {floor} for an image of "
                f"{self.width * self.stages.stride} x {self.height * self.stages.stride}; use {megabytes} MiB or more"
            )
        return plan

    def fitting(self, max_bytes: float) -> Plan | None:
        return next((plan for plan in self.plans() if plan.peak_bytes <= max_bytes), None)

    def floor(self) -> Plan:
        """Return the fastest of the plans that need the least."""
        return min(self.plans(), key=lambda plan: plan.peak_bytes)

    def plans(self) -> Iterator[Plan]:
        """Yield all plans in strips, the fastest first."""
        own = CPU_ATTENTION_ROWS if self.whole_attention else CPU_ATTENTION_ROWS[1:]
        heads = ACCELERATOR_ATTENTION_ROWS if self.accelerator else own
        sizes = list(self.strip_sizes())
        # large strips go before much attention at once, but for the library's bits
        pairs = itertools.product(sizes, heads) if self.accelerator else ((b, a) for a in heads for b in sizes)
        found = (self.of(strip, head) for strip, head in pairs)
        yield from (plan for plan in found if plan.largest < LARGEST_TENSOR)

    def of(self, strip: StripSize, attention_rows: int | None) -> Plan:
        """Return the plan of strips of that size, whose attention takes `attention_rows` rows of latents at a time."""
        size, item = (self.stages, self.height, self.width), self.dtype.itemsize
        first = global_demand(*size, attention_rows, item, self.accelerator)
        last = local_demand(*size, strip, self.accelerator, first.buffer)
        boundary = self.stages.boundary_width * self.height * self.width
        # both buffers begin where vectors of any type do
        workspace = WorkspaceSize(
            -(-last.buffer // ALIGNED) * ALIGNED, max(first.kept, last.kept), self.stages.rows_above
        )
        resampled = resampled_elements(*size, attention_rows or PIECE, workspace.buffer, self.accelerator)
        elements = 2 * workspace.buffer + workspace.kept + max(first.beside, resampled, boundary + last.beside)
        if not self.stages.attends:
            # before there is a workspace
            elements = max(elements, FIRST_MAPS * boundary)
        peak = int(elements * item) + (0 if self.accelerator else ONCE)
        largest = max(first.largest, last.largest)
        sizes = strip.rows, strip.columns, attention_rows
        return Plan("strips", *sizes, peak_bytes=peak, workspace=workspace, largest=largest)

    def strip_sizes(self) -> Iterator[StripSize]:
        """Yield what strips may be, the fastest first."""
        pixels = ACCELERATOR_ROWS if self.accelerator else CPU_ROWS
        least = self.stages.strip_rows(1)
        options = [size // self.stages.stride for size in pixels if size >= least * self.stages.stride]
        columns: int | None = None
        while True:
            yield from (StripSize(rows, columns) for rows in (options if columns is None else options[-4:]))
            columns = (columns or self.width) // 2
            if columns < 2 * self.stages.halo:
                return

    def whole(self) -> Plan:
        """Return the undivided plan. Raises InputError where a tensor of it has 2^31 elements."""
        demand = whole_demand(self.stages, self.height, self.width, self.dtype, self.accelerator)
        if demand.largest >= LARGEST_TENSOR:
            raise InputError(
                f"method: got whole, which makes a tensor of {int(demand.largest)} elements for this image, expected "
                f"fewer than {LARGEST_TENSOR}; use strips, which gives the same pixels"
            )
        return Plan("whole", peak_bytes=int(demand.beside * self.dtype.itemsize))

    def tiles(self, tile: int, overlap: int) -> Plan:
        """Return the plan of tiles of `tile` rows and columns of latents."""
        h, w = (min(side, tile * self.stages.scale) for side in (self.height, self.width))
        demand = whole_demand(self.stages, h, w, self.dtype, self.accelerator)
        # a row of tiles is added up in fp32
        band = 3 * h * self.width * self.stages.stride**2 * 4
        return Plan("tiles", tile=tile, overlap=overlap, peak_bytes=int(demand.beside * self.dtype.itemsize + band))


def smaller(planner: Planner, plan: Plan) -> Plan | None:
    """Return a plan with half the budget of `plan`, at least the floor; None if `plan` is that already."""
    floor = planner.floor()
    if plan.peak_bytes <= floor.peak_bytes:
        return None
    return planner.fitting(max(plan.peak_bytes // 2, floor.peak_bytes)) or floor
