"""Shapes, the plan of an epoch, and the crop: nothing is lost, and nothing depends on more than it should."""

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from sana_core import InputError
from sana_core.model.known_models import SHAPES, SIZES, image_size
from sana_core.training.images import choose_bucket, fit_image
from sana_core.training.schedule import plan_epoch

SIDES = st.integers(1, 20000)
BUCKETS = st.lists(st.sampled_from([(128, 128), (160, 96), (96, 160), (256, 64)]), max_size=60)


def noise(width, height, low=0, high=256):
    return Image.fromarray(np.random.default_rng(0).integers(low, high, (height, width, 3), dtype=np.uint8))


@pytest.mark.parametrize("size", SIZES)
def test_a_picture_of_one_of_the_shapes_keeps_it(size):
    for ratio in SHAPES:
        shape = image_size(int(size), ratio)
        assert choose_bucket(shape, int(size)) == shape
        assert choose_bucket((3 * shape[0], 3 * shape[1]), int(size)) == shape


@settings(database=None)
@given(SIDES, SIDES, st.integers(1, 128).map(lambda cells: 32 * cells))
def test_a_bucket_is_the_nearest_of_whole_cells(width, height, resolution):
    bucket = choose_bucket((width, height), resolution)
    assert bucket[0] % 32 == bucket[1] % 32 == 0
    scaled = [(Fraction(w * resolution, 1024), Fraction(h * resolution, 1024)) for w, h in SHAPES.values()]
    whole_cells = [(int(w), int(h)) for w, h in scaled if w % 32 == h % 32 == 0]
    assert bucket in whole_cells and (resolution, resolution) in whole_cells
    far = {shape: abs(math.log2(Fraction(shape[0] * height, shape[1] * width))) for shape in whole_cells}
    assert far[bucket] <= min(far.values()) + 1e-9


def test_at_128_pixels_five_shapes_are_whole():
    assert {choose_bucket((w, 1000), 128) for w in range(100, 5000, 10)} == {
        (64, 256), (96, 160), (128, 128), (160, 96), (256, 64)
    }  # fmt: skip


@pytest.mark.parametrize("resolution", [0, 31, 1000, -32, 100000, 33.5])
def test_another_resolution_is_refused(resolution):
    with pytest.raises(InputError, match="^resolution: got"):
        choose_bucket((100, 100), resolution)


@settings(database=None)
@given(BUCKETS, st.integers(1, 9), st.integers(0, 2**64 - 1), st.integers(0, 10**6))
def test_an_epoch_has_each_sample_once_in_batches_of_one_bucket(buckets, batch, seed, epoch):
    plan = plan_epoch(buckets, batch, seed, epoch)
    assert sorted(index for indices in plan for index in indices) == list(range(len(buckets)))
    for indices in plan:
        assert 0 < len(indices) <= batch and len({buckets[index] for index in indices}) == 1
    # Only the last batch of a bucket may be smaller.
    small = [buckets[indices[0]] for indices in plan if len(indices) < batch]
    assert len(small) == len(set(small))
    assert plan == plan_epoch(tuple(buckets), batch, seed, epoch)


def test_epochs_and_seeds_differ_in_order_and_in_company():
    buckets = [(128, 128)] * 40 + [(160, 96)] * 40
    plans = [plan_epoch(buckets, 4, seed, epoch) for seed, epoch in ((0, 0), (0, 1), (1, 0), (2**32, 0), (0, 2**32))]
    for first, plan in enumerate(plans):
        for other in plans[first + 1 :]:
            assert {frozenset(indices) for indices in plan} != {frozenset(indices) for indices in other}
    # buckets are mixed in time
    kinds = [buckets[indices[0]] for indices in plans[0]]
    assert sum(one != other for one, other in zip(kinds, kinds[1:], strict=False)) > 3


def test_the_orders_of_many_epochs_are_fair():
    """Each sample comes first about equally often: 2000 epochs of 10, and 5 standard deviations."""
    firsts = np.bincount([plan_epoch([(1, 1)] * 10, 1, 7, epoch)[0][0] for epoch in range(2000)], minlength=10)
    assert abs(firsts - 200).max() < 5 * math.sqrt(2000 * 0.1 * 0.9)


def test_the_plan_is_the_same_for_ever():
    """A resumed run needs it after an update of numpy too, and in a process with another hash seed."""
    before = torch.get_rng_state()
    assert plan_epoch([(1, 1), (2, 2), (1, 1), (2, 2), (1, 1)], 2, 42, 3) == [[4, 2], [3, 1], [0]]
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("size, bucket", [((512, 256), (128, 128)), ((256, 512), (128, 128)), ((384, 336), (128, 96))])
def test_the_crop_is_the_middle_of_the_picture_scaled_whole(size, bucket):
    # The image has little contrast, because Pillow rounds and clips between its two passes.
    picture = noise(*size, 64, 192)
    scale = max(bucket[0] / size[0], bucket[1] / size[1])
    resized = picture.resize((round(size[0] * scale), round(size[1] * scale)), Image.Resampling.LANCZOS)
    left, top = (resized.width - bucket[0]) / 2, (resized.height - bucket[1]) / 2
    expected = np.asarray(resized.crop((left, top, left + bucket[0], top + bucket[1]))).transpose(2, 0, 1)
    pixels, mask = fit_image(picture, None, bucket)
    assert mask is None and pixels.shape == (3, bucket[1], bucket[0]) and pixels.dtype == torch.float32
    assert np.abs((pixels.numpy() + 1) * 127.5 - expected).max() < 1.01


def test_a_picture_of_the_buckets_size_stays_bit_for_bit():
    picture = noise(160, 96)
    pixels, _ = fit_image(picture, None, (160, 96))
    assert (((pixels + 1) * 127.5).round().to(torch.uint8).permute(1, 2, 0).numpy() == np.asarray(picture)).all()
    assert pixels.min() == -1 and pixels.max() == 1


@pytest.mark.parametrize("size", [(300, 500), (500, 300), (128, 128), (77, 1000)])
def test_the_mask_is_cropped_with_the_picture(size):
    """The mask is a grey picture: each cell's weight is the mean of its 32 x 32 pixels."""
    ramp = np.linspace(0, 255, size[0])[None] * np.linspace(0.2, 1, size[1])[:, None]
    mask = Image.fromarray(ramp.astype(np.uint8))
    pixels, weight = fit_image(mask.convert("RGB"), mask, (128, 128))
    assert weight.shape == (1, 4, 4) and weight.dtype == torch.float32
    means = torch.nn.functional.avg_pool2d((pixels[:1] + 1) / 2, 32)
    assert (means - weight).abs().max() < 0.01


@settings(database=None, deadline=None)
@given(st.integers(1, 700), st.integers(1, 700), st.sampled_from([(128, 128), (160, 96), (64, 256)]))
def test_any_picture_fits_any_bucket(width, height, bucket):
    grey = Image.new("RGB", (width, height), (10, 130, 250))
    pixels, weight = fit_image(grey, Image.new("L", (width, height), 255), bucket)
    assert pixels.shape == (3, bucket[1], bucket[0]) and (weight == 1).all()
    assert (pixels - torch.tensor([10, 130, 250]).view(3, 1, 1) / 127.5 + 1).abs().max() < 1e-6


def test_a_panorama_needs_no_more_memory_than_its_crop(monkeypatch):
    """20000 x 10 pixels scaled whole to a height of 512 would be 1,024,000 wide."""
    sizes = []
    resize = Image.Image.resize
    monkeypatch.setattr(
        Image.Image, "resize", lambda self, size, *a, **k: sizes.append(size) or resize(self, size, *a, **k)
    )
    pixels, _ = fit_image(Image.new("RGB", (20000, 10)), None, (2048, 512))
    assert pixels.shape == (3, 512, 2048) and sizes == [(2048, 512)]
