"""What a decode does when memory runs out: it goes on with half the budget, and says so in the end."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from ..accelerator import is_out_of_memory, release_memory_of
from ..polling import Poll
from .plan import Plan, Planner, smaller
from .row_partition import RowPartition
from .stages import Stages
from .strips import global_block, global_blocks, pixel_rows, project_latents

if TYPE_CHECKING:
    from diffusers.models.autoencoders.autoencoder_dc import Decoder


class Report:
    """What `report` says in the end."""

    def __init__(self, report: dict[str, Any] | None, stages: Stages, plan: Plan) -> None:
        self.report = {} if report is None else report
        self.stages = stages
        self.started = time.perf_counter()
        self.report.update(events=[], strips=0)
        self.planned(plan)

    def planned(self, plan: Plan) -> None:
        self.report.update(method=plan.method, plan=plan.words(self.stages), predicted_bytes=plan.peak_bytes)

    def add(self, event: str) -> None:
        self.report["events"].append(event)

    def finish(self, peak_bytes: int) -> None:
        self.report.update(seconds=time.perf_counter() - self.started, peak_bytes=peak_bytes)


def plan_after_oom(planner: Planner, plan: Plan, error: BaseException) -> Plan:
    """Return the plan in strips to go on with after `error`: with half the budget.

    Raises `error` if it is another one than memory, or if there is no smaller plan.
    """
    if not is_out_of_memory(error):
        raise error
    release_memory_of(error)
    following = smaller(planner, plan)
    if following is None:
        raise error
    return following


class OomRetry:
    """Strips that go on with half the budget when memory runs out: from the last whole block, or the last row."""

    def __init__(self, planner: Planner, plan: Plan, notes: Report) -> None:
        self.planner, self.plan, self.notes = planner, plan, notes

    def can_shrink(self) -> bool:
        return smaller(self.planner, self.plan) is not None

    def shrink(self, error: BaseException) -> None:
        """Take half the budget. Raises as `plan_after_oom` does."""
        self.plan = plan_after_oom(self.planner, self.plan, error)
        self.notes.planned(self.plan)
        self.notes.add(f"out of memory, went on with {self.plan.words(self.planner.stages)}")

    def global_stage(self, decoder: Decoder, stages: Stages, latents: torch.Tensor, poll: Poll) -> RowPartition:
        x = project_latents(decoder, latents)
        for block, scale in global_blocks(decoder, stages):
            following = None
            while following is None:
                failure: BaseException | None = None
                try:
                    following = global_block(block, x, self.plan.attention_rows, scale, poll)
                except Exception as error:
                    failure = error
                # outside the handler, which would keep the failed work's tensors alive
                if failure is not None:
                    self.shrink(failure)
            x = following
        return x

    def local_stage(
        self, decoder: Decoder, stages: Stages, boundary: RowPartition, poll: Poll
    ) -> Iterator[tuple[int, torch.Tensor]]:
        height, row = boundary.height, 0
        while row < height * stages.stride:
            failure: BaseException | None = None
            first, repeated = divmod(row, stages.stride)
            strips = pixel_rows(decoder, stages, boundary, first, height, self.plan.rows, self.plan.columns, poll)
            while True:
                try:
                    pixels = next(strips, None)
                except Exception as error:
                    failure = error
                    break
                if pixels is None:
                    return
                # after a failure the first strip begins with rows that are out already
                pixels = pixels[:, :, repeated:]
                repeated = 0
                yield row, pixels
                row += pixels.shape[2]
                del pixels
            del strips
            self.shrink(failure)
