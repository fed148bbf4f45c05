"""The exchange between threads of one process, one for each device.

A thread waits until the others have launched the kernels for its inputs, but not until these have finished. The copies
between devices wait for the kernels on the devices themselves.
"""

from __future__ import annotations

import functools
from threading import Barrier, BrokenBarrierError

import torch

from ..runtime.device_team import Stopped


class ExchangeBoard:
    """The tensors that the shards of an image offer to each other, in the order of their rows."""

    def __init__(self, shards: int) -> None:
        self.barrier = Barrier(shards)
        self.clear()

    def clear(self) -> None:
        """Free the tensors of the last step."""
        # They are read between two barriers, and replaced after the second at the earliest.
        self.sums: list[torch.Tensor | None] = [None] * self.barrier.parties
        self.edges: list[tuple[torch.Tensor, torch.Tensor] | None] = [None] * self.barrier.parties

    def wait(self) -> None:
        """Wait for the other shards. Raises Stopped if the attempt ends."""
        try:
            self.barrier.wait()
        except BrokenBarrierError:
            raise Stopped from None


class ThreadExchange:
    """The exchange of shard number `index` on `device`. Counts its messages and bytes."""

    def __init__(self, board: ExchangeBoard, index: int, device: torch.device) -> None:
        self.board, self.index, self.device = board, index, device
        self.messages, self.sum_bytes, self.row_bytes = 0, 0, 0

    def all_reduce(self, sums: torch.Tensor) -> torch.Tensor:
        board = self.board
        board.sums[self.index] = sums
        board.wait()
        self.messages += 1
        self.sum_bytes += sums.nbytes
        received = (other.to(self.device, sums.dtype) for other in board.sums if other is not None)
        return functools.reduce(torch.add, received)

    def halo(self, first: torch.Tensor, last: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        board, index = self.board, self.index
        # Clones, because a view would keep all rows of the shard in memory.
        board.edges[index] = first.clone(), last.clone()
        board.wait()
        above = board.edges[index - 1] if index else None
        below = board.edges[index + 1] if index + 1 < len(board.edges) else None
        self.messages += 1
        self.row_bytes += first.nbytes * ((above is not None) + (below is not None))
        return (
            None if above is None else above[1].to(self.device, first.dtype),
            None if below is None else below[0].to(self.device, last.dtype),
        )
