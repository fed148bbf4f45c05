"""A run of several ranks is saved by all ranks, resumes with more or fewer, and refuses a rank that differs."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
from launched import OLD, outcomes, results_of
from pictures import write_pictures
from safetensors.torch import load_file
from trained import difference, lines_of, newest

from sana_core.commands.convert import convert_checkpoint
from sana_core.training import sharding, trainer
from sana_core.training.settings import Method, Optimizer, Parallel, Phase, TrainingSettings, Validation, check_settings
from sana_core.training.states import find_states, read_log

pytestmark = pytest.mark.skipif(OLD, reason="FSDP2 needs torch 2.9")


@pytest.fixture(scope="module")
def folder(tmp_path_factory, checkpoint):
    """Pictures, and a cache that all runs here share."""
    folder = tmp_path_factory.mktemp("training")
    write_pictures(folder / "pictures", 7)
    return folder


@pytest.fixture
def settings(folder, tmp_path, checkpoint):
    """A function of overrides: four steps on seven pictures of which one or more are held out."""

    def make(out="out", kind="ddp", steps=4, **options):
        data = (str(folder / "pictures"),)
        phase = Phase(data, 64, batch=2, accumulate=2, steps=steps, learning_rate=1e-3, warmup=2)
        values = {"dtype": "float32", "save_every": 2, "caption_dropout": 0.3, "method": Method(rank=2), **options}
        values.setdefault("validation", Validation(every=2, share=0.3))
        paths = {"model": str(checkpoint), "out": str(tmp_path / out), "cache": str(folder / "cache")}
        return check_settings(TrainingSettings(phase=(phase,), parallel=Parallel(kind), **paths, **values))

    return make


def trained(settings, count=1, plain=False):
    """Train on `count` ranks, or with `plain` in a process without a launcher, and return the path of the result."""
    if plain:
        return trainer.train(replace(settings, parallel=Parallel()))
    paths = results_of(count, lambda ranks: trainer.train(settings, ranks=ranks))
    assert len(set(paths)) == 1
    return paths[0]


def result(path):
    files = [path] if path.is_file() else sorted(path.glob("*.safetensors"))
    return {name: item for file in files for name, item in load_file(file).items()}


# adapters, for AdamW's first steps make much of what rounding leaves of gradients near zero, which whole weights have
WAYS = {
    "ddp": {"optimizer": Optimizer(ema=0.9)},
    "fsdp": {"optimizer": Optimizer(ema=0.9)},
    "fsdp_offload": {"method": Method("dora", rank=2, targets="both")},
}


SLOW = [pytest.param(kind, marks=pytest.mark.slow) for kind in ("ddp", "fsdp_offload")]


@pytest.mark.parametrize("kind", ["fsdp", *SLOW])
def test_a_run_goes_on_with_other_ranks_and_ends_as_the_run_of_one_process(settings, kind):
    run_settings = WAYS[kind]
    expected = result(trained(settings("plain", kind, **run_settings), plain=True))
    broken = settings("broken", kind, **run_settings)
    trained(replace(broken, phase=(replace(broken.phase[0], steps=2),)), 2)
    assert len(list((newest(broken.out) / "shards").iterdir())) == 2
    path = trained(broken, 3 if kind == "fsdp" else 1, plain=kind == "ddp")
    assert difference(result(path), expected) < 1e-5
    for one, other in zip(lines_of(broken.out), lines_of(settings("plain").out), strict=True):
        assert one == pytest.approx(other, rel=1e-4, abs=1e-5)


@pytest.mark.slow
def test_a_run_that_went_on_is_the_run_that_was_never_stopped_to_the_bit(settings):
    way = {"kind": "fsdp", "optimizer": Optimizer("came8bit", ema=0.9, clip=1.0), "method": Method("full")}
    uninterrupted, broken = settings("whole", **way), settings("broken", **way)
    first = trained(uninterrupted, 2)
    trained(replace(broken, phase=(replace(broken.phase[0], steps=2),)), 2)
    second = trained(broken, 2)
    assert lines_of(uninterrupted.out) == lines_of(broken.out) and difference(result(first), result(second)) == 0
    more = replace(broken, phase=(replace(broken.phase[0], steps=6),))
    for outcome in outcomes(3, lambda ranks: trainer.train(more, ranks=ranks)):
        assert outcome[0] == "InputError" and "optimizer: got 8-bit values in 2 shards for 3" in outcome[1]


def test_the_first_rank_alone_reads_the_weights_that_lie_in_shares(settings):
    def where(ranks):
        return [
            trainer.Trainer(run_settings, ranks=ranks).load_base().device.type
            for run_settings in (settings(), settings("a", "fsdp"))
        ]

    assert results_of(2, where) == [["cpu", "cpu"], ["cpu", "meta"]]


@pytest.mark.slow
def test_a_run_of_one_process_goes_on_in_shares(settings):
    run_settings = settings("plain", "fsdp")
    expected = result(trained(settings("whole"), plain=True))
    trained(replace(run_settings, phase=(replace(run_settings.phase[0], steps=2),)), plain=True)
    assert difference(result(trained(run_settings, 2)), expected) < 1e-5


def test_all_weights_become_one_file_and_pictures_are_drawn_on_the_way(settings, tmp_path):
    prompts = Validation(every=2, prompts=("a red circle",), steps=1, width=64, height=32)
    run_settings = settings(kind="fsdp", method=Method("full"), steps=2, validation=prompts)
    path = trained(run_settings, 2)
    drawn = [file.name for file in sorted((Path(run_settings.out) / "pictures").iterdir())]
    assert drawn == ["step-0000000-00.png", "step-0000002-00.png"]
    convert_checkpoint(path, tmp_path / "one.safetensors")
    assert difference(load_file(tmp_path / "one.safetensors"), result(path)) == 0
    # The images equal the images of a run of one process.
    plain = settings("plain", method=Method("full"), steps=2, validation=prompts)
    trained(plain, plain=True)
    first = drawn[0]
    assert (Path(plain.out) / "pictures" / first).read_bytes() == (
        Path(run_settings.out) / "pictures" / first
    ).read_bytes()


def test_a_save_that_one_rank_cannot_end_leaves_the_last_state(settings, monkeypatch):
    run_settings = settings(kind="fsdp")
    real = sharding.save_shards

    def full_disk(layout, tensors, part):
        digests = real(layout, tensors, part)
        if layout.ranks.rank == 1 and part.name == ".state-4.part":
            raise OSError(28, "No space left on device")
        return digests

    monkeypatch.setattr(sharding, "save_shards", full_disk)
    rank_outcomes = outcomes(2, lambda ranks: trainer.train(run_settings, ranks=ranks))
    assert (
        rank_outcomes[1][0] == "OutputError"
        and rank_outcomes[0][0] == "TrainingError"
        and "No space left" in rank_outcomes[0][1]
    )
    assert [step for step, _ in find_states(Path(run_settings.out))] == [2]
    monkeypatch.undo()
    assert difference(result(trained(run_settings, 2)), result(trained(settings("whole", "fsdp"), 2))) == 0


OTHERS = {
    "settings": lambda own: replace(own, seed=1),
    "a phase": lambda own: replace(own, phase=(replace(own.phase[0], learning_rate=2e-3),)),
    "pictures": lambda own: replace(own, phase=(replace(own.phase[0], data=(str(Path(own.out).parent / "other"),)),)),
}
SAID = {
    "settings": r"settings: rank 1 on .* has seed 1, but rank 0 on .* has 0; start all with the same",
    "a phase": "settings: rank 1 on .* has phase 1: learning_rate 0.002, but rank 0 on .* has 0.001",
    "pictures": "data: rank 1 on .* has images .*, but rank 0 on",
}


@pytest.mark.parametrize("what", OTHERS)
def test_a_rank_that_differs_is_refused_by_name_before_the_first_step(settings, what, tmp_path):
    write_pictures(tmp_path / "other", 3, seed=9)
    run_settings = settings()
    other = OTHERS[what](run_settings)
    for outcome in outcomes(2, lambda ranks: trainer.train(other if ranks.rank else run_settings, ranks=ranks)):
        assert outcome[0] == "InputError" and re.search(SAID[what], outcome[1]), outcome
    assert not find_states(Path(run_settings.out))


def test_a_rank_with_other_code_is_refused_by_name(settings, monkeypatch):
    from sana_core.training import ranks as ranks_module

    run_settings, real = settings(), ranks_module.code_versions

    def other(ranks):
        monkeypatch.setattr(ranks_module, "code_versions", lambda: {**real(), "sana_core": str(ranks.rank)})
        return trainer.train(run_settings, ranks=ranks)

    for outcome in outcomes(2, other):
        assert (
            outcome[0] == "InputError" and outcome[1].startswith("code: rank 1 on ") and "has sana_core 1" in outcome[1]
        )


@pytest.mark.slow
def test_what_one_rank_cancels_all_save_and_end(settings):
    uninterrupted, run_settings = (settings(out, "fsdp", steps=8, save_every=100) for out in ("whole", "out"))

    def cancelled(ranks):
        def poll():
            if ranks.rank == 1 and sum("loss" in line for line in read_log(Path(run_settings.out))) >= 3:
                raise KeyboardInterrupt

        return trainer.train(run_settings, poll=poll, ranks=ranks)

    for outcome in outcomes(2, cancelled):
        assert outcome[0] == "KeyboardInterrupt"
    assert 3 <= find_states(Path(run_settings.out))[-1][0] < 8
    assert difference(result(trained(run_settings, 2)), result(trained(uninterrupted, 2))) == 0
    assert lines_of(run_settings.out) == lines_of(uninterrupted.out)
