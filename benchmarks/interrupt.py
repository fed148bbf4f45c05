"""How long SANA Batch Sampler continues after Interrupt, over HTTP, on two workers on this machine's CPU.

Each run generates two images of 1024 px with the bundled sana-posters, and loads the model again. The first one is
timed. Each of the following ones is interrupted at another share of that time, and therefore during loading, sampling
or decoding. Writes benchmarks/interrupt.json.
"""

from __future__ import annotations

import json
import os
import tempfile
import threading
import time
import urllib.request
from pathlib import Path

from host import post, run_graph, start_server

from benchmarks import ROOT
from benchmarks.machine import write

# Number of runs that are interrupted.
MOMENTS = 10


def graph(seed: int) -> dict:
    """Return the graph of a batch of two images. With another seed, ComfyUI computes all of it again."""
    nodes = json.loads((ROOT / "tests" / "graphs" / "tiny.json").read_text())
    nodes["1"]["inputs"]["model"] = "sana-posters (bundled)"
    nodes["4"]["inputs"] = {"width": 1024, "height": 1024, "batch_size": 1}
    common = {key: value for key, value in nodes["5"]["inputs"].items() if key not in ("denoise", "model_defaults")}
    batch = {**common, "steps": 4, "seed": seed, "count": 2, "chunk": 1, "devices": "cpu x 2", "vae": ["1", 2]}
    nodes["5"] = {"class_type": "SanaNodesBatchSampler", "inputs": batch}
    nodes["6"] = {"class_type": "PreviewImage", "inputs": {"images": ["5", 1]}}
    return {key: nodes[key] for key in "123456"}


def main() -> None:
    silences = []
    with tempfile.TemporaryDirectory() as folder, start_server("benchmark-interrupt", Path(folder)) as server:

        def run(number: int, wait: float | None) -> tuple[float, float, float]:
            """Return the times at which the batch began, Interrupt was pressed, and the run ended."""
            post(server, "/free", unload_models=True, free_memory=True)
            began, pressed = 0.0, [0.0]

            def press() -> None:
                pressed[0] = time.monotonic()
                urllib.request.urlopen(f"http://{server.address}/interrupt", data=b"", timeout=60)

            for event in run_graph(server, graph(number)):
                kind = event["type"] if isinstance(event, dict) else ""
                if kind == "executing" and event["data"]["node"] == "5":
                    began = time.monotonic()
                    if wait is not None:
                        threading.Timer(wait, press).start()
                if kind == "execution_interrupted":
                    break
            return began, pressed[0], time.monotonic()

        # A warm-up run, then the timed one.
        run(0, None)
        began, _, ended = run(1, None)
        duration = ended - began
        for number in range(MOMENTS):
            _, pressed, ended = run(number + 2, duration * number / MOMENTS)
            if pressed:
                silences.append(round(ended - pressed, 2))
    figures = {
        "load_of_the_machine": round(os.getloadavg()[0], 1),
        "whole_run_s": round(duration, 1),
        "from_interrupt_to_end_s": silences,
    }
    write(__file__, figures)


if __name__ == "__main__":
    main()
