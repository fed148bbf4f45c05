"""A shard's operations in a block that need the others: the all-reduce of attention's sums, and a halo of one row."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch
import torch.nn.functional as F

from .block import feed_forward
from .layers import pointwise
from .row_shards import Shard, ShardSpec

if TYPE_CHECKING:
    from diffusers.models.transformers.sana_transformer import GLUMBConv


class Exchange(Protocol):
    """How shards exchange tensors; all call the same methods in the same order."""

    def all_reduce(self, sums: torch.Tensor) -> torch.Tensor:
        """Return the sum of what all shards bring, on this one's device."""
        ...

    def halo(self, first: torch.Tensor, last: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Return the last row of the shard above and the first of the one below, None beyond the image."""
        ...


class ShardedOps:
    """The operations of one shard of an image of `columns` positions a row."""

    def __init__(self, exchange: Exchange, columns: int) -> None:
        self.exchange, self.columns = exchange, columns

    def embed(self, layer: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
        """Return what the patch embedding `layer` makes of `x` [B, 32, n, w], as [B, N, D].

        Of a position at a time: on a CPU the kernel of a convolution depends on how many there are.
        """
        return pointwise(layer, x.flatten(2).transpose(1, 2).contiguous(), (x.shape[2], x.shape[3]))

    def sums(self, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Return the sums [B, heads, d, d + 1] over the image, of this shard's [B, heads, N, d].

        float64 holds 53 bits: it adds up the rows of an image, of 24 bits each, without loss unless they differ by
        more than 2^20, and what it loses then is far below float32. So the order makes no difference.
        """
        key, value = (part.unflatten(2, (-1, self.columns)) for part in (key, F.pad(value, (0, 1), value=1.0)))
        rows = (key.transpose(-1, -2) @ value).sum(2, dtype=torch.float64)
        return self.exchange.all_reduce(rows).float()

    def feed_forward(self, block: GLUMBConv, states: torch.Tensor, kernels: frozenset[str]) -> torch.Tensor:
        """Return what `block.feed_forward` makes of this shard's `states` [B, N, D], with its neighbours' rows."""
        rows = states.unflatten(1, (-1, self.columns))
        above, below = self.exchange.halo(rows[:, 0], rows[:, -1])
        window = [part[:, None] for part in (above, below) if part is not None]
        window.insert(0 if above is None else 1, rows)
        together, edges = torch.cat(window, dim=1), (int(above is not None), int(below is not None))
        return feed_forward(block, together.flatten(1, 2), (together.shape[1], self.columns), kernels, edges)


def make_shard(x: torch.Tensor, spec: ShardSpec, member: int, device: torch.device, exchange: Exchange) -> Shard:
    """Return what `member`, on `device`, computes of the latents `x` [B, 32, h, w] of a step."""
    # on a CPU alone in its group too: the same bits for any number of members
    together = spec.size > 1 or device.type == "cpu"
    ops = ShardedOps(exchange, x.shape[3]) if together else None
    return Shard(member, spec.own(x).to(device), spec, x.shape[2], ops)
