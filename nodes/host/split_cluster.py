"""SANA Split Image on the cluster that the server's operator has configured: each call of the MODEL goes there.

Whatever samples on this machine, its GPUs compute: latents go to them in each step, prompts once, and the rows of the
velocity come back.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import closing
from queue import SimpleQueue
from typing import TYPE_CHECKING

import torch

from ...sana_core.batch.pipeline import SamplingSettings
from ...sana_core.cluster.split import Call, answer_calls
from ...sana_core.cluster.worker import Job
from ...sana_core.errors import InputError
from .cluster import fingerprints, plain_file, require_cluster, run_for, session_on
from .model import image_pixels
from .patches import SPLIT, unshared
from .report import status_under_running_node

if TYPE_CHECKING:
    from comfy.model_patcher import ModelPatcher

    from .prompts import PromptBatch


def share_on_cluster(executor, noise: torch.Tensor, *args, **kwargs):
    """What ComfyUI calls around a sampling: let workers of the cluster load the MODEL, and answer its calls.

    Raises InputError, before anything is loaded, for what other machines cannot compute; ClusterError where no cluster
    or no two GPUs of it can be reached, and what a machine said where none is left.
    """
    guider = executor.class_obj
    model = guider.model_patcher
    check_patches(model, guider.conds)
    job, session, status = make_job(model, noise), session_on(require_cluster()), status_under_running_node()
    calls: SimpleQueue[Call] = SimpleQueue()
    answering = run_for(model, session, job, lambda run: answer_calls(run, job, calls), "split", status)
    with closing(answering) as answers:
        status(f"{int(next(answers))} GPUs of the cluster share the image")
        guider.model_options["transformer_options"][SPLIT] = {model.load_device: ClusterGroup(calls, answers)}
        return executor(noise, *args, **kwargs)


def check_patches(model: ModelPatcher, conds: dict) -> None:
    """Raise InputError for patches that replace parts of the one model, which other devices cannot have."""
    if found := ", ".join(sorted(unshared(model, conds))):
        raise InputError(
            f"model: got a patch that devices cannot share an image with ({found}); remove it, or SANA Split Image"
        )


def make_job(model: ModelPatcher, noise: torch.Tensor) -> Job:
    """Return what the machines are told. Raises InputError for weights that they cannot load."""
    path, resolution, reference = plain_file(model)
    dtype = str(model.model.get_dtype_inference()).removeprefix("torch.")
    settings = SamplingSettings(*image_pixels(noise), dtype=dtype, reference=reference)
    return Job(settings, fingerprints([path]), path, resolution=resolution)


class ClusterGroup:
    """Who computes the calls that this machine's device gets: the cluster's workers."""

    def __init__(self, calls: SimpleQueue[Call], answers: Generator[torch.Tensor, None, None]) -> None:
        self.calls, self.answers = calls, answers
        # of prompts, which live as long as the sampling
        self.numbers: dict[tuple[int, ...], int] = {}

    def velocity(
        self,
        transformer: torch.nn.Module,
        x: torch.Tensor,
        timesteps: torch.Tensor,
        prompt: PromptBatch,
        guidance: torch.Tensor | None,
        control: Sequence[torch.Tensor | None],
    ) -> torch.Tensor:
        """Return the velocity at `x` as `forward.velocity` does; cancel is polled."""
        key = (*map(id, prompt.prompts), len(x))
        prompts = None
        if key not in self.numbers:
            embeds, mask, perturbation = prompt.inputs(x)
            images, blocks = perturbation or (None, frozenset())
            flags = None if images is None else images.cpu()
            prompts = embeds.cpu(), mask.cpu(), flags, blocks, len(prompt.prompts)
        number = self.numbers.setdefault(key, len(self.numbers))
        inputs = tuple(None if one is None else one.cpu() for one in (x, timesteps, guidance, *control))
        self.calls.put(Call(inputs, number, prompts))
        return next(self.answers).to(x.device)
