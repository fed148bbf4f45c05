"""Make workflows/*.json of scripts/templates.py, and subgraphs/*.json: `python scripts/lay_out.py`."""

from __future__ import annotations

import json
import sys

from host import ROOT, get, start_server
from parts import blueprints
from templates import Template, showing, templates
from workflow import Graph, Json, Node, Subgraph, start_file, write_file

ALIASES = ["sana", "text to image", "nvidia"]


def template_json(name: str, template: Template, info: Json) -> Json:
    """Return the workflow of `template`, for a server whose /object_info is `info`."""
    whole, nodes = write_file(start_file(name, info), template.graph)
    shown = [[nodes[node]["id"], widget] for node, widget in template.app]
    return whole | {"extra": {"linearData": {"inputs": shown, "outputs": showing(whole)}}}


def blueprint_json(subgraph: Subgraph, info: Json) -> Json:
    """Return the blueprint as the node library reads it: a workflow of one node, and the subgraph that it is."""
    graph = Graph({"node": Node(subgraph, {})}, "node")
    whole, _ = write_file(start_file(f"blueprint {subgraph.name}", info), graph)
    return whole | {"extra": {"BlueprintSearchAliases": ALIASES}}


def main() -> None:
    with start_server("lay-out") as server:
        info = json.loads(get(server, "/object_info"))
    made = {ROOT / "workflows" / name: template_json(name, each, info) for name, each in templates().items()}
    made |= {ROOT / "subgraphs" / each.name: blueprint_json(each, info) for each in blueprints()}
    for path, content in made.items():
        path.with_name(f"{path.name}.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        sys.stdout.write(f"{path.parent.name}/{path.name}\n")


if __name__ == "__main__":
    main()
