"""Graphs of ComfyUI_ExtraModels over HTTP, where that pack is absent."""

import io
import re

import layouts
import pytest
import torch
from host import GraphError, base_directory, get, images_of, run_graph
from old_graphs import node, old_graph
from PIL import Image
from setup import ROOT

from sana_core.checkpoints.headers import read_file

LISTED = re.compile(r"^\| ([\w, ]+) \| (.+?) \|", re.M)


@pytest.fixture(scope="module")
def files(checkpoint, worker_id):
    """The bundled model as the three files that old graphs name."""
    models = base_directory(f"test-server-{worker_id}") / "models"
    tokenizer = (checkpoint / "tokenizer" / "tokenizer.json").read_bytes()
    options = {"text_encoder": {"tokenizer_json": torch.frombuffer(bytearray(tokenizer), dtype=torch.uint8)}}
    places = {
        "transformer": "diffusion_models/sana.safetensors",
        "text_encoder": "text_encoders/gemma.safetensors",
        "vae": "vae/dc-ae.safetensors",
    }
    created = []
    for part, place in places.items():
        tensors = read_file(next((checkpoint / part).glob("*.safetensors")))
        config = (checkpoint / part / "config.json").read_text()
        (models / place).parent.mkdir(exist_ok=True)
        created.append(layouts.save({**tensors, **options.get(part, {})}, models / place, config=config))
    yield
    for path in created:
        path.unlink()


def graph_with(latent):
    graph = old_graph(latent)
    graph["size"] = node("SanaResolutionSelect", model="512px", ratio="1.00")
    graph["empty"]["inputs"] |= {"width": ["size", 0], "height": ["size", 1]}
    del graph["catch"]
    graph["save"] = node("SaveImage", images=["decode", 0], filename_prefix="old")
    return graph


@pytest.mark.parametrize("meta", [True, False], ids=["with _meta", "without _meta"])
def test_what_the_migration_page_lists_runs_with_and_without_meta(server, files, meta):
    graphs = [graph_with(latent) for latent in ("EmptySanaLatentImage", "EmptyDCAELatentImage")]
    page = dict(LISTED.findall((ROOT / "docs" / "migration.md").read_text()))
    listed = {kind for kinds, ours in page.items() if ours != "none" for kind in kinds.split(", ")} - {"their node"}
    assert listed <= {value["class_type"] for graph in graphs for value in graph.values()}
    for seed, graph in enumerate(graphs, 2 * meta):
        graph["sample"]["inputs"]["seed"] = seed
        if not meta:
            for value in graph.values():
                del value["_meta"]
        (image,) = images_of(list(run_graph(server, graph)))
        assert Image.open(io.BytesIO(get(server, "/view", **image))).size == (512, 512)


def test_a_node_of_theirs_that_none_replaces_is_named(server, files):
    graph = graph_with("EmptySanaLatentImage")
    graph["scm"] = node("ScmModelSampling", model=["model", 0])
    graph["sample"]["inputs"]["model"] = ["scm", 0]
    for value in graph.values():
        del value["_meta"]
    with pytest.raises(GraphError, match="ScmModelSampling"):
        list(run_graph(server, graph))


def test_an_input_that_is_left_out_is_named(server, files):
    graph = graph_with("EmptySanaLatentImage")
    del graph["empty"]["inputs"]["batch_size"]
    with pytest.raises(GraphError, match="SanaNodesEmptyLatent: Required input is missing: batch_size"):
        list(run_graph(server, graph))
