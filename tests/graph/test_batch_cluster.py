"""The cluster as a choice of SANA Batch Sampler: the operator's file, and the inputs that a cluster refuses.

No test here connects to a cluster. tests/cluster generates on one.
"""

import json
import logging
from types import SimpleNamespace

import numpy as np
import pytest
from fake_cuda import pack
from in_process import NodeError

pytestmark = pytest.mark.usefixtures("one_load")


@pytest.fixture
def cluster_graph(base_graph):
    """A function of changes of the inputs: the batch of one prompt on the cluster."""

    def build(**inputs):
        graph = base_graph()
        options = {key: value for key, value in graph["sample"][1].items() if key != "denoise"}
        options |= {"count": 1, "devices": "cluster", "chunk": 0, "vae": ["load", 2], **inputs}
        graph["batch"] = ("SanaNodesBatchSampler", options)
        graph["catch image"] = ("Catch", {"value": ["batch", 1], "name": "image"})
        for key in ("sample", "decode", "catch latent"):
            del graph[key]
        return graph

    return build


def choices(host):
    node = host.nodes.NODE_CLASS_MAPPINGS["SanaNodesBatchSampler"]
    return json.dumps(node.INPUT_TYPES()["required"]["devices"])


def test_the_cluster_is_a_choice_only_with_the_operators_file(host, operators_file):
    assert '"cluster"' in choices(host)
    operators_file.rename(operators_file.with_suffix(".off"))
    try:
        assert '"cluster"' not in choices(host)
    finally:
        operators_file.with_suffix(".off").rename(operators_file)


def test_without_the_file_the_choice_is_refused(host, cluster_graph):
    with pytest.raises(NodeError, match="devices: this server has no cluster; its operator can add one"):
        host.run(cluster_graph())


BROKEN = {
    "empty": b"",
    "cut off": b"{",
    "list": b"[]",
    "object": b"{}",
    "number": b'{"address": 5}',
    "no address": b'{"address": ""}',
    "a driver's": b'{"address": "auto"}',
    "a driver's port": b'{"address": "127.0.0.1:6379"}',
    "more": b'{"address": "ray://127.0.0.1:10001", "password": "secret"}',
    "no gpus": b'{"address": "ray://127.0.0.1:10001", "gpus": 0}',
    "gpus in words": b'{"address": "ray://127.0.0.1:10001", "gpus": "4"}',
    "one and a half": b'{"address": "ray://127.0.0.1:10001", "gpus_per_worker": 1.5}',
    "resources without amounts": b'{"address": "ray://127.0.0.1:10001", "resources": {"big": true}}',
    "not text": b"\xff\xfe",
    "deep": b'{"address":' * 100_000,
    "large": b'{"address": "' + b"a" * 1_000_000 + b'"}',
}


@pytest.mark.parametrize("content", BROKEN)
def test_a_broken_file_takes_no_node_away_and_is_the_operators_to_see(
    host, operators_file, cluster_graph, caplog, content
):
    operators_file.write_bytes(BROKEN[content])
    with caplog.at_level(logging.ERROR):
        assert '"default"' in choices(host) and '"cluster"' not in choices(host)
    assert str(operators_file) in caplog.text and 'expected {"address": "ray://HOST:10001"}' in caplog.text
    with pytest.raises(NodeError) as caught:
        host.run(cluster_graph())
    assert str(caught.value) == "devices: the server's cluster.json is broken; its operator finds the reason in the log"


def test_a_folder_or_a_pipe_in_its_place_is_broken_too(host, operators_file, caplog):
    import os

    operators_file.unlink()
    os.mkfifo(operators_file)
    assert '"cluster"' not in choices(host)
    assert "expected a regular file" in caplog.text


@pytest.fixture
def failing_images(monkeypatch, operators_file):
    """A function of seeds: the cluster, which is not there, has failed at the images with these seeds."""
    canvas, plan = pack("nodes.host.batch.run"), pack("sana_core.batch.plan")

    def build(*seeds):
        def results(*arguments):
            for image in plan.batch_images(1, 3, 7):
                good = np.ones((32, 4, 4), np.float32), np.zeros((3, 128, 128), np.float32)
                yield image, plan.FailedImage("samples: NaN") if image.seed in seeds else good

        monkeypatch.setattr(canvas, "session_on", lambda cluster: SimpleNamespace(run=results))

    return build


def test_an_image_that_failed_on_the_cluster_is_black(host, cluster_graph, failing_images, caplog):
    failing_images(8)
    images = host.run(cluster_graph(count=3, seed=7))["image"]
    assert [float(image.mean()) for image in images] == [0.5, 0.0, 0.5]
    assert "1 of 3 images failed and are black; image 2 (seed 8): samples: NaN" in caplog.text


def test_a_batch_of_failed_images_is_an_error(host, cluster_graph, failing_images):
    failing_images(7, 8, 9)
    with pytest.raises(NodeError, match=r"model: all 3 images failed \(image 1 \(seed 7\): samples: NaN\); choose"):
        host.run(cluster_graph(count=3, seed=7))


def patch(graph, kind, **inputs):
    """Put a node between MODEL and the batch."""
    graph["patch"] = (kind, {"model": ["load", 0], **inputs})
    graph["batch"][1]["model"] = ["patch", 0]


def rescale(graph):
    patch(graph, "RescaleCFG", multiplier=0.7)


def combined(graph):
    combine = {"conditioning_1": ["positive", 0], "conditioning_2": ["negative", 0]}
    graph["both"] = ("ConditioningCombine", combine)
    graph["batch"][1]["positive"] = ["both", 0]


def area(graph):
    share = {"conditioning": ["positive", 0], "width": 0.5, "height": 0.5, "x": 0.0, "y": 0.0, "strength": 1.0}
    graph["area"] = ("ConditioningSetAreaPercentage", share)
    graph["batch"][1]["positive"] = ["area", 0]


def mask(graph):
    graph["mask"] = ("SolidMask", {"value": 1.0, "width": 128, "height": 128})
    graph["masked"] = ("SetLatentNoiseMask", {"samples": ["empty", 0], "mask": ["mask", 0]})
    graph["batch"][1]["latent_image"] = ["masked", 0]


def eight_bits(graph):
    graph["load"][1]["weight_dtype"] = "fp8_e4m3fn_fast"


@pytest.mark.parametrize(
    "change, message",
    [
        (rescale, r"model: got a patch that a cluster cannot apply \(.*\); remove it"),
        (combined, "positive: got 2 combined prompts, a cluster takes one"),
        (area, "positive: got area, .*which a cluster cannot use; remove it"),
        (mask, "latent_image: got a mask of an empty latent, which a cluster cannot use"),
        (eight_bits, "model: a cluster has no quantised products; choose weight_dtype default or without fast"),
    ],
)
def test_what_a_cluster_cannot_draw_is_refused_by_name(host, operators_file, cluster_graph, change, message):
    graph = cluster_graph()
    change(graph)
    with pytest.raises(NodeError, match=message):
        host.run(graph)


def test_a_controlnet_of_another_kind_is_refused_by_name(host, operators_file, cluster_graph):
    graph = cluster_graph()
    graph["positive with"] = ("Catch", {"value": ["positive", 0], "name": "positive"})
    positive = host.run({key: graph[key] for key in ("load", "positive", "positive with")})["positive"]
    ((embeds, extra),) = positive
    graph["control"] = ("AnyValue", {"value": {"__value__": [[embeds, {**extra, "control": object()}]]}})
    graph["batch"][1]["positive"] = ["control", 0]
    with pytest.raises(NodeError, match="control_net: got NoneType, expected a SANA ControlNet"):
        host.run(graph)
