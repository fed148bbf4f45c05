"""An accelerator gives the results of the CPU: steps, decodes, encodes, texts, images, training."""

from copy import deepcopy

import numpy as np
import pytest
import torch
from decoders import f32c32, noise
from setup import ROOT
from shape_judge import judge

from benchmarks.machine import random_transformer
from sana_core import decode_latents, encode_images, encode_prompts, generate, load_text_encoder
from sana_core.kernels.trial import TRIALS, kernels_on
from sana_core.model.forward import prepare, velocity
from sana_core.model.known_models import VARIANTS
from sana_core.runtime.image_files import levels
from sana_core.training.settings import read_settings
from sana_core.training.trainer import train

CHECKPOINT = ROOT / "tests" / "models" / "sana-tiny"
# a different rounding anywhere moves the distance of a network by chance
CHANCE = 1.15
# Rounding of fp32. This is the whole error if the library computes on a device as on the CPU.
ROUNDING = 2e-6


def error(got, truth):
    assert got.isfinite().all()
    return ((got.double().cpu() - truth.double()).norm() / truth.double().norm()).item()


@pytest.fixture(scope="module")
def blocks(small):
    """A function that makes two blocks of SANA 1.6B with random weights, or of 0.6B."""
    return lambda: random_transformer(VARIANTS["0.6B" if small else "1.6B"].width, 2)


def test_the_kernels_run_on_it(device, dtype):
    assert kernels_on(device, dtype) == (set() if device.type == "cpu" else TRIALS.keys())


def test_a_step_is_as_near_the_cpu_s_as_the_library_s(device, dtype, blocks, small):
    model = blocks()
    side = 4 if small else 32
    x, embeds = noise(2, 32, side, side), noise(2, 20, model.config.caption_channels, seed=1)
    mask, time = torch.ones(2, 20), torch.full((2,), 500.0)
    mask[0, 7:] = 0
    rounded = [item.to(dtype) for item in (x, embeds)]
    exact = blocks().to(dtype).float()
    truth = exact(*(item.float() for item in rounded), time, encoder_attention_mask=mask).sample
    model = model.to(device, dtype)
    x, embeds, mask, time = (item.to(device) for item in (*rounded, mask, time))
    constants = prepare(model, embeds, mask, side, side)
    assert constants.kernels == kernels_on(device, dtype)
    library = model(x, embeds, time, encoder_attention_mask=mask).sample
    assert error(velocity(model, x, time, constants), truth) <= CHANCE * error(library, truth) + ROUNDING


@pytest.fixture(scope="module")
def autoencoder(small):
    """SANA's DC-AE with random weights, or one with an eighth of its channels, and the results of the CPU."""
    model, side = (f32c32(8), 4) if small else (f32c32(1), 16)
    latents, pixels = noise(1, 32, side, side), noise(1, 3, 32 * side, 32 * side, seed=1)
    with torch.no_grad():
        return model, latents, pixels, model.decode(latents).sample, model.encode(pixels).latent


@pytest.mark.parametrize("method", ["whole", "strips", "tiles"])
def test_a_decode_is_as_near_the_cpu_s_as_the_library_s(device, dtype, autoencoder, method):
    plain, latents, _, truth, _ = autoencoder
    model = deepcopy(plain).to(device, dtype)
    library = model.decode(latents.to(device, dtype)).sample
    got = decode_latents(model, latents.to(device), method)
    allowed = CHANCE * error(library, truth) + ROUNDING
    if method == "tiles":
        # its seams are no error of arithmetic
        on_cpu = decode_latents(plain, latents, method)
        assert error(got, on_cpu) <= allowed
    else:
        assert error(got, truth) <= allowed


def test_an_encode_is_as_near_the_cpu_s_as_the_library_s(device, dtype, autoencoder):
    plain, _, pixels, _, truth = autoencoder
    model = deepcopy(plain).to(device, dtype)
    library = model.encode(pixels.to(device, dtype)).latent
    assert error(encode_images(model, pixels.to(device)), truth) <= CHANCE * error(library, truth) + ROUNDING


def test_two_devices_decode_one_picture(devices, autoencoder):
    plain, latents, _, truth, _ = autoencoder
    model, latents = deepcopy(plain).to(devices[0]), latents.to(devices[0])
    memory = torch.get_device_module(devices[1])
    memory.reset_peak_memory_stats(devices[1])
    before = memory.max_memory_allocated(devices[1])
    got = decode_latents(model, latents, "strips", devices=devices)
    assert memory.max_memory_allocated(devices[1]) > before
    # a card may convolve by Winograd's algorithm, whose error is larger
    assert error(got, truth) <= CHANCE * error(model.decode(latents).sample, truth) + ROUNDING


def test_a_text_is_encoded_as_on_the_cpu(device):
    prompts = ["a red circle on a blue background", "a small green triangle"]
    truth, mask = encode_prompts(load_text_encoder(CHECKPOINT), prompts, True)
    for dtype, allowed in ((torch.float32, 1e-5), (torch.bfloat16, 5e-2)):
        got, expected = encode_prompts(load_text_encoder(CHECKPOINT, device, dtype), prompts, True)
        assert torch.equal(expected.cpu(), mask)
        valid = mask.bool()
        assert error(got.float().cpu()[valid], truth[valid]) <= allowed


PROMPTS = ["a red circle on a blue background", "a blue square on a white background"]


@pytest.fixture(scope="module")
def pictures():
    """What the CPU draws of PROMPTS in float32."""
    with torch.no_grad():
        return generate(PROMPTS, CHECKPOINT, devices=["cpu"], width=128, height=128)


def test_pictures_are_those_of_the_cpu(device, dtype, pictures):
    got = generate(PROMPTS, CHECKPOINT, devices=[device], width=128, height=128, dtype=str(dtype).split(".")[1])
    for prompt, picture, expected in zip(PROMPTS, got, pictures, strict=True):
        verdict = judge(levels(picture))
        assert f"a {verdict.colour} {verdict.shape} on a {verdict.background} background" == prompt
        if dtype == torch.float32:
            assert (picture - expected).abs().max() < 2 / 255


def test_two_devices_draw_what_one_draws(devices, pictures):
    got = generate(PROMPTS, CHECKPOINT, devices=devices, chunk=1, width=128, height=128)
    assert (got - pictures).abs().max() < 2 / 255


def test_the_second_device_alone_generates_what_the_cpu_generates(devices, pictures):
    """A kernel that is launched on the current device instead of the device of its tensors fails here."""
    got = generate(PROMPTS, CHECKPOINT, devices=devices[1:], width=128, height=128)
    assert (got - pictures).abs().max() < 2 / 255


def test_compiled_steps_draw_the_same(device, pictures):
    if device.type == "cpu":
        pytest.skip("tests/unit/test_compile.py does it")
    got = generate(PROMPTS, CHECKPOINT, devices=[device], width=128, height=128, compiled=True)
    assert (got - pictures).abs().max() < 2 / 255


def test_a_lora_learns_on_it(device, tmp_path):
    from PIL import Image

    data = tmp_path / "pictures"
    data.mkdir()
    for index, color in enumerate(((200, 30, 30), (30, 30, 200))):
        Image.new("RGB", (128, 128), color).save(data / f"{index}.png")
        (data / f"{index}.txt").write_text("a plain wall")
    config = tmp_path / "run.toml"
    config.write_text(
        f"""
        model = "{CHECKPOINT}"
        out = "{tmp_path / "out"}"
        dtype = "bfloat16"
        device = "{device}"
        method = {{ rank = 4 }}
        [[phase]]
        data = ["{data}"]
        resolution = 128
        steps = 8
        batch = 2
        learning_rate = 1e-2
        """
    )
    losses = []
    with torch.enable_grad():
        file = train(read_settings(config), lambda line: losses.append(line.get("loss")))
    assert file.is_file()
    losses = [loss for loss in losses if loss is not None]
    assert len(losses) == 8 and np.isfinite(losses).all()
