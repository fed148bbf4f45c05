"""Each command checks and resolves what it was asked for once."""

import logging
from collections import Counter

import pytest

from sana_core.__main__ import main
from sana_core.batch import pipeline
from sana_core.checkpoints import detect

SMALL = ["--width", "32", "--height", "32", "--steps", "1"]


@pytest.mark.parametrize("command", ["generate", "batch"])
def test_a_command_inspects_its_checkpoint_and_reports_a_missing_device_once(
    checkpoint, tmp_path, monkeypatch, caplog, command
):
    calls = Counter()

    def counted(module, name):
        real = getattr(module, name)

        def call(*arguments):
            calls[name] += 1
            return real(*arguments)

        monkeypatch.setattr(module, name, call)

    counted(detect, "inspect_path")
    counted(pipeline, "resolve_settings")
    (tmp_path / "prompts.txt").write_text("a cat\n")
    prompts = {"generate": "a cat", "batch": str(tmp_path / "prompts.txt")}[command]
    places = ["--checkpoint", str(checkpoint), "--out", str(tmp_path / "out"), "--devices", "cpu", "cuda:7"]
    with caplog.at_level(logging.WARNING):
        assert main([command, prompts, *places, *SMALL]) == 0
    assert calls == {"inspect_path": 1, "resolve_settings": 1}
    assert caplog.text.count("this machine has no cuda:7") == 1
    assert len(list((tmp_path / "out").glob("*.png"))) == 1
