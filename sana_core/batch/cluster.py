"""Batches on every GPU of a Ray cluster."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import closing
from pathlib import Path
from typing import Any

import torch

from ..polling import Poll, no_poll
from .draw import Settings, resolve_settings
from .fingerprint import fingerprint
from .hold import Hold
from .plan import Picture, Workload
from .progress import Say, no_words
from .ray_actor import Crew
from .ray_run import ClusterSettings, draw_with
from .session import run_alone
from .windows import check_prompts
from .worker import Job


def draw_on_cluster(
    workload: Workload,
    checkpoint: str | Path,
    settings: Settings,
    cluster: ClusterSettings,
    described: dict[str, Any] | None = None,
    report: dict[str, Any] | None = None,
    shared: Hold | None = None,
    say: Say = no_words,
) -> Generator[tuple[Picture, Any], None, None]:
    """Yield each picture of `workload` as it finishes, drawn on the GPUs of a Ray cluster.

    They come as tensors [3, H, W] in [-1, 1]; with the settings `described`, as the PNG files of `encode_png`, made
    where they are drawn. Into a folder `shared` by all machines, which this run holds, they are written there, by the
    names of `file_name`, and come as the digests of the files; a machine that cannot write there is left out.
    `checkpoint` is the path on every machine. `report` gets "drawn", the pictures of each worker, and
    "ready", the workers that draw now. `say` is told what the run waits for.

    Raises InputError for prompts that no encoding can carry, settings out of range and a missing ray, CheckpointError,
    MissingFileError or ReadError for a checkpoint that cannot be loaded, ClusterError where no cluster or no GPU of it
    can be reached, and what a machine said where none is left.
    """
    check_prompts(workload.prompts)
    path = str(Path(checkpoint).absolute())
    settings = resolve_settings(settings, path)
    weights = {each: fingerprint(each) for each in (path, *(lora for lora, _ in settings.loras))}
    job = Job(settings, weights, path, path, path, described=described)
    if shared is not None:
        job = job._replace(shared=(str(shared.folder.absolute()), shared.run.name))
    found = {} if report is None else report

    def work(ray: Any, crew: Crew, poll: Poll) -> Generator[tuple[Picture, Any], None, None]:
        return draw_with(ray, crew, job, workload, cluster, found, poll, say)

    if not workload.left:
        return
    with closing(run_alone(cluster, work, no_poll, say)) as drawn:
        for picture, result in drawn:
            yield picture, torch.from_numpy(result.copy()) if described is None else result
