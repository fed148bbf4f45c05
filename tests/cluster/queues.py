"""A server whose operator has configured a cluster, and the graphs that tests queue on it."""

import json
from contextlib import contextmanager

import layouts
import pytest
import torch
from checkpoints import link_tiny
from host import ROOT, base_directory, start_server
from machines import add_node

LORA = "cluster.safetensors"


@contextmanager
def start_on_cluster(name, cluster, output):
    """A server on a cluster that gets two machines."""
    configure(name, cluster.client_address)
    for _ in range(2):
        add_node(cluster)
    with pytest.MonkeyPatch.context() as patch:
        # Actors have one thread too. With another number, sums are rounded differently.
        patch.setenv("OMP_NUM_THREADS", "1")
        with start_server(name, output) as running:
            yield running


def write_lora(name):
    """Write a LoRA of the bundled model where the server of that name finds it."""
    random = torch.Generator().manual_seed(1)
    tensors = {}
    for block in range(5):
        for part, shape in (("lora_A", (4, 160)), ("lora_B", (160, 4))):
            layer = f"transformer.transformer_blocks.{block}.attn2.to_q.{part}.weight"
            tensors[layer] = torch.randn(shape, generator=random) * 0.2
    layouts.save(tensors, base_directory(name) / "models" / "loras" / LORA)


def configure(name, address, **share):
    """Write the operator's file of the server of that name, and give it the model of the graphs."""
    link_tiny(base_directory(name))
    file = base_directory(name) / "user" / "__sana" / "cluster.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps({"address": address, **share}))


def demo_nodes(*numbers, **inputs):
    """Return the demo's nodes of those ids, and the inputs of its sampler for SANA Batch Sampler, with `inputs`."""
    demo = json.loads((ROOT / "tests" / "graphs" / "tiny.json").read_text())
    sampler_inputs = {
        key: value for key, value in demo["5"]["inputs"].items() if key not in ("denoise", "model_defaults")
    }
    return {key: demo[key] for key in numbers}, {**sampler_inputs, "chunk": 1, "vae": ["1", 2], **inputs}


def batch_graph(devices, **inputs):
    """Return the graph of a batch of one prompt on those devices, whose pictures are saved."""
    nodes, sampler_inputs = demo_nodes("1", "2", "3", "4", devices=devices, **inputs)
    nodes["5"] = {"class_type": "SanaNodesBatchSampler", "inputs": sampler_inputs}
    nodes["6"] = {"class_type": "SaveImage", "inputs": {"images": ["5", 1], "filename_prefix": devices}}
    return nodes
