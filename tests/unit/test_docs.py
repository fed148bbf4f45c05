"""What the documents point to is there."""

import argparse
import json
import re
import shlex
import subprocess
import sys

import pytest
from setup import ROOT
from tables import replace, tables
from ways import BOUND, NEAR

from benchmarks.ways import DOCUMENT, TABLE, table
from sana_core.__main__ import COMMANDS

DOCUMENTS = sorted(path for path in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
TESTS = {
    name
    for path in ROOT.glob("tests/*/test_*.py")
    for name in [path.name, *re.findall(r"^(?:async )?def (test_\w+)", path.read_text(), re.M)]
}


ISSUES = "../../issues"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_each_test_that_is_named_exists(document):
    named = re.findall(r"`(?:tests/)?(?:\w+/)?(test_\w+(?:\.py)?)`", document.read_text(encoding="utf-8"))
    assert not [name for name in named if name not in TESTS]


def test_the_table_of_the_ways_is_that_of_the_figures():
    report = json.loads((ROOT / "benchmarks" / "ways.json").read_text())
    assert TABLE.findall(DOCUMENT.read_text(encoding="utf-8")) == [table(report)]
    # The document promises this bound.
    assert not [row for row in report["largest_difference"] if row["difference"] > (BOUND if row["way"] in NEAR else 0)]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_each_file_that_is_named_exists(document):
    text = document.read_text(encoding="utf-8")
    links = [link.partition("#")[0] for link in re.findall(r"\]\(([^)\s]+)\)", text) if "://" not in link]
    # The repository's page of issues, beside its files.
    links = [link for link in links if link != ISSUES]
    files = re.findall(r"`((?:docs|tests|benchmarks|scripts|sana_core|nodes|demo)/[\w./-]+\.\w+)`", text)
    places = [(document.parent, link) for link in links if link] + [(ROOT, file) for file in files]
    assert not [name for folder, name in places if not (folder / name).exists()]


# Texts for users: pages, help pages, and the texts of nodes and errors.
PAGES = [*DOCUMENTS, *sorted(ROOT.glob("web/docs/*.md"))]
CODE = sorted([*ROOT.glob("nodes/**/*.py"), *ROOT.glob("sana_core/**/*.py")])
NODES = set(re.findall(r'display_name="(SANA [^"]+)"', "".join(path.read_text() for path in CODE)))
TEMPLATES = {path.stem for folder in ("workflows", "subgraphs") for path in ROOT.glob(f"{folder}/*.json")}


@pytest.mark.parametrize("page", [*PAGES, *CODE], ids=lambda path: str(path.relative_to(ROOT)))
def test_each_node_and_template_that_is_named_exists(page):
    named = re.findall(r"\bSANA(?: [A-Z][A-Za-z]+)+", page.read_text(encoding="utf-8"))
    known_names = NODES | TEMPLATES

    def exists(name):
        words = name.split()
        full_name = any(" ".join(words[:end]) in known_names for end in range(2, len(words) + 1))
        return full_name or any(one.startswith(f"{name} ") for one in known_names)

    assert not [name for name in named if not exists(name)]


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_each_table_is_one(page):
    """A table without its line of dashes is shown as text."""
    tables = re.findall(r"(?:^\|.*\n?)+", page.read_text(encoding="utf-8"), re.M)
    assert not [table for table in tables if not re.match(r".*\n\|(?:-+\|)+(?:\n|$)", table)]


def test_each_option_of_a_command_that_is_named_exists():
    """In lines of `python -m sana_core COMMAND`, continued or not."""
    unknown, seen = [], 0
    for page in PAGES:
        text = page.read_text(encoding="utf-8").replace("\\\n", " ")
        for command, line in re.findall(r"python -m sana_core ([a-z]+)\b([^`\n]*)", text):
            parser = argparse.ArgumentParser(add_help=False)
            parser.add_argument("--help")
            COMMANDS[command].configure(parser)
            options = re.findall(r"(?<!\S)--[a-z][a-z-]*", line)
            seen += len(options)
            unknown += [
                (page.name, command, option) for option in options if option not in parser._option_string_actions
            ]
    assert not unknown and seen > 20


def test_the_tables_of_models_and_gpus_are_those_of_the_plan():
    """After a change of sana_core/advice.py: `python scripts/tables.py`."""
    assert len(tables()) >= 3
    for (document, name), expected in tables().items():
        text = (ROOT / document).read_text(encoding="utf-8")
        assert replace(text, name, expected) == text, document


def test_the_reference_has_each_node():
    page = (ROOT / "docs" / "reference.md").read_text(encoding="utf-8")
    named = set(re.findall(r"^\| (SANA [A-Za-z ]+?) \|", page, re.M))
    assert len(NODES) > 20 and {node.rstrip() for node in NODES} - named == set()


def test_a_report_needs_the_same_wherever_it_is_asked_for():
    english, chinese, trouble = (
        " ".join((ROOT / page).read_text(encoding="utf-8").split())
        for page in ("README.md", "README.zh.md", "docs/troubleshooting.md")
    )
    assert f"[issue]({ISSUES}) with three things: the report of SANA Doctor, ComfyUI's log, and the workflow" in english
    assert f"[issues]({ISSUES})" in chinese and "SANA 诊断的报告、ComfyUI 的日志和工作流" in chinese
    assert "(../README.md#report-a-bug) with the report of SANA Doctor, ComfyUI's log, and the workflow" in trouble
    assert "## Report a bug" in english


def test_no_page_recommends_the_format_with_the_largest_error():
    """weight_dtype fp8 may only be named to advise against it, beside quantise."""
    errors = json.loads((ROOT / "benchmarks" / "quantised.json").read_text())["errors"]["1.6B wide"]
    forward = {name: figures["forward"] for name, figures in errors.items()}
    assert forward["int8"] < forward["fp8"] < 0.2 * forward["weight_dtype fp8_e4m3fn"]
    pages = [page for page in PAGES if page.parent.name != "developer" and page.name != "errors.md"]
    texts = {page: page.read_text(encoding="utf-8") for page in pages}
    lines = [(page, line) for page, text in texts.items() for line in text.splitlines()]
    advice = [(page.name, line) for page, line in lines if re.search(r"weight_dtype\W+(to |选 |设为 )?fp8", line)]
    assert [line for line in advice if "Avoid" not in line[1]] == []


@pytest.mark.slow
@pytest.mark.parametrize("readme", ["README.md", "README.zh.md"])
def test_each_command_of_a_readme_runs_in_a_fresh_clone(tmp_path, readme):
    """As written, with this Python in place of `python`. `make` only has to have the targets, and pip the file."""
    clone = tmp_path / "sana-nodes"
    quiet = {"check": True, "capture_output": True}
    subprocess.run(["git", "clone", "--depth", "1", ROOT.as_uri(), clone], **quiet)
    blocks = re.findall(r"^```\n(.*?)^```", (clone / readme).read_text(encoding="utf-8"), re.M | re.S)
    commands = [shlex.split(line) for block in blocks for line in block.splitlines() if "\\" not in line]
    ran = []
    for words in commands:
        if words[:3] == ["python", "-m", "sana_core"]:
            subprocess.run([sys.executable, *words[1:]], cwd=clone, **quiet)
        elif words[0] == "make":
            subprocess.run(["make", "--dry-run", *words[1:]], cwd=clone, **quiet)
        elif words[0] == "pip" or words[:3] == ["PYTHON", "-m", "pip"]:
            assert words[-1].startswith("sana-nodes/") and (tmp_path / words[-1]).is_file()
        else:
            assert words[:2] in (["cd", "ComfyUI/custom_nodes"], ["git", "clone"]), words
        ran.append(words[0])
    assert {"python", "make", "pip", "git"} <= set(ran) and ran.count("python") >= 2
    assert len(list((clone / "images").glob("*.png"))) == 6


def test_figures_are_those_of_the_last_runs():
    mutants, kills, soak = (
        json.loads((ROOT / "benchmarks" / f"{name}.json").read_text()) for name in ("mutants", "kills", "soak")
    )
    differ, happened, ratio = mutants["sampled"] - mutants["equivalent"], kills["happened"], soak["ratio"]
    promised = [
        ("development", f"{mutants['killed']} of {differ} ({100 * mutants['score']:.0f} %) were noticed"),
        ("robustness", f"SIGKILL of a batch, {happened['kills']:,} times"),
        ("robustness", f"memory of the process {ratio['rss']:.3f} times its value after"),
    ]
    for page, sentence in promised:
        text = (ROOT / "docs" / "developer" / f"{page}.md").read_text(encoding="utf-8")
        assert sentence in " ".join(text.split()), sentence
