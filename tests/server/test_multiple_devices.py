"""SANA Batch Sampler over HTTP, with two workers on the CPU, and the example client."""

import io
import json
import subprocess
import sys
import time

import numpy as np
from host import get, images_of, post, run_graph
from PIL import Image
from setup import ROOT
from shape_judge import judge

PROMPTS = ["a red circle on a blue background", "a blue square on a white background"]
WANTED = [("red", "circle", "blue"), ("blue", "square", "white")]


def test_two_workers_draw_what_the_prompts_say_with_progress_previews_and_a_report(server, demo):
    demo["2"] = {"class_type": "SanaNodesPromptList", "inputs": {"clip": ["1", 1], "prompts": "\n".join(PROMPTS)}}
    demo["2"]["inputs"]["instruction"] = True
    sampler_inputs = demo["5"]["inputs"]
    for name in ("denoise", "model_defaults"):
        del sampler_inputs[name]
    sampler_inputs.update(count=2, devices="cpu x 2", chunk=1, vae=["1", 2])
    demo["5"]["class_type"] = "SanaNodesBatchSampler"
    demo["7"]["inputs"]["images"] = ["5", 1]
    del demo["6"]
    events = list(run_graph(server, demo))
    images = [Image.open(io.BytesIO(get(server, "/view", **image))).convert("RGB") for image in images_of(events)]
    judged = [judge(np.asarray(image)) for image in images]
    assert len(judged) == 4
    assert judged[0] == WANTED[0] and judged[2] == WANTED[1]
    steps = [e["data"] for e in events if isinstance(e, dict) and e["type"] == "progress" and e["data"]["node"] == "5"]
    assert steps[-1]["value"] == steps[-1]["max"] == 4 * 20
    assert any(isinstance(event, bytes) for event in events)
    assert "4 images in" in server.log.read_text()


def test_the_example_client_queues_a_file_of_prompts(server, tmp_path):
    (tmp_path / "prompts.txt").write_text("\n".join(PROMPTS * 3))
    command = [sys.executable, str(ROOT / "docs" / "examples" / "queue_prompts.py"), "prompts.txt", "--together", "4"]
    command += ["--server", f"http://{server.address}", "--devices", "default", "--model", "sana-tiny"]
    command += ["--width", "128", "--height", "128"]
    process = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert process.returncode == 0, process.stderr
    assert "queued 6 prompts in 2 graphs" in process.stdout
    pictures = sorted((tmp_path / "pictures").glob("*.png"))
    assert [path.name for path in pictures] == [f"{i:05d}_0.png" for i in range(6)]
    for path, number in zip(pictures, WANTED * 3, strict=True):
        assert judge(np.asarray(Image.open(path).convert("RGB"))) == number


def test_the_example_client_ends_when_the_queue_is_cleared(server, demo, tmp_path):
    # This graph runs until it is interrupted, so that the graph of the client waits.
    demo["5"]["inputs"].update(steps=1000, seed=12345)
    busy = json.loads(post(server, "/prompt", prompt=demo))["prompt_id"]
    (tmp_path / "prompts.txt").write_text(PROMPTS[0])
    command = [sys.executable, str(ROOT / "docs" / "examples" / "queue_prompts.py"), "prompts.txt"]
    command += ["--server", f"http://{server.address}", "--model", "sana-tiny"]
    try:
        with subprocess.Popen(
            command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        ) as client:
            while not any(item[1] != busy for item in json.loads(get(server, "/queue"))["queue_pending"]):
                time.sleep(0.1)
            # Once the client has seen its graph in the queue.
            time.sleep(1)
            post(server, "/queue", clear=True)
            _, errors = client.communicate(timeout=20)
        assert client.returncode == 1 and errors.strip().endswith("its queue was cleared: start again")
    finally:
        post(server, "/interrupt", prompt_id=busy)
