"""From prompts to pictures in one call, without a host."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from .batch.best import Drawing, draw_best, find_best, place_scorer
from .batch.draw import Settings, resolve_settings
from .batch.local import draw_local
from .batch.plan import Workload, batch_pictures
from .batch.progress import no_words
from .errors import InputError

if TYPE_CHECKING:
    from .cluster.connection import ClusterSettings


def generate(
    prompts: list[str],
    checkpoint: str | Path,
    seed: int = 0,
    count: int = 1,
    devices: Sequence[str | torch.device] | None = None,
    cluster: str | ClusterSettings | None = None,
    split: bool = False,
    **settings: Any,
) -> torch.Tensor:
    """Return images [len(prompts) * count, 3, height, width] in [-1, 1], float32 on the CPU.

    Picture i of each prompt uses seed + i, so it is the same alone and in a batch. All of `devices` draw; None stands
    for every accelerator of this machine, or its CPU. `cluster` is the address of a Ray cluster, "auto", or a
    `sana_core.cluster.connection.ClusterSettings`: its GPUs draw instead. With `split` all of them draw each picture
    together, the pictures one after another.

    With `best`, `of` and `scorer`, the folder of a CLIP, `of` drafts of each prompt are made and only the `best` that
    fit it best returned, the better first; `report`, a dict, then gets "picked": prompt, seed, score and rank of each.
    With `after` the drafts are scored every so many steps, and the worse half goes, until two for each that is kept are
    left, which are drawn to the end.

    `settings` are these, `chunk`, the pictures that a device draws at once, without it as many as suit it, `say`, which
    is told what a cluster waits for, and the fields of `sana_core.batch.draw.Settings`: width, height, steps, guidance,
    negative_prompt, sampler, pag_scale, pag_blocks, guidance_interval, dtype, compiled, reference, loras,
    step_cache. Raises InputError for a size that is not a multiple of 32, numbers out of range and a LoRA that does not
    fit, CheckpointError, MissingFileError or ReadError for a file that cannot be loaded. A prompt of more than 300
    tokens is cut, with a warning in the log.
    """
    chunk, say = settings.pop("chunk", None), settings.pop("say", no_words)
    report = settings.pop("report", {})
    choice = {name: settings.pop(name, None) for name in ("of", "scorer", "after")}
    best = find_best(settings.pop("best", None), **choice, count=count)
    how = Settings(**settings)
    if best:
        how = resolve_settings(how, checkpoint)
        if best.after is not None and split:
            raise InputError(
                f"after: got {best.after} with split, where devices share one image; leave one of them out"
            )
    workload = Workload(prompts, batch_pictures(len(prompts), best.of if best else count, seed), chunk)
    drawing = find_drawing(checkpoint, devices, cluster, split, say)
    if best:
        # before the drafts take their memory
        scorer = place_scorer(best, how, devices)
        picks = sorted(
            draw_best(drawing, workload, how, best, scorer), key=lambda pick: (pick.picture.prompt, pick.rank)
        )
        report["picked"] = [pick.describe(named=True) for pick in picks]
        return torch.stack([pick.pixels for pick in picks])
    # made when the first picture is there, for mistakes in sizes are found before
    out = torch.empty(0)
    for picture, pixels in drawing(workload, how):
        if not len(out):
            out = torch.empty(len(workload.pictures), *pixels.shape)
        out[picture.number] = pixels
    return out


def find_drawing(
    checkpoint: str | Path,
    devices: Sequence[str | torch.device] | None,
    cluster: str | ClusterSettings | None,
    split: bool,
    say: Callable[[str], None],
    report: dict[str, Any] | None = None,
) -> Drawing:
    """Return what draws a workload: the cluster's GPUs or `devices`, with `split` all of them each picture. Without
    `split`, `report` gets what each has drawn."""
    if cluster is not None:
        from .cluster.batch import draw_on_cluster
        from .cluster.connection import ClusterSettings
        from .cluster.split import draw_split_on_cluster

        where = ClusterSettings(cluster) if isinstance(cluster, str) else cluster
        if split:
            return lambda workload, how: draw_split_on_cluster(workload, checkpoint, how, where, say=say)
        return lambda workload, how: draw_on_cluster(workload, checkpoint, how, where, report=report, say=say)
    if split:
        from .split.draw import draw_split

        return lambda workload, how: draw_split(workload, checkpoint, how, devices)
    return lambda workload, how: draw_local(workload, checkpoint, how, devices, report=report)
