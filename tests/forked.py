"""Forks of the test's own process, which has the libraries loaded: a command in one takes a second, and not ten."""

import contextlib
import gc
import os
import signal
import sys
import traceback

import torch

from sana_core.__main__ import command_line


class Forked:
    """A process that calls `work` in the folder `cwd`: read, signalled and waited for as a subprocess.Popen."""

    def __init__(self, work, cwd="."):
        pipes = [os.pipe() for _ in range(2)]
        self.returncode, self.pid = None, os.fork()
        if self.pid == 0:
            run(work, cwd, [end for _, end in pipes])
        for _, end in pipes:
            os.close(end)
        self.stdout, self.stderr = (os.fdopen(end) for end, _ in pipes)

    def send_signal(self, number):
        os.kill(self.pid, number)

    def poll(self, how=os.WNOHANG):
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, how)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def communicate(self):
        written = self.stdout.read(), self.stderr.read()
        self.poll(0)
        return written


def run(work, cwd, ends):
    status = 70
    # Garbage of earlier tests may have C++ threads, which a fork lacks: to free it here aborts the process.
    gc.freeze()
    try:
        os.chdir(cwd)
        for number, end in enumerate(ends, 1):
            os.dup2(end, number)
        sys.stdout, sys.stderr = (open(number, "w", closefd=False) for number in (1, 2))  # noqa: SIM115
        # a shell that has put the tests into the background ignores Ctrl+C for them
        signal.signal(signal.SIGINT, signal.default_int_handler)
        torch.set_num_threads(1)
        status = work() or 0
    except SystemExit as ended:
        status = ended.code
    except BaseException:
        traceback.print_exc()
    finally:
        # Python's end passes over what cannot be written either
        with contextlib.suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)


def command(*words, cwd=".", before=lambda: None):
    """Start `python -m sana_core` with these words; `before` is called in the process first."""

    def work():
        before()
        sys.argv = ["sana_core", *map(str, words)]
        return command_line()

    return Forked(work, cwd)
