"""Our objects in the host's samplers, and our samplers on the host's objects, against diffusers."""

import pytest
import torch
from by_diffusers import drawn_by
from diffusers import FlowMatchEulerDiscreteScheduler, FlowMatchHeunDiscreteScheduler, SanaPipeline
from loading import ksampler, through

from sana_core.model.reference import NVIDIA
from sana_core.model.text import instruction_text

pytestmark = pytest.mark.usefixtures("one_load")

PROMPT = "a red circle on a blue background"


def pipeline_picture(checkpoint, scheduler=None, steps=8, output_type="pt", **options):
    pipeline = SanaPipeline.from_pretrained(checkpoint, dtype=torch.float32)
    image = drawn_by(pipeline, PROMPT, scheduler, num_inference_steps=steps, output_type=output_type, **options)
    return image if output_type == "latent" else image.movedim(1, -1)


@pytest.mark.parametrize("steps", [8, 20])
def test_sana_sampler_equals_the_pipeline_with_its_own_scheduler(host, base_graph, checkpoint, steps):
    got = host.run(base_graph(steps=steps))
    expected = pipeline_picture(checkpoint, steps=steps, output_type="latent")
    torch.testing.assert_close(got["latent"]["samples"], expected, atol=1e-4, rtol=0)
    torch.testing.assert_close(got["image"], pipeline_picture(checkpoint, steps=steps), atol=1e-4, rtol=0)


def test_sana_sampler_euler_equals_the_pipeline_with_euler(host, base_graph, checkpoint):
    got = host.run(base_graph(sampler="flow_euler"))
    expected = pipeline_picture(checkpoint, FlowMatchEulerDiscreteScheduler(shift=3.0))
    torch.testing.assert_close(got["image"], expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("guidance", [0.0, 0.5, 1.0, 1.2])
@pytest.mark.parametrize("node", ["SanaNodesSampler", "SanaNodesBatchSampler"])
def test_guidance_of_1_and_below_is_the_pipelines(host, base_graph, checkpoint, node, guidance):
    graph = base_graph(guidance=guidance)
    if node == "SanaNodesBatchSampler":
        graph["sample"] = (node, {**graph["sample"][1], "count": 1, "devices": "default", "chunk": 0})
    expected = pipeline_picture(checkpoint, output_type="latent", guidance_scale=guidance)
    torch.testing.assert_close(host.run(graph)["latent"]["samples"], expected, atol=1e-4, rtol=0)


def test_ksampler_euler_normal_equals_diffusers_euler(host, base_graph, checkpoint):
    got = host.run(ksampler(base_graph()))
    expected = pipeline_picture(checkpoint, FlowMatchEulerDiscreteScheduler(shift=3.0), output_type="latent")
    torch.testing.assert_close(got["latent"]["samples"], expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("node", ["SanaNodesSampler", "SanaNodesBatchSampler"])
def test_heun_equals_diffusers_heun(host, base_graph, checkpoint, node):
    graph = base_graph(sampler="flow_heun")
    if node == "SanaNodesBatchSampler":
        graph["sample"] = (node, {**graph["sample"][1], "count": 1, "devices": "default", "chunk": 0})
    expected = pipeline_picture(checkpoint, FlowMatchHeunDiscreteScheduler(shift=3.0), output_type="latent")
    torch.testing.assert_close(host.run(graph)["latent"]["samples"], expected, atol=1e-4, rtol=0)


def test_sampler_custom_advanced_equals_ksampler(host, base_graph, custom_graph):
    custom = custom_graph()
    custom["select"] = ("KSamplerSelect", {"sampler_name": "euler"})
    custom["sigmas"] = ("BasicScheduler", {"model": ["load", 0], "scheduler": "normal", "steps": 8, "denoise": 1.0})
    expected = host.run(ksampler(base_graph()))["latent"]["samples"]
    assert torch.equal(host.run(custom)["latent"]["samples"], expected)


def test_the_shift_node_of_core_moves_our_schedule(host, base_graph, checkpoint):
    graph = through(base_graph(sampler="flow_euler"), "ModelSamplingSD3", shift=6.0)
    expected = pipeline_picture(checkpoint, FlowMatchEulerDiscreteScheduler(shift=6.0))
    torch.testing.assert_close(host.run(graph)["image"], expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("text, instruction", [(PROMPT, True), ("", False)])
def test_clip_text_encode_equals_sana_text_encode(host, text, instruction):
    got = host.run(
        {
            "load": ("SanaNodesLoader", {"model": "sana-tiny"}),
            "core": ("CLIPTextEncode", {"clip": ["load", 1], "text": text}),
            "ours": ("SanaNodesTextEncode", {"clip": ["load", 1], "text": text, "instruction": instruction}),
            "catch core": ("Catch", {"value": ["core", 0], "name": "core"}),
            "catch ours": ("Catch", {"value": ["ours", 0], "name": "ours"}),
        }
    )
    ((core, core_rest),), ((ours, ours_rest),) = got["core"], got["ours"]
    assert core.shape == (1, 300, 64)
    assert torch.equal(core, ours) and torch.equal(core_rest["attention_mask"], ours_rest["attention_mask"])


def test_our_instruction_is_that_of_the_host():
    from comfy.text_encoders import pixeldit

    assert instruction_text(NVIDIA) == pixeldit._PIXELDIT_CHI_PROMPT


def test_vae_decode_and_encode_equal_the_library(host, base_graph, checkpoint):
    graph = base_graph(batch_size=2)
    graph["core decode"] = ("VAEDecode", {"samples": ["sample", 0], "vae": ["load", 2]})
    graph["core encode"] = ("VAEEncode", {"pixels": ["core decode", 0], "vae": ["load", 2]})
    graph["catch core image"] = ("Catch", {"value": ["core decode", 0], "name": "core image"})
    graph["catch core latent"] = ("Catch", {"value": ["core encode", 0], "name": "core latent"})
    got = host.run(graph)
    vae = SanaPipeline.from_pretrained(checkpoint, dtype=torch.float32).vae
    with torch.no_grad():
        expected = ((vae.decode(got["latent"]["samples"]).sample + 1) / 2).clamp(0, 1).movedim(1, -1)
        encoded = vae.encode(got["core image"].movedim(-1, 1) * 2 - 1).latent
    assert torch.equal(got["image"], got["core image"])
    torch.testing.assert_close(got["image"], expected, atol=1e-5, rtol=0)
    torch.testing.assert_close(got["core latent"]["samples"], encoded, atol=1e-4, rtol=0)


def test_an_empty_latent_of_core_draws_the_same_picture(host, base_graph):
    ours = base_graph()
    core = {**ours, "empty": ("EmptyLatentImage", {"width": 128, "height": 128, "batch_size": 1})}
    assert torch.equal(host.run(ours)["image"], host.run(core)["image"])
    ours, core = ksampler(ours), ksampler(core)
    assert torch.equal(host.run(ours)["image"], host.run(core)["image"])


def test_an_encoded_picture_is_sampled_further(host, base_graph):
    graph = base_graph(batch_size=1)
    graph["encode"] = ("VAEEncode", {"pixels": ["decode", 0], "vae": ["load", 2]})
    graph["again"] = ksampler(graph, latent_image=["encode", 0], denoise=0.3)["sample"]
    graph["decode again"] = ("VAEDecode", {"samples": ["again", 0], "vae": ["load", 2]})
    graph["catch again"] = ("Catch", {"value": ["decode again", 0], "name": "again"})
    got = host.run(graph)
    difference = (got["again"] - got["image"]).abs().mean()
    assert 0 < difference < 0.1
