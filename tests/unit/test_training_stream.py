"""A run that encodes each picture when it is learnt is the run over a cache, and keeps nothing of the pictures."""

import contextlib
import errno
import gc
import shutil
import tarfile
import weakref
from dataclasses import replace
from pathlib import Path

import pytest
from launched import OLD, results_of
from pictures import write_pictures
from PIL import Image
from safetensors.torch import load_file
from trained import difference, lines_of, same

from sana_core.errors import SanaError
from sana_core.training import cache, states, trainer
from sana_core.training.plan import plan_training, read_base
from sana_core.training.settings import Method, Parallel, Phase, TrainingSettings, Validation, check_settings


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Two tars of pictures, some of them with masks and all with control pictures, and nothing beside them."""
    folder = tmp_path_factory.mktemp("streamed")
    for seed in (1, 2):
        write_pictures(folder / "loose", 4, seed=seed, controls=True)
    Image.linear_gradient("L").resize((128, 128)).save(folder / "loose" / "1-2-mask.png")
    (folder / "tars").mkdir()
    for seed in (1, 2):
        with tarfile.open(folder / "tars" / f"{seed}.tar", "w") as archive:
            for file in sorted((folder / "loose").glob(f"{seed}-*")):
                archive.add(file, file.name)
    return folder


@pytest.fixture
def settings(folder, tmp_path, checkpoint):
    def make(out, stream=True, **options):
        phase = Phase((str(folder / "tars"),), 64, batch=2, accumulate=2, steps=4, learning_rate=1e-3)
        values = {"dtype": "float32", "caption_dropout": 0.3, "method": Method(rank=2), **options}
        values.setdefault("validation", Validation(every=2, share=0.3))
        return check_settings(TrainingSettings(str(checkpoint), str(tmp_path / out), (phase,), stream=stream, **values))

    return make


@pytest.mark.parametrize(
    "method", [pytest.param(Method(rank=2), marks=pytest.mark.slow), Method("controlnet", blocks=1)]
)
def test_a_streamed_run_is_the_cached_one_to_the_bit_and_keeps_no_picture(settings, method):
    streamed, cached = settings("streamed", method=method), settings("cached", False, method=method)
    one, other = trainer.train(streamed), trainer.train(cached)
    assert lines_of(streamed.out) == lines_of(cached.out)
    if method.kind == "lora":
        assert same(one, other)
    saved = [
        len(list((Path(run_settings.out) / "cache").rglob("*.safetensors"))) for run_settings in (streamed, cached)
    ]
    # the empty prompt alone
    assert saved[0] == 1 < saved[1]


@pytest.mark.parametrize("ending", ["finished", "a full disk"])
def test_a_streamed_run_frees_its_model_without_the_garbage_collector(settings, monkeypatch, ending):
    """On a GPU the memory would stay taken after a training in ComfyUI."""

    def no_space(*values):
        raise OSError(errno.ENOSPC, "No space left on device")

    models, real = [], trainer.Trainer.set_up

    def set_up(self, transformer, *values):
        models.append(weakref.ref(transformer))
        real(self, transformer, *values)

    monkeypatch.setattr(trainer.Trainer, "set_up", set_up)
    gc.collect()
    gc.disable()
    try:
        if ending == "finished":
            trainer.train(settings("freed", method=Method("full")))
        else:
            monkeypatch.setattr(states, "write_document", no_space)
            with contextlib.suppress(SanaError):
                trainer.train(settings("freed", method=Method("full")))
        assert [model() for model in models] == [None]
    finally:
        gc.enable()


@pytest.mark.parametrize(
    "first, then",
    [
        (True, False),
        pytest.param(True, True, marks=pytest.mark.slow),
        pytest.param(False, True, marks=pytest.mark.slow),
    ],
)
def test_a_streamed_run_goes_on_streamed_or_not(settings, caplog, first, then):
    item = Validation(every=1, share=0.3)
    uninterrupted, broken = settings("whole", validation=item), settings("broken", first, validation=item)
    trainer.train(uninterrupted)
    trainer.train(replace(broken, phase=(replace(broken.phase[0], steps=1),)))
    trainer.train(replace(broken, stream=then))
    assert lines_of(uninterrupted.out) == lines_of(broken.out)
    assert "begins again" not in caplog.text


@pytest.mark.skipif(OLD, reason="FSDP2 needs torch 2.9")
@pytest.mark.parametrize("stream", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_each_rank_reads_and_encodes_its_own_pictures_alone(settings, monkeypatch, stream):
    run_settings = settings("out", stream, parallel=Parallel("fsdp"), validation=Validation())
    plain = settings("plain", stream, validation=Validation())
    calls, real = [], cache.encode_image

    def encode_image(encode, sample, *options):
        calls.append(sample.name)
        return real(encode, sample, *options)

    monkeypatch.setattr(cache, "encode_image", encode_image)

    def both(ranks):
        return str(trainer.train(run_settings, ranks=ranks)), list(calls)

    (path, first), (_, second) = results_of(2, both)
    assert difference(load_file(path), load_file(trainer.train(plain))) < 1e-5
    # 4 steps of 4 pictures, or all 8 once
    assert [len(first), len(second)] == ([8, 8] if stream else [4, 4])
    assert stream or not set(first) & set(second)


def test_the_plan_counts_the_encoders_that_stay(settings):
    streamed, cached = settings("a"), settings("a", False)
    base = read_base(cached)
    weights = 4 * (base.text_parameters + base.autoencoder_parameters)
    (step,), (*_, other) = plan_training(streamed, base).stages, plan_training(cached, base).stages
    assert step.weights == other.weights + weights and step.work >= other.work and step.state == other.state
    shares = [
        plan_training(replace(run_settings, parallel=Parallel("fsdp")), base, 4).stages[-1]
        for run_settings in (streamed, cached)
    ]
    assert shares[0].weights == shares[1].weights + weights


@pytest.mark.parametrize("change", ["resolution", "mask"])
def test_an_epoch_begins_again_if_its_images_are_learned_in_another_way(settings, folder, tmp_path, caplog, change):
    """The order of the batches and the validation's losses depend on resolution, crops and masks."""
    data = shutil.copytree(folder / "loose", tmp_path / "data")
    run_settings = settings("changed")
    phase = replace(run_settings.phase[0], data=(str(data),), batch=1, accumulate=1, steps=1)
    trainer.train(replace(run_settings, phase=(phase,)))
    if change == "resolution":
        phase = replace(phase, resolution=160)
    else:
        (data / "1-2-mask.png").unlink()
    trainer.train(replace(run_settings, phase=(replace(phase, steps=2),)))
    assert "so its epoch begins again" in caplog.text
