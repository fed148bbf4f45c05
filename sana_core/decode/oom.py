"""What a decode does when memory runs out: it goes on with half the budget, and says so in the end."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from ..runtime.accelerator import is_out_of_memory, release_memory_of
from ..runtime.cancellation import Poll
from .plan import Plan, Planner, smaller
from .row_partition import RowPartition
from .stages import Stages
from .strips import global_block, global_blocks, pixel_rows, project_latents
from .workspace import Workspace

if TYPE_CHECKING:
    from diffusers.models.autoencoders.autoencoder_dc import Decoder


class Report:
    """What a decode did, written into `entries`, the dict that the caller reads in the end."""

    def __init__(self, entries: dict[str, Any] | None, stages: Stages, plan: Plan) -> None:
        self.entries = {} if entries is None else entries
        self.stages = stages
        self.started = time.perf_counter()
        self.entries.update(events=[], strips=0)
        self.planned(plan)

    def planned(self, plan: Plan) -> None:
        self.entries.update(method=plan.method, plan=plan.words(self.stages), predicted_bytes=plan.peak_bytes)

    def add(self, event: str) -> None:
        self.entries["events"].append(event)

    def count_strip(self) -> None:
        self.entries["strips"] += 1

    def finish(self, peak_bytes: int | None) -> None:
        self.entries.update(seconds=time.perf_counter() - self.started, peak_bytes=peak_bytes)


def plan_after_oom(planner: Planner, plan: Plan, failures: list[BaseException]) -> Plan:
    """Return the plan in strips to go on with after the one error in `failures`, with half the budget; empty the list.

    Raises the error if it is another one than memory, or if there is no smaller plan. In a list, because a frame that
    holds what it raises is a cycle, and keeps all its tensors until the garbage collector comes.
    """
    if not is_out_of_memory(failures[0]):
        raise failures.pop()
    release_memory_of(failures[0])
    following = smaller(planner, plan)
    if following is None:
        raise failures.pop()
    failures.clear()
    return following


class OomRetry:
    """Strips that go on with half the budget when memory runs out: the attention stages from the latents on, the local
    ones from the last row."""

    def __init__(self, planner: Planner, plan: Plan, report: Report) -> None:
        self.planner, self.plan, self.report = planner, plan, report
        self.made: Workspace | None = None

    def workspace(self, like: torch.Tensor) -> Workspace:
        """Return the workspace of the plan, made once."""
        if self.made is None:
            self.made = Workspace(like, self.plan.workspace)
        return self.made

    def can_shrink(self) -> bool:
        return smaller(self.planner, self.plan) is not None

    def shrink(self, failures: list[BaseException]) -> None:
        """Take half the budget after the one error in `failures`, or raise it, as `plan_after_oom` does."""
        self.made = None
        self.plan = plan_after_oom(self.planner, self.plan, failures)
        self.report.planned(self.plan)
        self.report.add(f"out of memory, went on with {self.plan.words(self.planner.stages)}")

    def global_stage(self, decoder: Decoder, stages: Stages, latents: torch.Tensor, poll: Poll) -> RowPartition:
        while True:
            failures: list[BaseException] = []
            try:
                x = project_latents(decoder, latents)
                for block, scale in global_blocks(decoder, stages):
                    x = global_block(block, x, self.plan.attention_rows, scale, self.workspace(latents), poll)
                return x
            except Exception as error:
                failures.append(error)
            # outside the handler, which would keep the failed work's tensors alive; from the latents on, for a block
            # works in place
            self.shrink(failures)

    def local_stage(
        self, decoder: Decoder, stages: Stages, boundary: RowPartition, poll: Poll
    ) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield (first row, pixels [1, 3, n, W]) of the map `boundary`."""
        row = 0
        while row < boundary.height * stages.stride:
            failures: list[BaseException] = []
            first, repeated = divmod(row, stages.stride)
            strips: Iterator[torch.Tensor] | None = None
            while True:
                try:
                    if strips is None:
                        workspace, span = self.workspace(boundary.parts[0]), range(first, boundary.height)
                        strips = pixel_rows(decoder, stages, boundary, span, self.plan.strip, workspace, poll)
                        del workspace
                    pixels = next(strips, None)
                except Exception as error:
                    failures.append(error)
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
            self.shrink(failures)
