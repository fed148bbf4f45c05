"""Files in ComfyUI's folders, loaded by our nodes, give the same image as the bundled folder."""

import json
import shutil

import layouts
import pytest
import torch
from fake_cuda import pack
from in_process import NodeError
from loading import catch_all, check_forward

from sana_core.checkpoints.headers import read_file


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
    # the bundled VAE has a scale of its own; a lone transformer is taken to belong to the released one
    model = host.output_of(single_files["model"][0], **single_files["model"][1])
    assert model.model.latent_format.scale_factor == 0.41407
    model.model.latent_format.scale_factor = scale
    graph["scaled"] = ("AnyValue", {"value": model})
    # a text encoder alone reads as NVIDIA's programs where nothing is chosen
    chosen = base_graph()
    chosen["positive"][1]["clip"] = ["clip", 0]
    chosen["clip"] = single_files["clip"]
    assert not torch.equal(host.run(chosen)["latent"]["samples"], expected["latent"]["samples"])
    graph["clip"][1]["reference"] = "diffusers"
    got = host.run(graph)
    assert torch.equal(got["latent"]["samples"], expected["latent"]["samples"])
    assert torch.equal(got["image"], expected["image"])


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
def test_an_all_in_one_checkpoint_gives_all_three(host, install, tokenizer, suffix):
    tensors, models = all_in_one(tokenizer)
    if suffix == "pth":
        torch.save({"state_dict": tensors}, host.models / "checkpoints" / "all.pth")
    else:
        install("checkpoints", "all.safetensors", tensors)
    got = host.run({**catch_all("load"), "load": ("SanaNodesLoader", {"model": f"all.{suffix}"})})
    text = "SANA 31.7M, 1024 px (position embedding), NVIDIA's layout, bfloat16"
    assert got["0"].model.model_config.text == text
    check_all_three(got, models)
    (host.models / "checkpoints" / "all.pth").unlink(missing_ok=True)


@pytest.mark.parametrize("field, value", [("weight_dtype", "int3"), ("resolution", "777"), ("resolution", "")])
def test_choices_through_links_are_checked(host, field, value):
    with pytest.raises(NodeError, match=f"^{field}: got '{value}', expected one of "):
        host.output_of("SanaNodesLoader", linked={field: value}, model="sana-tiny")


@pytest.mark.parametrize("resolution, shift", [("auto", 3.0), ("4096", 6.0), ("512", 3.0)])
def test_the_resolution_can_be_overridden(host, install, resolution, shift):
    install("diffusion_models", "sana.safetensors", layouts.transformer().state_dict())
    patcher = host.output_of("SanaNodesModelLoader", model_name="sana.safetensors", resolution=resolution)
    assert patcher.model.model_sampling.shift == shift
    config = patcher.model.diffusion_model.config
    assert config.sample_size == (1024 if resolution == "auto" else int(resolution)) // 32
    assert config.interpolation_scale == (2.0 if resolution == "4096" else None)
    shown = "1024 px (assumed)" if resolution == "auto" else f"{resolution} px (chosen)"
    message = f"SANA 31.7M, {shown}, diffusers layout, bfloat16"
    assert patcher.model.model_config.text == message


def test_of_a_sharded_model_the_first_file_is_offered_and_stands_for_all(host, install):
    model = layouts.transformer()
    folder = host.models / "diffusion_models" / "sana"
    model.save_pretrained(folder, max_shard_size="10MB")
    required = host.nodes.NODE_CLASS_MAPPINGS["SanaNodesModelLoader"].INPUT_TYPES()["required"]
    (name,) = [option for option in required["model_name"][1]["options"] if option.startswith("sana/")]
    check_forward(host.output_of("SanaNodesModelLoader", model_name=name), model)
    for file in folder.iterdir():
        file.unlink()


def test_a_file_that_went_away_after_it_was_listed_is_named(host, install):
    name = install("diffusion_models", "gone.safetensors", layouts.transformer().state_dict())
    path = host.models / "diffusion_models" / name
    renamed = path.rename(path.with_suffix(".kept"))
    with pytest.raises(NodeError, match="^model_name: no file 'gone.safetensors' in models/diffusion_"):
        host.output_of("SanaNodesModelLoader", linked={"model_name": name})
    renamed.rename(path)


def test_a_missing_released_folder_comes_with_the_command_that_downloads_it(host):
    name = "SANA-Video_2B_480p_diffusers"
    command = (
        f"python -m huggingface_hub.cli.hf download Efficient-Large-Model/{name} --local-dir models/diffusers/{name}"
    )
    with pytest.raises(NodeError, match=f"^model: no folder '{name}' in models/diffusers; run {command} in ComfyUI"):
        host.output_of("SanaNodesLoader", linked={"model": name})


@pytest.mark.parametrize("name", ["../x.safetensors", "/etc/passwd", "x.ckpt", "", "a\0.safetensors", {}, 7, None])
@pytest.mark.parametrize(
    "node, field",
    [("Loader", "model"), ("ModelLoader", "model_name"), ("VAELoader", "vae_name"), ("ScorerLoader", "scorer_name")],
)
def test_names_outside_the_folder_and_what_is_no_name_are_refused(host, node, field, name):
    with pytest.raises(NodeError, match=f"^{field}: (no file|got) "):
        host.output_of(f"SanaNodes{node}", linked={field: name})


SMALL = {
    "vocab_size": 600,
    "hidden_size": layouts.CAPTION,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}


@pytest.fixture
def small_gemma(install, spiece, monkeypatch):
    """A function that puts a small Gemma 2 with its tokenizer among the text encoders, and has core build that size."""
    import comfy.text_encoders.llama as llama

    full = llama.Gemma2_2B_Config

    def make(rows=600, **changes):
        tensors = {f"model.{key}": value for key, value in layouts.gemma(vocabulary=rows).state_dict().items()}
        tensors["spiece_model"] = torch.frombuffer(bytearray(spiece), dtype=torch.uint8)
        config = SMALL | {"vocab_size": rows} | changes
        monkeypatch.setattr(llama, "Gemma2_2B_Config", lambda **settings: full(**{**settings, **config}))
        return install("text_encoders", "gemma_2_2b.safetensors", tensors)

    return make


@pytest.mark.parametrize(
    "text, instruction",
    [("a red circle", True), ("a blurry picture", False), ("", False), ("a (red:1.4) circle, \u00fc", True)],
)
def test_cores_pixeldit_clip_gives_the_same_embeddings(host, small_gemma, text, instruction):
    name = small_gemma()
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
    valid = our_extra["attention_mask"].bool()
    torch.testing.assert_close(ours[valid], theirs[valid], atol=1e-4, rtol=0)


def test_tokens_that_cores_pixeldit_clip_has_no_rows_for_are_refused(host, small_gemma):
    """On a GPU they would end the process."""
    graph = {
        "clip": ("CLIPLoader", {"clip_name": small_gemma(rows=400), "type": "pixeldit"}),
        "text": ("SanaNodesTextEncode", {"clip": ["clip", 0], "text": "a red circle", "instruction": False}),
        "catch": ("Catch", {"value": ["text", 0], "name": "text"}),
    }
    with pytest.raises(NodeError, match=r"^clip: got tokens from \d+ to \d{3}, expected 0 to 399; use the model's own"):
        host.run(graph)


def test_another_clip_is_refused_before_anything_is_encoded(host, small_gemma):
    name = small_gemma(num_hidden_layers=3)
    graph = {
        "clip": ("CLIPLoader", {"clip_name": name, "type": "lumina2"}),
        "text": ("SanaNodesTextEncode", {"clip": ["clip", 0], "text": "a red circle", "instruction": True}),
        "catch": ("Catch", {"value": ["text", 0], "name": "text"}),
    }
    with pytest.raises(NodeError, match="^clip: got Lumina.*, expected SANA's Gemma 2; connect SANA Loader or"):
        host.run(graph)


def test_a_fp16_text_encoder_and_vae_run_wider(host, install, tokenizer):
    gemma = {key: value.half() for key, value in layouts.gemma(vocabulary=750).state_dict().items()}
    install("text_encoders", "gemma_fp16.safetensors", {**gemma, **tokenizer})
    vae = {key: value.half() for key, value in layouts.autoencoder().state_dict().items()}
    install("vae", "dc-ae_fp16.safetensors", vae)
    clip = host.output_of("SanaNodesTextEncoderLoader", text_encoder_name="gemma_fp16.safetensors")
    vae = host.output_of("SanaNodesVAELoader", vae_name="dc-ae_fp16.safetensors")
    assert {p.dtype for p in vae.first_stage_model.parameters()} == {torch.float32}
    # On a CPU the layers of Gemma keep their 16 bits in memory, and compute in float32.
    gemma = clip.cond_stage_model.gemma
    assert {weight.dtype for name, weight in gemma.named_parameters() if "norm" not in name} == {torch.float16}
    with torch.inference_mode():
        embeds = pack("nodes.host.loading.clip").encode(clip, "a red circle", True)[0][0][0]
    assert embeds.dtype == torch.float32 and embeds.isfinite().all()


def test_the_folders_of_extra_model_paths_count(host, tmp_path, checkpoint):
    """As main.py reads the file at its start."""
    import folder_paths
    from utils.extra_config import load_extra_path_config

    saved = {kind: (list(paths), kinds) for kind, (paths, kinds) in folder_paths.folder_names_and_paths.items()}
    elsewhere = tmp_path / "elsewhere"
    shutil.copytree(checkpoint, elsewhere / "diffusers" / "mine")
    layouts.save(layouts.transformer().state_dict(), elsewhere / "unet" / "sana.safetensors")
    config = tmp_path / "extra_model_paths.yaml"
    config.write_text(f"other:\n  base_path: {elsewhere}\n  diffusers: diffusers/\n  diffusion_models: unet/\n")
    try:
        load_extra_path_config(str(config))
        outputs = host.output_of("SanaNodesLoader", model="mine")
        assert outputs.model.model_config.text.startswith("SANA 2.3M, 128 px,")
        single = host.output_of("SanaNodesModelLoader", model_name="sana.safetensors")
        assert single.model.model_config.text.startswith("SANA 31.7M,")
    finally:
        folder_paths.folder_names_and_paths.update(saved)


def options_of(host, node, field):
    return host.nodes.NODE_CLASS_MAPPINGS[node].INPUT_TYPES()["required"][field][1]["options"]


@pytest.mark.parametrize("place", ["sub", "author/model", "a b/c-d/e.f", "Efficient-Large-Model/Sana_600M_512px"])
def test_a_file_is_found_by_the_name_that_a_workflow_from_windows_has(host, install, single_files, place):
    """Of each kind, in folders of one, two and three levels, with separators of one system or of both."""
    files = {"model": "diffusion_models", "clip": "text_encoders", "vae": "vae"}
    for part, kind in files.items():
        node, inputs = single_files[part]
        ((field, name),) = inputs.items()
        listed = install(kind, f"{place}/{name}", read_file(host.models / kind / name))
        assert listed in options_of(host, node, field)
        find = host.nodes.NODE_CLASS_MAPPINGS[node].find
        expected = host.models / kind / listed
        names = [listed, listed.replace("/", "\\"), listed.replace("/", "\\", 1)]
        assert [find(name) for name in names] == [expected] * 3
        with pytest.raises(FileNotFoundError, match="no file .*other"):
            find(names[1].replace(name, f"other{name}"))


def test_a_backslash_in_a_name_on_linux_is_part_of_the_name(host, install):
    tensors = layouts.transformer().state_dict()
    for name in ("a\\sana.safetensors", "a/sana.safetensors"):
        install("diffusion_models", name, tensors)
    find = host.nodes.NODE_CLASS_MAPPINGS["SanaNodesModelLoader"].find
    assert find("a\\sana.safetensors").name == "a\\sana.safetensors"
    assert find("a/sana.safetensors").name == "sana.safetensors"


def test_a_backslash_leads_to_no_file_outside_the_folder(host, install):
    install("vae", "secret.safetensors", layouts.autoencoder().state_dict())
    find = host.nodes.NODE_CLASS_MAPPINGS["SanaNodesModelLoader"].find
    for name in ("..\\vae\\secret.safetensors", "sub\\..\\..\\vae/secret.safetensors", "\\vae\\secret.safetensors"):
        with pytest.raises(FileNotFoundError, match="no file"):
            find(name)


HUB = "models--Efficient-Large-Model--Sana_600M_512px_diffusers/snapshots/0123456789abcdef"


@pytest.fixture
def model_folder(host, checkpoint):
    """A function that puts the bundled checkpoint at a place in models/diffusers, its files as links like the hub's."""
    roots = []

    def make(place):
        roots.append(host.models / "diffusers" / place.split("/")[0])
        blobs = roots[-1] / "blobs"
        blobs.mkdir(parents=True)
        for number, file in enumerate(file for file in sorted(checkpoint.rglob("*")) if file.is_file()):
            shutil.copy(file, blobs / str(number))
            link = host.models / "diffusers" / place / file.relative_to(checkpoint)
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(blobs / str(number))
        return place

    yield make
    for root in roots:
        shutil.rmtree(root)


@pytest.mark.parametrize("place", ["one", "author/model", "a/b/c", "a/b/c/d/e", HUB, f"hub/{HUB}"])
def test_a_model_folder_at_any_depth_is_listed_and_loads(host, model_folder, place):
    model_folder(place)
    assert place in options_of(host, "SanaNodesLoader", "model")
    patcher = host.output_of("SanaNodesLoader", linked={"model": place.replace("/", "\\")})
    assert patcher.model.model_config.text.startswith("SANA 2.3M, 128 px")
    # ComfyUI's own loader lists the same name.
    assert place in host.nodes.NODE_CLASS_MAPPINGS["DiffusersLoader"].INPUT_TYPES()["required"]["model_path"][0]


def test_inside_of_a_model_and_around_a_circle_of_links_there_is_no_other_model(host, model_folder):
    root = host.models / "diffusers"
    model_folder("whole/model")
    (root / "whole" / "model" / "transformer" / "model_index.json").write_text("{}")
    (root / "whole" / "up").symlink_to(root / "whole", target_is_directory=True)
    (root / "whole" / ".hidden").mkdir()
    (root / "whole" / ".hidden" / "model_index.json").write_text("{}")
    (root / "whole" / "gone").symlink_to(root / "nowhere", target_is_directory=True)
    models = [name for name in options_of(host, "SanaNodesLoader", "model") if name.startswith("whole")]
    assert models == ["whole/model"]


def test_a_link_that_cannot_be_followed_hides_no_other_folder(host, model_folder):
    model_folder("beside/model")
    # The operating system refuses names of more than 255 bytes.
    (host.models / "diffusers" / "beside" / "a link").symlink_to("x" * 300, target_is_directory=True)
    models = [name for name in options_of(host, "SanaNodesLoader", "model") if name.startswith("beside")]
    assert models == ["beside/model"]


def test_a_chain_of_folders_with_two_links_each_is_searched_once(host, model_folder):
    # 2^30 paths lead to the last folder.
    root, last = host.models / "diffusers" / "chain", 30
    model_folder(f"chain/{last}/model")
    for number in range(last):
        (root / str(number)).mkdir()
        for link in ("a", "b"):
            (root / str(number) / link).symlink_to(root / str(number + 1), target_is_directory=True)
    (root / "0" / "linked").symlink_to(root / str(last) / "model", target_is_directory=True)
    models = [name for name in options_of(host, "SanaNodesLoader", "model") if name.startswith("chain")]
    assert models == ["chain/0/linked", f"chain/{last}/model"]
    assert host.output_of("SanaNodesLoader", model="chain/0/linked").model.model_config.text.startswith("SANA 2.3M")


def test_a_scorer_in_a_cache_of_the_hub_is_listed(host, clip):
    place = "models--yuvalkirstain--PickScore_v1/snapshots/0123"
    folder = host.models / "clip_vision" / place
    shutil.copytree(clip, folder)
    assert place in options_of(host, "SanaNodesScorerLoader", "scorer_name")
    find = host.nodes.NODE_CLASS_MAPPINGS["SanaNodesScorerLoader"].find
    assert find(place) == find(place.replace("/", "\\")) == folder
    shutil.rmtree(host.models / "clip_vision" / "models--yuvalkirstain--PickScore_v1")


@pytest.mark.parametrize("part", ["transformer", "text_encoder", "vae"])
def test_interrupt_is_heard_between_two_tensors(host, base_graph, monkeypatch, part):
    """Of each part that SANA Loader reads."""
    load = pack("sana_core.checkpoints.load")
    real, looked = load.check_finite, []

    def check_finite(name, key, tensor):
        if part in str(name):
            looked.append(key)
            host.nodes.interrupt_processing(len(looked) == 2)
        return real(name, key, tensor)

    expected = host.run(base_graph())["image"]
    with monkeypatch.context() as patch:
        patch.setattr(load, "check_finite", check_finite)
        with pytest.raises(InterruptedError):
            host.run(base_graph())
    assert len(looked) == 2
    host.nodes.interrupt_processing(False)
    assert torch.equal(host.run(base_graph())["image"], expected)


def test_what_a_checkpoint_s_notes_say_is_under_each_loader(host, install, node_texts, tokenizer):
    """A diffusers folder reads prompts in lower case, and a 4K file is beside the config.json of a 1K model."""
    host.output_of("SanaNodesLoader", model="sana-tiny")
    assert "prompts: read in lower case" in node_texts[-1][1] and node_texts[-1][1].startswith("SANA 2.3M")
    install("diffusion_models", "shared/Sana_4Kpx.safetensors", layouts.transformer(resolution=4096).state_dict())
    config = host.models / "diffusion_models" / "shared" / "config.json"
    config.write_text(layouts.with_config(layouts.transformer()))
    patcher = host.output_of("SanaNodesModelLoader", model_name="shared/Sana_4Kpx.safetensors")
    config.unlink()
    assert patcher.model.model_sampling.shift == 6.0
    assert "config.json beside it has 1024 px" in node_texts[-1][1]
    gemma = {**layouts.gemma(vocabulary=750).state_dict(), **tokenizer}
    install("text_encoders", "gemma.safetensors", gemma)
    host.output_of("SanaNodesTextEncoderLoader", text_encoder_name="gemma.safetensors", reference="diffusers")
    assert "prompts: read in lower case" in node_texts[-1][1]
