"""Which images a batch has, and which of them are generated together."""

import pytest

from sana_core.batch.plan import Workload, batch_images, default_chunk_size, split_into_chunks


def test_image_i_of_a_prompt_uses_seed_plus_i():
    images = batch_images(2, 3, 2**64 - 2)
    assert [image.number for image in images] == list(range(6))
    assert [image.prompt for image in images] == [0, 0, 0, 1, 1, 1]
    # Seeds wrap around after 2^64 - 1.
    assert [image.seed for image in images] == [2**64 - 2, 2**64 - 1, 0] * 2


@pytest.mark.parametrize(
    "prompts, count, seed, message",
    [
        (1, 0, 0, "count: got 0"),
        (1, 1_000_000, 0, "count: got 1000000, expected a whole number from 1 to 100000"),
        (1, 1.5, 0, "count: got 1.5"),
        (1, 1, -1, "seed: got -1"),
        (1, 1, 2**64, "seed: got"),
        (0, 1, 0, "prompts: got none"),
    ],
)
def test_out_of_range_inputs_raise_an_error_that_names_the_input(prompts, count, seed, message):
    with pytest.raises(ValueError, match=message):
        batch_images(prompts, count, seed)


def test_finished_images_are_left_out_without_regrouping_the_others():
    images = batch_images(1, 10, 0)
    workload = Workload([""], images, 4, frozenset({1, 4, 5, 6, 7}))
    numbers = [[image.number for image in chunk] for chunk in workload.split(64, 64, 1)]
    # Without finished images the chunks would be 0-3, 4-7 and 8-9.
    assert numbers == [[0, 2, 3], [8, 9]]


def test_a_chunk_size_of_zero_is_rejected():
    with pytest.raises(ValueError, match="chunk: got 0"):
        split_into_chunks(batch_images(1, 10, 0), 0)


def test_default_chunk_size_shrinks_with_larger_images_and_with_more_workers():
    assert [default_chunk_size(side, side, 1000, 1) for side in (128, 1024, 2048, 4096)] == [32, 8, 2, 1]
    assert default_chunk_size(1024, 1024, 12, 4) == 1
    assert default_chunk_size(1024, 1024, 1, 64) == 1
