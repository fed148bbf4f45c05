"""Every shipped workflow fits the nodes, and draws what its thumbnail shows if its model is the bundled one."""

import json

import pytest
from expanded import expand
from setup import ROOT
from templates import DOWNLOADED

WORKFLOWS = sorted((ROOT / "workflows").glob("*.json"))
BUNDLED = "sana-posters (bundled)"
SHOWN = {"SaveImage", "PreviewImage", "ImageCompare", "PreviewAny", "LossGraphNode"}
DYNAMIC = "COMFY_DYNAMICCOMBO_V3"
WIDGETS = {"INT", "FLOAT", "STRING", "BOOLEAN", "COMBO", DYNAMIC}


def unfold(fields):
    """`fields` with the inputs that the first choice of each dynamic combo brings, behind it."""
    out = {}
    for name, (kind, *options) in fields.items():
        out[name] = (kind, *options)
        if kind == DYNAMIC:
            chosen = options[0]["options"][0]["inputs"]
            own = {**chosen.get("required", {}), **chosen.get("optional", {})}
            out |= {f"{name}.{key}": value for key, value in own.items()}
    return out


def to_graph(host, workflow):
    """The graph that the canvas queues for `workflow`: its widgets go by their order in the schema."""
    graph = {}
    for key, node, linked in expand(workflow):
        types = host.nodes.NODE_CLASS_MAPPINGS[node["type"]].INPUT_TYPES()
        fields = {**types.get("required", {}), **types.get("optional", {})}
        names = [entry["name"] for entry in node["inputs"]]
        if any(kind == DYNAMIC for kind, *_ in fields.values()):
            fields = unfold(fields)
        # a node may have learnt optional inputs since; the canvas gives them their defaults
        required = {name for name in types.get("required", {}) if fields[name][0] != "IMAGECOMPARE"}
        assert required <= set(names) <= set(fields), node["type"]
        # the canvas writes sockets first, and widgets in the order of the schema
        widgets = [
            name
            for name in names
            if (isinstance(fields[name][0], list | tuple) or fields[name][0] in WIDGETS)
            and not (len(fields[name]) > 1 and fields[name][1].get("forceInput"))
        ]
        assert widgets == [name for name in fields if name in widgets], node["type"]
        values = iter(node["widgets_values"])
        inputs = {}
        for name in names:
            _, *options = fields[name]
            if name in widgets:
                inputs[name] = next(values)
                if options and options[0].get("control_after_generate"):
                    assert next(values) in ("fixed", "randomize")
        assert not list(values), node["type"]
        graph[key] = (node["type"], {**inputs, **linked})
    return graph


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_fits_the_nodes_and_draws(host, path):
    graph = to_graph(host, json.loads(path.read_text(encoding="utf-8")))
    for kind, inputs in graph.values():
        if kind == "SanaNodesModelSwitch":
            inputs["use"] = BUNDLED
        if isinstance(inputs.get("steps"), int):
            inputs["steps"] = min(inputs["steps"], 4)
    if path.stem in DOWNLOADED or not any(kind == "SaveImage" for kind, _ in graph.values()):
        return
    (save,) = (key for key, (kind, _) in graph.items() if kind == "SaveImage")
    image = graph[save][1]["images"]
    drawing = {key: node for key, node in graph.items() if node[0] not in SHOWN}
    picture = host.run({**drawing, "catch": ("Catch", {"value": image, "name": "image"})})["image"]
    assert picture.isfinite().all() and picture.std() > 0.1
