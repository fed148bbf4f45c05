"""The samplers on the bundled checkpoint: they go to the same picture."""

import pytest
import torch

import sana_core
from sana_core.sampling.guidance import denoiser
from sana_core.sampling.samplers import SAMPLERS, sample_flow_dpmpp_2m
from sana_core.sampling.schedules import flow_dpm_sigmas

PROMPTS = ["a red circle on a blue background", "a green square on a white background"]


@pytest.fixture(scope="module")
def model(checkpoint):
    """With the exact timesteps, so that nothing but the solver differs."""
    encoder, transformer = sana_core.load_text_encoder(checkpoint), sana_core.load_transformer(checkpoint)
    cond = sana_core.encode_prompts(encoder, PROMPTS)
    uncond = sana_core.encode_prompts(encoder, [""], instruction=False)
    with torch.no_grad():
        yield denoiser(transformer, cond, uncond, 2.0)


@pytest.fixture(scope="module")
def noise():
    return torch.randn(2, 32, 4, 4, generator=torch.Generator().manual_seed(0))


@torch.no_grad()
def test_euler_and_every_order_of_dpm_converge_to_each_other(model, noise):
    many = sample_flow_dpmpp_2m(model, noise, flow_dpm_sigmas(120, 3.0))
    for name, flow in SAMPLERS.items():
        if name not in ("scm", "flow_dmd"):
            few, more = (
                (flow.sample(model, noise, flow_dpm_sigmas(steps, 3.0)) - many).abs().mean() for steps in (8, 48)
            )
            assert more < 0.35 * few and more < 0.08, name
