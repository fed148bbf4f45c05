"""Work in forks of this process, each with a copy of the tree of its own: what mutants are tried in.

A fork has torch and the libraries imported already, and nothing that a mutant does outlives it.
"""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from setup import CACHE, ROOT

STATE = CACHE / "mutants.d"
LARGEST_MEMORY = 8 << 30
# the exit status of a fork whose work raised
RAISED = 99


class Job:
    """Work in a fork, which is given the tree of its slot and returns an exit status; `done` gets that, None if late.

    It has `limit` seconds. What it prints goes to a log beside the tree.
    """

    def __init__(
        self, slot: int, work: Callable[[Path], int], limit: float, done: Callable[[int | None], None]
    ) -> None:
        self.done = done
        self.end = time.monotonic() + limit
        self.pid = os.fork()
        if self.pid == 0:
            run_child(slot, work)

    def poll(self) -> bool:
        """Return whether it has ended; then `done` has been told."""
        pid, status = os.waitpid(self.pid, os.WNOHANG)
        late = not pid and time.monotonic() > self.end
        if not pid and not late:
            return False
        # what it has started ends with it
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        if late:
            os.waitpid(self.pid, 0)
        self.done(None if late else os.waitstatus_to_exitcode(status))
        return True


def run_child(slot: int, work: Callable[[Path], int]) -> None:
    code = RAISED
    try:
        os.setsid()
        resource.setrlimit(resource.RLIMIT_DATA, (LARGEST_MEMORY, LARGEST_MEMORY))
        log = os.open(log_of(slot), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        os.dup2(log, 1)
        os.dup2(log, 2)
        code = work(tree_of(slot))
    finally:
        os._exit(code)


def run_all(jobs: Iterable[Callable[[int], Job]], slots: int) -> None:
    """Start each job in a slot as soon as one is free, and return when all have ended."""
    waiting, running = list(jobs)[::-1], {}
    while waiting or running:
        for slot in range(slots):
            if slot not in running and waiting:
                running[slot] = waiting.pop()(slot)
        running = {slot: job for slot, job in running.items() if not job.poll()}
        time.sleep(0.02)


def tree_of(slot: int) -> Path:
    return STATE / f"tree{slot}"


def log_of(slot: int) -> Path:
    return STATE / f"log{slot}"


def copy_tree(slot: int) -> None:
    """Copy what git knows of the tree: without byte code, which would be taken for that of a mutant."""
    tree = tree_of(slot)
    shutil.rmtree(tree, ignore_errors=True)
    names = subprocess.run(
        ["git", "ls-files", "-z", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, check=True, text=True
    ).stdout.split("\0")
    for name in filter(None, names):
        if (ROOT / name).is_file():
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, tree / name)
