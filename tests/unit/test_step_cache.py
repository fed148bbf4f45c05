"""A step that leaves blocks out beside diffusers' FirstBlockCache: the same steps, the same latents."""

import pytest
import torch
from diffusers.hooks import FirstBlockCacheConfig, apply_first_block_cache
from diffusers.hooks._helpers import TransformerBlockMetadata, TransformerBlockRegistry
from diffusers.models.cache_utils import CacheMixin
from diffusers.models.transformers.sana_transformer import SanaTransformerBlock
from setup import ROOT
from tiny import random_prompt, tiny_transformer

from sana_core import generate
from sana_core.batch.best import Best, generate_picks
from sana_core.batch.pipeline import SamplingSettings, resolve_settings
from sana_core.batch.plan import Workload, batch_images
from sana_core.batch.png import describe_settings
from sana_core.errors import InputError
from sana_core.model.step_cache import StepCache
from sana_core.sampling import guidance
from sana_core.sampling.guidance import ControlledModel, PerturbedAttention, denoiser
from sana_core.sampling.samplers import SAMPLERS

CHECKPOINT = ROOT / "tests" / "models" / "sana-tiny"
COND, UNCOND = random_prompt(kept=9, seed=1), random_prompt(kept=9, seed=2)
STEPS = 16


def sample(transformer, cache=None, **options):
    noise = torch.randn(1, 32, 4, 6, generator=torch.Generator().manual_seed(0))
    flow = SAMPLERS["flow_euler"]
    model = denoiser(ControlledModel(transformer, cache=cache), COND, UNCOND, 4.5, flow.whole_timesteps, **options)
    return flow.sample(model, noise, flow.sigmas(STEPS, 3.0))


@pytest.mark.parametrize("share", [0.02, 0.05, 0.2])
def test_it_leaves_out_what_diffusers_leaves_out(share, monkeypatch):
    cache = StepCache(share)
    ours = sample(tiny_transformer("sana"), cache)
    TransformerBlockRegistry.register(
        SanaTransformerBlock,
        TransformerBlockMetadata(return_hidden_states_index=None, return_encoder_hidden_states_index=None),
    )
    theirs = tiny_transformer("sana")
    apply_first_block_cache(theirs, FirstBlockCacheConfig(threshold=share))
    ran = []
    theirs.transformer_blocks[-1].attn1.register_forward_hook(lambda *arguments: ran.append(1))

    def library(transformer, x, timestep, *rest):
        embeds, mask = torch.cat([UNCOND[0], COND[0]]), torch.cat([UNCOND[1], COND[1]])
        return theirs(x, embeds, timestep, encoder_attention_mask=mask).sample

    monkeypatch.setattr(guidance, "velocity", library)
    with CacheMixin.cache_context(theirs, "both prompts"):
        expected = sample(theirs)
    assert cache.steps == STEPS and STEPS - cache.reused == len(ran) and 0 < cache.reused < STEPS
    torch.testing.assert_close(ours, expected, atol=1e-4, rtol=0)


def test_without_a_share_every_step_is_computed():
    transformer = tiny_transformer("sana")
    cache = StepCache(0.0)
    torch.testing.assert_close(sample(transformer, cache), sample(transformer), atol=1e-5, rtol=0)
    assert cache.reused == 0


def test_another_batch_is_computed():
    """Guidance begins and ends in the middle of a sampling."""
    cache = StepCache(1.0)
    sample(tiny_transformer("sana"), cache, interval=(0.9, 0.3), perturbed=PerturbedAttention(1.0, frozenset({0})))
    assert cache.steps - cache.reused == 3


def test_an_image_is_the_same_alone_and_in_a_batch():
    settings = {"width": 128, "height": 128, "step_cache": 0.1}
    prompts = ["a red circle on a blue background", "a blue square on a white background"]
    together = generate(prompts, CHECKPOINT, devices=["cpu"], chunk=2, **settings)
    alone = [generate([prompt], CHECKPOINT, devices=["cpu"], **settings)[0] for prompt in prompts]
    plain = generate(prompts, CHECKPOINT, devices=["cpu"], width=128, height=128)
    assert torch.equal(together, torch.stack(alone))
    assert 0 < (together - plain).abs().mean() < 0.05


def test_what_it_cannot_go_with_is_refused():
    for other, field in (({"compiled": True}, "step_cache"), ({"step_cache": 2.0}, "step_cache")):
        with pytest.raises(InputError, match=field):
            resolve_settings(SamplingSettings(**{"step_cache": 0.1} | other), CHECKPOINT)
    with pytest.raises(InputError, match="step_cache.*split"):
        generate(["a"], CHECKPOINT, devices=["cpu", "cpu"], split=True, step_cache=0.1)
    with pytest.raises(InputError, match="step_cache.*after"):
        workload = Workload(["a"], batch_images(1, 2, 0))
        cached = resolve_settings(SamplingSettings(step_cache=0.1), CHECKPOINT)
        next(generate_picks(lambda workload, how: iter(()), workload, cached, Best(1, 2, CHECKPOINT, 2), None))


def test_images_of_it_are_described_and_others_as_before():
    plain = describe_settings(resolve_settings(SamplingSettings(), CHECKPOINT), CHECKPOINT)
    assert not plain.keys() & {"step_cache", "fp8"}
    inexact = resolve_settings(SamplingSettings(step_cache=0.1, fp8=True, dtype="bfloat16"), CHECKPOINT)
    described = describe_settings(inexact, CHECKPOINT)
    assert described["step_cache"] == 0.1 and described["fp8"] is True
