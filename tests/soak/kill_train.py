"""Kill `train` at random moments and during its saves, and check the remaining files each time.

`OMP_NUM_THREADS=1 python tests/soak/kill_train.py --kills 500` trains a LoRA on both bundled models and a smaller one
in turn, in processes that are forked after the imports, so that a kill takes a second. One in three is killed before a
call that creates, opens, renames or removes a file of a save, or when half of a state's tensors are written. The others
are killed at any moment. After each kill the states are complete, the log has only grown, and files of others are
unchanged. At the end of a run its losses, LoRA, states and images equal those of an undisturbed run to the byte, and
there is no additional file. The results are added to benchmarks/train_kills.json.
"""

from __future__ import annotations

import argparse
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

TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TESTS / folder) for folder in ("", "soak", "unit", "fuzz")]

from checkpoints import CHECKPOINTS  # noqa: E402
from fail_batch import CHANGES, WRITING  # noqa: E402
from kill_batch import ROOT, parse, repeat, wait  # noqa: E402
from pictures import write_pictures  # noqa: E402
from small import make_checkpoint  # noqa: E402

from sana_core.errors import SanaError  # noqa: E402
from sana_core.training import sharding, states, trainer  # noqa: E402
from sana_core.training.settings import Method, Phase, TrainingSettings, Validation  # noqa: E402
from sana_core.training.states import read_losses  # noqa: E402

RESULTS = ROOT / "benchmarks" / "train_kills.json"
SMALL = "small"
MODELS = ("sana-tiny", "sana-posters", SMALL)
STEPS = 6
# Share of the kills that happen during a save.
SAVES = 0.35
# Share of the runs whose images are encoded before the first kill.
CACHED = 0.8
# calls of a save that change something, and about how many there are
CALLED = CHANGES | {"shutil.rmtree", "shutil.copyfile"}
CALLS = 30
FOREIGN = {"x.safetensors.part": b"mine", "steps.txt": b"mine", ".sana": b"mine", "pictures/notes.txt": b"mine"}
# These files contain times and paths.
TIMED = {"log.jsonl", "cache/digests.json", "cache/sizes.json"}

Prepare = Callable[[Path], None]


def model_folder(name: str, base: Path) -> Path:
    """Return the bundled model of that name, or a random one in `base`, whose runs take half the time."""
    if name != SMALL:
        return CHECKPOINTS[name]
    return base / SMALL if (base / SMALL).exists() else make_checkpoint(base / SMALL)


def settings_of(model: Path, folder: Path) -> TrainingSettings:
    """Return a run in `folder`/out with several saves, of which older ones are removed, and pictures."""
    phase = Phase((str(folder / "pictures"),), 32, steps=STEPS, learning_rate=1e-3)
    drawn = Validation(every=STEPS, share=0.3, prompts=("a red circle",), steps=1, width=32, height=32)
    options = {
        "dtype": "float32",
        "save_every": 2,
        "keep": 1,
        "method": Method(rank=2),
        "name": "x",
        "validation": drawn,
    }
    return TrainingSettings(str(model), str(folder / "out"), (phase,), **options)


def new_folder(base: Path) -> Path:
    folder = Path(tempfile.mkdtemp(dir=base))
    write_pictures(folder / "pictures", 4)
    put_foreign(folder)
    return folder


def put_foreign(folder: Path) -> None:
    for name, data in FOREIGN.items():
        (folder / "out" / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / "out" / name).write_bytes(data)


def start(settings: TrainingSettings, prepare: Prepare = lambda out: None) -> int:
    """Start the run in a new process, which first calls `prepare`. Returns its id. Its output goes to a log."""
    pid = os.fork()
    if pid:
        return pid
    status = 70
    try:
        log = os.open(Path(settings.out).parent / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(log, 2)
        prepare(Path(settings.out))
        try:
            trainer.train(settings)
            status = 0
        except SanaError as error:
            os.write(2, f"{error}\n".encode())
            status = 1
        except Exception:
            import traceback

            traceback.print_exc()
    finally:
        os._exit(status)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def in_save(number: int) -> Prepare:
    """Return a function that arms a kill before the `number`-th call that changes something during a save.

    A save writes a state, removes older ones, or publishes the result.
    """

    def prepare(out: Path) -> None:
        count, inside = 0, 0

        def watched(action: Callable) -> Callable:
            def act(*values, **options):
                nonlocal inside
                inside += 1
                try:
                    return action(*values, **options)
                finally:
                    inside -= 1

            return act

        def hook(event: str, arguments: tuple) -> None:
            nonlocal count
            if inside and (event in CALLED or (event == "open" and arguments[2] & WRITING)):
                count += 1
                if count == number:
                    die()

        states.remove_older = watched(states.remove_older)
        # Another thread calls `complete`.
        states.NewState.write, states.NewState.complete = map(
            watched, (states.NewState.write, states.NewState.complete)
        )
        states.publish = watched(states.publish)
        sys.addaudithook(hook)

    return prepare


def in_half(number: int) -> Prepare:
    """Return a function that arms a kill at half of the tensors of the `number`-th state."""

    def prepare(out: Path) -> None:
        real, count = sharding.write_tensors, 0

        def half(path: Path, *values) -> None:
            nonlocal count
            real(path, *values)
            count += 1
            if count == number:
                os.truncate(path, path.stat().st_size // 2)
                die()

        sharding.write_tensors = half

    return prepare


def content(out: Path) -> dict[str, bytes]:
    return {path.relative_to(out).as_posix(): path.read_bytes() for path in out.rglob("*") if path.is_file()}


def check(out: Path, log: bytes) -> bytes:
    """Raise AssertionError for what no kill may leave; return the log, which had begun with `log`."""
    assert {name: (out / name).read_bytes() for name in FOREIGN} == FOREIGN, "a file of others was touched"
    for _, folder in states.find_states(out):
        for name, digest in states.read_document(folder).files.items():
            states.check_file(folder, name, digest)
    strange = [path for path in (out / "steps").glob("*") if not (path / states.STATE).exists()]
    assert not strange, f"{strange} is no state"
    now = (out / states.LOG).read_bytes() if (out / states.LOG).exists() else b""
    assert now.startswith(log), "the log was not only added to"
    return now


def check_end(settings: TrainingSettings, whole: dict[str, bytes], losses: list[float]) -> None:
    """Raise AssertionError unless the run that has ended is the one that nobody killed."""
    out = Path(settings.out)
    result = content(out)
    assert result.keys() == whole.keys(), f"left over or gone: {sorted(result.keys() ^ whole.keys())}"
    other = sorted(name for name in whole.keys() - TIMED if result[name] != whole[name])
    assert not other and all(result[name] for name in TIMED), f"{other} differ"
    assert read_losses(out) == losses and len(losses) == STEPS
    folders = [path for path in out.rglob("*") if path.is_dir() and not any(path.iterdir())]
    assert not folders, f"left over: {folders}"


def soak(kills: int, seed: int, model: Path, base: Path) -> Counter[str]:
    """Return the counters of `kills` kills. Raises AssertionError for the first violation."""
    source, happened = random.Random(seed), Counter[str]()
    folder = new_folder(base)
    settings = settings_of(model, folder)
    began = time.monotonic()
    assert wait(start(settings)) == 0, (folder / "log").read_text()
    seconds = time.monotonic() - began
    complete, losses = content(folder / "out"), read_losses(folder / "out")
    cache = shutil.copytree(folder / "out" / "cache", folder / "cache")
    while happened["kills"] < kills:
        # Use the same folder again, because its path is part of the names of unfinished cache files.
        shutil.rmtree(folder / "out")
        put_foreign(folder)
        if source.random() < CACHED:
            shutil.copytree(cache, folder / "out" / "cache")
        log = b""
        for _ in range(source.randint(1, 6)):
            saving, half = source.random() < SAVES, source.random() < 0.3
            number = source.randint(1, 3) if half else source.randint(1, CALLS)
            process = start(settings, (in_half if half else in_save)(number) if saving else lambda out: None)
            if not saving:
                time.sleep(source.uniform(0, seconds))
                os.kill(process, signal.SIGKILL)
            ended = wait(process)
            assert ended in (0, -signal.SIGKILL), (folder / "log").read_text()[-3000:]
            happened["ended before" if ended == 0 else "kills"] += 1
            happened["inside saves"] += saving and ended != 0
            log = check(folder / "out", log)
        assert wait(start(settings)) == 0, (folder / "log").read_text()[-3000:]
        check(folder / "out", log)
        check_end(settings, complete, losses)
        happened["runs to their end"] += 1
    assert "Traceback" not in (folder / "log").read_text(), (folder / "log").read_text()[-3000:]
    return happened


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS)
    arguments = parse(parser, 500, 20, RESULTS)

    def soak_next(kills: int, seed: int, base: Path) -> Counter[str]:
        model = model_folder(arguments.models[seed // arguments.part % len(arguments.models)], base)
        # imports all that a run does, which takes longer than the run
        trainer.train(settings_of(model, new_folder(base)))
        return soak(kills, seed, model, base)

    repeat(soak_next, {"steps": STEPS}, arguments)


if __name__ == "__main__":
    main()
