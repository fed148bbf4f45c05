"""Write workflows/*.json and subgraphs/*.json from scripts/templates.py and parts.py: `python scripts/lay_out.py`."""

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
    workflow, nodes = write_file(start_file(name, info), template.graph)
    shown = [[nodes[node]["id"], widget] for node, widget in template.app]
    return workflow | {"extra": {"linearData": {"inputs": shown, "outputs": showing(workflow)}}}


def blueprint_json(subgraph: Subgraph, info: Json) -> Json:
    """Return the blueprint for the node library: a workflow with one node, whose definition is `subgraph`."""
    graph = Graph({"node": Node(subgraph, {})}, "node")
    workflow, _ = write_file(start_file(f"blueprint {subgraph.name}", info), graph)
    return workflow | {"extra": {"BlueprintSearchAliases": ALIASES}}


def main() -> None:
    with start_server("lay-out") as server:
        info = json.loads(get(server, "/object_info"))
    files = {ROOT / "workflows" / name: template_json(name, item, info) for name, item in templates().items()}
    files |= {ROOT / "subgraphs" / blueprint.name: blueprint_json(blueprint, info) for blueprint in blueprints()}
    for path, content in files.items():
        path.with_name(f"{path.name}.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        sys.stdout.write(f"{path.parent.name}/{path.name}\n")


if __name__ == "__main__":
    main()
