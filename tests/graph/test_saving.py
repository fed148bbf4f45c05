"""What ComfyUI's nodes save loads again as it was: configuration, size, schedule, reference, tokenizer, preview."""

import json
import shutil

import pytest
import torch

from sana_core import inspect_checkpoint
from sana_core.checkpoints.generation import scheduler_of
from sana_core.checkpoints.headers import read_file

BUNDLED = "sana-tiny"
DRAWN = {"sampler": "flow_dpmpp_2m", "steps": 3}


@pytest.fixture
def saved(host, install):
    """A function: the file in that folder of models/ that a saving node has written for `inputs`."""

    def save(node, kind, loader, **inputs):
        save_as = {**inputs, "filename_prefix": f"{kind}/{node}"}
        host.run({"load": loader, "save": (node, save_as)})
        # CLIPSave appends the name of the encoder to the prefix.
        (file,) = host.output.glob(f"{kind}/{node}*.safetensors")
        tensors = read_file(file)
        file.unlink()
        return install(kind, f"{node}.safetensors", tensors)

    return save


def with_loaders(graph, **loaders):
    """`graph` with MODEL, CLIP and VAE of other nodes; each is (node, its output)."""
    nodes, links = {}, {}
    for number, (name, (node, output)) in enumerate(loaders.items()):
        nodes[f"load {name}"] = node
        links["load", number] = [f"load {name}", output]
    out = {}
    for key, (kind, inputs) in graph.items():
        out[key] = (kind, {f: links.get(tuple(v), v) if isinstance(v, list) else v for f, v in inputs.items()})
    return {**out, **nodes}


def test_the_bundled_model_saved_part_by_part_draws_the_same_bits(host, saved, base_graph, one_thread):
    graph = base_graph(**DRAWN)
    expected = host.run(graph)
    load = ("SanaNodesLoader", {"model": BUNDLED})
    model = saved("ModelSave", "diffusion_models", load, model=["load", 0])
    clip = saved("CLIPSave", "text_encoders", load, clip=["load", 1])
    vae = saved("VAESave", "vae", load, vae=["load", 2])
    parts = with_loaders(
        graph,
        model=(("SanaNodesModelLoader", {"model_name": model}), 0),
        clip=(("SanaNodesTextEncoderLoader", {"text_encoder_name": clip}), 0),
        vae=(("SanaNodesVAELoader", {"vae_name": vae}), 0),
    )
    again = host.run({**parts, "catch model": ("Catch", {"value": ["load model", 0], "name": "model"})})
    assert torch.equal(again["latent"]["samples"], expected["latent"]["samples"])
    assert torch.equal(again["image"], expected["image"])
    assert again["model"].model.latent_format.preview is not None


def test_the_bundled_model_saved_as_one_checkpoint_draws_the_same_bits(host, saved, base_graph, one_thread):
    graph = base_graph(**DRAWN)
    load = graph["load"]
    name = saved("CheckpointSave", "checkpoints", load, model=["load", 0], clip=["load", 1], vae=["load", 2])
    again = host.run({**graph, "load": ("SanaNodesLoader", {"model": name})})
    assert torch.equal(again["image"], host.run(graph)["image"])


@pytest.mark.parametrize("resolution, reference, shift", [("4096", "nvidia", 6.0), ("512", "diffusers", 3.0)])
def test_resolution_reference_and_schedule_are_kept(host, saved, single_files, resolution, reference, shift):
    loader, inputs = single_files["model"]
    load = (loader, {**inputs, "resolution": resolution, "reference": reference})
    name = saved("ModelSave", "diffusion_models", load, model=["load", 0])
    info = inspect_checkpoint(host.models / "diffusion_models" / name)
    assert (info.resolution, info.resolution_from, info.reference) == (int(resolution), "config", reference)
    model = host.output_of(loader, model_name=name).model
    assert model.model_sampling.shift == shift
    assert model.diffusion_model.config.sample_size == int(resolution) // 32


def test_a_configuration_of_other_bytes_is_refused(host, install, saved):
    load = ("SanaNodesLoader", {"model": BUNDLED})
    name = saved("ModelSave", "diffusion_models", load, model=["load", 0])
    tensors = read_file(host.models / "diffusion_models" / name)
    (key,) = (key for key in tensors if key.endswith("sana_config"))
    for value, reason in (
        (torch.zeros(4), "is no tensor of a configuration's bytes"),
        (torch.tensor(list(b"[1]"), dtype=torch.uint8), "got JSON that is a list"),
    ):
        broken = install("diffusion_models", f"broken-{len(value)}.safetensors", {**tensors, key: value})
        with pytest.raises(ValueError, match=reason):
            inspect_checkpoint(host.models / "diffusion_models" / broken)


@pytest.mark.parametrize(
    "settings, sampler",
    [
        ({"_class_name": "FlowMatchEulerDiscreteScheduler", "shift": 3.0}, "flow_euler"),
        ({"_class_name": "DPMSolverMultistepScheduler", "flow_shift": 3.0, "solver_order": 3}, "flow_dpmpp_3m"),
    ],
)
def test_a_saved_model_keeps_the_sampler_of_its_folder(host, saved, checkpoint, base_graph, settings, sampler):
    folder = shutil.copytree(checkpoint, host.models / "diffusers" / "its-sampler")
    try:
        (folder / "scheduler" / "scheduler_config.json").write_text(json.dumps(settings))
        load = ("SanaNodesLoader", {"model": folder.name})
        file = saved("ModelSave", "diffusion_models", load, model=["load", 0])
        info = inspect_checkpoint(host.models / "diffusion_models" / file)
        assert scheduler_of(info).sampler == sampler
        latents = []
        for model in (load, ("SanaNodesModelLoader", {"model_name": file})):
            graph = base_graph(steps=3, sampler="flow_dpmpp_2m", model_defaults=True)
            graph["sampled"] = model
            graph["sample"][1]["model"] = ["sampled", 0]
            latents.append(host.run(graph)["latent"]["samples"])
        assert torch.equal(*latents)
    finally:
        shutil.rmtree(folder)
