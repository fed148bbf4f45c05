"""SANA's ControlNet through core's Apply ControlNet, against the pipeline of diffusers."""

import layouts
import pytest
import torch
from by_diffusers import drawn_by
from diffusers import FlowMatchEulerDiscreteScheduler, SanaControlNetPipeline
from in_process import NodeError
from loading import controlled, random_controlnet, through

pytestmark = pytest.mark.usefixtures("one_load")

PROMPT = "a red circle on a blue background"


@pytest.fixture(scope="module")
def controlnet():
    return random_controlnet()


@pytest.fixture(params=["diffusers", "original"])
def file(request, install, controlnet):
    tensors = controlnet.state_dict() if request.param == "diffusers" else layouts.nvidia(controlnet, unused=False)
    return install("controlnet", "control.safetensors", tensors, config=layouts.with_config(controlnet))


@pytest.fixture(scope="module")
def edges():
    return torch.rand(1, 128, 128, 3, generator=torch.Generator().manual_seed(6))


def steered(graph, edges, **options):
    return controlled(graph, "control.safetensors", edges, **options)


@pytest.fixture(scope="module")
def reference(checkpoint, controlnet, edges):
    """A function of the strength: the latent of diffusers' pipeline from the same noise."""
    pipeline = SanaControlNetPipeline.from_pretrained(checkpoint, controlnet=controlnet, dtype=torch.float32)
    current, euler = pipeline.scheduler, FlowMatchEulerDiscreteScheduler(shift=3.0)
    control = {"control_image": edges.movedim(-1, 1) * 2 - 1, "num_inference_steps": 6}

    def run(strength, dpm=False):
        scheduler = current if dpm else euler
        return drawn_by(pipeline, PROMPT, scheduler, controlnet_conditioning_scale=strength, **control)

    return run


def test_with_dpm_solver_the_controlnet_gets_whole_timesteps_too(host, base_graph, file, edges, reference):
    got = host.run(steered(base_graph(steps=6, text=PROMPT), edges))["latent"]["samples"]
    torch.testing.assert_close(got, reference(1.0, dpm=True), atol=2e-4, rtol=0)


@pytest.mark.parametrize("strength", [1.0, 0.4])
def test_the_latent_is_that_of_the_pipeline(host, base_graph, file, edges, reference, strength):
    graph = base_graph(steps=6, sampler="flow_euler", text=PROMPT)
    plain = host.run(graph)["latent"]["samples"]
    got = host.run(steered(graph, edges, strength=strength))["latent"]["samples"]
    assert (got - plain).abs().max() > 0.05
    torch.testing.assert_close(got, reference(strength), atol=2e-4, rtol=0)


def test_strength_and_percent_are_cores(host, base_graph, file, edges):
    def run(**options):
        return host.run(steered(base_graph(steps=6), edges, **options))["latent"]["samples"]

    plain = host.run(base_graph(steps=6))["latent"]["samples"]
    assert torch.equal(run(strength=0.0), plain)
    assert torch.equal(run(start_percent=1.0), plain)
    early, late, all_steps = run(end_percent=0.5), run(start_percent=0.5), run()
    assert len({round(float(item.abs().sum()), 3) for item in (plain, early, late, all_steps)}) == 4


def test_a_batch_of_other_control_pictures_is_named(host, base_graph, file, edges):
    with pytest.raises(NodeError, match="image: got 3 control images for 2 images; give one, or one for each"):
        host.run(steered(base_graph(steps=2, batch_size=2), edges.repeat(3, 1, 1, 1)))


def test_without_a_vae_the_error_says_so(host, base_graph, file, edges):
    with pytest.raises(NodeError, match="needs a VAE"):
        host.run(steered(base_graph(steps=2), edges, vae=False))


def test_a_controlnet_of_another_size_is_named(host, base_graph, edges):
    path = host.models / "controlnet" / "control.safetensors"
    layouts.save(layouts.controlnet().state_dict(), path)
    with pytest.raises(NodeError, match="^control_net: got one of width 1152, expected 160; choose the ControlNet of"):
        host.run(steered(base_graph(steps=2), edges))
    layouts.save(layouts.transformer().state_dict(), path)
    with pytest.raises(NodeError, match="not a SANA ControlNet: found a SANA transformer .*; get Sana_1600M"):
        host.run(steered(base_graph(steps=2), edges))
    path.unlink()


def test_devices_that_share_a_picture_share_its_residuals(host, base_graph, file, edges):
    graph = steered(base_graph(steps=4), edges)
    expected = host.run(graph)["latent"]["samples"]
    got = host.run(through(graph, "SanaNodesSplitPicture", devices="cpu x 2"), keep_cache=True)["latent"]["samples"]
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)
