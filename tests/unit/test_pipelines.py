"""Whole samplings against diffusers' pipelines: the same tiny random weights, embeddings and noise."""

from types import SimpleNamespace

import pytest
import torch
from diffusers import (
    DPMSolverMultistepScheduler,
    FlowMatchEulerDiscreteScheduler,
    FlowMatchHeunDiscreteScheduler,
    SanaControlNetModel,
    SanaPAGPipeline,
    SanaPipeline,
    SanaSprintImg2ImgPipeline,
    SanaSprintPipeline,
    SCMScheduler,
)
from tiny import random_prompt, tiny_transformer

from sana_core.checkpoints import load_autoencoder
from sana_core.model.controlnet import Control
from sana_core.model.latents import noise_stream
from sana_core.sampling.guidance import ControlledModel, PerturbedAttention, denoiser, perturbed_attention
from sana_core.sampling.samplers import SAMPLERS, flow_dpm_sigmas, sample_flow_dpmpp_2m, sample_scm
from sana_core.sampling.schedules import last_steps, scm_sigmas

COND, UNCOND = random_prompt(kept=9, seed=1), random_prompt(kept=2, seed=2)
SIZES = [(128, 128), (96, 192)]


def dpm(shift=3.0):
    return DPMSolverMultistepScheduler(flow_shift=shift, use_flow_sigmas=True, prediction_type="flow_prediction")


def scm():
    return SCMScheduler(prediction_type="trigflow", sigma_data=0.5)


def pipeline_of(pipeline_class, transformer, scheduler, vae=None, **options):
    parts = {"tokenizer": None, "text_encoder": None, "vae": vae, "transformer": transformer, "scheduler": scheduler}
    pipeline = pipeline_class(**parts, **options)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def run(pipeline, size, generator=None, negative=True, **options):
    texts = {"prompt_embeds": COND[0], "prompt_attention_mask": COND[1]}
    if negative:
        texts |= {"negative_prompt_embeds": UNCOND[0], "negative_prompt_attention_mask": UNCOND[1]}
        texts["negative_prompt"] = None
    return pipeline(
        **texts,
        height=size[0],
        width=size[1],
        use_resolution_binning=False,
        output_type="latent",
        generator=generator,
        **options,
    ).images


def start(seed, size):
    return noise_stream(torch.empty(1, 32, size[0] // 32, size[1] // 32), seed)


@pytest.mark.parametrize("seed, steps, guidance", [(0, 20, 4.5), (1, 8, 7.0), (2, 14, 1.0), (3, 28, 2.0)])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("variant", ["sana", "sana-1.5", "sana-4k"])
def test_sana_pipeline(variant, size, seed, steps, guidance):
    transformer = tiny_transformer(variant)
    model = denoiser(transformer, COND, UNCOND, guidance, whole_timesteps=True)
    noise = next(start(seed, size))
    for scheduler, name in (
        (dpm(), "flow_dpmpp_2m"),
        (FlowMatchEulerDiscreteScheduler(shift=3.0), "flow_euler"),
        (FlowMatchHeunDiscreteScheduler(shift=3.0), "flow_heun"),
    ):
        flow = SAMPLERS[name]
        model = denoiser(transformer, COND, UNCOND, guidance, flow.whole_timesteps)
        ours = flow.sample(model, noise, flow.sigmas(steps, 3.0))
        pipeline = pipeline_of(SanaPipeline, transformer, scheduler)
        options = {"num_inference_steps": steps, "guidance_scale": guidance}
        torch.testing.assert_close(ours, run(pipeline, size, latents=noise, **options), atol=1e-4, rtol=0)


def test_guidance_below_1_is_guided_too():
    """ComfyUI leaves out the negative prompt at 1 alone (comfy/samplers.py, sampling_function)."""
    transformer, x, sigma = tiny_transformer(), next(start(0, SIZES[0])), 0.7
    positive, negative = (denoiser(transformer, prompt, UNCOND, 1.0, True)(x, sigma) for prompt in (COND, UNCOND))
    for guidance, expected in ((0.0, negative), (0.5, (positive + negative) / 2)):
        got = denoiser(transformer, COND, UNCOND, guidance, True)(x, sigma)
        torch.testing.assert_close(got, expected, atol=1e-5, rtol=0)


def test_a_steered_step_is_the_librarys():
    transformer, x, sigma = tiny_transformer(), next(start(0, SIZES[0])), 0.7
    torch.manual_seed(1)
    controlnet = SanaControlNetModel.from_config({**transformer.config, "num_layers": 2}).requires_grad_(False)
    for layer in (controlnet.input_block, *controlnet.controlnet_blocks):
        torch.nn.init.normal_(layer.weight, std=0.2)
    latents, (embeds, mask) = torch.randn_like(x), COND
    inputs = {"encoder_hidden_states": embeds, "encoder_attention_mask": mask, "timestep": torch.tensor([1000 * sigma])}
    residuals = controlnet(x, controlnet_cond=latents, **inputs).controlnet_block_samples
    velocity = transformer(x, controlnet_block_samples=residuals, **inputs).sample
    got = denoiser(ControlledModel(transformer, Control(controlnet, latents)), COND, UNCOND, 1.0)(x, sigma)
    torch.testing.assert_close(got, x - sigma * velocity, atol=2e-6, rtol=0)


@pytest.mark.parametrize("seed, steps, guidance, scale", [(0, 20, 4.5, 3.0), (1, 8, 1.0, 2.0), (2, 14, 7.0, 1.0)])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("blocks", [(1,), (0, 2)])
def test_sana_pag_pipeline(size, seed, steps, guidance, scale, blocks):
    transformer = tiny_transformer()
    noise = next(start(seed, size))
    layers = [f"transformer_blocks.{block}" for block in blocks]
    pipeline = pipeline_of(SanaPAGPipeline, transformer, dpm(), pag_applied_layers=layers)
    options = {"num_inference_steps": steps, "guidance_scale": guidance, "pag_scale": scale}
    theirs = run(pipeline, size, latents=noise, **options)
    perturbed = PerturbedAttention(scale, frozenset(blocks))
    model = denoiser(transformer, COND, UNCOND, guidance, True, perturbed)
    ours = sample_flow_dpmpp_2m(model, noise, flow_dpm_sigmas(steps, 3.0))
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=0)
    plain = denoiser(transformer, COND, UNCOND, guidance, True)
    assert (ours - sample_flow_dpmpp_2m(plain, noise, flow_dpm_sigmas(steps, 3.0))).abs().max() > 1e-3


@pytest.mark.parametrize("seed, steps, guidance", [(0, 1, 4.5), (1, 2, 4.5), (2, 2, 1.0), (3, 4, 7.0), (4, 8, 3.0)])
@pytest.mark.parametrize("size", SIZES)
def test_sana_sprint_pipeline(size, seed, steps, guidance):
    transformer = tiny_transformer("sprint")
    pipeline = pipeline_of(SanaSprintPipeline, transformer, scm())
    options = {"num_inference_steps": steps, "guidance_scale": guidance}
    options["intermediate_timesteps"] = 1.3 if steps == 2 else None
    theirs = run(pipeline, size, torch.Generator().manual_seed(seed), negative=False, **options)
    noise = start(seed, size)
    model = denoiser(transformer, COND, UNCOND, guidance)
    ours = sample_scm(model, next(noise), scm_sigmas(steps), noise=noise)
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=0)


@pytest.mark.parametrize("steps, strength", [(2, 0.6), (2, 0.5), (4, 0.6), (4, 1.0), (8, 0.3)])
@pytest.mark.parametrize("size", SIZES)
def test_sana_sprint_img2img_pipeline(checkpoint, size, steps, strength):
    transformer, vae = tiny_transformer("sprint"), load_autoencoder(checkpoint)
    pipeline = pipeline_of(SanaSprintImg2ImgPipeline, transformer, scm(), vae=vae)
    image = torch.rand(1, 3, *size, generator=torch.Generator().manual_seed(9)) * 2 - 1
    options = {"num_inference_steps": steps, "guidance_scale": 4.5, "strength": strength, "image": image}
    options["intermediate_timesteps"] = 1.3 if steps == 2 else None
    theirs = run(pipeline, size, torch.Generator().manual_seed(6), negative=False, **options)
    noise, sigmas = start(6, size), last_steps(scm_sigmas(steps), strength)
    picture = vae.encode(image).latent * vae.config.scaling_factor
    x = sigmas[0] * next(noise) + (1 - sigmas[0]) * picture
    ours = sample_scm(denoiser(transformer, COND, UNCOND, 4.5), x, sigmas, noise=noise)
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=0)


def test_prompts_of_a_batch_are_those_drawn_alone():
    transformer = tiny_transformer()
    noise = torch.randn(2, 32, 4, 4)
    pair = random_prompt(2, seed=5)
    pair[1][0, 4:] = 0
    sigmas = flow_dpm_sigmas(6, 3.0)
    together = sample_flow_dpmpp_2m(denoiser(transformer, pair, UNCOND, 4.5), noise, sigmas)
    for k in range(2):
        one = (pair[0][k : k + 1], pair[1][k : k + 1])
        alone = sample_flow_dpmpp_2m(denoiser(transformer, one, UNCOND, 4.5), noise[k : k + 1], sigmas)
        torch.testing.assert_close(together[k : k + 1], alone, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    "interval, sigmas, guidance",
    [
        ((0.8, 0.3), (0.79, 0.5, 0.31), 4.5),
        ((0.8, 0.3), (0.9, 0.2), 1.0),
        # its ends belong to it, for schedules have a step begin there; eighths are the same in any precision
        ((0.875, 0.25), (0.875, 0.25), 4.5),
        ((1.0, 0.5), (1.0,), 4.5),
        ((1.0, 0.5), (0.4,), 1.0),
        ((0.5, 0.0), (0.6,), 1.0),
    ],
)
def test_guidance_outside_its_interval_is_off(interval, sigmas, guidance):
    transformer, x = tiny_transformer(), torch.randn(1, 32, 4, 4)
    limited = denoiser(transformer, COND, UNCOND, 4.5, interval=interval)
    same = denoiser(transformer, COND, UNCOND, guidance)
    for sigma in sigmas:
        torch.testing.assert_close(limited(x, sigma), same(x, sigma), atol=1e-6, rtol=0)


@torch.no_grad()
def test_timesteps_are_whole_only_where_the_sampler_wants_them():
    """In diffusers, DPM-Solver has whole timesteps and Euler has fractional ones."""
    transformer = tiny_transformer()
    x, sigma = torch.randn(1, 32, 4, 4), 0.5009
    for options, timestep in (({}, 500.9), ({"whole_timesteps": False}, 500.9), ({"whole_timesteps": True}, 500.0)):
        model = denoiser(transformer, COND, UNCOND, 1.0, **options)
        v = transformer(x, COND[0], torch.tensor([timestep]), encoder_attention_mask=COND[1]).sample
        torch.testing.assert_close(model(x, sigma), x - sigma * v, atol=1e-5, rtol=0)


@pytest.mark.parametrize("scale, blocks", [(0, "0"), (100, "2"), (3.5, " 0, 2 ")])
def test_perturbed_attention_takes_the_blocks_that_the_model_has(scale, blocks):
    config = tiny_transformer().config
    assert perturbed_attention(config, scale, blocks) == (scale, {int(block) for block in blocks.split(",")})


@pytest.mark.parametrize("layers, block", [(20, 8), (28, 14), (60, 8), (5, 2), (7, 3), (9, 4)])
def test_without_blocks_those_of_nvidia_are_perturbed(layers, block):
    """pag_applied_layers in NVIDIA's app/sana_pipeline.py and configurations."""
    config = SimpleNamespace(num_layers=layers, guidance_embeds=False)
    assert perturbed_attention(config, 3.0, " ") == (3.0, {block})


@pytest.mark.parametrize("blocks", ["3", "-1", "1.5", "0,,1", "0 1", "00001"])
def test_blocks_that_the_model_does_not_have_are_named(blocks):
    with pytest.raises(ValueError, match="^blocks: got .*expected numbers from 0 to 2, like 8 or 7, 8$"):
        perturbed_attention(tiny_transformer().config, 3.0, blocks)


@pytest.mark.parametrize("scale", [-0.1, 100.1, float("nan")])
def test_a_scale_of_perturbed_attention_out_of_range_is_named(scale):
    with pytest.raises(ValueError, match="^scale: got .*from 0 to 100"):
        perturbed_attention(tiny_transformer().config, scale, "1")


def test_perturbed_attention_of_sprint_is_refused():
    with pytest.raises(ValueError, match="which has its guidance built in; leave perturbed attention out"):
        perturbed_attention(tiny_transformer("sprint").config, 3.0, "1")


@pytest.mark.slow
def test_the_compiled_forward_draws_the_same():
    # two blocks: a compilation takes seconds a block
    transformer = tiny_transformer(layers=2)
    x, sigma = torch.randn(1, 32, 4, 4), 0.7
    eager, compiled = (
        denoiser(ControlledModel(transformer, compiled=choice), COND, UNCOND, 4.5) for choice in (False, True)
    )
    torch.testing.assert_close(compiled(x, sigma), eager(x, sigma), atol=1e-4, rtol=0)
