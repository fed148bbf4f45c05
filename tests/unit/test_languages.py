"""The Chinese README has the headings, commands, links, tables and code names of the English one, in its order."""

import json
import re

import pytest
from setup import ROOT

ENGLISH, CHINESE = ((ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "README.zh.md"))


def headings(text):
    return [line.split()[0] for line in prose(text).splitlines() if line.startswith("#")]


def blocks(text):
    return re.findall(r"^```.*?^```", text, re.M | re.S)


def prose(text):
    return re.sub(r"^```.*?^```", "", text, flags=re.M | re.S)


def links(text):
    """Where its links lead, but for those from one language to the other and within the page."""
    matches = re.findall(r"\]\(([^)]+)\)", text)
    return [link for link in matches if not link.startswith("#") and not link.startswith("README")]


def rows(text):
    """Columns of each line of each table."""
    return [line.replace("\\|", "").count("|") for line in text.splitlines() if line.startswith("|")]


def code(text):
    return sorted(re.findall(r"`([^`\n]+)`", prose(text)))


@pytest.mark.parametrize("part", [headings, blocks, links, rows, code], ids=lambda part: part.__name__)
def test_both_readmes_have_the_same(part):
    assert part(CHINESE) == part(ENGLISH) and len(part(ENGLISH)) > 3


def test_each_leads_to_the_other_and_to_headings_that_it_has():
    assert "](README.zh.md)" in ENGLISH and "](README.md)" in CHINESE
    for text in (ENGLISH, CHINESE):
        titles = [line.lstrip("# ").lower().replace(" ", "-") for line in text.splitlines() if line.startswith("#")]
        assert {link for link in re.findall(r"\]\(#([^)]+)\)", text)} <= set(titles)


@pytest.mark.parametrize("page", [ENGLISH, CHINESE], ids=["English", "Chinese"])
def test_a_readme_names_templates_as_the_template_browser_shows_them(page):
    # The template browser and the node library show the names of the files, in every language.
    named = set(re.findall(r"\*(SANA [^*]+)\*", page))
    assert len(named) > 8
    assert named <= {path.stem for folder in ("workflows", "subgraphs") for path in ROOT.glob(f"{folder}/*.json")}


NODES = {
    name: path.name
    for path in (ROOT / "nodes").glob("*.py")
    for name in re.findall(r'node_id="(\w+)"', path.read_text(encoding="utf-8"))
}


@pytest.mark.parametrize("name", sorted(NODES))
def test_every_node_has_chinese_texts_and_help_pages(name):
    """From the nodes' own code, so that a new node is missed."""
    texts = json.loads((ROOT / "locales/zh/nodeDefs.json").read_text(encoding="utf-8"))[name]
    assert texts["display_name"] and texts["description"]
    inputs = json.loads((ROOT / "tests/graphs/interface.json").read_text(encoding="utf-8"))[name]["inputs"]
    assert inputs.keys() <= texts.get("inputs", {}).keys()
    for page in (f"{name}.md", f"{name}/zh.md"):
        assert (ROOT / "web/docs" / page).read_text(encoding="utf-8").startswith("# ")


def test_every_page_and_every_text_is_of_a_node():
    assert len(NODES) > 20
    assert {path.stem for path in (ROOT / "web/docs").iterdir()} == NODES.keys()
    texts = json.loads((ROOT / "locales/zh/nodeDefs.json").read_text(encoding="utf-8"))
    assert {name for name in texts if name.startswith("SanaNodes")} == NODES.keys()
