"""Let each of `train`'s calls of the operating system fail in turn, and check the remaining files each time.

`OMP_NUM_THREADS=1 python tests/soak/fail_train.py` counts the calls of a short run that create, open for writing,
rename or remove files in its folder, or wait until a file is on the disk. At the n-th call, for every n, the disk
becomes read-only or full, or fails once. The checks are the checks of kill_train.py: no state is incomplete, the log
has only grown, and files of others are unchanged. An error is one line that names the folder. The same call then ends
like a run without faults: equal losses, equal bytes of LoRA, states and images, and no additional file.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from fail_batch import CHANGES, FAULTS, WRITING, Fault, at_calls  # noqa: E402
from kill_batch import ROOT, wait  # noqa: E402
from kill_train import (  # noqa: E402
    MODELS,
    SMALL,
    check,
    check_end,
    content,
    model_folder,
    new_folder,
    put_foreign,
    settings_of,
    start,
)

from benchmarks.machine import description  # noqa: E402
from sana_core.runtime import atomic_files as whole_files  # noqa: E402
from sana_core.training import trainer  # noqa: E402
from sana_core.training.settings import TrainingSettings  # noqa: E402
from sana_core.training.states import read_losses  # noqa: E402

RESULTS = ROOT / "benchmarks" / "failed_training_calls.json"
NAMES = ("read-only", "full", "fails once")


def arm(fault: Fault, number: int) -> Callable[[Path], None]:
    """Return a function that arms `fault` at the `number`-th call that changes something in a run's folder."""

    def prepare(out: Path) -> None:
        note = os.open(out.parent / "happened", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        count, fsync = 0, whole_files.fsync

        def happen(event: str, file: str) -> None:
            nonlocal count
            # The heartbeat thread of the run writes at any moment, so its calls are not counted.
            if threading.current_thread() is threading.main_thread():
                count += 1
                if count >= number:
                    os.write(note, f"{event} {file}\n".encode())
                    fault(event, file, count - number)

        def hook(event: str, arguments: tuple) -> None:
            changes = event in CHANGES or (event == "open" and arguments[2] & WRITING)
            # rmtree passes a name relative to the folder's descriptor.
            inside = event in ("os.remove", "os.rmdir") and arguments[1] >= 0
            if changes and (inside or str(arguments[0]).startswith(str(out))):
                happen(event, str(arguments[0]))

        def synced(descriptor: int) -> None:
            happen("open", os.readlink(f"/proc/self/fd/{descriptor}"))
            fsync(descriptor)

        whole_files.fsync = synced
        sys.addaudithook(hook)

    return prepare


def disturb(
    settings: TrainingSettings, name: str, number: int, whole: dict[str, bytes], losses: list[float]
) -> Counter[str]:
    """Let the fault happen at the `number`-th call and return how it ended; nothing if there is no such call."""
    out = Path(settings.out)
    folder = out.parent
    shutil.rmtree(out)
    put_foreign(folder)
    (folder / "log").write_bytes(b"")
    status = wait(start(settings, arm(FAULTS[name], number)))
    said = (folder / "log").read_text()
    assert status in (0, 1) and "Traceback" not in said, said[-3000:]
    log = check(out, b"")
    if status == 1:
        assert str(out) in said.splitlines()[-1], f"the error names no folder: {said}"
    happened = bool((folder / "happened").read_bytes())
    assert happened or status == 0, said
    assert wait(start(settings)) == 0, (folder / "log").read_text()[-3000:]
    check(out, log)
    check_end(settings, whole, losses)
    return Counter(["ended with an error" if status else "went on"] if happened else [])


def soak(base: Path, model: Path, every: int) -> dict[str, dict[str, int]]:
    """Return for each fault at how many calls it happened, and how the run ended."""
    folder = new_folder(base)
    settings = settings_of(model, folder)
    assert wait(start(settings)) == 0, (folder / "log").read_text()
    complete, losses = content(folder / "out"), read_losses(folder / "out")
    return {
        name: at_calls(name, lambda n, name=name: disturb(settings, name, n, complete, losses), first, every)
        for first, name in enumerate(NAMES)
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--every", type=int, default=1, help="of the calls, every n-th alone")
    parser.add_argument("--model", choices=MODELS, default=SMALL)
    parser.add_argument("--results", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as base:
        # imports all that a run does, which takes longer than the run
        model = model_folder(arguments.model, Path(base))
        trainer.train(settings_of(model, new_folder(Path(base))))
        result = soak(Path(base), model, arguments.every)
    sys.stdout.write(f"{result} in {time.monotonic() - started:.0f} s\n")
    document = {"machine": description(), "every": arguments.every, "faults": result}
    arguments.results.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
