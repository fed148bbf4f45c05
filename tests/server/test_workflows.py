"""The nodes, links, groups and values of templates and blueprints."""

import json
import re

import pytest
from host import get
from parts import VIDEO_2
from setup import ROOT

from sana_core.checkpoints.generation import DOWNLOADS

WORKFLOWS = sorted(ROOT.glob("workflows/*.json"))
BLUEPRINTS = sorted(ROOT.glob("subgraphs/*.json"))
FILES = pytest.mark.parametrize("path", [*WORKFLOWS, *BLUEPRINTS], ids=lambda path: path.stem)


@pytest.fixture(scope="module")
def object_info(server):
    return json.loads(get(server, "/object_info"))


def graphs_of(path):
    """The graph of a file, and the subgraphs in it."""
    workflow = json.loads(path.read_text(encoding="utf-8"))
    return [workflow, *workflow.get("definitions", {}).get("subgraphs", [])]


def nodes_of(path):
    return [node for graph in graphs_of(path) for node in graph["nodes"]]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_model_links_say_where_the_widgets_files_are(path):
    for node in nodes_of(path):
        for model in node["properties"].get("models", []):
            assert set(model) == {"name", "url", "directory"}
            assert model["name"] in node["widgets_values"]
            assert re.fullmatch(
                r"https://huggingface.co/[\w.-]+/[\w.-]+/resolve/main/[\w./-]+\.safetensors", model["url"]
            )


# The demo model learns no useful ControlNet in minutes. The others are options that docs/reference.md describes.
WITHOUT_TEMPLATE = {
    "SanaNodesTrainControlNet",
    "SanaNodesTrainSettings",
    "SanaNodesPAG",
    "SanaNodesGuidanceInterval",
    "SanaNodesScheduler",
    "SanaNodesSamplerSelect",
}


def test_every_other_node_of_the_pack_is_in_a_template_or_a_blueprint(object_info):
    used = {node["type"] for path in (*WORKFLOWS, *BLUEPRINTS) for node in nodes_of(path)}
    assert {name for name in object_info if name.startswith("Sana")} - used <= WITHOUT_TEMPLATE
    assert not used & WITHOUT_TEMPLATE


@FILES
def test_no_two_nodes_have_an_id(path):
    ids = [node["id"] for node in nodes_of(path)]
    assert len(ids) == len(set(ids))
    known_names = [item["id"] for item in graphs_of(path)]
    assert len(known_names) == len(set(known_names))


@FILES
def test_no_two_groups_have_an_id(path):
    ids = [group["id"] for graph in graphs_of(path) for group in graph["groups"]]
    assert len(ids) == len(set(ids))


@FILES
def test_what_a_subgraph_shows_is_what_its_nodes_have(path):
    _, *subgraphs = graphs_of(path)
    hosts = {node["type"]: node for node in nodes_of(path)}
    for subgraph in subgraphs:
        nodes = {node["id"]: node for node in subgraph["nodes"]}
        shown = iter(hosts[subgraph["id"]]["widgets_values"])
        for entry, held in zip(hosts[subgraph["id"]]["inputs"], subgraph["inputs"], strict=True):
            value = next(shown) if "widget" in entry else None
            for link in [link for link in subgraph["links"] if link["id"] in held["linkIds"]]:
                inner = nodes[link["target_id"]]
                assert inner["inputs"][link["target_slot"]]["link"] == link["id"]
                assert ("widget" in inner["inputs"][link["target_slot"]]) == ("widget" in entry)
                if "widget" in entry:
                    assert value in inner["widgets_values"], (entry["name"], inner["type"])


@FILES
def test_what_a_node_is_set_to_is_among_its_options(object_info, path):
    for node in nodes_of(path):
        about = object_info.get(node["type"])
        values = iter(node["widgets_values"] if about else ())
        fields = {**about["input"].get("required", {}), **about["input"].get("optional", {})} if about else {}
        for name in [entry["name"] for entry in node["inputs"] if about and "widget" in entry]:
            value, (kind, *remaining) = next(values), fields.get(name, ("",))
            options = kind if isinstance(kind, list) else (remaining[0] if remaining else {}).get("options", [])
            if options and kind != "COMFY_DYNAMICCOMBO_V3":
                # The user puts the folder of SANA-Video 2.0 together from several downloads.
                assert value in options or value in DOWNLOADS or value == VIDEO_2, (node["type"], name)
            if remaining and remaining[0].get("control_after_generate"):
                assert next(values) in ("fixed", "randomize")


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_links_lead_to_the_right_or_down_in_a_column(path):
    undivided, *subgraphs = graphs_of(path)
    links = {id(graph): graph["links"] for graph in subgraphs}
    links[id(undivided)] = [{"origin_id": link[1], "target_id": link[3]} for link in undivided["links"]]
    for graph in (undivided, *subgraphs):
        nodes = {node["id"]: node for node in graph["nodes"]}
        for link in links[id(graph)]:
            if link["origin_id"] > 0 and link["target_id"] > 0:
                source, target = nodes[link["origin_id"]], nodes[link["target_id"]]
                right = source["pos"][0] + source["size"][0] < target["pos"][0]
                down = source["pos"][0] == target["pos"][0] and source["pos"][1] < target["pos"][1]
                assert right or down, (source["type"], target["type"])
