"""Break a cluster of four machines at random moments while it generates. Faults may cost time, but no image.

`OMP_NUM_THREADS=1 python tests/soak/cluster_faults.py --faults 200` starts real Ray nodes on this machine, and runs
batches by the function and by the command. Every image must come once and be the image of this machine alone. 60 s
after a run, no actor may be left. The faults and the longest time without an image are added to
benchmarks/cluster_faults.json.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path += [str(ROOT / folder) for folder in ("tests/cluster", "tests", "scripts", ".")]

import torch  # noqa: E402
from machines import actors, add_node, wait_for_no_actors  # noqa: E402

import sana_core  # noqa: E402
from benchmarks.machine import description  # noqa: E402
from sana_core.batch.pipeline import SamplingSettings, prepare  # noqa: E402
from sana_core.batch.plan import Workload, batch_images  # noqa: E402
from sana_core.cluster.batch import generate_on_cluster  # noqa: E402
from sana_core.cluster.connection import ClusterSettings  # noqa: E402

RESULTS = ROOT / "benchmarks" / "cluster_faults.json"
CHECKPOINT = ROOT / "tests" / "models" / "sana-tiny"
PROMPTS = ["a red circle on a blue background", "a blue square on a white background"]
MACHINES = 4
# Images of each prompt, faults in a run, and ends of the command in a run of the command.
BATCH, FAULTS, ENDS = 40, 12, 3
BATCH_SETTINGS = SamplingSettings(64, 64, 2)
# seconds that an actor is slow for, and after a run until none may be left
SLOW, LEFT = 4.0, 60.0


class Faults:
    """A cluster whose machines fail, and how often each did in which way."""

    def __init__(self, chance: Random, folder: Path) -> None:
        self.chance, self.folder = chance, folder
        self.counts: Counter[str] = Counter()
        self.slow: list[tuple[float, Any]] = []
        self.kinds: list[Callable[[], object]] = [
            self.kill_actor,
            self.stop_actor,
            self.slow_actor,
            self.lose_machine,
            self.kill_raylet,
            self.full_disk,
            self.other_code,
        ]
        self.start()

    def start(self) -> None:
        from ray.cluster_utils import Cluster

        head = {"num_cpus": 0, "include_dashboard": False}
        self.cluster, self.nodes, self.unfit = Cluster(initialize_head=True, head_node_args=head), [], []
        self.fill()

    def fill(self) -> None:
        """Start machines in the place of those that were lost."""
        while len(self.nodes) < MACHINES:
            self.nodes.append(add_node(self.cluster))

    def tidy(self) -> None:
        """Remove the machines that could not draw."""
        while self.unfit:
            self.cluster.remove_node(self.unfit.pop())

    def end(self) -> None:
        self.cluster.shutdown()

    def strike(self) -> str:
        """Let something fail and return what."""
        # Faults of actors come first in the list. They need an actor.
        fault = self.chance.choice(self.kinds if actors() else self.kinds[3:])
        fault()
        self.counts[fault.__name__] += 1
        return fault.__name__

    def signal(self, number: int) -> Any:
        process = self.chance.choice(actors() or [None])
        if process is not None:
            process.send_signal(number)
        return process

    def kill_actor(self) -> None:
        self.signal(signal.SIGKILL)

    def stop_actor(self) -> None:
        self.signal(signal.SIGSTOP)

    def slow_actor(self) -> None:
        self.slow.append((time.monotonic() + SLOW, self.signal(signal.SIGSTOP)))

    def wake(self) -> None:
        """Resume actors that were stopped."""
        for due, process in list(self.slow):
            if time.monotonic() > due:
                self.slow.remove((due, process))
                if process is not None and process.is_running():
                    process.send_signal(signal.SIGCONT)

    def lose_machine(self) -> None:
        node = self.nodes.pop(self.chance.randrange(len(self.nodes)))
        self.cluster.remove_node(node, allow_graceful=False)
        self.fill()

    def kill_raylet(self) -> None:
        node = self.nodes.pop(self.chance.randrange(len(self.nodes)))
        os.kill(node.all_processes["raylet"][0].process.pid, signal.SIGKILL)
        self.fill()

    def full_disk(self) -> None:
        """A machine joins whose disk takes nothing that Ray would unpack there."""
        name = f"full{self.counts['full_disk']}"
        node = self.cluster.add_node(num_cpus=1, num_gpus=1, runtime_env_dir_name=name)
        folder = Path(node.get_session_dir_path()) / name / "working_dir_files"
        while not folder.exists():
            time.sleep(0.1)
        # Ray may write into it meanwhile.
        while folder.is_dir():
            shutil.rmtree(folder, ignore_errors=True)
        folder.touch()
        self.unfit.append(node)

    def other_code(self) -> None:
        """A machine joins whose Python finds another checkout first, which draws everything inverted."""
        other = self.folder / "checkout"
        if not other.exists():
            shutil.copytree(ROOT / "sana_core", other / "sana_core", ignore=shutil.ignore_patterns("__pycache__"))
            file = other / "sana_core" / "batch" / "pipeline.py"
            file.write_text(file.read_text().replace(".clamp(-1, 1)", ".clamp(-1, 1).neg()"))
            (other / "sitecustomize.py").write_text(f"import sys; sys.path.insert(0, {str(other)!r})\n")
        self.unfit.append(self.cluster.add_node(num_cpus=1, num_gpus=1, env_vars={"PYTHONPATH": str(other)}))


class Silence:
    """The longest time without an image, by the faults that happened in that time."""

    def __init__(self) -> None:
        self.longest: dict[str, float] = {}

    def measure(self, drawn: Iterator[Any], happened: list[str]) -> Iterator[Any]:
        """Yield the items of `drawn`. `happened` collects the faults since the last item."""
        last = None
        for entry in drawn:
            now = time.monotonic()
            if last is not None:
                for fault in happened or ["none"]:
                    self.longest[fault] = max(self.longest.get(fault, 0.0), now - last)
            happened.clear()
            yield entry
            last = time.monotonic()


def run_here(faults: Faults, silence: Silence, expected: torch.Tensor) -> int:
    """Generate a batch while things fail. Returns the number of images."""
    run = ClusterSettings(faults.cluster.address, grace=20.0)
    happened: list[str] = []
    workload = Workload(PROMPTS, batch_images(2, BATCH, 5), 1)
    drawn = generate_on_cluster(prepare(workload, CHECKPOINT, BATCH_SETTINGS), run)
    total = len(workload.images)
    moments = set(faults.chance.sample(range(1, total - 1), FAULTS))
    arrived: dict[int, torch.Tensor] = {}
    for picture, pixels in silence.measure(drawn, happened):
        assert picture.number not in arrived, f"image {picture.number} came twice"
        arrived[picture.number] = pixels
        faults.wake()
        if len(arrived) in moments:
            happened.append(faults.strike())
    assert sorted(arrived) == list(range(total)), "images were lost"
    assert torch.stack([arrived[number] for number in range(total)]).equal(expected)
    return total


def run_command(faults: Faults, expected: dict[str, bytes], folder: Path) -> int:
    """Draw a batch by the command, end it by SIGTERM, or its cluster's head, a few times, then draw the rest."""
    out, images = Path(tempfile.mkdtemp(dir=folder)), len(expected)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}

    def start() -> subprocess.Popen[str]:
        words = [sys.executable, "-m", "sana_core", *words_of(folder, out), "--cluster", faults.cluster.address]
        return subprocess.Popen(words, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    for number in range(1, ENDS + 1):
        process, enough = start(), images * number // (ENDS + 1) + faults.chance.randrange(images // (2 * ENDS))
        while len(list(out.glob("*.png"))) < enough:
            assert process.poll() is None, process.stdout and process.stdout.read()
            time.sleep(0.01)
        kind = faults.chance.choice(["terminate_driver", "lose_head"])
        if kind == "terminate_driver":
            process.send_signal(signal.SIGTERM)
        else:
            for name in ("gcs_server", "raylet"):
                os.kill(faults.cluster.head_node.all_processes[name][0].process.pid, signal.SIGKILL)
        faults.counts[kind] += 1
        said = process.communicate(timeout=150)[0]
        assert "Traceback" not in said and "SIGTERM received" not in said, said
        ended = 128 + signal.SIGTERM if kind == "terminate_driver" else 1
        assert process.returncode == ended, (process.returncode, said)
        if kind == "lose_head":
            faults.end()
            faults.start()
    process = start()
    said = process.communicate(timeout=600)[0]
    assert process.returncode == 0, said
    assert {path.name: path.read_bytes() for path in out.glob("*.png")} == expected
    return images


def words_of(folder: Path, out: Path) -> list[str]:
    settings = BATCH_SETTINGS
    words = ["batch", folder / "prompts.txt", "--checkpoint", CHECKPOINT, "--out", out, "--seed", 5, "--chunk", 1]
    words += ["--count", BATCH, "--width", settings.width, "--height", settings.height, "--steps", settings.steps]
    return [str(word) for word in words]


def generate_expected(folder: Path) -> tuple[torch.Tensor, dict[str, bytes]]:
    """Return the images of this machine alone: of the function, and the files of the command."""
    from sana_core.__main__ import main

    (folder / "prompts.txt").write_text("\n".join(PROMPTS))
    batch = sana_core.generate(PROMPTS, CHECKPOINT, seed=5, count=BATCH, chunk=1, **BATCH_SETTINGS._asdict())
    assert main(words_of(folder, folder / "expected")) == 0
    return batch, {path.name: path.read_bytes() for path in (folder / "expected").glob("*.png")}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--faults", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no run after so many")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    torch.set_num_threads(1)
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {"faults": {}, "images": 0, "runs": 0}
    folder, began = Path(tempfile.mkdtemp()), time.monotonic()
    faults, silence = Faults(Random(arguments.seed), folder), Silence()
    silence.longest = results.get("longest silence, s", {})
    try:
        batch, files = generate_expected(folder)
        while faults.counts.total() < arguments.faults and time.monotonic() - began < arguments.seconds:
            # a head that is lost takes as long as a batch
            way = faults.chance.choice([*["batch"] * 8, "command"])
            images = run_command(faults, files, folder) if way == "command" else run_here(faults, silence, batch)
            wait_for_no_actors(LEFT)
            faults.tidy()
            results["images"] += images
            results["runs"] += 1
            values = {
                "machine": description(),
                **results,
                "faults": dict(sorted((Counter(results["faults"]) + faults.counts).items())),
                "longest silence, s": {kind: round(seconds, 1) for kind, seconds in sorted(silence.longest.items())},
            }
            RESULTS.write_text(json.dumps(values, indent=1) + "\n")
            seconds = time.monotonic() - began
            sys.stdout.write(f"{way}: {images} images, {faults.counts.total()} faults in {seconds:.0f} s\n")
            sys.stdout.flush()
    finally:
        faults.end()
        shutil.rmtree(folder, ignore_errors=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
