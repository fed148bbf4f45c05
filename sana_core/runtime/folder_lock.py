"""The lock of an output folder: only one run at a time may write to it.

A lock of the operating system decides. It ends with its process, even if the process is killed. No call reports
whether a lock reaches other machines. A record beside the lock therefore identifies the run that holds the folder. The
run renews its record while it is alive. If the record of another machine's run does not change, that run is dead.

A server may publish the folder, as ComfyUI publishes its output folder. The record therefore contains no name, process
or path. It contains digests of the machine's name and of the run's token, which the next run can compare.
"""

from __future__ import annotations

import json
import re
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from platform import node
from stat import S_ISDIR, S_ISREG
from typing import NamedTuple
from uuid import uuid4

from ..errors import InUseError, MissingFileError, OutputError, ReadError
from .atomic_files import digest_of, patiently, read_small, reason_of, remove, write_whole
from .text import get_logger

logger = get_logger(__name__)

# The subfolder of the held folder that contains the lock, the record and unfinished files.
OWN = ".sana-batch"
LOCK = "lock"
RECORD = "holder.json"
# Prefixes of the folder of a run, and of the folder of a dead run that is being removed.
RUN = "run-"
GONE = "gone-"
MARK = "mark"
# A complete state of a training that could not be moved to its final path. The next training moves it.
STATE_PARTS, STATE = ".state-*.part", "state.json"
# Seconds to wait for the lock. The lock file of a run that ends is removed while another run opens it.
LOCK_PATIENCE = 0.2
# Seconds between two renewals of the record.
HEARTBEAT_INTERVAL = 5.0
# A run of another machine is considered dead if its record has not changed for this many seconds.
STALE_AFTER = 30.0
POLL_INTERVAL = 0.5
LARGEST_RECORD = 10_000
TIME = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d", re.ASCII)


class Holder(NamedTuple):
    # Digest of the run's token.
    run: str
    # Digest of the machine's name and of `run`.
    machine: str
    # The time at which the run began.
    since: str
    # How often the record was renewed.
    beat: int = 0


class Hold:
    """A folder that this run holds. `run` is its subfolder for unfinished files, which is removed when the run ends."""

    def __init__(self, folder: Path) -> None:
        token = uuid4().hex
        run = digest_of(token.encode())
        self.folder = folder
        self.holder = Holder(run, machine_digest(run), time.strftime("%Y-%m-%d %H:%M:%S"))
        self.record = folder / OWN / RECORD
        self.run = folder / OWN / f"{RUN}{token}"
        self.ended, self.lost = threading.Event(), threading.Event()

    def check(self) -> None:
        """Raise InUseError if another run has taken the folder, because it considered this run dead."""
        if self.lost.is_set():
            raise InUseError(
                f"out: another run has taken {self.folder}, because this run did not renew its record for "
                f"{STALE_AFTER:.0f} s; run the same command later to resume"
            )

    def write(self, replace: bool) -> None:
        """Write the record. Raises OSError."""
        write_whole(self.record, json.dumps(self.holder._asdict(), allow_nan=False).encode(), self.run, replace)

    def renew(self) -> None:
        """Renew the record every few seconds until the run ends. A thread runs this."""
        while not self.ended.wait(HEARTBEAT_INTERVAL):
            # A disk may be full or unavailable for a moment. Writing the images reports that.
            with suppress(OSError):
                holder = read_record(self.record)
                if holder is None or holder.run != self.holder.run:
                    self.lost.set()
                    return
                self.holder = self.holder._replace(beat=self.holder.beat + 1)
                self.write(replace=True)


@contextmanager
def hold(folder: Path) -> Iterator[Hold]:
    """Hold `folder`, creating it if needed, and remove the unfinished files of dead runs.

    If the folder contains the record of another machine's run, waits half a minute to see whether that run is alive.
    """
    from filelock import FileLock, SoftFileLock

    lock_folder = folder / OWN
    check_lock_files(folder)
    held, lock = Hold(folder), FileLock(lock_folder / LOCK, LOCK_PATIENCE, thread_local=False)
    thread = threading.Thread(target=held.renew, name="sana batch hold", daemon=True)
    try:
        lock_folder.mkdir(parents=True, exist_ok=True)
        lock.acquire()
        if isinstance(lock, SoftFileLock):
            # FileLock becomes one on a disk without locks. It stays if its process is killed.
            lock.release()
            raise NotImplementedError("Function not implemented")
    except (TimeoutError, FileNotFoundError):
        # FileNotFoundError: the run that held the folder has just ended.
        raise in_use(folder, read_record(held.record)) from None
    except (OSError, NotImplementedError) as error:
        reason = reason_of(error) if isinstance(error, OSError) else error
        raise OutputError(f"out: {folder} cannot be locked ({reason}); choose a folder on another disk") from None
    try:
        try:
            held.run.mkdir()
            (held.run / MARK).touch()
            claim(held)
        except FileNotFoundError:
            # Another run started at the same moment, took the lock, and removed this run's folder.
            raise in_use(folder, read_record(held.record)) from None
        thread.start()
        for run in [*lock_folder.glob(f"{RUN}*"), *lock_folder.glob(f"{GONE}*")]:
            if run != held.run:
                remove_run(run)
        yield held
    finally:
        held.ended.set()
        if thread.ident is not None:
            thread.join()
        remove_run(held.run)
        with suppress(OSError):
            holder = read_record(held.record)
            if holder is not None and holder.run == held.holder.run:
                remove(held.record)
            # Windows does not remove an open file. There FileLock removes it.
            if sys.platform != "win32" and (holder is None or holder.run == held.holder.run):
                remove(lock_folder / LOCK)
        lock.release()
        with suppress(OSError):
            lock_folder.rmdir()


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


def claim(held: Hold) -> None:
    """Write this run's record, also over the record of a dead run. Raises InUseError if the other run is alive."""
    holder = read_record(held.record)
    if holder is None:
        try:
            held.write(replace=False)
        except FileExistsError:
            raise in_use(held.folder, read_record(held.record)) from None
    elif holder.machine == machine_digest(holder.run):
        # On one machine, a lock excludes every other run that is alive. The other run is therefore dead.
        held.write(replace=True)
    else:
        wait_for_heartbeat(held, holder)
        held.write(replace=True)
        # If two runs take the folder at the same moment, the first one reads the record of the second one here.
        time.sleep(HEARTBEAT_INTERVAL)
        holder = read_record(held.record)
        if holder is None or holder.run != held.holder.run:
            raise in_use(held.folder, holder)


def wait_for_heartbeat(held: Hold, other: Holder) -> None:
    logger.warning(
        "batch: %s may be in use by a run that began at %s; waiting %.0f s to see whether it is alive",
        held.folder,
        other.since,
        STALE_AFTER,
    )
    end = time.monotonic() + STALE_AFTER
    while time.monotonic() < end:
        time.sleep(POLL_INTERVAL)
        now = read_record(held.record)
        if now is None:
            return
        if now != other:
            raise in_use(held.folder, now)


def machine_digest(run: str) -> str:
    """Digest of this machine's name, salted with the digest of the run that the record belongs to."""
    return digest_of(f"{run} {node()}".encode())


def read_record(path: Path) -> Holder | None:
    """Return the record of the run that holds the folder, or None. Raises ReadError for a damaged record."""
    try:
        # Windows refuses to open a file that is being replaced.
        holder = Holder(**json.loads(patiently(lambda: read_small(path, LARGEST_RECORD))))
        # Other users may be able to write this file, and messages contain its time.
        if not TIME.fullmatch(holder.since) or type(holder.beat) is not int:
            raise ValueError
        return holder
    except FileNotFoundError:
        return None
    except (ValueError, TypeError, RecursionError):
        raise ReadError(f"{path}: damaged; remove {path.parent.name} if no run is using the folder") from None


def in_use(folder: Path, holder: Holder | None) -> InUseError:
    when = "which has just begun or ended" if holder is None else f"which began at {holder.since}"
    return InUseError(f"out: {folder} is in use by another run, {when}; wait for its end, or choose another folder")


def check_run(folder: Path, run: str) -> None:
    """Check on another machine that `folder` is the one that the driver's run holds."""
    run_folder = folder / OWN / run
    if not (run_folder / MARK).is_file():
        raise MissingFileError(f"out: {folder} is not the driver's folder; mount the same folder at this path")
    try:
        write_whole(run_folder / f".{uuid4().hex}.part", b"", run_folder)
    except OSError as error:
        raise OutputError(
            f"out: cannot write into {folder} ({error.strerror}); check its permissions and disk"
        ) from None


def kept_states(run: Path) -> list[Path]:
    """Return the folders of complete states in the folder of a run."""
    return [part for part in run.glob(STATE_PARTS) if (part / STATE).is_file()]


def remove_run(run: Path) -> None:
    """Remove the folder of a run with its unfinished files. Other files, and complete states, are not removed.

    A machine that still works for a dead run cannot write any more afterwards.
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
