"""Every error that a user can meet has a class, a form, and a line in docs/troubleshooting.md."""

import ast
import re

import pytest
from setup import ROOT

import sana_core
from sana_core import errors
from sana_core.checkpoints import detect, files, pickled

FAMILY = {name: kind for name, kind in vars(errors).items() if isinstance(kind, type)}
SOURCES = sorted([*ROOT.glob("sana_core/**/*.py"), *ROOT.glob("nodes/**/*.py")])
BARE = {"ValueError", "TypeError", "OSError", "FileNotFoundError", "FileExistsError", "ConnectionError", "RuntimeError"}
# where an exception never reaches the user: what raises is caught in the same file
CAUGHT = {"unique", "load_quantised"}
GUIDE = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
REMEDIES = {
    "REDOWNLOAD": files.REDOWNLOAD,
    "INCOMPLETE": files.INCOMPLETE,
    "INSTEAD": pickled.INSTEAD,
    "WHERE": detect.WHERE["lora"],
    "REMEDY": "choose another",  # of nodes, which no test without the host can import
}
FILLED = "\0"  # stands for what a message fills in


def raises(path):
    """Yield (function, line, class's name, message) of what the file raises, with FILLED for what is filled in."""
    tree = ast.parse(path.read_text())
    for function in [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]:
        for node in ast.walk(function):
            call = node.exc if isinstance(node, ast.Raise) else node.value if isinstance(node, ast.Return) else None
            if isinstance(call, ast.Call) and isinstance(call.func, ast.Name):
                yield function.name, node.lineno, call.func.id, text_of(call.args[0]) if call.args else ""


def text_of(node):
    if isinstance(node, ast.Constant):
        return str(node.value)
    return "".join(map(part_of, node.values)) if isinstance(node, ast.JoinedStr) else ""


def part_of(node):
    """The text of one part of an f-string; of constants only the remedies count as fixed."""
    if isinstance(node, ast.Constant):
        return node.value
    name = node.value.value if isinstance(node.value, ast.Subscript) else node.value
    return REMEDIES.get(name.id, FILLED) if isinstance(name, ast.Name) else FILLED


@pytest.mark.parametrize("name", FAMILY)
def test_each_class_is_also_the_built_in_kind_that_it_was(name):
    kind = FAMILY[name]
    assert issubclass(kind, errors.SanaError) and getattr(sana_core, name) is kind and name in sana_core.__all__
    assert str(kind("file: got a, expected b; do c")) == "file: got a, expected b; do c"
    if kind is not errors.SanaError:
        assert issubclass(kind, ValueError | OSError | RuntimeError)
    assert not [member for member in vars(kind) if not member.startswith("__")]


def messages():
    found = {(path, line, text) for path in SOURCES for function, line, kind, text in raises(path) if kind in FAMILY}
    assert len(found) > 130
    # one that is passed on has its form already
    found = [entry for entry in sorted(found) if not re.fullmatch(rf"[a-z ]+{FILLED}: {FILLED}", entry[2])]
    return [pytest.param(text, id=f"{path.stem}:{line}") for path, line, text in found]


@pytest.mark.parametrize("message", messages())
def test_a_message_names_what_is_wrong_and_what_to_do(message):
    assert re.match(rf"({FILLED}|[A-Za-z_-]+): ", message), message
    problem, _, remedy = message.rpartition("; ")
    # what was expected is a remedy too
    assert (problem and remedy.strip(FILLED + " ")) or re.search(r"\bexpected \S", message), message
    assert message.isascii() and "\n" not in message and len(message.replace(FILLED, "x" * 20)) < 300
    assert not message.endswith(".")


@pytest.mark.parametrize("message", messages())
def test_the_guide_has_a_line_for_it(message):
    """The longest run of fixed words between the name and the remedy stands in the guide, between backticks."""
    problem = (message.rpartition("; ")[0] or message).partition(": ")[2]
    words = max((part.strip(" ,:()'") for part in re.split(rf"{FILLED}|;", problem)), key=len)
    quoted = " ".join(re.findall(r"`([^`]+)`", GUIDE))
    assert words in quoted, words


def test_the_guide_explains_no_message_that_is_none():
    """Some text of the code has all the longer words of each, but for the names that "expected one of" lists."""
    nodes = [node for path in SOURCES for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))]
    texts = [longer_words(ast.unparse(node)) for node in nodes if isinstance(node, ast.Constant | ast.JoinedStr)]
    rows = [line.split(" | ")[0] for line in GUIDE.splitlines() if line.startswith("| `")]
    quoted = [message for row in rows for message in re.findall(r"`\S*: ([^`]+)`", row)]
    assert len(quoted) > 250
    assert not [
        message
        for message in quoted
        if not any(longer_words(message.partition("expected one of")[0]) <= words for words in texts)
    ]


def longer_words(text):
    for name, remedy in REMEDIES.items():
        text = text.replace(name, remedy)
    return set(re.findall(r"\b[a-z]{4,}\b", text))


@pytest.mark.parametrize("name", FAMILY)
def test_the_guide_names_each_class(name):
    assert f"`{name}`" in GUIDE


def test_no_file_has_bare_errors():
    bare = [
        (path.relative_to(ROOT).as_posix(), line)
        for path in SOURCES
        for function, line, kind, _ in raises(path)
        if kind in BARE and function not in CAUGHT
    ]
    assert not bare
