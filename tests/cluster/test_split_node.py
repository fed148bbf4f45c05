"""SANA Split Image on a real Ray cluster, over HTTP: the same latents, whatever samples, dies or is cancelled."""

import json
import signal
import time
import urllib.request

import pytest
import torch
from host import GraphError, get, post, run_graph
from machines import actors, wait_for_no_actors
from queues import LORA, demo_nodes, start_on_cluster, write_lora
from safetensors.torch import load_file

NAME = "test-cluster-split"
# its rows are not shared out evenly
SIZE = {"width": 128, "height": 160, "batch_size": 1}


@pytest.fixture(scope="module")
def server(lasting_cluster, tmp_path_factory):
    write_lora(NAME)
    with start_on_cluster(NAME, lasting_cluster, tmp_path_factory.mktemp("output")) as running:
        yield running


def graph(sampler="SanaNodesSampler", steps=6, lora=False):
    """Return a graph that samples one picture by the cluster and by this machine, whose latents are saved."""
    nodes, _ = demo_nodes("1", "2", "3", "4", "5")
    own = {**nodes.pop("5")["inputs"], "steps": steps, "seed": 3}
    nodes["4"]["inputs"] = SIZE
    model = ["1", 0]
    if lora:
        nodes["lora"] = {
            "class_type": "SanaNodesLoraLoader",
            "inputs": {"model": model, "lora_name": LORA, "strength_model": 1.0},
        }
        nodes["pag"] = {"class_type": "SanaNodesPAG", "inputs": {"model": ["lora", 0], "scale": 2.0, "blocks": "2"}}
        model = ["pag", 0]
    if sampler == "KSampler":
        kept = {key: own[key] for key in ("positive", "negative", "latent_image", "seed", "steps", "denoise")}
        own = {**kept, "cfg": 4.5, "sampler_name": "euler", "scheduler": "simple"}
    split = {"model": model, "devices": "cluster"}
    nodes["split"] = {"class_type": "SanaNodesSplitPicture", "inputs": split}
    for name, drawn in (("cluster", ["split", 0]), ("alone", model)):
        nodes[name] = {"class_type": sampler, "inputs": {**own, "model": drawn}}
        saved = {"samples": [name, 0], "filename_prefix": name}
        nodes[f"{name} latents"] = {"class_type": "SaveLatent", "inputs": saved}
    return nodes


def check_same(server, atol=1e-4):
    """Sums are added in another order there."""
    cluster, alone = (
        load_file(max(server.output.glob(f"{name}_*.latent")))["latent_tensor"] for name in ("cluster", "alone")
    )
    torch.testing.assert_close(cluster, alone, atol=atol, rtol=0)
    return alone


def steps_on_the_cluster(event):
    return isinstance(event, dict) and event["type"] == "progress" and event["data"]["node"] == "cluster"


@pytest.mark.timeout(300)
def test_the_cluster_is_offered_and_computes_what_this_machine_does(server):
    info = json.loads(get(server, "/object_info/SanaNodesSplitPicture"))
    assert '"cluster"' in json.dumps(info["SanaNodesSplitPicture"]["input"]["required"]["devices"])
    list(run_graph(server, graph()))
    check_same(server)
    assert len(actors()) == 2
    log = server.log.read_text()
    assert "SANA: 2 GPUs of the cluster share the image" in log


@pytest.mark.timeout(300)
def test_the_workers_stay_for_another_sampler_and_another_size_and_go_with_the_model(server):
    before = {process.pid for process in actors()}
    assert len(before) == 2
    nodes = graph("KSampler")
    nodes["4"]["inputs"] = {**SIZE, "width": 96}
    list(run_graph(server, nodes))
    check_same(server)
    assert {process.pid for process in actors()} == before
    post(server, "/free", unload_models=True, free_memory=True)
    wait_for_no_actors()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_lora_and_perturbed_attention_go_with_the_model(server):
    list(run_graph(server, graph()))
    plain = check_same(server)
    list(run_graph(server, graph(lora=True)))
    assert (check_same(server) - plain).abs().mean() > 0.01


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_member_that_dies_costs_a_step(server):
    died = False
    for event in run_graph(server, graph(steps=40)):
        if not died and steps_on_the_cluster(event):
            actors()[1].send_signal(signal.SIGKILL)
            died = True
    assert died
    check_same(server)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_interrupt_leaves_the_workers_and_the_next_graph_runs(server):
    # also those of whom one has died before
    list(run_graph(server, graph()))
    before = {process.pid for process in actors()}
    assert len(before) == 2
    ended = 0.0
    for event in run_graph(server, graph(steps=500)):
        if not ended and steps_on_the_cluster(event):
            ended = time.monotonic()
            urllib.request.urlopen(f"http://{server.address}/interrupt", data=b"", timeout=60)
        if isinstance(event, dict) and event["type"] == "execution_interrupted":
            break
    assert ended and time.monotonic() - ended < 10
    list(run_graph(server, graph(steps=5)))
    check_same(server)
    assert {process.pid for process in actors()} == before


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_weights_in_fp8_go_there(server):
    list(run_graph(server, graph()))
    plain = check_same(server)
    nodes = graph()
    nodes["1"]["inputs"]["weight_dtype"] = "fp8_e4m3fn"
    list(run_graph(server, nodes))
    assert (check_same(server) - plain).abs().mean() > 0.01


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_an_image_with_a_mask_is_drawn_on(server):
    nodes = graph()
    nodes["image"] = {"class_type": "EmptyImage", "inputs": {**SIZE, "color": 0xC04020}}
    nodes["encode"] = {"class_type": "VAEEncode", "inputs": {"pixels": ["image", 0], "vae": ["1", 2]}}
    nodes["mask"] = {"class_type": "SolidMask", "inputs": {"value": 0.5, "width": 128, "height": 160}}
    masked = {"samples": ["encode", 0], "mask": ["mask", 0]}
    nodes["4"] = {"class_type": "SetLatentNoiseMask", "inputs": masked}
    for name in ("cluster", "alone"):
        nodes[name]["inputs"]["denoise"] = 0.6
    list(run_graph(server, nodes))
    # the mask adds what the steps have rounded to the image's latents
    check_same(server, atol=1e-3)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_what_a_controlnet_adds_goes_there(server):
    nodes = graph()
    nodes["1"]["inputs"]["model"] = "sana-posters (bundled)"
    nodes["image"] = {"class_type": "EmptyImage", "inputs": {**SIZE, "color": 0xC04020}}
    loader = {"control_net_name": "sana-posters-edges (bundled)", "reference": "diffusers"}
    nodes["control"] = {"class_type": "SanaNodesControlNetLoader", "inputs": loader}
    own = {"positive": ["2", 0], "negative": ["3", 0], "control_net": ["control", 0], "image": ["image", 0]}
    own |= {"strength": 1.0, "start_percent": 0.0, "end_percent": 1.0, "vae": ["1", 2]}
    nodes["apply"] = {"class_type": "ControlNetApplyAdvanced", "inputs": own}
    list(run_graph(server, nodes))
    plain = check_same(server)
    for name in ("cluster", "alone"):
        nodes[name]["inputs"] |= {"positive": ["apply", 0], "negative": ["apply", 1]}
    list(run_graph(server, nodes))
    assert (check_same(server) - plain).abs().mean() > 0.01


def test_quantised_products_are_refused_before_anybody_loads_them(server):
    nodes = graph()
    nodes["1"]["inputs"]["weight_dtype"] = "fp8_e4m3fn_fast"
    with pytest.raises(GraphError, match="model: a cluster has no quantised products; choose weight_dtype"):
        list(run_graph(server, nodes))
