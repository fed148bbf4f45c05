"""Perturbed attention, the guidance interval and SANA-Sprint in the host, against diffusers and against each other."""

import pytest
import torch
from by_diffusers import drawn_by
from diffusers import FlowMatchEulerDiscreteScheduler, SanaPAGPipeline, SanaSprintPipeline, SCMScheduler
from loading import ksampler, through
from noise import noise_like

import sana_core
from sana_core import encode_prompts, load_text_encoder, load_transformer
from sana_core.checkpoints import inspect_checkpoint
from sana_core.checkpoints.generation import latent_scale
from sana_core.model.latents import noise_stream
from sana_core.sampling.guidance import PerturbedAttention, denoiser
from sana_core.sampling.samplers import flow_dpm_sigmas, sample_flow_dpmpp_2m, sample_scm
from sana_core.sampling.schedules import scm_sigmas, shift_sigmas

pytestmark = pytest.mark.usefixtures("one_load")

PROMPT = "a red circle on a blue background"


def pag_latent(checkpoint, scale, block, guidance=4.5, scheduler=None):
    pipeline = SanaPAGPipeline.from_pretrained(
        checkpoint, dtype=torch.float32, pag_applied_layers=f"transformer_blocks.{block}"
    )
    settings = {"num_inference_steps": 8, "guidance_scale": guidance, "pag_scale": scale}
    return drawn_by(pipeline, PROMPT, scheduler, **settings)


@pytest.mark.parametrize("scale, blocks, guidance", [(2.0, "3", 4.5), (1.0, "", 4.5), (3.0, "1", 1.0)])
def test_pag_equals_the_pipeline(host, base_graph, checkpoint, scale, blocks, guidance):
    graph = through(base_graph(guidance=guidance), "SanaNodesPAG", scale=scale, blocks=blocks)
    expected = pag_latent(checkpoint, scale, blocks or "2", guidance)
    torch.testing.assert_close(host.run(graph)["latent"]["samples"], expected, atol=1e-4, rtol=0)


def test_pag_in_core_s_sampler_equals_the_pipeline(host, base_graph, checkpoint):
    graph = ksampler(through(base_graph(), "SanaNodesPAG", scale=2.0, blocks="3"))
    expected = pag_latent(checkpoint, 2.0, 3, scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0))
    torch.testing.assert_close(host.run(graph)["latent"]["samples"], expected, atol=1e-4, rtol=0)


def test_pag_of_scale_0_and_a_whole_interval_change_nothing_and_a_second_pag_replaces_the_first(host, base_graph):
    plain = host.run(base_graph())["latent"]["samples"]
    for node, inputs in (
        ("SanaNodesPAG", {"scale": 0.0, "blocks": ""}),
        ("SanaNodesGuidanceInterval", {"start": 0.0, "end": 1.0}),
    ):
        assert torch.equal(host.run(through(base_graph(), node, **inputs))["latent"]["samples"], plain)
    once = through(base_graph(), "SanaNodesPAG", scale=2.0, blocks="3")
    first = through(base_graph(), "SanaNodesPAG", "first", scale=5.0, blocks="1")
    twice = through(first, "SanaNodesPAG", scale=2.0, blocks="3")
    assert torch.equal(host.run(once)["latent"]["samples"], host.run(twice)["latent"]["samples"])


@pytest.mark.parametrize(
    "order", [("SanaNodesPAG", "SanaNodesGuidanceInterval"), ("SanaNodesGuidanceInterval", "SanaNodesPAG")]
)
def test_pag_and_the_interval_in_any_order_equal_sana_core(host, base_graph, checkpoint, order):
    inputs = {"SanaNodesPAG": {"scale": 2.0, "blocks": "3"}, "SanaNodesGuidanceInterval": {"start": 0.2, "end": 0.7}}
    graph = base_graph()
    for name in order:
        through(graph, name, name, **inputs[name])
    encoder, transformer = load_text_encoder(checkpoint), load_transformer(checkpoint)
    cond, uncond = encode_prompts(encoder, [PROMPT]), encode_prompts(encoder, [""], instruction=False)
    ends = shift_sigmas(torch.tensor([0.8, 0.3], dtype=torch.float64), 3.0).tolist()
    model = denoiser(transformer, cond, uncond, 4.5, True, PerturbedAttention(2.0, frozenset({3})), tuple(ends))
    expected = sample_flow_dpmpp_2m(model, noise_like(torch.empty(1, 32, 4, 4), 3), flow_dpm_sigmas(8, 3.0))
    got = host.run(graph)["latent"]["samples"] * latent_scale(inspect_checkpoint(checkpoint))
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=0)


def test_outside_the_interval_the_negative_prompt_is_not_computed(host, base_graph):
    graph = through(base_graph(steps=10), "SanaNodesGuidanceInterval", start=0.3, end=0.6)
    graph["catch model"] = ("Catch", {"value": ["load", 0], "name": "model"})
    transformer = host.run(graph)["model"].model.diffusion_model
    rows = []
    hook = transformer.proj_out.register_forward_hook(lambda module, args, out: rows.append(len(args[0])))
    host.run({**graph, "sample": (graph["sample"][0], {**graph["sample"][1], "seed": 9})}, keep_cache=True)
    hook.remove()
    assert sorted(set(rows)) == [1, 2] and len(rows) == 10 and 2 <= rows.count(2) <= 4


def test_pag_respects_the_norms_of_sana_1_5(host, base_graph, variants):
    graph = base_graph()
    graph["load"][1]["model"] = "sana15"
    plain = host.run(graph)["latent"]["samples"]
    pag = host.run(through(graph, "SanaNodesPAG", scale=2.0, blocks="3"))["latent"]["samples"]
    encoder, transformer = load_text_encoder(variants / "sana15"), load_transformer(variants / "sana15")
    cond, uncond = encode_prompts(encoder, [PROMPT]), encode_prompts(encoder, [""], instruction=False)
    model = denoiser(transformer, cond, uncond, 4.5, True, PerturbedAttention(2.0, frozenset({3})))
    expected = sample_flow_dpmpp_2m(model, noise_like(torch.empty(1, 32, 4, 4), 3), flow_dpm_sigmas(8, 3.0))
    torch.testing.assert_close(pag * latent_scale(inspect_checkpoint(variants / "sana15")), expected, atol=1e-4, rtol=0)
    assert (pag - plain).abs().max() > 1e-3


def sprint_graph(base_graph, **inputs):
    graph = base_graph(batch_size=inputs.pop("batch_size", 1))
    graph["load"][1]["model"] = "sprint"
    links = {"model": ["load", 0], "positive": ["positive", 0], "latent_image": ["empty", 0]}
    return {**graph, "sample": ("SanaNodesSprint", {**links, "seed": 3, "steps": 2, "guidance": 4.5, **inputs})}


def sprint_latent(folder, steps=2, guidance=4.5):
    pipeline = SanaSprintPipeline.from_pretrained(folder, dtype=torch.float32)
    settings = {"num_inference_steps": steps, "intermediate_timesteps": 1.3 if steps == 2 else None}
    scheduler = SCMScheduler(prediction_type="trigflow", sigma_data=0.5)
    return drawn_by(pipeline, PROMPT, scheduler, guidance_scale=guidance, **settings)


@pytest.mark.parametrize("steps, guidance", [(1, 4.5), (2, 4.5), (2, 1.0), (4, 7.0)])
def test_sprint_equals_the_pipeline(host, base_graph, variants, steps, guidance):
    got = host.run(sprint_graph(base_graph, steps=steps, guidance=guidance))["latent"]["samples"]
    torch.testing.assert_close(got, sprint_latent(variants / "sprint", steps, guidance), atol=1e-4, rtol=1e-4)


def test_sprint_is_sampled_by_sana_sampler_and_by_core_s_nodes_too(host, base_graph, custom_graph, variants):
    expected = host.run(sprint_graph(base_graph))["latent"]["samples"]
    ours = base_graph(sampler="scm", steps=2)
    defaults = base_graph(steps=20, model_defaults=True)
    custom = custom_graph("scm", steps=2, guidance=1.0)
    for graph in (ours, defaults, custom):
        graph["load"][1]["model"] = "sprint"
        torch.testing.assert_close(host.run(graph)["latent"]["samples"], expected, atol=1e-5, rtol=1e-5)
    custom["flux"] = ("FluxGuidance", {"conditioning": ["positive", 0], "guidance": 7.0})
    custom["guider"][1]["positive"] = ["flux", 0]
    stronger = host.run(sprint_graph(base_graph, guidance=7.0))["latent"]["samples"]
    torch.testing.assert_close(host.run(custom)["latent"]["samples"], stronger, atol=1e-5, rtol=1e-5)
    assert host.run(ksampler(ours, sampler_name="lcm", cfg=1.0))["latent"]["samples"].isfinite().all()


def test_picture_k_of_a_sprint_batch_is_that_of_seed_plus_k(host, base_graph, variants):
    batch = host.run(sprint_graph(base_graph, batch_size=3))["latent"]["samples"]
    for k in range(3):
        alone = host.run(sprint_graph(base_graph, seed=3 + k))["latent"]["samples"]
        torch.testing.assert_close(batch[k : k + 1], alone, atol=1e-4, rtol=1e-4)


def test_sprint_draws_a_picture_anew(host, base_graph, variants):
    graph = sprint_graph(base_graph, steps=4, strength=0.5)
    graph["source"] = sprint_graph(base_graph, seed=8)["sample"]
    graph["sample"][1]["latent_image"] = ["source", 0]
    graph["catch source"] = ("Catch", {"value": ["source", 0], "name": "source"})
    got = host.run(graph)

    folder = variants / "sprint"
    scale = latent_scale(inspect_checkpoint(folder))
    cond = encode_prompts(load_text_encoder(folder), [PROMPT])
    noise, sigmas = noise_stream(torch.empty(1, 32, 4, 4), 3), scm_sigmas(4)[2:]
    x = sigmas[0] * next(noise) + (1 - sigmas[0]) * got["source"]["samples"] * scale
    expected = sample_scm(denoiser(load_transformer(folder), cond, cond, 4.5), x, sigmas, noise=noise)
    torch.testing.assert_close(got["latent"]["samples"] * scale, expected, atol=1e-4, rtol=0)

    graph["sample"][1]["strength"] = 0.0
    none = host.run(graph)
    assert torch.equal(none["latent"]["samples"], none["source"]["samples"])


@pytest.mark.parametrize("option", [{"negative_prompt": "red"}, {"guidance_interval": (0.1, 0.9)}, {"pag_scale": 1.0}])
def test_sprint_without_a_host_refuses_options_that_it_does_not_read(host, variants, option):
    with pytest.raises(ValueError, match="SANA-Sprint"):
        sana_core.generate(["a red circle"], variants / "sprint", width=64, height=64, **option)
