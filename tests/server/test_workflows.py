"""The templates show every node, and link what they load."""

import json
import re

import pytest
from host import get
from setup import ROOT

WORKFLOWS = sorted(ROOT.glob("workflows/*.json"))


@pytest.fixture(scope="module")
def object_info(server):
    return json.loads(get(server, "/object_info"))


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_model_links_say_where_the_widgets_files_are(path):
    for node in json.loads(path.read_text(encoding="utf-8"))["nodes"]:
        for model in node["properties"].get("models", []):
            assert set(model) == {"name", "url", "directory"}
            assert model["name"] in node["widgets_values"]
            assert re.fullmatch(
                r"https://huggingface.co/[\w.-]+/[\w.-]+/resolve/main/[\w./-]+\.safetensors", model["url"]
            )


def test_every_node_of_the_pack_is_in_a_template(object_info):
    used = {node["type"] for path in WORKFLOWS for node in json.loads(path.read_text(encoding="utf-8"))["nodes"]}
    assert {name for name in object_info if name.startswith("Sana")} <= used
