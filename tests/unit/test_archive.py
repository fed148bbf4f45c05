"""The archive of `comfy node pack`: the tracked files without the files of .comfyignore, and nothing banned."""

import ast
import io
import re
import subprocess
import zipfile

import pytest
from setup import ROOT

TOP = {
    ".comfyignore",
    ".gitignore",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "LICENSE",
    "README.md",
    "README.zh.md",
    "SECURITY.md",
    "__init__.py",
    "benchmarks",
    "demo",
    "docs",
    "locales",
    "nodes",
    "pyproject.toml",
    "recipes",
    "requirements.txt",
    "sana_core",
    "subgraphs",
    "web",
    "workflows",
}
# Largest size of the zip, and of its files without the demo model, in bytes.
LARGEST, LARGEST_BESIDE_MODELS = 32_000_000, 5_000_000
# The repository's page of issues, beside its files. Its address is not known before it is published.
ISSUES = "../../issues"
# A link to a file, without its heading.
LINK = re.compile(r"\]\((?![a-z]+:|#)([^)\s#]+)")
# The registry's scanner marks these strings anywhere in a file.
MARKED = re.compile(
    rb"\b(exec|eval)\(|os\.system|subprocess\.|os\.environ|aiohttp\.ClientSession|\.sendall\(|pickle\.(loads?|dumps?)\("
)


def listed(*options):
    command = ["git", "ls-files", "-z", "--cached", *options]
    return set(subprocess.run(command, cwd=ROOT, capture_output=True, check=True).stdout.decode().split("\0")) - {""}


@pytest.fixture(scope="module")
def archive():
    """Paths of the archive's files; .comfyignore is written like .gitignore."""
    return sorted(listed() - listed("--ignored", "--exclude-from=.comfyignore"))


def test_the_archive_holds_what_users_need_and_no_more(archive):
    assert {name.split("/")[0] for name in archive} <= TOP
    bundled = {
        "demo/sana-posters/model_index.json",
        "demo/sana-posters-edges/config.json",
        "recipes/cyanotypes/000000.png",
    }
    assert {"__init__.py", "requirements.txt", "demo/sana-posters-cyanotype.safetensors", *bundled} <= set(archive)
    assert {f"subgraphs/{path.name}" for path in ROOT.glob("subgraphs/*.json")} <= set(archive)
    assert {f"workflows/{path.name}" for path in ROOT.glob("workflows/*")} <= set(archive)
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archived:
        for name in archive:
            archived.write(ROOT / name, name)
        beside = sum(item.file_size for item in archived.infolist() if not item.filename.startswith("demo/"))
    assert len(packed.getvalue()) < LARGEST
    assert beside < LARGEST_BESIDE_MODELS


def test_each_relative_link_of_the_unpacked_archive_resolves(archive, tmp_path):
    for name in archive:
        target = tmp_path / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.symlink_to(ROOT / name)
    pages = [tmp_path / name for name in archive if name.endswith(".md")]
    links = [(page, link) for page in pages for link in LINK.findall(page.read_text(encoding="utf-8"))]
    assert {"examples/queue_prompts.py", "CONTRIBUTING.md", "../benchmarks/decode.json"} <= {link for _, link in links}
    broken = [(page.name, link) for page, link in links if link != ISSUES and not (page.parent / link).exists()]
    assert not broken


def test_no_configuration_says_which_folder_it_came_from(archive):
    configs = [ROOT / name for name in archive if name.endswith("config.json")]
    assert configs and not [path for path in configs if "_name_or_path" in path.read_text(encoding="utf-8")]


def test_nothing_in_the_archive_is_marked_by_the_scanner(archive):
    texts = [name for name in archive if name.endswith((".py", ".js", ".json", ".toml"))]
    assert not [name for name in texts if MARKED.search((ROOT / name).read_bytes())]
    modules = [name for name in archive if name.endswith(".py")]
    assert {name.split("/")[0] for name in modules} <= {"__init__.py", "docs", "nodes", "sana_core"}
    for name in modules:
        ast.parse((ROOT / name).read_text(encoding="ascii"))
