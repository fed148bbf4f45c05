"""A value in the place of a link, which ComfyUI lets through, is refused by every node by name."""

import pytest
import torch
from in_process import NodeError
from loading import controlled
from setup import ROOT

pytestmark = pytest.mark.usefixtures("one_load")

# Values that a link of type * or the HTTP API may pass.
WRONG = [0, None, "load", True, {}, {"samples": 3}, ["text"], object()]


@pytest.fixture(scope="module")
def linked(host):
    """One good object of each type of socket."""
    graph = {
        "load": ("SanaNodesLoader", {"model": "sana-tiny"}),
        "text": ("SanaNodesTextEncode", {"clip": ["load", 1], "text": "a red circle", "instruction": False}),
        "empty": ("SanaNodesEmptyLatent", {"width": 64, "height": 64, "batch_size": 1}),
        "data": ("SanaNodesDataset", {"folder": "cyanotypes (bundled)", "resolution": 64}),
    }
    links = {"MODEL": ["load", 0], "CLIP": ["load", 1], "VAE": ["load", 2], "CONDITIONING": ["text", 0]}
    links |= {"LATENT": ["empty", 0], "SANA_DATASET": ["data", 0]}
    graph["settings"] = ("SanaNodesTrainSettings", {})
    links |= {"SANA_TRAIN_SETTINGS": ["settings", 0]}
    catches = {f"catch {kind}": ("Catch", {"value": link, "name": kind}) for kind, link in links.items()}
    return host.run(graph | catches)


def sockets(host):
    """Yield each of our nodes, its schema and an input of it that wants a link."""
    for name, node in host.nodes.NODE_CLASS_MAPPINGS.items():
        if name.startswith("SanaNodes"):
            schema = node.GET_SCHEMA()
            for socket in schema.inputs:
                if not hasattr(socket, "default"):
                    yield node, schema, socket


def test_every_socket_refuses_what_is_not_of_its_type(host, linked):
    seen = set()
    for node, schema, socket in sockets(host):
        good = {item.id: linked.get(item.io_type, getattr(item, "default", None)) for item in schema.inputs}
        # A choice without a default starts at its first option.
        good |= {
            item.id: item.options[0]
            for item in schema.inputs
            if getattr(item, "options", None) and good[item.id] is None
        }
        for wrong in WRONG:
            fits = (socket.io_type == "CONDITIONING" and isinstance(wrong, list)) or (wrong is None and socket.optional)
            if fits:
                continue
            inputs = {**good, socket.id: wrong}
            if schema.is_input_list:
                inputs = {field: [value] for field, value in inputs.items()}
            with pytest.raises(ValueError, match=f"^{socket.id}: got .*, expected a {socket.io_type}; connect"):
                node.execute(**inputs)
            seen.add((schema.node_id, socket.id))
    assert len(seen) > 15
    assert {("SanaNodesLoraLoader", "clip"), ("SanaNodesTrain", "dataset"), ("SanaNodesTrain", "settings")} <= seen


def test_the_error_reaches_whoever_queued_the_graph(host, base_graph):
    graph = base_graph()
    graph["sample"][1]["model"] = 0
    with pytest.raises(NodeError, match="^model: got 0, expected a MODEL; connect an output of that type$"):
        host.run(graph)


def test_preview_as_text_shows_no_folder_of_this_machine(host, base_graph):
    graph = base_graph(steps=1)
    graph["load"][1]["model"] = "sana-posters (bundled)"
    image = torch.rand(1, 128, 128, 3, generator=torch.Generator().manual_seed(1))
    controlled(graph, "sana-posters-edges (bundled)", image)
    graph["select"] = ("SanaNodesSamplerSelect", {"sampler": "flow_euler"})
    inputs = {"model": ["load", 0], "positive": ["apply", 0], "negative": ["apply", 1], "cfg": 4.5}
    graph["guider"] = ("CFGGuider", inputs)
    lora = {"lora_name": "sana-posters-cyanotype (bundled)", "strength_model": 1.0, "strength_clip": 1.0}
    graph["lora"] = ("SanaNodesLoraLoader", {"model": ["load", 0], "clip": ["load", 1], **lora})
    graph["scorer"] = ("SanaNodesScorerLoader", {"scorer_name": "sana-posters-scorer (bundled)"})
    graph["data"] = ("SanaNodesDataset", {"folder": "cyanotypes (bundled)", "resolution": 64})
    settings = {"existing_lora": "sana-posters-cyanotype (bundled)", "regularisation": ["data", 0]}
    graph["settings"] = ("SanaNodesTrainSettings", settings)
    graph["tiled"] = ("SelectVAEDevice", {"vae": ["load", 2], "device": "cpu"})
    graph = {name: node for name, node in graph.items() if node[0] != "Catch"}
    slots = [
        (name, slot)
        for name in graph
        for slot in range(len(host.nodes.NODE_CLASS_MAPPINGS[graph[name][0]].RETURN_TYPES))
    ]
    for number, (name, slot) in enumerate(slots):
        graph[f"preview {number}"] = ("PreviewAny", {"source": [name, slot]})
        graph[f"catch {number}"] = ("Catch", {"value": [f"preview {number}", 0], "name": f"{name} {slot}"})
    texts = host.run(graph)
    kinds = "ModelPatcher VAE CLIP SanaControlNet FlowSampler CFGGuider Dataset RunSettings HostScorer tensor"
    assert len(texts) == len(slots) and all(any(kind in text for text in texts.values()) for kind in kinds.split())
    folders = (ROOT, ROOT.name, host.models.parent, "custom_nodes")
    assert not {name for name, text in texts.items() if any(str(folder) in text for folder in folders)}
