"""Replicas of SANA Split Image and SANA Batch Sampler in ComfyUI's list of loaded models."""

import gc
import weakref

import pytest
import torch
from fake_cuda import pack

STEPS = 2


@pytest.fixture
def split_graph(base_graph):
    """A function of (seed): the base graph with SANA Split Image between the loader and the sampler."""

    def build(seed):
        graph = base_graph(steps=STEPS, seed=seed)
        graph["split"] = ("SanaNodesSplitPicture", {"model": ["load", 0], "devices": "cpu x 2"})
        graph["sample"][1]["model"] = ["split", 0]
        graph["catch model"] = ("Catch", {"value": ["load", 0], "name": "model"})
        return graph

    return build


@pytest.fixture
def reads(host, monkeypatch):
    """A list that grows by a weak reference to each module that is read for a replica."""
    patcher_class, modules = pack("nodes.host.loading.load_model").comfy.model_patcher.ModelPatcher, []
    deepclone = patcher_class.deepclone_multigpu

    def counted(patcher, *args, **options):
        clone = deepclone(patcher, *args, **options)
        modules.append(weakref.ref(clone.model))
        return clone

    monkeypatch.setattr(patcher_class, "deepclone_multigpu", counted)
    return modules


@pytest.fixture
def lora(install):
    """The name of a LoRA that changes the latents."""
    generator = torch.Generator().manual_seed(0)
    layer = "transformer.transformer_blocks.1.attn1.to_q.lora"
    tensors = {f"{layer}_A.weight": torch.randn(2, 160, generator=generator)}
    tensors[f"{layer}_B.weight"] = torch.randn(160, 2, generator=generator)
    return install("loras", "replica.safetensors", tensors)


def entries():
    """Return {loaded module: entry} of ComfyUI's list, with the module that ComfyUI would unload for the entry."""
    from comfy.model_management import current_loaded_models

    return {id(entry.real_model()): entry for entry in current_loaded_models if entry.real_model() is not None}


def test_replica_stays_listed_with_its_own_weights_after_sampling(host, split_graph, reads):
    host.run(split_graph(seed=1))
    (replica,) = reads
    entry = entries()[id(replica())]
    assert entry.model is not None and entry.model.model is replica()
    assert entry.device == entry.model.load_device


def test_next_queue_uses_the_replica_again(host, split_graph, reads, lora):
    graph = split_graph(seed=1)
    host.run(graph)
    graph["lora"] = ("SanaNodesLoraLoader", {"model": ["load", 0], "lora_name": lora, "strength_model": 1.0})
    graph["split"][1]["model"] = ["lora", 0]
    host.run(graph, keep_cache=True)
    batch = {**graph["sample"][1], "model": ["load", 0], "count": 2, "devices": "cpu x 2", "chunk": 1}
    graph["sample"] = ("SanaNodesBatchSampler", batch)
    host.run(graph, keep_cache=True)
    assert len(reads) == 1


def test_unload_models_unloads_the_replica_and_the_next_queue_loads_it_again(host, split_graph, reads):
    import comfy.model_management

    expected = host.run(split_graph(seed=1))["latent"]["samples"]
    (replica,) = reads
    assert replica().model_loaded_weight_memory > 0
    comfy.model_management.unload_all_models()
    assert id(replica()) not in entries() and replica().model_loaded_weight_memory == 0
    graph = split_graph(seed=2)
    host.run(graph, keep_cache=True)
    assert len(reads) == 1 and id(replica()) in entries()
    assert torch.equal(host.run(split_graph(seed=1), keep_cache=True)["latent"]["samples"], expected)


def test_replica_is_freed_with_the_model(host, split_graph, reads):
    from in_process import Catch

    host.run(split_graph(seed=1))
    Catch.caught = {}
    (replica,) = reads
    number = id(replica())
    host.executor.reset()
    gc.collect()
    assert replica() is None and number not in entries()


def test_lora_survives_the_unloading_of_a_part_of_the_replica(host, base_graph, split_graph, reads, lora, short_memory):
    def with_lora(graph, model):
        """A LoRA behind SANA Split Image is in the clones of a sampling only."""
        graph["lora"] = ("SanaNodesLoraLoader", {"model": model, "lora_name": lora, "strength_model": 1.0})
        graph["sample"][1]["model"] = ["lora", 0]
        return graph

    expected = host.run(with_lora(base_graph(steps=STEPS, seed=2), ["load", 0]))["latent"]["samples"]
    host.run(split_graph(seed=1))
    host.run(with_lora(split_graph(seed=1), ["split", 0]), keep_cache=True)
    (replica,) = reads
    patcher = entries()[id(replica())].model
    # ComfyUI does this when another model needs the memory. The next sampling has little memory too.
    assert patcher.partially_unload(patcher.offload_device, patcher.loaded_size() - 1)
    short_memory("NORMAL_VRAM")
    got = host.run(with_lora(split_graph(seed=2), ["split", 0]), keep_cache=True)["latent"]["samples"]
    assert (got - expected).abs().max() <= 1e-4 * expected.abs().max()
