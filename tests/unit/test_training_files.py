"""The files of a run: files of others stay untouched, and damaged files are detected and named."""

import json
import os
import shutil
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import pytest
import torch
from checkpoints import CHECKPOINTS
from pictures import write_pictures
from PIL import Image
from safetensors.torch import load_file

from sana_core.checkpoints.fingerprint import digest_json
from sana_core.errors import CheckpointError, ExistingFileError, InputError, OutputError, TrainingError, VersionError
from sana_core.training import cache, schedule, states, trainer
from sana_core.training.settings import Method, Phase, TrainingSettings, Validation, check_settings
from sana_core.training.states import Eta, append_log, find_states, read_log, read_losses


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    """Pictures, and a cache for all runs here."""
    folder = tmp_path_factory.mktemp("training")
    write_pictures(folder / "pictures", 3)
    return folder


@pytest.fixture
def make(shared, tmp_path, checkpoint):
    """A function of overrides that returns the settings of four steps on three pictures."""

    def make(steps=4, phases=1, model=checkpoint, **options):
        phase = Phase((str(shared / "pictures"),), 32, steps=steps, learning_rate=1e-3)
        values = {"dtype": "float32", "save_every": 2, "method": Method(rank=2), "name": "x", **options}
        cache, out = str(shared / "cache"), str(tmp_path / "out")
        return check_settings(TrainingSettings(str(model), out, (phase,) * phases, cache=cache, **values))

    return make


@pytest.fixture
def out(tmp_path):
    return tmp_path / "out"


@pytest.fixture(scope="module")
def finished(shared, tmp_path_factory):
    """The settings of a run, and its folder after its end."""
    out = tmp_path_factory.mktemp("finished") / "out"
    phase = Phase((str(shared / "pictures"),), 32, steps=4, learning_rate=1e-3)
    values = {"dtype": "float32", "method": Method(rank=2), "name": "x", "cache": str(shared / "cache")}
    run_settings = check_settings(TrainingSettings(str(CHECKPOINTS["sana-tiny"]), str(out), (phase,), **values))
    trainer.train(run_settings)
    return run_settings, out


@pytest.fixture
def copied(finished, tmp_path):
    """The settings of a run that has ended, in a copy of its folder, and the copy."""
    run_settings, folder = finished
    out = shutil.copytree(folder, tmp_path / "out")
    return replace(run_settings, out=str(out)), out


def content(folder):
    return {
        path.relative_to(folder).as_posix(): sha256(path.read_bytes()).hexdigest()
        for path in folder.rglob("*")
        if path.is_file()
    }


STRANGERS = ("x.safetensors", "log.jsonl", "run.json", "steps", "pictures", "pictures/step-0000000-00.png")


@pytest.mark.parametrize("name", [*STRANGERS, "steps/step-0000002", "steps/step-0000003/notes.txt", "x.safetensors/a"])
def test_what_others_have_put_where_a_run_writes_is_named_and_stays(make, out, name):
    (out / name).parent.mkdir(parents=True)
    (out / name).write_text("mine")
    before = content(out)
    place = (
        out.joinpath(*Path(name).parts[:2]) if name.startswith(("steps/", "pictures/")) else out / Path(name).parts[0]
    )
    with pytest.raises(
        ExistingFileError, match=f"^out: {place} is not of this run, .*; move it away, or choose another"
    ):
        trainer.train(make())
    assert content(out) == before


def test_the_lora_of_a_run_that_has_ended_is_not_replaced_by_another_run(make, out):
    file = trainer.train(make())
    first = file.read_bytes()
    shutil.rmtree(out / "steps")
    with pytest.raises(InputError, match="^rank: got 3, but the run in .*out has 2; name another folder"):
        trainer.train(make(method=Method(rank=3)))
    (out / "run.json").unlink()
    with pytest.raises(ExistingFileError, match="log.jsonl is not of this run"):
        trainer.train(make(method=Method(rank=3)))
    (out / "log.jsonl").unlink()
    with pytest.raises(ExistingFileError, match="x.safetensors is not of this run"):
        trainer.train(make(method=Method(rank=3)))
    assert file.read_bytes() == first


def test_a_run_replaces_its_own_lora_and_no_file_that_was_put_in_its_place(make, out):
    file = trainer.train(make())
    before = file.read_bytes()
    assert trainer.train(make(steps=6)) == file and file.read_bytes() != before
    file.write_text("mine")
    for steps in (6, 8):
        with pytest.raises(ExistingFileError, match="x.safetensors is not of this run"):
            trainer.train(make(steps=steps))
    assert file.read_text() == "mine" and [step for step, _ in find_states(out)][-1] == 6


def test_a_file_that_comes_while_it_trains_is_not_replaced_either(make, out):
    def report(line):
        (out / "x.safetensors").write_text("mine")

    with pytest.raises(ExistingFileError, match="x.safetensors is not of this run"):
        trainer.train(make(), report)
    assert (out / "x.safetensors").read_text() == "mine" and find_states(out)[-1][0] == 4
    (out / "x.safetensors").unlink()
    assert trainer.train(make()) == out / "x.safetensors"


@pytest.mark.parametrize("name", ["step-0000004", "step-0000001/notes.txt"])
def test_what_comes_where_a_state_will_be_ends_the_run_with_what_it_has_learnt(make, out, shared, tmp_path, name):
    complete = trainer.train(make()).read_bytes()
    shutil.rmtree(out)
    theirs = out / "steps" / name

    def report(line):
        if line["step"] == 3 and not theirs.exists():
            theirs.parent.mkdir(parents=True, exist_ok=True)
            theirs.write_text("mine")

    place = out / "steps" / Path(name).parts[0]
    with pytest.raises(ExistingFileError, match=f"^out: {place} is not of this run"):
        trainer.train(make(save_every=500), report)
    assert theirs.read_text() == "mine" and [step for step, _ in find_states(out)] == [3]
    theirs.rename(tmp_path / "mine")
    if place.exists():
        place.rmdir()
    assert trainer.train(make(save_every=500)).read_bytes() == complete


def test_a_preview_is_written_beside_what_has_its_name(make, out):
    run_settings = make(validation=Validation(every=2, prompts=("a red circle",), steps=1, width=32, height=32))
    theirs, folder = out / "pictures" / "step-0000002-00.png", out / "pictures" / "step-0000004-00.png"

    def report(line):
        if line["step"] == 1:
            theirs.write_text("mine")
            folder.mkdir()

    trainer.train(run_settings, report)
    names = {"step-0000000-00.png", theirs.name, "step-0000002-00-2.png", folder.name, "step-0000004-00-2.png"}
    assert theirs.read_text() == "mine" and {path.name for path in theirs.parent.iterdir()} == names
    # the same again is no other
    before = content(out / "pictures")
    shutil.rmtree(out / "steps")
    trainer.train(run_settings)
    assert content(out / "pictures") == before


def test_older_states_that_a_killed_run_has_not_removed_go_with_the_next_one(make, out):
    trainer.train(make(keep=2))
    trainer.train(make(keep=1))
    assert [step for step, _ in find_states(out)] == [4]


def test_a_run_that_has_ended_keeps_its_best_when_its_pictures_change(make, out, tmp_path):
    write_pictures(tmp_path / "pictures", 4)
    phase = Phase((str(tmp_path / "pictures"),), 32, steps=6, learning_rate=0.1)
    run_settings = replace(make(keep=1, validation=Validation(every=2, share=0.3)), phase=(phase,))
    trainer.train(run_settings)
    before = content(out)
    assert len(find_states(out)) == 2
    next((tmp_path / "pictures").glob("*.txt")).write_text("another caption")
    trainer.train(run_settings)
    assert content(out) == before


def cancel_after(step):
    def report(line):
        if "loss" in line and line["step"] == step:
            raise KeyboardInterrupt

    return report


def test_a_state_that_was_saved_before_its_validation_gets_it_when_the_run_resumes(make, out):
    options = {"keep": 1, "validation": Validation(every=2, share=0.4)}
    trainer.train(make(**options))
    before = content(out)
    shutil.rmtree(out)

    with pytest.raises(KeyboardInterrupt):
        trainer.train(make(**options), cancel_after(4))
    lines = [[], []]
    for reported in lines:
        trainer.train(make(**options), reported.append)
        after = content(out)
        # The log has times.
        assert all(after[name] == before[name] for name in before if name != "log.jsonl")
    # The first start validates and reports the best validation, the second one only reports it.
    assert [len(reported) for reported in lines] == [2, 1] and after.keys() == before.keys()


def test_a_validation_that_cannot_be_added_to_its_state_does_not_end_the_run(make, out, monkeypatch, caplog):
    options = {"steps": 6, "save_every": 4, "keep": 1, "validation": Validation(every=2, share=0.4)}
    trainer.train(make(**options))
    before = content(out)
    shutil.rmtree(out)

    with pytest.raises(KeyboardInterrupt):
        trainer.train(make(**options), cancel_after(4))
    write_document = states.write_document

    def is_open(folder, parts, state):
        if folder.parent.name == "steps":
            raise PermissionError("another program has it open")
        write_document(folder, parts, state)

    with monkeypatch.context() as patched:
        patched.setattr(states, "write_document", is_open)
        with pytest.raises(KeyboardInterrupt):
            trainer.train(make(**options), cancel_after(5))
    assert "the validation of step 4 is not saved now" in caplog.text
    trainer.train(make(**options))
    after, last = content(out), "steps/step-0000006/state.json"
    assert all(after[name] == before[name] for name in (last, "x.safetensors", "x-last.safetensors"))


def test_a_run_whose_run_json_is_gone_goes_on(copied):
    run_settings, out = copied
    (out / "run.json").unlink()
    trainer.train(replace(run_settings, phase=(replace(run_settings.phase[0], steps=5),)))
    assert len(read_losses(out)) == 5


def test_a_state_that_others_have_put_a_file_into_stays(make, out):
    trainer.train(make(keep=1))
    (out / "steps" / "step-0000004" / "notes.txt").write_text("mine")
    trainer.train(make(steps=10, keep=1))
    assert [step for step, _ in find_states(out)] == [4, 10]


def test_a_lora_that_is_named_anew_after_the_end_is_published_as_that(copied):
    run_settings, out = copied
    second = trainer.train(replace(run_settings, name="y"))
    assert second == out / "y.safetensors" and second.read_bytes() == (out / "x.safetensors").read_bytes()


def test_a_phase_that_is_removed_is_asked_for_back(make):
    trainer.train(make(steps=2, phases=2))
    with pytest.raises(InputError, match="^phase: got 1, but the run in .*out has come to phase 2; restore the phases"):
        trainer.train(make(steps=2))


def test_what_is_wrong_with_settings_and_captions_is_told_before_models_are_read(make, tmp_path, monkeypatch):
    trainer.train(make())

    def never(*values):
        raise AssertionError

    monkeypatch.setattr(cache, "fingerprint", never)
    with pytest.raises(InputError, match="^rank: got 3, but the run"):
        trainer.train(make(method=Method(rank=3)))
    write_pictures(tmp_path / "bare", 1)
    next((tmp_path / "bare").glob("*.txt")).unlink()
    phase = Phase((str(tmp_path / "bare"),), 32, steps=1)
    with pytest.raises(InputError, match="has no caption"):
        trainer.train(replace(make(), phase=(phase,)))


def test_pictures_that_are_enlarged_are_mentioned(make, tmp_path, caplog):
    (tmp_path / "small").mkdir()
    Image.new("RGB", (1, 1)).save(tmp_path / "small" / "a.png")
    (tmp_path / "small" / "a.txt").write_text("a dot")
    phase = Phase((str(tmp_path / "small"),), 1024, steps=1)
    schedule.read_samples(replace(make(), phase=(phase,)), lambda: None)
    assert "1 of 1 images are smaller than they are learned at and will be blurred, the first is a.png of 1 x 1" in (
        caplog.text
    )


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        *(("state.json", damage) for damage in ("flip", "cut", "empty", "gone")),
        *((name, damage) for name in ("state.safetensors", "x.safetensors") for damage in ("flip", "gone")),
    ],
)
def test_a_flipped_bit_is_found_and_named(copied, name, damage):
    run_settings, out = copied
    os.remove(out / "x.safetensors")
    file = find_states(out)[-1][1] / name
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 4
    if damage == "gone":
        file.unlink()
    else:
        file.write_bytes({"flip": bytes(data), "cut": bytes(data[:-1]), "empty": b""}[damage])
    kind, said = CheckpointError, "^step-0000004: broken state of a run .*; remove that folder to resume from the one"
    if (name, damage) == ("state.json", "gone"):
        kind, said = ExistingFileError, "step-0000004 is not of this run"
    with pytest.raises(kind, match=said) as caught:
        trainer.train(run_settings)
    assert len(str(caught.value)) < 300 and not (out / "x.safetensors").exists()
    shutil.rmtree(file.parent)
    trainer.train(run_settings)
    assert (out / "x.safetensors").exists() and len(read_losses(out)) == 4


def change(document, name, value):
    """Set the value at the dotted `name` of `document`. REMOVED removes it."""
    *outer, last = [int(key) if key.isdigit() else key for key in name.split(".")]
    for key in outer:
        document = document[key]
    if value is REMOVED:
        del document[last]
    else:
        document[last] = value


def rewrite_state(folder, name, value):
    """Change a value of the state.json in `folder`, with the digest of the changed document."""
    document = json.loads((folder / "state.json").read_bytes())
    del document["digest"]
    change(document, name, value)
    (folder / "state.json").write_text(json.dumps({**document, "digest": digest_json(document)}))


REMOVED = object()
OTHER_FORMATS = [
    ("progress", REMOVED, "progress: got nothing, expected a value"),
    ("place", {"step": 4}, "place: got {'step': 4}, expected nothing"),
    ("progress", [4, 0, 4], "progress: got [4, 0, 4], expected an object"),
    ("progress.place", 3, "progress.place: got 3, expected nothing"),
    ("progress.done", REMOVED, "progress.done: got nothing, expected a value"),
    ("progress.step", "4", "progress.step: got 4, expected a whole number"),
    ("progress.phase", 0.0, "progress.phase: got 0.0, expected a whole number"),
    ("progress.phase", True, "progress.phase: got True, expected a whole number"),
    ("progress.done", None, "progress.done: got None, expected a number"),
    ("config", [], "config: got [], expected an object"),
    ("data", "abc", "data: got abc, expected a list"),
    ("data.0", 1, "data.0: got 1, expected a text"),
    ("best", [0.5, 2, 0, 0.9], "best: got [0.5, 2, 0, 0.9], expected an object"),
    ("validated", [], "validated: got [], expected a whole number"),
    ("shards", None, "shards: got None, expected a whole number"),
    ("files", REMOVED, "files: got nothing, expected a value"),
    ("files", {"a": 1}, "files.a: got 1, expected a text"),
    ("values", None, "values: got None, expected an object"),
    ("values.group", REMOVED, "values.group: got nothing, expected a value"),
    ("values.group", [], "values.group: got [], expected an object"),
    ("values.parameters", 3, "values.parameters: got 3, expected a list"),
    ("values.parameters.0", {"values": {}}, "values.parameters.0.subclasses: got nothing, expected a value"),
]


def test_a_second_start_opens_only_images_that_have_changed(make, tmp_path, monkeypatch):
    write_pictures(tmp_path / "pictures", 3)
    settings = make(steps=1)
    settings = replace(
        settings,
        phase=(replace(settings.phase[0], data=(str(tmp_path / "pictures"),), resolution=256),),
        cache=str(tmp_path / "cache"),
    )
    trainer.train(settings)
    opened, open_image = [], Image.open
    monkeypatch.setattr(Image, "open", lambda *values, **options: opened.append(1) or open_image(*values, **options))
    trainer.train(settings)
    assert not opened
    before = set((tmp_path / "cache" / "latents").rglob("*.safetensors"))
    Image.new("RGB", (64, 256), "red").save(next((tmp_path / "pictures").glob("*.png")))
    trainer.train(settings)
    (new,) = set((tmp_path / "cache" / "latents").rglob("*.safetensors")) - before
    # The header, and then the pixels.
    assert len(opened) == 2 and load_file(new)["latents"].shape == (32, 16, 4)


@pytest.mark.parametrize("moved", [True, False], ids=["moved", "not moved"])
@pytest.mark.parametrize(("name", "value", "said"), OTHER_FORMATS)
def test_a_state_of_another_format_is_named_in_one_line_and_stays(copied, name, value, said, moved):
    run_settings, out = copied
    state = find_states(out)[-1][1]
    rewrite_state(state, name, value)
    if not moved:
        part = out / ".sana-batch" / "run-0123" / ".state-4.part"
        part.parent.mkdir(parents=True)
        state = state.rename(part)
    before = content(out)
    with pytest.raises(VersionError) as caught:
        trainer.train(run_settings)
    remedy = "resume with the version of this package that wrote it, or choose another folder"
    assert str(caught.value) == f"{state.name}/state.json: {said}; {remedy}"
    assert content(out) == before


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("published", REMOVED, "published: got nothing, expected a value"),
        ("published.0", 5, "published.0: got 5, expected a text"),
        ("published", {}, "published: got {}, expected a list"),
        ("config", [["seed", 0]], "config: got [['seed', 0]], expected an object"),
        ("written", [], "written: got [], expected nothing"),
    ],
)
def test_a_run_json_of_another_format_is_named_in_one_line_and_stays(copied, name, value, said):
    run_settings, out = copied
    document = json.loads((out / "run.json").read_bytes())
    change(document, name, value)
    (out / "run.json").write_text(json.dumps(document))
    before = content(out)
    with pytest.raises(ExistingFileError) as caught:
        trainer.train(run_settings)
    start = f"out: {out / 'run.json'} is not of this run, but of another program or version"
    assert str(caught.value) == f"{start} ({said}); move it away, or choose another folder"
    assert content(out) == before


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("values.parameters", []),
        ("values.group", {"eps": []}),
        ("values.parameters.0.subclasses", {"exp_avg": [True, "torch.nothing"]}),
    ],
)
def test_values_of_another_optimizer_are_named_in_one_line(copied, name, value):
    run_settings, out = copied
    rewrite_state(find_states(out)[-1][1], name, value)
    phase = replace(run_settings.phase[0], steps=6)
    with pytest.raises(CheckpointError, match="^step-0000004: values of the optimizer do not fit it .*; remove that"):
        trainer.train(replace(run_settings, phase=(phase,)))


def test_a_first_state_that_was_complete_but_not_moved_is_used_by_the_next_start(make, out, monkeypatch):
    """A kill between the two leaves the state without the folder that it moves to."""

    def fail(part):
        raise OSError(5, "Input/output error")

    complete = trainer.train(make()).read_bytes()
    shutil.rmtree(out)
    with monkeypatch.context() as patch:
        patch.setattr(states, "sync", fail)
        with pytest.raises(OutputError, match="Input/output error"):
            trainer.train(make())
    assert not (out / "steps").exists()
    resumed = []
    assert trainer.train(make(), lambda line: resumed.append(line["step"])).read_bytes() == complete
    assert min(resumed) > 1


@pytest.mark.parametrize("kind", ["parameter", "optimizer"])
def test_numbers_that_are_none_are_neither_saved_nor_published(make, out, monkeypatch, kind):
    real = states.tensors_of

    def spoiled(*learned):
        tensors, values = real(*learned)
        if len(read_log(out)) == 4:
            name = next(name for name in tensors if name.startswith(kind) and tensors[name].ndim)
            tensors[name] = torch.full_like(tensors[name], float("nan"))
        return tensors, values

    monkeypatch.setattr(states, "tensors_of", spoiled)
    with pytest.raises(TrainingError, match=rf"^training: after step 4 {kind}\..* is not finite; lower learning_rate"):
        trainer.train(make())
    assert [step for step, _ in find_states(out)] == [2] and not (out / "x.safetensors").exists()


def test_a_log_is_added_to_and_read_whatever_is_in_it(tmp_path):
    log = tmp_path / "log.jsonl"
    assert read_log(tmp_path) == [] and read_losses(tmp_path) == []
    for step in range(1, 6):
        append_log(tmp_path, {"step": step, "loss": float(step)})
    for broken in (
        b"\n\n",
        b"\xff\xfe{}\n",
        b"[1]\n",
        b'{"loss": 1.0}\n',
        b'{"step": "1", "loss": 1.0}\n',
        b"[" * 10**5,
    ):
        with log.open("ab") as stream:
            stream.write(broken)
        before = log.read_bytes()
        # The log continues after an incomplete line, again from step 4.
        append_log(tmp_path, {"step": 4, "loss": 4.5})
        append_log(tmp_path, {"step": 4, "validation_loss": 0.5})
        assert log.read_bytes().startswith(before)
        assert [line.get("loss", "-") for line in read_log(tmp_path)] == [1.0, 2.0, 3.0, 4.5, "-"]


def test_a_run_that_goes_on_leaves_the_lines_of_its_log_as_they_are(make, out):
    trainer.train(make())
    log = out / "log.jsonl"
    with log.open("ab") as stream:
        # A process that was killed after the last state leaves such lines.
        stream.write(b'{"step": 5, "loss": 9.0}\n{"step": 6, "lo')
    before = log.read_bytes()
    assert len(read_losses(out)) == 4
    trainer.train(make(steps=6))
    assert log.read_bytes().startswith(before)
    assert [line["step"] for line in read_log(out)] == [1, 2, 3, 4, 5, 6] and 9.0 not in read_losses(out)


def test_a_line_of_the_log_that_finds_no_room_leaves_none_of_it(tmp_path, monkeypatch):
    append_log(tmp_path, {"step": 1, "loss": 1.0})
    before = (tmp_path / "log.jsonl").read_bytes()
    resource = pytest.importorskip("resource")
    import signal

    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 5, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            append_log(tmp_path, {"step": 2, "loss": 2.0})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert (tmp_path / "log.jsonl").read_bytes() == before


def test_what_dead_runs_have_left_is_gone_after_the_next(make, out, shared):
    run_settings = make()
    trainer.train(run_settings)
    remaining = [
        out / ".sana-batch" / "run-0123" / ".state-6.part",
        out / ".sana-batch" / "gone-4567" / ".gone-2.part",
        cache.store_of(run_settings).parts,
    ]
    for folder in remaining:
        (folder / "transformer").mkdir(parents=True)
        (folder / "transformer" / "half.safetensors").write_bytes(b"half")
    (out / ".sana-batch" / "run-0123" / "mark").touch()
    trainer.train(run_settings)
    assert {path.name for path in out.iterdir()} == {"log.jsonl", "run.json", "steps", "x.safetensors"}
    assert not list(shared.joinpath("cache").glob(".*"))


def test_the_time_left_does_not_count_what_was_before_the_first_step(monkeypatch):
    eta, line = Eta(), {"loss": 0.7, "learning_rate": 1e-4, "images": 4, "seconds": 2.0, "steps": 11}
    # The preparation and the first validation take 1000 s, a later one 8 s.
    for step, now, remaining in ((1, 1002.0, "0:00:20"), (2, 1012.0, "0:00:54")):
        monkeypatch.setattr(states.time, "monotonic", lambda now=now: now)
        assert eta.describe({**line, "step": step}).endswith(f"2.00 images a second, {remaining} left")
