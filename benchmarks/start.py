"""The cost of the pack at the server's start, and the time of a demo image: `make bench`.

Writes benchmarks/start.json. The baseline of each figure is measured in the same run.
"""

from __future__ import annotations

import re
import statistics
import subprocess
import time

from host import base_directory, start_server
from setup import comfyui_path

from benchmarks import ROOT
from benchmarks.machine import last_line, write

RUNS = 5

# Imports the pack as the server does, in a process that has already imported ComfyUI.
IMPORT = """
import asyncio, json, sys, time, tracemalloc
host, pack = sys.argv[1:]
sys.path.insert(0, host)
from comfy.cli_args import args
import torch
args.cpu = not torch.cuda.is_available()
import nodes
from server import PromptServer
PromptServer(asyncio.new_event_loop())
import comfy_api.latest
tracemalloc.start()
started = time.perf_counter()
loaded = asyncio.run(nodes.load_custom_node(pack, set()))
seconds = time.perf_counter() - started
assert loaded
sys.stdout.write("\\n" + json.dumps({"seconds": seconds, "bytes": tracemalloc.get_traced_memory()[0]}))
"""


def import_cost() -> dict:
    """Return seconds and traced bytes of importing the pack, and of importing an empty pack as the baseline."""
    base = base_directory("bench")
    empty = base / "empty_pack"
    empty.mkdir(exist_ok=True)
    (empty / "__init__.py").write_text("NODE_CLASS_MAPPINGS = {}\n")
    runs: dict[str, list[dict]] = {"pack": [], "empty_pack": []}
    for _ in range(RUNS):
        for name, folder in (("pack", base / "custom_nodes" / "sana"), ("empty_pack", empty)):
            runs[name].append(last_line("-c", IMPORT, str(comfyui_path()), str(folder)))
    return {
        name: {
            "seconds": round(statistics.median(run["seconds"] for run in results), 4),
            "megabytes": round(statistics.median(run["bytes"] for run in results) / 1e6, 3),
        }
        for name, results in runs.items()
    }


def server_start() -> dict:
    """Return the seconds until the server answers, with the pack and without any pack."""
    times: dict[str, list[float]] = {"with_pack": [], "without": []}
    for _ in range(RUNS):
        for name, options in (("with_pack", []), ("without", ["--disable-all-custom-nodes"])):
            started = time.perf_counter()
            with start_server("bench", options=options):
                times[name].append(time.perf_counter() - started)
    medians = {name: round(statistics.median(values), 2) for name, values in times.items()}
    return {"seconds": medians, "ratio": round(medians["with_pack"] / medians["without"], 3)}


def demo() -> dict:
    """Return the seconds of `make demo` and of its graph, after a first setup."""
    results = []
    for _ in range(RUNS):
        started = time.perf_counter()
        process = subprocess.run(["make", "demo"], cwd=ROOT, check=True, capture_output=True, text=True)
        (graph,) = re.findall(r"of which the graph ([\d.]+) s", process.stdout)
        results.append((time.perf_counter() - started, float(graph)))
    total, graph = (statistics.median(column) for column in zip(*results, strict=True))
    return {"seconds": round(total, 1), "graph_seconds": round(graph, 1)}


def comfyui_version() -> str:
    (version,) = re.findall(r'__version__ = "(.+)"', (comfyui_path() / "comfyui_version.py").read_text())
    return version


def main() -> None:
    figures = {"comfyui": comfyui_version(), "runs": RUNS}
    write(__file__, {**figures, "import": import_cost(), "server_start": server_start(), "make_demo": demo()})


if __name__ == "__main__":
    main()
