"""Batches: two workers compared with one, in processes and in Ray, the overhead of the loop, and a simulated cluster.

`OMP_NUM_THREADS=1 python -m benchmarks.batch` writes benchmarks/batch.json and benchmarks/batch.png. Run nothing else
on the machine meanwhile. With more threads, the workers would slow each other down.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from benchmarks import ROOT
from benchmarks.machine import description
from benchmarks.simulated_gpus import Costs, scaling, simulate
from benchmarks.simulation import SimulatedWorker, Time, run_of
from sana_core.batch.pipeline import SamplingSettings, prepare
from sana_core.batch.plan import WorkerReport, Workload, batch_images, split_into_chunks
from sana_core.engine.local import ThreadWorker, make_job
from sana_core.engine.loop import Run
from sana_core.engine.process import processes

CHECKPOINT = ROOT / "tests" / "models" / "sana-tiny"
PROMPTS = ["a red circle on a blue background"]
PICTURES, CHUNK, RUNS = 32, 4, 3
CPU = torch.device("cpu")


def seconds_of(images: Iterator[Any], count: int) -> float:
    """Return the seconds until `count` images have arrived."""
    started = time.perf_counter()
    arrived = sum(1 for _ in images)
    seconds = time.perf_counter() - started
    assert arrived == count
    return seconds


def speedup(pixels: int) -> dict:
    """Compare two processes on two cores with one process on one core."""
    cores = sorted(os.sched_getaffinity(0))[:2]
    everywhere = os.sched_getaffinity(0)
    times: dict[str, list[float]] = {"one worker, one core": [], "two workers, two cores": []}
    request = prepare(Workload(PROMPTS, ()), CHECKPOINT, SamplingSettings(pixels, pixels), ["cpu"])
    job = make_job(request, None).pack()

    def generate(workers: Sequence[Any], count: int) -> float:
        return seconds_of(
            Run(job, split_into_chunks(batch_images(1, count, 0), 1), workers, PROMPTS, {}).images(), count
        )

    for name, count in zip(times, (1, 2), strict=True):
        # A process inherits the affinity of the thread that starts it.
        os.sched_setaffinity(0, set(cores[:count]))
        torch.set_num_threads(count)
        with processes().borrow([CPU] * count) as workers:
            generate(workers, 8 * count)
            times[name] = [generate(workers, PICTURES) for _ in range(RUNS)]
        os.sched_setaffinity(0, everywhere)
        processes().end()
    return {"pixels": pixels, **compared(times)}


def compared(times: dict[str, list[float]]) -> dict:
    """Return the medians of one and of two workers, and how many times as fast two are."""
    one, two = (statistics.median(values) for values in times.values())
    seconds = {name: round(statistics.median(values), 3) for name, values in times.items()}
    return {"pictures": PICTURES, "seconds": seconds, "speedup": round(one / two, 3), "target": 1.9}


def ray_speedup() -> dict:
    """Compare two Ray actors with one. They are processes with one thread each, and use one core each."""
    times: dict[str, list[float]] = {"one actor": [], "two actors": []}
    for name, workers in zip(times, (1, 2), strict=True):
        with ray_actors(workers) as generate:
            generate(4 * CHUNK * workers, CHUNK)
            times[name] = [seconds_of(generate(PICTURES, 1), PICTURES) for _ in range(RUNS)]
    return {"pixels": 128, **compared(times)}


@contextmanager
def ray_actors(workers: int) -> Iterator[Callable[[int, int], Iterator[Any]]]:
    """A context with a function (count, chunk) that generates on `workers` logical GPUs of this machine."""
    from ray.cluster_utils import Cluster

    from sana_core.cluster.batch import generate_with
    from sana_core.cluster.batch import make_job as cluster_job
    from sana_core.cluster.connection import ClusterSettings, connected
    from sana_core.cluster.session import ActorCache, ClusterRun

    job = cluster_job(prepare(Workload(PROMPTS, ()), CHECKPOINT, SamplingSettings(128, 128)))
    cluster, cache = (
        Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False}),
        ActorCache(),
    )
    for _ in range(workers):
        cluster.add_node(num_cpus=1, num_gpus=1, object_store_memory=80_000_000)
    with connected(cluster.address) as ray:
        run = ClusterRun(ray, ClusterSettings(cluster.address), cache)
        yield lambda count, chunk: generate_with(
            run, job, Workload(PROMPTS, batch_images(1, count, 0), chunk), WorkerReport()
        )
        cache.end(ray)
    cluster.shutdown()


class Sleeper:
    """The body of a worker that only sleeps for each image, to measure the loop."""

    def __init__(self, seconds: float, device: str, post: Callable[..., None], poll: Callable[[], None]) -> None:
        self.seconds, self.post = seconds, post

    def begin(self, job: dict) -> bool:
        return False

    def load(self) -> None:
        pass

    def generate(self, images: Sequence[Any], prompts: Any, texts: Any, inputs: Any) -> None:
        time.sleep(self.seconds * len(images))
        for image in images:
            self.post("image", image[0], image[0])


def sleeping(seconds: Sequence[float], count: int, chunk: int) -> float:
    """Return the seconds in which workers that sleep so long for an image finish `count` images."""
    workers = [ThreadWorker(f"worker {number}", CPU, partial(Sleeper, one)) for number, one in enumerate(seconds)]
    chunks = split_into_chunks(batch_images(1, count, 0), chunk)
    return seconds_of(Run({}, chunks, workers, PROMPTS, {PROMPTS[0]: (), None: ()}).images(), count)


def unequal() -> dict:
    """Measure two workers, one three times as fast as the other. Ideally both finish at the same time."""
    pace = 0.05, 0.15
    ideal = PICTURES / sum(1 / seconds for seconds in pace)
    shares = [ideal / sleeping(pace, PICTURES, 1) for _ in range(RUNS)]
    return {"pictures": PICTURES, "share_of_ideal": round(statistics.median(shares), 3), "target": 0.9}


def overhead() -> dict:
    """Measure the overhead of the engine for chunks of one second."""
    chunks = 5
    extra = [sleeping([0.25], 4 * chunks, 4) / chunks - 1 for _ in range(3)]
    return {"chunk_seconds": 1.0, "overhead": round(statistics.median(extra), 5), "target": 0.03}


def mishap(source: random.Random) -> str | None:
    """Return a random mishap: one chunk in 500 kills its worker, one in 2000 hangs, one in 500 runs out of memory."""
    value = source.random()
    return "dies" if value < 0.002 else "hangs" if value < 0.0025 else "memory" if value < 0.0045 else None


def simulate_cluster(seed: int) -> tuple[list[SimulatedWorker], float, list[float]]:
    """Simulate 64 unequal workers and 10,000 images. Returns them, their efficiency, and when each image arrived."""
    source, clock = random.Random(seed), Time()
    workers = [
        SimulatedWorker(
            f"worker {number}", clock, source.choice([0.5, 1.0, 1.0, 2.0]), 64 * seed + number, 2, 0.05, 0.1, 60, mishap
        )
        for number in range(64)
    ]
    run = run_of(split_into_chunks(batch_images(1, 10_000, 0), 4), clock, workers)
    arrived = [clock.now for _ in run.images()]
    assert len(arrived) == 10_000
    return workers, 10_000 / sum(worker.capacity() for worker in workers), arrived


def simulation() -> dict:
    """Simulate several seeds. The efficiency is the number of images, divided by the capacity of all living workers."""
    runs = [simulate_cluster(seed) for seed in range(10)]
    plot(*runs[0])
    efficiencies = [efficiency for _, efficiency, _ in runs]
    return {
        "workers": 64,
        "pictures": 10_000,
        "seeds": len(runs),
        "mishaps": statistics.mean(sum(len(worker.mishaps) for worker in workers) for workers, _, _ in runs),
        "efficiency": {"worst": round(min(efficiencies), 4), "mean": round(statistics.mean(efficiencies), 4)},
        "target": 0.95,
    }


def idle_gpus() -> dict:
    """Return the share of the time in which four equal GPUs load, encode, sample and decode."""
    shares = {}
    for image in (0.1, 0.3, 1.0, 5.0):
        images = int(max(2000, min(12_000, 1200 / image)))
        shares[f"{image} s per image"] = {
            f"{count} images of a prompt": round(simulate(4, Costs(8 * image / 20), images, count)[1], 3)
            for count in (1, 4)
        }
    return {"gpus": 4, "busy": shares, "target": 0.95}


def plot(workers: list[SimulatedWorker], efficiency: float, arrived: list[float]) -> None:
    """Plot the activity of every worker, and the number of images over time."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.patches import Patch

    colours = {"drawn": "#7aa6c2", "dies": "#c0392b", "hangs": "#e67e22", "memory": "#8e44ad"}
    figure, (rows, curve) = plt.subplots(2, 1, figsize=(10, 8), sharex=True, height_ratios=(3, 1))
    bars = [
        (row, *bar)
        for row, worker in enumerate(sorted(workers, key=lambda worker: worker.speed))
        for bar in worker.busy
        if bar[0] < arrived[-1]
    ]
    for kind, colour in colours.items():
        parts = [(row, start, max(min(end, arrived[-1]) - start, 0.4)) for row, start, end, how in bars if how == kind]
        places, starts, widths = zip(*parts, strict=True) if parts else ((), (), ())
        rows.barh(places, widths, left=starts, height=1, color=colour, linewidth=0)
    rows.set_ylabel("workers, the slowest below")
    mishaps = sum(len(worker.mishaps) for worker in workers)
    rows.set_title(f"10,000 images on 64 simulated workers: efficiency {efficiency:.3f}, {mishaps} mishaps")
    rows.legend(handles=[Patch(color=colour, label=kind) for kind, colour in colours.items()], loc="lower right")
    curve.plot(arrived, range(1, len(arrived) + 1), color="#2c3e50")
    curve.set_xlabel("seconds")
    curve.set_ylabel("images")
    figure.tight_layout()
    figure.savefig(ROOT / "benchmarks" / "batch.png", dpi=80)


def main() -> None:
    parts = {
        "speedup": lambda: [speedup(pixels) for pixels in (128, 256)],
        "ray_speedup": ray_speedup,
        "unequal": unequal,
        "overhead": overhead,
        "simulation": simulation,
        "idle_gpus": idle_gpus,
        "simulated_scaling": scaling,
    }
    path = ROOT / "benchmarks" / "batch.json"
    figures = json.loads(path.read_text()) if path.is_file() else {}
    figures |= description()
    for name in sys.argv[1:] or parts:
        figures[name] = parts[name]()
        sys.stdout.write(f"{name}: {json.dumps(figures[name])}\n")
        sys.stdout.flush()
    path.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
