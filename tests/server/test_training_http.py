"""A training run over HTTP: its messages on the websocket, an interrupt during the run, and queueing it again."""

import io
import json
import shutil

from host import get, post, run_graph
from PIL import Image
from safetensors.torch import load_file
from setup import ROOT

TEXT = 3  # the kind of event, in its first four bytes
STEPS = 30


def training(name):
    inputs = {"name": name, "rank": 4, "steps": STEPS, "learning_rate": 1e-3, "batch_size": 2}
    inputs |= {"validation_prompts": "a red star on a green background", "settings": ["4", 0]}
    return {
        "1": {"class_type": "SanaNodesLoader", "inputs": {"model": "sana-tiny"}},
        "2": {"class_type": "SanaNodesDataset", "inputs": {"folder": "cyanotypes (bundled)", "resolution": 128}},
        "3": {"class_type": "SanaNodesTrain", "inputs": {"model": ["1", 0], "dataset": ["2", 0], **inputs}},
        "4": {"class_type": "SanaNodesTrainSettings", "inputs": {"validate_every": 15}},
    }


def losses(server, name):
    lines = (server.output / "sana_training" / name / "log.jsonl").read_text().splitlines()
    return [line["loss"] for line in map(json.loads, lines) if "loss" in line]


def test_a_run_is_seen_interrupted_and_goes_on(server):
    events = list(run_graph(server, training("whole")))
    steps = [event["data"] for event in events if isinstance(event, dict) and event["type"] == "progress"]
    assert {"node": "3", "value": STEPS, "max": STEPS}.items() <= steps[-1].items()
    # Each stage has its bar, which starts below a full one.
    bars = [(step["value"], step["max"]) for step in steps if step["node"] == "3"]
    entries = 2 * 20 + 1  # the latents and captions of twenty images, and the empty caption
    stages = [most for index, (_, most) in enumerate(bars) if not index or most != bars[index - 1][1]]
    assert stages[-2:] == [entries, STEPS] and stages[:-2]
    for most in (entries, STEPS):
        values = [value for value, total in bars if total == most]
        assert values == sorted(values) and values[0] < most == values[-1]
    previews = [event for event in events if isinstance(event, bytes)]
    texts = [event for event in previews if event[3] == TEXT]
    assert any(f"step {STEPS} of {STEPS}, loss 0.".encode() in text for text in texts)
    # ComfyUI's own loader lists the LoRA without a restart, and loads it.
    info = json.loads(get(server, "/object_info/LoraLoaderModelOnly"))["LoraLoaderModelOnly"]
    assert "whole.safetensors" in info["input"]["required"]["lora_name"][0]
    preview = Image.open(io.BytesIO([event for event in previews if event[3] != TEXT][-1][8:]))
    assert preview.format == "JPEG" and preview.size == (512, 512 + 128)
    executed = [event["data"] for event in events if isinstance(event, dict) and event["type"] == "executed"]
    trained = next(item["output"] for item in executed if item["node"] == "3")
    assert trained["sana"] == ["press R, then choose whole.safetensors; 30 steps"]
    (shown,) = trained["images"]
    fetched = get(server, "/view", **shown)
    sheet = Image.open(server.output / "sana_training" / "whole" / "validations.png")
    assert Image.open(io.BytesIO(fetched)).tobytes() == sheet.tobytes()

    for event in run_graph(server, training("broken")):
        previews = event["data"] if isinstance(event, dict) and event["type"] == "progress" else {}
        if previews.get("max") == STEPS and previews["value"] > 0:
            post(server, "/interrupt")
    assert event["type"] == "execution_interrupted" and event["data"]["node_id"] == "3"
    assert 0 < len(losses(server, "broken")) < STEPS
    list(run_graph(server, training("broken")))
    assert losses(server, "broken") == losses(server, "whole")
    one, other = (
        load_file(server.output / "sana_training" / name / f"{name}.safetensors") for name in ("whole", "broken")
    )
    assert one.keys() == other.keys() and all((one[key] == other[key]).all() for key in one)


def test_all_nodes_work_after_the_output_folder_was_emptied(server, demo):
    folder = server.output / "loras"
    folder.mkdir(exist_ok=True)
    shutil.copy(ROOT / "demo" / "sana-posters-cyanotype.safetensors", folder)
    before = json.loads(get(server, "/object_info"))
    assert "sana-posters-cyanotype.safetensors" in before["LoraLoader"]["input"]["required"]["lora_name"][0]
    shutil.rmtree(folder)
    assert json.loads(get(server, "/object_info")).keys() == before.keys()
    list(run_graph(server, demo))
