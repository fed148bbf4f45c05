"""Devices of this process that compute an image together, and what happens when one of them fails.

A GPU runs a kernel after the call that launched it. If the kernel fails, CUDA reports the error at a later call on that
GPU, in any thread. Until then the results are garbage, and so are copies of them on other GPUs. Therefore:

- The devices compute in attempts, which begin with data that is known to be right. The results of an attempt count
  once each device has been synchronised in its thread.
- If a device fails, hangs or runs out of memory, the attempt does not count. All devices are tested, and the ones at
  fault are left out of the team. The others make another attempt, with the same data.
"""

from __future__ import annotations

import math
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from functools import partial
from queue import SimpleQueue
from typing import Any, TypeVar

import torch

from .accelerator import (
    check_device,
    current_device,
    is_driver_error,
    is_out_of_memory,
    release_memory_of,
    synchronize,
)
from .cancellation import Poll, no_poll
from .limits import LIMITS, WatchClock

CPU = torch.device("cpu")
# Seconds between two polls.
INTERVAL = 0.02
T = TypeVar("T")
Job = tuple[Future[Any], Callable[[], Any]]


class Stopped(Exception):
    """The attempt has ended, because another device failed or the user cancelled."""


class Failed(Exception):
    """An attempt failed because of a device. `futures` are the jobs whose results nobody has taken."""

    def __init__(self, futures: Mapping[Future[Any], DeviceThread]) -> None:
        super().__init__()
        self.futures = dict(futures)

    def take_errors(self) -> list[tuple[DeviceThread, BaseException]]:
        """Return the errors of the jobs, and forget the jobs, whose results and errors keep tensors alive."""
        errors = [(thread, future.exception()) for future, thread in self.futures.items() if future.done()]
        self.futures.clear()
        return [(thread, error) for thread, error in errors if error is not None and not isinstance(error, Stopped)]


class DeviceThread:
    """A thread that does the jobs of one device in the order of their submission, until the object is freed.

    It is a daemon, because a thread that hangs in a driver cannot be ended and must not keep the process alive.
    """

    def __init__(self, device: torch.device, name: str) -> None:
        self.device = device
        self.jobs: SimpleQueue[Job | None] = SimpleQueue()
        # A job that was not finished in time.
        self.unanswered: Future[Any] | None = None
        self.thread = threading.Thread(target=do_jobs, args=(self.jobs,), name=name, daemon=True)
        self.thread.start()
        self.end = weakref.finalize(self, self.jobs.put, None)

    @property
    def hangs(self) -> bool:
        return self.device.type != "cpu" and self.unanswered is not None and not self.unanswered.done()

    def submit(self, work: Callable[[], T]) -> Future[T]:
        future: Future[T] = Future()
        self.jobs.put((future, work))
        return future


def do_jobs(jobs: SimpleQueue[Job | None]) -> None:
    while (job := jobs.get()) is not None:
        finish(*job)
        # Results and errors keep tensors alive.
        del job


def finish(future: Future[T], work: Callable[[], T]) -> None:
    """Run `work`, and set its result or error on `future`."""
    try:
        future.set_result(work())
    except BaseException as error:
        future.set_exception(error)
        # The error refers to this frame, so they would keep each other alive.
        del future


class DeviceThreads:
    """One permanent thread for each device. Libraries of CUDA keep plans and handles per thread."""

    def __init__(self) -> None:
        # By device, and by its number among equal devices.
        self.threads: dict[tuple[torch.device, int], DeviceThread] = {}

    def of(self, devices: Iterable[torch.device]) -> list[DeviceThread]:
        """Return a thread for each of `devices`. A device that is named twice has two threads."""
        threads, counts = [], Counter[torch.device]()
        for device in devices:
            key = device, counts[device]
            counts[device] += 1
            if key not in self.threads:
                self.threads[key] = DeviceThread(device, f"sana image {device} #{counts[device]}")
            threads.append(self.threads[key])
        return threads

    def any_hangs(self) -> bool:
        return any(thread.hangs for thread in self.threads.values())

    def __enter__(self) -> DeviceThreads:
        return self

    def __exit__(self, *error: object) -> None:
        """End all threads, and wait for those that do not hang."""
        threads = list(self.threads.values())
        self.threads.clear()
        for thread in threads:
            thread.end()
        for thread in threads:
            if not thread.hangs:
                thread.thread.join(LIMITS.ending)


class Team:
    """The devices that compute an image together. A device that is named twice is two members.

    `pool` has the threads of earlier images. A device that hangs since an earlier image is left out, unless all do.
    """

    def __init__(self, devices: Sequence[torch.device], pool: DeviceThreads | None = None) -> None:
        self.pool = DeviceThreads() if pool is None else pool
        self.members = self.pool.of(devices)
        self.living = [member for member in self.members if not member.hangs] or list(self.members)
        # A CPU may take minutes for a step.
        self.can_hang = any(device.type != "cpu" for device in devices)
        # Whether the first step or image has ended, and the longest silence in seconds.
        self.experienced, self.longest_silence = False, 0.0

    def threads_with(self, needed: torch.device) -> list[DeviceThread]:
        """Return the living members, and also a thread of `needed` if that is a GPU without one."""
        if needed.type == "cpu" or any(member.device == needed for member in self.living):
            return self.living
        return [*self.living, *self.pool.of([needed])]

    def repeat(
        self,
        attempt: Callable[[], T],
        poll: Poll,
        needed: torch.device,
        report: Callable[[DeviceThread, BaseException], object],
    ) -> T:
        """Return the result of `attempt`, which is called again without the members at fault each time it fails.

        `report` receives these members and the reasons. `needed` is as for `leave_out`.
        """
        while True:
            try:
                return attempt()
            except Failed as failed:
                # Its frames would keep the tensors of the failed attempt alive.
                failure = failed.with_traceback(None)
            for member, error in self.leave_out(failure, poll, needed):
                report(member, error)

    def leave_out(
        self, failed: Failed, poll: Poll, needed: torch.device = CPU
    ) -> list[tuple[DeviceThread, BaseException]]:
        """Leave out the members because of which an attempt failed. Returns them and the reasons.

        `needed` is the device of the data with which the next attempt begins. Raises the error of a device if `needed`
        does not work or if no member remains. Raises an error that is not about devices.
        """
        reasons, fatal = self.judge(failed, poll, needed)
        if fatal is not None:
            reasons.clear()
            try:
                raise fatal
            finally:
                # The error refers to this frame. A reference back would keep the models of all frames alive until
                # Python's collector runs.
                del fatal
        self.living = [member for member in self.living if member not in reasons]
        return list(reasons.items())

    def judge(
        self, failed: Failed, poll: Poll, needed: torch.device
    ) -> tuple[dict[DeviceThread, BaseException], BaseException | None]:
        """Return the members to leave out with the reasons, and the error that ends the image, if there is one."""
        broken = self.test(self.threads_with(needed), poll)
        errors = failed.take_errors()
        for _, error in errors:
            if not (is_out_of_memory(error) or is_driver_error(error)):
                return {}, error
            # The tensors of the failed attempt must not be alive in the next one.
            error.__traceback__ = error.__context__ = None
        if errors and not self.pool.any_hangs():
            # To empty a cache, CUDA waits for all devices, and one that hangs never answers.
            release_memory_of(errors[0][1], next((one.device for one in self.living if one not in broken), CPU))

        # If a GPU is broken, copies from it raise its error in the threads of the others.
        at_fault = {member: error for member, error in errors if is_out_of_memory(error) or not broken} | broken
        reasons = {member: at_fault[member] for member in self.living if member in at_fault}
        fatal = next((error for thread, error in broken.items() if thread.device == needed), None)
        if not reasons:
            fatal = fatal or TimeoutError(f"no device answered for {self.patience():.0f} s")
        elif len(reasons) == len(self.living):
            # Memory may have run out on all devices. One that works may do it alone, in other ways.
            alone = next((member for member in self.living if member not in broken), None)
            if alone is None or len(self.living) == 1:
                fatal = fatal or reasons[self.living[0]]
            else:
                del reasons[alone]
        return reasons, fatal

    def test(self, threads: Iterable[DeviceThread], poll: Poll) -> dict[DeviceThread, BaseException]:
        """Return the threads whose device has failed or hangs, and why. The others have ended all of their work."""
        with Attempt(self, poll) as attempt:
            tests = {attempt.submit(thread, partial(check_device, thread.device)): thread for thread in threads}
            limit = LIMITS.later(self.longest_silence) if self.can_hang else math.inf
            while (waiting := [future for future in tests if not future.done()]) and attempt.watch() < limit:
                wait(waiting, INTERVAL)
                poll()
        errors: dict[DeviceThread, BaseException] = {}
        for future, thread in tests.items():
            if not future.done():
                thread.unanswered = future
                errors[thread] = TimeoutError(f"no answer for {limit:.0f} s")
            elif error := future.exception():
                errors[thread] = error
        return errors

    def patience(self) -> float:
        """Return the seconds of silence after which a GPU counts as hanging."""
        return LIMITS.later(self.longest_silence) if self.experienced else LIMITS.first


class Attempt:
    """An attempt of the living members to compute something. A context manager.

    After an error, waiting jobs are dropped, running jobs end at their next `check`, and `on_stop` is called. The value
    of `progress` changes while a job makes progress.
    """

    def __init__(
        self,
        team: Team,
        poll: Poll,
        on_stop: Callable[[], object] = no_poll,
        progress: Callable[[], object] = no_poll,
    ) -> None:
        self.team, self.poll, self.on_stop, self.progress = team, poll, on_stop, progress
        self.stopped = threading.Event()
        # The inference mode belongs to the thread.
        self.inference = torch.is_inference_mode_enabled()
        # When the last job was finished or had made progress.
        self.watch, self.heard, self.seen = WatchClock(), 0.0, progress()

    def __enter__(self) -> Attempt:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: object) -> None:
        if error is None:
            return
        self.stopped.set()
        self.on_stop()
        if isinstance(error, Failed):
            # `leave_out` waits, and longer.
            return
        last = {member.submit(no_poll): member for member in self.team.living}
        for future in wait(last, LIMITS.ending).not_done:
            last[future].unanswered = future

    def check(self) -> None:
        if self.stopped.is_set():
            raise Stopped

    def inside(self, device: torch.device, work: Callable[[], T]) -> T:
        self.check()
        with current_device(device), torch.inference_mode(self.inference), torch.no_grad():
            return work()

    def submit(self, thread: DeviceThread, work: Callable[[], T]) -> Future[T]:
        return thread.submit(partial(self.inside, thread.device, work))

    def wait(self, futures: Mapping[Future[T], DeviceThread]) -> set[Future[T]]:
        """Wait until some of `futures` are finished, or for INTERVAL. Returns the finished ones. Raises Failed."""
        finished = wait(futures, INTERVAL, FIRST_COMPLETED).done
        self.poll()
        now, progress = self.watch(), self.progress()
        if finished or progress != self.seen:
            self.team.longest_silence = max(self.team.longest_silence, now - self.heard)
            self.heard, self.seen = now, progress
        hangs = self.team.can_hang and now - self.heard > self.team.patience()
        if hangs or any(future.exception() is not None for future in finished):
            raise Failed(futures)
        return finished

    def run(self, jobs: Iterable[tuple[DeviceThread, Callable[[], T]]]) -> list[T]:
        """Return the results of `jobs`, in their order. The jobs of a thread run one after another. Raises Failed."""
        futures = [(self.submit(thread, work), thread) for thread, work in jobs]
        waiting = dict(futures)
        while waiting:
            for future in self.wait(waiting):
                del waiting[future]
        return [future.result() for future, _ in futures]

    def synchronize(self, needed: torch.device = CPU) -> None:
        """Let each device finish its work, so that results of this attempt count. Raises Failed.

        `needed` is a further device that has the data with which the attempt began.
        """
        threads = self.team.threads_with(needed)
        self.run([(thread, partial(synchronize, thread.device)) for thread in threads])
