"""Let each of `batch`'s calls of the operating system fail in turn, and check the remaining files each time.

`OMP_NUM_THREADS=1 python tests/soak/fail_batch.py` counts the calls that make, open for writing, name or remove a file.
Before the n-th call, for every n, the process is killed, or the disk becomes read-only or full or fails once, or the
process is stopped while a second run uses the same folder. The same happens in the middle of each written file. The
checks are the checks of kill_batch.py: nothing is lost, mixed or incomplete, and no file of others is touched. An error
is one line, and the same command then completes the folder.
"""

from __future__ import annotations

import argparse
import errno
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from kill_batch import FOREIGN, ROOT, check, import_all, new_folder, pictures, start, wait  # noqa: E402

from benchmarks.machine import description  # noqa: E402

RESULTS = ROOT / "benchmarks" / "failed_calls.json"
CHANGES = {"os.mkdir", "os.rmdir", "os.link", "os.rename", "os.remove"}
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
# a full disk still renames and removes
GROWING = {"open", "os.mkdir", "os.link"}


# Called before a call: (event of the call, its file, number of calls since the first fault).
Fault = Callable[[str, str, int], None]


def fails(code: int, once: bool = False, growing: bool = False) -> Fault:
    """Return a fault: an OSError of that code, now and, unless `once`, ever after."""

    def fault(event: str, file: str, past: int) -> None:
        if (past == 0 or not once) and (event in GROWING or not growing):
            raise OSError(code, os.strerror(code), file)

    return fault


def signals(number: int) -> Fault:
    """Return a fault: that signal, now."""

    def fault(event: str, file: str, past: int) -> None:
        if past == 0:
            os.kill(os.getpid(), number)

    return fault


FAULTS: dict[str, Fault] = {
    "killed": signals(signal.SIGKILL),
    "read-only": fails(errno.EROFS),
    "full": fails(errno.ENOSPC, growing=True),
    "fails once": fails(errno.EIO, once=True),
    "stands still": signals(signal.SIGSTOP),
    "killed in a write": signals(signal.SIGKILL),
    "stands still in a write": signals(signal.SIGSTOP),
}
INSIDE = {"killed in a write", "stands still in a write"}


def arm(fault: Fault, number: int, folder: Path, inside: bool) -> Callable[[], None]:
    """Return a function that arms `fault` before the `number`-th call that changes something in `folder`/out.

    `inside`: the fault happens in the middle of the `number`-th written file instead.
    """

    def prepare() -> None:
        note = os.open(folder / "happened", os.O_WRONLY | os.O_CREAT)
        count = 0

        def write_in_two(path: Path, data: bytes) -> None:
            nonlocal count
            count += 1
            with path.open("wb", buffering=0) as stream:
                stream.write(data[: len(data) // 2])
                if count == number:
                    os.write(note, b"write\n")
                    fault("write", str(path), 0)
                stream.write(data[len(data) // 2 :])

        if inside:
            Path.write_bytes = write_in_two  # type: ignore[assignment, method-assign]
            return

        def hook(event: str, arguments: tuple) -> None:
            nonlocal count
            if event in CHANGES or (event == "open" and arguments[2] & WRITING):
                if not str(arguments[0]).startswith("out"):
                    return
                count += 1
                if count >= number:
                    os.write(note, event.encode() + b"\n")
                    fault(event, str(arguments[0]), count - number)

        sys.addaudithook(hook)

    return prepare


def look(folder: Path, whole: dict[str, bytes], before: dict[str, tuple[bytes, int]], first: int = 0) -> None:
    """Raise AssertionError for files that no fault may leave, or for a wrong log after its `first` characters."""
    out = folder / "out"
    if out.exists():
        check(out, whole, before)
    said = (folder / "log").read_text()[first:]
    assert "Traceback" not in said, said[-3000:]


def disturb(name: str, number: int, base: Path, whole: dict[str, bytes]) -> Counter[str]:
    """Let the fault happen before the `number`-th call and return how it ended; nothing if there is no such call."""
    folder, happened = new_folder(base), Counter[str]()
    out = folder / "out"
    process = start(folder, count=1, prepare=arm(FAULTS[name], number, folder, name in INSIDE))
    if name.startswith("stands still"):
        _, status = os.waitpid(process, os.WUNTRACED)
        if os.WIFSTOPPED(status):
            look(folder, whole, {})
            second = wait(start(folder, count=1))
            assert second in (0, 1), second
            happened["second run refused" if second else "second run drew"] += 1
            look(folder, whole, {})
            os.kill(process, signal.SIGCONT)
            status = os.waitpid(process, 0)[1]
        status = os.waitstatus_to_exitcode(status)
    else:
        status = wait(process)
    said = (folder / "log").read_text()
    if not (folder / "happened").read_bytes():
        assert status == 0, said
        shutil.rmtree(folder)
        return happened
    look(folder, whole, {})
    if status == 1:
        last = said.splitlines()[-1]
        assert "out" in last, f"the error names no folder: {said}"
    happened[{0: "drew", 1: "ended with an error", -signal.SIGKILL: "killed"}[status]] += 1
    before = pictures(out)
    assert wait(start(folder, count=1)) == 0, (folder / "log").read_text()[-2000:]
    look(folder, whole, before)
    assert {path.name for path in out.iterdir()} == {*whole, *FOREIGN, "manifest.json"}
    shutil.rmtree(folder)
    return happened


def at_calls(name: str, disturb: Callable[[int], Counter[str]], first: int, every: int) -> dict[str, int]:
    """Call `disturb` for every n-th call until there is no such call. Returns the sum of its counters."""
    total, number = Counter[str](), 1 + first % every
    while True:
        try:
            happened = disturb(number)
        except AssertionError as error:
            raise AssertionError(f"{name} at call {number}: {error}") from error
        if not happened:
            return dict(sorted(total.items()))
        total += happened + Counter(calls=1)
        number += every


def soak(base: Path, every: int) -> dict[str, dict[str, int]]:
    """Return for each fault at how many calls it happened, and how the run ended."""
    folder = new_folder(base)
    assert wait(start(folder, count=1)) == 0, (folder / "log").read_text()
    complete = {name: data for name, (data, _) in pictures(folder / "out").items()}
    return {
        name: at_calls(
            name, lambda n, name=name: disturb(name, n, base, complete), first, 1 if name in INSIDE else every
        )
        for first, name in enumerate(FAULTS)
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--every", type=int, default=1, help="of the calls, every n-th alone")
    parser.add_argument("--results", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    import_all()
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as base:
        result = soak(Path(base), arguments.every)
    sys.stdout.write(f"{result} in {time.monotonic() - started:.0f} s\n")
    arguments.results.write_text(json.dumps({"machine": description(), "faults": result}, indent=1) + "\n")


if __name__ == "__main__":
    main()
