"""Wrong use gives one short error that names the field, and the next graph runs."""

import json
import os
import re
import shutil

import layouts
import pytest
import torch
from in_process import NodeError

from sana_core.checkpoints.headers import read_file


@pytest.fixture
def fails(host, base_graph):
    """A function that runs a graph, wants its error to match and to be short, and runs a good graph after it."""

    def run(graph, pattern):
        with pytest.raises(NodeError) as caught:
            host.run(graph)
        message = str(caught.value)
        assert re.search(pattern, message), message
        assert "\n" not in message and len(message) < 300
        assert host.run(base_graph(steps=1))["image"].isfinite().all()

    return run


def linked(value):
    """Core checks the range of widgets, not of links."""
    return ("AnyValue", {"value": value})


@pytest.mark.parametrize("value, expected", [(1000, 992), (0, 32), (-32, 32), (100000, 16384)])
@pytest.mark.parametrize("field", ["width", "height"])
def test_sizes(fails, base_graph, field, value, expected):
    graph = base_graph()
    graph["number"] = linked(value)
    graph["empty"][1][field] = ["number", 0]
    fails(graph, f"^{field}: got {value}, expected a multiple of 32 from 32 to 16384; use {expected}$")


def test_batch_sizes(fails, base_graph):
    for value in (0, 5000):
        graph = base_graph()
        graph["number"] = linked(value)
        graph["empty"][1]["batch_size"] = ["number", 0]
        fails(graph, f"^batch_size: got {value}, expected a whole number from 1 to 4096$")


def test_a_width_typed_into_the_widget_that_is_no_multiple_of_32(fails, base_graph):
    graph = base_graph()
    graph["empty"][1]["width"] = 250
    fails(graph, "^width: got 250, expected a multiple of 32 from 32 to 16384; use 256$")


NUMBERS = [("steps", 0), ("steps", 5000), ("steps", 2.5), ("seed", -1), ("denoise", 1.5), ("guidance", float("nan"))]


@pytest.mark.parametrize("field, value", NUMBERS)
def test_numbers_of_the_sampler(fails, base_graph, field, value):
    graph = base_graph()
    graph["number"] = linked(value)
    graph["sample"][1][field] = ["number", 0]
    fails(graph, f"^{field}: got {value}, expected a (whole )?number from ")


def test_nan_and_infinity_in_the_widget(host, fails, base_graph):
    fails(base_graph(guidance=float("nan")), "^guidance: got nan, expected a number from 0 to 100.0$")
    with pytest.raises(NodeError, match="value_bigger_than_max"):
        host.run(base_graph(guidance=float("inf")))


def test_an_unknown_sampler_through_a_link(fails, base_graph):
    graph = base_graph()
    graph["name"] = linked("ddim")
    graph["sample"][1]["sampler"] = ["name", 0]
    fails(graph, "^sampler: got 'ddim', expected one of flow_dpmpp_2m, flow_euler, flow_dpmpp_3m, flow_dpmpp_1, scm$")


def test_a_latent_of_four_channels(host, fails, base_graph):
    class Noise4:
        RETURN_TYPES, FUNCTION = ("LATENT",), "make"

        @classmethod
        def INPUT_TYPES(cls):
            return {"required": {}}

        def make(self):
            import torch

            return ({"samples": torch.randn(1, 4, 8, 8)},)

    host.nodes.NODE_CLASS_MAPPINGS["Noise4"] = Noise4
    graph = {**base_graph(), "four": ("Noise4", {})}
    wanted = r"got a latent of shape \[1, 4, 8, 8\], expected \[batch, 32, height / 32, width / 32\]"
    for node, field in (("sample", "latent_image"), ("decode", "samples")):
        wrong = {**graph, node: (graph[node][0], {**graph[node][1], field: ["four", 0]})}
        fails(wrong, f"^{field}: {wanted}")
    decode = ("VAEDecode", {"samples": ["four", 0], "vae": ["load", 2]})
    fails({**graph, "decode": decode}, f"^samples: {wanted}")
    links = {key: graph["sample"][1][key] for key in ("model", "positive", "negative")}
    core = {"seed": 0, "steps": 2, "cfg": 4.0, "sampler_name": "euler", "scheduler": "normal", "denoise": 1.0}
    fails({**graph, "sample": ("KSampler", {**links, "latent_image": ["four", 0], **core})}, f"^latent_image: {wanted}")


@pytest.fixture
def folder(host, checkpoint):
    """A function that puts a copy of the checkpoint into models/diffusers, to be broken by the test."""
    made = []

    def make(name):
        made.append(shutil.copytree(checkpoint, host.models / "diffusers" / name))
        return made[-1]

    yield make
    for path in made:
        shutil.rmtree(path)


def load(name):
    return {
        "load": ("SanaNodesLoader", {"model": name}),
        "catch": ("Catch", {"value": ["load", 0], "name": "model"}),
    }


def test_a_copied_folder_loads(host, folder):
    folder("copy")
    assert host.run(load("copy"))["model"].model.latent_format.latent_channels == 32


def test_a_folder_without_config(fails, folder):
    (folder("broken") / "vae" / "config.json").unlink()
    fails(load("broken"), "^broken: no config.json in broken/vae; download the folder again, whole$")


def test_a_folder_of_another_model(fails, folder):
    config = folder("flux") / "transformer" / "config.json"
    config.write_text(json.dumps({"_class_name": "FluxTransformer2DModel"}))
    fails(
        load("flux"),
        "^transformer/diffusion_.*: got width 160, expected 1152 or 2240, .*; put the model's config.json beside",
    )


def test_a_folder_that_lost_its_weights(fails, folder):
    for file in (folder("empty") / "transformer").glob("*.safetensors"):
        file.unlink()
    fails(
        load("empty"), "^transformer: no .safetensors file beside its configuration; download the folder again, whole$"
    )


@pytest.mark.parametrize(
    "kind, node",
    [
        ("vae", "SanaNodesVAELoader"),
        ("text_encoders", "SanaNodesTextEncoderLoader"),
        ("checkpoints", "SanaNodesLoader"),
    ],
)
def test_an_empty_models_folder_leaves_the_bundled_checkpoint(host, tmp_path, kind, node):
    folder, aside = host.models / kind, tmp_path / "aside"
    existed = folder.exists()
    if existed:
        folder.rename(aside)
    folder.mkdir()
    try:
        offered = str(host.nodes.NODE_CLASS_MAPPINGS[node].INPUT_TYPES()["required"])
        assert "sana-posters (bundled)" in offered and ".safetensors'" not in offered
    finally:
        # core remembers the folders of its lists, so one that was not there before stays
        if existed:
            folder.rmdir()
            aside.rename(folder)


POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a2146\nsize 3209\n"


@pytest.mark.parametrize(
    "place, content, pattern",
    [
        (
            "preview.json",
            "{}",
            "^preview/preview.json: expected rgb_factors of 32 x 3 values and rgb_bias of 3; remove",
        ),
        ("vae/config.json", POINTER, "^vae/config.json: got a git-lfs pointer .*; run git lfs pull in its folder, "),
        (
            "scheduler/scheduler_config.json",
            '{"flow_shift": NaN}',
            "^scheduler/.*: its shift is nan, expected a number",
        ),
        (
            "tokenizer/tokenizer_config.json",
            '{"auto_map": {}}',
            "^tokenizer/.*: got auto_map, code that comes with the",
        ),
        ("tokenizer/tokenizer.json", "{", "^tokenizer/tokenizer.json: tokenizers cannot read it"),
        (
            "transformer/config.json",
            "[" * 10**5,
            "^transformer/config.json: its JSON nests too deeply; download it again$",
        ),
    ],
)
def test_a_folder_with_a_broken_file(fails, folder, place, content, pattern):
    (folder("preview") / place).write_text(content)
    fails(load("preview"), pattern)


def test_a_pipe_in_a_folder_is_not_opened(fails, folder):
    file = folder("pipe") / "transformer" / "config.json"
    file.unlink()
    os.mkfifo(file)
    fails(load("pipe"), "^transformer/config.json: got a folder, pipe or device, expected a regular file; put the file")


def quantised(checkpoint, path, table):
    tensors = read_file(checkpoint / "transformer" / "diffusion_pytorch_model.safetensors")
    tensors["transformer_blocks.0.attn1.to_q.weight_scale"] = torch.ones(())
    config = (checkpoint / "transformer" / "config.json").read_text()
    return layouts.save(tensors, path, config=config, _quantization_metadata=table)


@pytest.mark.parametrize(
    "table, pattern",
    [
        ("[", "_quantization_metadata: not JSON"),
        ("{}", "_quantization_metadata has no table of layers; use the plain file"),
        (
            '{"layers": {"transformer_blocks.0.attn1.to_q": 3}}',
            "ComfyUI cannot read|its quantisation|_quantization_metadata",
        ),
    ],
)
def test_quantised_weights_without_their_table(host, fails, checkpoint, table, pattern):
    file = quantised(checkpoint, host.models / "diffusion_models" / "quantised.safetensors", table)
    graph = {
        "load": ("SanaNodesModelLoader", {"model_name": file.name}),
        "catch": ("Catch", {"value": ["load", 0], "name": "model"}),
    }
    try:
        fails(graph, pattern)
    finally:
        file.unlink()


@pytest.mark.parametrize("name", ["gone", "", "..", "../../..", "/etc", "a\0b"])
def test_names_that_are_not_on_the_list(host, fails, name):
    # the loader answers itself, for the widget as for a link
    graph = load("")
    graph["name"] = linked(name)
    graph["load"][1]["model"] = ["name", 0]
    for each in (load(name), graph):
        fails(
            each,
            r"^model: got .*, expected one of .*sana-posters \(bundled\); put diffusers folders into models/diffusers",
        )
