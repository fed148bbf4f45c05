"""Divides a step among devices: which rows of the image, and which prompts, each device computes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch
import torch.nn.functional as F

from ..errors import InputError
from ..runtime.accelerator import has_float64
from .block import Constants, RowOperations, feed_forward
from .layers import pointwise

if TYPE_CHECKING:
    from diffusers import SanaControlNetModel, SanaTransformer2DModel
    from diffusers.models.transformers.sana_transformer import GLUMBConv

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


class Exchange(Protocol):
    """How shards exchange tensors. All shards call the same methods in the same order.

    Members may use different kernels and compute in different dtypes. The results have the dtype of this shard's
    arguments and are on its device.
    """

    def all_reduce(self, sums: torch.Tensor) -> torch.Tensor:
        """Return the total of the `sums` of all shards.

        `sums` are contiguous [B, heads, d + 1, d] in `sum_dtype`: products of keys and values, and a last row with the
        sums of the keys.
        """
        ...

    def halo(self, first: torch.Tensor, last: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Return the last row of the shard above and the first row of the shard below, None beyond the image."""
        ...


class ShardedOps:
    """The operations of one shard. A row of the image has `columns` positions."""

    def __init__(self, exchange: Exchange, columns: int) -> None:
        self.exchange, self.columns = exchange, columns

    def embed(self, layer: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
        """Apply the patch embedding `layer` to `x` [B, 32, n, w]. Returns [B, N, D].

        It is a matrix product, because on a CPU the kernel of a convolution depends on the number of positions.
        """
        return pointwise(layer, x.flatten(2).transpose(1, 2).contiguous(), (x.shape[2], x.shape[3]))

    def sums(self, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Return the sums [B, heads, d, d + 1] over the whole image. `key` and `value` [B, heads, N, d] are local."""
        key, value = (part.unflatten(2, (-1, self.columns)) for part in (key, F.pad(value, (0, 1), value=1.0)))
        rows = key.transpose(-1, -2) @ value
        sums = rows.sum(2, dtype=sum_dtype(rows.device))
        sums = self.exchange.all_reduce(torch.cat([sums[..., :-1], sums[..., -1:].mT], dim=-2))
        return torch.cat([sums[..., :-1, :], sums[..., -1:, :].mT], dim=-1).float()

    def kernel_sums(self, parts: torch.Tensor) -> torch.Tensor:
        """Return the sums [B, heads, d + 1, d] over the whole image, in the layout of `kernels.linear_attention`.

        `parts` [B, heads, parts, d + 1, d] are the partial sums of this shard.
        """
        return self.exchange.all_reduce(parts.sum(2, dtype=sum_dtype(parts.device)))

    def feed_forward(self, block: GLUMBConv, states: torch.Tensor, kernels: frozenset[str]) -> torch.Tensor:
        """Apply the feed-forward `block` to this shard's `states` [B, N, D]. The neighbours send one row each."""
        rows = states.unflatten(1, (-1, self.columns))
        above, below = self.exchange.halo(rows[:, 0], rows[:, -1])
        window = [part[:, None] for part in (above, below) if part is not None]
        window.insert(0 if above is None else 1, rows)
        together, edges = torch.cat(window, dim=1), (int(above is not None), int(below is not None))
        return feed_forward(block, together.flatten(1, 2), (together.shape[1], self.columns), kernels, edges)


def sum_dtype(device: torch.device) -> torch.dtype:
    """Return the dtype in which `device` adds the sums of shards: float64, or float32 if it has no float64.

    float64 has 53 bits, and the summands have 24. So the sum is exact unless the summands differ by more than 2^20. The
    rounding error is then far below the precision of float32. So the order of the summands makes no difference.
    """
    return torch.float64 if has_float64(device) else torch.float32


def make_shard(x: torch.Tensor, spec: ShardSpec, member: int, device: torch.device, exchange: Exchange) -> Shard:
    """Return the shard of `member`, on `device`, of the latents `x` [B, 32, h, w] of a step."""
    # A CPU uses these operations even if it is alone in its group, so that the bits do not depend on the number of
    # members.
    together = spec.size > 1 or device.type == "cpu"
    ops = ShardedOps(exchange, x.shape[3]) if together else None
    return Shard(member, spec.own(x).to(device), spec, x.shape[2], ops)
