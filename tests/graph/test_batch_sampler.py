"""SANA Batch Sampler in the host: on one device, and on two workers of the CPU."""

import logging
import re
import time

import pytest
import torch
from fake_cuda import pack
from in_process import NodeError

# the same bits need the same threads
pytestmark = pytest.mark.usefixtures("one_thread", "one_load")

PROMPTS = "a red circle on a blue background\na blue square on a white background"
TWO = "cpu x 2"
# The multistep sampler has all of its orders from the third step on.
STEPS = 4


@pytest.fixture
def batch_graph(base_graph):
    """A function of overrides: two prompts, three pictures each, with latent, pictures and the same by SANA Sampler."""

    def build(prompts=PROMPTS, **inputs):
        graph = base_graph()
        options = {
            "count": 3,
            "seed": 7,
            "steps": STEPS,
            "guidance": 4.5,
            "sampler": "flow_dpmpp_2m",
            "devices": "default",
        }
        links = {
            "model": ["load", 0],
            "positive": ["list", 0],
            "negative": ["negative", 0],
            "latent_image": ["empty", 0],
        }
        return {
            **{key: graph[key] for key in ("load", "negative", "empty")},
            "list": ("SanaNodesPromptList", {"clip": ["load", 1], "prompts": prompts, "instruction": True}),
            "batch": ("SanaNodesBatchSampler", {**links, **options, "chunk": 2, "vae": ["load", 2], **inputs}),
            "catch latent": ("Catch", {"value": ["batch", 0], "name": "latent"}),
            "catch image": ("Catch", {"value": ["batch", 1], "name": "image"}),
        }

    return build


@pytest.fixture(scope="module")
def alone(host):
    """A function of prompt and seed: that picture by SANA Sampler, with a batch of one."""
    known_names = {}

    def draw(base_graph, prompt, seed):
        if (prompt, seed) not in known_names:
            known_names[prompt, seed] = host.run(base_graph(text=prompt, seed=seed, steps=STEPS))["image"][0]
        return known_names[prompt, seed]

    return draw


@pytest.mark.parametrize(
    "options", [{}, {"devices": TWO}, {"devices": TWO, "chunk": 0}, {"devices": "all", "chunk": 5}]
)
def test_its_pictures_are_those_of_sana_sampler(host, base_graph, batch_graph, alone, options):
    caught = host.run(batch_graph(**options))
    assert caught["latent"]["samples"].shape == (6, 32, 4, 4)
    assert caught["latent"]["batch_index"] == [0, 1, 2, 0, 1, 2]
    for index, picture in enumerate(caught["image"]):
        expected = alone(base_graph, PROMPTS.splitlines()[index // 3], 7 + index % 3)
        assert torch.equal(picture, expected)


@pytest.fixture
def with_lora(install, batch_graph):
    """A function of overrides: the batch with a random LoRA on every cross-attention's query."""
    random = torch.Generator().manual_seed(1)
    tensors = {}
    for block in range(5):
        for part, shape in (("lora_A", (4, 160)), ("lora_B", (160, 4))):
            name = f"transformer.transformer_blocks.{block}.attn2.to_q.{part}.weight"
            tensors[name] = torch.randn(shape, generator=random) * 0.2
    install("loras", "batch.safetensors", tensors)

    def build(**inputs):
        lora = {"model": ["load", 0], "lora_name": "batch.safetensors", "strength_model": 1.0}
        return {**batch_graph(model=["lora", 0], **inputs), "lora": ("SanaNodesLoraLoader", lora)}

    return build


def test_two_workers_draw_the_same_bits_as_one_also_with_a_lora_and_twice(host, batch_graph, with_lora):
    first = host.run(with_lora())
    assert (first["image"] - host.run(batch_graph(devices=TWO))["image"]).abs().mean() > 0.01
    for _ in range(2):
        again = host.run(with_lora(devices=TWO))
        assert torch.equal(again["image"], first["image"])
        assert torch.equal(again["latent"]["samples"], first["latent"]["samples"])


def test_seeds_count_from_the_place_of_the_latent_in_its_batch(host, base_graph, batch_graph, alone):
    graph = batch_graph(count=2)
    graph["empty"][1]["batch_size"] = 3
    graph["pick"] = ("LatentFromBatch", {"samples": ["empty", 0], "batch_index": 2, "length": 1})
    graph["batch"][1]["latent_image"] = ["pick", 0]
    caught = host.run(graph)
    assert caught["latent"]["batch_index"] == [2, 3, 2, 3] and caught["latent"]["sana_seed"] == 7
    for index, picture in enumerate(caught["image"]):
        assert torch.equal(picture, alone(base_graph, PROMPTS.splitlines()[index // 2], 9 + index % 2))


def test_without_a_vae_there_is_a_latent_and_no_image(host, batch_graph):
    graph = batch_graph()
    del graph["batch"][1]["vae"], graph["catch image"]
    assert set(host.run(graph)) == {"latent"}


def test_a_device_that_is_not_here_is_passed_on_with_a_log(host, batch_graph, caplog):
    with caplog.at_level(logging.WARNING):
        assert len(host.run(batch_graph(devices="gpu:5"))["image"]) == 6
    assert "no device gpu:5 here; using cpu" in caplog.text


def test_cancel_stops_both_workers_and_the_next_run_is_whole(host, batch_graph, watched):
    expected = host.run(batch_graph(count=6))["image"]
    seen = []

    def cancel(value, total, preview):
        seen.append((value, total, preview is not None))
        if len(seen) == 5:
            host.nodes.interrupt_processing()

    watched(cancel)
    with pytest.raises(InterruptedError):
        host.run(batch_graph(count=6, devices=TWO))
    # the step in which it was, and at most one more of each worker
    assert 5 <= len(seen) <= 8
    assert seen[0][1:] == (12 * STEPS, True)
    assert torch.equal(host.run(batch_graph(count=6))["image"], expected)


@pytest.mark.parametrize("place", ["load", "step", "decode", "layer"])
def test_interrupt_is_heard_in_the_midst_of_a(host, batch_graph, monkeypatch, place):
    """Work of many small calls, any of which may be the last."""
    expected = host.run(batch_graph())["image"]
    heard = []

    def work_for_long(*args, **kwargs):
        host.nodes.interrupt_processing()
        deadline = time.monotonic() + 30
        try:
            while time.monotonic() < deadline:
                torch.zeros(1).add(1)
                # A decode polls between its strips.
                for poll in args[2:] if place == "decode" else ():
                    poll()
        except BaseException:
            heard.append(place)
            raise

    with monkeypatch.context() as patch:
        if place == "load":
            patch.setattr(host, "loaded", None)
            patch.setattr(pack("nodes.host.loading.weights"), "component_tensors", work_for_long)
        elif place == "step":
            patch.setattr(pack("nodes.host.sampling.model").SanaDiffusionModel, "forward", work_for_long)
        elif place == "layer":
            patch.setattr(pack("sana_core.decode.streaming"), "convolve", work_for_long)
        else:
            patch.setattr(pack("nodes.host.batch.devices"), "decode_loaded", work_for_long)
        with pytest.raises(InterruptedError):
            host.run(batch_graph(devices=TWO, seed=8))
    assert heard
    host.nodes.interrupt_processing(False)
    assert torch.equal(host.run(batch_graph())["image"], expected)


@pytest.mark.parametrize("devices", ["default", TWO])
def test_interrupt_while_a_lora_is_added_leaves_nothing_of_it(host, batch_graph, with_lora, monkeypatch, devices):
    import comfy.lora

    expected = host.run(batch_graph())["image"]
    real, added = comfy.lora.calculate_weight, []

    def calculate_weight(*args, **kwargs):
        added.append(args)
        if len(added) == 3:
            host.nodes.interrupt_processing()
            # Leave the node time to notice the interrupt.
            time.sleep(1)
        return real(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(comfy.lora, "calculate_weight", calculate_weight)
        with pytest.raises(InterruptedError):
            host.run(with_lora(devices=devices), keep_cache=True)
    assert len(added) >= 3
    host.nodes.interrupt_processing(False)
    assert torch.equal(host.run(batch_graph(), keep_cache=True)["image"], expected)


def test_memory_that_runs_out_makes_the_chunks_smaller(host, batch_graph, caplog, monkeypatch):
    devices = pack("nodes.host.batch.devices")
    real, fates = devices.sample, iter([False, True, True])

    def run_out(*args):
        if next(fates, False):
            raise torch.OutOfMemoryError("fake")
        return real(*args)

    expected = host.run(batch_graph(chunk=2))["image"]
    monkeypatch.setattr(devices, "sample", run_out)
    image = host.run(batch_graph(chunk=6))["image"]
    # the second picture of six failed, then the first of the two that remained of the first half
    assert re.findall(r"memory ran out on cpu with (\d) images", caplog.text) == ["6", "2"]
    assert torch.equal(image, expected)


@pytest.mark.parametrize(
    "inputs, message",
    [
        ({"count": 0}, "count"),
        ({"count": 1_000_000}, "count"),
        ({"count": 4000}, "count: got 4000 of 2 prompts, expected at most 4096 images in all"),
    ],
)
def test_numbers_out_of_range_are_named(host, batch_graph, inputs, message):
    with pytest.raises(NodeError, match=message):
        host.run(batch_graph(**inputs))


def test_a_batch_of_latents_is_refused(host, batch_graph):
    graph = batch_graph()
    graph["empty"][1]["batch_size"] = 2
    with pytest.raises(NodeError, match="latent_image: got a batch of 2, expected 1; set count"):
        host.run(graph)
