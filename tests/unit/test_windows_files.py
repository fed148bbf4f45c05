"""Files that another program has open, as a virus scanner or an indexer on Windows."""

import errno
import shutil
from collections import Counter
from pathlib import Path

import pytest
from test_training_files import make, out, shared  # noqa: F401

from sana_core.runtime import atomic_files
from sana_core.runtime.atomic_files import output_file, patiently, remove, write_whole
from sana_core.training import train
from sana_core.training.runs import find_states


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

            def wrapped(path, *rest, real=real, seen=seen, name=name, **options):
                # Only what exists can be open elsewhere. A link's source is its argument.
                source = rest[0] if name == "hardlink_to" else path
                if Path(source).exists() and seen[str(source)] < times:
                    seen[str(source)] += 1
                    failures[name] += 1
                    raise SharingViolation
                return real(path, *rest, **options)

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


def test_a_training_run_keeps_its_states_while_a_scanner_opens_its_files(make, out, scanned):  # noqa: F811
    failures = scanned(2)
    train.train(make(keep=1))
    assert [step for step, _ in find_states(out)] == [4]
    assert (out / "x.safetensors").is_file()
    assert not list(out.rglob("*.part"))
    assert failures["rename"] >= 2
