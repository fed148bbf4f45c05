"""Make subgraphs/*.json: `python scripts/blueprints.py`. Each is one node that holds a graph, from the node library.

They are laid out on the grid of the templates, and Chromium makes subgraphs of them, as a person does with "Convert to
Subgraph": what is in `shown` becomes an input or a widget of the node, and what is in `outputs` its outputs.
"""

from __future__ import annotations

import json
import sys
import uuid
from typing import Any, NamedTuple

from canvas import open_canvas, settle
from host import ROOT, start_server
from lay_out import PLACE, PREPARE, WIDE, WIDE_NODES, WIDTH, api_graph, clean_node, height_of, place
from playwright.sync_api import Page
from templates import LIST, Node, Template, empty, prompts, result, sampler, switched

SUBGRAPHS = ROOT / "subgraphs"
K1, K4 = "Sana_1600M_1024px_BF16.safetensors", "Sana_1600M_4Kpx_BF16.safetensors"
ALIASES = ["sana", "text to image", "nvidia"]
CATEGORY = "SANA"
CONVERT = """([shown, outputs]) => {
    const inner = id => subgraph.nodes.find(node => node.id == id);
    const {subgraph, node} = app.graph.convertToSubgraph(new Set(app.graph.nodes));
    // what was shown of itself, like a seed, would come first
    for (const input of [...subgraph.inputs]) subgraph.removeInput(input);
    for (const [name, id, field] of shown) {
        const owner = inner(id), slot = owner.inputs.find(input => input.name === field);
        subgraph.addInput(name, String(slot.type)).connect(slot, owner);
    }
    for (const [name, id, number] of outputs) {
        const owner = inner(id), slot = owner.outputs[number];
        subgraph.addOutput(name, String(slot.type)).connect(slot, owner);
    }
    node.pos = [0, 0];
    node.setSize([WIDE, node.computeSize()[1]]);
    return app.graph.serialize();
}""".replace("WIDE", str(WIDE))


class Blueprint(NamedTuple):
    """A graph in one node. `shown` are its inputs, (name, name of a node, input), `outputs` (name, node, output)."""

    description: str
    nodes: dict[str, Node]
    shown: tuple[tuple[str, str, str], ...]
    outputs: tuple[tuple[str, str, int], ...]


MODEL = ("use", "model", "use")
DRAWN = (("text", "prompt", "text"), ("seed", "sampler", "seed"))


def without_save(nodes: dict[str, Node]) -> dict[str, Node]:
    return {name: node for name, node in nodes.items() if node.kind != "SaveImage"}


def text_to_image(file: str, side: int, **decode: Any) -> dict[str, Node]:
    nodes = {**switched(file), **prompts(), **empty(side), "sampler": sampler(), **result("", **decode)}
    return without_save(nodes)


def second_pass() -> dict[str, Node]:
    """The second pass alone: what it draws on, and with, comes from outside."""
    upscale = {"upscale_method": "bislerp", "scale_by": 1.5}
    values = {"seed": 0, "steps": 20, "guidance": 4.5, "sampler": "flow_dpmpp_2m", "denoise": 0.35}
    return {
        "upscale": Node("LatentUpscaleBy", "Second pass", upscale),
        "sampler": Node("SanaNodesSampler", "Second pass", {**values, "latent_image": ("upscale", 0)}),
        "decode": Node("SanaNodesDecode", "Result", {"samples": ("sampler", 0), "method": "auto"}),
    }


def batch() -> dict[str, Node]:
    texts = {"clip": ("model", 1), "prompts": LIST, "instruction": True}
    links = {"model": ("model", 0), "positive": ("prompt", 0), "negative": ("negative", 0), "vae": ("model", 2)}
    values = {"count": 2, "seed": 0, "steps": 20, "guidance": 4.5, "sampler": "flow_dpmpp_2m", "devices": "all"}
    return {
        **switched(K1),
        "prompt": Node("SanaNodesPromptList", "Prompt", texts),
        "negative": prompts()["negative"],
        **empty(),
        "sampler": Node("SanaNodesBatchSampler", "Picture", {**links, "latent_image": ("empty", 0), **values}),
    }


def blueprints() -> dict[str, Blueprint]:
    """Return the blueprints by the name that the node library shows, which is that of the file."""
    sizes = (("width", "empty", "width"), ("height", "empty", "height"))
    settings = (("steps", "sampler", "steps"), ("guidance", "sampler", "guidance"))
    links = [("model", "sampler", "model"), ("positive", "sampler", "positive"), ("negative", "sampler", "negative")]
    again = (*links, ("vae", "decode", "vae"), ("samples", "upscale", "samples"))
    more = (("count", "sampler", "count"), ("seed", "sampler", "seed"), ("devices", "sampler", "devices"))
    return {
        "SANA text to image": Blueprint(
            "Draws a picture of a text with SANA 1.6B, or with the small model that comes with the pack.",
            text_to_image(K1, 1024),
            (("text", "prompt", "text"), ("negative text", "negative", "text"), MODEL, *sizes, DRAWN[1], *settings),
            (("IMAGE", "decode", 0), ("LATENT", "sampler", 0)),
        ),
        "SANA 4K text to image": Blueprint(
            "Draws a picture of 4096 px with SANA 1.6B 4K; the decode gives the pixels of an undivided one in the "
            "memory that is free, or in budget_gb.",
            text_to_image(K4, 4096, method="strips"),
            (*DRAWN[:1], MODEL, *sizes, DRAWN[1], *settings, ("budget_gb", "decode", "budget_gb")),
            (("IMAGE", "decode", 0),),
        ),
        "SANA second pass": Blueprint(
            "Enlarges the latent of a picture and draws the last steps again at the new size, for finer details.",
            second_pass(),
            (*again, ("scale_by", "upscale", "scale_by"), ("denoise", "sampler", "denoise"), DRAWN[1], *settings),
            (("IMAGE", "decode", 0), ("LATENT", "sampler", 0)),
        ),
        "SANA batch": Blueprint(
            "Draws several pictures of each line of a list, shared out over all GPUs of this machine.",
            batch(),
            (("prompts", "prompt", "prompts"), MODEL, *more, *settings),
            (("IMAGE", "sampler", 1),),
        ),
    }


def make(page: Page, name: str, blueprint: Blueprint) -> dict[str, Any]:
    """Return the blueprint as the node library reads it: a workflow of one node, and the subgraph that it is."""
    template = Template(blueprint.nodes, "", ())
    graph, ids = api_graph(template)
    page.evaluate("async ([graph, name]) => { await app.loadApiJson(graph, name) }", [graph, f"{name}.json"])
    columns: dict[str, list[int]] = {}
    sizes = {}
    for key, node in blueprint.nodes.items():
        columns.setdefault(node.group, []).append(ids[key])
        sizes[str(ids[key])] = [WIDE if node.kind in WIDE_NODES else WIDTH, height_of(node.kind)]
    page.evaluate(PREPARE, [sizes, []])
    page.evaluate(PLACE, place(page, columns))
    settle(page)
    shown = [(label, ids[node], field) for label, node, field in blueprint.shown]
    outputs = [(label, ids[node], number) for label, node, number in blueprint.outputs]
    return clean_blueprint(page.evaluate(CONVERT, [shown, outputs]), name, blueprint.description)


def clean_blueprint(saved: dict[str, Any], name: str, description: str) -> dict[str, Any]:
    """Return what the canvas has saved, under names and ids that are the same each time."""

    def number(*parts: str) -> str:
        return str(uuid.uuid5(uuid.NAMESPACE_URL, "/".join((name, *parts))))

    (held,), (outer,) = saved["definitions"]["subgraphs"], saved["nodes"]
    node = {**clean_node(outer), "id": 1, "type": number(), "title": name, "properties": {}}
    ends = {
        side: [
            {"id": number(side, each["name"]), **{key: each[key] for key in ("name", "type", "linkIds")}}
            for each in held[side]
        ]
        for side in ("inputs", "outputs")
    }
    subgraph = {
        **{key: held[key] for key in ("version", "state", "revision", "config", "links")},
        "id": number(),
        "name": name,
        "description": description,
        "category": CATEGORY,
        "inputNode": {"id": -10, "bounding": [round(each) for each in held["inputNode"]["bounding"]]},
        "outputNode": {"id": -20, "bounding": [round(each) for each in held["outputNode"]["bounding"]]},
        **ends,
        "widgets": [],
        "nodes": [clean_node(each) for each in held["nodes"]],
        "groups": [],
        "extra": {},
    }
    whole = {"revision": 0, "last_node_id": 1, "last_link_id": 0, "nodes": [node], "links": [], "version": 0.4}
    return {**whole, "definitions": {"subgraphs": [subgraph]}, "extra": {"BlueprintSearchAliases": ALIASES}}


def main() -> None:
    SUBGRAPHS.mkdir(exist_ok=True)
    with start_server("lay-out") as server, open_canvas(server.address) as page:
        for name in sys.argv[1:] or blueprints():
            workflow = make(page, name, blueprints()[name])
            (SUBGRAPHS / f"{name}.json").write_text(json.dumps(workflow, indent=1) + "\n", encoding="utf-8")
            sys.stdout.write(f"{name}\n")


if __name__ == "__main__":
    main()
