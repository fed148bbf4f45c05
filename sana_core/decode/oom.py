"""Retry a decode with half the budget when memory runs out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

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

T = TypeVar("T")


def without_first(rows: int, strips: Iterator[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Yield `strips` [1, 3, n, W] without the first `rows` rows, which may be more than the first strip has."""
    for pixels in strips:
        skipped = min(rows, pixels.shape[2])
        rows -= skipped
        if skipped < pixels.shape[2]:
            yield pixels[:, :, skipped:]
        # The next strip is allocated before the loop assigns it.
        del pixels


class OomRetry:
    """Retries a decode in strips with half the budget when memory runs out.

    The attention stages restart from the latents. The local stages resume at the row after the last finished one.
    `report` lists the retries as events.
    """

    def __init__(self, planner: Planner, plan: Plan, report: dict[str, Any]) -> None:
        self.planner, self.plan, self.report = planner, plan, report
        self.allocated: Workspace | None = None

    def workspace(self, like: torch.Tensor) -> Workspace:
        """Return the workspace of the plan. It is allocated once per plan."""
        if self.allocated is None:
            self.allocated = Workspace(like, self.plan.workspace)
        return self.allocated

    def shrink(self, failures: list[BaseException]) -> None:
        """Take half the budget after the one error in `failures`, and empty the list.

        Raises the error if memory was not the reason, or if there is no smaller plan. The error is in a list, because a
        frame that refers to its own error keeps all tensors alive until the garbage collector runs.
        """
        self.allocated = None
        if not is_out_of_memory(failures[0]):
            raise failures.pop()
        release_memory_of(failures[0])
        following = smaller(self.planner, self.plan)
        if following is None:
            raise failures.pop()
        failures.clear()
        self.plan = following
        self.report.update(following.report(self.planner.stages))
        self.report["events"].append(f"out of memory, continued with {self.report['plan']}")

    def run(self, work: Callable[[], T]) -> T:
        """Return the result of `work`. Each time that memory runs out, it starts again with half the budget."""
        while True:
            try:
                return work()
            except Exception as error:
                failures: list[BaseException] = [error]
            # Not in the handler, because the error would keep the tensors of the failed work alive.
            self.shrink(failures)

    def global_stage(self, decoder: Decoder, stages: Stages, latents: torch.Tensor, poll: Poll) -> RowPartition:
        def attempt() -> RowPartition:
            # Restart from the latents, because the blocks overwrite their map.
            x = project_latents(decoder, latents)
            for block, scale in global_blocks(decoder, stages):
                x = global_block(block, x, self.plan.attention_rows, scale, self.workspace(latents), poll)
            return x

        return self.run(attempt)

    def local_stage(
        self, decoder: Decoder, stages: Stages, boundary: RowPartition, poll: Poll, rows: range | None = None
    ) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield (first row, pixels [1, 3, n, W]), decoded from the map `boundary`.

        `rows` of the image, all by default. They end with the pixels of a row of the map.
        """
        rows = range(boundary.height * stages.stride) if rows is None else rows
        row = rows.start
        while row < rows.stop:
            failures: list[BaseException] = []
            first, repeated = divmod(row, stages.stride)
            span, strip = range(first, rows.stop // stages.stride), self.plan.strip
            try:
                # The workspace has no name here, so that it is freed after a failure, before the next one is allocated.
                strips = pixel_rows(decoder, stages, boundary, span, strip, self.workspace(boundary.parts[0]), poll)
                for pixels in without_first(repeated, strips):
                    yield row, pixels
                    row += pixels.shape[2]
                    del pixels
            except Exception as error:
                failures.append(error)
            if failures:
                self.shrink(failures)
