"""The templates are what this server's nodes take."""

import json
import re

import pytest
from host import get
from setup import ROOT

WORKFLOWS = sorted(ROOT.glob("workflows/*.json"))
NOTES = {"MarkdownNote", "Note"}  # the frontend's own


@pytest.fixture(scope="module")
def object_info(server):
    return json.loads(get(server, "/object_info"))


def is_widget(kind, options):
    return isinstance(kind, list) or kind in ("COMBO", "INT", "FLOAT", "STRING", "BOOLEAN")


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_every_node_exists_and_its_widgets_fit(object_info, path):
    workflow = json.loads(path.read_text(encoding="utf-8"))
    for node in workflow["nodes"]:
        if node["type"] in NOTES:
            continue
        info = object_info[node["type"]]
        inputs = {**info["input"]["required"], **info["input"].get("optional", {})}
        assert [each["name"] for each in node["inputs"]] == list(inputs)
        widgets = {name: kind for name, (kind, *rest) in inputs.items() if is_widget(kind, rest)}
        extra = [
            options
            for kind, *rest in inputs.values()
            for options in rest
            if options.get("control_after_generate") or options.get("image_upload")
        ]
        assert len(node["widgets_values"]) == len(widgets) + len(extra), node["type"]
        if node["type"].startswith("Sana"):
            assert [each["name"] for each in node["outputs"]] == info["output_name"]


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
