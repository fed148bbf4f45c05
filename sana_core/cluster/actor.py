"""The Ray actor: a process with a GPU on a machine of a cluster. It keeps its models loaded between runs.

Ray sends this module itself to the machines. The module imports the rest of the package only inside functions, because
the code of a machine may differ, and the driver checks this first. Arguments, results and errors are pickled here. So
the process of Ray Client on the head does not unpickle them, and needs no torch.
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
# Their arithmetic affects the images.
LIBRARIES = ("torch", "diffusers", "transformers")
# Of the histogram of seconds per image.
BOUNDARIES = [0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0]

ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])


def describe_code(folder: Path) -> dict[str, str]:
    """Return the digest of the package in `folder` and the versions of the LIBRARIES."""
    digest = hashlib.sha256()
    for file in sorted(folder.rglob("*.py")):
        digest.update(file.relative_to(folder).as_posix().encode() + b"\0" + file.read_bytes() + b"\0")
    return {CODE: digest.hexdigest()[:12], **{name: version(name) for name in LIBRARIES}}


class Actor:
    """A worker, with counts for Ray's metrics, which Prometheus can read on each machine."""

    def __init__(self) -> None:
        from ray.util import metrics

        self.worker: Any = None
        self.warnings = BufferingHandler(1000)
        self.warnings.setLevel(logging.WARNING)
        logging.getLogger(PACKAGE).addHandler(self.warnings)
        self.images = metrics.Counter("sana_images", description="images generated")
        self.failures = metrics.Counter("sana_failures", description="chunks that ended with an error")
        self.seconds = metrics.Histogram(
            "sana_seconds_per_image", description="seconds for an image", boundaries=BOUNDARIES
        )

    def locate(self) -> tuple[str, str, dict[str, str]]:
        """Return the id of this machine, Ray's ids of the GPUs of this actor, and the code that it runs."""
        context = ray.get_runtime_context()
        code = describe_code(Path(import_module(PACKAGE).__file__ or "").parent)
        return context.get_node_id(), ",".join(context.get_accelerator_ids().get("GPU", [])), code

    @ray.method(concurrency_group="status")
    def answer(self) -> None:
        """Return, also while another call runs, to show that the process is alive."""

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
        """Load the models of the job if they are not loaded yet. Returns the result of `Worker.begin`."""
        if self.worker is None:
            worker = import_module(f"{PACKAGE}.cluster.worker").Worker(job)
            worker.load(threads, dict(zip(names, weights, strict=True)))
            self.worker = worker
        return self.worker.begin(job)

    def generate(self, chunk: list[object], prompts: list[object]) -> tuple[float, list[object]]:
        """Generate a chunk. Returns the seconds that it took, and its images."""
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

    The kinds are "memory", "driver" for a broken GPU, "machine" for a missing file or library, and "error" for
    everything else.
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
    """Return the class that Ray starts. An actor has one thread for `answer` and one for all other calls."""
    decorate: Any = ray.remote
    return decorate(concurrency_groups={"status": 1})(Actor)
