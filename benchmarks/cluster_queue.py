"""Seconds of a queue of SANA Batch Sampler, over HTTP, on this machine and on a Ray cluster of one worker on it.

`OMP_NUM_THREADS=1 python benchmarks/cluster_queue.py` writes benchmarks/cluster_queue.json. The first queue on the
cluster connects, starts the worker and loads; the second finds it there.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "scripts"), str(ROOT / "tests" / "cluster")]

from host import free_port, run_graph, start_server  # noqa: E402
from machine import write  # noqa: E402
from machines import add_node  # noqa: E402
from queues import batch_graph, configure  # noqa: E402

NAME = "bench-cluster"
COUNT, STEPS, RUNS = 4, 20, 3


def main() -> None:
    from ray.cluster_utils import Cluster

    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    port = free_port()
    head = {"num_cpus": 0, "include_dashboard": False, "ray_client_server_port": port}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    add_node(cluster)
    configure(NAME, f"ray://127.0.0.1:{port}")
    seconds: dict[str, list[float]] = {"default": [], "cluster": []}
    try:
        with tempfile.TemporaryDirectory() as folder, start_server(NAME, Path(folder)) as server:
            for seed in range(RUNS + 1):
                for devices in seconds:
                    started = time.perf_counter()
                    list(run_graph(server, batch_graph(devices, seed=seed, steps=STEPS, count=COUNT)))
                    seconds[devices].append(round(time.perf_counter() - started, 2))
    finally:
        cluster.shutdown()
    figures = {
        "ray": version("ray"),
        "pictures": COUNT,
        "steps": STEPS,
        "first_queue": {devices: runs[0] for devices, runs in seconds.items()},
        "later_queues": {devices: runs[1:] for devices, runs in seconds.items()},
        "more_than_here": round(
            statistics.median(seconds["cluster"][1:]) - statistics.median(seconds["default"][1:]), 2
        ),
        "target": 2.0,
    }
    write(__file__, figures)


if __name__ == "__main__":
    main()
