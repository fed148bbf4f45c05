"""Every shipped workflow fits the nodes, and draws what its thumbnail shows if its model is the bundled one."""

import json

import pytest
from lay_out import api_graph, notes
from setup import ROOT
from templates import SHOWING, templates

WORKFLOWS = sorted((ROOT / "workflows").glob("*.json"))
BUNDLED = "sana-scenes (bundled)"
NOTES = {"Note", "MarkdownNote"}
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
    sources = {link[0]: [str(link[1]), link[2]] for link in workflow["links"]}
    graph = {}
    for node in workflow["nodes"]:
        if node["type"] in NOTES:
            continue
        types = host.nodes.NODE_CLASS_MAPPINGS[node["type"]].INPUT_TYPES()
        fields = {**types.get("required", {}), **types.get("optional", {})}
        # the button of LoadImage is an input on the canvas alone
        names = [entry["name"] for entry in node["inputs"] if entry["name"] != "upload"]
        if any(kind == DYNAMIC for kind, *_ in fields.values()):
            fields = unfold(fields)
        # a node may have learnt optional inputs since; the canvas gives them their defaults
        assert set(types.get("required", {})) <= set(names) <= set(fields), node["type"]
        # the canvas writes sockets first, and widgets in the order of the schema
        widgets = [name for name in names if isinstance(fields[name][0], list | tuple) or fields[name][0] in WIDGETS]
        assert widgets == [name for name in fields if name in widgets], node["type"]
        linked = {entry["name"]: sources[entry["link"]] for entry in node["inputs"] if entry["link"] is not None}
        values = iter(node["widgets_values"])
        inputs = {}
        for name in names:
            kind, *options = fields[name]
            if isinstance(kind, list | tuple) or kind in WIDGETS:
                inputs[name] = next(values)
                if options and options[0].get("control_after_generate"):
                    assert next(values) in ("fixed", "randomize")
                if options and options[0].get("image_upload"):
                    assert next(values) == "image"
        assert not list(values), node["type"]
        graph[str(node["id"])] = (node["type"], {**inputs, **linked})
    return graph


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_is_its_template(host, path):
    template, workflow = templates()[path.stem], json.loads(path.read_text(encoding="utf-8"))
    sent, ids = api_graph(template)
    graph = to_graph(host, workflow)
    assert list(graph) == list(sent)
    for key, node in sent.items():
        kind, inputs = graph[key]
        assert (kind, {**inputs, **node["inputs"]}) == (node["class_type"], inputs)
    texts = [node["widgets_values"][0] for node in workflow["nodes"] if node["type"] == "MarkdownNote"]
    assert texts == [text for _, text in notes(template)]
    shown = {node["id"] for node in workflow["nodes"] if node["type"] in SHOWING}
    assert set(workflow["extra"]["linearData"]["outputs"]) == shown
    assert [tuple(each) for each in workflow["extra"]["linearData"]["inputs"]] == [
        (ids[name], widget) for name, widget in template.app
    ]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_fits_the_nodes_and_draws(host, path):
    graph = to_graph(host, json.loads(path.read_text()))
    loaders = [inputs["model"] for kind, inputs in graph.values() if kind == "SanaNodesLoader"]
    if loaders == [BUNDLED] and not any(kind == "LoadImage" for kind, _ in graph.values()):
        (save, *_) = (key for key, (kind, _) in graph.items() if kind in ("SaveImage", "PreviewImage"))
        image = graph.pop(save)[1]["images"]
        picture = host.run({**graph, "catch": ("Catch", {"value": image, "name": "image"})})["image"]
        assert picture.isfinite().all() and picture.std() > 0.1
