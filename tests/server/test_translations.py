"""The Chinese texts follow the present English texts."""

import json

import pytest
from host import get
from setup import ROOT
from translations import english_texts, stale_translations


@pytest.fixture(scope="module")
def object_info(server):
    return json.loads(get(server, "/object_info"))


def test_no_translation_is_older_than_its_english_text(object_info):
    # Translate the texts at these places, and run `python scripts/translations.py --reviewed`.
    assert stale_translations(object_info) == []


def test_a_changed_english_text_is_stale(object_info):
    object_info = json.loads(json.dumps(object_info))
    object_info["SanaNodesLoader"]["description"] += " More."
    assert stale_translations(object_info) == ["SanaNodesLoader description"]


def test_every_english_text_of_a_node_has_a_chinese_one(object_info):
    chinese = json.loads((ROOT / "locales/zh/nodeDefs.json").read_text(encoding="utf-8"))
    for place in english_texts(object_info):
        if place.startswith("SanaNodes"):
            node, *path = place.split()
            text = chinese[node]
            for key in path:
                text = text[key]
            text = text if isinstance(text, str) else text["tooltip"]
            assert text.strip(), place
