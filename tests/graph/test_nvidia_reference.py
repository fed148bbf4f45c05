"""Images of the host equal NVIDIA's arithmetic, written down in tests/nvidia.py, with diffusers' schedulers.

Tests with diffusers' arithmetic are in test_parity.py and test_controlnet.py.
"""

import diffusers
import layouts
import nvidia
import pytest
import torch
from loading import controlled, random_controlnet
from noise import noise_like

import sana_core
from sana_core.model.known_models import DC_AE_SCALE

pytestmark = pytest.mark.usefixtures("one_load")

PROMPT, NEGATIVE = "a red circle on a blue background", "a green square"
STEPS, GUIDANCE, SHIFT, HEADS = 8, 4.5, 3.0, 5
SCHEDULERS = {
    "flow_dpmpp_2m": diffusers.DPMSolverMultistepScheduler(
        use_flow_sigmas=True, flow_shift=SHIFT, prediction_type="flow_prediction"
    ),
    "flow_euler": diffusers.FlowMatchEulerDiscreteScheduler(shift=SHIFT),
}


@pytest.fixture(scope="module")
def tensors(checkpoint):
    """The bundled transformer and a random ControlNet of its width, by NVIDIA's names, as one file has them."""
    transformer = sana_core.load_transformer(checkpoint)
    controlnet = random_controlnet()
    for layer in (controlnet.input_block, *controlnet.controlnet_blocks):
        torch.nn.init.normal_(layer.bias, std=0.1)
    theirs = layouts.nvidia(transformer, unused=False)
    configs = layouts.with_config(transformer), layouts.with_config(controlnet)
    # both share the embeddings of latents, time and prompts
    return theirs, {**layouts.nvidia(controlnet, unused=False), **theirs}, configs


@pytest.fixture(scope="module")
def files(host, tensors):
    """model.safetensors and control.safetensors in NVIDIA's layout, where the loaders look."""
    transformer, controlnet, configs = tensors
    paths = [host.models / folder / "nvidia.safetensors" for folder in ("diffusion_models", "controlnet")]
    for path, item, config in zip(paths, (transformer, controlnet), configs, strict=True):
        layouts.save(item, path, config=config)
    yield
    for path in paths:
        path.unlink()


@pytest.fixture
def graph(base_graph, files):
    """A function of overrides: the base graph with NVIDIA's file, and a negative prompt of another length."""

    def build(**overrides):
        graph = base_graph(steps=STEPS, text=PROMPT, **overrides)
        graph["model"] = ("SanaNodesModelLoader", {"model_name": "nvidia.safetensors"})
        graph["sample"][1]["model"] = ["model", 0]
        graph["load"][1]["reference"] = "nvidia"
        graph["negative"][1]["text"] = NEGATIVE
        return graph

    return build


@pytest.fixture(scope="module")
def expected(checkpoint, tensors):
    """A function of the sampler, the control latent and the seed: the LATENT that NVIDIA's arithmetic gives."""
    encoder = sana_core.load_text_encoder(checkpoint, reference="nvidia")
    cond, mask = sana_core.encode_prompts(encoder, [PROMPT])
    uncond, current = sana_core.encode_prompts(encoder, [NEGATIVE], instruction=False)
    assert mask.sum() != current.sum()

    @torch.no_grad()
    def run(sampler, control=None, seed=3, scale=DC_AE_SCALE, guidance=GUIDANCE):
        scheduler = SCHEDULERS[sampler]
        scheduler.set_timesteps(STEPS)
        x = noise_like(torch.empty(1, 32, 4, 4), seed)
        for t in scheduler.timesteps:
            out = nvidia.forward(
                tensors[1],
                x.repeat(2, 1, 1, 1),
                t.expand(2),
                torch.cat([uncond, cond]),
                mask.repeat(2, 1),
                control=None if control is None else (control * scale).repeat(2, 1, 1, 1),
                pe=(4, 1.0),
                heads=HEADS,
            )
            without, with_prompt = out.chunk(2)
            velocity = without + guidance * (with_prompt - without)
            # FlowEuler guides if cfg_scale > 1, model_wrapper of DPM_Solver unless guidance_scale == 1.0
            if guidance == 1 or (guidance < 1 and sampler == "flow_euler"):
                velocity = with_prompt
            x = scheduler.step(velocity, t, x, return_dict=False)[0]
        return x / scale

    return run


@pytest.mark.parametrize("sampler", SCHEDULERS)
def test_sana_sampler(host, graph, expected, sampler):
    got = host.run(graph(sampler=sampler))["latent"]["samples"]
    torch.testing.assert_close(got, expected(sampler), atol=2e-4, rtol=0)


@pytest.mark.parametrize("guidance", [0.0, 0.5, 0.9, 1.0, 1.1])
@pytest.mark.parametrize("sampler", SCHEDULERS)
def test_guidance_of_1_and_below_is_nvidias(host, graph, expected, sampler, guidance):
    got = host.run(graph(sampler=sampler, guidance=guidance))["latent"]["samples"]
    torch.testing.assert_close(got, expected(sampler, guidance=guidance), atol=2e-4, rtol=0)


def test_an_advanced_input_chooses_the_other(host, graph, base_graph, expected, checkpoint):
    chosen = base_graph(steps=STEPS, text=PROMPT)
    chosen["load"][1]["reference"] = "nvidia"
    chosen["negative"][1]["text"] = NEGATIVE
    got = host.run(chosen)["latent"]["samples"]
    scale = sana_core.load_autoencoder(checkpoint).config.scaling_factor
    torch.testing.assert_close(got, expected("flow_dpmpp_2m", scale=scale), atol=2e-4, rtol=0)
    other = graph()
    other["model"][1]["reference"] = other["load"][1]["reference"] = "diffusers"
    own_graph = base_graph(steps=STEPS, text=PROMPT)
    own_graph["negative"][1]["text"] = NEGATIVE
    expected_value = host.run(own_graph)["latent"]["samples"]
    assert (expected_value - got).abs().max() > 1e-3
    torch.testing.assert_close(host.run(other)["latent"]["samples"] * DC_AE_SCALE, expected_value * scale)


@pytest.mark.parametrize("sampler", SCHEDULERS)
def test_the_controlnet(host, graph, expected, checkpoint, sampler):
    edges = torch.rand(1, 128, 128, 3, generator=torch.Generator().manual_seed(6))
    drawn = controlled(graph(sampler=sampler), "nvidia.safetensors", edges, "auto")
    with torch.no_grad():
        latent = sana_core.load_autoencoder(checkpoint).encode(edges.movedim(-1, 1) * 2 - 1).latent
    expected_value = expected(sampler, latent)
    assert (expected_value - expected(sampler)).abs().max() > 0.05
    torch.testing.assert_close(host.run(drawn)["latent"]["samples"], expected_value, atol=2e-4, rtol=0)
