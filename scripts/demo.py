"""Draw one picture over the HTTP API of a ComfyUI with this pack, or leave its canvas open (`--serve`)."""

from __future__ import annotations

import argparse
import contextlib
import json
import subprocess
import sys
import time

from host import ROOT, GraphError, base_directory, free_port, images_of, run_graph, server_command, start_server

GRAPH = ROOT / "demo" / "graph.json"
OUTPUT = ROOT / "output"
PORT = 8188


def draw(prompt: str | None) -> None:
    graph = json.loads(GRAPH.read_text())
    if prompt:
        (node,) = (node for node in graph.values() if node["_meta"]["title"] == "Prompt")
        node["inputs"]["text"] = prompt
    started = time.monotonic()
    sys.stdout.write("Starting ComfyUI ...\n")
    with start_server("demo", OUTPUT) as server:
        queued = time.monotonic()
        events = []
        for event in run_graph(server, graph):
            events.append(event)
            if isinstance(event, dict) and event["type"] == "progress":
                data = event["data"]
                title = graph[data["node"]]["_meta"]["title"]
                sys.stdout.write(f"\r{title}: step {data['value']} of {data['max']} ")
                sys.stdout.flush()
        ended = time.monotonic()
    (image,) = images_of(events)
    path = OUTPUT / image["subfolder"] / image["filename"]
    sys.stdout.write(f"\n{path}\n({ended - started:.1f} s, of which the graph {ended - queued:.1f} s)\n")


def serve() -> None:
    port = free_port(PORT)
    note = "" if port == PORT else f"; {PORT} is note"
    sys.stdout.write(f"The canvas: http://127.0.0.1:{port}  (Ctrl+C ends it{note})\n")
    sys.stdout.flush()
    with contextlib.suppress(KeyboardInterrupt):
        sys.exit(subprocess.run(server_command(base_directory("serve"), OUTPUT, port)).returncode)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompt", help='for example "a flat drawing of a blue house in the snow at night"')
    parser.add_argument("--serve", action="store_true", help="leave the canvas open, until Ctrl+C")
    arguments = parser.parse_args()
    if arguments.serve:
        serve()
        return
    try:
        draw(arguments.prompt)
    except GraphError as error:
        sys.exit(f"\n{error}")


if __name__ == "__main__":
    main()
