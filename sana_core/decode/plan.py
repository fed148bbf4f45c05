"""How a picture is decoded, and the bytes that takes: counted from the shapes, before anything is allocated.

Bytes are those beyond weights, latents and output. Measured against real decodes in benchmarks/decode.json, and counted
on accelerators in benchmarks/accelerator_counts.json. The workspace of an accelerator's convolutions is not in them:
cuDNN does with less where there is none, and whoever gives the budget leaves a part of the free memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from ..errors import InputError
from .row_partition import LARGEST_TENSOR
from .stages import Stages
from .streaming import chunks
from .strips import PIECE, StripSize

METHODS = ("auto", "strips", "tiles", "whole")
# rows of pixels in a strip, the preferred first: on a CPU they should stay near its caches, on an accelerator kernels
# should be large
CPU_ROWS = (64, 32, 16, 8)
ACCELERATOR_ROWS = (256, 128, 64, 32, 16, 8)
# rows of latents that the attention stages take at a time, None for all of them at once: bit for bit the library's
# attention on the CPU; more rows than 4 take more memory there and as long
CPU_ATTENTION_ROWS = (None, 4, PIECE)
# of latents, up to which all rows at once are the fastest on a CPU: at 512 px, but not at 1024 px (decode.json)
WHOLE_ATTENTION_CELLS = 512
ACCELERATOR_ATTENTION_ROWS = (16, 8, 4, PIECE)
# what oneDNN keeps of reordered weights on the CPU beside a convolution: its own twice, and of smaller ones what the
# layers before have left, so many times its own
COPIES, REORDERED, SMALL_CONV = 2, 6.5, 512 * 512
# the library's attention stage and the whole local stage hold so many times the stage's, or the finest stage's, map
UNDIVIDED_ATTENTION = 25
UNDIVIDED_LOCAL = {torch.float32: 5.1, torch.bfloat16: 6.0, torch.float16: 6.0}
UNDIVIDED_SHUFFLE = {torch.float32: 4.5, torch.bfloat16: 6.0, torch.float16: 6.0}
# the first map of a decoder without attention, with what it is made of
FIRST_MAPS = 3
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


@dataclass(frozen=True)
class Demand:
    """The most bytes alive at once, and the elements of the largest tensor."""

    size: float
    largest: float


def weights_demand(inner: int, outer: int, accelerator: bool) -> float:
    """Return the elements that a convolution of 3 x 3 needs beside its weights."""
    return 0 if accelerator else 9 * max(COPIES * inner * outer, REORDERED * min(inner * outer, SMALL_CONV))


def local_demand(
    stages: Stages,
    width: int,
    rows: int,
    item: int,
    accelerator: bool,
    panels: int = 1,
    height: int | None = None,
    above: int = 0,
) -> Demand:
    """Return what the local layers need for strips of `rows` rows of a boundary map of `height` rows, None for many.

    Each of `panels` beside each other is `width` columns wide, and carries rows of its own. `above` are rows of the
    map that are read for those below them alone.
    """
    # the first strip reads the halo too
    first = above + rows + stages.halo
    if height is not None and height <= first:
        demands = [strip_demand(stages, width, height, 0, item, accelerator, panels)]
    else:
        demands = [strip_demand(stages, width, first, -1, item, accelerator, panels)]
    if height is not None and height > first:
        last = (height - first - 1) % rows + 1
        demands.append(strip_demand(stages, width, last, 1, item, accelerator, panels, rows))
    return Demand(max(one.size for one in demands), max(one.largest for one in demands))


def strip_demand(
    stages: Stages, width: int, rows: int, edge: int, item: int, accelerator: bool, panels: int, piece: int = 0
) -> Demand:
    """Return what the local layers need for a strip of `rows` rows of the boundary map.

    Every convolution makes a row less than it gets of the first strip, whose `edge` is -1, a row more of the last one,
    1, which goes on in pieces of `piece` rows as in strips.flow, and as many of one that is the whole picture, 0.
    """
    layers = [
        (stage, upsamples)
        for stage in reversed(range(stages.local))
        for upsamples in [True] * (stage < stages.boundary_stage) + [False] * stages.layers[stage]
    ]

    def largest_need(done: int, rows: int, columns: int, edge: int, piece: int) -> Demand:
        """Return what the layers behind the first `done` need, without what all of them carry, in elements."""
        if done == len(layers):
            return Demand(0, 0)
        stage, upsamples = layers[done]
        # an empty stage has only what makes RGB of the coarser one
        channels = stages.widths[stage] if stages.layers[stage] else 3
        if not upsamples:
            rows += 2 * edge
            # the window of each convolution, and what the second makes of its own
            need = 3 * channels * (rows + 3) * columns + weights_demand(channels, channels, accelerator)
            largest = 0
        else:
            above = stages.widths[stage + 1]
            if stages.shuffles:
                rows += edge
                window, out = above * (rows + 2) * columns, 4 * channels * rows * columns
                # the convolution beside the shortcut's rows, then what it makes beside what is shuffled out of that
                weights = weights_demand(above, 4 * channels, accelerator)
                need = max(window + window + out + weights, 2 * window + 2 * out)
                rows *= 2
            else:
                source, rows = above * rows * columns, 2 * rows + edge
                window, out = above * (rows + 2) * 2 * columns, channels * rows * 2 * columns
                need = source + window + out + weights_demand(above, channels, accelerator)
            largest = max(window, out)
            columns, piece = 2 * columns, 2 * piece
        parts, waiting = {(rows, edge)}, 0
        if edge == 1 and 2 * rows > 3 * piece:
            parts, waiting = {(piece, 0), ((rows - 1) % piece + 1, 1)}, channels * rows * columns
        rest = [largest_need(done + 1, part, columns, side, piece) for part, side in parts]
        return Demand(max(need, waiting + max(one.size for one in rest)), max(largest, *(one.largest for one in rest)))

    carried, columns = 0, width
    for stage, upsamples in layers:
        if upsamples:
            carried += (3 if stages.shuffles else 4) * stages.widths[stage + 1] * columns
            columns *= 2
        else:
            carried += 4 * stages.widths[stage] * columns
    found = largest_need(0, rows, width, edge, piece)
    return Demand((found.size + panels * carried) * item, found.largest)


def global_demand(stages: Stages, height: int, width: int, rows: int | None, item: int, accelerator: bool) -> Demand:
    """Return what the attention stages need for a boundary map of `height` x `width`, `rows` rows at a time."""
    most, largest = 0.0, 0.0
    if not stages.attends:
        elements = stages.boundary_width * height * width
        return Demand(FIRST_MAPS * elements * item, elements)
    for stage in range(stages.local, len(stages.widths)):
        channels, step = stages.widths[stage], 2 ** (stage - stages.local)
        h, w = height // step, width // step
        whole = channels * h * w
        if rows is None:
            most = max(most, UNDIVIDED_ATTENTION * whole * item)
            largest = max(largest, 8 * whole)
            continue
        # the map before and after a block, and the feed-forward's 8 times as many channels twice
        strip = channels * min(h, rows * stages.downscale // 2**stage + 4) * w
        feed_forward = (2 * whole + 19 * strip) * item
        # keys and values in two scales, projected and in fp32
        sums = whole * item + strip * (6 * item + 4 * stages.scales * 4)
        # the coarser map, upsampled
        most = max(most, feed_forward, sums)
        largest = max(largest, 8 * strip)
    return Demand(most, largest)


def whole_demand(stages: Stages, height: int, width: int, dtype: torch.dtype, accelerator: bool) -> Demand:
    """Return what the undivided decode needs for a boundary map of `height` x `width`."""
    item, pixels = dtype.itemsize, height * width * stages.stride**2
    if stages.shuffles and not stages.layers[0]:
        # the finest map, at half the resolution, is what the last upsampling makes too
        finest = stages.widths[1] * pixels / 4
        pairs = zip(stages.widths[1:], stages.widths[2:], strict=False)
        weights = 0 if accelerator else max(9 * COPIES * above * 4 * channels for channels, above in pairs)
        return Demand(max(UNDIVIDED_SHUFFLE[dtype] * finest, weights) * item, finest)
    finest = stages.widths[0] * pixels
    head = global_demand(stages, height, width, None, item, False)
    return Demand(max(UNDIVIDED_LOCAL[dtype] * finest * item, head.size), max(stages.widths[1] * pixels, head.largest))


class Planner:
    """Plans for one picture of `height` x `width` rows and columns of latents, the fastest first.

    With `same_bits` a plan that gives the library's bits goes before a faster one. Of several `devices` each decodes a
    band of the picture, and the bytes are those of one of them.
    """

    def __init__(
        self,
        stages: Stages,
        height: int,
        width: int,
        dtype: torch.dtype,
        accelerator: bool,
        same_bits: bool = False,
        devices: int = 1,
    ) -> None:
        self.stages, self.dtype, self.accelerator, self.devices = stages, dtype, accelerator, devices
        self.whole_attention = same_bits or height * width <= WHOLE_ATTENTION_CELLS
        self.height, self.width = height * stages.scale, width * stages.scale

    @property
    def boundary_bytes(self) -> int:
        """Bytes of the map that stays while the strips are made."""
        return self.stages.boundary_width * self.height * self.width * self.dtype.itemsize

    @property
    def bands(self) -> set[tuple[int, int]]:
        """Of the devices' bands of the boundary map: rows of the halo above, and rows with both halos."""
        halo, share = self.stages.halo, -(-self.height // self.devices)
        return {
            (min(top, halo), min(self.height, bottom + halo) - max(0, top - halo))
            for top, bottom in chunks(self.height, share)
        }

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
        head = next((pair for pair in self.global_options() if pair[1] <= max_bytes), None)
        tail = next((triple for triple in self.local_options() if triple[2] <= max_bytes), None)
        if head is None or tail is None:
            return None
        return Plan("strips", tail[0], tail[1], head[0], peak_bytes=int(max(head[1], tail[2])))

    def floor(self) -> Plan:
        """Return the fastest of the plans that need the least."""
        least = (min(size for _, size in self.global_options()), min(size for _, _, size in self.local_options()))
        plan = self.fitting(max(least))
        assert plan is not None  # these fit themselves
        return plan

    def global_options(self) -> Iterator[tuple[int | None, float]]:
        """Yield rows of latents for the attention stages, and the bytes they need, the best first."""
        own = CPU_ATTENTION_ROWS if self.whole_attention else CPU_ATTENTION_ROWS[1:]
        for rows in ACCELERATOR_ATTENTION_ROWS if self.accelerator else own:
            demand = global_demand(self.stages, self.height, self.width, rows, self.dtype.itemsize, self.accelerator)
            if demand.largest < LARGEST_TENSOR:
                yield rows, demand.size

    def local_options(self) -> Iterator[tuple[int, int | None, float]]:
        """Yield rows and columns of a strip, and the bytes it needs, the fastest first."""
        pixels = ACCELERATOR_ROWS if self.accelerator else CPU_ROWS
        options = [size // self.stages.stride for size in pixels if size >= self.stages.stride]
        columns: int | None = None
        while True:
            # a panel has a halo on both sides
            width = self.width if columns is None else min(self.width, columns + 2 * self.stages.halo)
            panels = 1 if columns is None else -(-self.width // columns)
            for rows in options if columns is None else options[-4:]:
                shape = self.stages, width, rows, self.dtype.itemsize, self.accelerator, panels
                demands = [local_demand(*shape, height, above) for above, height in self.bands]
                if max(demand.largest for demand in demands) < LARGEST_TENSOR:
                    yield rows, columns, self.boundary_bytes + max(demand.size for demand in demands)
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
        return Plan("whole", peak_bytes=int(demand.size))

    def tiles(self, tile: int, overlap: int) -> Plan:
        """Return the plan of tiles of `tile` rows and columns of latents."""
        h, w = (min(side, tile * self.stages.scale) for side in (self.height, self.width))
        demand = whole_demand(self.stages, h, w, self.dtype, self.accelerator)
        # a row of tiles is added up in fp32
        band = 3 * h * self.width * self.stages.stride**2 * 4
        return Plan("tiles", tile=tile, overlap=overlap, peak_bytes=int(demand.size + band))


def smaller(planner: Planner, plan: Plan) -> Plan | None:
    """Return a plan with half the budget of `plan`, at least the floor; None if `plan` is that already."""
    floor = planner.floor()
    if plan.peak_bytes <= floor.peak_bytes:
        return None
    return replace(planner.fitting(max(plan.peak_bytes // 2, floor.peak_bytes)) or floor)
