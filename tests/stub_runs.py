"""Runs of the engine with real worker processes whose body is tests/stub_engine, so that they start at once.

Everything else is real: processes, pipes, signals, the loop and its limits, which may be scaled.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from stub_engine.sana_core.engine.content import content

from sana_core.batch.plan import FailedImage, ImageSpec, batch_images, split_into_chunks
from sana_core.engine import process
from sana_core.engine.loop import Run
from sana_core.engine.process import Processes, ProcessWorker
from sana_core.runtime.limits import LIMITS, Limits

STUB = Path(__file__).parent / "stub_engine" / "sana_core"
CPU = torch.device("cpu")


def scaled(factor: float) -> Limits:
    """Return the shipped limits, all shorter by one factor."""
    return Limits(**{name: value if name == "patience" else factor * value for name, value in LIMITS._asdict().items()})


class Stub:
    """Worker processes without torch, and the folder with their faults."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.processes, self.ordered = folder, Processes(), 0

    def order(self, phase: str, kind: str) -> Path:
        """Order one fault: the first process that reaches the phase takes it. The file vanishes when it is taken."""
        self.ordered += 1
        file = self.folder / f"{phase}-{kind}-{self.ordered}"
        file.touch()
        return file

    def pending(self) -> list[str]:
        """Return the faults that no process has taken."""
        return sorted(file.name for file in self.folder.iterdir())

    def withdraw(self) -> None:
        """Take all pending faults back."""
        for name in self.pending():
            (self.folder / name).unlink(missing_ok=True)

    @property
    def workers(self) -> list[ProcessWorker]:
        return self.processes.workers


@contextmanager
def stub_workers() -> Iterator[Stub]:
    """A context in which new worker processes run the stub. No process remains after it."""
    folder = Path(tempfile.mkdtemp(prefix="stub"))
    stub = Stub(folder)
    environment = mock.patch.dict(os.environ, {"STUB_FAULTS": str(folder), "PYTHONDONTWRITEBYTECODE": "1"})
    with mock.patch.object(process, "PACKAGE", STUB), environment:
        try:
            yield stub
        finally:
            stub.processes.end()
            shutil.rmtree(folder)


class Work:
    """A batch for stub workers, and what its images must be.

    `job` may have these names: name, revision, size (bytes of an image), fits (images at once until memory runs out),
    limit (what `load` says), bad (prompts whose images are NaN), and the seconds of load, encode and step.
    """

    def __init__(
        self,
        job: Mapping[str, Any],
        prompts: Sequence[str] = ("a", "b", "c"),
        count: int = 4,
        chunk: int = 2,
        weights: Mapping[str, bytes] | None = None,
    ) -> None:
        self.job = {"name": "job", "revision": "1", "changed": weights is not None, **job}
        self.prompts, self.weights, self.chunk = list(prompts), dict(weights or {}), chunk
        self.images = batch_images(len(prompts), count, 5)

    def run(self, workers: Sequence[Any], limits: Limits = LIMITS, **options: Any) -> Run:
        chunks = split_into_chunks(self.images, self.chunk)
        changed = self.weights.copy
        return Run(self.job, chunks, workers, self.prompts, {}, changed=changed, limits=limits, **options)

    def expected(self, image: ImageSpec) -> bytes:
        name, prompt = self.job["name"], self.prompts[image.prompt]
        texts = f"{name}: {prompt}", f"{name}: None"
        return content(self.job, image.number, image.seed, *texts, self.weights)

    def check(self, results: Sequence[tuple[ImageSpec, Any]], complete: bool = True) -> list[FailedImage]:
        """Raise AssertionError for images that are lost, doubled or wrong. Returns the images that have failed."""
        counts = Counter(image.number for image, _ in results)
        assert not [number for number, count in counts.items() if count > 1], f"doubled: {counts}"
        if complete:
            missing = {image.number for image in self.images} - counts.keys()
            assert not missing, f"lost: {missing}"
        failed = [result for _, result in results if isinstance(result, FailedImage)]
        wrong = [
            image.number
            for image, result in results
            if not isinstance(result, FailedImage) and result != self.expected(image)
        ]
        assert not wrong, f"wrong: {wrong}"
        return failed
