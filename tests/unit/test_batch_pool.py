"""The threads that SANA Batch Sampler uses for its devices."""

import threading
import time
from contextlib import closing

import torch

from sana_core.batch import local
from sana_core.batch.loop import run_batch
from sana_core.batch.plan import ImageSpec, batch_images, split_into_chunks
from sana_core.batch.queue import Queue
from sana_core.runtime.cancellation import Polled


def test_a_device_that_responds_again_generates_images_again(caplog):
    """Also if it is the only device, for example because torch.compile has compiled again."""
    hang, hung = threading.Event(), []

    def prepare(device, poll):
        def generate(chunk):
            if chunk[0].number == 3 and not hung:
                hung.append(chunk)
                hang.wait(20)
            return list(chunk)

        return generate

    with closing(local.LocalPool([torch.device("cpu")], prepare)) as pool:
        queue = Queue(split_into_chunks(batch_images(1, 8, 0), 1))
        real = pool.drop

        def drop(worker, reason):
            real(worker, reason)
            assert pool.workers() == []
            hang.set()

        pool.drop = drop
        images = [image.number for image, _ in run_batch(queue, pool, grace=0.1)]
        assert sorted(images) == list(range(8)) and pool.workers() == ["cpu"]
    assert "no other device is left, so the run waits for cpu" in caplog.text and "cpu responds again" in caplog.text


def test_a_device_may_load_longer_than_a_chunk_may_take(monkeypatch):
    monkeypatch.setattr(local, "LOADING_PATIENCE", 0.5)
    woken = threading.Event()

    def before_chunk(worker, device, chunk, poll):
        if worker.endswith("#2"):
            # It does not poll, as a device that hangs.
            woken.wait(20)
        else:
            for _ in range(10):
                time.sleep(0.1)
                poll()

    devices = [torch.device("cpu")] * 2
    with closing(local.LocalPool(devices, lambda device, poll: list, before_chunk=before_chunk)) as pool:
        queue = Queue(split_into_chunks(batch_images(1, 2, 0), 1))
        # The first device loads for a second, far longer than a chunk takes, and is not dropped.
        assert len(list(run_batch(queue, pool, grace=0.01))) == 2
        assert pool.workers() == ["cpu"]
        woken.set()


def test_an_idle_device_and_a_long_step_do_not_count_as_loading(monkeypatch, caplog):
    monkeypatch.setattr(local, "LOADING_PATIENCE", 0.3)

    def prepare(device, poll):
        def generate(chunk):
            poll()
            time.sleep(1.0 if chunk[0].number == 0 else 0.0)
            return list(chunk)

        return generate

    with closing(local.LocalPool([torch.device("cpu")] * 2, prepare)) as pool:
        queue = Queue(split_into_chunks(batch_images(1, 2, 0), 1))
        assert len(list(run_batch(queue, pool))) == 2
        assert pool.workers() == ["cpu", "cpu #2"]
    assert "gets no more images" not in caplog.text


def test_a_device_that_hung_while_it_prepared_is_used_again(monkeypatch):
    monkeypatch.setattr(local, "LOADING_PATIENCE", 0.3)
    monkeypatch.setattr(local, "JOIN_TIMEOUT", 1.0)
    woken, dropped = threading.Event(), threading.Event()

    def prepare(device, poll):
        woken.wait(20)
        return list

    def cancel():
        if time.monotonic() - began > 10:
            raise TimeoutError("the run does not end")
        if not pool.workers():
            # It wakes up and finds an empty inbox.
            dropped.set()
            woken.set()

    began = time.monotonic()
    with closing(local.LocalPool([torch.device("cpu")], prepare, cancel)) as pool:
        queue = Queue(split_into_chunks(batch_images(1, 3, 0), 1))
        assert len(list(run_batch(queue, pool))) == 3
    assert dropped.is_set()


def test_closing_while_devices_load_does_not_wait_for_them():
    loading, started = threading.Event(), threading.Barrier(3, timeout=20)

    def before_chunk(worker, device, chunk, poll):
        started.wait()
        with Polled(poll):
            while not loading.is_set():
                torch.zeros(1)
                time.sleep(0.01)

    pool = local.LocalPool([torch.device("cpu")] * 2, lambda device, poll: list, before_chunk=before_chunk)
    for worker in pool.workers():
        pool.submit(worker, (ImageSpec(0, 0, 0),))
    threads = list(pool.threads.values())
    started.wait()
    began = time.monotonic()
    pool.close()
    assert time.monotonic() - began < 5 and not any(thread.is_alive() for thread in threads)


def test_closing_stops_every_device_within_a_step():
    started = threading.Barrier(3, timeout=30)
    polls = []

    def count(poll):
        started.wait()
        while True:
            polls.append(1)
            poll()

    pool = local.LocalPool([torch.device("cpu")] * 2, lambda device, poll: lambda chunk: count(poll))
    for worker in pool.workers():
        pool.submit(worker, ())
    threads = list(pool.threads.values())
    started.wait()
    pool.close()
    assert polls and not any(thread.is_alive() for thread in threads)
