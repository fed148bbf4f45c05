"""A resumed run equals an uninterrupted one to the bit, with its losses and its order of images."""

import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from checkpoints import CHECKPOINTS, trained_on_both
from pictures import write_pictures
from PIL import Image
from trained import Stopped, last_state, lines_of, newest, same, stopping_after

from sana_core.errors import CheckpointError, InputError, TrainingError
from sana_core.training import cache, loss, optimizers, trainer
from sana_core.training.settings import Loss, Method, Optimizer, Phase, TrainingSettings, Validation, check_settings
from sana_core.training.states import describe_validation, find_states


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Pictures, and a cache that all runs here share."""
    folder = tmp_path_factory.mktemp("training")
    write_pictures(folder / "pictures", 7, controls=True)
    return folder


@pytest.fixture
def settings(folder, tmp_path, checkpoint):
    """A function of overrides: six steps on seven pictures of which one or more are held out."""

    def make(out="out", steps=6, data=folder / "pictures", phases=1, varied=None, **options):
        phase = Phase((str(data),), 64, batch=2, accumulate=2, steps=steps, learning_rate=1e-3, warmup=2)
        phase = replace(phase, regularisation=(str(data),), **varied) if varied else phase
        values = {"dtype": "float32", "save_every": 2, "caption_dropout": 0.3, "method": Method(rank=2), **options}
        values.setdefault("validation", Validation(every=3, share=0.3))
        cache = str(folder / "cache")
        return check_settings(
            TrainingSettings(str(checkpoint), str(tmp_path / out), (phase,) * phases, cache=cache, **values)
        )

    return make


WAYS = {
    "dora, average": {"method": Method("dora", rank=2, targets="both"), "optimizer": Optimizer(ema=0.9)},
    "lora, dropout on some layers": {
        "method": Method(rank=2, targets="both", layers=("*.1.*", "*.attn1.*"), dropout=0.3),
        "loss": Loss(times="mode"),
    },
    "lora, all variants": {
        "varied": {"flip": True, "crops": 3, "repeats": (2,), "tag_orders": 2, "weights": (0.5,), "resolutions": (96,)}
    },
    "lokr, came": {"method": Method("lokr", rank=2), "optimizer": Optimizer("came8bit")},
    "full in bf16": {"method": Method("full", weights="bfloat16"), "dtype": "bfloat16", "optimizer": Optimizer("came")},
    "controlnet": {"method": Method("controlnet", blocks=2), "optimizer": Optimizer(ema=0.9)},
    "controlnet, mixed": {"method": Method("controlnet", blocks=2), "dtype": "bfloat16"},
    "full": {"method": Method("full"), "checkpoint_gradients": False, "phases": 2, "steps": 3},
}


# Each of these combines features that other rows have separately.
TOGETHER = ("lora, all variants", "full in bf16", "controlnet, mixed")


@pytest.mark.parametrize("way", [pytest.param(way, marks=() if way in TOGETHER else pytest.mark.slow) for way in WAYS])
def test_a_run_that_was_stopped_goes_on_as_if_it_never_was(settings, way):
    uninterrupted, broken = settings("whole", **WAYS[way]), settings("broken", **WAYS[way])
    trainer.train(uninterrupted)
    for steps in (1, 3, 1):
        report, poll = stopping_after(steps)
        with pytest.raises(Stopped):
            trainer.train(broken, report, poll=poll)
    trainer.train(broken)
    assert lines_of(broken.out) == lines_of(uninterrupted.out)
    assert [line["step"] for line in lines_of(uninterrupted.out) if "loss" in line] == [1, 2, 3, 4, 5, 6]
    assert same(last_state(uninterrupted.out), last_state(broken.out))


@pytest.mark.parametrize(
    ("method", "reference"), [(Method(rank=2), "diffusers"), (Method("controlnet", blocks=3), "nvidia")]
)
def test_gradients_kept_or_computed_again_are_the_same(settings, method, reference):
    options = {"method": method, "reference": reference, "steps": 3}
    saved, again = settings("kept", checkpoint_gradients=False, **options), settings("again", **options)
    trainer.train(saved)
    trainer.train(again)
    assert lines_of(saved.out) == lines_of(again.out) and same(last_state(saved.out), last_state(again.out))


def test_dropout_is_refused_where_checkpointing_would_repeat_a_block_with_another_one(settings, monkeypatch):
    """torch restores the random state of a GPU only if its module has `_initialized`, and repeats the dropout then."""
    assert hasattr(torch.cuda, "_initialized") and hasattr(torch.xpu, "_initialized")
    assert not hasattr(torch.mps, "_initialized")
    monkeypatch.setattr("sana_core.runtime.accelerator.current_accelerator", lambda: torch.device("mps"))
    run_settings = settings(method=Method(rank=2, dropout=0.3))
    with pytest.raises(InputError, match=r"^dropout: got 0.3 with checkpoint_gradients on Apple's GPU, .*; set it so"):
        trainer.train(run_settings)
    trainer.check_apple(replace(run_settings, checkpoint_gradients=False))
    trainer.check_apple(settings(method=Method(rank=2)))


@pytest.mark.parametrize("reference", ["diffusers", "nvidia"])
def test_a_dropped_caption_is_masked_as_its_reference_masks_the_negative_prompt(settings, folder, tmp_path, reference):
    longer = tmp_path / "longer"
    shutil.copytree(folder / "pictures", longer)
    for file in longer.glob("*.txt"):
        file.write_text(f"{file.read_text()}, and much more than that")
    losses = []
    for out, data in (("short", folder / "pictures"), ("long", longer)):
        run_settings = settings(out, steps=1, data=data, caption_dropout=1.0, reference=reference)
        trainer.train(run_settings)
        losses += [line["loss"] for line in lines_of(run_settings.out) if "loss" in line]
    # NVIDIA's code masks the negative prompt as the prompt, diffusers' by itself
    assert (losses[0] == pytest.approx(losses[1], rel=1e-5)) == (reference == "diffusers")


def test_the_memory_of_each_encoder_is_returned_once(settings, monkeypatch, tmp_path):
    devices = []
    monkeypatch.setattr(cache, "empty_cache", devices.append)
    run_settings = replace(settings(steps=1, validation=Validation()), cache=str(tmp_path / "cache"))
    trainer.train(run_settings)
    assert devices == 2 * [torch.device("cpu")]
    # With a complete cache neither is loaded.
    trainer.train(replace(run_settings, out=str(tmp_path / "again")))
    assert len(devices) == 2


def test_memory_that_runs_out_turns_checkpointing_on_or_names_what_takes_less(settings, monkeypatch):
    """Without checkpointing the forward of step 1 fails. In the other run, so does the repeated one."""
    calls, predict = [], loss.flow_loss

    def limited(transformer, *words):
        calls.append(transformer.is_gradient_checkpointing)
        if len(calls) > 2 and (not calls[-1] or fails):
            raise torch.OutOfMemoryError("CUDA out of memory")
        return predict(transformer, *words)

    monkeypatch.setattr(trainer, "flow_loss", limited)
    options = {"validation": Validation(), "checkpoint_gradients": False, "steps": 3}
    fails = False
    trainer.train(settings("retried", **options))
    assert calls == [False] * 3 + [True] * 4
    monkeypatch.setattr(trainer, "flow_loss", predict)
    trainer.train(settings("whole", **options))
    for name in lines_of(settings("whole").out)[0].keys() - {"seconds"}:
        retried, uninterrupted = ([line[name] for line in lines_of(settings(out).out)] for out in ("retried", "whole"))
        assert retried == pytest.approx(uninterrupted)
    calls.clear()
    fails = True
    monkeypatch.setattr(trainer, "flow_loss", limited)
    expected = r"memory ran out \(OutOfMemoryError: CUDA out of memory\), step 1 is saved; lower phase.batch "
    with pytest.raises(TrainingError, match=expected):
        trainer.train(settings("failed", **options))
    assert newest(settings("failed").out).name == "step-0000001"


@pytest.mark.parametrize(("limit", "forwards"), [(8, 1), (2, 7)])
def test_a_validation_image_takes_one_forward_or_as_many_as_memory_allows(settings, monkeypatch, limit, forwards):
    """A forward that runs out of memory is repeated in halves: 1 + 2 + 4 forwards."""
    batches, predict = [], loss.flow_loss

    def limited(transformer, x0, *words):
        if not torch.is_grad_enabled():
            batches.append(len(x0))
            if len(x0) > limit:
                raise torch.OutOfMemoryError("CUDA out of memory")
        return predict(transformer, x0, *words)

    monkeypatch.setattr(trainer, "flow_loss", limited)
    run_settings = settings(f"out-{limit}", steps=1, validation=Validation(every=1, share=0.01))
    trainer.train(run_settings)
    assert len(batches) == 2 * forwards and sum(size for size in batches if size <= limit) == 2 * 8
    losses = [line["validation_loss"] for line in lines_of(run_settings.out) if "validation_loss" in line]
    monkeypatch.setattr(trainer, "VALIDATION_POSITIONS", 1)
    one_by_one = replace(run_settings, out=f"{run_settings.out}-one")
    monkeypatch.setattr(trainer, "flow_loss", predict)
    trainer.train(one_by_one)
    expected = [line["validation_loss"] for line in lines_of(one_by_one.out) if "validation_loss" in line]
    assert losses == pytest.approx(expected, rel=1e-5)


def test_full_training_validates_and_saves_without_peft(settings, monkeypatch):
    monkeypatch.setitem(sys.modules, "peft", None)
    run_settings = settings(steps=2, method=Method("full"), validation=Validation(every=1, share=0.3))
    folder = trainer.train(run_settings)
    assert list(folder.glob("*.safetensors"))
    assert [line["step"] for line in lines_of(run_settings.out) if "validation_loss" in line] == [0, 1, 2]


@trained_on_both
@pytest.mark.parametrize("rate", [1e-3, 0.05])
def test_the_best_state_is_kept_and_published_beside_the_last(settings, checkpoint, name, rate):
    run_settings = settings(steps=12, keep=2, validation=Validation(every=2, share=0.3))
    phase = replace(run_settings.phase[0], resolution=128, learning_rate=rate)
    run_settings = replace(run_settings, model=str(CHECKPOINTS[name]), phase=(phase,), cache="")
    lines = []
    file = trainer.train(run_settings, lines.append)
    first, *results = [line for line in lines_of(run_settings.out) if "validation_loss" in line]
    best = min(results, key=lambda line: line["validation_loss"])
    # At a destructive rate the best is an early LoRA, but not step 0, which is no LoRA.
    assert 0 < best["step"] < 12 if rate == 0.05 else best["validation_loss"] < first["validation_loss"]
    worse = best["validation_loss"] >= first["validation_loss"]
    assert lines[-1] == {**best, "first": first["validation_loss"]}
    assert ("lower the learning rate" in describe_validation(lines[-1])) == worse
    states = dict(find_states(Path(run_settings.out)))
    assert set(states) == {10, 12, best["step"]}
    for published, step in ((file, best["step"]), (file.with_name("sana-last.safetensors"), 12)):
        assert published.read_bytes() == (states[step] / "sana.safetensors").read_bytes()


def test_a_phase_that_is_added_goes_on_from_the_end(settings):
    once, twice = settings("once", steps=3, phases=2), settings("added", steps=3)
    trainer.train(once)
    trainer.train(twice)
    trainer.train(replace(twice, phase=once.phase))
    assert same(last_state(once.out), last_state(twice.out))


@pytest.fixture
def run_on(settings, tmp_path):
    """A function that adds images to a run's data, trains until the end of `phase`, and returns its settings."""
    data = tmp_path / "pictures"

    def run(added=0, seed=2, **phase):
        write_pictures(data, added, seed=seed)
        phases = (Phase((str(data),), 64, batch=1, learning_rate=1e-3, **phase),)
        run_settings = replace(settings(), phase=phases, validation=Validation())
        trainer.train(run_settings)
        return run_settings

    return run


def test_pictures_that_are_added_are_learnt_when_the_run_goes_on(run_on):
    for added in (4, 0):
        assert len(lines_of(run_on(added, epochs=1).out)) == 4
    run_settings = run_on(3, seed=3, epochs=2)
    assert [line["step"] for line in lines_of(run_settings.out)] == list(range(1, 12))


def test_an_epoch_whose_pictures_have_changed_begins_again(run_on):
    run_on(4, steps=3)
    run_settings = run_on(4, seed=3, steps=11)
    # All eight images are learnt, not only the five after the third.
    assert [line["epoch"] for line in lines_of(run_settings.out)] == [1] * 11


def test_the_steps_of_all_phases_count_for_rounding_and_for_the_average(settings, monkeypatch):
    seeds, steps = [], []
    step_optimizer, average_decay = optimizers.step_optimizer, optimizers.average_decay
    monkeypatch.setattr(
        optimizers,
        "step_optimizer",
        lambda *arguments: seeds.append(arguments[1].initial_seed()) or step_optimizer(*arguments),
    )
    monkeypatch.setattr(optimizers, "average_decay", lambda ema, step: steps.append(step) or average_decay(ema, step))
    trainer.train(settings(steps=2, phases=2, seed=5, optimizer=Optimizer(ema=0.9)))
    assert seeds == [5, 6, 7, 8] and steps == [0, 1, 2, 3]


@trained_on_both
def test_one_picture_alone_is_learnt_whatever_share_is_held_out(settings, checkpoint, tmp_path, name):
    write_pictures(tmp_path / "one", 1)
    run_settings = settings(data=tmp_path / "one", steps=2, validation=Validation(every=1, share=0.5))
    run_settings = replace(run_settings, model=str(CHECKPOINTS[name]), cache="")
    assert trainer.train(run_settings).is_file()
    assert [("loss" in line, "validation_loss" in line) for line in lines_of(run_settings.out)] == [(True, False)] * 2


def test_a_folder_with_another_run_is_refused(settings):
    trainer.train(settings(steps=1))
    adapters = [{"method": Method(rank=3)}, {"method": Method(rank=2, alpha=8.0)}]
    for change in [*adapters, {"seed": 1}, {"optimizer": Optimizer("came")}]:
        with pytest.raises(InputError, match="but the run in .* has .*; name another folder"):
            trainer.train(settings(steps=4, **change))


def test_the_pictures_of_each_validation_are_shown(settings):
    from PIL import Image

    shown = []
    prompts = ("a red circle", "a blue square")
    run_settings = settings(steps=2, validation=Validation(every=2, prompts=prompts, steps=1, width=64, height=32))
    trainer.train(run_settings, show=lambda step, pictures: shown.append((step, pictures)))
    assert [step for step, _ in shown] == [0, 2]
    for number, picture in enumerate(shown[1][1]):
        file = Image.open(Path(run_settings.out) / "pictures" / f"step-0000002-{number:02d}.png")
        assert picture.shape == (3, 32, 64) and file.getpixel((5, 7)) == tuple(
            ((picture[:, 7, 5] + 1) * 127.5).round().int().tolist()
        )


def test_a_model_without_its_parts_is_refused_before_anything_is_made(settings, checkpoint):
    run_settings = replace(settings(), model=str(checkpoint / "transformer"))
    with pytest.raises(CheckpointError, match="^.*: not SANA's text encoder"):
        trainer.train(run_settings)
    assert not Path(run_settings.out).exists()
    parts = {"text_encoder": str(checkpoint), "autoencoder": str(checkpoint)}
    trainer.train(replace(run_settings, **parts))
    uninterrupted = settings("whole")
    trainer.train(uninterrupted)
    assert lines_of(run_settings.out) == lines_of(uninterrupted.out) and same(
        last_state(run_settings.out), last_state(uninterrupted.out)
    )


@pytest.fixture(scope="module")
def compiled(folder, checkpoint, tmp_path_factory):
    """The settings of a LoRA whose blocks are compiled, and its run of six steps without a stop."""
    phase = Phase((str(folder / "pictures"),), 64, batch=1, steps=6, learning_rate=1e-3)
    run = TrainingSettings(
        str(checkpoint), str(tmp_path_factory.mktemp("compiled") / "whole"), (phase,), cache=str(folder / "cache")
    )
    run = check_settings(replace(run, dtype="float32", save_every=2, method=Method(rank=2), compile="on"))
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    trainer.train(run)
    return run


def test_compiled_blocks_learn_as_blocks_that_are_not(compiled, tmp_path):
    """The captions have many lengths, and the first of the blocks has an input without gradients."""
    assert torch._dynamo.utils.counters["frames"] == {"total": 2, "ok": 2}
    assert not torch._dynamo.utils.counters["graph_break"]
    plain = replace(compiled, out=str(tmp_path / "plain"), compile="off")
    trainer.train(plain)
    steps = zip(lines_of(compiled.out), lines_of(plain.out), strict=True)
    for line, expected in steps:
        assert line["loss"] == pytest.approx(expected["loss"], rel=1e-5)
        assert line["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-3)


def test_a_compiled_run_that_was_stopped_goes_on_as_if_it_never_was(compiled, tmp_path):
    broken = replace(compiled, out=str(tmp_path / "broken"))
    report, poll = stopping_after(3)
    with pytest.raises(Stopped):
        trainer.train(broken, report, poll=poll)
    trainer.train(broken)
    assert lines_of(broken.out) == lines_of(compiled.out)
    assert same(last_state(broken.out), last_state(compiled.out))


def test_without_a_compiler_a_run_goes_on(compiled, tmp_path, caplog):
    plain, broken = (replace(compiled, out=str(tmp_path / name), compile=name) for name in ("off", "on"))
    trainer.train(plain)
    torch._dynamo.reset()
    with torch._inductor.config.patch({"cpp.cxx": ("missing-compiler",), "force_disable_caches": True}):
        trainer.train(broken)
    assert [text for text in caplog.messages if text.startswith("compile: ")]
    assert same(last_state(broken.out), last_state(plain.out))


def test_blocks_are_compiled_for_each_size_and_number_of_images(checkpoint, tmp_path, monkeypatch):
    """More than torch's limit of 8 compilations. The compiler's own part, which takes minutes, is left out."""
    sizes = ((128, 128), (256, 64), (64, 256))
    (tmp_path / "pictures").mkdir()
    for number, size in enumerate(sizes * 3):
        Image.new("RGB", size, (16 * number, 0, 99)).save(tmp_path / "pictures" / f"{number}.png")
        (tmp_path / "pictures" / f"{number}.txt").write_text("a plain colour")
    compile_module = torch.nn.Module.compile
    monkeypatch.setattr(
        torch.nn.Module, "compile", lambda module, **options: compile_module(module, backend="eager", **options)
    )
    phase = Phase((str(tmp_path / "pictures"),), 128, batch=2, steps=len(sizes) * 2)
    run = TrainingSettings(str(checkpoint), str(tmp_path / "out"), (phase,), method=Method(rank=2), compile="on")
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    limit = torch._dynamo.config.recompile_limit
    trainer.train(check_settings(replace(run, dtype="float32")))
    count = 2 * 2 * len(sizes)
    assert torch._dynamo.utils.counters["frames"] == {"total": count, "ok": count}
    assert torch._dynamo.config.recompile_limit == limit
    # The next compiled run must not take this test's code.
    torch._dynamo.reset()
