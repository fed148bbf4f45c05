"""The number of images that a device has memory to sample together."""

import pytest
import torch

from sana_core import inspect_checkpoint
from sana_core.batch import batch_size
from sana_core.batch.pipeline import SamplingSettings, prepare
from sana_core.batch.plan import LARGEST_CHUNK, Workload, batch_images
from sana_core.checkpoints import find_part
from sana_core.checkpoints.configs import architecture
from sana_core.engine import body
from sana_core.engine.local import generate_local
from sana_core.memory import GUIDED, MOST_PASSES, Passes, transformer_bytes
from sana_core.model.known_models import VARIANTS, Architecture

GPU = torch.device("cuda", 0)


def needed(variant, side, images, dtype, prompts, passes):
    model = VARIANTS[variant]
    return transformer_bytes(model, side // 32, side // 32, images, dtype, True, min(prompts, images), passes)


@pytest.mark.parametrize("prompts, passes", [(1, GUIDED), (32, GUIDED), (1, MOST_PASSES), (32, MOST_PASSES)])
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("side", [512, 1024, 4096])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_chosen_number_of_images_fits_and_twice_the_number_does_not(variant, side, dtype, prompts, passes):
    free = 4 * 10**9
    count = batch_size.images_that_fit(GPU, free, VARIANTS[variant], side, side, dtype, prompts, passes)
    one, two = (needed(variant, side, images, dtype, prompts, passes) for images in (count, 2 * count))
    assert count == 1 or one <= free
    assert count == LARGEST_CHUNK or two > 0.8 * free


@pytest.mark.parametrize("variant", ["0.6B", "1.6B", "1.5-4.8B"])
def test_without_prompts_and_passes_the_most_expensive_case_is_assumed(variant):
    for room in range(10**9, 40 * 10**9, 10**9):
        inputs = GPU, room, VARIANTS[variant], 512, 512, torch.bfloat16
        worst = batch_size.images_that_fit(*inputs, LARGEST_CHUNK, MOST_PASSES)
        assert batch_size.images_that_fit(*inputs) == worst <= batch_size.images_that_fit(*inputs, 1, GUIDED)


@pytest.mark.parametrize(
    "options, passes",
    [
        ({}, GUIDED),
        ({"pag_scale": 3.0}, Passes(3, 3)),
        ({"guidance": 1.0}, Passes(1, 1)),
        ({"guidance_interval": (0.2, 0.8)}, Passes(2, 3)),
        ({"guidance_interval": (0.2, 0.8), "pag_scale": 3.0}, MOST_PASSES),
    ],
)
@pytest.mark.parametrize("prompts", [1, 2, 100])
def test_a_chunk_fits_with_the_prompts_and_the_passes_of_its_settings(
    checkpoint, monkeypatch, options, passes, prompts
):
    settings = SamplingSettings(128, 128, **options)
    needed = transformer_bytes(Architecture(160, 5), 4, 4, 8, torch.float32, True, min(prompts, 8), passes)
    monkeypatch.setattr(batch_size, "free_bytes", lambda device: 1.001 * needed / 0.8)
    assert batch_size.largest_chunk(inspect_checkpoint(checkpoint), settings, GPU, True, prompts) == 8


def test_without_any_memory_it_is_one():
    assert batch_size.images_that_fit(GPU, -(10**9), VARIANTS["1.5-4.8B"], 4096, 4096, torch.bfloat16) == 1


def test_the_numbers_are_those_of_the_checkpoint(checkpoint):
    assert architecture(find_part(inspect_checkpoint(checkpoint), "transformer").headers) == Architecture(160, 5)
    # 2.3 M and 1.4 M parameters
    assert 3.5e6 < batch_size.weight_bytes(inspect_checkpoint(checkpoint), torch.bfloat16) / 2 < 4e6


@pytest.mark.parametrize("loaded", [True, False])
def test_weights_that_are_not_there_yet_take_their_part(checkpoint, monkeypatch, loaded):
    settings = SamplingSettings(128, 128)
    weights = batch_size.weight_bytes(inspect_checkpoint(checkpoint), torch.float32)
    one, two = (transformer_bytes(Architecture(160, 5), 4, 4, n, torch.float32, True) for n in (16, 32))
    free = (one + two) / 2 / 0.8 + (0 if loaded else weights)
    monkeypatch.setattr(batch_size, "free_bytes", lambda device: free)
    assert batch_size.largest_chunk(inspect_checkpoint(checkpoint), settings, GPU, loaded, 1) == 16
    monkeypatch.setattr(batch_size, "free_bytes", lambda device: free - weights)
    assert batch_size.largest_chunk(inspect_checkpoint(checkpoint), settings, GPU, loaded, 1) < 16


def test_a_cpu_draws_one_after_another(checkpoint):
    assert batch_size.largest_chunk(inspect_checkpoint(checkpoint), SamplingSettings(), torch.device("cpu")) == 1


@pytest.mark.parametrize(
    "images, prompts", [([0, 1, 2], 1), ([3], 1), ([0, 5], 2), ([], 1)], ids=["one prompt", "one image", "two", "none"]
)
def test_a_workload_counts_the_prompts_of_its_remaining_images(images, prompts):
    specs = batch_images(2, 4, 0)
    finished = frozenset(spec.number for spec in specs if spec.number not in images)
    assert Workload(["a", "b"], specs, done=finished).count_prompts() == prompts


@pytest.mark.parametrize("prompts", [1, 3])
def test_devices_are_asked_with_the_prompts_of_the_workload(checkpoint, monkeypatch, prompts):
    asked = []

    def largest_chunk(*arguments, **options):
        asked.append(options["prompts"])
        return batch_size.largest_chunk(*arguments, **options)

    monkeypatch.setattr(body, "largest_chunk", largest_chunk)
    workload = Workload(["a", "b", "c"][:prompts], batch_images(prompts, 1, 0))
    request = prepare(workload, checkpoint, SamplingSettings(64, 64, steps=1), ["cpu"])
    assert len(list(generate_local(request))) == prompts
    assert asked == [prompts]
