"""What the documents point to is there."""

import re

import pytest
from setup import ROOT

DOCUMENTS = sorted(path for path in [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")])
TESTS = {
    name
    for path in ROOT.glob("tests/*/test_*.py")
    for name in [path.name, *re.findall(r"^(?:async )?def (test_\w+)", path.read_text(), re.M)]
}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_each_test_that_is_named_exists(document):
    named = re.findall(r"`(?:tests/)?(?:\w+/)?(test_\w+(?:\.py)?)`", document.read_text(encoding="utf-8"))
    assert not [name for name in named if name not in TESTS]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_each_file_that_is_named_exists(document):
    text = document.read_text(encoding="utf-8")
    links = [link.partition("#")[0] for link in re.findall(r"\]\(([^)\s]+)\)", text) if "://" not in link]
    files = re.findall(r"`((?:docs|tests|benchmarks|scripts|sana_core|nodes|demo)/[\w./-]+\.\w+)`", text)
    places = [(document.parent, link) for link in links if link] + [(ROOT, file) for file in files]
    assert not [name for folder, name in places if not (folder / name).exists()]
