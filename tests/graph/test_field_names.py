"""An error about an input begins with the name of the input, for every input of every node."""

import math
import shutil

import pytest
import vibe_models
import video_models
from in_process import NodeError

# A link can carry any value. A boolean has no wrong value.
WRONG = {
    "INT": [-(10**9)],
    "FLOAT": [math.nan],
    "COMBO": ["no such choice", "missing.safetensors"],
    "STRING": ["\ud800"],
}
# A device that another computer has is no error.
WRONG_DEVICES = [7]
# With one side at its default of 0, the error is about that side.
SIZE = {"width": 64, "height": 64}


@pytest.fixture(scope="module")
def video(host):
    folder = video_models.save_folder("480p", host.models / "diffusers" / "video-fields")
    yield folder
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def vibe(host):
    folder = host.models / "diffusers" / "vibe-fields"
    vibe_models.save_vibe(folder)
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def sources(base_graph, video, vibe):
    """A graph with an output for every type of socket, and the links to them by the names of inputs."""
    graph = {key: node for key, node in base_graph().items() if key in ("load", "positive", "negative", "empty")}
    graph["video"] = ("SanaNodesLoader", {"model": video.name})
    graph["vibe"] = ("SanaNodesLoader", {"model": vibe.name})
    graph["scorer"] = ("SanaNodesScorerLoader", {"scorer_name": "sana-posters-scorer (bundled)"})
    graph["image"] = ("EmptyImage", {"width": 64, "height": 64, "batch_size": 1, "color": 0})
    links = {"model": ["load", 0], "clip": ["load", 1], "vae": ["load", 2], "scorer": ["scorer", 0]}
    links |= {"positive": ["positive", 0], "negative": ["negative", 0]}
    links |= dict.fromkeys(("first_image", "image"), ["image", 0])
    return graph, {**links, "latent_image": ["empty", 0], "samples": ["empty", 0]}


def test_an_error_begins_with_the_name_of_the_input(host, sources):
    graph, links = sources
    wrong_words = {}
    for node_id, node in sorted(host.nodes.NODE_CLASS_MAPPINGS.items()):
        schema = node.GET_SCHEMA() if node_id.startswith("SanaNodes") else None
        # Nodes for training have a test of their own.
        if schema is None or schema.category == "SANA/training":
            continue
        valid = {}
        for field in schema.inputs:
            if field.io_type not in WRONG and field.id in links:
                valid[field.id] = links[field.id]
            elif field.id in SIZE:
                valid[field.id] = SIZE[field.id]
            elif field.io_type == "COMBO":
                valid[field.id] = field.default or field.options[0]
            elif getattr(field, "default", None) is not None:
                valid[field.id] = field.default
            else:
                valid[field.id] = ""
        if node_id == "SanaNodesVideoLatent":
            valid["model"] = ["video", 0]
        if node_id == "SanaNodesEdit":
            valid |= {"clip": ["vibe", 1], "vae": ["vibe", 2]}
        for field in schema.inputs:
            if field.io_type == "BOOLEAN":
                continue
            values = WRONG.get(field.io_type, ["a word in place of a link"])
            for value in WRONG_DEVICES if field.id == "devices" else values:
                graph["wrong"] = ("AnyValue", {"value": value})
                graph["node"] = (node_id, {**valid, field.id: ["wrong", 0]})
                graph["catch"] = ("Catch", {"value": ["node", 0], "name": "output"})
                try:
                    host.run(graph, keep_cache=True)
                    wrong_words[f"{node_id}.{field.id}"] = "no error"
                except NodeError as error:
                    if not str(error).startswith(f"{field.id}: "):
                        wrong_words[f"{node_id}.{field.id}"] = str(error)
    assert not wrong_words, "\n".join(f"{name}: {said}" for name, said in wrong_words.items())
