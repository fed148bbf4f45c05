"""Width and height of the widgets are used, 0 means the model's size, and a note names the nearest training size."""

from math import log

import pytest
import torch
from in_process import NodeError
from loading import ksampler

from sana_core.model.known_models import RATIOS, RESOLUTIONS, SHAPES, image_size, nearest_shape, size_note, trained_size

pytestmark = pytest.mark.usefixtures("one_load")


@pytest.mark.parametrize("resolution", RESOLUTIONS)
def test_a_released_shape_is_its_trained_size(resolution):
    for ratio, (width, height) in SHAPES.items():
        size = width * resolution // 1024, height * resolution // 1024
        assert image_size(resolution, ratio) == size
        assert trained_size(*size, resolution) == trained_size(2 * size[0], 2 * size[1], resolution) == size
        assert size_note(*size, size) == ""


def test_the_named_ratios_are_the_nearest_shapes():
    for name, ratio in RATIOS.items():
        width, height = map(int, name.split(":"))
        assert nearest_shape(width, height, SHAPES.values()) == SHAPES[ratio]
        assert abs(log(SHAPES[ratio][0] / SHAPES[ratio][1] * height / width)) < 0.05


NEAR = "; the nearest training size of this model is "


def test_an_empty_latent_has_the_size_of_its_widgets_and_names_the_trained_size(host, base_graph, node_texts):
    graph = base_graph(steps=1)
    graph["empty"][1]["model"] = ["load", 0]
    for (width, height), text in {
        (128, 128): "128 x 128",
        (160, 96): "160 x 96",
        (160, 128): f"160 x 128{NEAR}128 x 128",
        (1024, 64): "1024 x 64 is far from this model's training size; use 256 x 64",
    }.items():
        graph["empty"][1].update(width=width, height=height)
        latents = host.run(graph)["latent"]["samples"]
        assert latents.shape == (1, 32, height // 32, width // 32)
        assert [said for node, said in node_texts if node == "empty"] == [text]
        node_texts.clear()


def test_an_empty_latent_of_size_0_has_the_size_of_the_model(host, base_graph, node_texts):
    graph = base_graph(steps=1)
    graph["empty"][1].update(width=0, height=0, model=["load", 0])
    assert host.run(graph)["latent"]["samples"].shape == (1, 32, 4, 4)
    assert ("empty", "128 x 128") in node_texts
    graph["load"][1]["resolution"] = "512"
    assert host.run(graph)["latent"]["samples"].shape == (1, 32, 16, 16)


def test_an_empty_latent_without_a_size_and_a_model_has_1024_pixels(host, base_graph, node_texts):
    graph = {"empty": ("SanaNodesEmptyLatent", {"width": 0, "height": 0, "batch_size": 1})}
    graph["catch"] = ("Catch", {"value": ["empty", 0], "name": "latent"})
    assert host.run(graph)["latent"]["samples"].shape == (1, 32, 32, 32)
    assert node_texts == [("empty", "1024 x 1024")]


@pytest.mark.parametrize(
    "sides, with_model, message",
    [
        ((0, 64), False, "width: got 0 beside 64; set both sides, or both to 0 for the model's size"),
        ((0, 64), True, "width: got 0 beside 64; set both sides, or both to 0 for the model's size"),
        ((64, 0), False, "height: got 0 beside 64; set both sides, or both to 0 for the model's size"),
        ((0, 33), True, "width: got 0 beside 33; set both sides, or both to 0 for the model's size"),
    ],
)
def test_a_size_of_0_needs_both_sides(host, base_graph, sides, with_model, message):
    graph = base_graph()
    graph["empty"][1].update(width=sides[0], height=sides[1], **({"model": ["load", 0]} if with_model else {}))
    with pytest.raises(NodeError) as caught:
        host.run(graph)
    assert str(caught.value) == message


def test_a_new_latent_node_starts_at_the_size_of_the_model(host):
    for name in ("SanaNodesEmptyLatent", "SanaNodesVideoLatent"):
        inputs = {field.id: field for field in host.nodes.NODE_CLASS_MAPPINGS[name].GET_SCHEMA().inputs}
        assert inputs["width"].default == inputs["height"].default == 0


@pytest.mark.parametrize(
    "inputs, expected",
    [
        ({"size": "auto", "ratio": "1:1"}, (128, 128)),
        ({"size": "auto", "ratio": "16:9"}, (160, 96)),
        ({"size": "auto", "ratio": "0.57"}, (160, 96)),
        ({"size": "1024", "ratio": "16:9"}, (1344, 768)),
        ({"size": "1024", "ratio": "9:16"}, (768, 1344)),
        ({"size": "2K", "ratio": "1.00"}, (2048, 2048)),
    ],
)
def test_a_ratio_gives_the_trained_shape_at_the_size_of_the_model(host, base_graph, inputs, expected):
    graph = {"load": base_graph()["load"], "size": ("SanaNodesResolution", {**inputs, "model": ["load", 0]})}
    graph |= {f"catch {output}": ("Catch", {"value": ["size", output], "name": str(output)}) for output in (0, 1)}
    got = host.run(graph)
    assert (got["0"], got["1"]) == expected
    del graph["size"][1]["model"]
    got = host.run(graph)
    if inputs["size"] == "auto":
        # The same shape at 1024.
        assert (got["0"], got["1"]) == image_size(1024, inputs["ratio"])
    else:
        assert (got["0"], got["1"]) == expected


@pytest.mark.parametrize("node", ["SanaNodesSampler", "KSampler"])
def test_a_size_far_from_the_trained_size_is_said_under_any_sampler(host, base_graph, node_texts, node, monkeypatch):
    send, messages = host.server.send_sync, []

    def send_and_keep(event, data, sid=None):
        messages.extend([data] if event == "sana_note" else [])
        send(event, data, sid)

    monkeypatch.setattr(host.server, "send_sync", send_and_keep)
    graph = base_graph(steps=1)
    graph = ksampler(graph) if node == "KSampler" else graph
    host.run(graph)
    assert not [text for where, text in node_texts if where == "sample"] and not messages
    graph["empty"][1].update(width=256, height=256)
    host.run(graph)
    note = "256 x 256 is far from this model's training size; use 128 x 128"
    assert ("sample", note) in node_texts and messages == [{"text": note, "node": "sample"}]


@pytest.mark.parametrize("node", ["SanaNodesSampler", "SanaNodesBatchSampler"])
@pytest.mark.parametrize("empty", ["EmptyLatentImage", "EmptySD3LatentImage"])
def test_an_empty_latent_of_another_model_has_its_size(host, base_graph, node, empty):
    graph = with_sampler(base_graph(), node)
    graph["empty"] = (empty, {"width": 128, "height": 192, "batch_size": 1})
    assert host.run(graph)["latent"]["samples"].shape == (1, 32, 6, 4)


@pytest.mark.parametrize("node", ["SanaNodesSampler", "SanaNodesBatchSampler"])
@pytest.mark.parametrize("channels", [4, 16, 128])
def test_an_empty_latent_with_cells_of_unknown_size_is_refused(host, base_graph, node, channels):
    """As EmptyFlux2LatentImage, whose 256 x 320 px became 512 x 640 px."""
    graph = with_sampler(base_graph(), node)
    graph["empty"] = ("AnyValue", {"value": {"samples": torch.zeros(1, channels, 20, 16)}})
    message = f"latent_image: got an empty latent of {channels} channels without the size of its cells, expected 32"
    with pytest.raises(NodeError, match=message):
        host.run(graph)


def test_an_empty_flux_2_latent_is_refused(host, base_graph):
    graph = base_graph()
    graph["empty"] = ("EmptyFlux2LatentImage", {"width": 256, "height": 320, "batch_size": 1})
    with pytest.raises(NodeError, match="latent_image: got an empty latent of 128 channels"):
        host.run(graph)


def with_sampler(graph, node):
    """Return the graph up to the LATENT of `node`."""
    if node == "SanaNodesBatchSampler":
        inputs = {key: value for key, value in graph["sample"][1].items()}
        graph["sample"] = (node, {**inputs, "count": 1, "devices": "default", "chunk": 0})
    graph["catch latent"] = ("Catch", {"value": ["sample", 0], "name": "latent"})
    del graph["decode"], graph["catch image"]
    return graph
