"""A broken file may cost ten seconds of work and a gigabyte."""

import resource
import signal
from contextlib import contextmanager
from pathlib import Path

SECONDS, BYTES = 10, 10**9
# A wait without work ends after PATIENCE * SECONDS on the clock. A busy machine is a few times slower.
PATIENCE = 6


@contextmanager
def bounded(seconds: int = SECONDS, size: int = BYTES):
    """Raise TimeoutError after `seconds` of processor time, or after PATIENCE * `seconds` on the clock, also in a hang.

    More than `size` bytes of new memory are a MemoryError.
    """

    def stop(*ignored):
        raise TimeoutError(f"took more than {seconds} s")

    pages = int(Path("/proc/self/statm").read_text().split()[0])
    before = resource.getrlimit(resource.RLIMIT_AS)
    previous = {number: signal.signal(number, stop) for number in (signal.SIGALRM, signal.SIGPROF)}
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + size, before[1]))
    # The signal repeats each second, because exceptions in callbacks of the garbage collector are lost.
    signal.setitimer(signal.ITIMER_REAL, PATIENCE * seconds, 1)
    signal.setitimer(signal.ITIMER_PROF, seconds, 1)
    try:
        yield
    finally:
        for timer in (signal.ITIMER_REAL, signal.ITIMER_PROF):
            signal.setitimer(timer, 0)
        for number, handler in previous.items():
            signal.signal(number, handler)
        resource.setrlimit(resource.RLIMIT_AS, before)
