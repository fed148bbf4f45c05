"""The graph that most tests begin with, models of other kinds, and files in ComfyUI's folders."""

import gc
import json
import shutil

import layouts
import pytest
import torch
from loading import component
from pictures import write_pictures
from variants import SANA_1_5, SPRINT, make_variant


@pytest.fixture(scope="module")
def one_load(host):
    """In a file of tests, loaders with the same inputs and files run once. All other nodes run in each graph."""
    from comfy.model_management import cleanup_models

    host.loaded = {}
    yield
    host.loaded = None
    # ComfyUI's list must not keep entries of freed models for the next file.
    host.executor.reset()
    gc.collect()
    cleanup_models()


@pytest.fixture
def base_graph():
    """A function of overrides: the demo graph up to the sampler's LATENT, caught as "latent", and its picture."""

    def build(**sampler):
        text = sampler.pop("text", "a red circle on a blue background")
        size = {"width": 128, "height": 128, "batch_size": sampler.pop("batch_size", 1)}
        inputs = {"seed": 3, "steps": 8, "guidance": 4.5, "sampler": "flow_dpmpp_2m", **sampler}
        return {
            "load": ("SanaNodesLoader", {"model": "sana-tiny"}),
            "positive": ("SanaNodesTextEncode", {"clip": ["load", 1], "text": text, "instruction": True}),
            "negative": ("SanaNodesTextEncode", {"clip": ["load", 1], "text": "", "instruction": False}),
            "empty": ("SanaNodesEmptyLatent", size),
            "sample": (
                "SanaNodesSampler",
                {
                    "model": ["load", 0],
                    "positive": ["positive", 0],
                    "negative": ["negative", 0],
                    "latent_image": ["empty", 0],
                    **inputs,
                },
            ),
            "decode": ("SanaNodesDecode", {"samples": ["sample", 0], "vae": ["load", 2]}),
            "catch latent": ("Catch", {"value": ["sample", 0], "name": "latent"}),
            "catch image": ("Catch", {"value": ["decode", 0], "name": "image"}),
        }

    return build


@pytest.fixture
def operators_file(host):
    """The server's cluster.json, with a cluster that is not there."""
    import folder_paths

    file = host.models.parent / "user" / "__sana" / "cluster.json"
    assert folder_paths.get_system_user_directory("sana") == str(file.parent)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps({"address": "ray://127.0.0.1:1"}))
    yield file
    file.unlink()


@pytest.fixture(scope="module")
def variants(host, checkpoint):
    """Names for SANA Loader of a SANA-Sprint and a SANA-1.5 with random weights."""
    root = host.models / "diffusers"
    folders = [
        make_variant(checkpoint, root / name, **kind) for name, kind in (("sprint", SPRINT), ("sana15", SANA_1_5))
    ]
    yield root
    for folder in folders:
        shutil.rmtree(folder)


@pytest.fixture
def custom_graph(base_graph):
    """A function of overrides: the base graph with core's SamplerCustomAdvanced, our schedule and our sampler."""

    def build(sampler="flow_dpmpp_2m", steps=8, guidance=4.5, model=("load", 0), seed=3, **base):
        graph = base_graph(**base)
        conds = {"positive": ["positive", 0], "negative": ["negative", 0]}
        scheduler = {"model": list(model), "sampler": sampler, "steps": steps, "denoise": 1.0}
        links = {"noise": ["noise", 0], "guider": ["guider", 0], "sampler": ["select", 0], "sigmas": ["sigmas", 0]}
        return {
            **graph,
            "noise": ("RandomNoise", {"noise_seed": seed}),
            "guider": ("CFGGuider", {"model": list(model), **conds, "cfg": guidance}),
            "select": ("SanaNodesSamplerSelect", {"sampler": sampler}),
            "sigmas": ("SanaNodesScheduler", scheduler),
            "sample": ("SamplerCustomAdvanced", {**links, "latent_image": ["empty", 0]}),
        }

    return build


@pytest.fixture
def install(host):
    """A function that saves tensors into one of ComfyUI's folders and takes them away after the test."""
    created = []

    def save(kind, name, tensors, **metadata):
        created.append(layouts.save(tensors, host.models / kind / name, **metadata))
        return name

    yield save
    for path in created:
        path.unlink(missing_ok=True)


@pytest.fixture
def controlled(host):
    """The name of a folder in ComfyUI's input folder, with eight images that have control images."""
    folder = host.models.parent / "input" / "controlled"
    write_pictures(folder, 8, controls=True)
    yield folder.name
    shutil.rmtree(folder)


@pytest.fixture
def node_texts(host, monkeypatch):
    """A list of (node, text): the texts under nodes: progress, warnings, and the lines that stay after a run.

    A cached node has its lines already, so they are not in the list again.
    """
    texts, warnings, run, send_sync = [], {}, host.run, host.server.send_sync

    def send_and_read(event, data, sid=None):
        if event == "sana_note" and data["node"] is not None:
            warnings.setdefault(data["node"], []).append(data["text"])
            texts.append((data["node"], "\n".join(warnings[data["node"]])))
        send_sync(event, data, sid)

    def run_and_read(*args, **kwargs):
        warnings.clear()
        caught = run(*args, **kwargs)
        cached = {node for event, data in host.executor.status_messages for node in data.get("nodes", ())}
        outputs = host.executor.history_result["outputs"].items()
        texts.extend((node, "\n".join(out["sana"])) for node, out in outputs if out.get("sana") and node not in cached)
        return caught

    monkeypatch.setattr(host.server, "send_progress_text", lambda text, node, sid=None: texts.append((node, text)))
    monkeypatch.setattr(host.server, "send_sync", send_and_read)
    monkeypatch.setattr(host, "run", run_and_read)
    return texts


@pytest.fixture
def watched(monkeypatch):
    """A function that hangs `see(value, total, preview)` into the host's progress, where the server's own hook is."""
    import comfy.utils

    monkeypatch.setattr(comfy.utils, "PROGRESS_THROTTLE_MIN_INTERVAL", 0.0)

    def watch(see):
        def hook(value, total, preview, prompt_id=None, node_id=None):
            see(value, total, preview)

        monkeypatch.setattr(comfy.utils, "PROGRESS_BAR_HOOK", hook)

    return watch


@pytest.fixture
def short_memory(host, monkeypatch):
    """A function of ComfyUI's state of memory: for the steps there is enough, of weights some bytes alone fit.

    Layers take the others from elsewhere for each call, if only from the CPU itself.
    """
    import comfy.model_management as management

    def use(state, fitting=200_000):
        room = management.minimum_inference_memory() + fitting
        monkeypatch.setattr(host, "loaded", None)
        monkeypatch.setattr(management, "vram_state", management.VRAMState[state])
        monkeypatch.setattr(management, "is_device_cpu", lambda device: False)
        monkeypatch.setattr(management, "get_free_memory", lambda device=None, torch_free_too=False: room)

    return use


@pytest.fixture
def tokenizer(checkpoint):
    content = (checkpoint / "tokenizer" / "tokenizer.json").read_bytes()
    return {"tokenizer_json": torch.frombuffer(bytearray(content), dtype=torch.uint8)}


@pytest.fixture
def single_files(install, checkpoint, tokenizer):
    """Loader nodes over single files that hold the bundled checkpoint's components."""
    transformer, config = component(checkpoint, "transformer")
    install("diffusion_models", "sana.safetensors", transformer, config=config)
    gemma, config = component(checkpoint, "text_encoder")
    install("text_encoders", "gemma.safetensors", {**gemma, **tokenizer}, config=config)
    vae, config = component(checkpoint, "vae")
    install("vae", "dc-ae.safetensors", vae, config=config)
    return {
        "model": ("SanaNodesModelLoader", {"model_name": "sana.safetensors"}),
        "clip": ("SanaNodesTextEncoderLoader", {"text_encoder_name": "gemma.safetensors"}),
        "vae": ("SanaNodesVAELoader", {"vae_name": "dc-ae.safetensors"}),
    }


@pytest.fixture
def train_node(host):
    """A function that adds a training node to a graph; SANA Train Settings gets the inputs that the node has not."""

    def add(graph, kind="SanaNodesTrain", **inputs):
        node_inputs = {widget.id for widget in host.nodes.NODE_CLASS_MAPPINGS[kind].define_schema().inputs}
        settings = {name: value for name, value in inputs.items() if name not in node_inputs}
        graph["train"] = (kind, {name: value for name, value in inputs.items() if name in node_inputs})
        if settings:
            graph["settings"] = ("SanaNodesTrainSettings", settings)
            graph["train"][1]["settings"] = ["settings", 0]
        return graph

    return add
