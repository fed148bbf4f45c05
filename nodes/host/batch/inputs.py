"""The inputs of SANA Batch Sampler, checked before anything is loaded."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from ....sana_core.batch.plan import ImageSpec, batch_images
from ....sana_core.errors import InputError
from ....sana_core.model.latents import LARGEST_BATCH
from ..loading.vae import check_image_vae
from ..sampling.guidance import require_images
from ..sampling.sampler import sana_latents

if TYPE_CHECKING:
    import comfy.sd
    from comfy.model_patcher import ModelPatcher


class BatchInputs(NamedTuple):
    """The inputs of the node. `latent` is of one image, and `vae` may be None."""

    model: ModelPatcher
    positive: list
    negative: list
    latent: dict
    count: int
    seed: int
    guidance: float
    sampler: str
    sigmas: torch.Tensor
    chunk: int
    vae: comfy.sd.VAE | None

    @property
    def prompts(self) -> int:
        """The number of prompts in `positive`. Raises InputError if its entries have different numbers."""
        # An entry with one row applies to every prompt.
        counts = {len(embeds) for embeds, _ in self.positive} - {1}
        if len(counts) > 1:
            raise InputError(
                f"positive: got entries of {sorted(counts)} prompts, expected one number; use one prompt list"
            )
        return counts.pop() if counts else 1

    @property
    def first_index(self) -> int:
        """The place of the latent in the batch that it was taken from. Seeds count from it, as in SANA Sampler."""
        return int((self.latent.get("batch_index") or [0])[0])

    @property
    def images(self) -> list[ImageSpec]:
        return batch_images(self.prompts, self.count, (self.seed + self.first_index) % 2**64)


def check_batch(batch: BatchInputs) -> BatchInputs:
    """Return `batch` with latents of the model's shape. Raises InputError for SANA-Video, a latent that is not of SANA
    or has several images, another VAE, and too many images."""
    require_images(batch.model.model)
    samples = sana_latents(batch.model, batch.latent)
    batch_size = len(samples)
    if batch_size != 1:
        raise InputError(f"latent_image: got a batch of {batch_size}, expected 1; set count instead of batch_size")
    if batch.vae is not None:
        check_image_vae(batch.vae)
    count, prompts = batch.count, batch.prompts
    if prompts * count > LARGEST_BATCH:
        raise InputError(f"count: got {count} of {prompts} prompts, expected at most {LARGEST_BATCH} images in all")
    # The latents have SANA's cells now.
    entries = {name: value for name, value in batch.latent.items() if name != "downscale_ratio_spacial"}
    return batch._replace(latent={**entries, "samples": samples})
