"""Ten seconds and a gigabyte: what a broken file may cost."""

import resource
import signal
from contextlib import contextmanager
from pathlib import Path

SECONDS, BYTES = 10, 10**9


@contextmanager
def bounded(seconds: int = SECONDS, size: int = BYTES):
    """More than `seconds` inside is a TimeoutError, also in a hang; more than `size` bytes of new memory an error."""

    def stop(*ignored):
        raise TimeoutError(f"took more than {seconds} s")

    pages = int(Path("/proc/self/statm").read_text().split()[0])
    before = resource.getrlimit(resource.RLIMIT_AS)
    previous = signal.signal(signal.SIGALRM, stop)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + size, before[1]))
    # again each second, for what is raised in a callback of the garbage collector is lost
    signal.setitimer(signal.ITIMER_REAL, seconds, 1)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
        resource.setrlimit(resource.RLIMIT_AS, before)
