"""Send hundreds of mixed graphs to one server, and check that its resources do not grow after the first ones.

`OMP_NUM_THREADS=1 python tests/soak/mixed_graphs.py --graphs 300` starts ComfyUI with the pack, sends graphs of all
kinds of graphs.py, some wrong and some cancelled, and rewrites model files that are in use. After each block it frees
the server's caches, as the server's menu does, and records memory, threads and open files. The results go to
benchmarks/soak.json. The exit status is 1 if something grows.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path += [str(ROOT / folder) for folder in ("tests/graph", "tests", "scripts", ".")]

from host import GraphError, Server, base_directory, get, post, run_graph, start_server  # noqa: E402

from benchmarks.machine import description  # noqa: E402
from tests.soak.graphs import KINDS, Graph, every_shape, mixed, picture, replace_files, write_models  # noqa: E402

RESULTS = ROOT / "benchmarks" / "soak.json"
NAME = "soak"
# Resident memory of the process, its anonymous part, allocations of malloc, tensors, and the number of objects.
MEMORY = ("rss", "anonymous", "heap_bytes", "tensor_bytes", "objects")
# Largest relative growth of the first three.
GROWTH = 0.02
# seconds until a server that has nothing to do has closed its connections
QUIET = 3.0
PROBE = ROOT / "tests" / "soak" / "probe"


def send(server: Server, graph: Graph, cancel_after: int | None = None) -> tuple[str, str]:
    """Send the graph. Returns its end (drawn, refused, failed or cancelled) and the message, if any.

    `cancel_after`: cancel after this many progress reports.
    """
    received, steps, last = 0, 0, ""
    try:
        for event in run_graph(server, graph):
            received += 1
            if isinstance(event, bytes):
                continue
            last = event["type"]
            steps += last == "progress"
            if steps == cancel_after:
                post(server, "/interrupt", prompt_id=event["data"]["prompt_id"])
                cancel_after = None
    except GraphError as error:
        return ("failed" if received else "refused"), str(error)
    return ("cancelled" if last == "execution_interrupted" else "drawn"), ""


def free(server: Server) -> None:
    """Let the server forget models and results, as its menu offers."""
    post(server, "/free", unload_models=True, free_memory=True)
    time.sleep(QUIET)


def memory(pid: int) -> dict[str, int]:
    """Return the resident bytes of a process, and its anonymous bytes."""
    matches = dict(re.findall(r"(\w+): +(\d+) kB", Path(f"/proc/{pid}/smaps_rollup").read_text()))
    return {"rss": int(matches["Rss"]) * 1024, "anonymous": int(matches["Anonymous"]) * 1024}


def open_files(pid: int) -> list[str]:
    """Return the open files of a process: paths, or kinds of things without a path."""
    names = []
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        try:
            names.append(re.sub(r":\[\d+\]", "", os.readlink(entry)))
        except FileNotFoundError:
            continue
    return sorted(names)


def measure(server: Server) -> dict[str, Any]:
    """Return the resources that the idle server holds."""
    free(server)
    held = json.loads(get(server, "/soak"))
    # the connection that asked
    time.sleep(QUIET / 3)
    held |= memory(server.pid)
    held["tasks"] = len(list(Path(f"/proc/{server.pid}/task").iterdir()))
    held["files"] = open_files(server.pid)
    return held


def prepare() -> Path:
    """Recreate the server's folder. Returns its models/."""
    base = base_directory(NAME)
    shutil.rmtree(base)
    base = base_directory(NAME)
    (base / "custom_nodes" / "soak-probe").symlink_to(PROBE, target_is_directory=True)
    write_models(base / "models")
    return base / "models"


def growth(measured: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the growth from the warm-up to the end.

    Resident memory varies by 1.5 % with the free pages between used ones, so both ends are medians of three
    measurements.
    """
    first, last = measured[0], measured[-1]
    more = Counter(last["kinds"]) - Counter(first["kinds"])
    ends = {
        name: [int(median(held[name] for held in part)) for part in (measured[:3], measured[-3:])] for name in MEMORY
    }
    return {
        **{name: {"first": begin, "last": end} for name, (begin, end) in ends.items()},
        "ratio": {name: round(end / begin, 4) for name, (begin, end) in ends.items()},
        "threads": [held["tasks"] - len(pool(held)) for held in measured],
        "threads of the pool": [len(pool(held)) for held in measured],
        "files": [len(held["files"]) for held in measured],
        "more threads": sorted((Counter(last["threads"]) - Counter(first["threads"])).elements()),
        "more files": sorted((Counter(last["files"]) - Counter(first["files"])).elements()),
        "more objects": {kind: count for kind, count in more.most_common(12)},
    }


def pool(held: dict[str, Any]) -> list[str]:
    """The threads that asyncio starts as it needs them and keeps, at most the number of cores and four."""
    return [name for name in held["threads"] if name.startswith("asyncio_")]


def soak(server: Server, models: Path, graphs: int, warm_up: int, block: int, seed: int) -> dict[str, Any]:
    """Send the graphs and return the figures. Raises AssertionError for one that ends otherwise than its kind does."""
    random = Random(seed)
    shapes = list(every_shape())
    for graph in shapes:
        assert send(server, graph)[0] == "drawn"
    ended = Counter({"every shape": len(shapes)})
    messages: Counter[str] = Counter()
    measured = []
    names = [*mixed(random, warm_up - len(shapes)), *mixed(random, graphs - warm_up)]
    for number, name in enumerate(names, len(shapes) + 1):
        kind = KINDS[name]
        cancel_after = random.randint(1, 8) if kind.ends == "cancelled" else None
        end, message = send(server, kind.make(random), cancel_after)
        assert end == kind.ends, f"graph {number} of kind {name!r}: {end}, expected {kind.ends}: {message}"
        ended[name] += 1
        if message:
            messages[message[:160]] += 1
        if number % 10 == 0:
            replace_files(models, random)
        if number >= warm_up and (number - warm_up) % block == 0:
            # The same graph runs before each measurement, so that it leaves the same things behind.
            assert send(server, picture(Random(0)))[0] == "drawn"
            measured.append(measure(server))
            held = {key: measured[-1][key] for key in (*MEMORY, "tasks")}
            sys.stdout.write(f"{number} graphs: {held}, {len(measured[-1]['files'])} files\n")
            sys.stdout.flush()
    return {
        "graphs": graphs,
        "warm-up": warm_up,
        "kinds": dict(sorted(ended.items())),
        "errors": dict(sorted(messages.items())),
        "measured": [{key: held[key] for key in (*MEMORY, "tasks")} for held in measured],
        **growth(measured),
    }


def faults(found: dict[str, Any]) -> list[str]:
    """Describe each resource that has grown or changed since the warm-up."""
    ratios = {name: found["ratio"][name] for name in MEMORY[:3]}
    grown = [f"{name}: {ratio:.3f} of what it was" for name, ratio in ratios.items() if ratio > 1 + GROWTH]
    changed = [f"{name}: {found[name]}" for name in ("threads", "files") if len(set(found[name])) > 1]
    return [*grown, *changed]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--graphs", type=int, default=300)
    parser.add_argument("--warm-up", type=int, default=60, help="graphs before the first measurement")
    parser.add_argument("--block", type=int, default=20, help="graphs between two measurements")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--results", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    models = prepare()
    with tempfile.TemporaryDirectory() as output, start_server(NAME, Path(output)) as server:
        result = soak(server, models, arguments.graphs, arguments.warm_up, arguments.block, arguments.seed)
    arguments.results.write_text(json.dumps({"machine": description(), **result}, indent=1) + "\n")
    wrong = faults(result)
    sys.stdout.write("\n".join([f"wrote {arguments.results}", *wrong]) + "\n")
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
