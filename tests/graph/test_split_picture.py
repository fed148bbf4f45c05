"""SANA Split Image in the host: the two halves of the CPU draw what the whole draws, under every sampler."""

import threading

import pytest
import torch
from fake_cuda import pack
from in_process import NodeError

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
    module = pack("nodes.host.split")
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


def core_graph(graph):
    """`graph` with KSampler in the place of our sampler."""
    links = {key: graph["sample"][1][key] for key in ("model", "positive", "negative", "latent_image")}
    settings = {"seed": 3, "steps": STEPS, "cfg": 4.5, "sampler_name": "euler", "scheduler": "normal", "denoise": 1.0}
    graph["sample"] = ("KSampler", {**links, **settings})
    return graph


def test_two_halves_draw_what_the_whole_draws(host, base_graph, split_graph, shards):
    """A prompt each where it is guided, and half of the rows where there is one."""
    for guidance, shape in ((4.5, (1, 4)), (1.0, (1, 2))):
        own = {"guidance": guidance, "steps": STEPS}
        assert_same(latents(host, split_graph(**own)), latents(host, base_graph(**own)))
        assert len(shards) == 2 * STEPS and {seen[1:] for seen in shards} == {shape}
        shards.clear()


def test_ksampler_and_custom_samplers_too(host, base_graph, custom_graph, split_graph, shards):
    assert_same(latents(host, core_graph(split_graph())), latents(host, core_graph(base_graph())))
    custom = latents(host, split_graph(graph=custom_graph(steps=STEPS)))
    assert_same(custom, latents(host, custom_graph(steps=STEPS)))
    assert len(shards) == 2 * 2 * STEPS


def test_a_lora_behind_the_node_is_on_all_devices(host, base_graph, split_graph, put):
    generator = torch.Generator().manual_seed(0)
    name = put(
        "loras",
        "split.safetensors",
        {
            "transformer.transformer_blocks.1.attn1.to_q.lora_A.weight": torch.randn(2, 160, generator=generator),
            "transformer.transformer_blocks.1.attn1.to_q.lora_B.weight": torch.randn(160, 2, generator=generator),
        },
    )

    def with_lora(graph, source):
        graph["lora"] = ("SanaNodesLoraLoader", {"model": [source, 0], "lora_name": name, "strength_model": 1.0})
        graph["sample"][1]["model"] = ["lora", 0]
        return graph

    expected = latents(host, with_lora(base_graph(steps=STEPS), "load"))
    assert (expected - latents(host, base_graph(steps=STEPS))).abs().max() > 1e-2
    assert_same(latents(host, with_lora(split_graph(), "split")), expected)
    # and it does not stay on them
    assert_same(latents(host, split_graph()), latents(host, base_graph(steps=STEPS)))


def test_perturbed_attention_and_the_guidance_interval_go_with_it(host, base_graph, split_graph):
    def patched(graph, source):
        graph["pag"] = ("SanaNodesPAG", {"model": [source, 0], "scale": 2.0})
        graph["interval"] = ("SanaNodesGuidanceInterval", {"model": ["pag", 0], "start": 0.3, "end": 1.0})
        graph["sample"][1]["model"] = ["interval", 0]
        return graph

    assert_same(latents(host, patched(split_graph(), "split")), latents(host, patched(base_graph(steps=STEPS), "load")))


def test_memory_that_runs_out_on_one_leaves_the_picture_to_the_other(
    host, base_graph, split_graph, monkeypatch, caplog
):
    split = pack("nodes.host.split")
    velocity, failed = split.shard_velocity, []

    def short(transformer, shard, *args):
        if len(failed) == 0 and threading.current_thread().name.endswith("_1"):
            failed.append(transformer)
            raise torch.OutOfMemoryError("out of memory")
        return velocity(transformer, shard, *args)

    monkeypatch.setattr(split, "shard_velocity", short)
    assert_same(latents(host, split_graph(seed=5)), latents(host, base_graph(steps=STEPS, seed=5)))
    assert failed and "its rows of the image go to the others" in caplog.text


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


def test_a_patch_that_replaces_a_part_of_the_model_is_refused(host, split_graph, monkeypatch):
    class Replace:
        RETURN_TYPES, FUNCTION = ("MODEL",), "patch"

        @classmethod
        def INPUT_TYPES(cls):
            return {"required": {"model": ("MODEL",)}}

        def patch(self, model):
            model = model.clone()
            own = model.model.diffusion_model.proj_out
            model.add_object_patch("diffusion_model.proj_out", own)
            return (model,)

    monkeypatch.setitem(host.nodes.NODE_CLASS_MAPPINGS, "Replace", Replace)
    graph = split_graph()
    graph["replace"] = ("Replace", {"model": ["split", 0]})
    graph["sample"][1]["model"] = ["replace", 0]
    with pytest.raises(NodeError, match=r"cannot share an image with \(diffusion_model.proj_out\); remove it"):
        latents(host, graph)
    graph["split"][1]["devices"] = 3
    with pytest.raises(NodeError, match="devices: got 3, expected a name"):
        latents(host, graph)


def caught(name):
    return {"catch": ("Catch", {"value": [name, 0], "name": "latent"})}


def test_a_batch_over_devices_lets_each_draw_its_own(host, base_graph, split_graph, shards):
    graph = split_graph()
    links = {key: graph["sample"][1][key] for key in ("model", "positive", "negative", "latent_image")}
    own = {"count": 2, "seed": 3, "steps": STEPS, "guidance": 4.5, "sampler": "flow_dpmpp_2m", "devices": TWO}
    graph["sample"] = ("SanaNodesBatchSampler", {**links, **own, "chunk": 1})
    assert_same(latents(host, graph)[:1], latents(host, base_graph(steps=STEPS)))
    assert not shards
