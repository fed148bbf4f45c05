"""The exchange between processes, on one machine or several: torch.distributed, by NCCL, XCCL or gloo."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from ..model.row_shards import Shard, ShardSpec, shard_specs
from ..model.sharded_ops import make_shard

# how long a member waits for the others; a block takes milliseconds
PEER_TIMEOUT = timedelta(seconds=60)


class ProcessExchange:
    """The exchange of a process at `spec` with those of its group, a `group` of torch.distributed's."""

    def __init__(self, spec: ShardSpec, group: dist.ProcessGroup | None) -> None:
        self.spec, self.group = spec, group

    def all_reduce(self, sums: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(sums, group=self.group)
        return sums

    def halo(self, first: torch.Tensor, last: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        rank = dist.get_rank()
        above = torch.empty_like(first) if self.spec.rank else None
        below = torch.empty_like(last) if self.spec.rank + 1 < self.spec.size else None
        work = []
        for other, own, theirs in ((rank - 1, first, above), (rank + 1, last, below)):
            if theirs is not None:
                work.append(dist.P2POp(dist.isend, own.contiguous(), other, self.group))
                work.append(dist.P2POp(dist.irecv, theirs, other, self.group))
        for request in dist.batch_isend_irecv(work) if work else []:
            request.wait()
        return above, below


class ProcessSplit:
    """This process, as number `rank`, and the others that share an image, one for each of `speeds`.

    Connected until `destroy_process_group`, of torch.distributed.
    """

    def __init__(self, store: dist.Store, rank: int, speeds: Sequence[float], device: torch.device) -> None:
        self.rank, self.speeds, self.device = rank, speeds, device
        backend = dist.get_default_backend_for_device(device)
        dist.init_process_group(backend, store=store, rank=rank, world_size=len(speeds), timeout=PEER_TIMEOUT)
        # by their size
        self.groups = {len(speeds): dist.group.WORLD}

    def run(self, x: torch.Tensor, work: Callable[[Shard], torch.Tensor], parts: int = 1) -> torch.Tensor:
        """Return what `work` makes of the latents `x` [B, 32, h, w], as `devices.Split.run` does; all have them all.

        Raises what torch.distributed does where one of the others has gone.
        """
        spec = shard_specs(parts, self.speeds, x.shape[2])[self.rank]
        if spec.size not in self.groups:
            # all meet here, at the same step
            self.groups[spec.size], _ = dist.new_subgroups(spec.size, timeout=PEER_TIMEOUT)
        exchange = ProcessExchange(spec, self.groups[spec.size])
        out = x.new_zeros(x.shape)
        spec.own(out).copy_(work(make_shard(x, spec, 0, self.device, exchange)))
        dist.all_reduce(out)
        return out
