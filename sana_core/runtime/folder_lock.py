"""One run at a time holds a folder, so that no other touches what it writes there.

On one machine, and on network folders that carry locks, a lock of the operating system decides; it ends with its
process, however that ends. No call tells whether a lock reaches other machines, so a record beside it identifies the
run that holds the folder. The run renews its record while it lives. A record of another machine that does not change
belongs to a dead run.

A server may publish the folder, as ComfyUI publishes its output folder. So the record contains no name, process or
path. It contains digests of the machine's name and of the run's token, which are enough for the next run to compare.
"""

from __future__ import annotations

import json
import logging
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from platform import node
from stat import S_ISDIR, S_ISREG
from typing import BinaryIO, NamedTuple
from uuid import uuid4

from ..errors import InUseError, MissingFileError, OutputError, ReadError
from .atomic_files import digest_of, is_named, lock, patiently, read_small, remove, write_whole

logger = logging.getLogger(__name__)

# in the folder that is held, all of it ours
OWN = ".sana-batch"
LOCK = "lock"
RECORD = "holder.json"
RUN = "run-"
GONE = "gone-"
MARK = "mark"
# A complete state of a training that could not be moved to its place. The next training moves it.
STATE_PARTS, STATE = ".state-*.part", "state.json"
# How often to open the lock file if it seems to be another file every time.
LOCK_ATTEMPTS = 10
# seconds between two renewals of the record
HEARTBEAT_INTERVAL = 5.0
# a run of another machine is dead when its record stood still for so many seconds
STALE_AFTER = 30.0
POLL_INTERVAL = 0.5
LARGEST_RECORD = 10_000
TIME = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d", re.ASCII)


class Holder(NamedTuple):
    """The record of the run that holds a folder."""

    run: str  # digest of the run's token
    machine: str  # digest of the machine's name and of `run`
    since: str
    beat: int = 0  # how often the record was renewed


class Hold:
    """A folder that this run holds. `run` is a folder in it for unfinished files; it goes when the run ends."""

    def __init__(self, folder: Path) -> None:
        token = uuid4().hex
        run = digest_of(token.encode())
        self.folder = folder
        self.holder = Holder(run, machine_digest(run), time.strftime("%Y-%m-%d %H:%M:%S"))
        self.record = folder / OWN / RECORD
        self.run = folder / OWN / f"{RUN}{token}"
        self.ended, self.lost = threading.Event(), threading.Event()

    def check(self) -> None:
        """Raise InUseError once another run has taken the folder, as this one was thought dead."""
        if self.lost.is_set():
            raise InUseError(
                f"out: another run has taken {self.folder}, for this one gave no sign of life for {STALE_AFTER:.0f} s; "
                "the same command resumes later"
            )

    def write(self, replace: bool) -> None:
        """Write the record. Raises OSError."""
        write_whole(self.record, json.dumps(self.holder._asdict(), allow_nan=False).encode(), self.run, replace)

    def renew(self) -> None:
        """What a thread does until the end: say every few seconds that the run lives."""
        while not self.ended.wait(HEARTBEAT_INTERVAL):
            # a disk that is full or away for a moment is the concern of what writes images
            with suppress(OSError):
                found = read_record(self.record)
                if found is None or found.run != self.holder.run:
                    self.lost.set()
                    return
                self.holder = self.holder._replace(beat=self.holder.beat + 1)
                self.write(replace=True)


@contextmanager
def hold(folder: Path) -> Iterator[Hold]:
    """Hold `folder`, creating it if needed, and remove the unfinished files of dead runs.

    If another machine's run left its record in the folder, waits half a minute to see whether that run is alive. Raises
    InUseError with the time at which the other run began, and OSError for a folder that cannot be written.
    """
    own = folder / OWN
    check_lock_files(folder)
    stream, locked = open_lock(folder)
    with stream:
        held = Hold(folder)
        thread = threading.Thread(target=held.renew, name="sana batch hold", daemon=True)
        try:
            try:
                held.run.mkdir()
                (held.run / MARK).touch()
                claim(held, locked)
            except FileNotFoundError:
                # a run that came at the same moment has won, and has cleared this one's folder away
                raise in_use(folder, read_record(held.record)) from None
            thread.start()
            for run in [*own.glob(f"{RUN}*"), *own.glob(f"{GONE}*")]:
                if run != held.run:
                    remove_run(run)
            yield held
        finally:
            held.ended.set()
            if thread.ident is not None:
                thread.join()
            remove_run(held.run)
            with suppress(OSError):
                found = read_record(held.record)
                if found is not None and found.run == held.holder.run:
                    remove(held.record)
                if found is None or found.run == held.holder.run:
                    # a process that waits for this lock notices that it has no name any more
                    remove(own / LOCK)
                    own.rmdir()


def check_lock_files(folder: Path) -> None:
    """Raise OutputError for a link, folder or pipe in place of the lock's folder or files.

    Removing files behind a link would delete files of the user. Opening a pipe would wait for ever.
    """
    lock_folder = folder / OWN
    files = lock_folder / LOCK, lock_folder / RECORD
    for path, is_expected, expected in (
        (lock_folder, S_ISDIR, "a folder"),
        *((file, S_ISREG, "a file") for file in files),
    ):
        with suppress(FileNotFoundError, NotADirectoryError):
            if not is_expected(path.lstat().st_mode):
                raise OutputError(f"out: {path} is not {expected} (a link, pipe or other kind); remove it")


def open_lock(folder: Path) -> tuple[BinaryIO, bool]:
    """Return the open file of the lock, and whether this process has locked it; not where the disk knows no locks.

    Raises BlockingIOError where another process has.
    """
    path = folder / OWN / LOCK
    for attempt in count(1):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            # Windows refuses to open a file that is being removed.
            stream = patiently(lambda: path.open("ab"))
        except FileNotFoundError:
            continue  # the run that had the folder has just ended
        try:
            locked = lock(stream)
        except BlockingIOError:
            stream.close()
            raise in_use(folder, read_record(path.parent / RECORD)) from None
        # FUSE, exFAT and CIFS may give a file another number each time. Then no attempt would be the last.
        if is_named(stream, path) or attempt >= LOCK_ATTEMPTS:
            return stream, locked
        stream.close()
    raise AssertionError


def claim(held: Hold, locked: bool) -> None:
    """Write this run's record where there is none, or over a dead run's. Raises InUseError for one that lives."""
    found = read_record(held.record)
    if found is None:
        try:
            held.write(replace=False)
        except FileExistsError:
            raise in_use(held.folder, read_record(held.record)) from None
    elif locked and found.machine == machine_digest(found.run):
        # the lock reaches all of this machine, so that run is dead
        held.write(replace=True)
    else:
        wait_for_heartbeat(held, found)
        held.write(replace=True)
        # of two that take it at the same moment, one finds the other's record
        time.sleep(HEARTBEAT_INTERVAL)
        found = read_record(held.record)
        if found is None or found.run != held.holder.run:
            raise in_use(held.folder, found)


def wait_for_heartbeat(held: Hold, found: Holder) -> None:
    """Raise InUseError if the run of the record `found` lives."""
    logger.warning(
        "batch: %s may be in use by a run that began at %s; waiting %.0f s to see whether it lives",
        held.folder,
        found.since,
        STALE_AFTER,
    )
    end = time.monotonic() + STALE_AFTER
    while time.monotonic() < end:
        time.sleep(POLL_INTERVAL)
        now = read_record(held.record)
        if now is None:
            return
        if now != found:
            raise in_use(held.folder, now)


def machine_digest(run: str) -> str:
    """Digest of this machine's name, salted with the digest of the run that the record belongs to."""
    return digest_of(f"{run} {node()}".encode())


def read_record(path: Path) -> Holder | None:
    """Return who holds the folder, None for nobody. Raises ReadError for a record that is damaged."""
    try:
        # Windows refuses to open a file that is being replaced.
        holder = Holder(**json.loads(patiently(lambda: read_small(path, LARGEST_RECORD))))
        # Others can write this file, and messages contain its time.
        if not TIME.fullmatch(holder.since) or type(holder.beat) is not int:
            raise ValueError
        return holder
    except FileNotFoundError:
        return None
    except (ValueError, TypeError, RecursionError):
        raise ReadError(f"{path}: damaged; remove {path.parent.name} if no run is at work in the folder") from None


def in_use(folder: Path, holder: Holder | None) -> InUseError:
    when = "which has just begun or ended" if holder is None else f"which began at {holder.since}"
    return InUseError(f"out: {folder} is in use by another run, {when}; wait for its end, or choose another folder")


def check_run(folder: Path, run: str) -> None:
    """Raise MissingFileError unless the run of that name holds `folder`, OutputError where it cannot be written."""
    own = folder / OWN / run
    if not (own / MARK).is_file():
        raise MissingFileError(f"out: {folder} is not the driver's folder here; mount the same one at this path")
    try:
        write_whole(own / f".{uuid4().hex}.part", b"", own)
    except OSError as error:
        raise OutputError(f"out: cannot write into {folder} ({error.strerror}); see its rights and its disk") from error


def kept_states(run: Path) -> list[Path]:
    """Return the folders of complete states in the folder of a run."""
    return [part for part in run.glob(STATE_PARTS) if (part / STATE).is_file()]


def remove_run(run: Path) -> None:
    """Remove the folder of a run with its unfinished files. Other files, and complete states, stay where they are.

    A machine that still works for a dead run cannot write after that.
    """
    if run.is_symlink():
        # Files behind a link are not ours.
        return
    states = kept_states(run)
    gone = run if states else run.with_name(f"{GONE}{run.name.partition('-')[2]}")
    with suppress(OSError):
        if run != gone:
            patiently(lambda: run.rename(gone))
        for part in [*gone.glob(".*.part"), gone / MARK]:
            if part not in states:
                remove(part)
        gone.rmdir()
