"""Quantised files, and weights in 8 bits: read as core reads them, or refused by name."""

import json
import re

import layouts
import pytest
import torch
from fake_cuda import pack
from in_process import NodeError
from loading import check_forward


@pytest.mark.parametrize("weight_dtype", ["fp8_e4m3fn", "fp8_e5m2"])
def test_fp8_weights_are_cast_as_they_run(host, install, weight_dtype):
    model = layouts.transformer()
    install("diffusion_models", "sana.safetensors", model.state_dict())
    patcher = host.output_of("SanaNodesModelLoader", model_name="sana.safetensors", weight_dtype=weight_dtype)
    dtype = {"fp8_e4m3fn": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}[weight_dtype]
    parameters = dict(patcher.model.diffusion_model.named_parameters())
    assert parameters["transformer_blocks.0.attn1.to_q.weight"].dtype == dtype
    assert parameters["transformer_blocks.0.ff.conv_point.weight"].dtype == dtype
    assert parameters["scale_shift_table"].dtype == parameters["caption_norm.weight"].dtype == torch.float32
    for name, parameter in model.named_parameters():
        if parameters[name].dtype == dtype:
            parameter.data = parameter.data.to(dtype).float()
    check_forward(patcher, model)


def test_fp8_products_leave_their_inputs_unchanged(host, install, monkeypatch):
    """ComfyUI's fp8_linear clamps its input in place, and the residual stream of SANA exceeds 448."""
    import comfy.ops

    monkeypatch.setattr("comfy.model_management.supports_fp8_compute", lambda device: True)
    model = layouts.transformer()
    model.patch_embed.proj.weight.data *= 1e4
    install("diffusion_models", "sana.safetensors", model.state_dict())
    options = {"model_name": "sana.safetensors", "weight_dtype": "fp8_e4m3fn_fast"}
    transformer = host.output_of("SanaNodesModelLoader", **options).model.diffusion_model
    layers = [layer for layer in transformer.modules() if isinstance(layer, torch.nn.Linear)]
    inputs = {}

    def keep(layer, args):
        inputs[layer] = args[0].clone()

    def compare(layer, args, output):
        assert torch.equal(args[0], inputs[layer])
        assert torch.equal(output, comfy.ops.fp8_linear(layer, inputs[layer].clone()))

    for layer in layers:
        layer.register_forward_pre_hook(keep)
        layer.register_forward_hook(compare)
    latents, context = torch.randn(1, 32, 3, 5), torch.randn(1, 7, layouts.CAPTION)
    with torch.inference_mode():
        transformer(latents, torch.tensor([700.0]), context=context, transformer_options={})
    assert len(inputs) == len(layers)
    assert inputs[transformer.transformer_blocks[0].attn2.to_q].abs().max() > 448


def in_fp8(model, form, prefix="", plain="embed|norm|caption|time|proj_out"):
    """Quantise a model's matrices to fp8. Returns the tensors of a file in that form, and its metadata.

    Layers whose name matches `plain` stay as they are.
    """
    tensors, layers = {}, {}
    for name, value in model.state_dict().items():
        layer, _, leaf = name.rpartition(".")
        tensors[prefix + name] = value
        if leaf == "weight" and value.ndim == 2 and not re.search(plain, name):
            scale = value.float().abs().max() / 448
            tensors[prefix + name] = (value.float() / scale).to(torch.float8_e4m3fn)
            model.get_parameter(name).data = tensors[prefix + name].float() * scale
            tensors[f"{prefix}{layer}.{'scale_weight' if form == 'scaled_fp8' else 'weight_scale'}"] = scale
            layers[prefix + layer] = {"format": "float8_e4m3fn"}
            if form == "comfy_quant":
                text = json.dumps(layers[prefix + layer]).encode()
                tensors[f"{prefix}{layer}.comfy_quant"] = torch.tensor(list(text), dtype=torch.uint8)
    if form == "scaled_fp8":
        tensors["scaled_fp8"] = torch.zeros(2, dtype=torch.float8_e4m3fn)
    return tensors, {"_quantization_metadata": json.dumps({"layers": layers})} if form == "metadata" else {}


@pytest.mark.parametrize("form", ["comfy_quant", "scaled_fp8", "metadata"])
def test_the_quantised_files_that_core_reads_are_read(host, install, form):
    model = layouts.transformer()
    tensors, metadata = in_fp8(model, form)
    install("diffusion_models", "sana_fp8.safetensors", tensors, **metadata)
    patcher = host.output_of("SanaNodesModelLoader", model_name="sana_fp8.safetensors")
    layer = patcher.model.diffusion_model.transformer_blocks[0].attn1.to_q
    assert layer.quant_format == "float8_e4m3fn"
    check_forward(patcher, model, tolerance=1e-2)


def test_a_quantised_format_that_core_does_not_know_is_named(host, install):
    tensors = dict(layouts.transformer().state_dict())
    text = torch.tensor(list(b'{"format": "svdq-int4"}'), dtype=torch.uint8)
    tensors["transformer_blocks.0.attn1.to_q.comfy_quant"] = text
    install("diffusion_models", "sana_int4.safetensors", tensors)
    with pytest.raises(NodeError, match="sana_int4.safetensors: got .*, but its format is svdq-int4, exp"):
        host.output_of("SanaNodesModelLoader", model_name="sana_int4.safetensors")


@pytest.mark.parametrize("plain", ["norm", "norm|embed", "norm|mlp"])
@pytest.mark.parametrize("form", ["comfy_quant", "scaled_fp8", "metadata"])
def test_a_quantised_text_encoder_is_read(host, install, tokenizer, form, plain):
    """Comfy-Org's fp8 files of Gemma 2, whose names begin with model. and whose embedding is quantised, too."""
    model = layouts.gemma(vocabulary=750)
    tensors, metadata = in_fp8(model, form, "model.", plain)
    install("text_encoders", "gemma_fp8.safetensors", {**tensors, **tokenizer}, **metadata)
    graph = {
        "load": ("SanaNodesTextEncoderLoader", {"text_encoder_name": "gemma_fp8.safetensors"}),
        "text": ("SanaNodesTextEncode", {"clip": ["load", 0], "text": "a red circle", "instruction": False}),
        "catch clip": ("Catch", {"value": ["load", 0], "name": "clip"}),
        "catch text": ("Catch", {"value": ["text", 0], "name": "text"}),
    }
    got = host.run(graph)
    gemma = got["clip"].cond_stage_model.gemma
    assert gemma.layers[1].self_attn.q_proj.quant_format == "float8_e4m3fn"
    assert torch.equal(gemma.embed_tokens.weight.float(), model.embed_tokens.weight.float())
    ids = [pair[0] for pair in got["clip"].tokenize("a red circle", instruction=False)["gemma2_2b"][0]]
    with torch.no_grad():
        mask = torch.tensor([ids]).ne(0).long()
        expected = model.float()(torch.tensor([ids]), attention_mask=mask).last_hidden_state
    valid = mask.bool()
    torch.testing.assert_close(got["text"][0][0][valid], expected[valid], atol=1e-2, rtol=0)


def in_format(weight, name):
    """The tensors of a layer with `weight` in a format of `quantise`, and the dequantised weight."""
    import comfy.quant_ops

    algorithm, options = pack("nodes.host.loading.quantise").FORMATS[name]
    form = {"format": algorithm}
    if options.get("convrot"):
        form |= {"convrot": True, "convrot_groupsize": 64}
    if name in ("mxfp8", "nvfp4"):
        # A CPU rounds these formats at random only.
        options = {**options, "stochastic_rounding": 1}
    layout = comfy.quant_ops.QUANT_ALGOS[algorithm]["comfy_tensor_layout"]
    options = options | {key: value for key, value in form.items() if key != "format"}
    quantised = comfy.quant_ops.QuantizedTensor.from_float(weight, layout, **options)
    comfy_quant = torch.tensor(list(json.dumps(form).encode()), dtype=torch.uint8)
    return {**quantised.state_dict("weight"), "comfy_quant": comfy_quant}, quantised.dequantize()


FORMATS = ("fp8", "int8", "int8_convrot", "mxfp8", "nvfp4")


@pytest.mark.parametrize("inner", ["", "model."])
@pytest.mark.parametrize("name", FORMATS)
def test_an_embedding_and_a_head_in_any_format_are_read(host, install, tokenizer, name, inner):
    """A language model's file has its head, too, which nothing here uses."""
    model = layouts.gemma(vocabulary=750)
    tensors = {f"{inner}{key}": value for key, value in model.state_dict().items()}
    stored, expected = in_format(tensors.pop(f"{inner}embed_tokens.weight"), name)
    tensors |= {
        f"{layer}.{key}": value.clone()
        for layer in (f"{inner}embed_tokens", "lm_head")
        for key, value in stored.items()
    }
    install("text_encoders", "gemma_quantised.safetensors", {**tensors, **tokenizer, "logit_scale": torch.ones(())})
    clip = host.output_of("SanaNodesTextEncoderLoader", text_encoder_name="gemma_quantised.safetensors")
    embedding = clip.cond_stage_model.gemma.embed_tokens
    assert clip.cond_stage_model.gemma.config.hidden_size == layouts.CAPTION
    torch.testing.assert_close(embedding.weight[:750].float(), expected.float(), atol=0, rtol=2**-7)
    assert not embedding.weight[750:].any()
    with torch.inference_mode():
        assert pack("nodes.host.loading.clip").encode(clip, "a red circle", True)[0][0][0].isfinite().all()


def test_scales_of_weights_that_are_not_quantised_are_refused(host, install):
    tensors = dict(layouts.autoencoder().state_dict())
    tensors["decoder.up_blocks.3.1.attn.to_q.weight_scale"] = torch.ones(())
    install("vae", "dc-ae_fp8.safetensors", tensors)
    with pytest.raises(NodeError, match="dc-ae_fp8.safetensors: got the quantised layer .* weight_scale are"):
        host.output_of("SanaNodesVAELoader", vae_name="dc-ae_fp8.safetensors")
