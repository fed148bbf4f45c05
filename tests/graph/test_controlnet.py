"""SANA's ControlNet through core's Apply ControlNet, against the pipeline of diffusers."""

import layouts
import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, SanaControlNetModel, SanaControlNetPipeline
from in_process import NodeError

PROMPT = "a red circle on a blue background"


@pytest.fixture(scope="module")
def controlnet():
    """Random, as wide as the bundled transformer; strong enough to see."""
    torch.manual_seed(5)
    model = SanaControlNetModel(
        num_attention_heads=5,
        num_layers=3,
        num_cross_attention_heads=5,
        cross_attention_head_dim=32,
        cross_attention_dim=160,
        caption_channels=64,
        interpolation_scale=1.0,
        sample_size=4,
    )
    for layer in (model.input_block, *model.controlnet_blocks):
        torch.nn.init.normal_(layer.weight, std=0.03)
    return model.train(False)


@pytest.fixture(params=["diffusers", "original"])
def file(request, host, controlnet):
    tensors = controlnet.state_dict() if request.param == "diffusers" else layouts.nvidia(controlnet, unused=False)
    path = host.models / "controlnet" / "control.safetensors"
    layouts.save(tensors, path, config=layouts.with_config(controlnet))
    yield path
    path.unlink()


@pytest.fixture(scope="module")
def edges():
    return torch.rand(1, 128, 128, 3, generator=torch.Generator().manual_seed(6))


def controlled(graph, edges, strength=1.0, start=0.0, end=1.0, vae=True):
    graph["edges"] = ("AnyValue", {"value": edges})
    loader = {"control_net_name": "control.safetensors", "reference": "diffusers"}
    graph["control"] = ("SanaNodesControlNetLoader", loader)
    inputs = {"positive": ["positive", 0], "negative": ["negative", 0], "control_net": ["control", 0]}
    inputs |= {"image": ["edges", 0], "strength": strength, "start_percent": start, "end_percent": end}
    graph["apply"] = ("ControlNetApplyAdvanced", {**inputs, **({"vae": ["load", 2]} if vae else {})})
    graph["sample"][1].update(positive=["apply", 0], negative=["apply", 1])
    return graph


@pytest.fixture(scope="module")
def reference(checkpoint, controlnet, edges):
    """A function of the strength: the latent of diffusers' pipeline from the same noise."""
    pipeline = SanaControlNetPipeline.from_pretrained(checkpoint, controlnet=controlnet, dtype=torch.float32)
    own, euler = pipeline.scheduler, FlowMatchEulerDiscreteScheduler(shift=3.0)
    pipeline.set_progress_bar_config(disable=True)

    def run(strength, dpm=False):
        pipeline.scheduler = own if dpm else euler
        from noise import noise_like

        return (
            pipeline(
                PROMPT,
                control_image=edges.movedim(-1, 1) * 2 - 1,
                controlnet_conditioning_scale=strength,
                num_inference_steps=6,
                guidance_scale=4.5,
                height=128,
                width=128,
                latents=noise_like(torch.empty(1, 32, 4, 4), 3),
                output_type="latent",
                use_resolution_binning=False,
            ).images
            / pipeline.vae.config.scaling_factor
        )

    return run


def test_with_dpm_solver_the_controlnet_gets_whole_timesteps_too(host, base_graph, file, edges, reference):
    got = host.run(controlled(base_graph(steps=6, text=PROMPT), edges))["latent"]["samples"]
    torch.testing.assert_close(got, reference(1.0, dpm=True), atol=2e-4, rtol=0)


@pytest.mark.parametrize("strength", [1.0, 0.4])
def test_the_latent_is_that_of_the_pipeline(host, base_graph, file, edges, reference, strength):
    graph = base_graph(steps=6, sampler="flow_euler", text=PROMPT)
    plain = host.run(graph)["latent"]["samples"]
    got = host.run(controlled(graph, edges, strength))["latent"]["samples"]
    assert (got - plain).abs().max() > 0.05
    torch.testing.assert_close(got, reference(strength), atol=2e-4, rtol=0)


def test_strength_and_percent_are_cores(host, base_graph, file, edges):
    def run(**options):
        return host.run(controlled(base_graph(steps=6), edges, **options))["latent"]["samples"]

    plain = host.run(base_graph(steps=6))["latent"]["samples"]
    assert torch.equal(run(strength=0.0), plain)
    assert torch.equal(run(start=1.0), plain)
    early, late, whole = run(end=0.5), run(start=0.5), run()
    assert len({round(float(each.abs().sum()), 3) for each in (plain, early, late, whole)}) == 4


def test_a_batch_of_other_control_pictures_is_named(host, base_graph, file, edges):
    with pytest.raises(NodeError, match="image: got 3 control images for 2 images; give one, or one for each"):
        host.run(controlled(base_graph(steps=2, batch_size=2), edges.repeat(3, 1, 1, 1)))


def test_without_a_vae_the_error_says_so(host, base_graph, file, edges):
    with pytest.raises(NodeError, match="needs a VAE"):
        host.run(controlled(base_graph(steps=2), edges, vae=False))


def test_a_controlnet_of_another_size_is_named(host, base_graph, edges):
    path = host.models / "controlnet" / "control.safetensors"
    layouts.save(layouts.controlnet().state_dict(), path)
    with pytest.raises(NodeError, match="^control_net: got one of width 1152, expected 160; choose the ControlNet of"):
        host.run(controlled(base_graph(steps=2), edges))
    layouts.save(layouts.transformer().state_dict(), path)
    with pytest.raises(NodeError, match="not a SANA ControlNet: found a SANA transformer .*; get Sana_1600M"):
        host.run(controlled(base_graph(steps=2), edges))
    path.unlink()


def test_devices_that_share_a_picture_share_its_residuals(host, base_graph, file, edges):
    graph = controlled(base_graph(steps=4), edges)
    expected = host.run(graph)["latent"]["samples"]
    graph["split"] = ("SanaNodesSplitPicture", {"model": ["load", 0], "devices": "cpu x 2"})
    graph["sample"][1]["model"] = ["split", 0]
    got = host.run(graph, keep_cache=True)["latent"]["samples"]
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)
