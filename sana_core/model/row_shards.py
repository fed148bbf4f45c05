"""Which rows of an image each device has, and which prompts of a step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from ..errors import InputError
from .forward_inputs import Constants, RowOperations

if TYPE_CHECKING:
    import torch
    from diffusers import SanaControlNetModel, SanaTransformer2DModel


# groups of which the slowest has less of its equal part of the speed than this would keep the others waiting
EVEN = 0.9


class ShardSpec(NamedTuple):
    """Where a member is in a step: number `rank` of the `size` members of a `group`, with its rows `span` of the
    latents. The `groups` are equal parts of the step's batch."""

    group: int
    groups: int
    rank: int
    size: int
    span: slice

    def part(self, batch: torch.Tensor) -> torch.Tensor:
        """Return its group's part, a view, of what has a row for each image, or each prompt, of the whole batch."""
        return batch.chunk(self.groups)[self.group]

    def own(self, x: torch.Tensor) -> torch.Tensor:
        """Return this one's part, a view, of `x` [B, 32, h, w], the latents or the velocities of the whole step."""
        return self.part(x)[:, :, self.span]


class Shard(NamedTuple):
    """What one member computes in a step: its number, its rows `x` [B, 32, n, w] on its device, of a whole `height`.

    Without `ops` it has the whole height to itself.
    """

    member: int
    x: torch.Tensor
    spec: ShardSpec
    height: int
    ops: RowOperations | None


def shard_specs(parts: int, speeds: Sequence[float], rows: int) -> list[ShardSpec]:
    """Return where members of those `speeds` are in a step of so many equal `parts`, for images of so many `rows`.

    Raises InputError for more members in a group than rows.
    """
    groups, specs = find_groups(parts, speeds), []
    size = len(speeds) // groups
    for group in range(groups):
        spans = split_rows(rows, speeds[group * size :][:size])
        specs += [ShardSpec(group, groups, rank, size, span) for rank, span in enumerate(spans)]
    return specs


def split_rows(rows: int, speeds: Sequence[float]) -> list[slice]:
    """Return the rows of each device, in proportion to `speeds`, at least one each.

    Raises InputError for more devices than rows.
    """
    check_rows(rows, len(speeds))
    total, spans, top, passed = sum(speeds), [], 0, 0.0
    for index, speed in enumerate(speeds):
        passed += speed
        left = len(speeds) - index - 1
        bottom = min(max(round(rows * passed / total), top + 1), rows - left)
        spans.append(slice(top, bottom))
        top = bottom
    return spans


def check_rows(rows: int, devices: int) -> None:
    """Raise InputError if `devices` are more than there are rows of latents."""
    if devices > rows:
        raise InputError(
            f"devices: got {devices} for an image of {rows} rows of 32 pixels, expected at most {rows}; "
            "name fewer, or make a taller image"
        )


def check_splittable(field: str, model: SanaTransformer2DModel | SanaControlNetModel) -> None:
    """Raise InputError, with `field`, for a model whose positions are more than a cell of the latents."""
    patch = model.config.patch_size
    if patch != 1:
        raise InputError(
            f"{field}: got patch_size {patch}, expected 1, as all released models have, to share an image's rows; "
            "use one device"
        )


def find_groups(parts: int, speeds: Sequence[float]) -> int:
    """Return how many groups members of those `speeds` compute a step in that has so many equal `parts`.

    Where the members are as many or a multiple, each group computes parts of its own and tells the others nothing until
    the end, with fewer bytes and launches than by rows alone (`cost.split_cost`). Rows follow speeds that differ.
    """
    groups = math.gcd(parts, len(speeds))
    size = len(speeds) // groups
    slowest = min(sum(speeds[first : first + size]) for first in range(0, len(speeds), size))
    return groups if groups * slowest >= EVEN * sum(speeds) else 1


def shard_constants(constants: Constants, shard: Shard) -> Constants:
    """Return the `constants` of a whole batch and image for the prompts and the rows of `shard`."""
    spec, position, height = shard.spec, constants.position, shard.height
    if spec.groups > 1:
        keys, values = (list(map(spec.part, each)) for each in (constants.keys, constants.values))
        bias = None if constants.bias is None else spec.part(constants.bias)
        constants = constants._replace(keys=keys, values=values, bias=bias)
    if position is None or spec.span == slice(0, height):
        return constants
    columns = position.shape[1] // height
    return constants._replace(position=position[:, spec.span.start * columns : spec.span.stop * columns])
