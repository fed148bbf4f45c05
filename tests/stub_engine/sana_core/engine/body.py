"""The body of a worker process without torch: it waits in place of computing, and fails on order.

The environment variable STUB_FAULTS is a folder. Its file `faults.json` has the chance of a fault in each phase, and
their kinds. A file `PHASE-KIND-NUMBER` there is a single fault: the first process that reaches the phase takes it.
"""

import ctypes
import json
import os
import random
import signal
import sys
import time
from pathlib import Path

from .content import content

FAULTS = Path(os.environ["STUB_FAULTS"])
PHASES = ("start", "begin", "load", "encode", "step", "decode", "send")


class StubError(Exception):
    """A failure of this kind: memory, driver, refused or error."""


def hang():
    while True:
        time.sleep(1000)


def hold_lock():
    """Hang within a call of the driver that never gives Python's lock back."""
    ctypes.PyDLL(None).sleep(1000)


def fail(kind):
    raise StubError(kind)


ACTIONS = {
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "exit": lambda: os._exit(3),
    "leave": sys.exit,
    "hang": hang,
    "deaf": hold_lock,
    **{kind: lambda kind=kind: fail(kind) for kind in ("memory", "driver", "refused", "error")},
}


def disturb(phase):
    """Do what the folder of faults orders for this phase."""
    for order in sorted(FAULTS.glob(f"{phase}-*")):
        try:
            order.unlink()
        except FileNotFoundError:
            # Another process has taken it.
            continue
        ACTIONS[order.name.split("-")[1]]()
    if (FAULTS / "faults.json").exists():
        faults = json.loads((FAULTS / "faults.json").read_text())
        if random.random() < faults["chances"].get(phase, 0):
            ACTIONS[random.choice(faults["kinds"])]()


def prepare_process(threads, post):
    pass


def release_memory_of(error, device):
    return error


def describe_failure(error):
    is_ordered = isinstance(error, StubError)
    name = "CheckpointError" if str(error) == "refused" else type(error).__name__
    return (str(error) if is_ordered else "error"), f"an ordered failure: {error}", name


class Body:
    def __init__(self, device, post, poll):
        self.device, self.post, self.poll = device, post, poll
        self.loaded, self.weights, self.sent = None, {}, {}
        disturb("start")

    def begin(self, job):
        self.job, self.negative = job, None
        disturb("begin")
        if self.loaded == job.get("revision"):
            return False
        self.release()
        return job.get("changed", False)

    def weight(self, name, packed):
        self.sent[name] = packed

    def load(self):
        if self.loaded is None:
            self.post("loading")
            turn = FAULTS / "loading"
            if self.job.get("alone"):
                # Raises if another process is loading.
                turn.mkdir()
            self.wait(self.job.get("load", 0.01), "load")
            if self.job.get("alone"):
                turn.rmdir()
            self.loaded, self.weights, self.sent = self.job.get("revision"), self.sent, {}
        return self.job.get("limit")

    def release(self):
        self.loaded, self.weights, self.sent = None, {}, {}

    def encode(self, prompts):
        for prompt in prompts:
            self.wait(self.job.get("encode", 0.001), "encode")
            self.post("text", prompt, f"{self.job['name']}: {prompt}")
        return True

    def wait(self, seconds, phase):
        self.poll()
        disturb(phase)
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            time.sleep(min(seconds, 0.01))
            self.poll()

    def generate(self, images, prompts, texts, inputs):
        if self.loaded is None:
            self.load()
        self.negative = texts.get(None, self.negative)
        if len(images) > self.job.get("fits", 1000):
            fail("memory")
        for step in range(3):
            self.wait(self.job.get("step", 0.002), "step")
            self.post("step", step, 1.0, None, [number for number, _, _ in images])
        for (number, _, seed), prompt in zip(images, prompts, strict=True):
            self.wait(0, "decode")
            if prompt in self.job.get("bad", ()):
                self.post("image", number, {"failed": "an ordered NaN"})
                continue
            data = content(self.job, number, seed, texts[prompt], self.negative, self.weights)
            self.post("image", number, lambda data=data: self.finish(data))

    def finish(self, data):
        """Called by the thread that sends."""
        disturb("send")
        return data
