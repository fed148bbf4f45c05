"""The server offers each file of subgraphs/ to the canvas, with existing nodes and complete links."""

import json

import pytest
from host import get
from setup import ROOT

BLUEPRINTS = sorted((ROOT / "subgraphs").glob("*.json"))


@pytest.fixture(scope="module")
def offered(server):
    """{name: content} of the pack's blueprints, as the server hands them out."""
    listed = json.loads(get(server, "/global_subgraphs"))
    ours = {key: entry["name"] for key, entry in listed.items() if entry["info"]["node_pack"] == "custom_nodes.sana"}
    return {name: json.loads(json.loads(get(server, f"/global_subgraphs/{key}"))["data"]) for key, name in ours.items()}


def test_every_blueprint_is_offered_as_it_is(offered):
    assert offered == {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in BLUEPRINTS}
    names = {
        "SANA text to image",
        "SANA second pass",
        "SANA any image",
        "SANA batch",
        "SANA best of many",
        "SANA video",
        "SANA change by a sentence",
    }
    assert names == offered.keys()


@pytest.mark.parametrize("name", [path.stem for path in BLUEPRINTS])
def test_a_blueprint_has_nodes_of_this_server_and_whole_links(server, offered, name):
    known_nodes, (subgraph,), (node,) = (
        json.loads(get(server, "/object_info")),
        offered[name]["definitions"]["subgraphs"],
        offered[name]["nodes"],
    )
    assert node["type"] == subgraph["id"] and subgraph["name"] == node["title"] == name
    nodes = {inner["id"]: inner for inner in subgraph["nodes"]}
    for inner in nodes.values():
        about = known_nodes[inner["type"]]["input"]
        assert {item["name"] for item in inner["inputs"]} <= {**about["required"], **about.get("optional", {})}.keys()
    for link in subgraph["links"]:
        source = nodes[link["origin_id"]]["outputs"] if link["origin_id"] > 0 else subgraph["inputs"]
        target = nodes[link["target_id"]]["inputs"] if link["target_id"] > 0 else subgraph["outputs"]
        assert link["id"] in (source[link["origin_slot"]].get("links") or source[link["origin_slot"]]["linkIds"])
        end = target[link["target_slot"]]
        assert link["id"] in end.get("linkIds", [end.get("link")])
    for side in ("inputs", "outputs"):
        assert [item["name"] for item in node[side]] == [item["name"] for item in subgraph[side]]
        assert all(item["linkIds"] for item in subgraph[side])
