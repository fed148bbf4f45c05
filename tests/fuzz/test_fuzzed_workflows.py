"""Broken workflows posted to a real server: it refuses them, generates, or reports one line of ours, and lives on."""

import copy
import http.client
import json
import shutil
import time
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest
from bounded import BYTES, PATIENCE, SECONDS
from host import base_directory, start_server
from hypothesis import example, given
from hypothesis import strategies as st
from mutations import NUMBERS, VALUES
from verdicts import check_line
from websockets.sync.client import connect

from sana_core import errors

FOLDER = "/custom_nodes/sana/"
SAMPLING = {"seed": 1, "steps": 1, "guidance": 1.0, "sampler": "flow_euler"}
COMMON = {
    "load": ("SanaNodesLoader", {"model": "fuzzed"}),
    "positive": ("SanaNodesTextEncode", {"clip": ["load", 1], "text": "a red circle", "instruction": False}),
    "negative": ("SanaNodesTextEncode", {"clip": ["load", 1], "text": "", "instruction": False}),
    "empty": ("SanaNodesEmptyLatent", {"width": 32, "height": 32, "batch_size": 1}),
}
LINKS = {"model": ["load", 0], "positive": ["positive", 0], "negative": ["negative", 0], "latent_image": ["empty", 0]}
GRAPHS = [
    {
        "sample": ("SanaNodesSampler", {**LINKS, **SAMPLING, "denoise": 1.0, "model_defaults": False}),
        "decode": (
            "SanaNodesDecode",
            {"samples": ["sample", 0], "vae": ["load", 2], "method": "auto", "budget_gb": 0.0},
        ),
        "show": ("PreviewAny", {"source": ["decode", 1]}),
    },
    {
        "pag": ("SanaNodesPAG", {"model": ["load", 0], "scale": 1.0, "blocks": "1"}),
        "interval": ("SanaNodesGuidanceInterval", {"model": ["pag", 0], "start": 0.0, "end": 1.0}),
        "lora": (
            "SanaNodesLoraLoader",
            {"model": ["interval", 0], "lora_name": "it.safetensors", "strength_model": 1.0},
        ),
        "sample": ("SanaNodesSampler", {**LINKS, **SAMPLING, "model": ["lora", 0], "guidance": 2.0}),
        "show": ("PreviewAny", {"source": ["sample", 0]}),
    },
    {
        "list": ("SanaNodesPromptList", {"clip": ["load", 1], "prompts": "a red circle\na", "instruction": False}),
        "batch": (
            "SanaNodesBatchSampler",
            {
                **LINKS,
                **SAMPLING,
                "positive": ["list", 0],
                "count": 1,
                "devices": "default",
                "chunk": 0,
                "vae": ["load", 2],
            },
        ),
        "show": ("PreviewAny", {"source": ["batch", 1]}),
    },
    {
        "noise": ("RandomNoise", {"noise_seed": 1}),
        "guider": (
            "CFGGuider",
            {"model": ["load", 0], "positive": ["positive", 0], "negative": ["negative", 0], "cfg": 1.0},
        ),
        "select": ("SanaNodesSamplerSelect", {"sampler": "flow_euler"}),
        "sigmas": ("SanaNodesScheduler", {"model": ["load", 0], "sampler": "flow_euler", "steps": 1, "denoise": 1.0}),
        "sample": (
            "SamplerCustomAdvanced",
            {
                "noise": ["noise", 0],
                "guider": ["guider", 0],
                "sampler": ["select", 0],
                "sigmas": ["sigmas", 0],
                "latent_image": ["empty", 0],
            },
        ),
        "decode": ("VAEDecode", {"samples": ["sample", 0], "vae": ["load", 2]}),
        "encode": ("VAEEncode", {"pixels": ["decode", 0], "vae": ["load", 2]}),
        "show": ("PreviewAny", {"source": ["encode", 0]}),
    },
    {
        "shape": ("SanaNodesResolution", {"size": "512", "ratio": "1.0"}),
        "empty": ("SanaNodesEmptyLatent", {"width": ["shape", 0], "height": ["shape", 1], "batch_size": 1}),
        "plan": ("SanaNodesPlan", {"variant": "1.6B", "width": ["shape", 0], "height": 32, "batch_size": 1}),
        "show": ("PreviewAny", {"source": ["plan", 1]}),
        "show too": ("PreviewAny", {"source": ["empty", 0]}),
    },
    {
        "shift": ("ModelSamplingSD3", {"model": ["load", 0], "shift": 3.0}),
        "sample": (
            "KSampler",
            {
                **LINKS,
                "model": ["shift", 0],
                "seed": 1,
                "steps": 1,
                "cfg": 1.0,
                "sampler_name": "euler",
                "scheduler": "normal",
                "denoise": 1.0,
            },
        ),
        "sprint": ("SanaNodesSprint", {**LINKS, "seed": 1, "steps": 1, "guidance": 1.0, "strength": 1.0}),
        "show": ("PreviewAny", {"source": ["sample", 0]}),
    },
    {
        "unet": ("SanaNodesModelLoader", {"model_name": "sana-posters (bundled)"}),
        "clip": ("SanaNodesTextEncoderLoader", {"text_encoder_name": "sana-posters (bundled)"}),
        "vae": ("SanaNodesVAELoader", {"vae_name": "sana-posters (bundled)"}),
        "text": ("CLIPTextEncode", {"clip": ["clip", 0], "text": "a red circle"}),
        "sample": (
            "SanaNodesSampler",
            {**LINKS, **SAMPLING, "model": ["unet", 0], "positive": ["text", 0], "negative": ["text", 0]},
        ),
        "show": ("PreviewAny", {"source": ["sample", 0]}),
    },
]
KNOWN = {name: set(inputs) for graph in [COMMON, *GRAPHS] for name, inputs in graph.values()}
CLASSES = sorted({name for graph in [COMMON, *GRAPHS] for name, _ in graph.values()})
CLASSES += [
    "SanaNodesControlNetLoader",
    "EmptyLatentImage",
    "EmptySD3LatentImage",
    "LatentFlip",
    "ModelSamplingFlux",
    "FreeU",
]
CLASSES += [
    "LoraLoaderModelOnly",
    "CLIPSetLastLayer",
    "ConditioningCombine",
    "ConditioningConcat",
    "ConditioningAverage",
]
SOCKETS = {
    "model",
    "clip",
    "vae",
    "positive",
    "negative",
    "latent_image",
    "samples",
    "pixels",
    "noise",
    "guider",
    "sigmas",
}
SOCKETS |= {"conditioning_1", "conditioning_2", "conditioning_to", "conditioning_from", "conditioning"}
LARGEST = {"width": 64, "height": 64, "steps": 2, "batch_size": 2, "count": 2, "value": 64}
FLOATS = {"guidance", "cfg", "denoise", "strength", "strength_model", "scale", "start", "end", "shift", "budget_gb"}
STRINGS = st.text(st.characters(exclude_categories=()), max_size=12) | st.sampled_from(
    [
        "sana-posters (bundled)",
        "fuzzed",
        "it.safetensors",
        "../it.safetensors",
        "scm",
        "flow_dpmpp_2m",
        "whole",
        "tiles",
        "all",
    ]
    + [
        "cpu x 2",
        "cluster",
        "512",
        "auto",
        "fp8_e4m3fn",
        "nvidia",
        "euler",
        "a\nb\nc",
        "--ar 1:2",
        "nan",
        "32",
        "1e400",
    ]
)


def api(nodes):
    """The graph as /prompt takes it."""
    return {key: {"class_type": name, "inputs": copy.deepcopy(inputs)} for key, (name, inputs) in nodes.items()}


def is_link(value):
    return isinstance(value, list) and len(value) == 2 and isinstance(value[0], str) and type(value[1]) in (int, float)


def changed(nodes, key, **inputs):
    """The graph of `nodes` with other inputs of one of them."""
    graph = api({**COMMON, **nodes})
    graph[key]["inputs"].update(inputs)
    return graph


@st.composite
def graphs(draw):
    """A good graph with up to four of its values, links, inputs, nodes and classes changed."""
    graph = api({**COMMON, **draw(st.sampled_from(GRAPHS))})
    for _ in range(draw(st.integers(1, 4))):
        if not graph:
            break
        key = draw(st.sampled_from(sorted(graph)))
        inputs = graph[key]["inputs"]
        names = sorted(inputs) if isinstance(inputs, dict) else []
        link = [draw(st.sampled_from([*sorted(graph), key, "nowhere"])), draw(st.integers(0, 3))]
        match draw(
            st.sampled_from(
                ("number", "through", "through", "text", "value", "link", "link", "drop", "class", "node", "add", "odd")
            )
        ):
            case "number" if names:
                inputs[draw(st.sampled_from(names))] = draw(NUMBERS)
            case "through" if names:
                # through a link, past the range of the widget
                name = draw(st.sampled_from(names))
                kind = "PrimitiveFloat" if name in FLOATS else "PrimitiveInt"
                graph[f"to {key}"] = {"class_type": kind, "inputs": {"value": draw(NUMBERS)}}
                inputs[name] = [f"to {key}", 0]
            case "text" if names:
                inputs[draw(st.sampled_from(names))] = draw(STRINGS)
            case "value" if names:
                inputs[draw(st.sampled_from(names))] = draw(VALUES)
            case "link" if names:
                inputs[draw(st.sampled_from(names))] = link
            case "drop" if names:
                del inputs[draw(st.sampled_from(names))]
            case "class":
                graph[key]["class_type"] = draw(st.sampled_from(CLASSES))
            case "node":
                del graph[key]
            case "add" if isinstance(inputs, dict):
                inputs[draw(STRINGS)] = link
            case "odd":
                # A value that is neither a node nor inputs.
                place, name = draw(st.sampled_from([(graph[key], "inputs"), (graph[key], "class_type"), (graph, key)]))
                place[name] = draw(st.dictionaries(STRINGS, VALUES, max_size=2) if place is graph else VALUES)
                graph[key].setdefault("inputs", {})
    return affordable(graph)


def affordable(graph):
    """The same, without pictures that take long, which are as right as small ones, and without what core fails on.

    It lets values through where links belong, also to its own nodes, and a link of an input that the node has not may
    end its only worker, there or behind the node that it names, as a name does that its log cannot write.
    """
    loads_the_demo = graph.get("load") == api(COMMON)["load"]
    for key, node in graph.items():
        if not isinstance(node["inputs"], dict):
            continue
        known_inputs = KNOWN.get(node.get("class_type")) if isinstance(node.get("class_type"), str) else None
        for name, value in list(node["inputs"].items()):
            if name in SOCKETS and not is_link(value) and not str(node.get("class_type")).startswith("SanaNodes"):
                del node["inputs"][name]
            elif is_link(value) and name not in (known_inputs or ()):
                node["inputs"][name] = ["load", 0]
                if key == "load" or not loads_the_demo or not name.isprintable():
                    del node["inputs"][name]
            elif name in LARGEST:
                node["inputs"][name] = smaller(value, LARGEST[name])
            elif name == "size" and value in ("1024", "2048", "4096"):
                node["inputs"][name] = "512"
    return graph


def smaller(value, most):
    """`most` in the place of a number that would be taken and takes long."""
    try:
        number = float(value.get("__value__") if isinstance(value, dict) else value)
    except (TypeError, ValueError, OverflowError):
        return value
    return most if most < number <= 100_000 else value


class Client(NamedTuple):
    """A connection for graphs, one for their events, and the server behind them."""

    posts: http.client.HTTPConnection
    events: object
    process: psutil.Process
    log: Path

    def post(self, graph):
        """Return the status and the answer."""
        body = json.dumps({"prompt": graph, "client_id": "fuzz"})
        self.posts.request("POST", "/prompt", body, {"Content-Type": "application/json"})
        answer = self.posts.getresponse()
        return answer.status, answer.read()

    def worked(self):
        """The seconds of the processor that the server has had."""
        return sum(self.process.cpu_times()[:2])

    def end_of(self, prompt_id):
        """Return the event that ends the prompt, within what an example may take of the processor and of the clock."""
        began, worked = time.monotonic(), self.worked()
        while True:
            try:
                message = self.events.recv(timeout=1)
            except TimeoutError:
                if self.worked() - worked > SECONDS or time.monotonic() - began > PATIENCE * SECONDS:
                    raise
                continue
            if isinstance(message, str):
                event = json.loads(message)
                ends = ("execution_success", "execution_error", "execution_interrupted")
                if event["type"] in ends and event["data"]["prompt_id"] == prompt_id:
                    return event


@pytest.fixture(scope="module")
def client(small, tmp_path_factory):
    """A server with the small checkpoint and a LoRA, to which one client is connected."""
    import torch
    from safetensors.torch import save_file

    models = base_directory("fuzz-server") / "models"
    shutil.rmtree(models)
    shutil.copytree(small, models / "diffusers" / "fuzzed")
    (models / "loras").mkdir()
    layer = "transformer.proj_out"
    pair = {f"{layer}.lora_A.weight": torch.ones(2, 32), f"{layer}.lora_B.weight": torch.ones(32, 2)}
    save_file(pair, models / "loras" / "it.safetensors")
    with start_server("fuzz-server", tmp_path_factory.mktemp("output")) as server:
        host, _, port = server.address.partition(":")
        (process,) = [item for item in psutil.Process().children() if port in item.cmdline()]
        with connect(f"ws://{server.address}/ws?clientId=fuzz", max_size=None) as events:
            posts = http.client.HTTPConnection(host, int(port), timeout=PATIENCE * SECONDS)
            yield Client(posts, events, process, server.log)


def test_the_graphs_are_good(client):
    for graph in GRAPHS:
        status, answer = client.post(api({**COMMON, **graph}))
        event = client.end_of(json.loads(answer)["prompt_id"])
        assert event["type"] == "execution_success", event


def peak(process):
    """The most memory that the process has had since it was last asked to forget it."""
    lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))


# a value of any type, as the node takes devices of other machines
@example(changed(GRAPHS[2], "batch", devices=0))
# No word in a choice that accepts the words of another pack.
@example(changed(GRAPHS[4], "shape", ratio={}))
@given(graph=graphs())
def test_workflows(count, client, graph):
    count()
    logged = client.log.stat().st_size
    Path(f"/proc/{client.process.pid}/clear_refs").write_text("5")
    before = client.process.memory_info().rss
    status, answer = client.post(graph)
    if status == 500:
        # This error is of core, because the value is no graph. The log has frames of core only.
        with client.log.open("rb") as log:
            log.seek(logged)
            assert FOLDER not in log.read().decode(errors="replace")
        return
    answer = json.loads(answer)
    assert status in (200, 400), answer
    for node in answer["node_errors"].values():
        for error in node["errors"]:
            assert FOLDER not in "".join(error["extra_info"].get("traceback", ())), error
    if status == 200:
        event = client.end_of(answer["prompt_id"])
        assert event["type"] != "execution_interrupted"
        if event["type"] == "execution_error":
            check_error(event["data"])
    assert peak(client.process) - before < BYTES


ERRORS = {name for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, errors.SanaError)}


def check_error(error):
    """What failed within our frames has to be one line of ours."""
    if not any(FOLDER in frame for frame in error["traceback"]):
        return
    # The classes of the pack's errors are shown without a module.
    assert error["exception_type"] in ERRORS, "".join(error["traceback"]) + error["exception_message"]
    check_line(error["exception_message"].strip())


def test_the_server_still_draws(client):
    test_the_graphs_are_good(client)
