"""SANA Split Image in the host: two halves on the CPU give the image of an undivided run, for every sampler."""

import threading

import pytest
import torch
from fake_cuda import pack
from in_process import NodeError
from loading import ksampler, through

pytestmark = pytest.mark.usefixtures("one_load")

TWO = "cpu x 2"
STEPS = 4


@pytest.fixture
def split_graph(base_graph):
    """A function of overrides: the base graph with SANA Split Image between loader and sampler."""

    def build(devices=TWO, graph=None, **sampler):
        graph = base_graph(**{"steps": STEPS, **sampler}) if graph is None else graph
        graph["split"] = ("SanaNodesSplitPicture", {"model": ["load", 0], "devices": devices})
        for name in ("sample", "guider"):
            if name in graph and "model" in graph[name][1]:
                graph[name][1]["model"] = ["split", 0]
        return graph

    return build


@pytest.fixture
def shards(host, monkeypatch):
    """A list that grows by the transformer, the pictures and the rows of each shard that is computed."""
    module = pack("nodes.host.sampling.split")
    seen, velocity = [], module.shard_velocity

    def counted(transformer, shard, *args):
        seen.append((transformer, len(shard.x), shard.x.shape[2]))
        return velocity(transformer, shard, *args)

    monkeypatch.setattr(module, "shard_velocity", counted)
    return seen


def latents(host, graph):
    return host.run(graph, keep_cache=True)["latent"]["samples"]


def assert_same(got, expected):
    assert (got - expected).abs().max() <= 1e-4 * expected.abs().max()


def test_two_halves_draw_what_the_whole_draws(host, base_graph, split_graph, shards):
    """A prompt each where it is guided, and half of the rows where there is one."""
    for guidance, shape in ((4.5, (1, 4)), (1.0, (1, 2))):
        options = {"guidance": guidance, "steps": STEPS}
        assert_same(latents(host, split_graph(**options)), latents(host, base_graph(**options)))
        assert len(shards) == 2 * STEPS and {seen[1:] for seen in shards} == {shape}
        shards.clear()


def test_ksampler_and_custom_samplers_too(host, base_graph, custom_graph, split_graph, shards):
    assert_same(latents(host, ksampler(split_graph())), latents(host, ksampler(base_graph(steps=STEPS))))
    custom = latents(host, split_graph(graph=custom_graph(steps=STEPS)))
    assert_same(custom, latents(host, custom_graph(steps=STEPS)))
    assert len(shards) == 2 * 2 * STEPS


def test_a_lora_behind_the_node_is_on_all_devices(host, base_graph, split_graph, install):
    generator = torch.Generator().manual_seed(0)
    layer = "transformer.transformer_blocks.1.attn1.to_q.lora"
    tensors = {f"{layer}_A.weight": torch.randn(2, 160, generator=generator)}
    tensors[f"{layer}_B.weight"] = torch.randn(160, 2, generator=generator)
    name = install("loras", "split.safetensors", tensors)

    def with_lora(graph):
        return through(graph, "SanaNodesLoraLoader", lora_name=name, strength_model=1.0)

    expected = latents(host, with_lora(base_graph(steps=STEPS)))
    assert (expected - latents(host, base_graph(steps=STEPS))).abs().max() > 1e-2
    assert_same(latents(host, with_lora(split_graph())), expected)
    # The LoRA does not stay on the halves.
    assert_same(latents(host, split_graph()), latents(host, base_graph(steps=STEPS)))


def test_perturbed_attention_and_the_guidance_interval_go_with_it(host, base_graph, split_graph):
    def patched(graph):
        return through(
            through(graph, "SanaNodesPAG", "pag", scale=2.0), "SanaNodesGuidanceInterval", start=0.3, end=1.0
        )

    assert_same(latents(host, patched(split_graph())), latents(host, patched(base_graph(steps=STEPS))))


def test_memory_that_runs_out_on_one_leaves_the_picture_to_the_other(
    host, base_graph, split_graph, monkeypatch, caplog
):
    split = pack("nodes.host.sampling.split")
    velocity, failed = split.shard_velocity, []

    def short(transformer, shard, *args):
        if len(failed) == 0 and threading.current_thread().name.endswith("#2"):
            failed.append(transformer)
            raise torch.OutOfMemoryError("out of memory")
        return velocity(transformer, shard, *args)

    monkeypatch.setattr(split, "shard_velocity", short)
    assert_same(latents(host, split_graph(seed=5)), latents(host, base_graph(steps=STEPS, seed=5)))
    assert failed and "its rows go to the others" in caplog.text


def test_one_device_says_so_and_draws(host, base_graph, split_graph, shards, caplog):
    caplog.set_level("INFO")
    assert_same(latents(host, split_graph("all", seed=6)), latents(host, base_graph(steps=STEPS, seed=6)))
    assert "one device, cpu, computes the image" in caplog.text and not shards


def test_a_picture_of_too_few_rows_is_refused_before_anything_is_loaded(host, split_graph, monkeypatch):
    graph = split_graph()
    graph["empty"][1]["height"] = 32
    import comfy.model_management

    host.run({key: graph[key] for key in ("load", "positive", "negative", "split")} | caught("split"), keep_cache=True)
    monkeypatch.setattr(comfy.model_management, "load_models_gpu", None)
    with pytest.raises(NodeError, match="devices: got 2 for an image of 1 rows of 32 pixels, expected at most 1"):
        latents(host, graph)


def test_a_patch_that_replaces_a_part_of_the_model_is_refused(host, split_graph):
    graph = split_graph()
    model = host.run({key: graph[key] for key in ("load", "split")} | caught("split"))["latent"].clone()
    model.add_object_patch("diffusion_model.proj_out", model.model.diffusion_model.proj_out)
    graph["replaced"] = ("AnyValue", {"value": model})
    graph["sample"][1]["model"] = ["replaced", 0]
    with pytest.raises(NodeError, match=r"cannot share an image with \(diffusion_model.proj_out\); remove it"):
        latents(host, graph)
    graph["split"][1]["devices"], graph["sample"][1]["model"] = 3, ["split", 0]
    with pytest.raises(NodeError, match="devices: got 3, expected a name"):
        latents(host, graph)


def caught(name):
    return {"catch": ("Catch", {"value": [name, 0], "name": "latent"})}


def test_a_batch_over_devices_lets_each_draw_its_own(host, base_graph, split_graph, shards):
    graph = split_graph()
    links = {key: graph["sample"][1][key] for key in ("model", "positive", "negative", "latent_image")}
    options = {"count": 2, "seed": 3, "steps": STEPS, "guidance": 4.5, "sampler": "flow_dpmpp_2m", "devices": TWO}
    graph["sample"] = ("SanaNodesBatchSampler", {**links, **options, "chunk": 1})
    assert_same(latents(host, graph)[:1], latents(host, base_graph(steps=STEPS)))
    assert not shards
