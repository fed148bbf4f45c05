"""An image depends on its prompt and seed, not on the other images of its batch."""

import pytest
import torch

pytestmark = pytest.mark.usefixtures("one_load")


def test_the_same_seed_gives_the_same_picture_twice(host, base_graph):
    first, again = host.run(base_graph())["image"], host.run(base_graph())["image"]
    assert torch.equal(first, again)
    assert (first - host.run(base_graph(seed=4))["image"]).abs().mean() > 0.01


def test_picture_k_of_a_batch_is_the_picture_of_seed_plus_k(host, base_graph):
    batch = host.run(base_graph(batch_size=3, seed=7))["image"]
    for k in range(3):
        alone = host.run(base_graph(seed=7 + k))["image"]
        torch.testing.assert_close(batch[k : k + 1], alone, atol=1e-4, rtol=0)


def test_a_latent_taken_from_a_batch_keeps_its_seed(host, base_graph):
    graph = base_graph(seed=7)
    graph["empty"][1]["batch_size"] = 3
    graph["pick"] = ("LatentFromBatch", {"samples": ["empty", 0], "batch_index": 2, "length": 1})
    graph["sample"][1]["latent_image"] = ["pick", 0]
    torch.testing.assert_close(host.run(graph)["image"], host.run(base_graph(seed=9))["image"], atol=1e-4, rtol=0)


def test_the_largest_seed_draws(host, base_graph):
    assert host.run(base_graph(seed=2**64 - 1, batch_size=2, steps=2))["image"].isfinite().all()


def test_inputs_are_left_as_they_were(host, base_graph):
    graph = base_graph()
    for name, link in (("empty", ["empty", 0]), ("positive", ["positive", 0]), ("model", ["load", 0])):
        graph["keep " + name] = ("Catch", {"value": link, "name": name})
    before = host.run(
        {key: graph[key] for key in graph if key not in ("sample", "decode", "catch latent", "catch image")}
    )
    saved = {
        "samples": before["empty"]["samples"].clone(),
        "embeds": before["positive"][0][0].clone(),
        "options": repr(before["model"].model_options),
    }
    host.run(graph, keep_cache=True)
    assert set(before["empty"]) == {"samples", "downscale_ratio_spacial"}
    assert torch.equal(before["empty"]["samples"], saved["samples"])
    assert torch.equal(before["positive"][0][0], saved["embeds"])
    assert repr(before["model"].model_options) == saved["options"]


def test_cancel_ends_the_sampling_within_a_step_and_the_next_run_is_whole(host, base_graph, watched):
    expected = host.run(base_graph(steps=20))["image"]
    steps = []

    def cancel_at_step_5(value, total, preview):
        steps.append(value)
        host.nodes.interrupt_processing(len(steps) == 5)

    watched(cancel_at_step_5)
    with pytest.raises(InterruptedError, match="^sample$"):
        host.run(base_graph(steps=20))
    assert steps == [1, 2, 3, 4, 5]
    assert torch.equal(host.run(base_graph(steps=20))["image"], expected)
