"""From prompt to picture without a host, against diffusers' own pipeline."""

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from tiny import library_pipeline

import sana_core

PROMPT = "a red circle on a blue background"
SIZE = {"width": 128, "height": 128}


def reference(checkpoint, scheduler=None, **options):
    pipeline = library_pipeline(checkpoint)
    if scheduler:
        pipeline.scheduler = scheduler
    pipeline.set_progress_bar_config(disable=True)
    images = pipeline(
        PROMPT,
        num_inference_steps=20,
        guidance_scale=4.5,
        use_resolution_binning=False,
        output_type="pt",
        **options,
    ).images
    return images * 2 - 1


@pytest.mark.parametrize("width, height", [(128, 128), (192, 96)])
def test_equals_the_pipeline_with_its_own_scheduler(checkpoint, width, height):
    generator = torch.Generator().manual_seed(3)
    theirs = reference(checkpoint, width=width, height=height, generator=generator)
    ours = sana_core.generate([PROMPT], checkpoint, seed=3, width=width, height=height)
    assert ours.shape == (1, 3, height, width)
    torch.testing.assert_close(ours, theirs.clamp(-1, 1), atol=1e-4, rtol=0)


def test_euler_equals_the_pipeline_with_euler(checkpoint):
    generator = torch.Generator().manual_seed(3)
    theirs = reference(checkpoint, FlowMatchEulerDiscreteScheduler(shift=3.0), generator=generator, **SIZE)
    ours = sana_core.generate([PROMPT], checkpoint, seed=3, sampler="flow_euler", **SIZE)
    torch.testing.assert_close(ours, theirs.clamp(-1, 1), atol=1e-4, rtol=0)


def test_the_same_seed_gives_the_same_picture_and_another_seed_another(checkpoint):
    first, again, other = (sana_core.generate([PROMPT], checkpoint, seed=s, **SIZE) for s in (5, 5, 6))
    assert torch.equal(first, again)
    assert (first - other).abs().mean() > 0.01


def test_picture_k_of_a_batch_is_the_picture_of_seed_plus_k(checkpoint):
    batch = sana_core.generate([PROMPT], checkpoint, seed=8, count=3, **SIZE)
    for k in range(3):
        alone = sana_core.generate([PROMPT], checkpoint, seed=8 + k, **SIZE)
        assert torch.equal(batch[k : k + 1], alone)


def test_another_number_of_threads_is_the_same_but_for_rounding(checkpoint):
    threads = torch.get_num_threads()
    pictures = []
    try:
        for number in (1, 2):
            torch.set_num_threads(number)
            pictures.append(sana_core.generate(["a red circle"], checkpoint, seed=3, steps=4, width=64, height=64))
    finally:
        torch.set_num_threads(threads)
    # an eighth of a level of 255, of a range of 2
    torch.testing.assert_close(*pictures, rtol=0, atol=1e-3)
