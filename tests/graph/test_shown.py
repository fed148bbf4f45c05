"""What nodes show of their work on the canvas: charts, and words under them."""

import numpy as np
import pytest
from PIL import Image

from sana_core.memory import plan_memory

# Pixels and colours of nodes/host/charts.py.
TOP, STEP, BAR, BOTTOM = 100, 50, 34, 50
BLUE, ORANGE = (91, 122, 166), (226, 150, 74)
PROMPTS = "a red circle on a blue background\na blue square on a white background"


@pytest.fixture
def previews(watched):
    """The previews that the nodes send, in their order, as pixels [H, W, 3]."""
    shown = []
    watched(lambda value, total, preview: preview is None or shown.append(np.asarray(preview[1])))
    return shown


def picture_on(host, node):
    """Pixels [H, W, 3] of the image that the host shows on `node`."""
    (image,) = host.executor.history_result["outputs"][node]["images"]
    assert image["type"] == "temp"
    return np.asarray(Image.open(host.models.parent / "temp" / image["subfolder"] / image["filename"]))[..., :3]


def lengths(pixels, colour):
    """Pixels of `colour` in the middle of each bar, from the top."""
    # a JPEG of it is not made here, so that colours are exact; letters have fewer pixels in a row
    rows = (pixels == colour).all(-1).sum(1)
    return [int(row) for row in rows[TOP + BAR // 2 : len(rows) - BOTTOM : STEP]]


@pytest.mark.parametrize("gpu", ["12 GB", "this computer"])
def test_the_plan_shows_its_bars_without_another_node_and_they_are_to_scale(host, gpu):
    size = {"variant": "1.6B", "width": 4096, "height": 4096, "batch_size": 1}
    host.run({"plan": ("SanaNodesPlan", {**size, "gpu": gpu})})
    # Without a GPU the plan is for one of 8 GB in bfloat16, never for this CPU's float32.
    plan = plan_memory("1.6B", 4096, 4096, 1, "bfloat16")
    rows = [plan["text"], plan["transformer"], plan["decode"]]
    pixels = picture_on(host, "plan")
    for colour, name in ((BLUE, "weights"), (ORANGE, "activations")):
        sizes, result = np.array([row[name] for row in rows]), np.array(lengths(pixels, colour))
        # A pixel more or less at each end.
        assert np.allclose(result, result.max() * sizes / sizes.max(), atol=2), name


def batch_graph(base_graph, devices):
    graph = base_graph(steps=2)
    options = {"count": 3, "seed": 7, "steps": 2, "guidance": 4.5, "sampler": "flow_dpmpp_2m", "devices": devices}
    links = {"model": ["load", 0], "positive": ["list", 0], "negative": ["negative", 0], "latent_image": ["empty", 0]}
    return {
        **{key: graph[key] for key in ("load", "negative", "empty")},
        "list": ("SanaNodesPromptList", {"clip": ["load", 1], "prompts": PROMPTS, "instruction": True}),
        "batch": ("SanaNodesBatchSampler", {**links, **options, "chunk": 1}),
        "catch latent": ("Catch", {"value": ["batch", 0], "name": "latent"}),
    }


def test_a_shared_batch_ends_with_a_bar_for_each_device_and_one_alone_with_words(
    host, base_graph, node_texts, previews
):
    host.run(batch_graph(base_graph, "cpu x 2"))
    first, second = (
        int(part.split()[-1]) for part in dict(node_texts)["batch"].splitlines()[0].split(": ")[1].split(", ")
    )
    assert first + second == 6
    bar_lengths = lengths(previews[-1], BLUE)
    assert np.allclose(
        np.array(bar_lengths) / max(bar_lengths), np.array([first, second]) / max(first, second), atol=0.02
    )
    previews.clear()
    host.run(batch_graph(base_graph, "default"))
    assert dict(node_texts)["batch"].startswith("6 images in ") and all(pixels.shape[1] < 900 for pixels in previews)


def test_the_decode_says_under_itself_what_its_report_says(host, base_graph, node_texts):
    graph = base_graph(steps=1)
    graph["decode"][1].update(method="strips", budget_gb=0.0)
    graph["catch report"] = ("Catch", {"value": ["decode", 1], "name": "report"})
    assert host.run(graph)["report"] == dict(node_texts)["decode"]
    assert "MB predicted" in dict(node_texts)["decode"]
