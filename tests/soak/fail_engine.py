"""Let worker processes fail in every phase, from inside and from outside, and check the images of each run.

`OMP_NUM_THREADS=1 python tests/soak/fail_engine.py --runs 5000` runs batches on 1 to 3 worker processes with the body
of tests/stub_engine, which waits in place of computing. Processes, pipes, signals and the loop are real. The shipped
limits are all shorter by the factor FACTOR. In each run:

- Up to six faults are ordered: a process kills or stops itself, ends, hangs with and without Python's lock, runs out of
  memory, or raises an error of the driver or an unknown one, while it starts, begins, loads, encodes, samples, decodes
  or sends.
- Up to three times a process is killed or stopped from outside, at a random moment, also between two runs.
- Sometimes the consumer of the images pauses, or cancels the run. The workers stay warm for the next run.

After each run no image is lost, doubled or wrong. A run may end with an error only if the faults were enough for it.

`--real` kills and stops two processes that run the demo model, with a tenth of the shipped limits.
"""

from __future__ import annotations

import argparse
import faulthandler
import logging
import os
import random
import re
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path += [str(ROOT / "tests"), str(ROOT)]

import torch  # noqa: E402
from stub_runs import CPU, Stub, Work, scaled, stub_workers  # noqa: E402

from sana_core.batch.pipeline import SamplingSettings, prepare  # noqa: E402
from sana_core.batch.plan import FailedImage, Workload, batch_images  # noqa: E402
from sana_core.engine.local import generate_local  # noqa: E402
from sana_core.engine.loop import STRIKES  # noqa: E402
from sana_core.engine.process import ProcessWorker, processes  # noqa: E402

FACTOR = 0.005
# A run that takes longer than this many seconds counts as endless. Six faults while loading take 54 s.
LIMIT = 100.0
PHASES = ("start", "begin", "load", "encode", "step", "decode", "send")
# A hang while a worker loads takes the longest limit, so it is rare.
KINDS = ("kill", "kill", "kill", "stop", "exit", "leave", "hang", "deaf", "memory", "driver", "refused", "error")
SLOW_PHASES, HANGS = ("load", "encode"), ("stop", "hang", "deaf")
EXCEPTIONS = ("memory", "refused", "error")
DEMO = ROOT / "demo" / "sana-posters"


class Ended(Exception):
    """The consumer cancels the run."""


def endless() -> None:
    raise AssertionError("the run does not end")


def worker_pids(workers: Sequence[ProcessWorker]) -> list[int]:
    return [worker.process.pid for worker in workers if worker.process is not None and worker.process.is_alive()]


@contextmanager
def signals_from_outside(
    workers: Sequence[ProcessWorker], source: random.Random, most: int, within: float, happened: Counter[str]
) -> Iterator[None]:
    """A context in which up to `most` worker processes are killed or stopped, within so many seconds."""
    moments = sorted(source.uniform(0, within) for _ in range(source.randint(0, most)))
    numbers = [source.choice([signal.SIGKILL] * 3 + [signal.SIGSTOP]) for _ in moments]
    ended = threading.Event()

    def send() -> None:
        began = time.monotonic()
        for moment, number in zip(moments, numbers, strict=True):
            if ended.wait(max(0.0, began + moment - time.monotonic())):
                return
            pids = worker_pids(workers)
            if pids:
                try:
                    os.kill(source.choice(pids), number)
                except ProcessLookupError:
                    continue
                happened[f"outside: {number.name}"] += 1

    thread = threading.Thread(target=send)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def choose_faults(stub: Stub, source: random.Random) -> list[tuple[str, str]]:
    """Order up to six faults. Returns their phases and kinds."""
    faults = []
    for _ in range(source.choice([0, 0, 1, 1, 2, 3, 4, 6])):
        phase, kind = source.choice(PHASES), source.choice(KINDS)
        if phase in SLOW_PHASES and kind in HANGS and source.random() < 0.8:
            kind = "kill"
        if kind == "refused" and phase in ("step", "decode", "send"):
            # Only this fault ends the whole run at once.
            kind = "error"
        if kind in EXCEPTIONS and phase in ("begin", "load", "encode") and source.random() < 0.7:
            # Each of these ends a worker's part in the run.
            kind = "kill"
        stub.order(phase, kind)
        faults.append((phase, kind))
    return faults


def check_error(
    error: BaseException, taken: Sequence[tuple[str, str]], workers: Sequence[ProcessWorker], births: Sequence[int]
) -> None:
    """Raise AssertionError if a run ended with `error` although its workers had not failed often enough."""
    assert re.search("StubError|SystemExit|an ordered failure|silent for|has ended with", str(error)), repr(error)
    refused = sum(kind in EXCEPTIONS and phase in ("begin", "load", "encode") for phase, kind in taken)
    # A worker starts again after each loss but the last one. Memory that runs out with one image counts as a loss too.
    memory = sum(kind == "memory" and phase in ("step", "decode", "send") for phase, kind in taken)
    losses = [worker.birth - birth + memory for worker, birth in zip(workers, births, strict=True)]
    # Each worker that is left may have failed with an image, before any image was finished. A worker that was lost with
    # the image has tried it too.
    unknown = sum(kind == "error" and phase in ("step", "decode", "send") for phase, kind in taken)
    lost = sum(count >= (1 if unknown else STRIKES - 1) for count in losses)
    assert refused + lost + unknown >= len(workers), (
        f"{type(error).__name__}: {error}, after only {lost} lost and {refused} refused of {len(workers)} workers"
    )


def fail_at_random(stub: Stub, source: random.Random, number: int) -> Counter[str]:
    """Run a batch with random faults, check it, and return what happened."""
    happened = Counter(runs=1)
    prompts = [f"prompt {index}" for index in range(source.choice([1, 2, 3, 30]))]
    job = {
        "name": f"run {number}",
        # With the same revision as the last run, warm workers keep their models.
        "revision": f"{number // 3}",
        "size": source.choice([320, 320, 3_200_000]),
        "fits": source.choice([1, 2, 1000]),
        "limit": source.choice([None, None, 2]),
        "step": source.choice([0.001, 0.005]),
    }
    weights = {"layer": b"%d" % (number // 3)}
    work = Work(job, prompts, source.randint(1, 8) if len(prompts) < 30 else 1, source.choice([1, 2, 4]), weights)
    count, pause, leaves = source.randint(1, 3), source.random() < 0.01, source.random() < 0.1
    faults = choose_faults(stub, source)
    results: list[tuple[Any, Any]] = []
    failure: BaseException | None = None
    began = time.monotonic()
    faulthandler.dump_traceback_later(3 * LIMIT, exit=True)

    def poll() -> None:
        if time.monotonic() - began > LIMIT:
            endless()
        if leaves and len(results) >= len(work.images) // 2:
            raise Ended

    with stub.processes.borrow([CPU] * count) as workers:
        births = [worker.birth for worker in workers]
        with signals_from_outside(workers, source, 3 if source.random() < 0.5 else 0, 0.6, happened):
            try:
                for result in work.run(workers, scaled(FACTOR)).images(poll):
                    results.append(result)
                    if pause and len(results) == 2:
                        time.sleep(6)
            except (Exception, Ended) as error:
                failure = error
        restarts = [worker.birth - birth for worker, birth in zip(workers, births, strict=True)]
    faulthandler.cancel_dump_traceback_later()
    if isinstance(failure, AssertionError):
        raise failure
    pending = {name.rsplit("-", 1)[0] for name in stub.pending()}
    taken = [fault for fault in faults if "-".join(fault) not in pending]
    stub.withdraw()
    happened.update(f"{phase}: {kind}" for phase, kind in taken)
    happened["images"], happened["restarts"] = len(results), sum(restarts)
    failed = work.check(results, complete=failure is None)
    # Five losses of an image, or an unknown error of the image, are failures of that image only.
    allowed = sum(phase in ("step", "decode", "send") for phase, _ in taken) + sum(restarts) // 5
    assert len(failed) <= allowed, f"{len(failed)} failed, allowed {allowed}: {failed[:3]}"
    happened["failed images"] = len(failed)
    if failure is None:
        happened["complete"] += 1
    elif isinstance(failure, Ended):
        happened["cancelled"] += 1
    else:
        check_error(failure, taken, workers, births)
        happened[f"ended with {type(failure).__name__}"] += 1
    return happened


def expected_posters(prompts: Sequence[str], settings: SamplingSettings, images: Sequence[Any]) -> dict[int, Any]:
    request = prepare(Workload(prompts, images, 1), DEMO, settings, ["cpu"])
    return {image.number: pixels for image, pixels in generate_local(request)}


def real_runs() -> Callable[[random.Random, int], Counter[str]]:
    """Return a function that runs the demo model on two processes, of which some are killed or stopped."""
    prompts = (ROOT / "demo" / "prompts.txt").read_text().splitlines()[:3]
    settings, images = SamplingSettings(64, 64, 2), batch_images(3, 3, 7)
    expected = expected_posters(prompts, settings, images)

    def run(source: random.Random, number: int) -> Counter[str]:
        happened = Counter(runs=1)
        request = prepare(Workload(prompts, images, source.choice([1, 2])), DEMO, settings, ["cpu", "cpu"])
        results: dict[int, torch.Tensor] = {}
        # With the shipped limits, a run waits five minutes for a process that was stopped at the end of the run before.
        with signals_from_outside(processes().workers, source, 2, 3.0, happened):
            for image, pixels in generate_local(request, limits=scaled(0.1)):
                assert image.number not in results, f"image {image.number} came twice"
                assert not isinstance(pixels, FailedImage), pixels
                assert torch.equal(pixels, expected[image.number]), f"image {image.number} is wrong"
                results[image.number] = pixels
        assert results.keys() == expected.keys(), "images are lost"
        happened["images"] = len(results)
        return happened

    return run


def repeat(runs: int, seed: int, run: Callable[[random.Random, int], Counter[str]], show: int = 0) -> Counter[str]:
    """Return the counts of all events. The error of a failing run has the seed that repeats its faults."""
    total: Counter[str] = Counter()
    longest, began = 0.0, time.monotonic()
    for number in range(seed, seed + runs):
        started = time.monotonic()
        try:
            total += run(random.Random(number), number)
        except AssertionError as error:
            raise AssertionError(f"run with seed {number}: {error}") from error
        longest = max(longest, time.monotonic() - started)
        if show and (number - seed + 1) % show == 0:
            seconds = time.monotonic() - began
            sys.stdout.write(f"{dict(sorted(total.items()))}\n{seconds:.0f} s, longest run {longest:.1f} s\n")
            sys.stdout.flush()
    return total


def soak(runs: int, seed: int, show: int = 0) -> Counter[str]:
    """Return the counts of all events in `runs` runs with the stub."""
    logger = logging.getLogger("sana_core")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        with stub_workers() as stub:
            return repeat(runs, seed, lambda source, number: fail_at_random(stub, source, number), show)
    finally:
        logger.setLevel(level)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, help="default: 5000, or 300 with --real")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--real", action="store_true", help="the demo model in place of the stub")
    parser.add_argument("--show", type=int, default=100, help="runs between two lines of counts")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.real:
        total = repeat(arguments.runs or 300, arguments.seed, real_runs(), arguments.show)
    else:
        total = soak(arguments.runs or 5000, arguments.seed, arguments.show)
    sys.stdout.write(f"{dict(sorted(total.items()))}\n")


if __name__ == "__main__":
    main()
