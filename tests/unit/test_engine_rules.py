"""Rules of the loop of a batch, with workers that answer as a test says, and with threads."""

import itertools
import json
import logging
import multiprocessing
import os
import threading
import time
from pathlib import Path

import pytest
import torch
from stub_runs import CPU, Work, scaled, stub_workers

from sana_core.batch.pipeline import SamplingSettings, prepare
from sana_core.batch.plan import ImageSpec, Workload, batch_images, split_into_chunks
from sana_core.engine import body, loop, process
from sana_core.engine.body import Body, pack
from sana_core.engine.local import ThreadWorker, make_job
from sana_core.engine.loop import Run
from sana_core.errors import ClusterError
from sana_core.runtime.limits import WatchClock

TEXTS = {"a": "text", None: "negative"}


class ScriptedWorker:
    """A worker that answers `begin` and `load` at once. The test answers all other tasks with its methods."""

    depth, machine = 1, None

    def __init__(self, name, can_restart=True):
        self.name, self.can_restart = name, can_restart
        self.birth, self.restarts, self.cancelled, self.ended = 1, 0, 0, 0
        # The tasks that it has not answered: name, number, arguments.
        self.tasks = []
        self.generated = []

    def attach(self, events):
        self.events = events

    def post(self, name, *values):
        self.events.put((self, self.birth, self.run, name, *values))

    def send(self, name, run, task, *arguments):
        self.run = run
        if name == "begin":
            self.post("begun")
        if name in ("begin", "load"):
            self.post("done", task, 0.1, False if name == "begin" else None)
        else:
            self.tasks.append((name, task, arguments))
        if name == "generate":
            self.generated.append([image[0] for image in arguments[0]])

    def finish(self, only=None):
        """Finish the images of the present task, and the task unless `only` some images are finished."""
        _, task, arguments = self.tasks[0]
        for image in arguments[0]:
            if only is None or image[0] in only:
                self.post("image", image[0], f"image {image[0]} of {self.name}")
        if only is None:
            self.tasks.pop(0)
            self.post("done", task, 1.0, None)

    def fail(self, kind="error", text="it failed"):
        _, task, _ = self.tasks.pop(0)
        self.post("failed", task, kind, text, "RuntimeError")

    def lose(self):
        self.tasks = []
        self.events.put((self, self.birth, 0, "lost", "it was killed"))

    def cancel(self, run):
        self.cancelled = run

    def restart(self):
        self.birth += 1
        self.restarts += 1

    def end(self):
        self.ended += 1

    def leave(self):
        pass


class Clock:
    """The time of a run, which only the test changes."""

    now = 1000.0

    def __call__(self):
        return self.now


def make_run(workers, count, chunk=1, texts=TEXTS, **options):
    """A run of `count` images of one prompt in chunks of `chunk`."""
    chunks = split_into_chunks(batch_images(1, count, 5), chunk)
    return Run({}, chunks, workers, ["a"], dict(texts), **options)


@pytest.fixture(autouse=True)
def _short_looks(monkeypatch):
    monkeypatch.setattr(loop, "LOOK", 0.001)


def collect(run, script, on_image=lambda number: None):
    """Return the images by number. Each `yield` of the generator `script` lets the loop look at its workers once."""
    left = itertools.chain(script, itertools.repeat(None, 200))

    def poll():
        assert next(left, pytest) is not pytest, "the run does not end"

    images = {}
    for image, content in run.images(poll):
        assert image.number not in images
        images[image.number] = content
        on_image(image.number)
    return images


def test_a_waiting_chunk_whose_images_arrive_late_is_not_generated():
    """It would be a task without images, which no worker can do."""
    first, second, third = workers = [ScriptedWorker(name) for name in ("first", "second", "third")]

    def script():
        while not all(worker.tasks for worker in workers):
            yield
        # The image of a killed process arrives after the loss, when its chunk already waits for another worker.
        second.events.put((second, second.birth, 0, "lost", "it was killed"))
        second.finish(only=[1])
        second.tasks = []
        first.fail()
        while True:
            yield
            for worker in workers:
                if worker.tasks:
                    worker.finish()

    assert set(collect(make_run(workers, 3), script())) == {0, 1, 2}
    assert [image for worker in workers for image in worker.generated] == [[0], [1], [2], [0]]


def test_a_pause_of_the_consumer_is_no_silence_of_a_worker():
    """Else a worker that hangs after a long pause would be waited for ten times as long as the pause."""
    clock, first, second = Clock(), ScriptedWorker("first"), ScriptedWorker("second")

    def script():
        while not (first.tasks and second.tasks):
            yield
        # Both have finished a chunk before the pause, so that their silence counts.
        first.finish()
        second.finish()
        while not (first.tasks and second.tasks):
            yield
        first.finish()
        second.finish(only=[3])
        for _ in range(70):
            yield
            clock.now += 1
            first.post("alive")
        assert second.restarts == 1
        second.tasks.pop(0)
        while True:
            yield
            for worker in (first, second):
                if worker.tasks:
                    worker.finish()

    def pause(number):
        if number == 2:
            clock.now += 300

    run = make_run([first, second], 6, clock=WatchClock(clock))
    assert set(collect(run, script(), pause)) == set(range(6))


def test_a_worker_that_warns_while_it_loads_may_still_load():
    clock, worker = Clock(), ScriptedWorker("worker")

    def script():
        while not worker.tasks:
            yield
        worker.post("loading")
        worker.post("log", logging.WARNING, "a file has no metadata")
        yield
        for _ in range(400):
            clock.now += 2
            yield
        worker.finish()

    assert set(collect(make_run([worker], 1, clock=clock), script())) == {0}
    assert not worker.restarts


def test_a_process_keeps_its_models_while_the_consumer_pauses(tmp_path, monkeypatch):
    """They may have weights that are sent once in a run."""
    source = Path(process.__file__).with_name("child.py").read_text()
    assert source.count("IDLE, LONG_IDLE = 60.0, 600.0") == 1
    short = source.replace("IDLE, LONG_IDLE = 60.0, 600.0", "IDLE, LONG_IDLE = 0.3, 2.1")
    (tmp_path / "child.py").write_text(short)
    monkeypatch.setattr(process, "__file__", str(tmp_path / "process.py"))
    work = Work({}, count=3, chunk=1, weights={"weight": b"changed"})
    with stub_workers() as stub, stub.processes.borrow([CPU, CPU]) as workers:
        results = []
        for result in work.run(workers).images():
            results.append(result)
            if len(results) == 2:
                time.sleep(1.5)
        work.check(results)
        assert [worker.birth for worker in workers] == [1, 1]
        # After the run they end.
        for worker in workers:
            end = time.monotonic() + 30
            # The thread that listens may be the one that takes the exit code, a moment later.
            while worker.process.exitcode is None and time.monotonic() < end:
                time.sleep(0.02)
            assert worker.process.exitcode == 0


@pytest.mark.parametrize("kind", ["driver", "memory", "error"])
def test_an_image_that_cannot_be_sent_is_generated_again(kind):
    work = Work({}, count=4)
    with stub_workers() as stub, stub.processes.borrow([CPU, CPU]) as workers:
        order = stub.order("send", kind)
        failed = work.check(list(work.run(workers).images()))
        assert not order.exists() and not failed


def test_a_worker_keeps_the_negative_prompt_of_a_chunk_that_failed(checkpoint, monkeypatch):
    """The text encoder may have displaced the models, and memory may run out when they are loaded again."""
    request = prepare(Workload(["a"], batch_images(1, 4, 5)), checkpoint, SamplingSettings(64, 64, 1), ["cpu"])
    failures = []

    def load_models(*arguments):
        if len(failures) < 2:
            failures.append(1)
            raise torch.OutOfMemoryError("CUDA out of memory")
        return real(*arguments)

    class SmallBody(Body):
        # The models are displaced between `load` and the first chunk.
        is_displaced = False

        def load(self):
            if self.is_displaced:
                return super().load()
            self.is_displaced = True

    real = body.load_models
    monkeypatch.setattr(body, "load_models", load_models)
    embeds = [pack(torch.ones(1, 3, 64)), pack(torch.ones(1, 3, dtype=torch.bool))]
    worker = ThreadWorker("cpu", CPU, SmallBody)
    job = make_job(request, None).pack()
    run = Run(job, split_into_chunks(request.workload.images, 2), [worker], ["a"], {"a": embeds, None: embeds})
    assert {image.number for image, _ in run.images()} == {0, 1, 2, 3}
    assert len(failures) == 2


@pytest.mark.parametrize(
    ("file", "field", "value"),
    [("scheduler/scheduler_config.json", "flow_shift", 1.5), ("transformer/config.json", "norm_eps", 1e-5)],
)
def test_the_models_of_a_warm_process_are_loaded_again_when_a_configuration_changes(copy, file, field, value):
    """The shift of the schedule, for example, is part of the loaded models."""

    def models():
        request = prepare(Workload(["a"], batch_images(1, 1, 5)), copy, SamplingSettings(64, 64, 1), ["cpu", "cpu"])
        return make_job(request, None).models

    before = models()
    assert models() == before
    (copy / file).write_text(json.dumps(json.loads((copy / file).read_text()) | {field: value}))
    assert models() != before


def test_a_run_after_a_ctrl_c_in_the_start_of_a_process_needs_no_patience(monkeypatch):
    """The traceback keeps the pipe of the interrupted start open, so its process lives."""
    real_start = threading.Thread.start

    def start(thread):
        if thread.name.startswith("sana"):
            monkeypatch.setattr(threading.Thread, "start", real_start)
            raise KeyboardInterrupt
        real_start(thread)

    work = Work({})
    with stub_workers() as stub, stub.processes.borrow([CPU, CPU]) as workers:
        monkeypatch.setattr(threading.Thread, "start", start)
        with pytest.raises(KeyboardInterrupt) as interrupt:
            list(work.run(workers).images())
        started = time.monotonic()
        work.check(list(work.run(workers).images()))
        # Both workers answer.
        work.check(list(work.run(workers[:1]).images()))
        assert time.monotonic() - started < 60
        assert interrupt.tb is not None


def test_a_process_that_finds_no_open_file_left_is_a_lost_worker(monkeypatch):
    work = Work({})
    with stub_workers() as stub, stub.processes.borrow([CPU, CPU]) as workers:
        pipe = multiprocessing.get_context("spawn").Pipe
        left = iter([OSError(24, "Too many open files")])

        def scarce_pipe(context, *arguments):
            for error in left:
                raise error
            return pipe(*arguments)

        monkeypatch.setattr(multiprocessing.context.BaseContext, "Pipe", scarce_pipe)
        work.check(list(work.run(workers).images()))


class StuckProcess:
    """A killed process that a hung driver keeps from ending."""

    def kill(self):
        pass

    def join(self, timeout):
        time.sleep(timeout)


def test_processes_that_cannot_end_hold_up_neither_the_loop_nor_the_exit(monkeypatch):
    monkeypatch.setattr(process, "END_TIMEOUT", 1.0)
    with stub_workers() as stub, stub.processes.borrow([CPU] * 4) as workers:
        for worker in workers:
            worker.process = StuckProcess()
        started = time.monotonic()
        workers[0].restart()
        assert time.monotonic() - started < 0.9
        workers[0].process.kill()
        workers[0].process = StuckProcess()
        started = time.monotonic()
        stub.processes.end()
        assert time.monotonic() - started < 1.9
        for worker in workers:
            worker.process = None


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads the memory in use as Linux shows it")
def test_the_latents_of_a_chunk_take_no_memory_for_all_images_of_the_batch(checkpoint):
    """Each of several processes would otherwise have the latents of the whole batch, for each chunk."""

    def used():
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    request = prepare(Workload(["a"], batch_images(1, 1, 5)), checkpoint, SamplingSettings(64, 64, 1), ["cpu"])
    worker = Body("cpu", lambda *event: None, lambda: None)
    worker.begin(make_job(request, None).pack())
    last = ImageSpec(2**21, 0, 5)
    rows = torch.randn(1, 32, 2, 2)
    before = used()
    latents = worker.image_inputs((last,), {"latents": pack(rows)}).latents
    assert latents[last.number].equal(rows[0])
    assert used() - before < 2**28, "a gigabyte for other images"


def test_a_worker_that_was_left_out_because_it_hangs_works_in_the_next_run(caplog):
    limits = scaled(0.005)
    with stub_workers() as stub, stub.processes.borrow([CPU]) as workers:
        for _ in range(loop.STRIKES):
            stub.order("start", "stop")
        with pytest.raises(ClusterError, match="silent for"):
            list(Work({}).run(workers, limits, on_left_out=process.kill_left_out).images())
        assert not stub.pending()
        caplog.clear()
        work = Work({})
        work.check(list(work.run(workers, limits, on_left_out=process.kill_left_out).images()))
        # No process was lost on the way.
        assert not caplog.records
