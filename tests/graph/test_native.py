"""Core's nodes take our MODEL, CLIP and VAE for their own."""

import shutil
import sys

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import sana_core

LAYER = "transformer_blocks.2.attn2.to_q"


@pytest.fixture
def lora(host):
    """A LoRA in core's own key dialect."""
    generator = torch.Generator().manual_seed(0)
    tensors = {
        f"diffusion_model.{LAYER}.lora_A.weight": torch.randn(4, 160, generator=generator) * 0.3,
        f"diffusion_model.{LAYER}.lora_B.weight": torch.randn(160, 4, generator=generator) * 0.3,
        f"diffusion_model.{LAYER}.alpha": torch.tensor(2.0),
    }
    folder = host.models / "loras"
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "test.safetensors")
    return tensors


def with_lora(graph, strength):
    inputs = {"model": ["load", 0], "lora_name": "test.safetensors", "strength_model": strength}
    sample = (graph["sample"][0], {**graph["sample"][1], "model": ["lora", 0]})
    return {**graph, "lora": ("LoraLoaderModelOnly", inputs), "sample": sample}


def test_a_lora_changes_the_picture_as_merged_weights_do_and_comes_off_again(
    host, base_graph, lora, checkpoint, tmp_path
):
    plain = host.run(base_graph())["image"]
    patched = host.run(with_lora(base_graph(), 1.0), keep_cache=True)["image"]
    zero = host.run(with_lora(base_graph(), 0.0), keep_cache=True)["image"]
    after = host.run(base_graph(seed=4), keep_cache=True)["image"]

    assert (patched - plain).abs().max() > 0.01
    assert torch.equal(zero, plain)
    # the same loaded model, the LoRA now gone
    assert torch.equal(after, host.run(base_graph(seed=4))["image"])

    transformer = sana_core.load_transformer(checkpoint)
    up, down = lora[f"diffusion_model.{LAYER}.lora_B.weight"], lora[f"diffusion_model.{LAYER}.lora_A.weight"]
    transformer.get_submodule(LAYER).weight += 2.0 / 4 * (up @ down)
    copy = shutil.copytree(checkpoint, tmp_path / "merged")
    transformer.save_pretrained(copy / "transformer")
    prompt = ["a red circle on a blue background"]
    merged = sana_core.generate(prompt, copy, seed=3, steps=8, width=128, height=128)
    torch.testing.assert_close(patched, (merged.movedim(1, -1) + 1) / 2, atol=1e-4, rtol=0)


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
            own, other = patcher.model.state_dict(), twin.model.state_dict()
            assert twin.model is not patcher.model and own.keys() == other.keys()
            assert all(torch.equal(own[key], other[key]) for key in own)
            assert own and not any(own[key].data_ptr() == other[key].data_ptr() for key in own)


@pytest.fixture
def second_device(host, monkeypatch):
    """The same CPU under a second name, and the copies of the transformer that compute, as a set."""
    import comfy.model_management

    devices = [torch.device("cpu"), torch.device("cpu", 0)]
    monkeypatch.setattr(comfy.model_management, "get_all_torch_devices", lambda exclude_current=False: devices)
    pack = next(module for name, module in list(sys.modules.items()) if name.endswith("nodes.host.model"))
    real, used = pack.SanaDiffusionModel.forward, set()

    def forward(self, *args, **kwargs):
        used.add(id(self))
        return real(self, *args, **kwargs)

    monkeypatch.setattr(pack.SanaDiffusionModel, "forward", forward)
    return used


@pytest.mark.parametrize("node", ["SanaNodesSampler", "KSampler"])
def test_cfg_split_over_two_devices_draws_the_same_picture(host, base_graph, second_device, node):
    """Core's node with a second copy of the model on the same CPU, driven by core's own threads."""

    def draw(split):
        graph = base_graph()
        if node == "KSampler":
            own = {key: graph["sample"][1][key] for key in ("positive", "negative", "latent_image", "seed", "steps")}
            own |= {"cfg": 4.5, "sampler_name": "euler", "scheduler": "normal", "denoise": 1.0}
            graph["sample"] = (node, own)
        graph["split"] = ("MultiGPU_WorkUnits", {"model": ["load", 0], "max_gpus": 2})
        graph["sample"][1]["model"] = ["split", 0] if split else ["load", 0]
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
    name = next(name for name in sys.modules if name.endswith(".nodes.host.compat"))
    with pytest.raises(RuntimeError, match=f"^SANA: got ComfyUI {version}, expected 0.27 or newer; update ComfyUI$"):
        host.loop.run_until_complete(sys.modules[name.removesuffix(".host.compat")].comfy_entrypoint())
