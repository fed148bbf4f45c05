"""The operations in a block that need other shards: the all-reduce of attention's sums, and a halo of one row."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch
import torch.nn.functional as F

from ..runtime.accelerator import has_float64
from .block import feed_forward
from .layers import pointwise
from .row_shards import Shard, ShardSpec

if TYPE_CHECKING:
    from diffusers.models.transformers.sana_transformer import GLUMBConv


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
