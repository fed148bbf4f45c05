"""Files in ComfyUI's own folders, loaded by our nodes, draw what the bundled folder draws."""

import json

import layouts
import pytest
import torch
from in_process import NodeError

from sana_core.checkpoints.headers import read_file


@pytest.fixture
def put(host):
    """A function that saves tensors into one of ComfyUI's folders and takes them away after the test."""
    made = []

    def save(kind, name, tensors, **metadata):
        made.append(layouts.save(tensors, host.models / kind / name, **metadata))
        return name

    yield save
    for path in made:
        path.unlink()


def component(checkpoint, folder):
    """Tensors and configuration of a component of the bundled checkpoint."""
    file = next((checkpoint / folder).glob("*.safetensors"))
    return read_file(file), (checkpoint / folder / "config.json").read_text()


@pytest.fixture
def tokenizer(checkpoint):
    content = (checkpoint / "tokenizer" / "tokenizer.json").read_bytes()
    return {"tokenizer_json": torch.frombuffer(bytearray(content), dtype=torch.uint8)}


@pytest.fixture
def single_files(put, checkpoint, tokenizer):
    """Loader nodes over single files that hold the bundled checkpoint's components."""
    transformer, config = component(checkpoint, "transformer")
    put("diffusion_models", "sana.safetensors", transformer, config=config)
    gemma, config = component(checkpoint, "text_encoder")
    put("text_encoders", "gemma.safetensors", {**gemma, **tokenizer}, config=config)
    vae, config = component(checkpoint, "vae")
    put("vae", "dc-ae.safetensors", vae, config=config)
    return {
        "model": ("SanaNodesModelLoader", {"model_name": "sana.safetensors"}),
        "clip": ("SanaNodesTextEncoderLoader", {"text_encoder_name": "gemma.safetensors"}),
        "vae": ("SanaNodesVAELoader", {"vae_name": "dc-ae.safetensors"}),
    }


def rewire(graph, **sources):
    """The base graph with MODEL, CLIP and VAE of other nodes."""
    graph = {key: (name, dict(inputs)) for key, (name, inputs) in graph.items() if key != "load"}
    graph["sample"][1]["model"] = sources["model"]
    graph["positive"][1]["clip"] = graph["negative"][1]["clip"] = sources["clip"]
    graph["decode"][1]["vae"] = sources["vae"]
    return graph


def test_single_files_draw_the_bundled_checkpoints_picture(host, base_graph, single_files, checkpoint):
    expected = host.run(base_graph())
    scale = json.loads((checkpoint / "vae" / "config.json").read_text())["scaling_factor"]
    graph = {**rewire(base_graph(), model=["scaled", 0], clip=["clip", 0], vae=["vae", 0]), **single_files}
    graph["scaled"] = ("ScaleLatents", {"model": ["model", 0], "scale": scale})
    host.nodes.NODE_CLASS_MAPPINGS["ScaleLatents"] = ScaleLatents
    got = host.run(graph)
    assert torch.equal(got["latent"]["samples"], expected["latent"]["samples"])
    assert torch.equal(got["image"], expected["image"])


class ScaleLatents:
    """The bundled VAE has a scale of its own; a lone transformer is taken to belong to the released one."""

    RETURN_TYPES = ("MODEL",)
    FUNCTION = "scale"

    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {"model": ("MODEL",), "scale": ("FLOAT",)}}

    def scale(self, model, scale):
        assert model.model.latent_format.scale_factor == 0.41407
        model.model.latent_format.scale_factor = scale
        return (model,)


def all_in_one(tokenizer):
    """The released layout of each component under the prefixes of a checkpoint, and the modules."""
    models = layouts.transformer(), layouts.autoencoder(), layouts.gemma(vocabulary=750)
    parts = {
        "model.diffusion_model.": layouts.nvidia(models[0]),
        "first_stage_model.": layouts.mit(models[1]),
        "text_encoders.gemma2_2b.transformer.model.": models[2].state_dict(),
        "text_encoders.": tokenizer,
    }
    return {prefix + key: value for prefix, part in parts.items() for key, value in part.items()}, models


def check_all_three(got, models):
    modules = got["0"].model.diffusion_model, got["2"].first_stage_model, got["1"].cond_stage_model.gemma
    for module, model in zip(modules, models, strict=True):
        loaded = module.state_dict()
        assert all(torch.equal(loaded[key], value.float()) for key, value in model.state_dict().items())


@pytest.mark.parametrize("suffix", ["safetensors", "pth"])
def test_an_all_in_one_checkpoint_gives_all_three(host, put, tokenizer, suffix):
    tensors, models = all_in_one(tokenizer)
    if suffix == "pth":
        torch.save({"state_dict": tensors}, host.models / "checkpoints" / "all.pth")
    else:
        put("checkpoints", "all.safetensors", tensors)
    got = host.run({**catch_all("load"), "load": ("SanaNodesLoader", {"model": f"all.{suffix}"})})
    text = "SANA custom-1152x1, 1024 px (position embedding), original layout, bfloat16, as nvidia does"
    assert got["0"].model.model_config.text == text
    check_all_three(got, models)
    (host.models / "checkpoints" / "all.pth").unlink(missing_ok=True)


def test_what_core_saves_as_one_checkpoint_loads_again(host, put, tokenizer):
    """CheckpointSave writes our three objects, the tokenizer with them."""
    tensors, models = all_in_one(tokenizer)
    put("checkpoints", "all.safetensors", tensors)
    inputs = {"model": ["load", 0], "clip": ["load", 1], "vae": ["load", 2], "filename_prefix": "checkpoints/sana"}
    host.run({"load": ("SanaNodesLoader", {"model": "all.safetensors"}), "save": ("CheckpointSave", inputs)})
    (saved,) = host.output.glob("checkpoints/sana*.safetensors")
    tensors = read_file(saved)
    assert {key.split(".")[0] for key in tensors} == {"model", "text_encoders", "vae"}
    put("checkpoints", "again.safetensors", tensors)
    got = host.run({**catch_all("load"), "load": ("SanaNodesLoader", {"model": "again.safetensors"})})
    assert (
        got["0"].model.model_config.text
        == "SANA custom-1152x1, 1024 px (assumed), diffusers layout, float32, as diffusers does"
    )
    check_all_three(got, models)
    assert got["1"].tokenize("a red circle")["gemma2_2b"][0][0] == (2, 1.0)


def catch(node, slot):
    return {f"catch {slot}": ("Catch", {"value": [node, slot], "name": str(slot)})}


def catch_all(node):
    return {**catch(node, 0), **catch(node, 1), **catch(node, 2)}


@pytest.mark.parametrize("weight_dtype", ["fp8_e4m3fn", "fp8_e5m2"])
def test_fp8_weights_are_cast_as_they_run(host, put, weight_dtype):
    model = layouts.transformer()
    put("diffusion_models", "sana.safetensors", model.state_dict())
    inputs = {"model_name": "sana.safetensors", "weight_dtype": weight_dtype}
    patcher = host.run({"load": ("SanaNodesModelLoader", inputs), **catch("load", 0)})["0"]
    dtype = {"fp8_e4m3fn": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}[weight_dtype]
    parameters = dict(patcher.model.diffusion_model.named_parameters())
    assert parameters["transformer_blocks.0.attn1.to_q.weight"].dtype == dtype
    assert parameters["transformer_blocks.0.ff.conv_point.weight"].dtype == dtype
    assert parameters["scale_shift_table"].dtype == parameters["caption_norm.weight"].dtype == torch.float32
    for name, parameter in model.named_parameters():
        if parameters[name].dtype == dtype:
            parameter.data = parameter.data.to(dtype).float()
    check_forward(patcher, model)


def check_forward(patcher, model, tolerance=1e-5):
    x, context = torch.randn(1, 32, 3, 5), torch.randn(1, 7, layouts.CAPTION)
    sigma = torch.tensor([0.7])
    with torch.inference_mode():
        ours = patcher.model.apply_model(x, sigma, c_crossattn=context)
        theirs = x - 0.7 * model.float()(x, context, sigma * 1000).sample
    torch.testing.assert_close(ours, theirs, atol=tolerance, rtol=0)


@pytest.mark.parametrize("form", ["comfy_quant", "scaled_fp8", "metadata"])
def test_the_quantised_files_that_core_reads_are_read(host, put, form):
    model = layouts.transformer()
    tensors, formats = {}, {"layers": {}}
    for name, value in model.state_dict().items():
        layer, _, leaf = name.rpartition(".")
        if leaf != "weight" or value.ndim != 2 or "attn" not in name or "norm" in name:
            tensors[name] = value
            continue
        scale = value.float().abs().max() / 448
        tensors[name] = (value.float() / scale).to(torch.float8_e4m3fn)
        model.get_parameter(name).data = tensors[name].float() * scale
        tensors[f"{layer}.{'scale_weight' if form == 'scaled_fp8' else 'weight_scale'}"] = scale
        formats["layers"][layer] = {"format": "float8_e4m3fn"}
        if form == "comfy_quant":
            text = json.dumps(formats["layers"][layer]).encode()
            tensors[f"{layer}.comfy_quant"] = torch.tensor(list(text), dtype=torch.uint8)
    if form == "scaled_fp8":
        tensors["scaled_fp8"] = torch.zeros(2, dtype=torch.float8_e4m3fn)
    metadata = {"_quantization_metadata": json.dumps(formats)} if form == "metadata" else {}
    put("diffusion_models", "sana_fp8.safetensors", tensors, **metadata)
    patcher = host.run({"load": ("SanaNodesModelLoader", {"model_name": "sana_fp8.safetensors"}), **catch("load", 0)})[
        "0"
    ]
    layer = patcher.model.diffusion_model.transformer_blocks[0].attn1.to_q
    assert layer.quant_format == "float8_e4m3fn"
    check_forward(patcher, model, tolerance=1e-2)


def test_a_quantised_format_that_core_does_not_know_is_named(host, put):
    tensors = dict(layouts.transformer().state_dict())
    text = torch.tensor(list(b'{"format": "svdq-int4"}'), dtype=torch.uint8)
    tensors["transformer_blocks.0.attn1.to_q.comfy_quant"] = text
    put("diffusion_models", "sana_int4.safetensors", tensors)
    with pytest.raises(NodeError, match="sana_int4.safetensors: ComfyUI cannot read the quantised layer "):
        host.run({"load": ("SanaNodesModelLoader", {"model_name": "sana_int4.safetensors"}), **catch("load", 0)})


@pytest.mark.parametrize("form", ["scaled_fp8", "metadata"])
def test_a_quantised_text_encoder_is_read(host, put, tokenizer, form):
    """Comfy-Org's fp8 files of Gemma 2, whose names begin with model."""
    model = layouts.gemma(vocabulary=750)
    tensors, layers = dict(tokenizer), {}
    for name, value in model.state_dict().items():
        layer, _, leaf = name.rpartition(".")
        tensors[f"model.{name}"] = value
        if value.ndim == 2 and "embed" not in name:
            scale = value.float().abs().max() / 448
            tensors[f"model.{name}"] = (value.float() / scale).to(torch.float8_e4m3fn)
            tensors[f"model.{layer}.{'scale_weight' if form == 'scaled_fp8' else 'weight_scale'}"] = scale
            layers[f"model.{layer}"] = {"format": "float8_e4m3fn"}
            model.get_parameter(name).data = tensors[f"model.{name}"].float() * scale
    if form == "scaled_fp8":
        tensors["scaled_fp8"] = torch.zeros(2, dtype=torch.float8_e4m3fn)
    metadata = {"_quantization_metadata": json.dumps({"layers": layers})} if form == "metadata" else {}
    put("text_encoders", "gemma_fp8.safetensors", tensors, **metadata)
    graph = {
        "load": ("SanaNodesTextEncoderLoader", {"text_encoder_name": "gemma_fp8.safetensors"}),
        "text": ("SanaNodesTextEncode", {"clip": ["load", 0], "text": "a red circle", "instruction": False}),
        "catch text": ("Catch", {"value": ["text", 0], "name": "text"}),
    }
    got = host.run({**graph, **catch("load", 0)})
    assert got["0"].cond_stage_model.gemma.layers[1].mlp.up_proj.quant_format == "float8_e4m3fn"
    ids = [pair[0] for pair in got["0"].tokenize("a red circle", instruction=False)["gemma2_2b"][0]]
    with torch.no_grad():
        mask = torch.tensor([ids]).ne(0).long()
        expected = model.float()(torch.tensor([ids]), attention_mask=mask).last_hidden_state
    kept = mask.bool()
    torch.testing.assert_close(got["text"][0][0][kept], expected[kept], atol=1e-2, rtol=0)


def test_int8_layers_are_read(host, put):
    model = layouts.transformer()
    tensors = dict(model.state_dict())
    layer = "transformer_blocks.0.attn2.to_q"
    scale = tensors[f"{layer}.weight"].float().abs().max() / 127
    tensors[f"{layer}.weight"] = (tensors[f"{layer}.weight"].float() / scale).round().to(torch.int8)
    tensors[f"{layer}.weight_scale"] = scale
    tensors[f"{layer}.comfy_quant"] = torch.tensor(list(b'{"format": "int8_tensorwise"}'), dtype=torch.uint8)
    model.get_parameter(f"{layer}.weight").data = tensors[f"{layer}.weight"].float() * scale
    put("diffusion_models", "sana_int8.safetensors", tensors)
    patcher = host.run({"load": ("SanaNodesModelLoader", {"model_name": "sana_int8.safetensors"}), **catch("load", 0)})[
        "0"
    ]
    check_forward(patcher, model, tolerance=5e-2)


def test_a_quantised_vae_is_refused(host, put):
    tensors = dict(layouts.autoencoder().state_dict())
    tensors["decoder.up_blocks.3.1.attn.to_q.weight_scale"] = torch.ones(())
    put("vae", "dc-ae_fp8.safetensors", tensors)
    with pytest.raises(NodeError, match="dc-ae_fp8.safetensors: got quantised weights, which only ComfyUI"):
        host.run({"load": ("SanaNodesVAELoader", {"vae_name": "dc-ae_fp8.safetensors"}), **catch("load", 0)})


def test_quantised_weights_that_are_fused_are_refused(host, put):
    """NVIDIA's layout has one weight for q, k and v, which cannot be parted under one scale."""
    tensors = layouts.nvidia(layouts.transformer())
    tensors["blocks.0.attn.qkv.weight_scale"] = torch.ones(())
    put("diffusion_models", "nvidia_fp8.safetensors", tensors)
    with pytest.raises(NodeError, match="nvidia_fp8.safetensors: got quantised weights, which are read of trans"):
        host.run({"load": ("SanaNodesModelLoader", {"model_name": "nvidia_fp8.safetensors"}), **catch("load", 0)})


@pytest.mark.parametrize("field, value", [("weight_dtype", "int3"), ("resolution", "777"), ("resolution", "")])
def test_choices_through_links_are_checked(host, field, value):
    graph = {"value": ("AnyValue", {"value": value})}
    graph["load"] = ("SanaNodesLoader", {"model": "sana-tiny (bundled)", field: ["value", 0]})
    with pytest.raises(NodeError, match=f"^{field}: got '{value}', expected one of "):
        host.run({**graph, **catch("load", 0)})


@pytest.mark.parametrize("resolution, shift", [("auto", 3.0), ("4096", 6.0), ("512", 3.0)])
def test_the_resolution_can_be_overridden(host, put, resolution, shift):
    put("diffusion_models", "sana.safetensors", layouts.transformer().state_dict())
    inputs = {"model_name": "sana.safetensors", "resolution": resolution}
    patcher = host.run({"load": ("SanaNodesModelLoader", inputs), **catch("load", 0)})["0"]
    assert patcher.model.model_sampling.shift == shift
    config = patcher.model.diffusion_model.config
    assert config.sample_size == (1024 if resolution == "auto" else int(resolution)) // 32
    assert config.interpolation_scale == (2.0 if resolution == "4096" else None)
    shown = "1024 px (assumed)" if resolution == "auto" else f"{resolution} px (chosen)"
    told = f"SANA custom-1152x1, {shown}, diffusers layout, bfloat16, as diffusers does"
    assert patcher.model.model_config.text == told


def test_of_a_sharded_model_the_first_file_is_offered_and_stands_for_all(host, put):
    model = layouts.transformer()
    folder = host.models / "diffusion_models" / "sana"
    model.save_pretrained(folder, max_shard_size="10MB")
    options = host.nodes.NODE_CLASS_MAPPINGS["SanaNodesModelLoader"].INPUT_TYPES()["required"]["model_name"][1][
        "options"
    ]
    (name,) = [option for option in options if option.startswith("sana/")]
    patcher = host.run({"load": ("SanaNodesModelLoader", {"model_name": name}), **catch("load", 0)})["0"]
    check_forward(patcher, model)
    for file in folder.iterdir():
        file.unlink()


def test_a_file_that_went_away_after_it_was_listed_is_named(host, put):
    name = put("diffusion_models", "gone.safetensors", layouts.transformer().state_dict())
    path = host.models / "diffusion_models" / name
    kept = path.rename(path.with_suffix(".kept"))
    graph = {"name": ("AnyValue", {"value": name}), "load": ("SanaNodesModelLoader", {"model_name": ["name", 0]})}
    with pytest.raises(NodeError, match="^diffusion_models: no file 'gone.safetensors' in models/diffusion_"):
        host.run({**graph, **catch("load", 0)})
    kept.rename(path)


@pytest.mark.parametrize("name", ["../x.safetensors", "/etc/passwd", "x.ckpt", "", "a\0.safetensors"])
def test_names_outside_the_folder_are_refused(host, name):
    for node, field in (("SanaNodesModelLoader", "model_name"), ("SanaNodesVAELoader", "vae_name")):
        graph = {"name": ("AnyValue", {"value": name}), "load": (node, {field: ["name", 0]})}
        with pytest.raises(NodeError, match="^(diffusion_models|vae): (no file|got) "):
            host.run({**graph, **catch("load", 0)})


SMALL = {
    "vocab_size": 600,
    "hidden_size": layouts.CAPTION,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}


@pytest.mark.parametrize(
    "text, instruction",
    [("a red circle", True), ("a blurry picture", False), ("", False), ("a (red:1.4) circle, \u00fc", True)],
)
def test_cores_pixeldit_clip_gives_the_same_embeddings(host, put, spiece, monkeypatch, text, instruction):
    import comfy.text_encoders.llama as llama

    full = llama.Gemma2_2B_Config
    monkeypatch.setattr(llama, "Gemma2_2B_Config", lambda **settings: full(**{**SMALL, **settings}))
    tensors = {f"model.{key}": value for key, value in layouts.gemma(vocabulary=600).state_dict().items()}
    tensors["spiece_model"] = torch.frombuffer(bytearray(spiece), dtype=torch.uint8)
    name = put("text_encoders", "gemma_2_2b.safetensors", tensors)
    graph = {
        "core": ("CLIPLoader", {"clip_name": name, "type": "pixeldit"}),
        "ours": ("SanaNodesTextEncoderLoader", {"text_encoder_name": name}),
    }
    for clip in ("core", "ours"):
        graph[f"{clip} text"] = ("SanaNodesTextEncode", {"clip": [clip, 0], "text": text, "instruction": instruction})
        graph[f"catch {clip}"] = ("Catch", {"value": [f"{clip} text", 0], "name": clip})
    got = host.run(graph)
    (theirs, their_extra), (ours, our_extra) = got["core"][0], got["ours"][0]
    assert ours.shape == theirs.shape == (1, 300, layouts.CAPTION)
    assert torch.equal(our_extra["attention_mask"], their_extra["attention_mask"])
    kept = our_extra["attention_mask"].bool()
    torch.testing.assert_close(ours[kept], theirs[kept], atol=1e-4, rtol=0)


def test_another_clip_is_refused_before_anything_is_encoded(host, put, spiece, monkeypatch):
    import comfy.text_encoders.llama as llama

    full = llama.Gemma2_2B_Config
    monkeypatch.setattr(llama, "Gemma2_2B_Config", lambda **settings: full(**{**SMALL, "num_hidden_layers": 3}))
    tensors = {f"model.{key}": value for key, value in layouts.gemma(vocabulary=600).state_dict().items()}
    tensors["spiece_model"] = torch.frombuffer(bytearray(spiece), dtype=torch.uint8)
    name = put("text_encoders", "gemma_2_2b.safetensors", tensors)
    graph = {
        "clip": ("CLIPLoader", {"clip_name": name, "type": "lumina2"}),
        "text": ("SanaNodesTextEncode", {"clip": ["clip", 0], "text": "a red circle", "instruction": True}),
        "catch": ("Catch", {"value": ["text", 0], "name": "text"}),
    }
    with pytest.raises(NodeError, match="^clip: got Lumina.*, expected SANA's Gemma 2; use SANA Loader, "):
        host.run(graph)


def test_a_fp16_text_encoder_and_vae_run_wider(host, put, tokenizer):
    gemma = {key: value.half() for key, value in layouts.gemma(vocabulary=750).state_dict().items()}
    put("text_encoders", "gemma_fp16.safetensors", {**gemma, **tokenizer})
    vae = {key: value.half() for key, value in layouts.autoencoder().state_dict().items()}
    put("vae", "dc-ae_fp16.safetensors", vae)
    graph = {
        "clip": ("SanaNodesTextEncoderLoader", {"text_encoder_name": "gemma_fp16.safetensors"}),
        "vae": ("SanaNodesVAELoader", {"vae_name": "dc-ae_fp16.safetensors"}),
        "catch 0": ("Catch", {"value": ["clip", 0], "name": "clip"}),
        "catch 1": ("Catch", {"value": ["vae", 0], "name": "vae"}),
    }
    got = host.run(graph)
    assert {p.dtype for p in got["clip"].cond_stage_model.parameters()} == {torch.float32}
    assert {p.dtype for p in got["vae"].first_stage_model.parameters()} == {torch.float32}


def test_the_folders_of_extra_model_paths_count(host, tmp_path, checkpoint):
    """As main.py reads the file at its start."""
    import shutil

    import folder_paths
    from utils.extra_config import load_extra_path_config

    kept = {kind: (list(paths), kinds) for kind, (paths, kinds) in folder_paths.folder_names_and_paths.items()}
    elsewhere = tmp_path / "elsewhere"
    shutil.copytree(checkpoint, elsewhere / "diffusers" / "mine")
    layouts.save(layouts.transformer().state_dict(), elsewhere / "unet" / "sana.safetensors")
    config = tmp_path / "extra_model_paths.yaml"
    config.write_text(f"other:\n  base_path: {elsewhere}\n  diffusers: diffusers/\n  diffusion_models: unet/\n")
    try:
        load_extra_path_config(str(config))
        got = host.run({"load": ("SanaNodesLoader", {"model": "mine"}), **catch_all("load")})
        assert got["0"].model.model_config.text.startswith("SANA custom-160x5, 128 px (config)")
        got = host.run({"load": ("SanaNodesModelLoader", {"model_name": "sana.safetensors"}), **catch("load", 0)})
        assert got["0"].model.model_config.text.startswith("SANA custom-1152x1")
    finally:
        folder_paths.folder_names_and_paths.update(kept)
