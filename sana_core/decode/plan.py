"""Chooses how an image is decoded, and predicts the peak memory of the decode before anything is allocated.

Byte counts exclude weights, latents and output. They are compared with real decodes in benchmarks/decode.json, and with
the allocations on accelerators in benchmarks/accelerator_counts.json. They also exclude the workspace of cuDNN, which
uses less if less is free. The caller should therefore leave some of the free memory out of the budget.
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

# Heights of a strip in pixels, the preferred one first. On a CPU, strips should fit into the caches. On an accelerator
# they should be large, to fill its kernels.
CPU_ROWS = (64, 32, 16, 8)
ACCELERATOR_ROWS = (256, 128, 64, 32, 16, 8)
# Heights of a strip in pixels that an accelerator prefers to all others, each with this number of attention rows. A CPU
# that launches slowly limits a fast GPU, and this has half of the launches. Tall strips with fewer attention rows would
# need more memory and more launches than the last of these.
TALL_ROWS, TALL_ATTENTION_ROWS = (1024, 512, 256), 32

# Latent rows that the attention stages process at a time, the preferred number first. None means that the attention is
# summed over all rows at once, which on a CPU is bit-identical to diffusers. On a CPU, more rows than PIECE are not
# faster, but make the allocator hold more memory.
CPU_ATTENTION_ROWS = (None, PIECE)
ACCELERATOR_ATTENTION_ROWS = (16, 8, 4, PIECE)
# Up to this many latent positions, None is also the fastest choice on a CPU: at 512 px, but not at 1024 px
# (benchmarks/decode.json).
WHOLE_ATTENTION_POSITIONS = 512

# Peak memory of the undivided decode, as a multiple of the largest map of the attention stages or of the local stages.
UNDIVIDED_ATTENTION = 25
UNDIVIDED_LOCAL = {torch.float32: 5.1, torch.bfloat16: 6.0, torch.float16: 6.0}
UNDIVIDED_SHUFFLE = {torch.float32: 4.5, torch.bfloat16: 6.0, torch.float16: 6.0}
# A decoder without attention computes its boundary map with one convolution, at a peak of this many such maps.
FIRST_CONVOLUTION_MAPS = 3
# On a CPU, oneDNN allocates its code and buffers once per process. A few small tensors are included.
ONEDNN_BYTES = 15 * 10**6

# Buffers begin at multiples of this many elements, which is an aligned address for every dtype.
ALIGNMENT = 64
MEBIBYTE = 2**20


@dataclass(frozen=True)
class Plan:
    """How to decode an image, and the predicted peak memory."""

    # "strips", "tiles" or "whole".
    method: str
    # Strips: height of a strip, in rows of the boundary map.
    rows: int = 0
    # Strips: width of a panel, in columns of the boundary map. None: the full width.
    columns: int | None = None
    # Strips: latent rows that the attention stages process at a time. None: all of them.
    attention_rows: int | None = None
    # Tiles: side and overlap of a tile, in latent rows and columns.
    tile: int = 0
    overlap: int = 0
    # Predicted peak memory, see the module's docstring.
    peak_bytes: int = 0
    workspace: WorkspaceSize = WorkspaceSize(0, 0, 0)
    # Elements of the largest tensor.
    largest: int = 0

    @property
    def strip(self) -> StripSize:
        return StripSize(self.rows, self.columns)

    def words(self, stages: Stages) -> str:
        """Describe the plan for users."""
        if self.method == "whole":
            return "whole image at once"
        if self.method == "tiles":
            return f"tiles of {self.tile * stages.downscale} px, overlapping by {self.overlap * stages.downscale} px"
        width = "" if self.columns is None else f", {self.columns * stages.stride} px wide"
        strips = f"strips of {self.rows * stages.stride} px{width}"
        if not stages.attends:
            return strips
        at_once = "over the whole image" if self.attention_rows is None else f"over {self.attention_rows} latent rows"
        return f"{strips}; attention {at_once} at once"

    def report(self, stages: Stages) -> dict[str, object]:
        """Return the entries of the plan in a decode report."""
        return {"method": self.method, "plan": self.words(stages), "predicted_bytes": self.peak_bytes}


class Demand(NamedTuple):
    """Memory of a part of the decode, in elements of the dtype."""

    # Each of the two buffers of the workspace.
    buffer: int
    # Rows that layers carry in the workspace from one strip to the next.
    carried: int
    # Peak of all tensors outside the workspace.
    beside: float
    # The largest tensor.
    largest: int


def layer_shapes(stages: Stages) -> list[LayerShape]:
    """Return the shapes of the layers between the boundary map and the pixels, in the order in which they run."""
    # A stage without layers only has the convolution between RGB and the next coarser stage, hence 3 channels.
    widths = [width if layers else 3 for width, layers in zip(stages.widths, stages.layers, strict=True)]
    # From the finest stage to the coarsest, which is the order of an encoder.
    shapes = [LayerShape(widths[0], 3, 3, carried=2)] if stages.layers[0] else []
    for stage, (fine, coarse) in enumerate(itertools.pairwise([*widths[: stages.local], stages.boundary_width])):
        shapes += [LayerShape(fine, fine, fine, carried=4)] * stages.layers[stage]
        if stage == stages.boundary_stage:
            break
        if stages.encodes:
            shapes.append(LayerShape(fine, coarse, coarse, 0.5, 3))
        elif stages.shuffles:
            shapes.append(LayerShape(coarse, fine, 4 * fine, 2, 2))
        else:
            shapes.append(LayerShape(coarse, fine, fine, 2, 1, interpolates=True))
    if not stages.encodes:
        shapes.reverse()
    elif stages.layers[0]:
        shapes[0] = LayerShape(3, widths[0], widths[0], carried=2)
    return shapes


def local_demand(
    stages: Stages, height: int, width: int, strip: StripSize, accelerator: bool, buffer: int = 0
) -> Demand:
    """Return the memory of the local layers for a boundary map of `height` x `width`.

    `buffer` is the minimum size of a workspace buffer.
    """
    panels, panel_width = 1, width
    if strip.columns is not None:
        # A panel has a halo on both sides, and its layers carry their own rows.
        panels, panel_width = -(-width // strip.columns), min(width, strip.columns + 2 * stages.halo)
    rows = stages.strip_rows(min(strip.rows, height))
    if stages.encodes:
        # The first layer of an encoder reads pixels instead of the boundary map.
        rows, panel_width = (rows + 1) * stages.stride + stages.rows_above, panel_width * stages.stride
        finished_pixels = 0
    else:
        # Two copies of the RGB pixels of a strip.
        finished_pixels = 2 * 3 * rows * stages.stride * width * stages.stride
    shapes = layer_shapes(stages)
    buffer = max(buffer, buffer_elements(shapes, stages.rows_above, rows, panel_width))
    piece = piece_elements(buffer, accelerator)
    temporary, carried = 0, 0
    for shape in shapes:
        temporary = max(temporary, shape.passing(rows, panel_width, piece, accelerator))
        carried += shape.carried * shape.inner * panel_width
        rows, panel_width = int(rows * shape.scale), int(panel_width * shape.scale)
    # The workspace is a single tensor, and larger than any other.
    return Demand(buffer, panels * carried, temporary + finished_pixels, 2 * buffer + panels * carried)


def global_demand(
    stages: Stages, height: int, width: int, attention_rows: int | None, item_size: int, accelerator: bool
) -> Demand:
    """Return the memory of the attention stages for a boundary map of `height` x `width`.

    `attention_rows` is as in `Plan`, and `item_size` is the number of bytes per element. Changes of resolution between
    stages are not included, see `resampled_elements`.
    """
    if not stages.attends:
        return Demand(0, 0, 0, stages.boundary_width * height * width)
    fp32 = 4 / item_size  # elements that a number in fp32 takes
    buffer, beside, largest = 0, 0.0, 0
    for stage in range(stages.local, len(stages.widths)):
        channels, step = stages.widths[stage], 2 ** (stage - stages.local)
        h, w = height // step, width // step
        row = channels * w
        latent_row = stages.downscale // 2**stage  # rows of this stage per latent row
        if attention_rows is None:
            strip_rows = min(h, max(PIECE * latent_row, -(-FEW_POSITIONS // w)))
            summed = h * row
            # The window of keys and values.
            projection_window = 2 * (h + 6) * row
        else:
            strip_rows = min(h, attention_rows * latent_row)
            summed = strip_rows * row
            projection_window = 0
        # The window of the gated feed-forward.
        gated_window = 8 * (strip_rows + 6) * row
        # A strip with the rows above it. A decoder upsamples it to twice the rows, each of at most twice the elements.
        factor = 1 if stages.encodes else 2
        strip = factor * (stages.rows_above + factor * strip_rows + 2) * row
        # A window may extend over both buffers.
        buffer = max(buffer, -(-max(gated_window, projection_window) // 2), strip)
        largest = max(largest, gated_window, projection_window)
        # First pass of the attention: keys and values of all scales are summed. All scales but one are in the dtype.
        # The keys and values of that one are copied to fp32, and its values once more to append a row of ones. In fp32
        # on a CPU only the second copy is made.
        fp32_copies = 1 if fp32 == 1 and not accelerator else 3
        first_pass = summed * (2 * (stages.scales - 1) + fp32_copies * fp32)
        block_rows = (strip_rows + 3) * row
        if accelerator:
            # Second pass: queries and results of all scales in fp32, or the maps of the gated feed-forward.
            second_pass = block_rows * max(1 + 2.03 * stages.scales * fp32, 7)
        else:
            # On a CPU, a convolution computes only a piece of its output at a time.
            piece = min(8 * block_rows, CPU_PIECE)
            first_pass += piece
            second_pass = max(6 * block_rows, 3 * block_rows + 1.7 * piece)
        # The weights of keys and values are copied into one matrix.
        attention = max(first_pass, second_pass) + 2 * channels**2
        # A block changes the map of the stage in place, so there is only one.
        stage_map = channels * h * w
        beside = max(beside, stage_map + attention)
    # Both passes carry rows of keys, values, queries and gated maps from one strip to the next.
    carried = 24 * stages.boundary_width * width
    return Demand(buffer, carried, beside, largest)


def resampled_elements(
    stages: Stages, height: int, width: int, attention_rows: int, buffer: int, accelerator: bool
) -> int:
    """Return the peak outside the workspace while the attention stages change the resolution of their map.

    `buffer` is the size of a workspace buffer, the other arguments are as in `global_demand`.
    """
    peak, piece = 0, piece_elements(buffer, accelerator)
    for stage in range(stages.local, len(stages.widths) - 1):
        fine, coarse = stages.widths[stage : stage + 2]
        step, strip_rows = 2 ** (stage - stages.local), attention_rows * stages.downscale // 2**stage
        h, w = height // step, width // step
        both_maps = fine * h * w + coarse * (h // 2) * (w // 2)
        if stages.encodes:
            temporary = LayerShape(fine, coarse, coarse, 0.5).passing(strip_rows, w, piece, accelerator)
        else:
            shape = LayerShape(coarse, fine, fine, 2, interpolates=not stages.shuffles)
            temporary = shape.passing(strip_rows, w // 2, piece, accelerator)
        peak = max(peak, both_maps + temporary)
    return peak


def whole_demand(stages: Stages, height: int, width: int, dtype: torch.dtype, accelerator: bool) -> Demand:
    """Return the memory of the undivided decode for a boundary map of `height` x `width`."""
    pixels = height * width * stages.stride**2
    if stages.shuffles and not stages.layers[0]:
        # The finest stage has no layers, so the largest map is the one of the next stage, at half the resolution. The
        # convolution of the last upsampling has an output of the same size.
        finest_map = stages.widths[1] * pixels / 4
        if accelerator:
            reordered_weights = 0
        else:
            # oneDNN reorders the weights of the upsampling convolutions.
            pairs = zip(stages.widths[1:], stages.widths[2:], strict=False)
            reordered_weights = max(9 * COPIES * coarse * 4 * fine for fine, coarse in pairs)
        return Demand(0, 0, max(UNDIVIDED_SHUFFLE[dtype] * finest_map, reordered_weights), int(finest_map))
    finest_map = stages.widths[0] * pixels
    attention = UNDIVIDED_ATTENTION * stages.boundary_width * height * width if stages.attends else 0
    return Demand(0, 0, max(UNDIVIDED_LOCAL[dtype] * finest_map, attention), stages.widths[1] * pixels)


class Planner:
    """Finds plans for one image of `height` x `width` latents.

    With `same_bits`, plans that are bit-identical to diffusers come before faster ones. If several devices decode the
    image together, none of them needs more memory than a single device would.
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
        self.whole_attention = same_bits or height * width <= WHOLE_ATTENTION_POSITIONS
        # Rows and columns of the boundary map.
        self.height, self.width = height * stages.scale, width * stages.scale

    def strips(self, max_bytes: float) -> Plan:
        """Return the fastest plan in strips within `max_bytes`."""
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
        """Return the fastest plan in strips within `max_bytes`, or None."""
        return next((plan for plan in self.plans() if plan.peak_bytes <= max_bytes), None)

    def floor(self) -> Plan:
        """Return the plan in strips that needs the least memory, and the fastest one if there are several."""
        return min(self.plans(), key=lambda plan: plan.peak_bytes)

    def plans(self) -> Iterator[Plan]:
        """Yield all plans in strips, the fastest first."""
        stages = self.stages
        smallest = stages.strip_rows(1) * stages.stride
        pixel_rows = ACCELERATOR_ROWS if self.accelerator else CPU_ROWS
        heights = [rows // stages.stride for rows in pixel_rows if rows >= smallest]
        sizes = [StripSize(rows, None) for rows in heights]
        # Panels cost a halo on each side, so they come after full rows, and only with the smallest heights.
        columns = self.width // 2
        while columns >= 2 * stages.halo:
            sizes += [StripSize(rows, columns) for rows in heights[-4:]]
            columns //= 2

        candidates: Iterator[tuple[StripSize, int | None]]
        if self.accelerator:
            tall = [(StripSize(rows // stages.stride, None), TALL_ATTENTION_ROWS) for rows in TALL_ROWS]
            # Large strips are more important for the speed than many attention rows.
            candidates = itertools.chain(tall, itertools.product(sizes, ACCELERATOR_ATTENTION_ROWS))
        else:
            # Bit-identical attention is more important than large strips.
            attention_rows = CPU_ATTENTION_ROWS if self.whole_attention else CPU_ATTENTION_ROWS[1:]
            candidates = ((size, rows) for rows in attention_rows for size in sizes)
        for size, rows in candidates:
            plan = self.of(size, rows)
            if plan.largest < LARGEST_TENSOR:
                yield plan

    def of(self, strip: StripSize, attention_rows: int | None) -> Plan:
        """Return the plan for this size of strips, with `attention_rows` latent rows at a time."""
        size, item_size = (self.stages, self.height, self.width), self.dtype.itemsize
        attention = global_demand(*size, attention_rows, item_size, self.accelerator)
        local = local_demand(*size, strip, self.accelerator, attention.buffer)
        boundary_map = self.stages.boundary_width * self.height * self.width
        workspace = WorkspaceSize(
            buffer=-(-local.buffer // ALIGNMENT) * ALIGNMENT,
            carried=max(attention.carried, local.carried),
            above=self.stages.rows_above,
        )
        resampled = resampled_elements(*size, attention_rows or PIECE, workspace.buffer, self.accelerator)
        # The attention stages, the changes of their resolution and the local layers run one after another. The boundary
        # map is the input of the local layers.
        outside = max(attention.beside, resampled, boundary_map + local.beside)
        elements = 2 * workspace.buffer + workspace.carried + outside
        if not self.stages.attends:
            # The first convolution runs before the workspace is allocated.
            elements = max(elements, FIRST_CONVOLUTION_MAPS * boundary_map)
        return Plan(
            "strips",
            strip.rows,
            strip.columns,
            attention_rows,
            peak_bytes=int(elements * item_size) + (0 if self.accelerator else ONEDNN_BYTES),
            workspace=workspace,
            largest=max(attention.largest, local.largest),
        )

    def whole(self) -> Plan:
        """Return the undivided plan."""
        demand = whole_demand(self.stages, self.height, self.width, self.dtype, self.accelerator)
        if demand.largest >= LARGEST_TENSOR:
            raise InputError(
                f"method: got whole, which makes a tensor of {int(demand.largest)} elements for this image, expected "
                f"fewer than {LARGEST_TENSOR}; use strips, which gives the same pixels"
            )
        return Plan("whole", peak_bytes=int(demand.beside * self.dtype.itemsize))

    def tiles(self, tile: int, overlap: int) -> Plan:
        """Return the plan for tiles of `tile` x `tile` latents."""
        h, w = (min(side, tile * self.stages.scale) for side in (self.height, self.width))
        demand = whole_demand(self.stages, h, w, self.dtype, self.accelerator)
        # Each row of tiles is blended in a buffer of RGB pixels in fp32.
        blended_bytes = 3 * h * self.width * self.stages.stride**2 * 4
        peak_bytes = int(demand.beside * self.dtype.itemsize + blended_bytes)
        return Plan("tiles", tile=tile, overlap=overlap, peak_bytes=peak_bytes)


def smaller(planner: Planner, plan: Plan) -> Plan | None:
    """Return a plan with at most half the memory of `plan`, or the smallest plan. None if `plan` is the smallest."""
    floor = planner.floor()
    if plan.peak_bytes <= floor.peak_bytes:
        return None
    return planner.fitting(max(plan.peak_bytes // 2, floor.peak_bytes)) or floor
