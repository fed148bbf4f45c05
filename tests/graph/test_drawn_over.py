"""Sampling over an image's latents against ComfyUI's own, bit for bit."""

import pytest
import torch


def model(x, sigma):
    """Any function of both."""
    return torch.tanh(x) * (1 - sigma)


@pytest.mark.parametrize("masked", [False, True])
def test_it_is_what_comfyui_does(host, masked):
    from comfy.model_base import BaseModel
    from comfy.model_sampling import CONST
    from comfy.samplers import KSamplerX0Inpaint

    from sana_core.sampling.samplers import InitImage, start_from_image

    class Inner:
        """The attributes of a flow-matching MODEL that inpainting uses."""

        model_sampling = CONST()
        scale_latent_inpaint = BaseModel.scale_latent_inpaint

    def guided(x, sigma, model_options, seed):
        return model(x, sigma)

    guided.inner_model = Inner()
    random = torch.Generator().manual_seed(1)
    latents, noise, x = (torch.randn(1, 32, 4, 6, generator=random) for _ in range(3))
    mask = torch.rand(1, 32, 4, 6, generator=random) if masked else None
    theirs = KSamplerX0Inpaint(guided, None)
    theirs.latent_image, theirs.noise = latents, noise
    first, later = torch.tensor(0.9997), torch.tensor([0.6])
    ours, start = start_from_image(InitImage(latents, mask), model, noise, first)
    assert torch.equal(start, CONST().noise_scaling(first, noise, latents))
    assert torch.equal(ours(x, later[0]), theirs(x, later, mask, {}, 0))
