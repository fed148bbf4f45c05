"""The samplers of sana_core inside ComfyUI. ComfyUI provides guidance, previews, cancelling and memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

import comfy.model_management
import comfy.sample
import comfy.samplers
import comfy.utils
import latent_preview
import node_helpers
import torch
from comfy.model_sampling import ModelSamplingFlux
from tqdm.auto import tqdm

from ....sana_core.errors import InputError, without_folder
from ....sana_core.model.known_models import SPRINT, Defaults, model_defaults
from ....sana_core.model.latents import noise_stream
from ....sana_core.model.reference import reference_of
from ....sana_core.sampling.samplers import Sampler, check_distilled, find_sampler
from ....sana_core.sampling.schedules import check_steps, trim_schedule
from .guidance import SIGMA, require_sana
from .model import WHOLE_TIMESTEPS, check_flow

if TYPE_CHECKING:
    from comfy.model_patcher import ModelPatcher


# The key of a LATENT with the seed from which its batch_index counts.
SEED = "sana_seed"


@without_folder
class FlowSampler(comfy.samplers.KSAMPLER):
    """A sampler of sana_core as ComfyUI's SAMPLER."""

    def __init__(self, name: str) -> None:
        super().__init__(self.run)
        self.name = name
        self.sampler = find_sampler(name)
        # The noise that scm adds. None: it comes from the seed that ComfyUI passes.
        self.noise: Iterator[torch.Tensor] | None = None

    def sample(self, model_wrap, sigmas, extra_args, callback, noise, latent_image=None, denoise_mask=None, *args):
        # A guider can call this method with any MODEL.
        check_distilled(require_sana(model_wrap.inner_model).diffusion_model.config, sampler=self.name)
        self.extra_options = {}
        # The mask keeps the given frames of a video. Latents behind the mask are empty.
        free = latent_image if denoise_mask is None or latent_image is None else latent_image * denoise_mask
        if free is not None and not free.any():
            # SANA starts from the noise itself, although its first sigma is 0.9997 and not 1. Dividing and multiplying
            # by that sigma does not always give the same bits. Hosts before 0.30 may have no noise_scale.
            self.extra_options["start"] = noise * getattr(model_wrap.inner_model.model_sampling, "noise_scale", 1.0)
            noise = noise / sigmas[0]
        return super().sample(model_wrap, sigmas, extra_args, callback, noise, latent_image, denoise_mask, *args)

    def run(self, model, x, sigmas, extra_args, callback, disable, start=None):
        """Called by KSAMPLER, or by a SAMPLER of another pack that wraps this one. Polls cancel in every step.

        `x` is the latent with ComfyUI's noise. If `start` is set, it is used instead of `x`.
        """
        x = x if start is None else start
        options = {**extra_args["model_options"]["transformer_options"], WHOLE_TIMESTEPS: self.sampler.whole_timesteps}

        def denoise(x, sigma):
            comfy.model_management.throw_exception_if_processing_interrupted()
            step = {**extra_args["model_options"], "transformer_options": {**options, SIGMA: sigma}}
            return model(x, sigmas.new_full((len(x),), sigma), **{**extra_args, "model_options": step})

        reference = reference_of(require_sana(model.inner_model.inner_model).diffusion_model)
        # The image starts from the first noise of the seed, so scm continues with the second.
        noise = self.noise or islice(noise_stream(x, extra_args["seed"] or 0), 1, None)
        with tqdm(total=len(sigmas) - 1, disable=disable) as bar:

            def report(state):
                callback(state)
                bar.update()

            return self.sampler.sample(denoise, x, sigmas, report, **self.sampler.options(reference, noise))


def defaults_of(model: ModelPatcher, latent: dict) -> Defaults:
    """Return the authors' sampling defaults for a model and a LATENT."""
    # SANA Video Latent keeps the first image by a mask.
    begins_with_image = latent.get("noise_mask") is not None
    return model_defaults(require_sana(model.model).diffusion_model.config, begins_with_image)


def sampler_for(model: ModelPatcher, name: str, **settings: float) -> Sampler:
    """Return the sampler `name`. Raises InputError if it or one of `settings` does not fit the MODEL."""
    sampler = find_sampler(name)
    check_distilled(require_sana(model.model).diffusion_model.config, sampler=name, **settings)
    return sampler


def schedule(model: ModelPatcher, name: str, steps: int, denoise: float = 1.0) -> torch.Tensor:
    """Return the sigmas of the sampler `name` with the model's shift, none for `denoise` 0."""
    check_steps(steps)
    sampler, reference = sampler_for(model, name, steps=steps), reference_of(model.model.diffusion_model)
    shift = model_shift(model.get_model_object("model_sampling"))
    return trim_schedule(lambda count: sampler.sigmas(count, shift, reference), steps, denoise)


def model_shift(sampling) -> float:
    """Return the shift of a ModelSampling. Raises InputError unless it is flow matching."""
    check_flow(sampling)
    # The shift of ModelSamplingFlux is a logarithm.
    return math.exp(sampling.shift) if isinstance(sampling, ModelSamplingFlux) else sampling.shift


class Sampling(NamedTuple):
    """How images are sampled: the sampler's name, its sigmas, the guidance and the first seed.

    `sampler_for` has checked the sampler for the MODEL.
    """

    sampler: str
    sigmas: torch.Tensor
    guidance: float
    seed: int = 0


def sample(
    model: ModelPatcher,
    positive: list,
    negative: list,
    latent: dict,
    sampling: Sampling,
    callback: Callable | None = None,
) -> dict:
    """Return a LATENT of images sampled from `latent`; image k uses seed + k, or seed + its batch_index.

    With scm, `negative` is not used. `callback` replaces the node's progress and preview.
    """
    sampler = FlowSampler(sampling.sampler)
    guidance = sampler.sampler.effective_guidance(reference_of(model.model.diffusion_model), sampling.guidance)
    sampler_for(model, sampling.sampler, guidance=guidance)
    if sampling.sampler == SPRINT:
        # A SANA-Sprint model receives the guidance as an embedding.
        positive = negative = node_helpers.conditioning_set_values(positive, {"guidance": guidance})
        guidance = 1.0
    mask = latent.get("noise_mask")
    if mask is not None:
        check_mask(mask)
    samples = sana_latents(model, latent)
    sampler.noise = noise = noise_stream(samples, sampling.seed, latent.get("batch_index"))
    out = {k: v for k, v in latent.items() if k != "downscale_ratio_spacial"} | {SEED: sampling.seed}
    out["samples"] = comfy.sample.sample_custom(
        model,
        next(noise),
        guidance,
        sampler,
        sampling.sigmas,
        positive,
        negative,
        samples,
        noise_mask=latent.get("noise_mask"),
        callback=callback or preview_callback(model, samples, len(sampling.sigmas) - 1),
        disable_pbar=callback is not None or not comfy.utils.PROGRESS_BAR_ENABLED,
        seed=sampling.seed,
    )
    return out


def sana_latents(model: ModelPatcher, latent: dict) -> torch.Tensor:
    """Return the latents of a LATENT. Empty latents of other models get the channels and cells of `model`."""
    samples, ratio = latent["samples"], latent.get("downscale_ratio_spacial")
    # ComfyUI repeats the channels of empty latents, and adds frames. It can bring no other latents into this shape.
    if samples.is_nested or samples.ndim not in (4, 5) or 0 in samples.shape:
        model.model.check_latent("latent_image", samples.shape)
    if not samples.is_floating_point():
        got = str(samples.dtype).removeprefix("torch.")
        raise InputError(f"latent_image: got latents of {got}, expected floating-point numbers; use SANA Empty Latent")
    channels = model.model.latent_format.latent_channels
    if ratio is None and samples.shape[1] != channels and not samples.count_nonzero():
        raise InputError(
            f"latent_image: got an empty latent of {samples.shape[1]} channels without the size of its cells, expected "
            f"{channels} channels; use SANA Empty Latent"
        )
    samples = comfy.sample.fix_empty_latent_channels(model, samples, ratio)
    model.model.check_latent("latent_image", samples.shape)
    return samples


def check_mask(mask: torch.Tensor) -> None:
    """Raise InputError for a noise mask that ComfyUI cannot scale to the latents."""
    if not isinstance(mask, torch.Tensor) or mask.ndim < 2 or 0 in mask.shape or not mask.is_floating_point():
        got = f"{mask.dtype} {list(mask.shape)}" if isinstance(mask, torch.Tensor) else type(mask).__name__
        raise InputError(
            f"latent_image: got a noise mask of {got.removeprefix('torch.')}, expected floating-point numbers [masks, "
            "height, width]; use Set Latent Noise Mask"
        )


def preview_callback(model: ModelPatcher, latents: torch.Tensor, steps: int) -> Callable:
    """Return the callback for each of `steps`. It shows ComfyUI's progress and preview.

    The preview is not larger than the image. The server would enlarge it to 512 pixels, and the canvas shows its size.
    """
    previewer = latent_preview.get_previewer(model.load_device, model.model.latent_format)
    cell = model.model.latent_format.spacial_downscale_ratio
    bar, side = comfy.utils.ProgressBar(steps), cell * max(latents.shape[-2:])

    def callback(step, x0, x, total):
        preview = previewer and previewer.decode_latent_to_preview_image("JPEG", x0)
        bar.update_absolute(step + 1, total, preview and (*preview[:2], min(side, preview[2])))

    return callback
