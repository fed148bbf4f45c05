"""Kill `batch` at random moments, and check the remaining files each time.

`OMP_NUM_THREADS=1 python tests/soak/kill_batch.py --kills 1000` runs the real command in processes that are forked
after the imports, so that a kill takes a second. Each process is killed with SIGKILL. Sometimes two processes use one
folder at the same time. After each kill, files of others and finished images are unchanged, and every image equals the
image of an undisturbed run. When a folder is complete, the next folder begins. The results are added to
benchmarks/kills.json.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CHECKPOINT = ROOT / "tests" / "models" / "sana-tiny"
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

from benchmarks.machine import description  # noqa: E402
from sana_core.__main__ import main as run_command  # noqa: E402
from sana_core.batch.pipeline import (  # noqa: E402
    SamplingSettings,
    prepare,
)
from sana_core.batch.plan import Workload, batch_images  # noqa: E402
from sana_core.batch.png import encode_png  # noqa: E402
from sana_core.checkpoints.fingerprint import fingerprint  # noqa: E402
from sana_core.engine.local import generate_local  # noqa: E402

RESULTS = ROOT / "benchmarks" / "kills.json"
PROMPTS = ["a red circle on a blue background", "a blue square on a white background"]
OTHER_PROMPTS = ["a green circle on a red background"]
COUNT = 4
FOREIGN = {".00000_0.png.0123abcd": b"mine", ".shared.0123abcd": b"mine", "notes.txt": b"mine", "x.part": b"mine"}


def import_all() -> None:
    """Import the modules that the command imports later. Starts no thread, because a fork would lose it."""
    torch.set_num_threads(1)
    fingerprint(CHECKPOINT)
    workload = Workload(PROMPTS[:1], batch_images(1, 1, 0))
    # Closing the iterator waits for the thread of the device.
    ((_, pixels),) = generate_local(prepare(workload, CHECKPOINT, SamplingSettings(32, 32, steps=1), ["cpu"]))
    encode_png(pixels, "", 0, {})


def start(
    folder: Path, prompts: str = "prompts.txt", count: int = COUNT, prepare: Callable[[], None] = lambda: None
) -> int:
    """Start `batch` in a process of its own and return its id. Its output goes to `folder`/log.

    `prepare` is called in that process before the command.
    """
    pid = os.fork()
    if pid:
        return pid
    status = 70
    try:
        os.chdir(folder)
        log = os.open("log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(log, 1)
        os.dup2(log, 2)
        words = ["batch", prompts, "--checkpoint", CHECKPOINT, "--out", "out", "--count", count]
        words += ["--steps", 1, "--width", 32, "--height", 32, "--chunk", 1]
        prepare()
        status = run_command([str(word) for word in words])
    finally:
        os._exit(status)


def wait(pid: int) -> int:
    """Return the exit status, negative for a signal."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def pictures(out: Path) -> dict[str, tuple[bytes, int]]:
    return {path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in out.glob("[0-9]*.png")}


def new_folder(base: Path) -> Path:
    """Return a folder with prompts, and with files of others where pictures will come."""
    folder = Path(tempfile.mkdtemp(dir=base))
    (folder / "out").mkdir()
    for name, data in FOREIGN.items():
        (folder / "out" / name).write_bytes(data)
    (folder / "prompts.txt").write_text("\n".join(PROMPTS))
    (folder / "other.txt").write_text("\n".join(OTHER_PROMPTS))
    return folder


def check(out: Path, whole: dict[str, bytes], before: dict[str, tuple[bytes, int]]) -> None:
    """Raise AssertionError for anything that is lost, doubled, mixed, or not ours and touched."""
    now = pictures(out)
    assert {name: (out / name).read_bytes() for name in FOREIGN} == FOREIGN, "a file of others was touched"
    assert {name: now.get(name) for name in before} == before, "a picture that was there is another, or gone"
    mixed = [name for name, (data, _) in now.items() if whole.get(name) != data]
    assert not mixed, f"{mixed} are not those of the run"
    if (out / "manifest.json").exists():
        listed = json.loads((out / "manifest.json").read_bytes())["images"]
        assert listed.keys() <= now.keys(), "the manifest lists what is not there"
    other_values = {path.name for path in out.iterdir()} - now.keys() - FOREIGN.keys()
    assert other_values <= {"manifest.json", ".sana-batch"}, f"left behind: {other_values}"


def disturb(folder: Path, source: random.Random, seconds: float) -> Counter[str]:
    """Run once and kill at a random moment, sometimes with a second run in the same folder. Returns the counters."""
    happened: Counter[str] = Counter()
    first = start(folder)
    second = start(folder, source.choice(["prompts.txt", "other.txt"])) if source.random() < 0.15 else None
    time.sleep(source.uniform(0, seconds))
    os.kill(first, signal.SIGKILL)
    happened["kills" if wait(first) == -signal.SIGKILL else "ended before"] += 1
    if second is not None:
        status = wait(second)
        happened[{0: "second run drew", 1: "second run refused"}.get(status, f"second run ended with {status}")] += 1
    return happened


def soak(kills: int, seed: int, base: Path) -> Counter[str]:
    """Return the counters of `kills` kills. Raises AssertionError for the first violation."""
    source, happened = random.Random(seed), Counter[str]()
    folder = new_folder(base)
    assert wait(start(folder)) == 0, (folder / "log").read_text()
    complete = {name: data for name, (data, _) in pictures(folder / "out").items()}
    assert len(complete) == COUNT * len(PROMPTS)
    shutil.rmtree(folder)
    folder = new_folder(base)
    began = time.monotonic()
    assert wait(start(folder)) == 0
    seconds = time.monotonic() - began
    shutil.rmtree(folder)
    while happened["kills"] < kills:
        folder, rounds = new_folder(base), 0
        out = folder / "out"
        # a run with other prompts that came first has the folder for itself
        while len(pictures(out)) < len(complete) and happened["kills"] < kills and rounds < 12:
            before, rounds = pictures(out), rounds + 1
            happened += disturb(folder, source, seconds)
            if mine(out):
                check(out, complete, before)
            else:
                break
        if mine(out):
            before = pictures(out)
            assert wait(start(folder)) == 0, (folder / "log").read_text()[-2000:]
            check(out, complete, before)
            assert pictures(out).keys() == complete.keys(), "pictures are missing"
            assert {path.name for path in out.iterdir()} == {*complete, *FOREIGN, "manifest.json"}
            happened["folders made whole"] += 1
        assert "Traceback" not in (folder / "log").read_text(), (folder / "log").read_text()[-3000:]
        shutil.rmtree(folder)
    return happened


def mine(out: Path) -> bool:
    """Whether the folder belongs to the run with PROMPTS."""
    listed = json.loads((out / "manifest.json").read_bytes())["images"] if (out / "manifest.json").exists() else {}
    return all(entry["prompt"] in PROMPTS for entry in listed.values())


def parse(parser: argparse.ArgumentParser, kills: int, part: int, results: Path) -> argparse.Namespace:
    """Return the arguments, with those that all kills have."""
    parser.add_argument("--kills", type=int, default=kills)
    parser.add_argument("--part", type=int, default=part, help="kills between two notes of the results")
    parser.add_argument("--results", type=Path, default=results)
    parser.add_argument("--minutes", type=float, default=1e9, help="stop after so long")
    return parser.parse_args()


def repeat(
    soak: Callable[[int, int, Path], Counter[str]], facts: dict[str, int], arguments: argparse.Namespace
) -> None:
    """Call `soak` with a number of kills, a seed and an empty folder until all kills have happened.

    Adds its counters and `facts` to the results.
    """
    results, end = arguments.results, time.monotonic() + 60 * arguments.minutes
    total: Counter[str] = Counter(json.loads(results.read_text())["happened"] if results.exists() else {})
    while total["kills"] < arguments.kills and time.monotonic() < end:
        with tempfile.TemporaryDirectory() as base:
            total += soak(min(arguments.part, arguments.kills - total["kills"]), total["kills"], Path(base))
        document = {"machine": description(), **facts, "happened": dict(sorted(total.items()))}
        results.write_text(json.dumps(document, indent=1) + "\n")
        sys.stdout.write(f"{dict(sorted(total.items()))}\n")
        sys.stdout.flush()


def main() -> None:
    arguments = parse(argparse.ArgumentParser(description=__doc__), 1000, 25, RESULTS)
    import_all()
    repeat(soak, {"pictures": COUNT * len(PROMPTS)}, arguments)


if __name__ == "__main__":
    main()
