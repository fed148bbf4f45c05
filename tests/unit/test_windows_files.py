"""Files that another program has open, as a virus scanner or an indexer on Windows."""

import errno
import shutil
from collections import Counter
from pathlib import Path

import pytest
from test_training_files import make, out, shared  # noqa: F401

from sana_core.errors import OutputError
from sana_core.runtime import atomic_files
from sana_core.runtime.atomic_files import output_file, patiently, remove, write_whole
from sana_core.training import states, trainer
from sana_core.training.states import find_states, read_log


class SharingViolation(PermissionError):
    """What Windows raises for a file that is open elsewhere."""

    winerror = 32

    def __init__(self):
        super().__init__(errno.EACCES, "The process cannot access the file because it is being used by another process")


@pytest.fixture
def scanned(monkeypatch):
    """Every rename, replacement, link and removal fails `times` times before it works. Returns the failures by name."""
    failures = Counter()

    def scan(times):
        for owner, name in [
            *((Path, name) for name in ("rename", "replace", "hardlink_to", "unlink")),
            (shutil, "rmtree"),
        ]:
            real, seen = getattr(owner, name), Counter()

            def wrapped(path, *arguments, real=real, seen=seen, name=name, **options):
                # Only what exists can be open elsewhere. A link's source is its argument.
                source = arguments[0] if name == "hardlink_to" else path
                if Path(source).exists() and seen[str(source)] < times:
                    seen[str(source)] += 1
                    failures[name] += 1
                    raise SharingViolation
                return real(path, *arguments, **options)

            monkeypatch.setattr(owner, name, wrapped)
        return failures

    return scan


def test_files_that_are_open_elsewhere_for_a_moment_are_written_replaced_and_removed(tmp_path, scanned):
    failures = scanned(3)
    write_whole(tmp_path / "a", b"one", tmp_path)
    write_whole(tmp_path / "a", b"two", tmp_path, replace=True)
    with output_file(tmp_path / "b") as part:
        part.write_bytes(b"three")
    assert ((tmp_path / "a").read_bytes(), (tmp_path / "b").read_bytes()) == (b"two", b"three")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "c").touch()
    remove(tmp_path / "folder")
    remove(tmp_path / "a")
    assert [path.name for path in tmp_path.iterdir()] == ["b"]
    assert failures.keys() >= {"replace", "hardlink_to", "rmtree", "unlink"}


def test_a_file_that_stays_open_elsewhere_is_an_error_after_a_while(monkeypatch):
    monkeypatch.setattr(atomic_files, "PATIENCE", 0.2)

    def fail():
        raise SharingViolation

    with pytest.raises(PermissionError, match="being used by another process"):
        patiently(fail, 0.2)


def test_a_folder_without_rights_is_an_error_at_once():
    calls = []

    def fail():
        calls.append(1)
        raise PermissionError(errno.EACCES, "Permission denied")

    with pytest.raises(PermissionError):
        patiently(fail, 1000.0)
    assert len(calls) == 1


@pytest.fixture
def hurried(monkeypatch):
    """Nobody waits long for a file."""
    monkeypatch.setattr(atomic_files, "PATIENCE", 0.1)
    monkeypatch.setattr(states, "SCAN_PATIENCE", 0.1)


@pytest.fixture
def kept_open(monkeypatch):
    """A function of words: renaming, replacing or removing a path with one of them fails."""
    words = []

    for name in ("rename", "replace", "unlink"):
        real = getattr(Path, name)

        def wrapped(path, *target, real=real, **options):
            if any(word in str(name) for word in words for name in (path, *target)):
                raise SharingViolation
            return real(path, *target, **options)

        monkeypatch.setattr(Path, name, wrapped)
    return lambda *new_words: words.__setitem__(slice(None), new_words)


@pytest.mark.usefixtures("hurried")
def test_a_state_that_cannot_be_moved_to_its_place_is_kept_named_and_moved_by_the_next_run(
    make,  # noqa: F811
    out,  # noqa: F811
    tmp_path,
    kept_open,
):
    expected = trainer.train(make()).read_bytes()
    out.rename(tmp_path / "whole")
    kept_open("step-0000002")
    with pytest.raises(OutputError) as caught:
        trainer.train(make())
    (part,) = (out / ".sana-batch").glob("run-*/.state-2.part")
    said = f"out: step-0000002 is complete but cannot be moved from {part} to {out / 'steps' / 'step-0000002'} ("
    assert str(caught.value).startswith(said) and "\n" not in str(caught.value)
    # The steps after that state are saved too.
    assert (part / "state.json").is_file() and [step for step, _ in find_states(out)] == [4]

    # It is still open.
    with pytest.raises(OutputError, match="^out: step-0000002 is complete but cannot be moved"):
        trainer.train(make())
    assert (part / "state.json").is_file()

    kept_open()
    steps = []
    result = trainer.train(make(), lambda line: steps.append(line["step"]))
    assert not steps and result.read_bytes() == expected
    assert [step for step, _ in find_states(out)] == [2, 4] and not (out / ".sana-batch").exists()


@pytest.mark.usefixtures("hurried")
@pytest.mark.parametrize("damage", ["state.json", "state.safetensors"])
def test_a_kept_state_that_is_not_whole_is_removed(make, out, kept_open, damage):  # noqa: F811
    kept_open("step-0000002")
    with pytest.raises(OutputError):
        trainer.train(make())
    (part,) = (out / ".sana-batch").glob("run-*/.state-2.part")
    (part / damage).write_bytes((part / damage).read_bytes()[:-3])
    kept_open()
    trainer.train(make())
    assert len(read_log(out)) == 4 and not (out / ".sana-batch").exists()


@pytest.mark.usefixtures("hurried")
def test_an_older_state_that_is_open_elsewhere_does_not_end_the_run(make, out, kept_open, caplog):  # noqa: F811
    trainer.train(make(steps=2, keep=1))
    # A map of its weights in ComfyUI.
    kept_open("step-0000002")
    trainer.train(make(steps=4, keep=1))
    assert [step for step, _ in find_states(out)] == [2, 4] and "step-0000002 is not removed now" in caplog.text
    kept_open()
    trainer.train(make(steps=4, keep=1))
    assert [step for step, _ in find_states(out)] == [4]


@pytest.mark.usefixtures("hurried")
def test_a_lora_that_another_program_maps_is_an_error_that_names_the_new_one(make, out, kept_open):  # noqa: F811
    file = trainer.train(make(steps=2))
    before = file.read_bytes()
    kept_open("/out/x.safetensors")
    new = out / "steps" / "step-0000004" / "x.safetensors"
    with pytest.raises(OutputError, match=rf"^out: {file} cannot be replaced .*; the new LoRA is {new}$"):
        trainer.train(make(steps=4))
    assert file.read_bytes() == before and new.is_file()
    kept_open()
    assert trainer.train(make(steps=4)).read_bytes() == new.read_bytes()


@pytest.mark.usefixtures("hurried")
@pytest.mark.parametrize("until", [1, 3, 100])
def test_a_log_that_is_locked_does_not_end_the_run_and_is_written_later(
    make,  # noqa: F811
    out,  # noqa: F811
    monkeypatch,
    caplog,
    until,
):
    real, calls = states.append_log, []

    def locked(*values):
        calls.append(values)
        if len(calls) <= until:
            raise SharingViolation
        real(*values)

    monkeypatch.setattr(states, "append_log", locked)
    steps = []
    trainer.train(make(), lambda line: steps.append(line["step"]))
    assert steps == [1, 2, 3, 4] and [step for step, _ in find_states(out)] == [2, 4]
    warnings = [record.message for record in caplog.records]
    assert "log.jsonl cannot be written now" in warnings[0]
    if until == 100:
        assert "it lacks steps 1 to 4" in warnings[1] and not read_log(out)
    else:
        assert [line["step"] for line in read_log(out)] == [1, 2, 3, 4] and len(warnings) == 1
