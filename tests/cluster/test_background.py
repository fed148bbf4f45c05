"""Work in a thread, whose results the caller fetches."""

import threading
import time

import pytest

from sana_core.cluster.connection import BACKLOG, iterate_in_thread


def test_a_slow_caller_bounds_the_results_in_memory():
    created, finished = [], threading.Event()

    def work(alive):
        try:
            for number in range(3 * BACKLOG):
                created.append(number)
                yield number
        finally:
            finished.set()

    results = iterate_in_thread(work, lambda: None, 5.0)
    assert next(results) == 0
    time.sleep(0.5)
    # One was fetched, and one waits for room.
    assert len(created) == BACKLOG + 2
    assert list(results) == list(range(1, 3 * BACKLOG)) and finished.wait(5)


@pytest.mark.parametrize("count", [1, 3 * BACKLOG])
def test_work_ends_when_a_slow_caller_gives_up(count):
    finished = threading.Event()

    def work(alive):
        try:
            yield from range(count)
        finally:
            finished.set()

    results = iterate_in_thread(work, lambda: None, 5.0)
    assert next(results) == 0
    results.close()
    assert finished.wait(5)


def test_an_error_comes_after_all_results():
    def work(alive):
        yield from range(BACKLOG)
        raise ValueError("broken")

    results = iterate_in_thread(work, lambda: None, 5.0)
    time.sleep(0.3)
    assert [next(results) for _ in range(BACKLOG)] == list(range(BACKLOG))
    with pytest.raises(ValueError, match="broken"):
        next(results)
