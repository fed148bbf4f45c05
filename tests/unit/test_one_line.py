"""Text from outside in errors and logs: one line of bounded length that every log can write."""

import io
import logging
import pickle
import sys

import pytest

from sana_core import InputError, errors
from sana_core.runtime.text import get_logger

CLASSES = [kind for kind in vars(errors).values() if isinstance(kind, type)]
TEXTS = {
    "a name in Latin-1": ("mod\udce8le.pth", "mod\\udce8le.pth"),
    "line breaks": ("a\nb\r\x85c\u2028d", "a\\nb\\r\\x85c\\u2028d"),
    "an escape sequence of terminals": ("\x1b[31mred", "\\x1b[31mred"),
    "right to left": ("\u202egnp.exe", "\\u202egnp.exe"),
    "names that people use": ("mod\u00e8le \u6a21\u578b.pth", "mod\u00e8le \u6a21\u578b.pth"),
}


@pytest.mark.parametrize("kind", CLASSES)
@pytest.mark.parametrize("text, expected", TEXTS.values(), ids=TEXTS)
def test_an_error_is_one_line_that_can_be_written(kind, text, expected):
    error = kind(f"model: no file {text}; choose another")
    assert str(error) == f"model: no file {expected}; choose another"
    assert str(pickle.loads(pickle.dumps(error))) == str(error)


@pytest.mark.parametrize("encoding", ["cp1252", "ascii", "cp932"])
def test_an_error_can_be_written_by_a_log_of_another_encoding(encoding, monkeypatch):
    monkeypatch.setattr(sys, "stderr", io.TextIOWrapper(io.BytesIO(), encoding=encoding))
    str(InputError("model: no file mod\u00e8le \u6a21\u578b \U0001f600.pth; choose another")).encode(encoding)


def test_a_long_error_keeps_its_beginning_and_its_remedy():
    text = str(InputError(f"model: got {'x' * 10**7}; choose another"))
    assert text.startswith("model: got xxx") and text.endswith("xxx; choose another") and len(text) <= 2000


@pytest.mark.parametrize("text, expected", TEXTS.values(), ids=TEXTS)
def test_a_line_of_the_log_can_be_written(text, expected, caplog):
    logger = get_logger("sana_core.test")
    with caplog.at_level(logging.INFO):
        logger.warning("the file %s of %d", text, 2)
        logger.info(f"100% of {text}")
    assert caplog.messages == [f"the file {expected} of 2", f"100% of {expected}"]
