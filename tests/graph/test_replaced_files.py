"""Loaders notice replaced files. A file that is lost or damaged while its model is loaded causes no crash."""

import os
import shutil
from pathlib import Path

import layouts
import pytest
import torch
from forked import Forked
from in_process import Catch, NodeError
from loading import component
from safetensors.torch import load_file, save_file
from setup import ROOT
from test_lora import ours, with_lora, written

LOADERS = {
    "SanaNodesModelLoader": ("diffusion_models", "model_name"),
    "SanaNodesTextEncoderLoader": ("text_encoders", "text_encoder_name"),
    "SanaNodesVAELoader": ("vae", "vae_name"),
    "SanaNodesControlNetLoader": ("controlnet", "control_net_name"),
    "SanaNodesLoraLoader": ("loras", "lora_name"),
}


def fingerprint(host, loader, name):
    field = {"SanaNodesLoader": "model", "SanaNodesScorerLoader": "scorer_name"}.get(loader) or LOADERS[loader][1]
    return host.nodes.NODE_CLASS_MAPPINGS[loader].fingerprint_inputs(**{field: name})


def touch(file, nanoseconds=1):
    os.utime(file, ns=(0, file.stat().st_mtime_ns + nanoseconds))


@pytest.mark.parametrize("loader", LOADERS)
def test_a_loaders_fingerprint_changes_with_size_and_time_of_its_file(host, install, loader):  # noqa: F811
    kind, _ = LOADERS[loader]
    install(kind, "one.safetensors", {"a": torch.zeros(2)})
    file = host.models / kind / "one.safetensors"
    first = fingerprint(host, loader, "one.safetensors")
    assert fingerprint(host, loader, "one.safetensors") == first
    touch(file)
    second = fingerprint(host, loader, "one.safetensors")
    assert second != first
    time = file.stat().st_mtime_ns
    os.truncate(file, 10)
    os.utime(file, ns=(0, time))
    assert fingerprint(host, loader, "one.safetensors") not in (first, second)


@pytest.mark.parametrize("loader", ["SanaNodesLoader", "SanaNodesScorerLoader", *LOADERS])
@pytest.mark.parametrize("name", ["gone.safetensors", "", 5, "..", "a\0b.safetensors"])
def test_a_fingerprint_of_a_missing_file_raises_nothing(host, loader, name):
    assert fingerprint(host, loader, name) == "missing"


def test_every_node_that_reads_a_file_has_a_fingerprint(host):
    """Every list of files in a node ends with bundled ones, so the schemas say which nodes read files."""
    readers = {"SanaNodesTrainSettings"}
    for name, node in host.nodes.NODE_CLASS_MAPPINGS.items():
        if name.startswith("SanaNodes"):
            lists = [getattr(entry, "options", None) or [] for entry in node.define_schema().inputs]
            readers |= {name for options in lists if any("(bundled)" in str(option) for option in options)}
    assert {"SanaNodesLoader", "SanaNodesScorerLoader", "SanaNodesDataset", *LOADERS} <= readers
    plain = host.nodes.NODE_CLASS_MAPPINGS["SanaNodesSampler"].fingerprint_inputs.__func__
    for name in readers:
        assert host.nodes.NODE_CLASS_MAPPINGS[name].fingerprint_inputs.__func__ is not plain, name


@pytest.mark.parametrize("loader", LOADERS)
def test_the_fingerprint_of_a_linked_name_changes_with_any_file_it_could_mean(host, install, loader):  # noqa: F811
    """ComfyUI passes None for a link, because the node that outputs the name has not run yet."""
    kind, _ = LOADERS[loader]
    before = fingerprint(host, loader, None)
    assert before != "missing" and fingerprint(host, loader, None) == before
    install(kind, "one.safetensors", {"a": torch.zeros(2)})
    added = fingerprint(host, loader, None)
    assert added != before
    touch(host.models / kind / "one.safetensors")
    assert fingerprint(host, loader, None) != added


@pytest.mark.parametrize("loader", ["SanaNodesLoader", "SanaNodesScorerLoader"])
@pytest.mark.parametrize("is_linked", [False, True])
def test_the_fingerprint_of_a_folder_changes_with_its_weights(host, checkpoint, loader, is_linked):
    scorer = ROOT / "demo" / "sana-posters-scorer"
    kind, source = ("diffusers", checkpoint) if loader == "SanaNodesLoader" else ("clip_vision", scorer)
    folder = shutil.copytree(source, host.models / kind / "stamped")
    field = "model" if loader == "SanaNodesLoader" else "scorer_name"
    node = host.nodes.NODE_CLASS_MAPPINGS[loader]
    inputs = {field: None if is_linked else "stamped"}
    try:
        before = node.fingerprint_inputs(**inputs)
        assert before not in ("missing", "") and node.fingerprint_inputs(**inputs) == before
        touch(next(folder.rglob("*.safetensors")))
        assert node.fingerprint_inputs(**inputs) != before
    finally:
        shutil.rmtree(folder)


@pytest.mark.parametrize("is_linked", [False, True])
def test_a_data_sets_fingerprint_changes_with_its_images(host, is_linked):
    import folder_paths

    folder = shutil.copytree(ROOT / "recipes" / "cyanotypes", f"{folder_paths.get_input_directory()}/stamped")
    node = host.nodes.NODE_CLASS_MAPPINGS["SanaNodesDataset"]
    try:
        name = None if is_linked else "stamped"
        before = node.fingerprint_inputs(folder=name)
        assert before != "missing" and node.fingerprint_inputs(folder=name) == before
        touch(next(file for file in Path(folder).iterdir() if file.suffix in (".png", ".jpg", ".webp")))
        assert node.fingerprint_inputs(folder=name) != before
    finally:
        shutil.rmtree(folder)


def test_a_linked_lora_to_train_further_is_fingerprinted(host, install):  # noqa: F811
    node = host.nodes.NODE_CLASS_MAPPINGS["SanaNodesTrainSettings"]
    before = node.fingerprint_inputs(existing_lora=None)
    install("loras", "one.safetensors", {"a": torch.zeros(2)})
    assert node.fingerprint_inputs(existing_lora=None) != before


def test_a_sharded_models_fingerprint_changes_with_each_file(host):
    folder = host.models / "diffusion_models" / "sharded"
    folder.mkdir(parents=True)
    names = ["big-00001-of-00002.safetensors", "big-00002-of-00002.safetensors", "big.safetensors.index.json"]
    for name in [*names, "config.json", "other.safetensors"]:
        (folder / name).write_text("x")
    try:
        for name in [*names, "config.json"]:
            before = fingerprint(host, "SanaNodesModelLoader", f"sharded/{names[0]}")
            touch(folder / name)
            assert fingerprint(host, "SanaNodesModelLoader", f"sharded/{names[0]}") != before, name
        before = fingerprint(host, "SanaNodesModelLoader", f"sharded/{names[0]}")
        touch(folder / "other.safetensors")
        assert fingerprint(host, "SanaNodesModelLoader", f"sharded/{names[0]}") == before
    finally:
        shutil.rmtree(folder)


def test_a_folders_fingerprint_changes_with_each_file_that_is_read(host, checkpoint):
    folder = shutil.copytree(checkpoint, host.models / "diffusers" / "stamped")
    try:
        files = [file for file in folder.rglob("*") if file.is_file()]
        assert len(files) > 8
        for file in files:
            before = fingerprint(host, "SanaNodesLoader", "stamped")
            touch(file)
            after = fingerprint(host, "SanaNodesLoader", "stamped")
            assert after != before, file
        (folder / "README.md").write_text("nothing that is read")
        assert fingerprint(host, "SanaNodesLoader", "stamped") == after
    finally:
        shutil.rmtree(folder)


@pytest.fixture(params=["CLASSIC", "LRU", "RAM_PRESSURE"])
def cached(request, host, monkeypatch):
    """The host with each of ComfyUI's caches."""
    kind = host.execution.CacheType[request.param]
    executor = host.execution.PromptExecutor(host.server, kind, {"lru": 50, "ram": 0.0, "ram_inactive": 0.0})
    monkeypatch.setattr(host, "executor", executor)
    return host


def test_a_replaced_model_and_lora_are_loaded_anew_under_each_cache(cached, base_graph, single_files, install):  # noqa: F811
    install("loras", "style.safetensors", written("diffusers"))
    graph = with_lora({**base_graph(steps=1), "model": single_files["model"]}, lora=ours("style.safetensors"))
    graph["lora"][1]["model"] = ["model", 0]

    first = cached.run(graph, keep_cache=True)["latent"]["samples"]
    assert cached.run(graph, keep_cache=True) == {}  # nothing ran

    stronger = {key: 2 * tensor for key, tensor in written("diffusers").items()}
    layouts.save(stronger, cached.models / "loras" / "style.safetensors")
    second = cached.run(graph, keep_cache=True)["latent"]["samples"]
    assert not torch.equal(second, first)

    transformer, config = component(ROOT / "tests" / "models" / "sana-tiny", "transformer")
    transformer = {name: 0.9 * tensor for name, tensor in transformer.items()}
    layouts.save(transformer, cached.models / "diffusion_models" / "sana.safetensors", config=config)
    third = cached.run(graph, keep_cache=True)["latent"]["samples"]
    assert not torch.equal(third, second)
    assert torch.equal(cached.run(graph)["latent"]["samples"], third)


def test_a_replaced_lora_with_a_linked_name_is_loaded_again(host, base_graph, install):  # noqa: F811
    install("loras", "style.safetensors", written("diffusers"))
    graph = with_lora(base_graph(steps=1), lora=ours(["name", 0]))
    graph["name"] = ("AnyValue", {"value": "style.safetensors"})
    first = host.run(graph, keep_cache=True)["latent"]["samples"]
    assert host.run(graph, keep_cache=True) == {}  # nothing ran
    stronger = {key: 2 * tensor for key, tensor in written("diffusers").items()}
    layouts.save(stronger, host.models / "loras" / "style.safetensors")
    assert not torch.equal(host.run(graph, keep_cache=True)["latent"]["samples"], first)


def test_a_replaced_scorer_is_loaded_again(host):
    folder = shutil.copytree(ROOT / "demo" / "sana-posters-scorer", host.models / "clip_vision" / "replaced")
    graph = {
        "scorer": ("SanaNodesScorerLoader", {"scorer_name": "replaced"}),
        "catch": ("Catch", {"value": ["scorer", 0], "name": "scorer"}),
    }
    try:
        first = host.run(graph, keep_cache=True)["scorer"]
        assert host.run(graph, keep_cache=True) == {}  # nothing ran
        file = folder / "model.safetensors"
        weights = load_file(file)
        save_file({name: tensor.clone() + (name == "logit_scale") for name, tensor in weights.items()}, file)
        second = host.run(graph, keep_cache=True)["scorer"]
        assert second.scorer.model.logit_scale == first.scorer.model.logit_scale + 1
    finally:
        shutil.rmtree(folder)


def test_a_file_that_is_gone_or_broken_is_named_though_it_is_cached(cached, base_graph, single_files):  # noqa: F811
    graph = {"model": single_files["model"], "catch": ("Catch", {"value": ["model", 0], "name": "model"})}
    cached.run(graph, keep_cache=True)
    file = cached.models / "diffusion_models" / "sana.safetensors"
    content = file.read_bytes()
    os.truncate(file, 100)
    with pytest.raises(NodeError, match="^diffusion_models/sana.safetensors: corrupt or incomplete, got 100 bytes"):
        cached.run(graph, keep_cache=True)
    file.write_bytes(content)
    assert "model" in cached.run(graph, keep_cache=True)


def test_no_second_copy_of_another_file_is_loaded(host, single_files):  # noqa: F811
    """Two GPUs would draw with two models."""
    graph = {key: single_files[key] for key in ("model", "clip", "vae")}
    graph |= {f"catch {key}": ("Catch", {"value": [key, 0], "name": key}) for key in ("model", "clip", "vae")}
    caught = dict(host.run(graph))
    patchers = [caught["model"], caught["clip"].patcher, caught["vae"].patcher]
    for patcher, (kind, name) in zip(
        patchers, [("diffusion_models", "sana"), ("text_encoders", "gemma"), ("vae", "dc-ae")], strict=True
    ):
        load, arguments = patcher.cached_patcher_init
        assert load(*arguments).model is not patcher.model
        touch(host.models / kind / f"{name}.safetensors")
        with pytest.raises(ValueError, match=f"^{kind}/{name}.safetensors: the file has changed .*; queue the graph"):
            load(*arguments)


def truncate_and_draw(host):
    """Load everything in fp32, shorten the files, draw; in a process of its own, which a lost page would end."""
    files = []
    for kind, folder in (("diffusion_models", "transformer"), ("vae", "vae"), ("text_encoders", "text_encoder")):
        tensors, config = component(ROOT / "tests" / "models" / "sana-tiny", folder)
        tensors = {name: tensor.float() for name, tensor in tensors.items()}
        if kind == "text_encoders":
            content = (ROOT / "tests" / "models" / "sana-tiny" / "tokenizer" / "tokenizer.json").read_bytes()
            tensors["tokenizer_json"] = torch.frombuffer(bytearray(content), dtype=torch.uint8)
        files.append(layouts.save(tensors, host.models / kind / "it.safetensors", config=config))
    files.append(layouts.save(written("diffusers"), host.models / "loras" / "it.safetensors"))
    graph = {
        "base": ("SanaNodesModelLoader", {"model_name": "it.safetensors"}),
        "model": ours("it.safetensors", model=("base", 0)),
        "clip": ("SanaNodesTextEncoderLoader", {"text_encoder_name": "it.safetensors"}),
        "vae": ("SanaNodesVAELoader", {"vae_name": "it.safetensors"}),
    }
    kinds = ("model", "clip", "vae")
    host.run({**graph, **{f"catch {key}": ("Catch", {"value": [key, 0], "name": key}) for key in kinds}})
    inputs = {key: ("AnyValue", {"value": Catch.caught[key]}) for key in kinds}
    for file in files:
        os.truncate(file, 64)
    links = {"positive": ["text", 0], "negative": ["text", 0], "latent_image": ["empty", 0], "model": ["model", 0]}
    caught = host.run(
        {
            **inputs,
            "text": ("SanaNodesTextEncode", {"clip": ["clip", 0], "text": "a red circle", "instruction": True}),
            "empty": ("SanaNodesEmptyLatent", {"width": 128, "height": 128, "batch_size": 1}),
            "sample": ("SanaNodesSampler", {**links, "seed": 1, "steps": 1, "guidance": 4.5, "sampler": "flow_euler"}),
            "decode": ("SanaNodesDecode", {"samples": ["sample", 0], "vae": ["vae", 0]}),
            "catch": ("Catch", {"value": ["decode", 0], "name": "image"}),
        }
    )
    assert caught["image"].isfinite().all()


def test_the_server_outlives_files_that_are_shortened_while_loaded(host):
    process = Forked(lambda: truncate_and_draw(host))
    _, errors = process.communicate()
    for kind in ("diffusion_models", "vae", "text_encoders", "loras"):
        (host.models / kind / "it.safetensors").unlink()
    assert process.returncode == 0, errors[-1000:]
