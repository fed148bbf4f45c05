"""An image on disk is reused only if everything that decides its pixels is unchanged."""

import os

import pytest
from bounded import bounded

from sana_core import inspect_checkpoint
from sana_core.batch.best import Best
from sana_core.batch.pipeline import SamplingSettings
from sana_core.batch.png import describe_settings
from sana_core.checkpoints import fingerprint as module
from sana_core.checkpoints.fingerprint import difference, fingerprint
from sana_core.errors import InputError


@pytest.mark.parametrize("part", ["transformer", "vae", "text_encoder"])
def test_every_byte_of_the_weights_is_asked(copy, part):
    before = fingerprint(copy)
    (file,) = (copy / part).glob("*.safetensors")
    data = bytearray(file.read_bytes())
    data[len(data) * 2 // 3] ^= 1
    file.write_bytes(data)
    assert difference(before, fingerprint(copy)) == f"{part.replace('vae', 'autoencoder')}_weights"


def test_the_instruction_and_the_librarys_defaults_are_asked(checkpoint, monkeypatch):
    before = fingerprint(checkpoint)
    monkeypatch.setattr(module, "instruction_text", lambda reference: "Draw this: ")
    assert difference(before, fingerprint(checkpoint)) == "instruction"
    monkeypatch.undo()
    real = module.resolved_config
    monkeypatch.setattr(module, "resolved_config", lambda info: {**real(info), "a_new_default": 1})
    assert "transformer_config" in difference(before, fingerprint(checkpoint))


def test_a_name_that_a_png_could_not_hold_is_refused(checkpoint, tmp_path):
    folder = tmp_path / os.fsdecode(b"model \xff")
    folder.symlink_to(checkpoint)
    with pytest.raises(
        InputError, match="^checkpoint: contains half a character .* at position 6; rename that file or"
    ):
        describe_settings(SamplingSettings(), inspect_checkpoint(folder))
    settings = SamplingSettings(loras=((str(tmp_path / os.fsdecode(b"\xff.safetensors")), 1.0),))
    with pytest.raises(
        InputError, match="^lora: contains half a character .* at position 0; rename that file or folder$"
    ):
        describe_settings(settings, inspect_checkpoint(checkpoint))
    with pytest.raises(
        InputError, match="^scorer: contains half a character .* at position 6; rename that file or folder$"
    ):
        Best(1, 2, folder).describe()


CHANGES = {
    "shift": ("scheduler/scheduler_config.json", b'"flow_shift": 3.0', b'"flow_shift": 4.0'),
    "autoencoder_config": ("vae/config.json", b"0.29957", b"0.3"),
    "transformer_config": ("transformer/config.json", b'"norm_eps": 1e-06', b'"norm_eps": 1e-05'),
    "tokenizer": ("tokenizer/tokenizer.json", b'blue": 363', b'blue": 369'),
    "text_encoder_config": ("text_encoder/config.json", b'"sliding_window": 1024', b'"sliding_window": 8'),
}


@pytest.mark.parametrize("name", CHANGES)
def test_every_file_beside_the_weights_is_asked(copy, name):
    before, (file, old, new) = fingerprint(copy), CHANGES[name]
    content = (copy / file).read_bytes()
    assert old in content, content[:2000]
    (copy / file).write_bytes(content.replace(old, new))
    assert difference(before, fingerprint(copy)) == name


def test_the_digest_of_a_large_file_is_kept_beside_it(copy, monkeypatch):
    monkeypatch.setattr(module, "LARGE", 0)
    calls = []
    results = [fingerprint(copy, lambda finished, total: calls.append((finished, total))) for _ in range(2)]
    size = sum(file.stat().st_size for file in copy.rglob("*.safetensors"))
    assert results[0] == results[1] and calls[-1] == (size, size) and len(calls) == 3
    assert len(list(copy.rglob(".*.sana-digest.json"))) == 3
    (file,) = (copy / "vae").glob("*.safetensors")
    status, data = file.stat(), bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert difference(results[0], fingerprint(copy)) == "autoencoder_weights"


def test_a_file_of_others_where_a_digest_would_be_kept_stays(copy, monkeypatch):
    monkeypatch.setattr(module, "LARGE", 0)
    fingerprint(copy)
    one, half, empty = sorted(copy.rglob(".*.sana-digest.json"))
    complete = half.read_bytes()
    for file, content in ((one, b'{"stamp": 5}'), (half, complete[:20]), (empty, b"")):
        file.write_bytes(content)
    fingerprint(copy)
    assert one.read_bytes() == b'{"stamp": 5}' and half.read_bytes() == complete and empty.stat().st_size


def test_a_models_folder_that_cannot_be_written_is_read_again(copy, monkeypatch):
    monkeypatch.setattr(module, "LARGE", 0)

    def refuse(*arguments, **options):
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(type(copy), "write_text", refuse)
    assert fingerprint(copy) == fingerprint(copy)
    assert not list(copy.rglob("*.sana-digest.json"))


@pytest.mark.parametrize("target", ["gone", "empty"])
def test_no_digest_is_written_through_a_link_in_a_models_folder(copy, monkeypatch, tmp_path, target):
    """A model's folder may come from a stranger."""
    monkeypatch.setattr(module, "LARGE", 0)
    (tmp_path / "empty").touch()
    for file in copy.rglob("*.safetensors"):
        file.with_name(f".{file.name}.sana-digest.json").symlink_to(tmp_path / target)
    fingerprint(copy)
    assert not (tmp_path / "gone").exists() and not (tmp_path / "empty").stat().st_size


@pytest.mark.parametrize("kind", ["pipe", "nested"])
def test_a_broken_digest_beside_a_model_is_not_read(copy, monkeypatch, kind):
    monkeypatch.setattr(module, "LARGE", 0)
    expected = fingerprint(copy)
    for file in list(copy.rglob(".*.sana-digest.json")):
        file.unlink()
        if kind == "pipe":
            os.mkfifo(file)
        else:
            file.write_text("[" * 100_000)
    with bounded(seconds=20):
        assert fingerprint(copy) == expected
