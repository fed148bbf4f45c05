"""`generate` and `batch` draw with LoRAs: in one process, divided, on workers; another strength is another picture."""

import json
import shutil

import pytest
import torch
from adapted import save_adapter

import sana_core
from sana_core.__main__ import main
from sana_core.batch.pipeline import SamplingSettings, prepare, resolve_settings
from sana_core.checkpoints.fingerprint import fingerprint
from sana_core.cluster.batch import generate_on_cluster
from sana_core.commands.options import lora_of
from sana_core.engine.body import Body, Job
from sana_core.errors import CheckpointError, MissingFileError
from sana_core.runtime.cancellation import no_poll

PROMPT = "a red circle on a blue background"
SIZE = {"width": 128, "height": 96, "steps": 2, "seed": 3}

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def lora(checkpoint, tmp_path_factory):
    file = tmp_path_factory.mktemp("loras") / "it.safetensors"
    save_adapter(checkpoint, file, much=0.1)
    return str(file)


def test_strengths_add_up_in_any_way_of_drawing(checkpoint, lora):
    drawn = sana_core.generate([PROMPT], checkpoint, loras=[(lora, 0.6)], **SIZE)
    assert (drawn - sana_core.generate([PROMPT], checkpoint, **SIZE)).abs().mean() > 0.01
    twice = sana_core.generate([PROMPT], checkpoint, loras=[(lora, 1.0), (lora, -0.4)], **SIZE)
    torch.testing.assert_close(twice, drawn, atol=1e-4, rtol=0)
    divided = sana_core.generate([PROMPT], checkpoint, loras=[(lora, 0.6)], split=True, devices=["cpu", "cpu"], **SIZE)
    torch.testing.assert_close(divided, drawn, atol=1e-4, rtol=0)


def test_a_worker_draws_with_it_and_refuses_another_file_of_that_name(checkpoint, lora, tmp_path):
    path, file = str(checkpoint), shutil.copy(lora, tmp_path / "it.safetensors")
    settings = resolve_settings(SamplingSettings(128, 96, steps=2, loras=((str(file), 0.6),)), path)
    weights = {item: fingerprint(item) for item in (path, str(file))}
    job, posted = Job(settings, path, path, path, weights).pack(), []
    worker = Body("cpu", lambda *event: posted.append(event), no_poll)
    worker.begin(job)
    worker.encode([None, PROMPT])
    worker.generate([(0, 0, 3)], [PROMPT], {event[1]: event[2] for event in posted if event[0] == "text"}, {})
    (content,) = [event[2]() for event in posted if event[0] == "image"]
    drawn = sana_core.generate([PROMPT], checkpoint, loras=[(lora, 0.6)], **SIZE)
    assert torch.equal(torch.from_numpy(content), drawn[0])
    save_adapter(checkpoint, file, seed=8)
    with pytest.raises(CheckpointError, match=r"it.safetensors: not what the driver has \(lora_weights\)"):
        Body("cpu", print, no_poll).begin(job)


def test_a_batch_goes_on_with_the_same_strength_alone(checkpoint, lora, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "prompts.txt").write_text(PROMPT)
    command = ["batch", "prompts.txt", "--checkpoint", str(checkpoint), "--width", "32", "--height", "32"]
    command += ["--steps", "1", "--out", "out", "--lora"]
    assert main([*command, f"{lora}=0.5"]) == 0
    assert main([*command, f"{lora}=0.5"]) == 0
    assert "1 of 1 images exist" in capsys.readouterr().out
    assert main([*command, f"{lora}=0.7"]) == 1
    assert "loras" in capsys.readouterr().err


def test_pefts_settings_beside_a_lora_count_by_file_and_by_folder(checkpoint, lora, tmp_path):
    file, settings = shutil.copy(lora, tmp_path / "adapter_model.safetensors"), tmp_path / "adapter_config.json"
    drawn, layers = [], []
    for alpha in (4, 8):
        settings.write_text(json.dumps({"peft_type": "LORA", "r": 4, "lora_alpha": alpha}))
        drawn += [
            sana_core.generate([PROMPT], checkpoint, loras=[(str(item), 1.0)], **SIZE) for item in (file, tmp_path)
        ]
        layers += [fingerprint(file), fingerprint(tmp_path)]
    twice = sana_core.generate([PROMPT], checkpoint, loras=[(lora, 2.0)], **SIZE)
    assert torch.equal(drawn[0], drawn[1]) and torch.equal(drawn[2], drawn[3])
    torch.testing.assert_close(drawn[2], twice, atol=1e-4, rtol=0)
    assert layers[0] == layers[1] != layers[2] == layers[3]


def test_how_the_option_is_read():
    assert lora_of("a.safetensors") == ("a.safetensors", 1.0)
    assert lora_of("a.safetensors=-0.5") == ("a.safetensors", -0.5)
    assert lora_of("a=b.safetensors") == ("a=b.safetensors", 1.0)
    assert lora_of("a=b.safetensors=2") == ("a=b.safetensors", 2.0)


def test_a_file_that_is_not_there_is_named_before_a_cluster_is_asked(checkpoint, tmp_path):
    settings = SamplingSettings(32, 32, loras=((str(tmp_path / "none.safetensors"), 1.0),))
    with pytest.raises(MissingFileError, match="none.safetensors"):
        list(
            generate_on_cluster(prepare(sana_core.batch.plan.Workload([PROMPT], (), None), checkpoint, settings), None)
        )
