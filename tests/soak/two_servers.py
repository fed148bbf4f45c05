"""Two servers and a `batch` at once, with one folder for models, results, settings and caches.

`OMP_NUM_THREADS=1 python tests/soak/two_servers.py --graphs 30` sends the same graphs to both. All images exist, are
complete, and are equal on both servers. The batch generates its images beside them. Each server has its own prefix,
because ComfyUI's Save Image counts existing files before it writes: two servers with one prefix can choose one name.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from random import Random

ROOT = Path(__file__).resolve().parents[2]
sys.path += [str(ROOT / folder) for folder in ("tests/graph", "tests", "scripts", ".")]

from host import Server, base_directory, get, images_of, run_graph, start_server  # noqa: E402
from PIL import Image  # noqa: E402

from benchmarks.machine import description  # noqa: E402
from tests.soak.graphs import CHECKPOINT, KINDS, node, write_models  # noqa: E402

RESULTS = ROOT / "benchmarks" / "two_servers.json"
NAMES = ("soak-first", "soak-second")
DRAWN = [name for name, kind in KINDS.items() if kind.ends == "drawn" and name not in ("batch", "text", "plan")]
COUNT = 12


def prepare() -> None:
    """Make two folders for servers: the second one's models, settings and cache are the first one's."""
    for name in NAMES:
        shutil.rmtree(base_directory(name))
        base_directory(name)
    first, second = map(base_directory, NAMES)
    write_models(first / "models")
    for name in ("models", "user", "input", "temp"):
        (first / name).mkdir(exist_ok=True)
        shutil.rmtree(second / name, ignore_errors=True)
        (second / name).symlink_to(first / name, target_is_directory=True)


def draw(server: Server, prefix: str, count: int, seed: int) -> list[tuple[str, bytes]]:
    """Send the graphs. Returns name and pixels of each image that the server reports."""
    random, result = Random(seed), []
    for _ in range(count):
        graph = KINDS[random.choice(DRAWN)].make(random)
        graph["save"] = node("SaveImage", images=["decode", 0], filename_prefix=prefix)
        for image in images_of(list(run_graph(server, graph))):
            picture = Image.open(io.BytesIO(get(server, "/view", **image)))
            result.append((image["filename"], picture.convert("RGB").tobytes()))
    return result


def start_batch(folder: Path, output: Path) -> subprocess.Popen:
    (folder / "prompts.txt").write_text("a red circle on a blue background")
    command = [sys.executable, "-m", "sana_core", "batch", folder / "prompts.txt", "--checkpoint", CHECKPOINT]
    command += ["--out", output, "--count", COUNT, "--width", 64, "--height", 64, "--steps", 4, "--chunk", 1]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.Popen([str(word) for word in command], env=environment, stdout=subprocess.DEVNULL)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--graphs", type=int, default=30, help="for each server")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--results", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    prepare()
    with tempfile.TemporaryDirectory() as base, ExitStack() as stack:
        output = Path(base, "output")
        output.mkdir()
        servers = [stack.enter_context(start_server(name, output)) for name in NAMES]
        batch = start_batch(Path(base), output)
        with ThreadPoolExecutor() as pool:
            parts = zip(servers, NAMES, strict=True)
            tasks = [pool.submit(draw, server, name, arguments.graphs, arguments.seed) for server, name in parts]
            first, second = (task.result() for task in tasks)
        assert batch.wait(600) == 0
        assert [pixels for _, pixels in first] == [pixels for _, pixels in second], "the servers draw other pictures"
        written = {name for name, _ in [*first, *second]}
        assert len(written) == 2 * len(first), "a name was used twice"
        listed = json.loads((output / "manifest.json").read_bytes())["images"].keys()
        assert len(listed) == COUNT
        assert {path.name for path in output.iterdir()} == {*written, *listed, "manifest.json"}
        for name in (*written, *listed):
            Image.open(output / name).load()
    values = {"graphs": 2 * arguments.graphs, "pictures": len(written), "pictures of the batch": len(listed)}
    arguments.results.write_text(json.dumps({"machine": description(), **values}, indent=1) + "\n")
    sys.stdout.write(f"{values}\n")


if __name__ == "__main__":
    main()
