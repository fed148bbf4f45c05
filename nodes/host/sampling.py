"""sana_core's samplers inside ComfyUI: guidance, previews, cancel and memory are the host's."""

from __future__ import annotations

from typing import TYPE_CHECKING

import comfy.model_management
import comfy.sample
import comfy.samplers
import comfy.utils
import latent_preview
from tqdm.auto import tqdm

from ...sana_core.latents import check_channels, noise_like
from ...sana_core.sampling import FlowSampler, find_sampler
from .model import WHOLE_TIMESTEPS, SanaModel

if TYPE_CHECKING:
    from comfy.model_patcher import ModelPatcher


def host_sampler(flow: FlowSampler) -> comfy.samplers.KSAMPLER:
    """Return `flow` as ComfyUI's SAMPLER; cancel is polled every step."""

    def sampler_function(model, x, sigmas, extra_args, callback, disable):
        options = dict(extra_args["model_options"])
        options["transformer_options"] = {**options["transformer_options"], WHOLE_TIMESTEPS: flow.whole_timesteps}
        extra_args = {**extra_args, "model_options": options}

        def denoise(x, sigma):
            comfy.model_management.throw_exception_if_processing_interrupted()
            return model(x, sigma.expand(len(x)), **extra_args)

        with tqdm(total=len(sigmas) - 1, disable=disable) as bar:

            def report(state):
                callback(state)
                bar.update()

            return flow.sample(denoise, x, sigmas, report)

    return comfy.samplers.KSAMPLER(sampler_function)


def sample(
    model: ModelPatcher, positive: list, negative: list, latent: dict, seed: int, steps: int, guidance: float, name: str
) -> dict:
    """Return a LATENT of pictures sampled from `latent`; picture k uses seed + k, or seed + its batch_index.

    Raises ValueError for a MODEL, a LATENT or embeddings that are not SANA's.
    """
    if not isinstance(model.model, SanaModel):
        raise ValueError(f"model: got {type(model.model).__name__}, expected a SANA model; use SANA Loader")
    samples = comfy.sample.fix_empty_latent_channels(model, latent["samples"], latent.get("downscale_ratio_spacial"))
    check_channels("latent_image", samples.shape)
    flow = find_sampler(name)
    sigmas = flow.sigmas(steps, model.get_model_object("model_sampling").shift)
    noise = noise_like(samples, seed, latent.get("batch_index"))
    if not samples.any():
        # SANA starts from the noise itself, although its first sigma is 0.9997 and not 1
        noise = noise / sigmas[0]
    out = {k: v for k, v in latent.items() if k != "downscale_ratio_spacial"}
    out["samples"] = comfy.sample.sample_custom(
        model,
        noise,
        guidance,
        host_sampler(flow),
        sigmas,
        positive,
        negative,
        samples,
        noise_mask=latent.get("noise_mask"),
        callback=latent_preview.prepare_callback(model, steps),
        disable_pbar=not comfy.utils.PROGRESS_BAR_ENABLED,
        seed=seed,
    )
    return out
