"""Ten seconds of work and a gigabyte: what a broken file may cost."""

import resource
import signal
from contextlib import contextmanager
from pathlib import Path

SECONDS, BYTES = 10, 10**9
# of the clock, for what waits without working; a machine that has other work to do is slower by a few times
PATIENCE = 6


@contextmanager
def bounded(seconds: int = SECONDS, size: int = BYTES):
    """More than `seconds` of the processor, or PATIENCE times as many of the clock, inside are a TimeoutError, also in
    a hang; more than `size` bytes of new memory an error."""

    def stop(*ignored):
        raise TimeoutError(f"took more than {seconds} s")

    pages = int(Path("/proc/self/statm").read_text().split()[0])
    before = resource.getrlimit(resource.RLIMIT_AS)
    previous = {number: signal.signal(number, stop) for number in (signal.SIGALRM, signal.SIGPROF)}
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + size, before[1]))
    # again each second, for what is raised in a callback of the garbage collector is lost
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
