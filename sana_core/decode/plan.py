"""Plans of a decode, and their memory, computed from the shapes before anything is allocated.

Byte counts exclude weights, latents and output, and cuDNN's workspace. Leave some free memory when you choose a budget.
benchmarks/decode.json compares the counts with real decodes, and benchmarks/accelerator_counts.json with the
allocations on accelerators.
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
# Rows of pixels in a strip, the preferred first. On a CPU a strip should fit into the caches. On an accelerator kernels
# should be large.
CPU_ROWS = (64, 32, 16, 8)
ACCELERATOR_ROWS = (256, 128, 64, 32, 16, 8)
# Rows of latents that the attention stages process at a time. None: one attention sum over all rows, which is
# bit-identical to diffusers on a CPU. More rows than PIECE take more memory there and are not faster.
CPU_ATTENTION_ROWS = (None, PIECE)
# Up to this number of latent cells, None is the fastest on a CPU: at 512 px, but not at 1024 px (decode.json).
WHOLE_ATTENTION_CELLS = 512
ACCELERATOR_ATTENTION_ROWS = (16, 8, 4, PIECE)
# Memory of an undivided decode, as a multiple of one map: the boundary map for the attention stages, and the finest map
# for the local stages.
UNDIVIDED_ATTENTION = 25
UNDIVIDED_LOCAL = {torch.float32: 5.1, torch.bfloat16: 6.0, torch.float16: 6.0}
UNDIVIDED_SHUFFLE = {torch.float32: 4.5, torch.bfloat16: 6.0, torch.float16: 6.0}
# Decoders without attention: memory of the first map and its inputs, as a multiple of the map.
FIRST_MAPS = 3
# CPU only: bytes of oneDNN's code and buffers, and of a few small tensors.
ONCE = 15 * 10**6
ALIGNED = 64  # elements
MEBIBYTE = 2**20


@dataclass(frozen=True)
class Plan:
    """A plan of `method`, and its predicted peak of memory."""

    method: str
    # Rows of the boundary map per strip.
    rows: int = 0
    # Columns of the boundary map per panel. None: all.
    columns: int | None = None
    # Rows of latents that the attention processes at a time. None: one sum over all rows.
    attention_rows: int | None = None
    # Rows and columns of latents per tile, and their overlap.
    tile: int = 0
    overlap: int = 0
    peak_bytes: int = 0
    workspace: WorkspaceSize = WorkspaceSize(0, 0, 0)
    # Elements of the largest tensor.
    largest: int = 0

    @property
    def strip(self) -> StripSize:
        return StripSize(self.rows, self.columns)

    def words(self, stages: Stages) -> str:
        """Return the plan as text for the user."""
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
        """Return the entries of a decode's report about the plan."""
        return {"method": self.method, "plan": self.words(stages), "predicted_bytes": self.peak_bytes}


class Demand(NamedTuple):
    """The memory that a stage needs, in elements."""

    buffer: int  # size of each of the workspace's two buffers
    kept: int  # in the part of the workspace that keeps rows between strips
    beside: float  # outside the workspace
    largest: int  # the largest tensor


def layer_shapes(stages: Stages) -> list[LayerShape]:
    """Return the shapes of the layers between the boundary map and the pixels, in the order in which they run."""
    # An empty stage has only the convolution between RGB and the coarser stage.
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
    """Return the memory of the local layers for a boundary map of `height` x `width`. `buffer`: smallest buffer size.

    Each panel has a halo on both sides and keeps its own rows between strips.
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
    """Return the memory of the attention stages for a boundary map of `height` x `width`.

    `rows`: rows of latents at a time, or None. `item`: bytes of an element.
    """
    buffer, beside, largest = 0, 0.0, 0
    if not stages.attends:
        return Demand(0, 0, 0, stages.boundary_width * height * width)
    for stage in range(stages.local, len(stages.widths)):
        channels, step = stages.widths[stage], 2 ** (stage - stages.local)
        h, w = height // step, width // step
        high = min(h, max((rows or PIECE) * stages.downscale // 2**stage, 0 if rows else -(-FEW_POSITIONS // w)))
        row, whole, own = channels * w, channels * h * w, 1 if stages.encodes else 2
        windows = [8 * (high + 6) * row, 2 * (h + 6) * row if rows is None else 0]
        # A strip, and the map that it is upsampled to.
        layer = own * (stages.rows_above + own * high + 2) * row
        buffer = max(buffer, -(-max(windows) // 2), layer)
        # The blocks change the map in place.
        summed = (h if rows is None else high) * row
        # The last term is the joined weights of key and value.
        held = attention_elements(stages.scales, summed, (high + 3) * row, item, accelerator) + 2 * channels**2
        beside = max(beside, whole + held)
        largest = max(largest, *windows)
    # `kept`: rows of keys, values and queries, and of the gated feed-forward.
    return Demand(buffer, 24 * stages.boundary_width * width, beside, largest)


def resampled_elements(stages: Stages, height: int, width: int, rows: int, buffer: int, accelerator: bool) -> int:
    """Return the elements outside the workspace while a map of the attention stages changes its resolution.

    These are the maps of both resolutions and the temporary tensors of the convolution. `buffer`: elements of each of
    the workspace's two buffers.
    """
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
    """Return the elements that an attention block holds outside its map and the workspace.

    It sums `summed` elements at once, and then computes its output for `strip` elements at a time.
    """
    fp32 = 4 / item
    # Keys and values of each further scale. One scale is in fp32, and its values have a row of ones.
    sums = summed * (2 * (scales - 1) + (1 if fp32 == 1 and not accelerator else 3) * fp32)
    if accelerator:
        # Queries and outputs of all scales in fp32, or the gated feed-forward.
        return max(sums, strip * max(1 + 2.03 * scales * fp32, 7))
    piece = min(8 * strip, CPU_PIECE)
    return max(sums + piece, 6 * strip, 3 * strip + 1.7 * piece)


def whole_demand(stages: Stages, height: int, width: int, dtype: torch.dtype, accelerator: bool) -> Demand:
    """Return the memory of an undivided decode for a boundary map of `height` x `width`."""
    pixels = height * width * stages.stride**2
    if stages.shuffles and not stages.layers[0]:
        # The finest map has half the image's resolution. The last upsampling also has a map of this size.
        finest = stages.widths[1] * pixels / 4
        pairs = zip(stages.widths[1:], stages.widths[2:], strict=False)
        weights = 0 if accelerator else max(9 * COPIES * above * 4 * channels for channels, above in pairs)
        return Demand(0, 0, max(UNDIVIDED_SHUFFLE[dtype] * finest, weights), int(finest))
    finest = stages.widths[0] * pixels
    attention = UNDIVIDED_ATTENTION * stages.boundary_width * height * width if stages.attends else 0
    return Demand(0, 0, max(UNDIVIDED_LOCAL[dtype] * finest, attention), stages.widths[1] * pixels)


class Planner:
    """Plans for one image of `height` x `width` rows and columns of latents, the fastest first.

    `same_bits`: prefer plans with the bits of diffusers to faster plans. If several devices share an image, each of
    them needs at most the memory of a single device.
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
        """Return the fastest plan in strips within `max_bytes`. Raises InputError if no plan fits."""
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
        """Return the plan with the smallest peak. Of several, it is the fastest."""
        return min(self.plans(), key=lambda plan: plan.peak_bytes)

    def plans(self) -> Iterator[Plan]:
        """Yield all plans in strips, the fastest first."""
        own = CPU_ATTENTION_ROWS if self.whole_attention else CPU_ATTENTION_ROWS[1:]
        heads = ACCELERATOR_ATTENTION_ROWS if self.accelerator else own
        sizes = list(self.strip_sizes())
        # Accelerators prefer large strips to more attention rows. CPUs prefer the attention with the bits of diffusers.
        pairs = itertools.product(sizes, heads) if self.accelerator else ((b, a) for a in heads for b in sizes)
        found = (self.of(strip, head) for strip, head in pairs)
        yield from (plan for plan in found if plan.largest < LARGEST_TENSOR)

    def of(self, strip: StripSize, attention_rows: int | None) -> Plan:
        """Return the plan for strips of this size. `attention_rows`: rows of latents that attention takes at a time."""
        size, item = (self.stages, self.height, self.width), self.dtype.itemsize
        first = global_demand(*size, attention_rows, item, self.accelerator)
        last = local_demand(*size, strip, self.accelerator, first.buffer)
        boundary = self.stages.boundary_width * self.height * self.width
        # Round up, so that both buffers are aligned for vectors.
        workspace = WorkspaceSize(
            -(-last.buffer // ALIGNED) * ALIGNED, max(first.kept, last.kept), self.stages.rows_above
        )
        resampled = resampled_elements(*size, attention_rows or PIECE, workspace.buffer, self.accelerator)
        elements = 2 * workspace.buffer + workspace.kept + max(first.beside, resampled, boundary + last.beside)
        if not self.stages.attends:
            # These maps exist before the workspace.
            elements = max(elements, FIRST_MAPS * boundary)
        peak = int(elements * item) + (0 if self.accelerator else ONCE)
        largest = max(first.largest, last.largest)
        sizes = strip.rows, strip.columns, attention_rows
        return Plan("strips", *sizes, peak_bytes=peak, workspace=workspace, largest=largest)

    def strip_sizes(self) -> Iterator[StripSize]:
        """Yield the possible sizes of strips, the fastest first."""
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
        """Return the undivided plan. Raises InputError if it has a tensor of 2^31 elements or more."""
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
        # A row of tiles is blended in fp32.
        band = 3 * h * self.width * self.stages.stride**2 * 4
        return Plan("tiles", tile=tile, overlap=overlap, peak_bytes=int(demand.beside * self.dtype.itemsize + band))


def smaller(planner: Planner, plan: Plan) -> Plan | None:
    """Return a plan with half the budget of `plan`, but at least the floor. None if `plan` is already the floor."""
    floor = planner.floor()
    if plan.peak_bytes <= floor.peak_bytes:
        return None
    return planner.fitting(max(plan.peak_bytes // 2, floor.peak_bytes)) or floor
