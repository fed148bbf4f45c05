"""Starts a ComfyUI server with this pack, and calls its HTTP API for the demo and the tests."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from setup import CACHE, ROOT, comfyui_path, frontend_path
from websockets.sync.client import connect

START_SECONDS = 180


def base_directory(name: str) -> Path:
    """Return a folder with models/, input/, user/ and this pack as its only custom node."""
    base = CACHE / "base" / name
    (base / "custom_nodes").mkdir(parents=True, exist_ok=True)
    (base / "models" / "diffusers").mkdir(parents=True, exist_ok=True)
    link = base / "custom_nodes" / "sana"
    if link.resolve() != ROOT:  # none yet, or the checkout has moved
        link.unlink(missing_ok=True)
        link.symlink_to(ROOT, target_is_directory=True)
    # The example image of ComfyUI's input folder.
    example = base / "input" / "example.png"
    example.parent.mkdir(exist_ok=True)
    shutil.copy(comfyui_path() / "input" / example.name, example)
    return base


def server_command(base: Path, output: Path, port: int) -> list[str]:
    """Return the command line of a server on 127.0.0.1. It uses the CPU if there is no accelerator."""
    import torch

    command = [sys.executable, str(comfyui_path() / "main.py"), "--listen", "127.0.0.1", "--port", str(port)]
    command += ["--base-directory", str(base), "--output-directory", str(output)]
    # By default the database is in ComfyUI's folder, and two servers cannot share it.
    command += ["--database-url", "sqlite:///:memory:"]
    command += ["--preview-method", "auto", "--disable-auto-launch", "--disable-api-nodes"]
    if frontend := frontend_path():
        command += ["--front-end-root", str(frontend)]
    has_accelerator = torch.cuda.is_available() or torch.backends.mps.is_available()
    return command if has_accelerator else [*command, "--cpu"]


def free_port(preferred: int = 0) -> int:
    """Return the port `preferred` if it is free, else another free port."""
    with socket.socket() as probe:
        # The server sets this option too. Without it, a port that was in use a moment ago would count as taken.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, os.name == "posix")
        try:
            probe.bind(("127.0.0.1", preferred))
        except OSError:
            return free_port()
        return probe.getsockname()[1]


class Server(NamedTuple):
    """A running server."""

    address: str
    log: Path
    # The folder where the server saves images.
    output: Path
    pid: int


@contextmanager
def start_server(
    name: str, output: Path | None = None, options: Sequence[str] = (), environment: Mapping[str, str] | None = None
) -> Iterator[Server]:
    """Run a server until the block ends. `environment` is added to the environment of this process.

    Raises RuntimeError with the end of its log if it does not start.
    """
    base, port = base_directory(name), free_port()
    output = output or base / "output"
    log = base / "server.log"
    command = [*server_command(base, output, port), *options]
    with log.open("w") as stream:
        process = subprocess.Popen(
            command, stdout=stream, stderr=subprocess.STDOUT, env={**os.environ, **(environment or {})}
        )
    server = Server(f"127.0.0.1:{port}", log, output, process.pid)
    try:
        deadline = time.monotonic() + START_SECONDS
        while not is_up(server):
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"ComfyUI did not start; the end of {log}:\n{log.read_text()[-3000:]}")
            time.sleep(0.1)
        yield server
    finally:
        process.terminate()
        process.wait(30)


def is_up(server: Server) -> bool:
    try:
        get(server, "/system_stats")
    except (urllib.error.URLError, ConnectionError):
        return False
    return True


def get(server: Server, path: str, **query: str) -> bytes:
    url = f"http://{server.address}{path}?{urllib.parse.urlencode(query)}"
    with urllib.request.urlopen(url, timeout=60) as response:
        return response.read()


def post(server: Server, path: str, **body: object) -> bytes:
    """POST `body` as JSON. Raises urllib.error.HTTPError if the server refuses it."""
    request = urllib.request.Request(
        f"http://{server.address}{path}", data=json.dumps(body).encode(), headers={"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        return response.read()


class GraphError(Exception):
    """The server refused a graph, or a node failed. Contains the server's or the node's message."""


def queue(server: Server, graph: dict, client_id: str) -> str:
    """POST `graph`. Returns the prompt id. Raises GraphError with the server's message if the graph is refused."""
    try:
        return json.loads(post(server, "/prompt", prompt=graph, client_id=client_id))["prompt_id"]
    except urllib.error.HTTPError as error:
        raise GraphError(refusal(json.load(error))) from None


def refusal(answer: dict) -> str:
    """Return the server's messages about the inputs that it refuses, one per line."""
    nodes = answer.get("node_errors") or {}
    lines = [
        f"{node['class_type']}: {error['message']}: {error['details']}"
        for node in nodes.values()
        for error in node["errors"]
    ]
    return "\n".join(lines) or answer["error"]["message"]


def run_graph(server: Server, graph: dict, timeout: float = 300) -> Iterator[dict | bytes]:
    """Queue `graph` and yield its events until it ends or is cancelled: dicts, and bytes for previews.

    Raises GraphError with the node's message if a node fails, and TimeoutError if no event comes in `timeout` seconds.
    """
    client_id = uuid.uuid4().hex
    with connect(f"ws://{server.address}/ws?clientId={client_id}", max_size=None) as stream:
        prompt_id = queue(server, graph, client_id)
        while True:
            message = stream.recv(timeout=timeout)
            if isinstance(message, bytes):
                yield message
                continue
            event = json.loads(message)
            if event["data"].get("prompt_id") != prompt_id:
                continue
            yield event
            if event["type"] == "execution_error":
                raise GraphError(event["data"]["exception_message"].strip())
            if event["type"] in ("execution_success", "execution_interrupted"):
                return


def images_of(events: list[dict | bytes]) -> list[dict]:
    """Return filename, subfolder and type of the images in the events."""
    executed = [event["data"] for event in events if isinstance(event, dict) and event["type"] == "executed"]
    return [image for data in executed for image in (data.get("output") or {}).get("images", [])]
