"""Each command inspects its checkpoint and resolves its settings once."""

import logging
from collections import Counter

import pytest

import sana_core
from sana_core.__main__ import main
from sana_core.batch import pipeline
from sana_core.batch.pipeline import SamplingSettings, prepare
from sana_core.batch.plan import Workload, batch_images
from sana_core.checkpoints import detect, find_part
from sana_core.cluster.batch import make_job
from sana_core.errors import InputError

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

    counted(detect, "join_parts")
    counted(pipeline, "resolve_settings")
    (tmp_path / "prompts.txt").write_text("a cat\n")
    prompts = {"generate": "a cat", "batch": str(tmp_path / "prompts.txt")}[command]
    places = ["--checkpoint", str(checkpoint), "--out", str(tmp_path / "out"), "--devices", "cpu", "cuda:7"]
    with caplog.at_level(logging.WARNING):
        assert main([command, prompts, *places, *SMALL]) == 0
    assert calls == {"join_parts": 1, "resolve_settings": 1}
    assert caplog.text.count("this machine has no cuda:7") == 1
    assert len(list((tmp_path / "out").glob("*.png"))) == 1


def test_a_part_of_a_checkpoint_is_refused_for_a_cluster(checkpoint):
    """The machines of a cluster only get a path, so they would load another thing than this machine."""
    info = sana_core.inspect_checkpoint(checkpoint)
    workload = Workload(["a cat"], batch_images(1, 1, 0))
    settings = SamplingSettings(width=32, height=32, steps=1)
    assert make_job(prepare(workload, info, settings)).settings.steps == 1
    request = prepare(workload, info, settings)._replace(checkpoint=find_part(info, "transformer"))
    # The path of a component is its own folder, which is inspected to the same Checkpoint.
    assert make_job(request).settings.steps == 1
    with pytest.raises(InputError, match="^checkpoint: got a part or a moving average for a cluster, expected a whole"):
        make_job(request._replace(checkpoint=detect.follow(find_part(info, "transformer"), "nvidia")))


def test_devices_of_this_machine_do_not_matter_on_a_cluster(checkpoint, monkeypatch, caplog):
    def generate_on_cluster(request, *arguments):
        raise InputError(f"devices: {request.devices}")

    monkeypatch.setattr(sana_core.cluster.batch, "generate_on_cluster", generate_on_cluster)
    with pytest.raises(InputError, match=r"^devices: \[device"):
        sana_core.generate("a cat", checkpoint, devices=["cuda:7"], cluster="auto", width=32, height=32, steps=1)
    assert "cuda:7" not in caplog.text
