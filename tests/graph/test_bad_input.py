"""Wrong use gives one short error that names the field, and the next graph runs."""

import re
import shutil
import sys

import pytest
import torch
from in_process import NodeError
from loading import component

pytestmark = pytest.mark.usefixtures("one_load")


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


# The values arrive by links, because core checks the range of widgets only.
WRONG = [
    ("empty", "width", 1000, "^width: got 1000, expected a multiple of 32 from 32 to 16384; use 992$"),
    ("sample", "steps", 2.5, "^steps: got 2.5, expected a whole number from "),
    ("sample", "denoise", 1.5, "^denoise: got 1.5, expected a number from "),
    (
        "sample",
        "sampler",
        "ddim",
        "^sampler: got 'ddim', expected one of flow_dpmpp_2m, flow_euler, .*, flow_dmd$",
    ),
]


@pytest.mark.parametrize("node, field, value, pattern", WRONG)
def test_values_out_of_range(fails, base_graph, node, field, value, pattern):
    graph = base_graph()
    graph["value"] = ("AnyValue", {"value": value})
    graph[node][1][field] = ["value", 0]
    fails(graph, pattern)


def test_a_width_typed_into_the_widget_that_is_no_multiple_of_32(fails, base_graph):
    graph = base_graph()
    graph["empty"][1]["width"] = 250
    fails(graph, "^width: got 250, expected a multiple of 32 from 32 to 16384; use 256$")


@pytest.fixture
def folder(host, checkpoint):
    """A function that puts a copy of the checkpoint into models/diffusers, to be broken by the test."""
    created = []

    def make(name):
        created.append(shutil.copytree(checkpoint, host.models / "diffusers" / name))
        return created[-1]

    yield make
    for path in created:
        shutil.rmtree(path)


def load(name):
    return {
        "load": ("SanaNodesLoader", {"model": name}),
        "catch": ("Catch", {"value": ["load", 0], "name": "model"}),
    }


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
        ("vae/config.json", None, "^preview: no config.json in preview/vae; download the folder again, whole$"),
        ("scheduler/scheduler_config.json", '{"flow_shift": NaN}', "^scheduler/.*: its shift is nan, expected a num"),
        ("tokenizer/tokenizer.json", "{", "^tokenizer/tokenizer.json: not JSON"),
    ],
)
def test_a_folder_with_a_broken_file(fails, folder, place, content, pattern):
    file = folder("preview") / place
    file.unlink() if content is None else file.write_text(content)
    fails(load("preview"), pattern)


@pytest.mark.parametrize(
    "table, pattern",
    [
        ("[", "_quantization_metadata: not JSON"),
        ("{}", "_quantization_metadata has no table of layers; use the plain file"),
        ('{"layers": {"transformer_blocks.0.attn1.to_q": 3}}', "its format is 3, expected one of float8_e4m3fn"),
    ],
)
def test_quantised_weights_without_their_table(fails, install, checkpoint, table, pattern):
    tensors, config = component(checkpoint, "transformer")
    tensors["transformer_blocks.0.attn1.to_q.weight_scale"] = torch.ones(())
    name = install("diffusion_models", "quantised.safetensors", tensors, config=config, _quantization_metadata=table)
    graph = {**load(name), "load": ("SanaNodesModelLoader", {"model_name": name})}
    fails(graph, pattern)


def test_the_host_shows_the_class_of_an_error_without_a_path(host, base_graph):
    graph = base_graph()
    graph["empty"][1]["width"] = 0
    with pytest.raises(NodeError):
        host.run(graph)
    (failed,) = [data for event, data in host.executor.status_messages if event == "execution_error"]
    assert failed["exception_type"] == "InputError"

    package = host.nodes.NODE_CLASS_MAPPINGS["SanaNodesSampler"].__module__.removesuffix(".nodes.sampler")
    family = [sys.modules[f"{package}.sana_core.errors"].SanaError]
    for kind in family:
        family += kind.__subclasses__()
    names = {host.execution.full_type_name(kind) for kind in family[1:]}
    assert {"CheckpointError", "EncoderError"} <= names
    assert all(name.isidentifier() for name in names), names
