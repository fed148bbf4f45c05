"""Two GPUs where the host is the limit: workers in threads of one process, and workers in processes of their own.

`OMP_NUM_THREADS=1 python -m benchmarks.host_bound` writes benchmarks/host_bound.json. No GPU has run this. The GPUs are
infinitely fast: a step takes the time in which the host launches it. The loop, the workers, the sampler and the forward
are the real ones, and so are Triton's launcher and its lookups, see fake_triton.py. The model has the blocks of a
released model, and tiny tensors.

All figures are ratios to one worker of the same round. Each round measures all ways in turn, and the medians of the
rounds count. `busy` is the share of a core that each worker got. If it is far below 1 for two processes, other
programs had the cores, and the round says little.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import psutil
import torch

from benchmarks import ROOT
from benchmarks.fake_triton import bytes_per_microsecond, install
from benchmarks.machine import write
from sana_core import inspect_checkpoint
from sana_core.batch.pipeline import SamplingSettings, resolve_settings
from sana_core.batch.plan import batch_images, split_into_chunks
from sana_core.engine import process
from sana_core.engine.body import Job, pack
from sana_core.engine.local import ThreadWorker
from sana_core.engine.loop import Run
from sana_core.engine.process import Processes
from sana_core.runtime.text import Json

CPU = torch.device("cpu")
# Blocks of the transformer of released models. The host's time of a step depends on nothing else.
BLOCKS = {"0.6B": 28, "1.6B": 20}
HEADS, TOKENS, PIXELS, STEPS = 2, 8, 128, 20
PROMPT = "a red circle on a blue background"
WAYS = ("1 thread", "2 threads", "1 process", "2 processes")


def save_transformer(folder: Path, blocks: int) -> None:
    from diffusers import SanaTransformer2DModel

    torch.manual_seed(0)
    SanaTransformer2DModel(
        num_layers=blocks,
        attention_head_dim=32,
        num_attention_heads=HEADS,
        num_cross_attention_heads=HEADS,
        cross_attention_head_dim=32,
        cross_attention_dim=32 * HEADS,
        caption_channels=64,
        sample_size=PIXELS // 32,
    ).save_pretrained(folder)


def make_job(folder: Path, pixels: int = PIXELS) -> Json:
    """Return the job of the transformer in `folder`. Its results are latents, which are not decoded."""
    settings = resolve_settings(SamplingSettings(pixels, pixels, STEPS), inspect_checkpoint(folder))
    return Job(settings, str(folder), revision=str(folder), latents=True, prompts=1, fixed_chunk=True).pack()


@contextmanager
def workers_of(way: str, processes: Processes, device: torch.device = CPU) -> Iterator[list[Any]]:
    count, kind = int(way.split()[0]), way.split()[1]
    if kind.startswith("thread"):
        yield [ThreadWorker(f"thread {number}", device) for number in range(count)]
    else:
        with processes.borrow([device] * count) as workers:
            yield workers


def processor_seconds(workers: Sequence[Any]) -> float:
    """Return the processor time that the processes of `workers` have used."""
    pids = {os.getpid() if isinstance(worker, ThreadWorker) else worker.process.pid for worker in workers}
    return sum(sum(psutil.Process(pid).cpu_times()[:2]) for pid in pids)


def steps_per_second(job: Json, workers: Sequence[Any], seconds: float, width: int = 64) -> tuple[float, float]:
    """Return the steps per second of all workers together, and the share of a core that each got.

    The time begins when each worker has finished an image. `width`: channels of the embedded prompts.
    """
    text = [pack(torch.ones(1, TOKENS, width)), pack(torch.ones(1, TOKENS))]
    steps: Counter[Any] = Counter()

    def on_step(worker: Any, *values: Any) -> None:
        steps[worker] += 1

    chunks = split_into_chunks(batch_images(1, 100_000, 0), 1)
    run = Run(job, chunks, workers, [PROMPT], {PROMPT: text, None: text}, on_step=on_step)
    began = used = first = 0.0

    def is_over() -> bool:
        nonlocal began, used, first
        if began:
            return time.perf_counter() - began > seconds
        if min(steps[worker] for worker in workers) > STEPS:
            began, used, first = time.perf_counter(), processor_seconds(workers), steps.total()
        return False

    images = run.images()
    try:
        for _ in images:
            if is_over():
                break
        took = time.perf_counter() - began
        return (steps.total() - first) / took, (processor_seconds(workers) - used) / took / len(workers)
    finally:
        images.close()


def compare(job: Json, processes: Processes, rounds: int, seconds: float) -> dict[str, Any]:
    """Measure all ways in each round. Returns the medians of the ratios of the rounds."""
    rates: dict[str, list[float]] = {way: [] for way in WAYS}
    shares: dict[str, list[float]] = {way: [] for way in WAYS}
    for number in range(rounds):
        # In turn from both ends, so that a slow change of the machine's load falls on all ways.
        for way in WAYS if number % 2 else WAYS[::-1]:
            with workers_of(way, processes) as workers:
                rate, share = steps_per_second(job, workers, seconds)
            rates[way].append(rate)
            shares[way].append(share)
            sys.stderr.write(f"round {number + 1}, {way}: {rate:.1f} steps/s, busy {share:.2f}\n")

    def ratio(way: str, base: str) -> dict[str, float | list[float]]:
        values = [rate / one for rate, one in zip(rates[way], rates[base], strict=True)]
        return {"median": round(statistics.median(values), 3), "rounds": [round(value, 3) for value in values]}

    return {
        "milliseconds_of_a_step": round(1e3 / statistics.median(rates["1 thread"]), 2),
        "2 threads / 1 thread": ratio("2 threads", "1 thread"),
        "2 processes / 1 process": ratio("2 processes", "1 process"),
        "1 process / 1 thread": ratio("1 process", "1 thread"),
        "busy": {way: round(statistics.median(values), 3) for way, values in shares.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--seconds", type=float, default=4.0, help="of each measurement")
    parser.add_argument("--show", action="store_true", help="only print the figures, and do not write them")
    options = parser.parse_args()
    torch.set_num_threads(1)
    speed = bytes_per_microsecond()
    install(speed)
    figures: dict[str, Any] = {"rounds": options.rounds, "seconds": options.seconds, "cores": os.cpu_count()}
    processes = Processes()
    stand_in = mock.patch.object(process, "PACKAGE", ROOT / "benchmarks" / "host_bound_worker")
    with (
        stand_in,
        mock.patch.dict(os.environ, {"FAKE_TRITON_SPEED": str(speed)}),
        tempfile.TemporaryDirectory() as base,
    ):
        for name, blocks in BLOCKS.items():
            save_transformer(Path(base) / name, blocks)
            figures[f"{name}, {blocks} blocks"] = compare(
                make_job(Path(base) / name), processes, options.rounds, options.seconds
            )
        processes.end()
    write(__file__, figures, only_print=options.show)


if __name__ == "__main__":
    main()
