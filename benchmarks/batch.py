"""Batches: two workers compared with one, in threads and in Ray, the overhead of the queue, and a simulated cluster.

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
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from typing import Any

import torch

from benchmarks import ROOT
from benchmarks.machine import description
from benchmarks.simulated_gpus import Costs, busy_share
from benchmarks.simulation import SimulatedPool
from sana_core import inspect_checkpoint
from sana_core.batch.local import LocalPool
from sana_core.batch.loop import run_batch
from sana_core.batch.pipeline import (
    Conditioning,
    SamplingSettings,
    encode_texts,
    generate_chunk,
    load_encoder,
    load_models,
    resolve_settings,
)
from sana_core.batch.plan import Workload, batch_images, split_into_chunks
from sana_core.batch.queue import Queue

CHECKPOINT = ROOT / "tests" / "models" / "sana-tiny"
PROMPTS = ["a red circle on a blue background"]
PICTURES, CHUNK, RUNS = 32, 4, 3
CPU = torch.device("cpu")


def seconds_of(pool, count: int, chunk: int) -> float:
    """Return the seconds in which the pool's workers generate `count` images."""
    queue = Queue(split_into_chunks(batch_images(1, count, 0), chunk))
    started = time.perf_counter()
    arrived = sum(1 for _ in run_batch(queue, pool))
    seconds = time.perf_counter() - started
    assert arrived == count
    return seconds


def warm(pool, workers: int) -> None:
    """Wait until all workers have started, and let each of them generate."""
    while len(pool.workers()) < workers:
        pool.wait()
    seconds_of(pool, 4 * CHUNK * workers, CHUNK)


def local_pool(workers: int, cores: set[int], pixels: int = 128) -> LocalPool:
    """Return workers in threads on these cores. They generate with the tiny checkpoint."""
    settings = resolve_settings(SamplingSettings(pixels, pixels), CHECKPOINT)
    texts, negative = encode_texts(load_encoder(CHECKPOINT, CPU, "float32"), PROMPTS, "")
    models = load_models(inspect_checkpoint(CHECKPOINT), CPU, settings, inspect_checkpoint(CHECKPOINT))
    everywhere = os.sched_getaffinity(0)
    # Threads inherit the affinity of the thread that starts them.
    os.sched_setaffinity(0, cores)
    torch.set_num_threads(workers)
    pool = LocalPool(
        [CPU] * workers,
        lambda device, poll: (
            lambda chunk: generate_chunk(
                models, settings, chunk, Conditioning([texts[PROMPTS[0]]] * len(chunk), negative), poll
            )
        ),
    )
    os.sched_setaffinity(0, everywhere)
    return pool


def speedup(pixels: int) -> dict:
    """Compare two workers on two cores with one worker on one core. They are threads, which share Python's lock."""
    cores = sorted(os.sched_getaffinity(0))[:2]
    times: dict[str, list[float]] = {"one worker, one core": [], "two workers, two cores": []}
    for _ in range(RUNS):
        for name, workers in zip(times, (1, 2), strict=True):
            with closing(local_pool(workers, set(cores[:workers]), pixels)) as pool:
                seconds_of(pool, 2 * workers, 1)
                times[name].append(seconds_of(pool, PICTURES, 1))
    return {"pixels": pixels, **compared(times)}


def compared(times: dict[str, list[float]]) -> dict:
    """Return the medians of one and of two workers, and how many times as fast two are."""
    one, two = (statistics.median(values) for values in times.values())
    seconds = {name: round(statistics.median(values), 3) for name, values in times.items()}
    return {"pictures": PICTURES, "seconds": seconds, "speedup": round(one / two, 3), "target": 1.8}


def ray_speedup() -> dict:
    """Compare two Ray actors with one. They are processes with one thread each, and use one core each."""
    times: dict[str, list[float]] = {"one actor": [], "two actors": []}
    for name, workers in zip(times, (1, 2), strict=True):
        with ray_pool(workers) as actors:
            times[name] = [seconds_of(actors, PICTURES, 1) for _ in range(RUNS)]
    return {"pixels": 128, **compared(times)}


def sleeping(seconds: Callable[[str], float], workers: int) -> LocalPool:
    """Return workers that only sleep for each image, to measure the queue."""
    names = iter(range(workers))

    def prepare(device, poll):
        name = f"worker {next(names)}"
        return lambda chunk: [time.sleep(seconds(name) * len(chunk)), *chunk][1:]

    return LocalPool([CPU] * workers, prepare)


def unequal() -> dict:
    """Measure two workers, one three times as fast as the other. Ideally both finish at the same time."""
    pace = {"worker 0": 0.05, "worker 1": 0.15}
    ideal = PICTURES / sum(1 / seconds for seconds in pace.values())
    shares = []
    for _ in range(RUNS):
        with closing(sleeping(pace.__getitem__, 2)) as pool:
            shares.append(ideal / seconds_of(pool, PICTURES, 1))
    return {"pictures": PICTURES, "share_of_ideal": round(statistics.median(shares), 3), "target": 0.9}


def overhead() -> dict:
    """Measure the overhead of the engine for chunks of one second."""
    chunks, extra = 5, []
    for _ in range(3):
        with closing(sleeping(lambda name: 0.25, 1)) as pool:
            extra.append(seconds_of(pool, 4 * chunks, 4) / chunks - 1)
    return {"chunk_seconds": 1.0, "overhead": round(statistics.median(extra), 5), "target": 0.03}


@contextmanager
def ray_pool(workers: int) -> Iterator[Any]:
    """A context with actors on `workers` logical GPUs of this machine, after a warm-up."""
    from ray.cluster_utils import Cluster

    from sana_core.checkpoints.fingerprint import fingerprint
    from sana_core.cluster.actors import ActorCache, ClusterRun
    from sana_core.cluster.batch import BatchPool
    from sana_core.cluster.connection import ClusterSettings, connected
    from sana_core.cluster.pool import Pool
    from sana_core.cluster.worker import Job

    settings, path = resolve_settings(SamplingSettings(128, 128), CHECKPOINT), str(CHECKPOINT)
    job = Job(settings, {path: fingerprint(path)}, path, path, path)
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    for _ in range(workers):
        cluster.add_node(num_cpus=1, num_gpus=1, object_store_memory=80_000_000)
    settings = ClusterSettings(cluster.address)
    with (
        connected(cluster.address) as ray,
        closing(Pool(ClusterRun(ray, settings, ActorCache()), job, workers)) as pool,
    ):
        actors = BatchPool(pool, Workload(PROMPTS, ()))
        warm(actors, workers)
        yield actors
    cluster.shutdown()


def mishap(source: random.Random) -> str | None:
    """Return a random mishap: one chunk in 500 kills its worker, one in 2000 hangs, one in 500 runs out of memory."""
    value = source.random()
    return "dies" if value < 0.002 else "hangs" if value < 0.0025 else "memory" if value < 0.0045 else None


def simulate(seed: int) -> tuple[SimulatedPool, float, list[float]]:
    """Simulate 64 unequal workers and 10,000 images. Returns the pool, its efficiency, and when each image arrived."""
    source = random.Random(seed)
    speeds = [source.choice([0.5, 1.0, 1.0, 2.0]) for _ in range(64)]
    pool = SimulatedPool(speeds, seed, delay=0.05, jitter=0.1, restart=60, mishap=mishap)
    queue = Queue(split_into_chunks(batch_images(1, 10_000, 0), 4))
    arrived = [pool.clock for _ in run_batch(queue, pool)]
    assert len(arrived) == 10_000
    return pool, 10_000 / pool.capacity(), arrived


def simulation() -> dict:
    """Simulate several seeds. The efficiency is the number of images, divided by the capacity of all living workers."""
    runs = [simulate(seed) for seed in range(10)]
    plot(*runs[0])
    efficiencies = [efficiency for _, efficiency, _ in runs]
    return {
        "workers": 64,
        "pictures": 10_000,
        "seeds": len(runs),
        "mishaps": statistics.mean(len(pool.mishaps) for pool, _, _ in runs),
        "efficiency": {"worst": round(min(efficiencies), 4), "mean": round(statistics.mean(efficiencies), 4)},
        "target": 0.95,
    }


def idle_gpus() -> dict:
    """Return the share of the time in which four equal GPUs work. Loading, encoding and PNG files are included."""
    seconds, writers, shares = (0.1, 0.3, 1.0, 5.0), (1, 2, 4), {}
    for image in seconds:
        images = int(max(2000, min(12_000, 1200 / image)))
        shares[f"{image} s per image"] = {
            f"{count} writers": round(busy_share(4, Costs(image), images, writers=count), 3) for count in writers
        }
    return {"gpus": 4, "png_seconds": Costs(1).png, "busy": shares, "target": 0.95}


def plot(pool: SimulatedPool, efficiency: float, arrived: list[float]) -> None:
    """Plot the activity of every worker, and the number of images over time."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.patches import Patch

    colours = {"drawn": "#7aa6c2", "dies": "#c0392b", "hangs": "#e67e22", "memory": "#8e44ad"}
    figure, (rows, curve) = plt.subplots(2, 1, figsize=(10, 8), sharex=True, height_ratios=(3, 1))
    order = {slot: row for row, slot in enumerate(sorted(pool.speeds, key=pool.speeds.__getitem__))}
    for kind, colour in colours.items():
        bars = [bar for bar in pool.busy if bar[3] == kind and bar[1] < pool.clock]
        starts = [start for _, start, _, _ in bars]
        widths = [max(min(end, pool.clock) - start, 0.4) for _, start, end, _ in bars]
        rows.barh([order[slot] for slot, *_ in bars], widths, left=starts, height=1, color=colour, linewidth=0)
    rows.set_ylabel("workers, the slowest below")
    rows.set_title(f"10,000 images on 64 simulated workers: efficiency {efficiency:.3f}, {len(pool.mishaps)} mishaps")
    rows.legend(handles=[Patch(color=colour, label=kind) for kind, colour in colours.items()], loc="lower right")
    curve.plot(arrived, range(1, len(arrived) + 1), color="#2c3e50")
    curve.set_xlabel("seconds")
    curve.set_ylabel("images")
    figure.tight_layout()
    figure.savefig(ROOT / "benchmarks" / "batch.png", dpi=80)


def main() -> None:
    parts = {
        "speedup": lambda: [speedup(pixels) for pixels in (128, 256, 512)],
        "ray_speedup": ray_speedup,
        "unequal": unequal,
        "overhead": overhead,
        "simulation": simulation,
        "idle_gpus": idle_gpus,
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
