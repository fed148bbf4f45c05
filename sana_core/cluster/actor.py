"""The Ray actor: a process with a GPU on a machine of a cluster. It keeps its models loaded between runs.

Ray sends this module itself to the machines. The module imports the rest of the package only inside functions, because
the code of a machine may differ, and the driver checks this first. Arguments and events are bytes for Ray, so that the
process of Ray Client on the head needs no torch.
"""

from __future__ import annotations

import hashlib
import sys
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

import ray
from msgpack import packb, unpackb

PACKAGE = "sana_core"
CODE = f"code of {PACKAGE}"
# Their arithmetic affects the images.
LIBRARIES = ("torch", "diffusers", "transformers")
# The key of an array's dtype, shape and bytes in a message. No dict that is sent has bytes as a key.
ARRAY = b"array"
# Of the histogram of seconds per image.
BOUNDARIES = [0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0]

ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])


def describe_code(folder: Path) -> dict[str, str]:
    """Return the digest of the package in `folder` and the versions of the LIBRARIES."""
    digest = hashlib.sha256()
    for file in sorted(folder.rglob("*.py")):
        digest.update(file.relative_to(folder).as_posix().encode() + b"\0" + file.read_bytes() + b"\0")
    return {CODE: digest.hexdigest()[:12], **{name: version(name) for name in LIBRARIES}}


def to_bytes(value: object) -> bytes:
    """Return numbers, texts, bytes, tuples, dicts and numpy arrays as a message. Lists arrive as tuples."""

    def pack_array(array: Any) -> dict[bytes, tuple]:
        return {ARRAY: (array.dtype.str, array.shape, array.reshape(-1).view("uint8").data)}

    message: bytes = packb(value, default=pack_array, unicode_errors="surrogatepass")
    return message


def from_bytes(message: bytes) -> Any:
    """Return the value of a message. Its arrays can be written."""
    from numpy import frombuffer

    def unpack_array(value: dict) -> Any:
        if ARRAY not in value:
            return value
        dtype, shape, content = value[ARRAY]
        return frombuffer(content, dtype).reshape(shape).copy()

    options: Any = {"use_list": False, "strict_map_key": False, "unicode_errors": "surrogatepass"}
    return unpackb(message, object_hook=unpack_array, **options)


class Actor:
    """A Body of engine/body.py, with counts for Ray's metrics, which Prometheus can read on each machine."""

    def __init__(self) -> None:
        from ray.util import metrics

        # The TaskRunner of engine/child.py.
        self.runner: Any = None
        self.threads = 1
        # Of the present call: its task, its events, how many events it had, and its phase.
        self.task = self.count = 0
        self.events: list[tuple] = []
        self.phase = "alive"
        # Runs up to this number are cancelled.
        self.cancelled = 0
        self.images = metrics.Counter("sana_images", description="images generated")
        self.failures = metrics.Counter("sana_failures", description="tasks that ended with an error")
        self.seconds = metrics.Histogram(
            "sana_seconds_per_image", description="seconds for an image", boundaries=BOUNDARIES
        )

    def locate(self) -> tuple[str, str, dict[str, str]]:
        """Return the id of this machine, Ray's ids of the GPUs of this actor, and the code that it runs."""
        context = ray.get_runtime_context()
        code = describe_code(Path(import_module(PACKAGE).__file__ or "").parent)
        return context.get_node_id(), ",".join(context.get_accelerator_ids().get("GPU", [])), code

    def open(self, threads: int) -> None:
        """Compute with `threads` threads of the CPU. The actor reserves no CPU, so Ray has limited it to one thread."""
        self.threads = threads

    @ray.method(concurrency_group="status")
    def answer(self) -> tuple[int, int, str]:
        """Return the task of the present call or 0, how many events it had, and the event of its phase."""
        return self.task, self.count, self.phase

    @ray.method(concurrency_group="status")
    def cancel(self, run: int) -> None:
        """End the work for this run and for earlier ones within a step."""
        self.cancelled = run

    def post(self, name: str, *values: Any) -> None:
        """Keep an event until the call ends. Signs of life are counted, and `answer` returns the latest one."""
        self.count += 1
        if name == "alive":
            return
        self.phase = name if name in ("begun", "loading") else "alive"
        if name == "image":
            number, content = values
            values = number, content() if callable(content) else content
            self.images.inc()
        if name not in ("begun", "loading", "step"):
            self.events.append((name, *values))

    def make_runner(self) -> Any:
        body, tasks, accelerator = (
            import_module(f"{PACKAGE}.{name}") for name in ("engine.body", "engine.child", "runtime.accelerator")
        )
        body.prepare_process(self.threads, self.post)

        def describe(error: BaseException) -> tuple[str, str, str]:
            values: tuple[str, str, str] = body.describe_failure(error)
            body.release_memory_of(error, runner.body and runner.body.device)
            return values

        runner = tasks.TaskRunner(
            lambda *functions: body.Body(accelerator.current_accelerator() or "cpu", *functions),
            self.post,
            lambda run: run <= self.cancelled,
            describe,
        )
        return runner

    def call(self, name: str, run: int, task: int, arguments: bytes, *weights: bytes) -> bytes:
        """Call a method of Body. Returns its events, as in engine/schedule.py."""
        self.task, self.count, self.phase, self.events = task, 0, "alive", []
        try:
            if self.runner is None:
                # The import may take long.
                self.post("begun")
                self.runner = self.make_runner()
            self.runner.do(name, run, task, *from_bytes(arguments), *map(from_bytes, weights))
        except Exception as error:
            # A library is missing or broken.
            text = import_module(f"{PACKAGE}.errors").first_line(error)
            self.post("failed", task, "refused", text, type(error).__name__)
        for event, *values in self.events:
            if event == "failed":
                self.failures.inc()
            elif event == "done" and name == "generate":
                # Of `done`: the task, its seconds and its result.
                self.seconds.observe(values[1] / max(1, sum(other[0] == "image" for other in self.events)))
        events, self.events, self.task = self.events, [], 0
        return to_bytes(events)


def actor_class() -> Any:
    """Return the class that Ray starts. An actor has one thread for its status and one for all other calls."""
    decorate: Any = ray.remote
    return decorate(concurrency_groups={"status": 1})(Actor)
