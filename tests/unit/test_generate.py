"""From prompt to picture without a host, against diffusers' own pipeline."""

import gc
import re
from typing import get_type_hints

import pytest
import torch
from by_diffusers import drawn_by
from diffusers import FlowMatchEulerDiscreteScheduler
from setup import ROOT
from tiny import library_pipeline

import sana_core
from sana_core.__main__ import main
from sana_core.batch.pipeline import SamplingSettings
from sana_core.errors import InputError
from sana_core.model.latents import noise_stream

PROMPT = "a red circle on a blue background"
SIZE = {"width": 128, "height": 128}


def reference(checkpoint, scheduler=None, **size):
    pipeline = library_pipeline(checkpoint)
    return drawn_by(pipeline, PROMPT, scheduler, num_inference_steps=20, output_type="pt", **size) * 2 - 1


@pytest.mark.parametrize("width, height", [(128, 128), (192, 96)])
def test_equals_the_pipeline_with_its_own_scheduler(checkpoint, width, height):
    theirs = reference(checkpoint, width=width, height=height)
    ours = sana_core.generate([PROMPT], checkpoint, seed=3, width=width, height=height)
    assert ours.shape == (1, 3, height, width)
    torch.testing.assert_close(ours, theirs.clamp(-1, 1), atol=1e-4, rtol=0)


def test_euler_equals_the_pipeline_with_euler(checkpoint):
    theirs = reference(checkpoint, FlowMatchEulerDiscreteScheduler(shift=3.0))
    ours = sana_core.generate([PROMPT], checkpoint, seed=3, sampler="flow_euler", **SIZE)
    torch.testing.assert_close(ours, theirs.clamp(-1, 1), atol=1e-4, rtol=0)


@pytest.mark.parametrize("guidance", [0.0, 0.5, 0.99, 1.0, 1.01, 1.5])
@pytest.mark.parametrize("sampler", ["flow_dpmpp_2m", "flow_euler"])
def test_guidance_of_1_and_below_is_the_pipelines(checkpoint, sampler, guidance):
    scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0) if sampler == "flow_euler" else None
    theirs = reference(checkpoint, scheduler, guidance_scale=guidance, negative_prompt="a green square")
    settings = {"sampler": sampler, "guidance": guidance, "negative_prompt": "a green square"}
    ours = sana_core.generate([PROMPT], checkpoint, seed=3, **settings, **SIZE)
    torch.testing.assert_close(ours, theirs.clamp(-1, 1), atol=1e-4, rtol=0)


def test_the_same_seed_gives_the_same_picture_and_another_seed_another(checkpoint):
    first, again, other = (sana_core.generate([PROMPT], checkpoint, seed=s, **SIZE) for s in (5, 5, 6))
    assert torch.equal(first, again)
    assert (first - other).abs().mean() > 0.01


def test_the_models_leave_memory_with_the_images(checkpoint):
    """Not only when Python looks for cycles, because the next call may need the memory."""
    gc.collect()
    gc.disable()
    try:
        sana_core.generate(PROMPT, checkpoint, steps=1, **SIZE)
        kinds = [type(thing).__name__ for thing in gc.get_objects() if isinstance(thing, torch.nn.Module)]
    finally:
        gc.enable()
    assert "SanaTransformer2DModel" not in kinds and "AutoencoderDC" not in kinds


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


@torch.no_grad()
def pipeline_inputs(pipeline, rows):
    """Embeddings and masks of two prompts that no text has, and the noise of `rows` images that no seed has."""
    embeds, mask, negative, negative_mask = pipeline.encode_prompt(
        ["a red circle", "a green square on a black background"], negative_prompt="dark", complex_human_instruction=[]
    )
    generator = torch.Generator().manual_seed(7)
    embeds = 0.9 * embeds + 0.1 * torch.randn(embeds.shape, generator=generator)
    inputs = {"prompt_embeds": embeds, "prompt_attention_mask": mask, "negative_prompt_embeds": negative}
    latents = torch.randn(rows, 32, 4, 3, generator=generator)
    return {**inputs, "negative_prompt_attention_mask": negative_mask, "latents": latents}


@pytest.mark.parametrize("folder", [None, ROOT / "demo" / "sana-posters"], ids=["tiny", "posters"])
@pytest.mark.parametrize("split", [False, True])
def test_embeds_latents_and_callback_are_the_pipeline_s(checkpoint, folder, split):
    folder = folder or checkpoint
    pipeline = library_pipeline(folder)
    pipeline.set_progress_bar_config(disable=True)
    inputs, theirs, ours, size = pipeline_inputs(pipeline, 2), [], {0: [], 1: []}, {"width": 96, "height": 128}

    def note(pipeline, step, timestep, tensors):
        theirs.append(tensors["latents"])
        return tensors

    expected = pipeline(
        **{name: tensor.clone() for name, tensor in inputs.items()},
        negative_prompt=None,
        num_inference_steps=6,
        guidance_scale=4.5,
        use_resolution_binning=False,
        output_type="pt",
        callback_on_step_end=note,
        callback_on_step_end_tensor_inputs=["latents"],
        **size,
    ).images
    saved = {name: tensor.clone() for name, tensor in inputs.items()}
    devices = ["cpu", "cpu"] if split else ["cpu"]
    images = sana_core.generate(
        None, folder, devices=devices, split=split, steps=6, callback=lambda step: ours[step.images[0]].append(step),
        **inputs, **size,
    )  # fmt: skip
    torch.testing.assert_close(images, (expected * 2 - 1).clamp(-1, 1), atol=2e-4, rtol=0)
    for image, steps in ours.items():
        assert [step.step for step in steps] == list(range(6)) and steps[-1].sigma == 0
        assert [step.sigma for step in steps] == sorted((step.sigma for step in steps), reverse=True)
        for step, latents in zip(steps, theirs, strict=True):
            torch.testing.assert_close(step.latents[0], latents[image], atol=2e-4, rtol=1e-4)
    assert all(torch.equal(tensor, saved[name]) for name, tensor in inputs.items())


def test_the_seeds_own_noise_as_latents_and_embeds_of_the_text_are_the_same_image(checkpoint):
    prompts, how = [PROMPT, "a green square"], {"steps": 3, **SIZE}
    expected = sana_core.generate(prompts, checkpoint, seed=3, count=2, negative_prompt="dark", **how)
    noise = torch.cat([next(noise_stream(torch.empty(2, 32, 4, 4), 3))] * 2)
    assert torch.equal(
        sana_core.generate(prompts, checkpoint, count=2, negative_prompt="dark", latents=noise, **how), expected
    )
    encoder = sana_core.load_text_encoder(checkpoint)
    embeds, mask = (
        torch.cat(prompt) for prompt in zip(*(sana_core.encode_prompts(encoder, [p]) for p in prompts), strict=True)
    )
    options = {"prompt_embeds": embeds, "prompt_attention_mask": mask}
    got = sana_core.generate(None, checkpoint, seed=3, count=2, negative_prompt="dark", **options, **how)
    assert torch.equal(got, expected)
    with pytest.raises(
        InputError, match="^prompt_attention_mask: got a prompt without a token, expected at least one; "
    ):
        sana_core.generate(None, checkpoint, prompt_embeds=embeds, prompt_attention_mask=0 * mask, **how)
    dark = sana_core.encode_prompts(encoder, ["dark"], instruction=False)
    options |= {
        "negative_prompt_embeds": dark[0].expand(2, -1, -1),
        "negative_prompt_attention_mask": dark[1].expand(2, -1),
    }
    assert torch.equal(sana_core.generate(None, checkpoint, seed=3, count=2, **options, **how), expected)


def test_a_callback_ends_the_sampling_by_raising(checkpoint):
    class Enough(Exception):
        pass

    def enough(step):
        if step.step == 1:
            raise Enough

    with pytest.raises(Enough):
        sana_core.generate([PROMPT], checkpoint, callback=enough, steps=5, **SIZE)


def test_a_callback_that_raises_ends_the_batch_also_after_the_first_image(checkpoint):
    """An unknown error of a later image makes that image fail. The callback is the caller's, and its error too."""

    class Enough(Exception):
        pass

    def enough(step):
        if 2 in step.images:
            raise Enough

    with pytest.raises(Enough):
        sana_core.generate([PROMPT], checkpoint, count=4, chunk=1, callback=enough, steps=2, **SIZE)


EMBEDS, MASK = torch.zeros(1, 4, 64), torch.ones(1, 4)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"dtype": "int8"}, "dtype: got 'int8'"),
        ({"widht": 64}, "widht: no option of generate; the nearest is width"),
        ({"prompt_embeds": EMBEDS, "prompt_attention_mask": MASK}, "prompt_embeds: got them beside prompts"),
        ({"negative_prompt_embeds": EMBEDS}, "prompt_embeds: got only masks"),
        ({"latents": torch.zeros(1, 32, 4, 3)}, r"latents: got the shape \[1, 32, 4, 3\], expected \[1, 32, 4, 4\]"),
        ({"callback": print, "cluster": "auto"}, "callback: got it with cluster"),
        ({"latents": torch.zeros(1), "best": 1, "of": 2, "scorer": "."}, "latents: got it with best"),
    ],
)
def test_inputs_that_do_not_go_together_are_one_short_error(checkpoint, options, message):
    with pytest.raises(sana_core.InputError, match=message):
        sana_core.generate([PROMPT], checkpoint, **{**SIZE, **options})


@pytest.mark.parametrize(
    "options, message",
    [
        ({"prompt_attention_mask": None}, "prompt_attention_mask: got one of it and prompt_embeds"),
        ({"prompt_attention_mask": MASK[:, :3]}, r"prompt_attention_mask: got the shape \[1, 3\], expected \[1, 4\]"),
        ({"prompt_embeds": EMBEDS[..., :5]}, "prompt_embeds: got the shape"),
        ({"prompt_embeds": EMBEDS[0]}, "prompt_embeds: got the shape"),
        ({"negative_prompt_embeds": EMBEDS}, "negative_prompt_attention_mask: got one"),
        (
            {
                "negative_prompt_embeds": torch.cat([EMBEDS, EMBEDS + 1]),
                "negative_prompt_attention_mask": MASK.expand(2, -1),
            },
            "negative_prompt_embeds: got different rows",
        ),
    ],
)
def test_embeds_that_do_not_fit_are_one_short_error(checkpoint, options, message):
    inputs = {"prompt_embeds": EMBEDS, "prompt_attention_mask": MASK, **options, **SIZE}
    with pytest.raises(sana_core.InputError, match=message):
        sana_core.generate(None, checkpoint, **inputs)


@pytest.mark.parametrize("command", ["generate", "batch"])
def test_every_field_of_the_settings_is_an_option_with_its_help(command, capsys):
    with pytest.raises(SystemExit):
        main([command, "--help"])
    shown = " ".join(capsys.readouterr().out.split())
    for field, hint in get_type_hints(SamplingSettings, include_extras=True).items():
        flag = {"compiled": "compile", "loras": "lora"}.get(field, field).replace("_", "-")
        words = " ".join(hint.__metadata__[0].split()[:4])
        assert re.search(rf"--{flag}\b[^-]* {re.escape(words)}", shown), field
