"""How many pictures at once a device has memory for."""

import pytest
import torch

from sana_core.batch import batch_size
from sana_core.batch.pipeline import SamplingSettings
from sana_core.batch.plan import LARGEST_CHUNK
from sana_core.memory import transformer_bytes
from sana_core.model.known_models import VARIANTS, Architecture

GPU = torch.device("cuda", 0)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("side", [512, 1024, 4096])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_what_is_drawn_at_once_fits_and_twice_as_many_would_not(variant, side, dtype):
    model, free = VARIANTS[variant], 4 * 10**9
    count = batch_size.images_that_fit(GPU, free, model, side, side, dtype)
    needed = [transformer_bytes(model, side // 32, side // 32, n, dtype, accelerator=True) for n in (count, 2 * count)]
    assert count == 1 or needed[0] <= free
    assert count == LARGEST_CHUNK or needed[1] > 0.8 * free


def test_without_any_memory_it_is_one():
    assert batch_size.images_that_fit(GPU, -(10**9), VARIANTS["1.5-4.8B"], 4096, 4096, torch.bfloat16) == 1


def test_the_numbers_are_those_of_the_checkpoint(checkpoint):
    assert batch_size.find_architecture(checkpoint) == Architecture(160, 5)
    # 2.3 M and 1.4 M parameters
    assert 3.5e6 < batch_size.weight_bytes(checkpoint, torch.bfloat16) / 2 < 4e6


@pytest.mark.parametrize("loaded", [True, False])
def test_weights_that_are_not_there_yet_take_their_part(checkpoint, monkeypatch, loaded):
    settings = SamplingSettings(128, 128)
    weights = batch_size.weight_bytes(checkpoint, torch.float32)
    one, two = (transformer_bytes(Architecture(160, 5), 4, 4, n, torch.float32, accelerator=True) for n in (16, 32))
    free = (one + two) / 2 / 0.8 + (0 if loaded else weights)
    monkeypatch.setattr(batch_size, "free_bytes", lambda device: free)
    assert batch_size.largest_chunk(checkpoint, settings, GPU, loaded) == 16
    monkeypatch.setattr(batch_size, "free_bytes", lambda device: free - weights)
    assert batch_size.largest_chunk(checkpoint, settings, GPU, loaded) < 16


def test_a_cpu_draws_one_after_another(checkpoint):
    assert batch_size.largest_chunk(checkpoint, SamplingSettings(), torch.device("cpu")) == 1
