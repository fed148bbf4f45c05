"""A ComfyUI server with this pack in it, and the few calls of its HTTP API that demo and tests make."""

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
    # which ComfyUI has in its own
    example = base / "input" / "example.png"
    example.parent.mkdir(exist_ok=True)
    shutil.copy(comfyui_path() / "input" / example.name, example)
    return base


def server_command(base: Path, output: Path, port: int) -> list[str]:
    """The command line of a server on 127.0.0.1, on the CPU where there is no accelerator."""
    import torch

    command = [sys.executable, str(comfyui_path() / "main.py"), "--listen", "127.0.0.1", "--port", str(port)]
    command += ["--base-directory", str(base), "--output-directory", str(output)]
    # its own place for the database is in ComfyUI's folder, and two servers cannot share one
    command += ["--database-url", "sqlite:///:memory:"]
    command += ["--preview-method", "auto", "--disable-auto-launch", "--disable-api-nodes"]
    if frontend := frontend_path():
        command += ["--front-end-root", str(frontend)]
    has_accelerator = torch.cuda.is_available() or torch.backends.mps.is_available()
    return command if has_accelerator else [*command, "--cpu"]


def free_port(wanted: int = 0) -> int:
    """Return `wanted` if nobody listens there, else a port that is free."""
    with socket.socket() as probe:
        # as the server does, or a port that was just left would count as taken
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, os.name == "posix")
        try:
            probe.bind(("127.0.0.1", wanted))
        except OSError:
            return free_port()
        return probe.getsockname()[1]


class Server(NamedTuple):
    """A running server: its address, its log, where it writes pictures, and its process."""

    address: str
    log: Path
    output: Path
    pid: int


@contextmanager
def start_server(
    name: str, output: Path | None = None, options: Sequence[str] = (), environment: Mapping[str, str] | None = None
) -> Iterator[Server]:
    """Run a server until the block ends, with `environment` besides this process's.

    Raises RuntimeError with the end of its log if it does not come up.
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
    """POST `body` as JSON. Raises urllib.error.HTTPError where the server refuses it."""
    request = urllib.request.Request(
        f"http://{server.address}{path}", data=json.dumps(body).encode(), headers={"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        return response.read()


class GraphError(Exception):
    """The server refused a graph, or a node failed; the message is what it said."""


def queue(server: Server, graph: dict, client_id: str) -> str:
    """POST `graph`; return the prompt id. Raises GraphError with the server's words if it is refused."""
    try:
        return json.loads(post(server, "/prompt", prompt=graph, client_id=client_id))["prompt_id"]
    except urllib.error.HTTPError as error:
        raise GraphError(refusal(json.load(error))) from None


def refusal(answer: dict) -> str:
    """What the server says of the inputs that it refuses, one line each."""
    nodes = answer.get("node_errors") or {}
    lines = [
        f"{node['class_type']}: {error['message']}: {error['details']}"
        for node in nodes.values()
        for error in node["errors"]
    ]
    return "\n".join(lines) or answer["error"]["message"]


def run_graph(server: Server, graph: dict) -> Iterator[dict | bytes]:
    """Queue `graph` and yield its events until it ends or is cancelled: dicts, and bytes for previews.

    Raises GraphError with the node's message if one fails.
    """
    client_id = uuid.uuid4().hex
    with connect(f"ws://{server.address}/ws?clientId={client_id}", max_size=None) as stream:
        prompt_id = queue(server, graph, client_id)
        while True:
            message = stream.recv(timeout=300)
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
    """Return filename, subfolder and type of the pictures that the events announce."""
    done = [event["data"] for event in events if isinstance(event, dict) and event["type"] == "executed"]
    return [image for data in done for image in (data.get("output") or {}).get("images", [])]
