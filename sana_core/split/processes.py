"""The exchange between processes, on one machine or several: torch.distributed, by NCCL, XCCL or gloo."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist

# how long a member waits for the others; a block takes milliseconds
PEER_TIMEOUT = timedelta(seconds=60)


class ProcessExchange:
    """The exchange of the process `rank` among `world` of them, that are connected."""

    def __init__(self, rank: int, world: int) -> None:
        self.rank, self.world = rank, world

    def add(self, sums: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(sums)
        return sums

    def swap(self, first: torch.Tensor, last: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        above = torch.empty_like(first) if self.rank else None
        below = torch.empty_like(last) if self.rank + 1 < self.world else None
        work = []
        for other, own, theirs in ((self.rank - 1, first, above), (self.rank + 1, last, below)):
            if theirs is not None:
                work.append(dist.P2POp(dist.isend, own.contiguous(), other))
                work.append(dist.P2POp(dist.irecv, theirs, other))
        for request in dist.batch_isend_irecv(work) if work else []:
            request.wait()
        return above, below


def connect(store: dist.Store, rank: int, world: int, device: torch.device) -> ProcessExchange:
    """Return how this process, as `rank` of `world`, exchanges tensors on `device` with the others.

    Until `destroy_process_group`, of torch.distributed.
    """
    backend = dist.get_default_backend_for_device(device)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=PEER_TIMEOUT)
    return ProcessExchange(rank, world)
