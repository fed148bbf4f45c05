"""LoRA in every dialect, through core's loaders and ours, comes out as merged weights do."""

import layouts
import pytest
import torch
from in_process import NodeError
from lora_dialects import DIALECTS, WRAPPED

pytestmark = pytest.mark.usefixtures("one_load")

LINEAR = "transformer_blocks.2.attn2.to_q"
CONV = "transformer_blocks.1.ff.conv_inverted"
SHAPES = {LINEAR: (160, 160), CONV: (800, 160, 1, 1)}
RANK, ALPHA = 4, 2.0


def matrices(layer):
    """Down and up of `layer`, with the trailing dimensions of a convolution where it is one."""
    generator = torch.Generator().manual_seed(len(layer))
    rows, columns, *kernel = SHAPES[layer]
    down = torch.randn(RANK, columns, *kernel, generator=generator) * 0.3
    return down, torch.randn(rows, RANK, *kernel, generator=generator) * 0.3


def written(dialect, layers=(LINEAR, CONV)):
    pattern, down_key, up_key = {**DIALECTS, **WRAPPED}[dialect]
    tensors = {}
    for layer in layers:
        name = pattern.format(name=layer, flat=layer.replace(".", "_"))
        tensors[f"{name}{down_key}"], tensors[f"{name}{up_key}"] = matrices(layer)
        tensors[f"{name}.alpha"] = torch.tensor(ALPHA)
    return tensors


def ours(name, strength=1.0, model=("load", 0)):
    return ("SanaNodesLoraLoader", {"model": list(model), "lora_name": name, "strength_model": strength})


def core(name, strength=1.0, model=("load", 0)):
    return ("LoraLoaderModelOnly", {"model": list(model), "lora_name": name, "strength_model": strength})


def cores_pair(name, strength=1.0, model=("load", 0)):
    inputs = {"model": list(model), "clip": ["load", 1], "lora_name": name}
    return ("LoraLoader", {**inputs, "strength_model": strength, "strength_clip": strength})


def with_lora(graph, **nodes):
    """The graph, sampling from the last of `nodes`."""
    sample = (graph["sample"][0], {**graph["sample"][1], "model": [list(nodes)[-1], 0]})
    return {**graph, **nodes, "sample": sample}


@pytest.fixture(scope="module")
def merged(host):
    """A function of {layer: strength} that gives the latent of weights into which the LoRA was merged."""

    def run(graph, strengths):
        caught = host.run({"load": graph["load"], "catch": ("Catch", {"value": ["load", 0], "name": "model"})})
        model = caught["model"].clone()
        for layer, strength in strengths.items():
            down, up = matrices(layer)
            difference = ALPHA / RANK * strength * (up.flatten(1) @ down.flatten(1)).reshape(SHAPES[layer])
            model.add_patches({f"diffusion_model.{layer}.weight": (difference,)}, 1.0)
        graph = {**graph, "given": ("AnyValue", {"value": model})}
        graph["sample"] = (graph["sample"][0], {**graph["sample"][1], "model": ["given", 0]})
        return host.run(graph)["latent"]["samples"]

    return run


# test_written_files.py compares the weights that our loader gives in all dialects.
CASES = [*((dialect, core) for dialect in DIALECTS), *((dialect, ours) for dialect in WRAPPED)]


@pytest.mark.parametrize("dialect, loader", [*CASES, ("diffusers", ours), ("diffusers", cores_pair)])
def test_a_lora_gives_the_merged_image(host, base_graph, install, merged, dialect, loader):
    name = install("loras", "lora.safetensors", written(dialect))
    graph = base_graph(steps=3)
    got = host.run(with_lora(graph, lora=loader(name)))["latent"]["samples"]
    assert (got - host.run(graph)["latent"]["samples"]).abs().max() > 0.01
    torch.testing.assert_close(got, merged(graph, {LINEAR: 1.0, CONV: 1.0}), atol=1e-4, rtol=0)


@pytest.mark.parametrize("loader", [ours, core])
def test_several_at_once_add_up_and_come_off_again(host, base_graph, install, merged, loader):
    install("loras", "one.safetensors", written("diffusers", [LINEAR]))
    install("loras", "two.safetensors", written("onetrainer", [CONV]))
    graph = base_graph(steps=3)
    plain = host.run(graph)["latent"]["samples"]
    both = with_lora(graph, a=loader("one.safetensors", 0.5), b=loader("two.safetensors", -0.7, ("a", 0)))
    got = host.run(both, keep_cache=True)["latent"]["samples"]
    torch.testing.assert_close(got, merged(graph, {LINEAR: 0.5, CONV: -0.7}), atol=1e-4, rtol=0)
    # the same loaded model, the LoRAs now gone
    after = host.run(base_graph(steps=4), keep_cache=True)["latent"]["samples"]
    zero = host.run(with_lora(base_graph(steps=5), a=loader("one.safetensors", 0.0)), keep_cache=True)
    assert torch.equal(after, host.run(base_graph(steps=4))["latent"]["samples"])
    assert torch.equal(zero["latent"]["samples"], host.run(base_graph(steps=5))["latent"]["samples"])
    assert (got - plain).abs().max() > 0.01


@pytest.mark.parametrize("mode", ["LOW_VRAM", "NO_VRAM"])
def test_a_lora_is_applied_in_every_memory_mode(host, base_graph, install, merged, short_memory, mode):
    """Weights that are cast layer by layer as they run get their patch then."""
    name = install("loras", "lora.safetensors", written("diffusers"))
    graph = base_graph(steps=3)
    expected = merged(graph, {LINEAR: 1.0, CONV: 1.0})
    short_memory(mode)
    got = host.run(with_lora(graph, lora=ours(name)))["latent"]["samples"]
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    "prefix", ["text_encoder.", "text_encoder.model.", "text_encoders.gemma2_2b.transformer.model."]
)
def test_a_lora_on_the_text_encoder_changes_the_embeddings(host, base_graph, install, prefix):
    layer, generator = f"{prefix}layers.1.self_attn.q_proj", torch.Generator().manual_seed(0)
    tensors = {f"{layer}.lora_A.weight": torch.randn(RANK, 64, generator=generator)}
    tensors[f"{layer}.lora_B.weight"] = torch.randn(64, RANK, generator=generator)
    name = install("loras", "text.safetensors", tensors)
    graph = base_graph(steps=1)
    plain = host.run({**graph, "catch text": ("Catch", {"value": ["positive", 0], "name": "text"})})["text"][0][0]
    inputs = {"model": ["load", 0], "clip": ["load", 1], "lora_name": name, "strength_model": 1.0, "strength_clip": 1.0}
    graph["lora"] = ("SanaNodesLoraLoader", inputs)
    graph["positive"][1]["clip"] = ["lora", 1]
    got = host.run({**graph, "catch text": ("Catch", {"value": ["positive", 0], "name": "text"})})["text"][0][0]
    assert (got - plain).abs().max() > 0.01


def test_a_lora_of_which_nothing_fits_shows_three_of_its_keys(host, base_graph, install):
    layers = ["lora_unet_down_blocks_0_attn", "lora_unet_down_blocks_1_attn", "lora_unet_mid", "lora_unet_up"]
    tensors = {f"{layer}.{half}.weight": torch.zeros(4, 4) for layer in layers for half in ("lora_down", "lora_up")}
    graph = with_lora(base_graph(), lora=ours(install("loras", "sdxl.safetensors", tensors)))
    with pytest.raises(NodeError) as caught:
        host.run(graph)
    assert str(caught.value) == (
        "loras/sdxl.safetensors: none of its 4 layers fit this model, among them lora_unet_down_blocks_0_attn, "
        "lora_unet_down_blocks_1_attn, lora_unet_mid, ...; choose a LoRA trained on this SANA"
    )


def test_a_checkpoint_in_the_lora_folder_is_named(host, base_graph, install):
    name = install("loras", "model.safetensors", layouts.transformer().state_dict())
    with pytest.raises(NodeError, match="^loras/model.safetensors: not a LoRA: found a SANA transformer"):
        host.run(with_lora(base_graph(), lora=ours(name)))


def test_loras_for_other_models_load_as_before(host):
    """What we added to ComfyUI's map of names answers for SANA alone."""
    import comfy.lora
    import comfy.model_base

    assert comfy.lora.model_lora_keys_unet.knows_sana
    other = comfy.model_base.BaseModel.__new__(comfy.model_base.BaseModel)
    torch.nn.Module.__init__(other)
    other.diffusion_model = torch.nn.ModuleDict({"a": torch.nn.Linear(2, 2)})
    other.model_config = type("Config", (), {"unet_config": {}})()
    assert comfy.lora.model_lora_keys_unet(other, {}) == {
        "lora_unet_a": "diffusion_model.a.weight",
        "diffusion_model.a": "diffusion_model.a.weight",
        "diffusion_model.a.bias": "diffusion_model.a.bias",
    }
