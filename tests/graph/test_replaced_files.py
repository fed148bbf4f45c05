"""A model's file that is replaced is loaded anew, and one that is lost or broken while loaded harms nobody."""

import os
import shutil
import subprocess
import sys

import layouts
import pytest
import torch
from in_process import Catch, NodeError
from loading import component
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
    kind, field = LOADERS.get(loader, ("diffusers", "model"))
    return host.nodes.NODE_CLASS_MAPPINGS[loader].fingerprint_inputs(**{field: name})


def touch(file, nanoseconds=1):
    os.utime(file, ns=(0, file.stat().st_mtime_ns + nanoseconds))


@pytest.mark.parametrize("loader", LOADERS)
def test_a_loaders_fingerprint_changes_with_size_and_time_of_its_file(host, put, loader):  # noqa: F811
    kind, _ = LOADERS[loader]
    put(kind, "one.safetensors", {"a": torch.zeros(2)})
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


@pytest.mark.parametrize("loader", ["SanaNodesLoader", *LOADERS])
@pytest.mark.parametrize("name", ["gone.safetensors", "", None, 5, "..", "a\0b.safetensors"])
def test_a_fingerprint_of_what_is_not_there_raises_nothing(host, loader, name):
    assert fingerprint(host, loader, name) == "missing"


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


def test_a_replaced_model_and_lora_are_loaded_anew_under_each_cache(cached, base_graph, single_files, put):  # noqa: F811
    put("loras", "style.safetensors", written("diffusers"))
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


def truncate_and_draw(base):
    """Load everything in fp32, shorten the files, draw; in a process of its own, which a lost page would end."""
    from pathlib import Path

    from in_process import Host

    host, files = Host(Path(base)), []
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
    given = {key: ("AnyValue", {"value": Catch.caught[key]}) for key in kinds}
    for file in files:
        os.truncate(file, 64)
    links = {"positive": ["text", 0], "negative": ["text", 0], "latent_image": ["empty", 0], "model": ["model", 0]}
    caught = host.run(
        {
            **given,
            "text": ("SanaNodesTextEncode", {"clip": ["clip", 0], "text": "a red circle", "instruction": True}),
            "empty": ("SanaNodesEmptyLatent", {"width": 128, "height": 128, "batch_size": 1}),
            "sample": ("SanaNodesSampler", {**links, "seed": 1, "steps": 1, "guidance": 4.5, "sampler": "flow_euler"}),
            "decode": ("SanaNodesDecode", {"samples": ["sample", 0], "vae": ["vae", 0]}),
            "catch": ("Catch", {"value": ["decode", 0], "name": "image"}),
        }
    )
    assert caught["image"].isfinite().all()


def test_the_server_outlives_files_that_are_shortened_while_loaded(tmp_path):
    places = [str(ROOT / folder) for folder in ("tests/graph", "tests", "scripts")] + [str(ROOT)]
    code = f"import sys; sys.path += {places}; import test_replaced_files as t; t.truncate_and_draw({str(tmp_path)!r})"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, (done.returncode, done.stderr[-1000:])
