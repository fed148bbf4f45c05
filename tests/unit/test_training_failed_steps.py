"""A step that fails before the optimizer began loses no step: the state before it is saved, and resumes to the bit."""

import re
import shutil
import tarfile
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from launched import OLD, outcomes, results_of
from pictures import write_pictures
from safetensors.torch import load_file
from trained import lines_of, newest, same

from sana_core.errors import InputError, MissingFileError, ReadError, SanaError
from sana_core.runtime.folder_lock import hold
from sana_core.training import cache, dataset, optimizers, schedule, states, trainer
from sana_core.training.settings import Method, Parallel, Phase, TrainingSettings, Validation, check_settings
from sana_core.training.states import find_states
from sana_core.training.trainer import Trainer

IMAGES, STEPS, FAILING = 8, 5, 3


def write_images(folder, kind):
    """Write the images of a run as a folder, or as two tars."""
    write_pictures(folder / "loose", IMAGES)
    if kind == "folder":
        return folder / "loose"
    (folder / "tars").mkdir()
    files = sorted((folder / "loose").iterdir())
    for number in range(2):
        with tarfile.open(folder / "tars" / f"{number}.tar", "w") as archive:
            for file in files[number * IMAGES : (number + 1) * IMAGES]:
                archive.add(file, file.name)
    return folder / "tars"


@pytest.fixture(scope="module")
def encoded(tmp_path_factory):
    """The cache of the runs that do not stream. All have the same images, which one of them encodes."""
    return tmp_path_factory.mktemp("encoded")


@pytest.fixture
def make(tmp_path, checkpoint, encoded):
    """A function that returns the settings of a run of five steps that saves no state by itself."""
    data = {}

    def make_settings(out="out", kind="folder", stream=True, parallel="ddp", **options):
        if kind not in data:
            data[kind] = write_images(tmp_path, kind)
        phase = Phase((str(data[kind]),), 64, batch=2, accumulate=2, steps=STEPS, learning_rate=1e-3)
        settings = TrainingSettings(
            str(checkpoint), str(tmp_path / out), (phase,), dtype="float32", method=Method(rank=2), stream=stream
        )
        settings = settings if stream else replace(settings, cache=str(encoded))
        return check_settings(
            replace(settings, parallel=Parallel(parallel), save_every=100, caption_dropout=0.3, **options)
        )

    return make_settings


def at_step(step, action):
    """A report that calls `action` after the step."""

    def report(line):
        if line.get("loss") and line["step"] == step:
            action()

    return report


def cut(file):
    # A tar keeps only its first header.
    file.write_bytes(file.read_bytes()[: 512 if file.suffix == ".tar" else file.stat().st_size // 2])


def garble(file):
    file.write_bytes(b"not an image" + bytes(file.stat().st_size - 12))


def change_pixels(file):
    """Damage the compressed pixels behind an intact header."""
    data = file.read_bytes()
    file.write_bytes(data[:60] + bytes(255 for _ in data[60:-12]) + data[-12:])


def become_folder(file):
    file.unlink()
    file.mkdir()


def become_link_to_itself(file):
    file.unlink()
    file.symlink_to(file)


DAMAGES = {
    "cut": cut,
    "empty": lambda file: file.write_bytes(b""),
    "removed": lambda file: file.unlink(),
    "text": garble,
    "pixels": change_pixels,
    "folder": become_folder,
    "link": become_link_to_itself,
}


def damage_images(data, damage):
    for file in [file for file in data.rglob("*") if file.suffix in (".png", ".tar")]:
        damage(file)


def restore(data, kept):
    shutil.rmtree(data)
    shutil.copytree(kept, data)


@pytest.fixture(scope="module")
def wholes():
    """Results of runs that never failed, by settings without folders and number of ranks."""
    return {}


def results(out):
    """Return the log of a run, and the tensors of its newest state and of the weights in it."""
    tensors = {}
    for file in sorted(newest(out).rglob("*.safetensors")):
        for name, value in load_file(file).items():
            # Under FSDP each rank writes its rows. Under DDP any rank may write what all ranks have.
            tensors[f"{name} in {file.name}" if name in tensors else name] = value
    return lines_of(out), tensors


@pytest.fixture
def check_resumed(wholes):
    """A function that asserts that the state of the failed step exists, and that the run ends as one that never
    failed."""

    def check(settings, ranks=1, step=FAILING):
        assert newest(settings.out).name == f"step-{step:07d}"
        run(settings, ranks)
        key = (
            repr(replace(settings, out="", phase=(replace(settings.phase[0], data=()),))),
            Path(settings.phase[0].data[0]).name,
            ranks,
        )
        if key not in wholes:
            unbroken = replace(settings, out=f"{settings.out}-whole")
            run(unbroken, ranks)
            wholes[key] = results(unbroken.out)
        lines, tensors = results(settings.out)
        assert lines == wholes[key][0] and same(tensors, wholes[key][1])

    return check


def failing_step(settings):
    """Return the step that damage after step FAILING has ended. A thread may have read the next step before that."""
    step = int(newest(settings.out).name.removeprefix("step-"))
    assert step in (FAILING, FAILING + 1)
    return step


# One process that a launcher has started
LAUNCHED = "one"


def run(settings, ranks=1):
    if ranks == 1:
        trainer.train(settings)
    else:
        results_of(1 if ranks == LAUNCHED else ranks, lambda this: str(trainer.train(settings, ranks=this)))


def fail(settings, ranks, report=lambda line: None, before=lambda rank: None):
    """Return the class and the message of the error that each rank ends with."""
    if ranks == 1:
        before(0)
        with pytest.raises(BaseException) as raised:
            trainer.train(settings, report)
        return [(type(raised.value).__name__, str(raised.value))]

    def work(this):
        before(this.rank)
        trainer.train(settings, report, ranks=this)

    return [outcome[:2] for outcome in outcomes(ranks, work)]


RANKS = pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.slow), 2])


@RANKS
@pytest.mark.parametrize(
    ("kind", "damage"),
    [
        ("folder", "cut"),
        *(pytest.param("folder", name, marks=pytest.mark.slow) for name in DAMAGES if name != "cut"),
        *(pytest.param("tars", name, marks=pytest.mark.slow) for name in ("cut", "empty", "removed")),
    ],
)
def test_images_that_break_in_a_streamed_run_lose_no_step(make, check_resumed, tmp_path, kind, damage, ranks):
    settings = make(kind=kind)
    data = Path(settings.phase[0].data[0])
    shutil.copytree(data, tmp_path / "copy")
    report = at_step(FAILING, lambda: damage_images(data, DAMAGES[damage]))
    errors = fail(settings, ranks, report)
    restore(data, tmp_path / "copy")
    assert {kind for kind, _ in errors} <= {"ReadError", "MissingFileError", "InputError"}, errors
    # four images in a step, of which one error names all
    assert all("also 3 more" in text and text.count(".png") == 4 for _, text in errors), errors
    check_resumed(settings, ranks, failing_step(settings))


@pytest.mark.parametrize(
    ("part", "damage", "ranks"),
    [
        ("latents", "empty", 2),
        ("texts", "empty", 1),
        *(pytest.param("latents", damage, 1, marks=pytest.mark.slow) for damage in ("empty", "cut", "removed")),
        *(pytest.param("texts", damage, 2, marks=pytest.mark.slow) for damage in ("empty", "cut", "removed")),
    ],
)
def test_a_cache_that_breaks_in_a_run_loses_no_step(make, check_resumed, part, damage, ranks):
    settings = make(stream=False, cache="")

    def damage_cache():
        for file in (Path(settings.out) / "cache" / part).rglob("*.safetensors"):
            DAMAGES[damage](file)

    errors = fail(settings, ranks, at_step(FAILING, damage_cache))
    assert all(kind in ("ReadError", "TrainingError") and "cache: " in text for kind, text in errors), errors
    check_resumed(settings, ranks, failing_step(settings))


def after_calls(function, number, action):
    """Return `function`, which calls `action` on its result in the call with that number, from 1 on."""
    calls = []

    def changed(*values, **options):
        calls.append(1)
        result = function(*values, **options)
        return action(result) if len(calls) == number else result

    return changed


def raising(error):
    def action(result):
        raise error

    return action


def raise_in_backward(loss):
    def hook(gradient):
        raise torch.OutOfMemoryError("the gradients do not fit")

    loss.register_hook(hook)
    return loss


def spoil_gradient(loss):
    loss.register_hook(lambda gradient: gradient * float("nan"))
    return loss


FAILURES = {
    "memory in the forward": raising(torch.OutOfMemoryError("the activations do not fit")),
    "memory of the host": raising(MemoryError("no memory")),
    "memory in the backward": raise_in_backward,
    "interrupt": raising(KeyboardInterrupt()),
    "bug": raising(ZeroDivisionError("a bug")),
    "loss": lambda loss: loss * float("nan"),
    "infinite loss": lambda loss: loss + float("inf"),
    "gradient": spoil_gradient,
}
# The second microbatch of the step. A step has two.
CALL = 2 * FAILING + 2


@pytest.mark.parametrize(
    ("failure", "call"), [*((failure, CALL) for failure in FAILURES), ("memory in the backward", CALL - 1)]
)
def test_a_failure_before_the_optimizer_loses_no_step(make, check_resumed, monkeypatch, failure, call):
    settings = make(stream=False)
    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "batch_loss", after_calls(Trainer.batch_loss, call, FAILURES[failure]))
        ((kind, text),) = fail(settings, 1)
    if "loss" in failure or failure == "gradient":
        assert kind == "TrainingError" and f"in step {FAILING} the " in text and ".png" in text
    check_resumed(settings)


@pytest.mark.parametrize("method", [Method("controlnet", blocks=1), Method("full", weights="bfloat16")])
def test_a_failure_loses_no_step_whatever_is_trained(make, check_resumed, tmp_path, monkeypatch, method):
    settings = replace(make(stream=False), method=method, dtype=method.weights)
    write_pictures(tmp_path / "loose", IMAGES, controls=True)
    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "batch_loss", after_calls(Trainer.batch_loss, CALL, raise_in_backward))
        fail(settings, 1)
    check_resumed(settings)


def test_a_failed_step_frees_its_tensors_before_the_state_is_saved(make, monkeypatch):
    import weakref

    settings, alive = make(stream=False), []

    def keep(loss):
        big = torch.zeros(1000, requires_grad=True)
        alive.append(weakref.ref(big))
        # The graph of the loss holds `big`.
        return raise_in_backward(loss + (big * big).sum())

    real = Trainer.export
    at_save = []

    def export(*values):
        at_save.append([reference() is not None for reference in alive])
        return real(*values)

    monkeypatch.setattr(Trainer, "batch_loss", after_calls(Trainer.batch_loss, CALL, keep))
    monkeypatch.setattr(Trainer, "export", export)
    fail(settings, 1)
    assert at_save == [[False]]


def test_a_failure_inside_the_optimizer_saves_nothing(make, check_resumed, monkeypatch):
    settings = replace(make(stream=False), save_every=2)
    real = optimizers.step_optimizer
    with monkeypatch.context() as patch:
        patch.setattr(optimizers, "step_optimizer", after_calls(real, 4, raising(MemoryError("half a step"))))
        fail(settings, 1)
    check_resumed(settings, step=2)


def test_an_interrupt_while_averages_are_replaced_by_the_weights_saves_nothing(make, check_resumed, monkeypatch):
    optimizer = replace(make().optimizer, ema=0.9)
    settings = replace(make(stream=False, optimizer=optimizer, validation=Validation(2, share=0.25)), save_every=1)
    real, calls = optimizers.fill, []

    def fill(targets, values):
        calls.append(1)
        # Validations are before step 0 and after step 2. They and each save fill the parameters twice.
        if len(calls) == 6:
            real({0: targets[0]}, values)
            raise KeyboardInterrupt
        real(targets, values)

    with monkeypatch.context() as patch:
        patch.setattr(optimizers, "fill", fill)
        fail(settings, 1)
    check_resumed(settings, step=1)


FSDP = {"stream": False, "parallel": "fsdp"}
NEEDS_NEW_TORCH = pytest.mark.skipif(OLD, reason="FSDP2 needs torch 2.9")
NOT_FINITE = ("TrainingError: .*not finite",) * 2
# What fails on the second of two ranks: the settings, a function, the number of its call there, the failure, and the
# errors of both ranks. A step has one microbatch of two images, and DDP computes one more at the start.
ON_ONE_RANK = [
    ({}, cache, "read_image", 2 * FAILING + 2, raising(ReadError("the disk is away")), ("ReadError: the disk",) * 2),
    ({}, cache, "encode_images", 2 * FAILING + 3, FAILURES["interrupt"], ("KeyboardInterrupt",) * 2),
    *(
        (
            {"stream": False},
            Trainer,
            "batch_loss",
            FAILING + 2,
            FAILURES[name],
            (r"TrainingError: training: rank 1 has failed \(", error),
        )
        for name, error in (
            ("memory in the forward", ".*: the activations do not fit"),
            ("bug", ".*: a bug"),
            ("loss", f".*in step {FAILING}"),
        )
    ),
    # The ranks sum their gradients, so all have the same.
    ({"stream": False}, Trainer, "batch_loss", FAILING + 2, FAILURES["gradient"], NOT_FINITE),
    (FSDP, Trainer, "batch_loss", FAILING + 1, FAILURES["loss"], ("TrainingError: ",) * 2),
    (FSDP, Trainer, "batch_loss", FAILING + 1, FAILURES["gradient"], NOT_FINITE),
    ({"parallel": "fsdp"}, cache, "encode_images", 2 * FAILING + 1, FAILURES["interrupt"], ("KeyboardInterrupt",) * 2),
]
# A bug and a loss take the way of the memory, and the last two take ways of others.
SLOW_CASES = (3, 4, 7, 8)


@pytest.mark.parametrize(
    ("options", "owner", "function", "call", "failure", "errors"),
    [
        pytest.param(
            *case,
            marks=[pytest.mark.slow] * (number in SLOW_CASES) + [NEEDS_NEW_TORCH] * (case[0].get("parallel") == "fsdp"),
        )
        for number, case in enumerate(ON_ONE_RANK)
    ],
)
def test_a_failure_on_one_of_two_ranks_loses_no_step(
    make, check_resumed, monkeypatch, options, owner, function, call, failure, errors
):
    settings = make(**options)

    def break_second_rank(rank):
        if rank == 1:
            monkeypatch.setattr(owner, function, after_calls(getattr(owner, function), call, failure))

    for outcome, expected in zip(fail(settings, 2, before=break_second_rank), errors, strict=True):
        assert re.match(expected, ": ".join(outcome)), outcome
    check_resumed(settings, 2)


@NEEDS_NEW_TORCH
@pytest.mark.parametrize("method", [pytest.param(Method(rank=2), marks=pytest.mark.slow), Method("full")])
def test_a_failure_inside_a_sharded_forward_of_one_rank_loses_no_step(make, check_resumed, monkeypatch, method):
    settings = make(stream=False, parallel="fsdp", method=method)

    real = Trainer.set_up

    def set_up_failing(self, *values):
        real(self, *values)
        calls = []

        def count(*_):
            calls.append(1)
            # Gradient checkpointing runs each block twice, in two microbatches a step.
            if len(calls) == 4 * FAILING + 3:
                raise torch.OutOfMemoryError("a block does not fit")

        self.transformer.transformer_blocks[-1].register_forward_pre_hook(count)

    def work(ranks):
        monkeypatch.setattr(Trainer, "set_up", set_up_failing)
        trainer.train(settings, ranks=ranks)

    ((kind, text, _),) = outcomes(1, work)
    assert kind == "TrainingError" and "a block does not fit" in text
    check_resumed(settings, LAUNCHED)


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_broken_image_is_named_again_by_each_start_of_a_streamed_run_and_the_state_stays(make, tmp_path, ranks):
    settings = make()
    data = Path(settings.phase[0].data[0])
    shutil.copytree(data, tmp_path / "copy")
    fail(settings, ranks, at_step(FAILING, lambda: damage_images(data, cut)))
    state = {file.name: file.read_bytes() for file in newest(settings.out).iterdir() if file.is_file()}
    for _ in range(2):
        errors = fail(settings, ranks)
        assert all("; also " in text for _, text in errors), errors
        assert {file.name: file.read_bytes() for file in newest(settings.out).iterdir() if file.is_file()} == state


@pytest.mark.parametrize(("failure", "text"), [("bug", "a bug"), ("interrupt", "KeyboardInterrupt")])
def test_the_error_of_a_step_is_in_the_log_where_its_state_cannot_be_saved(make, monkeypatch, caplog, failure, text):
    settings = make(stream=False)

    def full_disk(*values):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Trainer, "export", full_disk)
    monkeypatch.setattr(Trainer, "batch_loss", after_calls(Trainer.batch_loss, CALL, FAILURES[failure]))
    with pytest.raises(OSError, match="No space left on device"):
        trainer.train(settings)
    assert text in [record.getMessage() for record in caplog.records]


def test_a_state_that_cannot_be_put_in_its_place_loses_no_later_step(make, check_resumed, monkeypatch):
    settings = replace(make(stream=False), save_every=2)
    real, calls = states.write_document, []

    def write_document(*values):
        calls.append(1)
        if len(calls) == 1:
            raise OSError(28, "No space left on device")
        real(*values)

    with monkeypatch.context() as patch:
        patch.setattr(states, "write_document", write_document)
        ((kind, text),) = fail(settings, 1)
    assert kind == "OutputError" and "No space left" in text
    ((step, _),) = find_states(Path(settings.out))
    assert step in (3, 4)
    check_resumed(settings, step=step)


BROKEN = (1, 4, 6)


def break_three(data):
    """Break three images in different ways; return their names."""
    files = sorted(data.glob("*.png"))
    for index, damage in zip(BROKEN, (cut, change_pixels, lambda file: file.write_bytes(b"")), strict=True):
        damage(files[index])
    return [files[index].name for index in BROKEN]


def test_one_error_names_all_broken_images_of_a_data_set(make):
    settings = make(stream=False)
    names = break_three(Path(settings.phase[0].data[0]))
    for class_name, text in fail(settings, 2):
        assert class_name == "ReadError" and all(name in text for name in names), text
        assert "\n" not in text and not find_states(Path(settings.out))


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_skip_broken_trains_on_the_other_images_as_if_there_were_no_others(make, tmp_path, caplog, ranks):
    settings = make(stream=False, skip_broken=True)
    data = Path(settings.phase[0].data[0])
    names = break_three(data)
    good = shutil.copytree(data, tmp_path / "good")
    for name in names:
        (good / name).unlink()
        (good / name).with_suffix(".txt").unlink()
    other = replace(
        settings, out=f"{settings.out}-good", phase=(replace(settings.phase[0], data=(str(good),)),), skip_broken=False
    )
    run(settings, ranks)
    run(other, ranks)
    (lines, tensors), (expected_lines, expected) = results(settings.out), results(other.out)
    assert lines == expected_lines and same(tensors, expected)
    if ranks == 1:
        said = [record.getMessage() for record in caplog.records if "skip_broken leaves out" in record.getMessage()]
        assert all(any(name in line for line in said) for name in names), caplog.text


def test_skip_broken_leaves_out_the_same_images_on_machines_with_other_paths(make, tmp_path):
    settings = make(skip_broken=True, validation=Validation(every=STEPS, share=0.5))
    data = Path(settings.phase[0].data[0])
    # Each rank reads every second held-out image, so each of them finds some of these.
    for file in sorted(data.glob("*.png"))[:5]:
        change_pixels(file)
    elsewhere = shutil.copytree(data, tmp_path / "elsewhere")
    moved = replace(settings, phase=(replace(settings.phase[0], data=(str(elsewhere),)),))
    results_of(2, lambda this: str(trainer.train(moved if this.rank else settings, ranks=this)))
    alike = replace(settings, out=f"{settings.out}-alike")
    run(alike, 2)
    (lines, tensors), (expected_lines, expected) = results(settings.out), results(alike.out)
    assert lines == expected_lines and same(tensors, expected)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_streamed_step_of_which_no_image_can_be_read_changes_no_weight(make, ranks):
    settings = make(skip_broken=True)
    # Each step has one image for each rank. With two ranks, two of eight images can be read.
    phase = replace(settings.phase[0], batch=ranks, accumulate=1, steps=None, epochs=1)
    settings = replace(settings, phase=(phase,), save_every=1, keep=100)
    files = sorted(Path(phase.data[0]).glob("*.png"))
    for index in BROKEN[:2] if ranks == 1 else range(2, IMAGES):
        change_pixels(files[index])
    run(settings, ranks)
    trained = {line["step"]: line["images"] for line in lines_of(settings.out)}
    assert sum(trained.values()) == (IMAGES - 2 if ranks == 1 else 2)
    folders = dict(find_states(Path(settings.out)))
    weights = {step: load_file(next(folder.glob("*.safetensors"))) for step, folder in folders.items()}
    assert len(weights) == IMAGES // ranks > len(trained)
    for step in range(2, len(weights) + 1):
        assert same(weights[step], weights[step - 1]) == (step not in trained)


def test_skip_broken_leaves_out_an_image_whose_mask_or_control_image_is_broken(make, tmp_path, caplog):
    write_pictures(tmp_path / "loose", IMAGES, controls=True)
    settings = make(stream=False, skip_broken=True, method=Method("controlnet", blocks=1))
    files = sorted((tmp_path / "loose").glob("*[0-9].png"))
    shutil.copy(files[2], tmp_path / "loose" / f"{files[2].stem}-mask.png")
    cut(tmp_path / "loose" / f"{files[2].stem}-mask.png")
    cut(tmp_path / "loose" / f"{files[5].stem}-control.png")
    trainer.train(settings)
    assert f"{files[2].name} (mask), {files[5].name} (control image)" in caplog.text


def test_skip_broken_leaves_out_the_broken_images_of_a_streamed_step(make, caplog):
    """The loss and the gradients are the mean of the other images."""
    settings = make(skip_broken=True, validation=Validation(every=2, share=0.25))
    data = Path(settings.phase[0].data[0])
    files = sorted(data.glob("*.png"))
    for index in BROKEN:
        cut(files[index])
    run(settings, 2)
    lines = [line for line in lines_of(settings.out) if "loss" in line]
    assert len(lines) == STEPS and all(0 < line["loss"] < 100 for line in lines)
    alone = replace(settings, out=f"{settings.out}-alone")
    run(alone)
    assert all(files[index].name in caplog.text for index in BROKEN)
    for line, other in zip(lines, [line for line in lines_of(alone.out) if "loss" in line], strict=True):
        assert line["loss"] == pytest.approx(other["loss"], rel=1e-4)
        assert line["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-3)


def test_a_streamed_step_without_its_broken_images_is_the_step_of_the_others(make):
    """Indices decide about noise, so the same indices without the broken ones are the reference."""
    from trainers import make_trainer, take_step

    from sana_core.training.schedule import TrainProgress

    settings = make(skip_broken=True)
    files = sorted(Path(settings.phase[0].data[0]).glob("*.png"))
    with torch.no_grad():
        prepared = Trainer(settings)
        prepared.prepare_data()
    (data,) = prepared.data
    errors = []
    for group in ([[0, 1], [2, 3], [4, 5]], [[0], [2, 3]]):
        state = make_trainer(Trainer(settings).load_base(), 3.0, settings)
        errors.append(take_step(state, data, group, TrainProgress(), 1e-3))
        errors.append({name: value.detach().clone() for name, value in state.parameters.items()})
    for index in (1, 4, 5):
        cut(files[index])
    state = make_trainer(Trainer(settings).load_base(), 3.0, settings)
    again = take_step(state, data, [[0, 1], [2, 3], [4, 5]], TrainProgress(), 1e-3)
    assert again == errors[2] != errors[0]
    assert all(torch.equal(value, errors[3][name]) for name, value in state.parameters.items())


def test_skip_broken_refuses_a_step_and_a_data_set_of_which_nothing_is_left(make, tmp_path):
    streamed, cached = make(skip_broken=True), make("cached", stream=False, skip_broken=True)
    data = Path(streamed.phase[0].data[0])
    damage_images(data, change_pixels)
    with pytest.raises(SanaError, match="also 3 more"):
        trainer.train(streamed)
    with pytest.raises(InputError, match=r"^dataset: phase 1 has no image that can be read"):
        trainer.train(cached)


@pytest.mark.parametrize("fault", ["caption", "tar", "black mask", "folder"])
def test_skip_broken_leaves_out_nothing_but_images_that_cannot_be_read(make, tmp_path, fault):
    settings = make(kind="tars" if fault == "tar" else "folder", stream=False, skip_broken=True)
    data = Path(settings.phase[0].data[0])
    if fault == "caption":
        next(data.glob("*.txt")).unlink()
    elif fault == "tar":
        cut(next(data.glob("*.tar")))
    elif fault == "black mask":
        from PIL import Image

        file = next(data.glob("*.png"))
        Image.new("L", Image.open(file).size).save(data / f"{file.stem}-mask.png")
    else:
        (data / "inner.tar.gz").write_bytes(b"x")
    with pytest.raises(SanaError):
        trainer.train(settings)


def test_a_missing_image_is_named_and_a_run_goes_on_without_it(make, caplog):
    settings = make(stream=False)
    data = Path(settings.phase[0].data[0])
    lines = [f'{{"file_name": "{file.name}", "text": "a shape"}}\n' for file in sorted(data.glob("*.png"))]
    (data / "metadata.jsonl").write_text("".join(lines))
    gone = sorted(data.glob("*.png"))[3]
    gone.unlink()
    with pytest.raises(MissingFileError, match=gone.name):
        trainer.train(settings)
    trainer.train(replace(settings, skip_broken=True))
    assert "leaves out 1 images: metadata.jsonl line 4" in caplog.text or gone.name in caplog.text


def test_other_faults_of_a_data_set_name_broken_images_as_well(tmp_path, monkeypatch):
    write_pictures(tmp_path / "data", 4)
    (tmp_path / "data" / "1-0.txt").unlink()
    cut(tmp_path / "data" / "1-2.png")
    with pytest.raises(InputError, match=r"^1-0.png: has no caption.*; also 1 more .*: 1-2.png$"):
        dataset.read_dataset(tmp_path / "data")
    # A large data set is not decoded for that.
    monkeypatch.setattr(dataset, "PIXEL_CHECK_SECONDS", -1.0)
    with pytest.raises(
        InputError, match=r"^1-0.png: has no caption, expected a text file .*; write one, or set caption "
    ):
        dataset.read_dataset(tmp_path / "data")


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_validation_loss_that_is_not_finite_ends_the_run_and_names_the_image(make, ranks, monkeypatch):
    settings = make(stream=False, validation=Validation(every=2, share=0.25))
    image_loss = Trainer.image_loss

    def fail_at_step_2(run, batch, noise, times):
        names.append(batch.names[0])
        return float("nan") if run.progress.step == 2 else image_loss(run, batch, noise, times)

    names = []
    monkeypatch.setattr(Trainer, "image_loss", fail_at_step_2)
    for class_name, text in fail(settings, ranks):
        assert class_name == "TrainingError" and "after step 2 the validation loss of" in text, text
        assert ranks > 1 or names[0] in text
    ((step, folder),) = find_states(Path(settings.out))
    assert step == 2 and (states.read_document(folder).best or states.Best(0.0, 0, 0, 0.0)).loss < 100


@pytest.mark.parametrize("skip", [pytest.param(False, marks=pytest.mark.slow), True])
def test_an_idle_rank_that_cannot_read_the_image_of_another_changes_nothing(make, tmp_path, skip):
    """Three batches for two ranks: in the second round, rank 1 computes the first image for company."""
    settings = make(skip_broken=skip)
    phase = replace(settings.phase[0], batch=1, accumulate=3, steps=1)
    settings = replace(settings, phase=(phase,))
    data, elsewhere = Path(phase.data[0]), tmp_path / "elsewhere"
    shutil.copytree(data, elsewhere)
    (first, *_), *_ = schedule.epoch_steps(phase, prepared(settings), settings.seed, 0)[0]
    change_pixels(elsewhere / prepared(settings).samples[first].name)
    moved = replace(settings, phase=(replace(phase, data=(str(elsewhere),)),))
    results_of(2, lambda this: str(trainer.train(moved if this.rank else settings, ranks=this)))
    alike = replace(settings, out=f"{settings.out}-alike")
    run(alike, 2)
    assert results(settings.out)[0] == results(alike.out)[0]


def prepared(settings):
    """Return the data of the first phase."""
    with torch.no_grad():
        run = Trainer(replace(settings, out=f"{settings.out}-prepared"))
        run.prepare_data()
    return run.data[0]


def test_a_run_whose_folder_another_run_has_taken_says_so(make, monkeypatch):
    """The other run has removed this run's folder for unfinished files, so the finished steps cannot be saved."""
    settings, holds = make(stream=False), []
    monkeypatch.setattr(trainer, "hold", lambda folder: holds.append(hold(folder)) or taken(holds[0]))

    @contextmanager
    def taken(context):
        with context as folder_hold:
            holds.append(folder_hold)
            yield folder_hold

    def take():
        shutil.rmtree(holds[1].run)
        holds[1].lost.set()

    ((class_name, text),) = fail(settings, 1, at_step(FAILING, take))
    assert class_name == "InUseError" and "another run has taken" in text, text


def test_a_report_that_fails_at_the_last_step_ends_all_ranks(make):
    def refuse():
        raise ValueError("the display is gone")

    (first, _), (second, text) = fail(make(stream=False), 2, at_step(STEPS, refuse))
    assert (first, second) == ("ValueError", "TrainingError") and "the display is gone" in text
