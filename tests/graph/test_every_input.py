"""Every input of every node: another value gives another output, another line under the node, or an error."""

import hashlib
import random
import shutil
from dataclasses import fields, is_dataclass

import layouts
import numpy as np
import pytest
import torch
import vibe_models
import video_models
from adapted import save_adapter
from checkpoints import TINY
from clips import save_clip
from in_process import NodeError
from loading import component, random_controlnet
from PIL import Image
from safetensors.torch import load_file, save_file
from shapes import combinations, draw_scene, prompt, random_scene
from variants import SPRINT, make_variant

pytestmark = pytest.mark.usefixtures("one_thread")
LINKS = {"model": ["load", 0], "positive": ["positive", 0], "negative": ["negative", 0], "latent_image": ["empty", 0]}
SAMPLER = {**LINKS, "seed": 3, "steps": 3, "guidance": 4.5, "sampler": "flow_dpmpp_2m"}
OTHER_LINKS = {
    "model": ["other load", 0],
    "positive": ["other positive", 0],
    "negative": ["other positive", 0],
    "latent_image": ["other empty", 0],
}
SEED = {"seed": 4, "steps": 4, "guidance": 7.0, "sampler": "flow_dpmpp_1"}
PLANNED = {"variant": "1.6B", "width": 1024, "height": 1024, "batch_size": 1}
# For each node, its inputs in the base graph, and another value of each of its inputs.
ROWS = {
    "Loader": (
        {"model": "sana-tiny"},
        {
            "model": "other-tiny",
            "weight_dtype": "fp8_e4m3fn",
            "resolution": "2048",
            "reference": "nvidia",
            "quantise": "int8",
        },
    ),
    "ModelLoader": (
        {"model_name": "sana.safetensors"},
        {
            "model_name": "other.safetensors",
            "weight_dtype": "fp8_e4m3fn",
            "resolution": "2048",
            "reference": "nvidia",
            "quantise": "int8",
        },
    ),
    "TextEncoderLoader": (
        {"text_encoder_name": "gemma.safetensors"},
        {"text_encoder_name": "other.safetensors", "reference": "diffusers"},
    ),
    "VAELoader": ({"vae_name": "dc-ae.safetensors"}, {"vae_name": "other.safetensors"}),
    "ModelSwitch": (
        {"use": "the loaders' files", "model": ["load", 0], "clip": ["load", 1], "vae": ["load", 2]},
        {
            "use": "sana-posters (bundled)",
            "model": ["other load", 0],
            "clip": ["other load", 1],
            "vae": ["other load", 2],
        },
    ),
    "LoraLoader": (
        {"model": ["load", 0], "lora_name": "one.safetensors", "strength_model": 1.0, "clip": ["load", 1]},
        {
            "model": ["other load", 0],
            "lora_name": "two.safetensors",
            "strength_model": 0.5,
            "clip": ["other load", 1],
            "strength_clip": 0.5,
        },
    ),
    "ControlNetLoader": (
        {"control_net_name": "control.safetensors"},
        {"control_net_name": "other.safetensors", "reference": "nvidia"},
    ),
    "TextEncode": (
        {"clip": ["load", 1], "text": "a red circle", "instruction": True},
        {"clip": ["other load", 1], "text": "a blue circle", "instruction": False, "motion_score": 20},
    ),
    "PromptList": (
        {"clip": ["load", 1], "prompts": "a red circle\na blue square", "instruction": True},
        {"clip": ["other load", 1], "prompts": "a red circle", "instruction": False},
    ),
    "EmptyLatent": (
        {"width": 0, "height": 0, "batch_size": 1, "model": ["load", 0]},
        {"width": 96, "height": 96, "batch_size": 2, "model": ["large load", 0]},
    ),
    "Resolution": (
        {"size": "auto", "ratio": "1:1", "model": ["load", 0]},
        {"size": "512", "ratio": "16:9", "model": ["large load", 0]},
    ),
    "VideoLatent": (
        {
            "model": ["video", 0],
            "width": 64,
            "height": 64,
            "frames": 5,
            "batch_size": 1,
            "vae": ["video", 2],
            "first_image": ["image", 0],
        },
        {
            "model": ["load", 0],
            "width": 96,
            "height": 96,
            "frames": 9,
            "batch_size": 2,
            "vae": ["load", 2],
            "first_image": ["other image", 0],
        },
    ),
    "Edit": (
        {
            "clip": ["vibe", 1],
            "vae": ["vibe", 2],
            "image": ["image", 0],
            "text": "make it winter",
            "image_guidance": 1.2,
        },
        {
            "clip": ["load", 1],
            "vae": ["load", 2],
            "image": ["other image", 0],
            "text": "add snow",
            "image_guidance": 1.0,
        },
    ),
    "PAG": (
        {"model": ["load", 0], "scale": 2.0, "blocks": "1"},
        {"model": ["other load", 0], "scale": 3.0, "blocks": "2"},
    ),
    "GuidanceInterval": (
        {"model": ["load", 0], "start": 0.3, "end": 0.9},
        {"model": ["other load", 0], "start": 0.6, "end": 0.4},
    ),
    "SplitPicture": (
        {"model": ["load", 0], "devices": "cpu x 2"},
        {"model": ["other load", 0], "devices": "all"},
    ),
    "Sampler": (SAMPLER, {**OTHER_LINKS, **SEED, "denoise": 0.5, "model_defaults": True}),
    "Sprint": (
        {**{name: link for name, link in LINKS.items() if name != "negative"}, "seed": 3, "steps": 2, "guidance": 4.5}
        | {"model": ["sprint", 0]},
        {
            **{name: link for name, link in OTHER_LINKS.items() if name != "negative"},
            **{"seed": 4, "steps": 3, "guidance": 7.0, "strength": 0.3},
            **{"max_timestep": 1.2, "intermediate_timestep": 1.0},
        },
    ),
    "BatchSampler": (
        {**SAMPLER, "count": 1, "devices": "default", "chunk": 0},
        # On a CPU one image is generated at a time, so a wrong number shows that chunk is read.
        {**OTHER_LINKS, **SEED, "count": 2, "devices": "cluster", "chunk": -1, "vae": ["load", 2]},
    ),
    "Scheduler": (
        {"model": ["load", 0], "sampler": "flow_dpmpp_2m", "steps": 3},
        {"model": ["shifted", 0], "sampler": "scm", "steps": 4, "denoise": 0.5},
    ),
    "SamplerSelect": ({"sampler": "flow_dpmpp_2m"}, {"sampler": "flow_dpmpp_1"}),
    "Decode": (
        {"samples": ["empty", 0], "vae": ["load", 2]},
        {
            "samples": ["other empty", 0],
            "vae": ["other load", 2],
            "method": "tiles",
            "budget_gb": 0.01,
            # A server without a GPU refuses more than one.
            "devices": "three",
        },
    ),
    "ScorerLoader": ({"scorer_name": "clip-one"}, {"scorer_name": "clip-two"}),
    "PickBest": (
        {"samples": ["two", 0], "vae": ["load", 2], "scorer": ["scorer", 0], "prompt": "a red house", "best": 1},
        {
            "samples": ["other empty", 0],
            "vae": ["other load", 2],
            "scorer": ["other scorer", 0],
            "prompt": "a blue boat",
            "best": 2,
        },
    ),
    "Dataset": (
        {"folder": "every-input", "resolution": 64},
        {"folder": "every-input-2", "resolution": 128, "caption": "a photo"},
    ),
    "Plan": (
        PLANNED,
        {"variant": "0.6B", "width": 512, "height": 512, "batch_size": 2, "vae": "dc-ae-lite-f32c32", "gpu": "24 GB"},
    ),
    "Doctor": ({"files": False}, {"files": True, "always": True}),
}
TRAIN = {
    **{"model": ["load", 0], "dataset": ["data", 0], "name": "every-input", "steps": 1, "learning_rate": 1e-3},
    **{"batch_size": 1, "settings": ["settings", 0]},
}
OTHER_TRAIN = {
    **{"model": ["sprint", 0], "dataset": ["other data", 0], "name": "every-input-2", "steps": 2},
    **{"learning_rate": 1e-2, "batch_size": 2, "settings": ["other settings", 0]},
    # A MODEL of SANA Loader has its own.
    **{"clip": ["other load", 1], "vae": ["other load", 2]},
}
ROWS["Train"] = ({**TRAIN, "rank": 2}, {**OTHER_TRAIN, "rank": 3, "validation_prompts": "a red circle"})
ROWS["TrainControlNet"] = (
    {**TRAIN, "name": "every-control", "blocks": 2},
    {**OTHER_TRAIN, "name": "every-control-2", "blocks": 1},
)
# SANA Doctor looks through all model files.
SLOW = {("Doctor", "files")}
# SANA Train has these inputs too.
SLOW |= {("TrainControlNet", name) for name in OTHER_TRAIN}
# This input decides whether the node runs again. The report is the same.
AGAIN = {("Doctor", "always")}
CASES = [
    pytest.param(node, name, marks=[pytest.mark.slow] if (node, name) in SLOW else [])
    for node, (_, others) in ROWS.items()
    for name in others
    if (node, name) not in AGAIN
]


def test_every_input_of_every_node_is_in_the_table(host):
    nodes = {name: node for name, node in host.nodes.NODE_CLASS_MAPPINGS.items() if name.startswith("SanaNodes")}
    assert {name.removeprefix("SanaNodes") for name in nodes} == ROWS.keys() | {"TrainSettings"}
    for name, (base, other_values) in ROWS.items():
        inputs = [sananode.id for sananode in nodes[f"SanaNodes{name}"].define_schema().inputs]
        assert sorted(other_values) == sorted(inputs), name
        assert base.keys() <= other_values.keys(), name


@pytest.fixture(scope="module")
def files(host):
    """Two files or folders of each kind in ComfyUI's folders."""
    root, places = host.models, []

    def place(path):
        places.append(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        return path

    other = shutil.copytree(TINY, place(root / "diffusers" / "other-tiny"))
    parts = {"transformer": "diffusion_models", "vae": "vae", "text_encoder": "text_encoders"}
    names = {"transformer": "sana", "vae": "dc-ae", "text_encoder": "gemma"}
    for part, kind in parts.items():
        tensors, config = component(TINY, part)
        changed = {name: (0.9 * tensor).to(tensor.dtype) for name, tensor in tensors.items()}
        (file,) = (other / part).glob("*.safetensors")
        save_file({name: (0.9 * tensor).to(tensor.dtype) for name, tensor in load_file(file).items()}, file)
        if part == "text_encoder":
            content = (TINY / "tokenizer" / "tokenizer.json").read_bytes()
            extra = {"tokenizer_json": torch.frombuffer(bytearray(content), dtype=torch.uint8)}
            tensors, changed = tensors | extra, changed | extra
        save_file(tensors, place(root / kind / f"{names[part]}.safetensors"), {"config": config})
        save_file(changed, place(root / kind / "other.safetensors"), {"config": config})
    for number, name in enumerate(("control", "other")):
        model = random_controlnet()
        tensors = {key: (1 - 0.1 * number) * value for key, value in model.state_dict().items()}
        layouts.save(tensors, place(root / "controlnet" / f"{name}.safetensors"), config=layouts.with_config(model))
    for number, name in enumerate(("one", "two")):
        file = place(root / "loras" / f"{name}.safetensors")
        save_adapter(TINY, file, seed=number, much=0.1 + 0.1 * number)
        # strength_clip is for LoRAs of the text encoder, too.
        layer = "text_encoder.layers.0.mlp.down_proj"
        rows, columns = component(TINY, "text_encoder")[0]["layers.0.mlp.down_proj.weight"].shape
        matrices = {f"{layer}.lora_A.weight": torch.ones(1, columns), f"{layer}.lora_B.weight": torch.ones(rows, 1)}
        save_file({**load_file(file), **matrices}, file)
        save_clip(place(root / "clip_vision" / f"clip-{name}"), number)
    make_variant(TINY, place(root / "diffusers" / "every-sprint"), **SPRINT)
    video_models.save_folder("480p", place(root / "diffusers" / "every-video"))
    vibe_models.save_vibe(place(root / "diffusers" / "every-vibe"))
    rng, (combos, _) = random.Random(3), combinations()
    for folder, first in (("every-input", 0), ("every-input-2", 5)):
        data = place(root.parent / "input" / folder)
        data.mkdir()
        for index in range(2):
            combo = combos[9 * index + first]
            image = Image.fromarray(draw_scene(random_scene(rng, combo)))
            image.save(data / f"{index}.png")
            image.convert("L").save(data / f"{index}-control.png")
            (data / f"{index}.txt").write_text(prompt(*combo))
    yield
    results = [host.output / name for name in ("sana_training", "loras", "controlnet")]
    for path in (*places, *results):
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)


def sources():
    """The nodes that the links of ROWS come from."""
    image = torch.rand(1, 64, 64, 3, generator=torch.Generator().manual_seed(1))
    size = {"width": 64, "height": 64, "batch_size": 1}
    data = {"folder": "every-input", "resolution": 64}
    text = {"clip": ["load", 1], "text": "a red circle", "instruction": True}
    return {
        "load": ("SanaNodesLoader", {"model": "sana-tiny"}),
        "other load": ("SanaNodesLoader", {"model": "other-tiny"}),
        "large load": ("SanaNodesLoader", {"model": "sana-tiny", "resolution": "2048"}),
        "shifted": ("ModelSamplingSD3", {"model": ["load", 0], "shift": 7.0}),
        "video": ("SanaNodesLoader", {"model": "every-video"}),
        "sprint": ("SanaNodesLoader", {"model": "every-sprint"}),
        "vibe": ("SanaNodesLoader", {"model": "every-vibe"}),
        "positive": ("SanaNodesTextEncode", text),
        "other positive": ("SanaNodesTextEncode", {**text, "text": "a blue square"}),
        "negative": ("SanaNodesTextEncode", {**text, "text": "", "instruction": False}),
        "empty": ("SanaNodesEmptyLatent", size),
        "other empty": ("SanaNodesEmptyLatent", {**size, "width": 96}),
        "two": ("SanaNodesSampler", {**SAMPLER, "latent_image": ["pair", 0]}),
        "pair": ("SanaNodesEmptyLatent", {**size, "batch_size": 2}),
        "image": ("AnyValue", {"value": image}),
        "other image": ("AnyValue", {"value": 1 - image}),
        "scorer": ("SanaNodesScorerLoader", {"scorer_name": "clip-one"}),
        "other scorer": ("SanaNodesScorerLoader", {"scorer_name": "clip-two"}),
        "data": ("SanaNodesDataset", data),
        "other data": ("SanaNodesDataset", {**data, "folder": "every-input-2"}),
        "settings": ("SanaNodesTrainSettings", {"training_seed": 1}),
        "other settings": ("SanaNodesTrainSettings", {"training_seed": 2}),
    }


def needed(graph, node):
    """The nodes of `graph` that `node` depends on, and itself."""
    results = {node: graph[node]}
    for value in graph[node][1].values():
        if isinstance(value, list):
            results |= needed(graph, value[0])
    return results


NOISE = {"samples": torch.randn(1, 32, 2, 2, generator=torch.Generator().manual_seed(2))}


def used(graph, kind, link, name):
    """Add nodes to `graph` that turn an output of a type without values into values. Returns their links."""
    if kind == "MODEL":
        graph[name] = ("SanaNodesSampler", {**SAMPLER, "model": link})
    elif kind == "CLIP":
        graph[name] = ("SanaNodesTextEncode", {"clip": link, "text": "a red circle", "instruction": True})
    elif kind == "VAE":
        graph[f"{name} noise"] = ("AnyValue", {"value": NOISE})
        graph[name] = ("SanaNodesDecode", {"samples": [f"{name} noise", 0], "vae": link})
    elif kind == "SANA_SCORER":
        inputs = {"samples": ["two", 0], "vae": ["load", 2], "scorer": link, "prompt": "a red house", "best": 2}
        graph[name] = ("SanaNodesPickBest", inputs)
        return [name, 2]
    elif kind == "CONTROL_NET":
        conds = {"positive": ["positive", 0], "negative": ["negative", 0], "control_net": link, "image": ["image", 0]}
        strength = {"strength": 1.0, "start_percent": 0.0, "end_percent": 1.0, "vae": ["load", 2]}
        graph[f"{name} apply"] = ("ControlNetApplyAdvanced", {**conds, **strength})
        conds = {"positive": [f"{name} apply", 0], "negative": [f"{name} apply", 1]}
        graph[name] = ("SanaNodesSampler", {**SAMPLER, **conds})
    elif kind == "SAMPLER":
        graph[f"{name} noise"] = ("RandomNoise", {"noise_seed": 1})
        conds = {"positive": ["positive", 0], "negative": ["negative", 0], "cfg": 4.5}
        graph[f"{name} guider"] = ("CFGGuider", {"model": ["load", 0], **conds})
        graph[f"{name} sigmas"] = ("SanaNodesScheduler", {"model": ["load", 0], "sampler": "flow_euler", "steps": 6})
        links = {"noise": [f"{name} noise", 0], "guider": [f"{name} guider", 0], "sigmas": [f"{name} sigmas", 0]}
        graph[name] = ("SamplerCustomAdvanced", {**links, "sampler": link, "latent_image": ["empty", 0]})
    else:
        return link
    return [name, 0]


def values(thing):
    """`thing` as text, with tensors by their digest."""
    if isinstance(thing, torch.Tensor):
        thing = thing.detach().float().cpu().contiguous()
        return f"{list(thing.shape)} {hashlib.sha256(thing.numpy().tobytes()).hexdigest()}"
    if isinstance(thing, dict):
        return str({str(key): values(value) for key, value in thing.items()})
    if isinstance(thing, list | tuple):
        return str([values(item) for item in thing])
    if is_dataclass(thing):
        return str({field.name: values(getattr(thing, field.name)) for field in fields(thing)})
    assert isinstance(thing, str | int | float | bool | np.ndarray | None), type(thing)
    return str(thing)


def outcome(host, node_texts, node, inputs):
    """What a node does: the values of its outputs, the lines under nodes, or its error."""
    graph = {**sources(), "it": (f"SanaNodes{node}", inputs)}
    catches = {}
    for slot, output in enumerate(host.nodes.NODE_CLASS_MAPPINGS[f"SanaNodes{node}"].define_schema().outputs):
        link = used(graph, output.io_type, ["it", slot], f"use {slot}")
        catches[f"catch {slot}"] = ("Catch", {"value": link, "name": str(slot)})
    expected = {}
    for name, (kind, links) in catches.items():
        expected |= {name: (kind, links), **needed(graph, links["value"][0])}
    node_texts.clear()
    try:
        # Loaders whose inputs have not changed do not run again.
        caught = host.run(expected, keep_cache=True)
    except NodeError as error:
        return f"error: {error}"
    lines = [text for events, text in node_texts if events == "it"]
    return values(caught) + str(lines)


BASES = {}


@pytest.mark.parametrize("node, name", CASES)
def test_an_input_changes_what_a_node_does(host, files, node_texts, node, name):
    inputs, other_values = ROWS[node]
    if node not in BASES:
        BASES[node] = outcome(host, node_texts, node, inputs)
    assert not BASES[node].startswith("error: "), BASES[node]
    assert outcome(host, node_texts, node, {**inputs, name: other_values[name]}) != BASES[node]


def other_value(widget):
    """A value of the widget that is not its default."""
    if hasattr(widget, "options"):
        return next(option for option in widget.options if option != widget.default)
    if isinstance(widget.default, bool):
        return not widget.default
    if isinstance(widget.default, str):
        return "other"
    return widget.min if widget.default != widget.min else widget.max


def test_each_input_of_the_training_settings_changes_them(host, files):
    node = host.nodes.NODE_CLASS_MAPPINGS["SanaNodesTrainSettings"]
    plain = values(host.output_of("SanaNodesTrainSettings"))
    unchanged = []
    for widget in node.define_schema().inputs:
        graph = {"data": ("SanaNodesDataset", {"folder": "every-input", "resolution": 64})}
        is_socket = widget.id == "regularisation"
        value = ["data", 0] if is_socket else "one.safetensors" if widget.id == "existing_lora" else other_value(widget)
        graph["it"] = ("SanaNodesTrainSettings", {widget.id: value})
        graph["catch"] = ("Catch", {"value": ["it", 0], "name": "settings"})
        if values(host.run(graph)["settings"]) == plain:
            unchanged.append(widget.id)
    assert not unchanged
