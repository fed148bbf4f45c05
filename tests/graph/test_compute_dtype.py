"""Core's ModelComputeDtype: weights of any dtype draw the same image in any, to that dtype's precision."""

import layouts
import pytest
import torch
from diffusers import SanaControlNetModel
from safetensors.torch import save_file

DTYPES = ("fp32", "bf16", "fp16")
# mean difference from the image in float32, in levels of 255; a LoRA is rounded to weights of 16 bits
LEVELS = {"fp32": 0.01, "bf16": 0.6, "fp16": 0.07}


@pytest.fixture(scope="module")
def controlnet(host):
    """One of random weights, in bfloat16."""
    torch.manual_seed(5)
    shape = {"cross_attention_head_dim": 32, "cross_attention_dim": 160, "caption_channels": 64, "sample_size": 4}
    model = SanaControlNetModel(
        num_attention_heads=5, num_layers=2, num_cross_attention_heads=5, interpolation_scale=1.0, **shape
    )
    for layer in (model.input_block, *model.controlnet_blocks):
        torch.nn.init.normal_(layer.weight, std=0.03)
    path = host.models / "controlnet" / "typed.safetensors"
    layouts.save(model.bfloat16().state_dict(), path, config=layouts.with_config(model))
    yield path.name
    path.unlink()


@pytest.fixture(scope="module")
def lora(host):
    """One of random weights for query, key and value of a cross-attention, strong enough to see."""
    torch.manual_seed(6)
    tensors = {}
    for name in ("to_q", "to_k", "to_v"):
        layer = f"diffusion_model.transformer_blocks.1.attn2.{name}"
        tensors[f"{layer}.lora_A.weight"] = torch.randn(4, 160) / 10
        tensors[f"{layer}.lora_B.weight"] = torch.randn(160, 4) / 10
    path = host.models / "loras" / "typed.safetensors"
    path.parent.mkdir(exist_ok=True)
    save_file(tensors, path)
    yield path.name
    path.unlink()


@pytest.fixture(params=["alone", "with a ControlNet", "with a LoRA"])
def graph(request, base_graph, controlnet, lora):
    graph = base_graph()
    if request.param == "with a ControlNet":
        edges = torch.rand(1, 128, 128, 3, generator=torch.Generator().manual_seed(7))
        graph["edges"] = ("AnyValue", {"value": edges})
        graph["control"] = ("SanaNodesControlNetLoader", {"control_net_name": controlnet, "reference": "diffusers"})
        links = {"positive": ["positive", 0], "negative": ["negative", 0], "control_net": ["control", 0]}
        strength = {"strength": 1.0, "start_percent": 0.0, "end_percent": 1.0}
        graph["apply"] = (
            "ControlNetApplyAdvanced",
            {**links, **strength, "image": ["edges", 0], "vae": ["load", 2]},
        )
        graph["sample"][1].update(positive=["apply", 0], negative=["apply", 1])
    if request.param == "with a LoRA":
        graph["lora"] = ("LoraLoaderModelOnly", {"model": ["load", 0], "lora_name": lora, "strength_model": 1.0})
        graph["sample"][1]["model"] = ["lora", 0]
    return graph


@pytest.mark.parametrize("stored", DTYPES)
def test_each_compute_dtype_draws_the_image_of_float32(host, graph, monkeypatch, stored):
    from comfy.cli_args import args

    expected = host.run(graph)["image"]
    monkeypatch.setattr(args, f"{stored}_unet", True)
    # as with the flag --fp16-unet and its like
    graph["catch model"] = ("Catch", {"value": ["load", 0], "name": "model"})
    weights = host.run(graph)["model"].model.diffusion_model.transformer_blocks[0].attn1.to_q.weight
    assert weights.dtype == {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[stored]
    model = graph["sample"][1]["model"]
    for dtype in DTYPES:
        graph["cast"] = ("ModelComputeDtype", {"model": model, "dtype": dtype})
        graph["sample"][1]["model"] = ["cast", 0]
        difference = 255 * (host.run(graph, keep_cache=True)["image"] - expected).abs().mean()
        assert difference < LEVELS[dtype]
        # or it was not cast at all
        assert dtype == "fp32" or difference > LEVELS[dtype] / 10
