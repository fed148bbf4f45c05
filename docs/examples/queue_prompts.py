"""Queue a file of prompts on a running ComfyUI and fetch the images: `python queue_prompts.py prompts.txt`.

Only Python's own library is needed. The prompts go into graphs of a few lines each, so that images come while others
wait; inside each, SANA Batch Sampler draws on every device of the server.
"""

from __future__ import annotations

import argparse
import http.client
import json
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable
from pathlib import Path


def graph_of(prompts: list[str], options: argparse.Namespace) -> dict:
    """Return the graph that draws `prompts`, in ComfyUI's API format."""
    link = {
        "model": ["load", 0],
        "positive": ["positive", 0],
        "negative": ["negative", 0],
        "latent_image": ["empty", 0],
    }
    size = {"width": options.width, "height": options.height, "batch_size": 1}
    sampling = {"count": options.count, "seed": options.seed, "steps": 20, "guidance": 4.5, "sampler": "flow_dpmpp_2m"}
    nodes = {
        "load": ("SanaNodesLoader", {"model": options.model, "weight_dtype": "default", "resolution": "auto"}),
        "positive": ("SanaNodesPromptList", {"clip": ["load", 1], "prompts": "\n".join(prompts), "instruction": True}),
        "negative": ("SanaNodesTextEncode", {"clip": ["load", 1], "text": "", "instruction": False}),
        "empty": ("SanaNodesEmptyLatent", size),
        "batch": (
            "SanaNodesBatchSampler",
            {**link, **sampling, "devices": options.devices, "chunk": 0, "vae": ["load", 2]},
        ),
        "save": ("SaveImage", {"images": ["batch", 1], "filename_prefix": "batch"}),
    }
    return {key: {"class_type": kind, "inputs": inputs} for key, (kind, inputs) in nodes.items()}


def read_prompts(file: Path) -> list[str]:
    """Return the lines of `file` that are not empty. Ends the program if there are none, or it cannot be read."""
    if file.suffix.lower() in (".csv", ".tsv", ".json", ".jsonl", ".ndjson"):
        sys.exit(f"{file}: got a {file.suffix} file, expected a text file with one prompt a line; write one")
    try:
        # Reading a text turns \r\n and \r into \n. str.splitlines would also split prompts at U+2028 and form feeds.
        lines = file.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        sys.exit(f"{file}: cannot be read ({error}); give a text file in UTF-8, one prompt a line")
    prompts = [line for text in lines if (line := text.strip().removeprefix("\ufeff").strip())]
    return prompts or sys.exit(f"{file}: got no prompt, expected one a line; write some")


def refusal(content: bytes) -> str:
    """Return what the server says of the inputs that it refuses, a line for each, or its words as they are."""
    try:
        answer = json.loads(content)
        nodes = answer.get("node_errors") or {}
        lines = [f"{error['message']}: {error['details']}" for node in nodes.values() for error in node["errors"]]
        return "\n".join(lines) or answer["error"]["message"]
    except (ValueError, KeyError, TypeError, AttributeError):
        return content.decode(errors="replace")[:500]


def call(server: str, path: str, body: dict | None = None) -> bytes:
    """GET `path`, or POST `body` to it. Ends the program in words if the server refuses or is not there."""
    data = None if body is None else json.dumps(body).encode()
    try:
        request = urllib.request.Request(f"{server}{path}", data=data, headers={"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=60) as response:
            return response.read()
    except urllib.error.HTTPError as error:
        sys.exit(f"{server}: refused {path.partition('?')[0]}: {refusal(error.read())}")
    except (OSError, ValueError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", error)
        sys.exit(f"{server}: cannot be reached ({reason}); start ComfyUI there, or give its address with --server")


def wait_for(server: str, prompt_id: str) -> list[dict]:
    """Return the images of a queued graph once it has run. Ends the program if it failed or was removed."""
    while True:
        # The queue first: a graph that ends between the two requests is in the history then.
        queue = json.loads(call(server, "/queue"))
        is_queued = any(prompt_id in entry for entries in queue.values() for entry in entries)
        history = json.loads(call(server, f"/history/{prompt_id}"))
        if prompt_id in history:
            status = history[prompt_id]["status"]
            if status["status_str"] != "success":
                sys.exit(f"{server}: the graph failed: {failure(status['messages'])}")
            return history[prompt_id]["outputs"]["save"]["images"]
        if not is_queued:
            sys.exit(f"{server}: a graph is no longer queued, and has no result; its queue was cleared: start again")
        time.sleep(0.5)


def failure(messages: list) -> str:
    """Return the error of the node that failed, or what else ended the graph."""
    event, data = messages[-1]
    return f"{data['node_type']}: {data['exception_message'].strip()}" if "exception_message" in data else event


def at_least(least: int) -> Callable[[str], int]:
    def number(text: str) -> int:
        if int(text) < least:
            raise argparse.ArgumentTypeError(f"got {text}, expected {least} or more")
        return int(text)

    return number


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prompts", type=Path, help="a text file in UTF-8, one prompt a line")
    parser.add_argument("--server", default="http://127.0.0.1:8188")
    parser.add_argument("--out", type=Path, default=Path("pictures"))
    parser.add_argument("--model", default="sana-posters (bundled)", help="as SANA Loader lists it")
    parser.add_argument("--width", type=at_least(32), default=512)
    parser.add_argument("--height", type=at_least(32), default=512)
    parser.add_argument("--count", type=at_least(1), default=1, help="images of each prompt")
    parser.add_argument("--seed", type=at_least(0), default=0)
    parser.add_argument("--devices", default="all", help="as SANA Batch Sampler lists them")
    parser.add_argument("--together", type=at_least(1), default=10, help="prompts in one graph")
    options = parser.parse_args()
    prompts = read_prompts(options.prompts)
    try:
        options.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        sys.exit(f"--out {options.out}: cannot be made ({error}); choose another folder")
    queued = []
    for first in range(0, len(prompts), options.together):
        some = prompts[first : first + options.together]
        answer = json.loads(call(options.server, "/prompt", {"prompt": graph_of(some, options)}))
        queued.append((first, answer["prompt_id"]))
    sys.stdout.write(f"queued {len(prompts)} prompts in {len(queued)} graphs\n")
    for first, prompt_id in queued:
        for index, image in enumerate(wait_for(options.server, prompt_id)):
            prompt, i = divmod(index, options.count)
            path = options.out / f"{first + prompt:05d}_{options.seed + i}.png"
            path.write_bytes(call(options.server, f"/view?{urllib.parse.urlencode(image)}"))
            sys.stdout.write(f"{path}\n")
            sys.stdout.flush()


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("\nstopped; what is queued goes on, and ends with Clear in the browser")
