"""Seconds of a 4096 x 4096 graph with the bundled checkpoint, queued over HTTP: `python -m benchmarks.graph_4k`.

Writes benchmarks/graph_4k.json.
"""

from __future__ import annotations

import json
import tempfile
import time
from pathlib import Path

from checkpoints import link_tiny
from host import base_directory, images_of, run_graph, start_server

from benchmarks import ROOT
from benchmarks.machine import write

SIDE = 4096


def main() -> None:
    graph = json.loads((ROOT / "tests" / "graphs" / "tiny.json").read_text())
    link_tiny(base_directory("bench-4k"))
    names = {node["class_type"]: key for key, node in graph.items()}
    graph[names["SanaNodesEmptyLatent"]]["inputs"].update(width=SIDE, height=SIDE)
    seconds: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder, start_server("bench-4k", Path(folder)) as server:
        started = last = time.perf_counter()
        node, events = None, []
        for event in run_graph(server, graph):
            events.append(event)
            if isinstance(event, dict) and event["type"] == "executing":
                now = time.perf_counter()
                if node is not None:
                    seconds[graph[node]["class_type"]] = round(now - last, 1)
                node, last = event["data"]["node"], now
        total = round(time.perf_counter() - started, 1)
        assert len(images_of(events)) == 1
    figures = {
        "pixels": SIDE,
        "steps": graph[names["SanaNodesSampler"]]["inputs"]["steps"],
        "seconds": total,
        "seconds_of_nodes": seconds,
    }
    write(__file__, figures)


if __name__ == "__main__":
    main()
