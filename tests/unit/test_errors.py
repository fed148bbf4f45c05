"""Every error that a user can meet has a class, a form, and a line in docs/errors.md."""

import ast
import re

import pytest
from list_errors import PAGE, SOURCES, messages, written
from setup import ROOT

import sana_core
from sana_core import errors

FAMILY = {name: kind for name, kind in vars(errors).items() if isinstance(kind, type)}
BARE = {"ValueError", "TypeError", "OSError", "FileNotFoundError", "FileExistsError", "ConnectionError", "RuntimeError"}
# Functions whose exceptions are caught in the same file and never reach the user.
CAUGHT = {"protobuf_fields", "read_small", "unique", "varint"}
# checkpoints/lora.py turns them into reasons why a layer does not fit.
CAUGHT |= {"read_adapters", "adapters_of", "adapted", "fitted", "product_of"}
# checkpoints/pickled.py
CAUGHT |= {"evaluate", "open_archive"}
# training/states.py turns them into errors of the state.
CAUGHT |= {"convert", "read_shards", "restore_optimizer"}
MESSAGES = [pytest.param(text, id=f"{path.stem}:{line}") for path in SOURCES for line, text in sorted(messages(path))]


@pytest.mark.parametrize("name", FAMILY)
def test_each_class_is_also_the_built_in_kind_that_it_was(name):
    kind = FAMILY[name]
    assert issubclass(kind, errors.SanaError) and getattr(sana_core, name) is kind and name in sana_core.__all__
    assert str(kind("file: got a, expected b; do c")) == "file: got a, expected b; do c"
    if kind is not errors.SanaError:
        assert issubclass(kind, ValueError | OSError | RuntimeError)
    assert not [member for member in vars(kind) if not member.startswith("__")]


@pytest.mark.parametrize("message", MESSAGES)
def test_a_message_names_what_is_wrong_and_what_to_do(message):
    assert re.match(r"(\.\.\.[/a-z]*|[A-Za-z0-9_-]+)[ .]*: ", message), message
    # The expected value is a remedy too.
    assert re.search(r"; \S|\bexpected \S", message), message
    assert message.isascii() and "\n" not in message and len(message.replace("...", "x" * 20)) < 300
    assert not re.search(r"[^.]\.$", message)


def test_the_page_has_each_message_of_the_code_and_no_other():
    """`python scripts/list_errors.py` brings it up to date."""
    page = PAGE.read_text(encoding="utf-8")
    assert len(MESSAGES) > 300 and written(page) == page


@pytest.mark.parametrize("name", FAMILY)
def test_the_python_page_names_each_class(name):
    assert f"`{name}`" in (ROOT / "docs" / "python.md").read_text(encoding="utf-8")


def test_no_file_has_bare_errors():
    bare = [
        (path.relative_to(ROOT).as_posix(), node.lineno)
        for path in SOURCES
        for function in ast.walk(ast.parse(path.read_text()))
        if isinstance(function, ast.FunctionDef) and function.name not in CAUGHT
        for node in ast.walk(function)
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and getattr(node.exc.func, "id", "") in BARE
    ]
    assert not bare
