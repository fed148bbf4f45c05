"""Repeats the step of a sampling from a recording, where the host limits the speed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import torch

from ..errors import first_line
from ..runtime.text import get_logger

if TYPE_CHECKING:
    from ..runtime.step_recorder import Recorder, Recording

logger = get_logger(__name__)

# Calls that build kernels and allocate workspaces. The last one is measured.
EAGER_CALLS = 2


class StepGraph:
    """Computes the steps of one sampling, in which only the inputs change.

    `counts` receives how many times a step was "recorded" and "replayed", and how many recordings "failed".
    """

    def __init__(self, recorder: Recorder, counts: Counter[str]) -> None:
        self.recorder, self.counts, self.refused = recorder, counts, False
        self.key: object = None
        # Number of calls with this key.
        self.calls = 0
        self.recording: Recording | None = None
        self.inputs: list[torch.Tensor] = []

    def __call__(self, key: object, work: Callable[..., torch.Tensor], *inputs: torch.Tensor) -> torch.Tensor:
        """Return `work(*inputs)`, which is valid until the next call. Equal keys mean the same `work`."""
        if key != self.key:
            # There is one recording at a time, because it keeps the memory of a whole step.
            self.key, self.calls, self.recording = key, 0, None
        self.calls += 1
        if self.recording is None and self.calls > EAGER_CALLS and not self.refused and self.recorder.waits_for_host():
            self.record(work, inputs)
        if self.recording is None:
            return self.recorder.run(partial(work, *inputs))
        for recorded, new in zip(self.inputs, inputs, strict=True):
            recorded.copy_(new)
        self.recording.replay()
        self.counts["replayed"] += 1
        return self.recording.out

    def record(self, work: Callable[..., torch.Tensor], inputs: tuple[torch.Tensor, ...]) -> None:
        try:
            self.inputs = [part.clone() for part in inputs]
            self.recording = self.recorder.record(partial(work, *self.inputs))
            self.counts["recorded"] += self.recording is not None
        except Exception as error:
            # If the device has failed, it fails again when it computes the step.
            self.refused = True
            self.counts["failed"] += 1
            if self.counts["failed"] == 1:
                logger.warning("%s: steps are computed without a CUDA graph (%s)", inputs[0].device, first_line(error))
