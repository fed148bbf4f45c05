"""What a user reads on the canvas avoids the words that developer/development.md lists, and a help page is short."""

import ast
import json
import re

import pytest
from setup import ROOT

(SECTION,) = re.findall(
    r"^## Words$(.*?)(?=^## |\Z)", (ROOT / "docs/developer/development.md").read_text(encoding="utf-8"), re.M | re.S
)
LISTED = [
    word for row in re.findall(r"^\| ([a-z][^|]*) \|", SECTION, re.M) for word in row.split(", ") if word != "not"
]
AVOIDED = re.compile(rf"\b(?:{'|'.join(LISTED)})s?\b", re.I)
PAGES = {path.stem: path.read_text(encoding="utf-8") for path in sorted(ROOT.glob("web/docs/*.md"))}
INTERFACE = json.loads((ROOT / "tests/graphs/interface.json").read_text())
SOCKETS = {"MODEL", "CLIP", "VAE", "CONDITIONING", "LATENT", "SANA_DATASET", "SANA_TRAIN_SETTINGS", "SANA_SCORER"}


def shown(path):
    """Yield the texts that the nodes of a file show: names, tooltips, descriptions."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ClassDef):
            yield ast.get_docstring(node) or ""
        if (
            isinstance(node, ast.keyword)
            and node.arg in ("display_name", "tooltip")
            and isinstance(node.value, ast.Constant)
        ):
            yield node.value.value


def notes():
    """The notes of templates, without the lines that name them."""
    text = (ROOT / "scripts/notes.md").read_text(encoding="utf-8")
    return re.sub(r"^# .*$", "", text, flags=re.M)


TEXTS = {
    **PAGES,
    **{path.name: "\n".join(shown(path)) for path in sorted(ROOT.glob("nodes/*.py"))},
    "notes.md": notes(),
}


def test_the_list_is_read():
    assert len(LISTED) > 12 and AVOIDED.search("Two pictures were drawn anew")
    assert sum(map(len, TEXTS.values())) > 30_000


@pytest.mark.parametrize("name", TEXTS)
def test_the_words_to_avoid_are_avoided(name):
    assert not [match[0] for match in AVOIDED.finditer(TEXTS[name])]


@pytest.mark.parametrize("node", PAGES)
def test_a_help_page_is_short_and_names_its_inputs_in_their_order(node):
    page = PAGES[node]
    assert page.startswith("# SANA ") and len(page.splitlines()) <= 40
    inputs = INTERFACE[node]["inputs"]
    # the canvas has sockets above widgets
    order = sorted(inputs, key=lambda name: inputs[name] not in SOCKETS)
    named = [
        name for bold in re.findall(r"^\*\*(.+?)\.\*\*", page, re.M) for name in bold.split(", ") if name in inputs
    ]
    assert named and named == [name for name in order if name in named]
