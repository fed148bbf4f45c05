"""The cache with the bundled VAE and text encoder: it returns their results, and computes each of them once."""

import errno
import json
import multiprocessing
import os
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from data_sets import open_mask
from forked import Forked
from PIL import Image
from setup import ROOT

import sana_core
from sana_core import ExistingFileError, InputError, OutputError, ReadError
from sana_core.training import cache
from sana_core.training.cache import Encoders, ModelIds, Store, build_cache
from sana_core.training.dataset import Faults, open_image, read_dataset
from sana_core.training.images import choose_bucket, fit_image

CHECKPOINT = ROOT / "tests" / "models" / "sana-tiny"
IDS = ModelIds("tiny autoencoder", "tiny encoder")
CAPTIONS = ["a red circle", "a small green triangle at the top left of a black background", "a red circle", ""]
SIZES = [(200, 200), (330, 200), (100, 130), (128, 128)]

pytestmark = pytest.mark.usefixtures("one_thread")


class Models:
    """The bundled VAE and text encoder, which count their calls."""

    def __init__(self, checkpoint=CHECKPOINT):
        self.autoencoder = sana_core.load_autoencoder(checkpoint)
        self.encoder = sana_core.load_text_encoder(checkpoint)
        self.calls = []
        self.fail_at = None

    def count(self, kind):
        self.calls.append(kind)
        if len(self.calls) == self.fail_at:
            raise KeyboardInterrupt

    def encode_pixels(self, pixels):
        self.count("pixels")
        return sana_core.encode_images(self.autoencoder, pixels) * self.autoencoder.config.scaling_factor

    def encode_caption(self, caption, instruction):
        self.count(caption)
        return sana_core.encode_prompts(self.encoder, [caption], instruction)


@pytest.fixture(scope="module")
def loaded():
    return Models()


@pytest.fixture
def models(loaded):
    loaded.calls, loaded.fail_at = [], None
    return loaded


@pytest.fixture
def data(tmp_path):
    return make_data(tmp_path / "data")


def make_data(folder):
    folder.mkdir()
    for number, (size, caption) in enumerate(zip(SIZES, CAPTIONS, strict=True)):
        pixels = np.random.default_rng(number).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{number}.png")
        (folder / f"{number}.txt").write_text(caption)
    Image.fromarray(np.tile(np.arange(200, dtype=np.uint8), (200, 1))).save(folder / "0-mask.png")
    return folder


@pytest.fixture(scope="module")
def prebuilt(loaded, tmp_path_factory):
    folder = tmp_path_factory.mktemp("built")
    build(folder / "cache", make_data(folder / "data"), loaded)
    return folder


@pytest.fixture
def built(prebuilt, tmp_path, models):
    """Images, beside a cache that has all of their entries."""
    shutil.copytree(prebuilt, tmp_path, dirs_exist_ok=True)
    return tmp_path / "data"


def build(folder, data, models, ids=IDS, resolution=128, **options):
    samples = [sample._replace(bucket=choose_bucket(sample.size, resolution)) for sample in read_dataset(data)]
    encode, broken = Encoders(models.encode_pixels, models.encode_caption), {}
    cache = build_cache(samples, Store(folder, folder / "parts"), encode, ids, broken, **options)
    Faults(broken.values()).check()
    return cache


def content(folder):
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def same(one, other):
    for first, second in zip(one, other, strict=True):
        assert torch.equal(first, second) if isinstance(first, torch.Tensor) else first == second


def test_what_is_loaded_is_what_the_models_give_bit_for_bit(tmp_path, data, models):
    seen = []
    cache = build(tmp_path / "cache", data, models, progress=lambda finished, total: seen.append((finished, total)))
    assert seen == [(finished, 9) for finished in range(1, 10)]
    samples = read_dataset(data)
    for indices in ([0, 3], [1], [2], [3, 0], [0]):
        batch = cache.load(indices)
        bucket = choose_bucket(samples[indices[0]].size, 128)
        assert batch.names == [samples[index].name for index in indices]
        assert batch.latents.shape == (len(indices), 32, bucket[1] // 32, bucket[0] // 32)
        assert batch.latents.dtype == torch.float32
        length = int(batch.mask.sum(dim=1).max())
        assert batch.embeds.shape == (len(indices), length, 64) and batch.mask.shape == (len(indices), length)
        for row, index in enumerate(indices):
            pixels, weight = fit_image(open_image(samples[index]), open_mask(samples[index]), bucket)
            assert torch.equal(batch.latents[row], models.encode_pixels(pixels[None])[0])
            embeds, mask = sana_core.encode_prompts(models.encoder, [CAPTIONS[index]])
            assert torch.equal(batch.mask[row], mask[0, :length]) and not mask[0, length:].any()
            tokens = int(mask.sum())
            assert torch.equal(batch.embeds[row, :tokens], embeds[0, :tokens]) and not batch.embeds[row, tokens:].any()
            if batch.weight is not None:
                assert torch.equal(batch.weight[row], torch.ones(1, 4, 4) if weight is None else weight)
        assert (batch.weight is None) == (0 not in indices)
    embeds, mask = sana_core.encode_prompts(models.encoder, [""], instruction=False)
    assert torch.equal(cache.empty["embeds"], embeds[0]) and torch.equal(cache.empty["mask"], mask[0].to(torch.uint8))


def test_the_padding_is_not_stored(tmp_path, built, models):
    cache = build(tmp_path / "cache", built, models)
    tokens = int(cache.load([1]).mask.sum())
    assert Path(cache.texts[1]).stat().st_size < tokens * 64 * 4 + 1000 < 300 * 64 * 4 / 5


def test_embeddings_keep_the_encoders_dtype(tmp_path, data, models):
    def half(caption, instruction):
        embeds, mask = models.encode_caption(caption, instruction)
        return embeds.bfloat16(), mask

    samples = [sample._replace(bucket=(128, 128)) for sample in read_dataset(data)[:1]]
    cache = build_cache(samples, Store(tmp_path / "cache", tmp_path), Encoders(models.encode_pixels, half), IDS, {})
    batch = cache.load([0])
    expected = sana_core.encode_prompts(models.encoder, CAPTIONS[:1])[0].bfloat16()
    assert batch.embeds.dtype == cache.empty["embeds"].dtype == torch.bfloat16
    assert torch.equal(batch.embeds, expected[:, : batch.embeds.shape[1]])


def test_a_second_build_calls_nothing_and_writes_nothing(tmp_path, data, models, monkeypatch):
    first = build(tmp_path / "cache", data, models)
    # equal captions are encoded once
    assert sorted(models.calls) == sorted(["", CAPTIONS[0], CAPTIONS[1], "", *["pixels"] * 4])
    before = content(tmp_path / "cache")
    models.calls.clear()
    # pictures that have not changed are not even read
    monkeypatch.setattr(cache, "read_range", lambda *words: pytest.fail("read"))
    second = build(tmp_path / "cache", data, models)
    assert models.calls == [] and content(tmp_path / "cache") == before
    same(first.load([0, 3]), second.load([0, 3]))


def test_digests_that_were_lost_are_made_again(tmp_path, built, models):
    build(tmp_path / "cache", built, models)
    file = tmp_path / "cache" / cache.DIGESTS
    file.unlink()
    build(tmp_path / "cache", built, models)
    assert models.calls == [] and len(json.loads(file.read_text())) == 5


OTHERS = (b"", b"{}", b"[1]", b'{"a": "of"}', b"[" * 99999)


@pytest.mark.parametrize("content", OTHERS)
def test_a_file_of_others_in_the_place_of_digests_is_named_and_stays(tmp_path, data, models, content):
    file = tmp_path / "cache" / cache.DIGESTS
    file.parent.mkdir()
    file.write_bytes(content)
    with pytest.raises(ExistingFileError, match="^cache: .*digests.json is not of a training's cache; "):
        build(tmp_path / "cache", data, models)
    assert file.read_bytes() == content and models.calls == []
    # one that comes while it is built too
    file.unlink()
    build(tmp_path / "cache", data, models, progress=lambda finished, total: file.write_bytes(content))
    assert file.read_bytes() == content


def change_picture(data):
    Image.new("RGB", (200, 200), "red").save(data / "0.png")


def swap_pictures(data):
    """Swap the names of two images. Nothing is encoded again, and each caption belongs to the image beside it."""
    (data / "1.png").rename(data / "x")
    (data / "2.png").rename(data / "1.png")
    (data / "x").rename(data / "2.png")


CHANGES = {
    "a picture": (change_picture, IDS, 128, ["pixels"]),
    "its mask": (lambda data: Image.new("L", (200, 200), 9).save(data / "0-mask.png"), IDS, 128, ["pixels"]),
    "no mask": (lambda data: (data / "0-mask.png").unlink(), IDS, 128, ["pixels"]),
    "a caption": (lambda data: (data / "1.txt").write_text("new"), IDS, 128, ["new"]),
    "the buckets": (lambda data: None, IDS, 160, ["pixels"] * 4),
    "the autoencoder": (lambda data: None, IDS._replace(autoencoder="other"), 128, ["pixels"] * 4),
    "the encoder": (lambda data: None, IDS._replace(text_encoder="other"), 128, ["", *CAPTIONS[:2], ""]),
    "the names alone": (swap_pictures, IDS, 128, []),
}


@pytest.mark.parametrize("change, ids, resolution, missed", CHANGES.values(), ids=CHANGES)
def test_what_changes_misses_and_nothing_else_does(tmp_path, built, models, change, ids, resolution, missed):
    before = content(tmp_path / "cache")
    change(built)
    changed = build(tmp_path / "cache", built, models, ids, resolution)
    assert models.calls == missed
    fresh = build(tmp_path / "fresh", built, models, ids, resolution)
    for index in range(4):
        same(changed.load([index]), fresh.load([index]))
    # The old files stay for a run with the old settings.
    after = content(tmp_path / "cache")
    assert all(after[path] == data for path, data in before.items() if path.name != cache.DIGESTS)


@pytest.mark.parametrize("call", (1, 4, 8))
def test_a_build_that_was_broken_off_goes_on_with_the_rest(tmp_path, data, models, call):
    reference = build(tmp_path / "whole", data, models)
    order = list(models.calls)
    models.calls.clear()
    models.fail_at = call
    with pytest.raises(KeyboardInterrupt):
        build(tmp_path / "cache", data, models)
    assert models.calls == order[:call]
    models.calls, models.fail_at = [], None
    resumed = build(tmp_path / "cache", data, models)
    assert models.calls == order[call - 1 :]
    same(resumed.load([0, 3]), reference.load([0, 3]))
    assert {path.name for path in content(tmp_path / "cache")} == {path.name for path in content(tmp_path / "whole")}


def test_polling_cancels_between_any_two_entries(tmp_path, data, models):
    polled = []

    def poll():
        polled.append(1)
        if len(polled) == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build(tmp_path / "cache", data, models, poll=poll)
    assert len(models.calls) == 3


def test_two_processes_that_build_at_once_do_each_other_no_harm(tmp_path, data, models):
    ready = multiprocessing.get_context("fork").Barrier(2)

    def work():
        process_models = Models()
        ready.wait()
        build(tmp_path / "cache", data, process_models)
        sys.stdout.write(str(len(process_models.calls)))

    both = [Forked(work) for _ in range(2)]
    said = [process.communicate()[0] for process in both]
    assert [process.returncode for process in both] == [0, 0]
    assert all(1 <= int(text) <= 8 for text in said) and sum(map(int, said)) >= 8
    assert not list((tmp_path / "cache").rglob("*.part"))
    shared, reference = build(tmp_path / "cache", data, models), build(tmp_path / "whole", data, models)
    assert len(models.calls) == 8
    same(shared.load([0, 3]), reference.load([0, 3]))
    assert content(tmp_path / "cache").keys() == content(tmp_path / "whole").keys()


DAMAGE = {
    "nothing": lambda data: b"",
    "half": lambda data: data[: len(data) // 2],
    "all but a byte": lambda data: data[:-1],
    "a bit": lambda data: data[:-50] + bytes([data[-50] ^ 1]) + data[-49:],
    "zeros, as after a power cut": lambda data: data[:-400] + bytes(400),
    "another file": lambda data: b"x" * len(data),
}


@pytest.mark.parametrize("kind, damage", [*(("latents", damage) for damage in DAMAGE), ("texts", "a bit")])
def test_a_damaged_entry_is_named_when_it_is_loaded_and_made_anew_by_the_next_build(
    tmp_path, built, models, damage, kind
):
    good = build(tmp_path / "cache", built, models).load([1])
    cache = build(tmp_path / "cache", built, models)
    path = Path(getattr(cache, kind)[1])
    path.write_bytes(DAMAGE[damage](path.read_bytes()))
    with pytest.raises(ReadError, match=f"^cache: {path} .*; start again, which makes it again"):
        cache.load([1])
    again = build(tmp_path / "cache", built, models)
    assert models.calls == (["pixels"] if kind == "latents" else [CAPTIONS[1]])
    same(again.load([1]), good)


def test_a_start_reads_no_entry_and_the_first_use_checks_each_once(tmp_path, built, models, monkeypatch):
    paths, checked = [], []
    read_entry, check_sum = cache.read_entry, cache.check_sum
    monkeypatch.setattr(cache, "read_entry", lambda path, checks: paths.append(path) or read_entry(path, checks))
    monkeypatch.setattr(cache, "check_sum", lambda tensors: checked.append(1) or check_sum(tensors))
    again = build(tmp_path / "cache", built, models)
    # The empty prompt stays in memory.
    assert len(paths) == len(checked) == 1 and models.calls == []
    for _ in range(3):
        again.load([0, 3])
    assert len(paths) == 1 + 3 * 4 and len(checked) == 1 + 4


def test_a_start_encodes_images_again_whose_entries_are_too_short(tmp_path, built, models):
    path = Path(build(tmp_path / "cache", built, models).latents[1])
    path.write_bytes(path.read_bytes()[: 32 * 4 * 4])
    build(tmp_path / "cache", built, models)
    assert models.calls == ["pixels"]


def test_an_entry_that_went_away_is_named(tmp_path, built, models):
    cache = build(tmp_path / "cache", built, models)
    Path(cache.latents[2]).unlink()
    with pytest.raises(ReadError, match="^cache: .* cannot be read"):
        cache.load([2])


def test_a_full_disk_leaves_nothing_half_written(tmp_path, data, models, monkeypatch):
    """Bytes run out in the midst of a write, as on a full disk."""
    remaining = 30_000
    write = Path.write_bytes

    def write_some(path, content):
        nonlocal remaining
        fits, remaining = content[:remaining], max(0, remaining - len(content))
        write(path, fits)
        if len(fits) < len(content):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_bytes", write_some)
        with pytest.raises(
            OutputError, match=r"^cache: cannot write .*\.safetensors \(No space left on device\); make room"
        ):
            build(tmp_path / "cache", data, models)
    for path in content(tmp_path / "cache"):
        cache.read_entry(tmp_path / "cache" / path)
    finished_calls = len(models.calls) - 1
    models.calls.clear()
    build(tmp_path / "cache", data, models)
    assert len(models.calls) == 8 - finished_calls


def test_a_folder_that_is_a_file_is_named(tmp_path, data, models):
    (tmp_path / "cache").write_text("mine")
    with pytest.raises(OutputError, match="^cache: cannot write"):
        build(tmp_path / "cache", data, models)
    assert (tmp_path / "cache").read_text() == "mine"


def test_a_picture_that_changes_while_it_is_read_is_not_kept_under_the_old_key(tmp_path, data, models, monkeypatch):
    calls = cache.FileMemo.of

    def then_change(self, place, name):
        digest = calls(self, place, name)
        if place.file.name == "2.png":
            Image.new("RGB", (100, 130), "red").save(place.file)
        return digest

    with monkeypatch.context() as patch:
        patch.setattr(cache.FileMemo, "of", then_change)
        with pytest.raises(ReadError, match="^2.png: was written while it was read"):
            build(tmp_path / "cache", data, models)
    fresh = build(tmp_path / "fresh", data, models)
    same(build(tmp_path / "cache", data, models).load([2]), fresh.load([2]))


def test_control_pictures_are_cropped_and_encoded_as_the_pictures_are(tmp_path, built, models):
    data = built
    plain = build(tmp_path / "cache", data, models)
    assert plain.load([0]).control is None
    for number, size in enumerate(SIZES):
        pixels = np.random.default_rng(50 + number).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
        Image.fromarray(pixels).save(data / f"{number}-control.png")
    seen = []
    cache = build(tmp_path / "cache", data, models, progress=lambda finished, total: seen.append((finished, total)))
    # The latents of the images are not computed again.
    assert models.calls == ["pixels"] * 4 and seen[-1] == (13, 13) and cache.latents == plain.latents
    batch, bucket = cache.load([3, 0]), choose_bucket(SIZES[0], 128)
    for row, index in enumerate((3, 0)):
        pixels, _ = fit_image(Image.open(data / f"{index}-control.png"), None, bucket)
        assert torch.equal(batch.control[row], models.encode_pixels(pixels[None])[0])
    models.calls = []
    Image.new("RGB", SIZES[2]).save(data / "2-control.png")
    build(tmp_path / "cache", data, models)
    assert models.calls == ["pixels"]


def test_broken_pictures_and_black_masks_are_named(tmp_path, data, models):
    Image.new("L", (200, 200), 0).save(data / "0-mask.png")
    with pytest.raises(InputError, match="^0.png: its mask is black in the whole crop"):
        build(tmp_path / "cache", data, models)
    (data / "0-mask.png").unlink()
    (data / "1.png").write_bytes((data / "1.png").read_bytes()[:5000])
    with pytest.raises(ReadError, match="^1.png: broken or incomplete"):
        build(tmp_path / "cache", data, models)


@pytest.mark.parametrize("spoil, said", [
    (lambda latents: latents.index_fill(1, torch.tensor(3), float("nan")), "^0.png: its latents hold NaN or infinity"),
    (lambda latents: latents[:, :16], r"^0.png: got latents \[16, 4, 4\], expected \[32, 4, 4\]"),
])  # fmt: skip
def test_latents_that_cannot_be_are_not_kept(tmp_path, data, models, spoil, said):
    samples = [sample._replace(bucket=(128, 128)) for sample in read_dataset(data)[:1]]
    with pytest.raises(InputError, match=said):
        build_cache(
            samples, Store(tmp_path / "cache", tmp_path),
            Encoders(lambda pixels: spoil(models.encode_pixels(pixels)), models.encode_caption), IDS, {},
        )  # fmt: skip
    assert not list((tmp_path / "cache").glob("latents/*/*"))


def test_embeddings_that_cannot_be_are_not_kept(tmp_path, data, models):
    def spoiled(caption, instruction):
        embeds, mask = models.encode_caption(caption, instruction)
        return embeds * float("inf"), mask

    with pytest.raises(InputError, match=r"^caption: its embeddings hold NaN or infinity \(\)"):
        encode = Encoders(models.encode_pixels, spoiled)
        build_cache(read_dataset(data), Store(tmp_path / "cache", tmp_path), encode, IDS, {})
    assert content(tmp_path / "cache") == {} if (tmp_path / "cache").exists() else True


def test_nothing_of_the_models_is_held_afterwards(tmp_path, data):
    import gc
    import weakref

    models = Models()
    references = [weakref.ref(models.autoencoder), weakref.ref(models.encoder.model)]
    cache = build(tmp_path / "cache", data, models)
    del models
    gc.collect()
    assert [reference() for reference in references] == [None, None] and cache.load([0]).names == ["0.png"]
