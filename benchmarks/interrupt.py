"""How long SANA Batch Sampler goes on after Interrupt, on this machine's CPU in two halves, over HTTP.

Two images of 1024 px by the bundled sana-posters; one run is timed, and each of the following, of a MODEL that has just
been freed, is interrupted at another share of that time, so in loading, sampling and decoding. Writes
benchmarks/interrupt.json.
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

# presses of Interrupt
MOMENTS = 10


def graph(seed: int) -> dict:
    """Return the graph of a batch of two images, all of it computed anew for another seed."""
    nodes = json.loads((ROOT / "tests" / "graphs" / "tiny.json").read_text())
    nodes["1"]["inputs"]["model"] = "sana-posters (bundled)"
    nodes["4"]["inputs"] = {"width": 1024, "height": 1024, "batch_size": 1}
    own = {key: value for key, value in nodes["5"]["inputs"].items() if key not in ("denoise", "model_defaults")}
    batch = {**own, "steps": 4, "seed": seed, "count": 2, "chunk": 1, "devices": "cpu x 2", "vae": ["1", 2]}
    nodes["5"] = {"class_type": "SanaNodesBatchSampler", "inputs": batch}
    nodes["6"] = {"class_type": "PreviewImage", "inputs": {"images": ["5", 1]}}
    return {key: nodes[key] for key in "123456"}


def main() -> None:
    silences = []
    with tempfile.TemporaryDirectory() as folder, start_server("benchmark-interrupt", Path(folder)) as server:

        def run(number: int, wait: float | None) -> tuple[float, float, float]:
            """Return when the batch began, when Interrupt was pressed, and when the run ended."""
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

        # what only the first run pays for
        run(0, None)
        began, _, ended = run(1, None)
        whole = ended - began
        for number in range(MOMENTS):
            _, pressed, ended = run(number + 2, whole * number / MOMENTS)
            if pressed:
                silences.append(round(ended - pressed, 2))
    figures = {
        "load_of_the_machine": round(os.getloadavg()[0], 1),
        "whole_run_s": round(whole, 1),
        "from_interrupt_to_end_s": silences,
    }
    write(__file__, figures)


if __name__ == "__main__":
    main()
