"""SANA Batch Sampler on a real Ray cluster, over HTTP: the operator's file, the same pictures, cancel."""

import json
import os
import signal
import time
import urllib.error
import urllib.request
from contextlib import suppress

import numpy as np
import pytest
import torch
from host import GraphError, base_directory, get, post, run_graph
from machines import actors, wait_for_no_actors
from PIL import Image
from queues import LORA, configure, demo_nodes, start_on_cluster, write_lora
from safetensors.torch import load_file

PROMPTS = "a red circle on a blue background\na blue square on a white background"
NAME = "test-cluster"


@pytest.fixture(scope="module")
def server(lasting_cluster, tmp_path_factory):
    """A server whose operator has configured a cluster of two machines."""
    write_lora(NAME)
    with start_on_cluster(NAME, lasting_cluster, tmp_path_factory.mktemp("output")) as running:
        yield running


@pytest.fixture(scope="module")
def graph():
    """A function of overrides: two prompts on the cluster and on this machine, their latents and images saved."""

    def build(model=("1", 0), **inputs):
        usual = {"model": list(model), "steps": 8, "seed": 3, "count": 2}
        nodes, sampler_inputs = demo_nodes("1", "3", "4", **{**usual, **inputs})
        listed = {"clip": ["1", 1], "prompts": PROMPTS, "instruction": True}
        nodes["2"] = {"class_type": "SanaNodesPromptList", "inputs": listed}
        for devices in ("cluster", "default"):
            nodes[devices] = {"class_type": "SanaNodesBatchSampler", "inputs": {**sampler_inputs, "devices": devices}}
            latents = {"samples": [devices, 0], "filename_prefix": devices}
            images = {"images": [devices, 1], "filename_prefix": devices}
            nodes[f"{devices} latents"] = {"class_type": "SaveLatent", "inputs": latents}
            nodes[f"{devices} images"] = {"class_type": "SaveImage", "inputs": images}
        return nodes

    return build


def latents(server, devices):
    """The latents that were saved last."""
    return load_file(max(server.output.glob(f"{devices}_*.latent")))["latent_tensor"]


def check_same(server, atol=1e-4):
    """The host guides denoised latents, the engine velocities. Latents of up to 18 differ by this rounding."""
    torch.testing.assert_close(latents(server, "cluster"), latents(server, "default"), atol=atol, rtol=0)
    ours, theirs = (sorted(server.output.glob(f"{devices}_*.png"))[-4:] for devices in ("cluster", "default"))
    for one, other in zip(ours, theirs, strict=True):
        levels = [np.asarray(Image.open(path).convert("RGB"), dtype=int) for path in (one, other)]
        assert abs(levels[0] - levels[1]).max() <= 1


def events_of(events, kind, node):
    return [
        event["data"]
        for event in events
        if isinstance(event, dict) and event["type"] == kind and event["data"]["node"] == node
    ]


def patched(graph):
    """The graph with NVIDIA's reference, a LoRA, perturbed attention and a guidance interval on the MODEL."""
    nodes = graph(model=("interval", 0))
    nodes["1"]["inputs"]["reference"] = "nvidia"
    lora = {"model": ["1", 0], "lora_name": LORA, "strength_model": 1.0}
    nodes["lora"] = {"class_type": "SanaNodesLoraLoader", "inputs": lora}
    nodes["pag"] = {"class_type": "SanaNodesPAG", "inputs": {"model": ["lora", 0], "scale": 2.0, "blocks": "2"}}
    interval = {"model": ["pag", 0], "start": 0.1, "end": 0.7}
    nodes["interval"] = {"class_type": "SanaNodesGuidanceInterval", "inputs": interval}
    return nodes


def test_only_the_operators_file_puts_the_cluster_into_the_list(server):
    info = json.loads(get(server, "/object_info/SanaNodesBatchSampler"))
    assert '"cluster"' in json.dumps(info["SanaNodesBatchSampler"]["input"]["required"]["devices"])
    file = base_directory(NAME) / "user" / "__sana" / "cluster.json"
    before = file.read_bytes()
    for name in ("cluster.json", "..%2F__sana%2Fcluster.json", "__sana%2Fcluster.json"):
        request = urllib.request.Request(f"http://{server.address}/userdata/{name}?overwrite=true", b"{}")
        request.add_header("comfy-user", "__sana")
        with suppress(urllib.error.HTTPError):
            urllib.request.urlopen(request, timeout=60)
        assert file.read_bytes() == before


@pytest.fixture(scope="module")
def first_run(server, graph):
    """The events of the first graph on the cluster, whose workers stay for the next one."""
    return list(run_graph(server, graph()))


@pytest.mark.timeout(600)
def test_the_cluster_draws_the_pictures_of_this_machine(server, first_run):
    events = first_run
    assert latents(server, "cluster").shape == (4, 32, 4, 4)
    check_same(server)
    bars = events_of(events, "progress", "cluster")
    shown = [(bar["value"], bar["max"]) for bar in bars]
    # A chart of the machines follows if both have generated.
    assert shown[:4] == [(number, 4) for number in range(1, 5)] and set(shown[4:]) <= {(4, 4)}
    log = server.log.read_text()
    assert "4 images in" in log
    assert "SANA: connecting to the cluster, ray://" in log and "2 workers starting on 2 machines with 2 GPUs" in log


@pytest.mark.timeout(600)
def test_the_workers_stay_for_the_next_queue_and_go_with_the_model(server, graph, first_run):
    before = {process.pid for process in actors()}
    assert len(before) == 2
    list(run_graph(server, graph(seed=11)))
    check_same(server)
    assert {process.pid for process in actors()} == before
    post(server, "/free", unload_models=True, free_memory=True)
    wait_for_no_actors()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_lora_guidance_and_the_reference_go_with_the_model(server, graph):
    plain = latents(server, "default")
    list(run_graph(server, patched(graph)))
    check_same(server)
    assert (latents(server, "default") - plain).abs().mean() > 0.01


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_images_are_drawn_over_another_where_a_mask_says_so(server, graph):
    nodes = graph(seed=5)
    size = {"width": 128, "height": 128}
    nodes["image"] = {"class_type": "EmptyImage", "inputs": {**size, "batch_size": 1, "color": 0xC04020}}
    nodes["encode"] = {"class_type": "VAEEncode", "inputs": {"pixels": ["image", 0], "vae": ["1", 2]}}
    nodes["mask"] = {"class_type": "SolidMask", "inputs": {**size, "value": 0.3}}
    masked = {"samples": ["encode", 0], "mask": ["mask", 0]}
    nodes["4"] = {"class_type": "SetLatentNoiseMask", "inputs": masked}
    list(run_graph(server, nodes))
    # The mask adds the rounding of the steps to the image's latents.
    check_same(server, atol=1e-3)
    over = latents(server, "default")
    for devices in ("cluster", "default"):
        nodes[devices]["inputs"]["latent_image"] = ["encode", 0]
    list(run_graph(server, nodes))
    check_same(server)
    assert (latents(server, "default") - over).abs().mean() > 0.1


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_interrupt_ends_the_actors_that_draw_and_the_next_graph_runs(server, graph):
    nodes = {key: node for key, node in graph(count=200, steps=40).items() if not key.startswith("default")}
    ended = False
    for event in run_graph(server, nodes):
        if events_of([event], "progress", "cluster") and not ended:
            before = {process.pid for process in actors()}
            urllib.request.urlopen(f"http://{server.address}/interrupt", data=b"", timeout=60)
            ended = True
        if isinstance(event, dict) and event["type"] == "execution_interrupted":
            break
    # one that still loads stays for the next queue
    while before <= {process.pid for process in actors()}:
        time.sleep(0.1)
    list(run_graph(server, graph(seed=9)))
    check_same(server)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_all_users_of_the_server_have_the_share_that_its_operator_has_set(server, graph, lasting_cluster):
    configure(NAME, lasting_cluster.client_address, gpus=1)
    list(run_graph(server, graph(seed=13)))
    assert len(actors()) == 1
    check_same(server)


def test_a_patch_that_cannot_travel_is_refused_by_name(server, graph):
    nodes = graph(model=("patch", 0))
    nodes["patch"] = {"class_type": "RescaleCFG", "inputs": {"model": ["1", 0], "multiplier": 0.7}}
    with pytest.raises(GraphError, match=r"model: got a patch that a cluster cannot apply \(.*sampler_cfg_function\)"):
        list(run_graph(server, nodes))


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_workers_end_with_comfyui_however_that_ends(server, graph):
    list(run_graph(server, graph(seed=17)))
    assert actors()
    os.kill(server.pid, signal.SIGKILL)
    wait_for_no_actors()
