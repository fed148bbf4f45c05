"""Divides a step among devices: which rows of the image, and which prompts, each device computes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from ..errors import InputError
from .forward_inputs import Constants, RowOperations

if TYPE_CHECKING:
    import torch
    from diffusers import SanaControlNetModel, SanaTransformer2DModel


# Groups are used only if the slowest group has at least this part of the average speed. The others wait for it.
EVEN = 0.9


class ShardSpec(NamedTuple):
    """The part of a step that one member computes."""

    # The number of its group, and of all groups. Each group computes an equal part of the step's batch.
    group: int
    groups: int
    # Its number within the group, and the number of members of the group.
    rank: int
    size: int
    # Its rows of the latents.
    span: slice

    def part(self, batch: torch.Tensor) -> torch.Tensor:
        """Return the group's part of `batch`, a view. `batch` has a row for each image or prompt of the step."""
        return batch.chunk(self.groups)[self.group]

    def own(self, x: torch.Tensor) -> torch.Tensor:
        """Return the member's part, a view, of `x` [B, 32, h, w], the latents or the velocities of the whole step."""
        return self.part(x)[:, :, self.span]


class Shard(NamedTuple):
    """The inputs of one member in a step."""

    # The number of the member.
    member: int
    # Its rows of the latents [B, 32, n, w], on its device.
    x: torch.Tensor
    spec: ShardSpec
    # The number of rows of the whole latents.
    height: int
    # Operations that need rows of other members. None: the member has all rows, and computes as without a split.
    ops: RowOperations | None


def shard_specs(parts: int, speeds: Sequence[float], rows: int) -> list[ShardSpec]:
    """Divide a step among members with these `speeds`. Returns the part of each member.

    The step has `parts` equal parts, and its latents have `rows` rows.
    """
    groups, specs = find_groups(parts, speeds), []
    size = len(speeds) // groups
    for group in range(groups):
        spans = split_rows(rows, speeds[group * size :][:size])
        specs += [ShardSpec(group, groups, rank, size, span) for rank, span in enumerate(spans)]
    return specs


def split_rows(rows: int, speeds: Sequence[float]) -> list[slice]:
    """Return the rows of each device, in proportion to `speeds`, at least one each."""
    check_rows(rows, len(speeds))
    total, spans, top, passed = sum(speeds), [], 0, 0.0
    for index, speed in enumerate(speeds):
        passed += speed
        devices_below = len(speeds) - index - 1
        bottom = min(max(round(rows * passed / total), top + 1), rows - devices_below)
        spans.append(slice(top, bottom))
        top = bottom
    return spans


def check_rows(rows: int, devices: int) -> None:
    """Raise InputError for more `devices` than `rows` of the latents."""
    if devices > rows:
        raise InputError(
            f"devices: got {devices} for an image of {rows} rows of 32 pixels, expected at most {rows}; "
            "name fewer, or make a taller image"
        )


def check_splittable(field: str, model: SanaTransformer2DModel | SanaControlNetModel) -> None:
    """Raise InputError for a model with patches of several latent cells. The message begins with `field`."""
    patch = model.config.patch_size
    if patch != 1:
        raise InputError(
            f"{field}: got patch_size {patch}, expected 1, as all released models have, to share an image's rows; "
            "use one device"
        )


def find_groups(parts: int, speeds: Sequence[float]) -> int:
    """Return the number of groups for a step of `parts` equal parts, on members with these `speeds`.

    The number of groups divides both `parts` and the number of members. Each group computes different parts of the
    batch, and exchanges nothing with the others until the end. This needs fewer bytes and launches than a division by
    rows alone. If the groups would differ too much in speed, there is one group. Its members
    get rows in proportion to their speeds.
    """
    groups = math.gcd(parts, len(speeds))
    size = len(speeds) // groups
    slowest = min(sum(speeds[first : first + size]) for first in range(0, len(speeds), size))
    return groups if groups * slowest >= EVEN * sum(speeds) else 1


def shard_constants(constants: Constants, shard: Shard) -> Constants:
    """Return the part of `constants` for the prompts and the rows of `shard`."""
    spec, position, height = shard.spec, constants.position, shard.height
    if spec.groups > 1:
        keys, values = (list(map(spec.part, blocks)) for blocks in (constants.keys, constants.values))
        bias = None if constants.bias is None else spec.part(constants.bias)
        constants = constants._replace(keys=keys, values=values, bias=bias)
    if position is None or spec.span == slice(0, height):
        return constants
    columns = position.shape[1] // height
    return constants._replace(position=position[:, spec.span.start * columns : spec.span.stop * columns])
