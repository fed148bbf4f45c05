"""Core's nodes take our MODEL, CLIP and VAE for their own."""

import numpy as np
import pytest
import torch
from fake_cuda import pack
from loading import ksampler, through


@pytest.mark.parametrize("device", ["default", "cpu", "gpu:3"])
def test_device_nodes_of_core_take_our_objects(host, base_graph, device):
    graph = base_graph()
    expected = host.run(graph)["image"]
    graph["split"] = ("MultiGPU_WorkUnits", {"model": ["load", 0], "max_gpus": 2})
    graph["model"] = ("SelectModelDevice", {"model": ["split", 0], "device": device})
    graph["clip"] = ("SelectCLIPDevice", {"clip": ["load", 1], "device": device})
    graph["vae"] = ("SelectVAEDevice", {"vae": ["load", 2], "device": device})
    graph["sample"][1]["model"] = ["model", 0]
    graph["positive"][1]["clip"] = graph["negative"][1]["clip"] = ["clip", 0]
    graph["decode"][1]["vae"] = ["vae", 0]
    assert torch.equal(host.run(graph)["image"], expected)


def test_copies_for_other_devices_are_loaded_from_the_file_and_draw_the_same(host, base_graph):
    """What MultiGPU CFG Split and Select Device do on a machine with a second device."""
    graph = base_graph()
    for slot, name in enumerate(("model", "clip", "vae")):
        graph[name] = ("Catch", {"value": ["load", slot], "name": name})
    got = host.run(graph)
    with torch.inference_mode():
        for patcher in (got["model"], got["clip"].patcher, got["vae"].patcher):
            twin = patcher.deepclone_multigpu(new_load_device=torch.device("cpu"))
            weights, other = patcher.model.state_dict(), twin.model.state_dict()
            assert twin.model is not patcher.model and weights.keys() == other.keys()
            assert all(torch.equal(weights[key], other[key]) for key in weights)
            assert weights and not any(weights[key].data_ptr() == other[key].data_ptr() for key in weights)


@pytest.fixture
def second_device(host, monkeypatch):
    """The same CPU under a second name, and the copies of the transformer that compute, as a set."""
    import comfy.model_management

    devices = [torch.device("cpu"), torch.device("cpu", 0)]
    monkeypatch.setattr(comfy.model_management, "get_all_torch_devices", lambda exclude_current=False: devices)
    model = pack("nodes.host.sampling.model").SanaDiffusionModel
    real, used = model.forward, set()

    def forward(self, *args, **kwargs):
        used.add(id(self))
        return real(self, *args, **kwargs)

    monkeypatch.setattr(model, "forward", forward)
    return used


@pytest.mark.parametrize("node", ["SanaNodesSampler", "KSampler"])
def test_cfg_split_over_two_devices_draws_the_same_picture(host, base_graph, second_device, node):
    """Core's node with a second copy of the model on the same CPU, driven by core's own threads."""

    def draw(split):
        graph = through(base_graph(), "MultiGPU_WorkUnits", max_gpus=2) if split else base_graph()
        graph = ksampler(graph) if node == "KSampler" else graph
        second_device.clear()
        image = host.run(graph)["image"]
        assert len(second_device) == (2 if split else 1)
        return image

    # two batches of one where there was one of two: the sums round in another way
    torch.testing.assert_close(draw(split=True), draw(split=False), atol=1e-4, rtol=0)


def test_previews_have_the_colours_of_the_picture(host, base_graph):
    import latent_preview

    graph = base_graph(steps=20)
    graph["catch model"] = ("Catch", {"value": ["load", 0], "name": "model"})
    got = host.run(graph)
    latent_format = got["model"].model.latent_format
    previewer = latent_preview.get_previewer(torch.device("cpu"), latent_format)
    preview = previewer.decode_latent_to_preview(latent_format.process_in(got["latent"]["samples"]))
    small = torch.nn.functional.avg_pool2d(got["image"].movedim(-1, 1), 32)[0].movedim(0, -1) * 255
    assert preview.size == (4, 4)
    assert np.abs(np.asarray(preview) - small.numpy()).mean() < 25


@pytest.mark.parametrize("version", ["0.26.2", "0.3.75"])
def test_an_older_host_is_refused_in_words(host, monkeypatch, version):
    import comfyui_version

    monkeypatch.setattr(comfyui_version, "__version__", version)
    with pytest.raises(RuntimeError, match=f"^SANA: got ComfyUI {version}, expected 0.27 or newer; update ComfyUI$"):
        host.loop.run_until_complete(pack("nodes").comfy_entrypoint())
