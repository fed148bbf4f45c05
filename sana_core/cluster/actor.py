"""What runs on the machines of a cluster: a process with a GPU, which keeps what it has loaded.

This module itself is sent, whatever code a machine has, so it imports nothing of the package before the driver knows
which one that is. What is sent and comes back is pickled once, errors too: the driver of Ray Client,
a process of the head, looks into neither and needs no torch.
"""

from __future__ import annotations

import hashlib
import logging
import sys
import time
from importlib import import_module
from importlib.metadata import version
from logging.handlers import BufferingHandler
from pathlib import Path
from typing import Any

import ray
from ray.cloudpickle import dumps, loads

PACKAGE = "sana_core"
CODE = f"code of {PACKAGE}"
# whose arithmetic decides an image
LIBRARIES = ("torch", "diffusers", "transformers")
# of the histogram of seconds for an image
BOUNDARIES = [0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0]

ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])


def describe_code(folder: Path) -> dict[str, str]:
    """Return the digest of the package in `folder` and the versions of the libraries that decide an image."""
    digest = hashlib.sha256()
    for file in sorted(folder.rglob("*.py")):
        digest.update(file.relative_to(folder).as_posix().encode() + b"\0" + file.read_bytes() + b"\0")
    return {CODE: digest.hexdigest()[:12], **{name: version(name) for name in LIBRARIES}}


class Actor:
    """Its counts are among Ray's own metrics, which each machine shows in Prometheus' form."""

    def __init__(self) -> None:
        from ray.util import metrics

        self.worker: Any = None
        self.warnings = BufferingHandler(1000)
        self.warnings.setLevel(logging.WARNING)
        logging.getLogger(PACKAGE).addHandler(self.warnings)
        self.images = metrics.Counter("sana_pictures", description="images generated")
        self.failures = metrics.Counter("sana_failures", description="chunks that ended with an error")
        self.seconds = metrics.Histogram(
            "sana_seconds_per_picture", description="seconds for an image", boundaries=BOUNDARIES
        )

    def locate(self) -> tuple[str, str, dict[str, str]]:
        """Return the id of this machine, Ray's ids of the GPUs of this actor, and the code that it runs."""
        context = ray.get_runtime_context()
        code = describe_code(Path(import_module(PACKAGE).__file__ or "").parent)
        return context.get_node_id(), ",".join(context.get_accelerator_ids().get("GPU", [])), code

    @ray.method(concurrency_group="status")
    def answer(self) -> None:
        """Answer, while another call goes on too: the process lives."""

    def call(self, method: str, arguments: bytes, *weights: bytes) -> bytes:
        """Call `prepare`, `generate`, or a method of the worker. Returns (result, failure kind, message, warnings)."""
        result, failure, reason, caught = None, "", "", None
        try:
            function = getattr(self, method, None) or getattr(self.worker, method)
            result = function(*loads(arguments), *map(loads, weights))
        except Exception as error:
            (failure, reason), caught = describe_failure(error), error
        if failure == "memory":
            # Not inside the handler, which would keep the tensors of the failed work alive.
            import_module(f"{PACKAGE}.runtime.accelerator").release_memory_of(caught)
        warned = [record.getMessage() for record in self.warnings.buffer]
        self.warnings.flush()
        return dumps((result, failure, reason, warned))

    def prepare(self, job: dict[str, object], threads: int, names: list[str], *weights: bytes) -> int:
        """Load what the job wants, unless that is done, and return what `Worker.begin` does."""
        if self.worker is None:
            worker = import_module(f"{PACKAGE}.cluster.worker").Worker(job)
            worker.load(threads, dict(zip(names, weights, strict=True)))
            self.worker = worker
        return self.worker.begin(job)

    def generate(self, chunk: list[object], prompts: list[object]) -> tuple[float, list[object]]:
        """Return the seconds that a chunk took, and its images."""
        started = time.monotonic()
        try:
            images = self.worker.generate(chunk, prompts)
        except BaseException:
            self.failures.inc()
            raise
        seconds = time.monotonic() - started
        self.images.inc(len(chunk))
        self.seconds.observe(seconds / len(chunk))
        return seconds, images


def describe_failure(error: Exception) -> tuple[str, str]:
    """Return the kind of a failure, and its message on one line.

    The kinds are "memory", "driver" for a broken GPU, "machine" for a missing file or library, and "error" for all
    else.
    """
    errors = import_module(f"{PACKAGE}.errors")
    if isinstance(error, errors.SanaError):
        return "machine", str(error)
    if isinstance(error, ImportError):
        # torch itself may be missing, and the module below needs it.
        return "machine", errors.first_line(error)
    accelerator = import_module(f"{PACKAGE}.runtime.accelerator")
    kind = "machine" if isinstance(error, OSError) else "error"
    if accelerator.is_out_of_memory(error):
        kind = "memory"
    elif accelerator.is_driver_error(error):
        kind = "driver"
    return kind, errors.first_line(error)


def actor_class() -> Any:
    """Return what Ray starts actors of. One thread of them answers, another works."""
    decorate: Any = ray.remote
    return decorate(concurrency_groups={"status": 1})(Actor)
