"""Signs of life of the ranks of a run, by which the others notice that one is dead, and say which.

Each rank counts up a number of its own in the store of the launcher. A process that is killed, and a machine that is
gone, leave it standing; a collective on an accelerator would wait for them for ever. A rank that fails says so there.
"""

from __future__ import annotations

import sys
import threading
import time
from os import _exit
from typing import Any

# seconds between two signs of life, and without one until a rank is taken for dead
BEAT = 2.0
LOST = 20.0
# seconds in which the others end by themselves after a rank has failed
GRACE = 10.0
BEATS, NAMES, FAILED = "beat", "name", "failed"


class Heart:
    """What a thread does for a rank throughout a run. The first rank listens to all, the others to the first."""

    def __init__(self, store: Any, rank: int, count: int, name: str) -> None:
        self.store, self.rank, self.count, self.name = store, rank, count, name
        self.ended = threading.Event()
        self.thread = threading.Thread(target=self.run, name="sana training heart", daemon=True)
        # of each rank that is listened to, its last number, and when it was seen to change
        self.seen: dict[int, tuple[bytes, float]] = {}

    def start(self) -> None:
        self.store.set(f"{NAMES}/{self.rank}", self.name)
        self.store.set(f"{BEATS}/{self.rank}", "0")
        self.thread.start()

    def stop(self) -> None:
        self.ended.set()
        self.thread.join()

    def announce(self, error: BaseException) -> None:
        """Tell the others why this rank ends."""
        try:
            self.store.set(FAILED, f"{self.name}: {error!s:.300}")
        except RuntimeError:
            # whoever keeps the store is gone, and so are they
            return

    def run(self) -> None:
        """Beat and listen until the end; end the process where another one is dead and this one does not notice."""
        number = 0
        while not self.ended.wait(BEAT):
            number += 1
            try:
                self.store.set(f"{BEATS}/{self.rank}", str(number))
                lost = self.failed() or self.silent()
            except RuntimeError:
                lost = "the machine that the run was begun on is gone"
            if lost and not self.ended.wait(GRACE):
                sys.stderr.write(f"\ntraining: {lost}; the same command resumes\n")
                sys.stderr.flush()
                # the main thread may be waiting for the dead inside of a collective, where no exception reaches it
                _exit(1)

    def failed(self) -> str:
        """Return what a rank that has failed says of it."""
        if not self.store.check([FAILED]):
            return ""
        return f"{self.store.get(FAILED).decode(errors='replace')}"

    def silent(self) -> str:
        """Return the names of the ranks that have given no sign of life for LOST seconds."""
        found, now = [], time.monotonic()
        for rank in range(self.count) if self.rank == 0 else (0,):
            key = f"{BEATS}/{rank}"
            number = self.store.get(key) if self.store.check([key]) else b""
            if rank not in self.seen or self.seen[rank][0] != number:
                self.seen[rank] = number, now
            elif now - self.seen[rank][1] > LOST:
                found.append(self.store.get(f"{NAMES}/{rank}").decode())
        return f"lost {' and '.join(found)}" if found else ""


def name_lost(heart: Heart) -> str:
    """Return who is dead, once a collective has failed; that takes as long as nobody beats."""
    end = time.monotonic() + LOST + 3 * BEAT
    # all of them, for any may be the dead one
    watch = Heart(heart.store, 0, heart.count, heart.name)
    while time.monotonic() < end:
        try:
            lost = watch.failed() or watch.silent()
        except RuntimeError:
            return "lost the machine that the run was begun on"
        if lost:
            return lost
        time.sleep(BEAT / 4)
    return "lost the connection to another rank"
