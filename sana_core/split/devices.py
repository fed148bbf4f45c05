"""The devices of one process that share each image: a thread for each, and what happens when one fails."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait

import torch

from ..model.row_shards import Shard, shard_specs
from ..model.sharded_ops import make_shard
from ..runtime.accelerator import is_driver_error, is_out_of_memory, release_memory_of, set_current_device
from ..runtime.cancellation import Poll, no_poll
from ..runtime.text import get_logger
from .threads import Aborted, ExchangeBoard, ThreadExchange

logger = get_logger(__name__)

CPU = torch.device("cpu")
# Seconds between two polls of the thread that waits.
POLL_INTERVAL = 0.02
# Seconds without an exchange or a result after which a GPU counts as hung. A step takes seconds on a GPU, but the first
# step builds kernels.
HANG_TIMEOUT = 300.0
# Seconds to wait for a thread after another one has failed or the step was cancelled. It ends at its next exchange.
ABORT_TIMEOUT = 30.0


class Split:
    """The members that share an image.

    A member whose memory runs out, whose driver fails or that hangs is left out from then on. The others compute the
    step again from the same latents. Only the device of the latents itself has to survive driver errors.
    """

    def __init__(self, devices: Sequence[torch.device], speeds: Sequence[float] | None = None) -> None:
        self.devices = list(devices)
        self.speeds = [1.0] * len(devices) if speeds is None else list(speeds)
        self.living = list(range(len(devices)))
        self.exchanges: list[ThreadExchange] = []

    def run(
        self, x: torch.Tensor, work: Callable[[Shard], torch.Tensor], parts: int = 1, poll: Poll = no_poll
    ) -> torch.Tensor:
        """Return the velocity at the latents `x` [B, 32, h, w], on the device of `x`. `work` computes a shard's part.

        `parts` is the number of equal parts of B, such as a positive and a negative prompt. Groups of members compute
        different parts where they can, and the members of a group share the rows. `poll` is called many times a second
        and cancels by raising. Raises InputError for more members than rows, and the error of the last member.
        """
        while True:
            try:
                return self.step(x, work, parts, poll)
            except MembersFailed as failed:
                # The frames of the traceback would keep the failed step's tensors alive. So would this handler, so
                # `drop` runs after it.
                failure = failed.with_traceback(None)
            try:
                self.drop(failure.members, failure.error, x.device)
            finally:
                # An error that is raised refers to this frame. A reference back would keep the model of all frames
                # alive until Python's collector runs.
                del failure

    def step(self, x: torch.Tensor, work: Callable[[Shard], torch.Tensor], parts: int, poll: Poll) -> torch.Tensor:
        """Compute one step on the living members. Raises MembersFailed."""
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

        def compute(index: int, future: Future[torch.Tensor]) -> None:
            try:
                # The number of threads, the current device and the modes belong to the thread.
                if devices[index].type == "cpu":
                    torch.set_num_threads(cores)
                set_current_device(devices[index])
                with torch.inference_mode(inference), torch.no_grad():
                    shard = make_shard(x, specs[index], self.living[index], devices[index], self.exchanges[index])
                    result = work(shard).to(x.device)
            except BaseException as error:
                abort_all()
                future.set_exception(error)
            else:
                future.set_result(result)
            finally:
                # An error in it refers to this frame.
                del future

        futures: list[Future[torch.Tensor]] = [Future() for _ in specs]
        # Daemons: a thread that hangs in a driver cannot be ended, and must not keep the process alive.
        threads = [
            threading.Thread(target=compute, args=(index, future), name=f"sana split_{index}", daemon=True)
            for index, future in enumerate(futures)
        ]
        for thread in threads:
            thread.start()
        try:
            self.wait_for(futures, poll)
        finally:
            abort_all()
            deadline = time.monotonic() + ABORT_TIMEOUT
            for thread in threads:
                thread.join(max(0.0, deadline - time.monotonic()))
            for board in boards:
                board.clear()
        try:
            results = self.results(futures)
        finally:
            # An error in them refers to this frame.
            futures.clear()
        out = torch.empty_like(x)
        for spec, result in zip(specs, results, strict=True):
            spec.own(out).copy_(result)
        return out

    def wait_for(self, futures: list[Future[torch.Tensor]], poll: Poll) -> None:
        """Wait until all members are done, or until a GPU hangs."""
        has_gpus = any(self.devices[member].type != "cpu" for member in self.living)
        progress, since = (0, 0), time.monotonic()
        while not_done := wait(futures, POLL_INTERVAL).not_done:
            poll()
            now = sum(exchange.messages for exchange in self.exchanges), len(not_done)
            if now != progress:
                progress, since = now, time.monotonic()
            # A step of a CPU may take minutes.
            if has_gpus and time.monotonic() - since > HANG_TIMEOUT:
                return

    def results(self, futures: list[Future[torch.Tensor]]) -> list[torch.Tensor]:
        """Return the members' results. Raises MembersFailed, or the error of a member whose device has not failed."""
        hanging = [member for member, future in zip(self.living, futures, strict=True) if not future.done()]
        if hanging:
            raise MembersFailed(hanging, TimeoutError(f"no answer for {HANG_TIMEOUT:.0f} s"))
        errors = [(member, future.exception()) for member, future in zip(self.living, futures, strict=True)]
        failures = [(member, error) for member, error in errors if error is not None and not isinstance(error, Aborted)]
        for _, error in failures:
            if not (is_out_of_memory(error) or is_driver_error(error)):
                try:
                    raise error
                finally:
                    # The error refers to this frame.
                    del errors, failures, error
        if failures:
            member, error = failures[0]
            # A member that copies from a failed device gets that device's error.
            broken = any(is_driver_error(error) for _, error in failures) and self.broken_members()
            raise MembersFailed(broken or [member], error)
        if any(error is not None for _, error in errors):
            raise TimeoutError(f"no device answered for {HANG_TIMEOUT:.0f} s")
        return [future.result() for future in futures]

    def broken_members(self) -> list[int]:
        """Return the members whose devices fail at everything, as after an access to an illegal address."""
        return [member for member in self.living if not works(self.devices[member])]

    def drop(self, members: list[int], error: BaseException, latents: torch.device) -> None:
        """Leave `members` out. Raises `error` if there are no others, or if the device of the latents is broken."""
        self.living = [member for member in self.living if member not in members]
        if not self.living or (is_driver_error(error) and not works(latents)):
            try:
                raise release_memory_of(error, CPU if isinstance(error, TimeoutError) else latents)
            finally:
                # The error refers to this frame.
                del error
        # To empty the cache, CUDA waits for all devices, and one that hangs never answers.
        release_memory_of(error, CPU if isinstance(error, TimeoutError) else self.devices[self.living[0]])
        for member in members:
            name = type(error).__name__
            logger.warning("%s failed (%s), its rows of the image go to the others", self.devices[member], name)


def works(device: torch.device) -> bool:
    """Whether `device` still computes. Out of memory does not count as a failure."""
    try:
        torch.ones(1, device=device).add(1).item()
    except RuntimeError as error:
        return is_out_of_memory(error)
    return True


class MembersFailed(Exception):
    """Members failed in a step, which the others cannot finish without them."""

    def __init__(self, members: list[int], error: BaseException) -> None:
        super().__init__(str(error))
        self.members, self.error = members, error
