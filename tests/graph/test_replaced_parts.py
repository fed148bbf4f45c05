"""What other packs replace or ask of a MODEL is named or refused: forwards, classes, hooks on quantised weights."""

from unittest import mock

import layouts
import pytest
import torch
from in_process import NodeError
from loading import model_node, random_controlnet, through
from test_lora import written

ROUNDS = "rounds the inputs of layers: in a batch or a split image, an image differs slightly"


def of_a_pack(value):
    """Return a function or class as one that ComfyUI has loaded from custom_nodes."""
    value.__module__ = "/somewhere/custom_nodes/ComfyUI-Changer.nodes"
    return value


def lines_of(host, graph, node_texts):
    node_texts.clear()
    host.run(graph, keep_cache=True)
    return "\n".join(text for _, text in node_texts)


def loaded(host, graph):
    graph = {"load": graph["load"], "catch": ("Catch", {"value": ["load", 0], "name": "model"})}
    return host.run(graph)["model"].model.diffusion_model


def test_a_forward_that_a_pack_has_replaced_is_named(host, base_graph, node_texts):
    """As ComfyUI-CacheDiT does, for good."""
    graph = base_graph(steps=1)
    transformer = loaded(host, graph)
    assert "replaced" not in lines_of(host, graph, node_texts)
    transformer.forward = of_a_pack(lambda x, *args, **kwargs: x)
    graph["sample"][1]["seed"] = 4
    assert "ComfyUI-Changer has replaced the forward of the model" in lines_of(host, graph, node_texts)
    del transformer.forward
    block = transformer.transformer_blocks[1].attn1
    block.forward = of_a_pack(lambda x, *args, **kwargs: x)
    graph["sample"][1]["seed"] = 5
    said = lines_of(host, graph, node_texts)
    assert "ComfyUI-Changer has replaced the forward of transformer_blocks.1.attn1, which has no effect" in said
    del block.forward


def test_a_class_that_a_pack_has_replaced_is_named(host, base_graph, node_texts):
    """As Fluxtapoz does."""
    graph = base_graph(steps=1)
    transformer = loaded(host, graph)
    before = type(transformer)
    transformer.__class__ = of_a_pack(type("Changed", (before,), {}))
    assert "ComfyUI-Changer has replaced the class of the model" in lines_of(host, graph, node_texts)


def test_blocks_that_a_pack_replaces_in_each_call_are_refused(host, base_graph, monkeypatch):
    """As Apply First Block Cache of Comfy-WaveSpeed does (fbcache_nodes.py)."""

    @of_a_pack
    class CachedBlocks(torch.nn.Module):
        pass

    def replace_blocks(model):
        transformer = model.get_model_object("diffusion_model")

        def wrapper(apply_model, call):
            with mock.patch.object(transformer, "transformer_blocks", torch.nn.ModuleList([CachedBlocks()])):
                return apply_model(call["input"], call["timestep"], **call["c"])

        model.set_model_unet_function_wrapper(wrapper)

    graph = base_graph(steps=1)
    monkeypatch.setitem(host.nodes.NODE_CLASS_MAPPINGS, "ReplaceBlocks", model_node(replace_blocks))
    through(graph, "ReplaceBlocks")
    with pytest.raises(NodeError, match="^model: got a node of ComfyUI-Changer that replaces all blocks in each call"):
        host.run(graph)
    graph["sample"][1]["model"] = ["load", 0]
    assert host.run(graph)["latent"]["samples"].isfinite().all()


@pytest.mark.parametrize("quantise", ["off", "int8"])
def test_a_lora_on_a_hook_of_a_quantised_model_is_refused(host, base_graph, install, quantise):
    graph = base_graph(steps=1)
    graph["load"][1]["quantise"] = quantise
    name = install("loras", "hook.safetensors", written("kohya"))
    graph["hook"] = ("CreateHookLoraModelOnly", {"lora_name": name, "strength_model": 1.0})
    conds = {"positive_NEW": ["positive", 0], "negative_NEW": ["negative", 0]}
    graph["set"] = (
        "PairConditioningSetProperties",
        {**conds, "strength": 1.0, "set_cond_area": "default", "hooks": ["hook", 0]},
    )
    graph["sample"][1].update(positive=["set", 0], negative=["set", 1])
    if quantise == "off":
        assert host.run(graph)["latent"]["samples"].isfinite().all()
        return
    with pytest.raises(NodeError, match="^model: got a LoRA on a hook for a quantised model, expected plain weights"):
        host.run(graph)


def test_that_int8_depends_on_the_batch_is_said_under_the_loader(host, base_graph, node_texts):
    for quantise, is_said in (("off", False), ("fp8", False), ("int8", True), ("int8_convrot", True)):
        graph = base_graph(steps=1)
        graph["load"][1]["quantise"] = quantise
        assert (ROUNDS in lines_of(host, graph, node_texts)) == is_said, quantise


def test_advanced_controlnet_is_refused(host, install):
    """Its node converts `type(control) == ControlNet` alone, and skips its settings for all without `sub_idxs`.

    These are the calls of its node (adv_control/nodes_main.py, July 2026).
    """
    model = random_controlnet()
    name = install("controlnet", "any.safetensors", model.state_dict(), config=layouts.with_config(model))
    control = host.output_of("SanaNodesControlNetLoader", control_net_name=name, reference="diffusers")
    copied = control.copy().set_cond_hint(torch.rand(1, 64, 64, 3), 1.0, (0.0, 1.0), None)
    assert hasattr(copied, "sub_idxs")
    with pytest.raises(ValueError, match="^control_net: got Apply Advanced ControlNet, whose masks, weights and"):
        copied.disarm()
