"""Core's ModelComputeDtype: weights of any dtype draw the same image in any, to that dtype's precision."""

import layouts
import pytest
import torch
from loading import controlled, random_controlnet, through

DTYPES = ("fp32", "bf16", "fp16")
# mean difference from the image in float32, in levels of 255; a LoRA is rounded to weights of 16 bits
LEVELS = {"fp32": 0.01, "bf16": 0.6, "fp16": 0.07}


@pytest.fixture(params=["alone", "with a ControlNet", "with a LoRA"])
def graph(request, base_graph, install):
    """The base graph, with random weights that are strong enough to see."""
    graph = base_graph()
    if request.param == "with a ControlNet":
        model = random_controlnet(2).bfloat16()
        install("controlnet", "typed.safetensors", model.state_dict(), config=layouts.with_config(model))
        controlled(graph, "typed.safetensors", torch.rand(1, 128, 128, 3, generator=torch.Generator().manual_seed(7)))
    if request.param == "with a LoRA":
        torch.manual_seed(6)
        layers = [f"diffusion_model.transformer_blocks.1.attn2.{name}.lora" for name in ("to_q", "to_k", "to_v")]
        tensors = {f"{layer}_A.weight": torch.randn(4, 160) / 10 for layer in layers}
        tensors |= {f"{layer}_B.weight": torch.randn(160, 4) / 10 for layer in layers}
        install("loras", "typed.safetensors", tensors)
        through(graph, "LoraLoaderModelOnly", lora_name="typed.safetensors", strength_model=1.0)
    return graph


@pytest.mark.parametrize("stored", DTYPES)
def test_each_compute_dtype_draws_the_image_of_float32(host, graph, monkeypatch, stored):
    from comfy.cli_args import args

    expected = host.run(graph)["image"]
    monkeypatch.setattr(args, f"{stored}_unet", True)
    # The flags --fp16-unet, --bf16-unet and --fp32-unet set this.
    graph["catch model"] = ("Catch", {"value": ["load", 0], "name": "model"})
    weights = host.run(graph)["model"].model.diffusion_model.transformer_blocks[0].attn1.to_q.weight
    assert weights.dtype == {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[stored]
    through(graph, "ModelComputeDtype", "cast")
    for dtype in DTYPES:
        graph["cast"][1]["dtype"] = dtype
        difference = 255 * (host.run(graph, keep_cache=True)["image"] - expected).abs().mean()
        assert difference < LEVELS[dtype]
        # A smaller difference would mean that nothing was cast.
        assert dtype == "fp32" or difference > LEVELS[dtype] / 10
