"""The devices of one process that share each image: a thread for each, and what happens when one fails."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait

import torch

from ..model.row_shards import Shard, shard_specs
from ..model.sharded_ops import make_shard
from ..runtime.accelerator import is_driver_error, is_out_of_memory, release_memory_of
from ..runtime.cancellation import Poll, no_poll
from .threads import Aborted, ExchangeBoard, ThreadExchange

logger = logging.getLogger(__name__)

# seconds between two polls of the thread that waits
POLL_INTERVAL = 0.02


class Split:
    """The members that share an image.

    A member whose memory runs out, or whose driver fails, is left out from then on. The others begin the step again,
    and since the latents lie outside, the image is the same.
    """

    def __init__(self, devices: Sequence[torch.device], speeds: Sequence[float] | None = None) -> None:
        self.devices = list(devices)
        self.speeds = [1.0] * len(devices) if speeds is None else list(speeds)
        self.living = list(range(len(devices)))
        self.exchanges: list[ThreadExchange] = []

    def run(
        self, x: torch.Tensor, work: Callable[[Shard], torch.Tensor], parts: int = 1, poll: Poll = no_poll
    ) -> torch.Tensor:
        """Return what `work` makes of the latents `x` [B, 32, h, w], each member of its shard, on the device of `x`.

        Of so many equal `parts` of B, as a positive and a negative prompt, groups of members compute their own where
        they can, and in a group each its rows. `poll` is called many times a second and cancels by raising. Raises
        InputError for more members than rows, and the error of the last member that fails.
        """
        while True:
            try:
                return self.step(x, work, parts, poll)
            except MemberFailed as failed:
                # without its frames, which would keep the failed step's tensors alive, and outside the handler too
                failure = failed.with_traceback(None)
            self.drop(failure.member, release_memory_of(failure.error))

    def step(self, x: torch.Tensor, work: Callable[[Shard], torch.Tensor], parts: int, poll: Poll) -> torch.Tensor:
        """Return what the living members make of `x` together. Raises MemberFailed."""
        specs = shard_specs(parts, [self.speeds[member] for member in self.living], x.shape[2])
        boards = [ExchangeBoard(specs[0].size) for _ in range(specs[0].groups)]
        inference = torch.is_inference_mode_enabled()
        devices = [self.devices[member] for member in self.living]
        self.exchanges = [
            ThreadExchange(boards[spec.group], spec.rank, device) for spec, device in zip(specs, devices, strict=True)
        ]
        cores = max(1, torch.get_num_threads() // max(1, sum(device.type == "cpu" for device in devices)))

        def abort_all() -> None:
            for board in boards:
                board.abort()

        def compute(index: int) -> torch.Tensor:
            # these and the modes belong to the thread
            if devices[index].type == "cpu":
                torch.set_num_threads(cores)
            elif devices[index].type != "mps":
                torch.get_device_module(devices[index]).set_device(devices[index])
            with torch.inference_mode(inference), torch.no_grad():
                try:
                    return work(make_shard(x, specs[index], self.living[index], devices[index], self.exchanges[index]))
                except BaseException:
                    abort_all()
                    raise

        with ThreadPoolExecutor(len(specs), "sana split") as pool:
            futures = [pool.submit(compute, index) for index in range(len(specs))]
            try:
                while wait(futures, POLL_INTERVAL).not_done:
                    poll()
            finally:
                # after a cancel; nobody is at a board any more otherwise
                abort_all()
        out = torch.empty_like(x)
        for spec, made in zip(specs, self.results(futures), strict=True):
            spec.own(out).copy_(made)
        return out

    def results(self, futures: list[Future[torch.Tensor]]) -> list[torch.Tensor]:
        errors = [(index, future.exception()) for index, future in enumerate(futures)]
        failures = [(index, error) for index, error in errors if error is not None and not isinstance(error, Aborted)]
        for _, error in failures:
            if not (is_out_of_memory(error) or is_driver_error(error)):
                raise error
        if failures:
            index, error = failures[0]
            raise MemberFailed(self.living[index], error)
        return [future.result() for future in futures]

    def drop(self, member: int, error: BaseException) -> None:
        """Leave `member` out. Raises `error` if it was the last."""
        self.living.remove(member)
        if not self.living:
            raise error
        logger.warning(
            "%s failed (%s), its rows of the image go to the others", self.devices[member], type(error).__name__
        )


class MemberFailed(Exception):
    """A member failed in a step, which the others cannot end without it."""

    def __init__(self, member: int, error: BaseException) -> None:
        super().__init__(str(error))
        self.member, self.error = member, error
