"""What becomes of images before they are learnt, and which of their variants an epoch learns."""

import json
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from pictures import write_pictures
from PIL import Image, ImageOps

from sana_core.errors import InputError
from sana_core.runtime.cancellation import no_poll
from sana_core.training import trainer
from sana_core.training.dataset import open_image, read_dataset
from sana_core.training.images import MIDDLE, Crop, choose_bucket, fit_image
from sana_core.training.schedule import choose, epoch_steps, groups_of, make_variants, read_phase
from sana_core.training.settings import Method, Phase, TrainingSettings, Validation, check_settings
from sana_core.training.states import read_log


@pytest.fixture
def phase(tmp_path):
    write_pictures(tmp_path / "own", 3)
    write_pictures(tmp_path / "prior", 4, seed=9)
    return Phase((str(tmp_path / "own"),), 128, steps=1)


def test_a_phase_without_settings_is_its_data_set(phase):
    plain = read_dataset(tmp := phase.data[0])
    samples = make_variants(read_phase(phase, no_poll), phase)
    assert [item._replace(group=0, bucket=(0, 0)) for item in samples] == plain and tmp
    assert groups_of(samples) == {0: [0], 1: [1], 2: [2]}


def test_repeats_weights_sizes_and_as_many_regularisation_images(phase, tmp_path):
    prior = (str(tmp_path / "prior"),)
    run_settings = replace(
        phase, repeats=(2,), weights=(0.5,), regularisation=prior, prior_loss_weight=0.25, resolutions=(64,)
    )
    samples = read_phase(run_settings, no_poll)
    assert len(samples) == (2 * 3 + 6) * 2
    assert Counter((item.bucket, item.prior, item.weight) for item in samples) == {
        ((size, size), is_prior, weight): 6 for size in (128, 64) for is_prior, weight in ((False, 0.5), (True, 0.25))
    }
    # four of them are enough for six
    names = Counter(item.name for item in samples if item.prior and item.bucket == (128, 128))
    assert sorted(names.values()) == [1, 1, 2, 2]


def test_a_crop_and_a_mirror_image_are_pillow_s():
    picture = Image.effect_noise((300, 128), 90).convert("RGB")
    remaining, _ = fit_image(picture, picture.convert("L"), (128, 128), Crop(0.0, 0.3))
    expected = np.asarray(picture.crop((0, 0, 128, 128)), np.float32).transpose(2, 0, 1) / 127.5 - 1
    torch.testing.assert_close(remaining, torch.from_numpy(expected))
    mirrored = fit_image(picture, picture.convert("L"), (128, 128), Crop(mirrored=True))
    other = fit_image(ImageOps.mirror(picture), ImageOps.mirror(picture).convert("L"), (128, 128), MIDDLE)
    for one, two in zip(mirrored, other, strict=True):
        torch.testing.assert_close(one, two)


def test_an_epoch_learns_one_variant_of_each_by_its_share(phase):
    samples = make_variants(read_phase(phase, no_poll), replace(phase, flip=True, crops=2))
    assert len(samples) == 3 * 4 and len({item.crop for item in samples}) == 12
    samples = [item._replace(share=(1, 2, 3, 4)[index % 4]) for index, item in enumerate(samples)]
    drawn = Counter(choose(samples, groups_of(samples)[4], 1, epoch) for epoch in range(4000))
    assert set(drawn) == {4, 5, 6, 7}
    for index, share in zip(range(4, 8), (0.1, 0.2, 0.3, 0.4), strict=True):
        assert drawn[index] / 4000 == pytest.approx(share, abs=0.03)


def test_several_captions_with_weights_and_shuffled_tags(phase, tmp_path):
    folder = tmp_path / "json"
    folder.mkdir()
    Image.new("RGB", (128, 128)).save(folder / "a.png")
    (folder / "a.json").write_text(json.dumps({"captions": ["one, a, b, c", "two"], "weights": [3, 1]}))
    (sample,) = read_dataset(folder)
    assert sample.caption == "one, a, b, c" and sample.captions == (("one, a, b, c", 3.0), ("two", 1.0))
    samples = make_variants([sample], replace(phase, tag_orders=4, keep_tags=1))
    assert sum(item.share for item in samples if item.caption.startswith("one, ")) == pytest.approx(3)
    assert 3 <= len(samples) <= 5 and all(
        sorted(item.caption) in map(sorted, ("one, a, b, c", "two")) for item in samples
    )
    assert len({item.caption for item in samples}) == len(samples)
    for weights in ([1], [1, 0], [1, "x"], "x"):
        (folder / "a.json").write_text(json.dumps({"captions": ["one", "two"], "weights": weights}))
        with pytest.raises(InputError, match=r"^a.json: got invalid weights"):
            read_dataset(folder)


def test_a_data_set_in_the_hub_s_cache_is_read_through_its_links(tmp_path):
    blobs, root = tmp_path / "datasets--x--y" / "blobs", tmp_path / "datasets--x--y" / "snapshots" / "abc"
    blobs.mkdir(parents=True)
    (root / "data").mkdir(parents=True)
    Image.new("RGB", (64, 64)).save(blobs / "1f", "PNG")
    (blobs / "2e").write_text("a black square")
    for name, blob in (("a.png", "1f"), ("a.txt", "2e")):
        (root / "data" / name).symlink_to(f"../../../blobs/{blob}")
    for folder in (root, root / "data"):
        (sample,) = read_dataset(folder)
        assert sample.caption == "a black square" and open_image(sample).size == (64, 64)
    (tmp_path / "secret.txt").write_text("x")
    (root / "data" / "a.txt").unlink()
    (root / "data" / "a.txt").symlink_to(tmp_path / "secret.txt")
    with pytest.raises(InputError, match="leads out of the data set's folder"):
        read_dataset(root)


def test_a_run_learns_every_variant_and_holds_all_of_an_image_out(phase, tmp_path, checkpoint):
    run_settings = replace(
        phase, repeats=(2,), flip=True, resolutions=(160,), regularisation=(str(tmp_path / "prior"),)
    )
    run_settings = replace(run_settings, steps=None, epochs=2, weights=(0.5,), learning_rate=1e-3)
    settings = TrainingSettings(
        str(checkpoint), str(tmp_path / "out"), (run_settings,), dtype="float32", method=Method(rank=2)
    )
    settings = check_settings(replace(settings, validation=Validation(every=100, share=0.3)))
    prepared = trainer.Trainer(settings)
    prepared.prepare_data()
    (data,) = prepared.data
    held = {data.samples[index].name for index in data.held_out}
    assert len(data.held_out) == len(held) and all(data.samples[index].bucket == (128, 128) for index in data.held_out)
    assert not any(data.samples[index].name in held for index in data.learned if not data.samples[index].prior)
    epochs = [
        [item for group in epoch_steps(run_settings, data, 0, epoch) for batch in group for item in batch]
        for epoch in (0, 1)
    ]
    assert epochs[0] != epochs[1] and all(len(item) == len(data.learned) for item in epochs)
    assert {data.samples[item].crop.mirrored for item in epochs[0]} == {True, False}
    assert {data.samples[item].bucket for item in epochs[0]} >= {choose_bucket((128, 128), side) for side in (128, 160)}
    trainer.train(settings)
    assert len([line for line in read_log(tmp_path / "out") if "loss" in line]) == 2 * len(data.learned)
