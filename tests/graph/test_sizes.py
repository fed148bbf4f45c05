"""The empty latent follows its model, and a size that the model has not learnt is said under the node that samples."""

import pytest
from loading import ksampler

from sana_core.model.known_models import RESOLUTIONS, SHAPES, own_size, size_note


@pytest.mark.parametrize("resolution", RESOLUTIONS)
def test_the_released_shapes_are_their_own(resolution):
    for width, height in SHAPES.values():
        size = width * resolution // 1024, height * resolution // 1024
        assert own_size(*size, resolution) == size and size_note(*size, resolution) == ""
        assert own_size(2 * size[0], 2 * size[1], resolution) == size


def test_a_latent_with_the_model_has_its_size_in_the_shape_of_the_widgets(host, base_graph, told):
    graph = base_graph(steps=1)
    for (width, height), expected in {
        (1024, 1024): (4, 4),
        (1920, 1080 // 32 * 32): (3, 5),
        (64, 1024): (8, 2),
    }.items():
        graph["empty"][1].update(width=width, height=height, model=["load", 0])
        assert host.run(graph)["latent"]["samples"].shape == (1, 32, *expected)
        assert ("empty", f"{32 * expected[1]} x {32 * expected[0]}") in told
    assert not [node for node, _ in told if node == "sample"]


@pytest.mark.parametrize("node", ["SanaNodesSampler", "KSampler"])
def test_a_size_that_the_model_did_not_learn_is_said_under_any_sampler(host, base_graph, told, node):
    graph = base_graph(steps=1)
    graph = ksampler(graph) if node == "KSampler" else graph
    host.run(graph)
    assert not [text for where, text in told if where == "sample"]
    graph["empty"][1].update(width=256, height=256)
    host.run(graph)
    note = "256 x 256 is far from this model's training size (128 px); use 128 x 128 for better images"
    assert ("sample", note) in told
