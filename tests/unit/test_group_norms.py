"""Decodes with the VAE of SD, SD3 and FLUX, layer by layer in strips: the pixels, the memory, and the refusals."""

import copy
import json
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import AutoencoderDC, AutoencoderKL
from fake_accelerator import FIRST, Counter, fake_accelerators
from PIL import Image
from pretend_card import pretend_cards
from pretend_streams import Races, Stream, pretend_streams
from safetensors.torch import save_file

from sana_core.__main__ import main
from sana_core.decode import group_norms
from sana_core.decode.group_norms import choose_plan, decode_normed, decoder_steps, predict
from sana_core.errors import InputError

# The range that the issue of this decode allows for rounding.
CLOSE = 3e-6
EVERYTHING = 10**12


def with_norms(vae):
    """Random weights with which every layer has an effect, and norms as trained ones are."""
    generator = torch.Generator().manual_seed(0)
    for name, value in vae.named_parameters():
        if value.dim() > 1:
            value.data.normal_(0, value[0].numel() ** -0.5, generator=generator)
        else:
            value.data.normal_(float("norm" in name and name.endswith("weight")), 0.1, generator=generator)
    return vae.eval().requires_grad_(False)


def build(channels=4, widths=(32, 64, 64), **options):
    blocks = {"down_block_types": ("DownEncoderBlock2D",) * len(widths)}
    blocks |= {"up_block_types": ("UpDecoderBlock2D",) * len(widths), "block_out_channels": widths}
    return AutoencoderKL(latent_channels=channels, layers_per_block=2, norm_num_groups=32, **blocks, **options)


@pytest.fixture(scope="module")
def vae():
    return with_norms(build())


def latents_of(*shape, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)


def distance(got, expected):
    return float((got.double() - expected.double()).abs().max() / (expected.max() - expected.min()))


@pytest.mark.parametrize("strip", [2**8, 2**11, 2**24])
@pytest.mark.parametrize("size", [(8, 8), (13, 7), (2, 33), (1, 9)])
def test_strips_give_the_pixels_of_diffusers(vae, monkeypatch, size, strip):
    monkeypatch.setattr(group_norms, "CPU_STRIPS", (strip,) * 4)
    latents = latents_of(2, 4, *size)
    with torch.no_grad():
        expected = vae.decoder(latents)
    report, seen = {}, []
    got = decode_normed(
        vae.decoder, latents, EVERYTHING, 0, progress=lambda *numbers: seen.append(numbers), report=report
    )
    assert distance(got, expected) <= CLOSE
    assert seen[-1][0] == seen[-1][1] and [computed for computed, _ in seen] == sorted(computed for computed, _ in seen)
    assert report["plan"] == "layer by layer in strips; all maps on the device" and not report["events"]


@pytest.mark.parametrize("channels", [4, 16], ids=["SD", "FLUX"])
def test_the_released_shapes_are_equal(channels):
    """Also an image of one cell. With fewer channels, a group of it would be one number, whose variance is 0."""
    decoder = with_norms(build(channels, (128, 256, 512, 512))).decoder
    for size in ((6, 5), (1, 1)):
        latents = latents_of(1, channels, *size)
        with torch.no_grad():
            assert distance(decode_normed(decoder, latents, EVERYTHING, 0), decoder(latents)) <= CLOSE


def test_bfloat16_is_as_near_to_float32_as_the_whole_decode(vae):
    latents = latents_of(1, 4, 16, 16)
    rounded = with_norms(build()).decoder.bfloat16()
    with torch.no_grad():
        exact = vae.decoder(latents)
        undivided = rounded(latents.bfloat16())
    got = decode_normed(rounded, latents.bfloat16(), EVERYTHING, 0)
    error, expected = ((pixels.float() - exact).norm() / exact.norm() for pixels in (got, undivided))
    assert got.dtype == torch.bfloat16 and error <= 1.05 * expected


def test_maps_in_ram_give_the_same_bits(vae):
    latents = latents_of(1, 4, 9, 6)
    steps = decoder_steps(vae.decoder)
    images = []
    for resident in (0, 10**12):
        plan = predict(steps, (4, 9, 6), 4, 2**14, resident)
        out = torch.empty(1, 3, 36, 24)
        group_norms.Decode(plan, latents.device, latents.dtype, group_norms.no_poll, lambda work: None).run(
            steps, latents, out
        )
        images.append(out)
    assert torch.equal(*images)


def test_norms_that_load_their_weights_in_the_forward_are_equal():
    """As ComfyUI's are with dynamic VRAM: the parameters of the module have no values."""

    class Lazy(torch.nn.GroupNorm):
        def forward(self, x):
            return torch.nn.functional.group_norm(x, self.num_groups, *self.values, self.eps)

    decoder, latents = with_norms(build()).decoder, latents_of(1, 4, 7, 5)
    with torch.no_grad():
        expected = decoder(latents)
    for module in decoder.modules():
        if isinstance(module, torch.nn.GroupNorm):
            module.values = module.weight, module.bias
            module.__class__ = Lazy
            for name in ("weight", "bias"):
                meta = torch.nn.Parameter(getattr(module, name).to("meta"), requires_grad=False)
                setattr(module, name, meta)
    assert distance(decode_normed(decoder, latents, EVERYTHING, 0), expected) <= CLOSE


@pytest.fixture(scope="module")
def released_steps():
    with fake_accelerators(), torch.device(FIRST):
        default = torch.get_default_dtype()
        torch.set_default_dtype(torch.bfloat16)
        try:
            return decoder_steps(build(16, (128, 256, 512, 512)).eval().requires_grad_(False).decoder)
        finally:
            torch.set_default_dtype(default)


@pytest.mark.parametrize(
    "pixels, gigabytes, in_ram",
    [(1024, 1, False), (2048, 1, True), pytest.param(4096, 2, True, marks=pytest.mark.slow)]
    + [pytest.param(8192, 3, True, marks=pytest.mark.slow)],
)
def test_a_gpu_needs_what_is_predicted(released_steps, pixels, gigabytes, in_ram):
    """In bfloat16. Nothing of this has run on a GPU."""
    with fake_accelerators():
        latents = torch.empty(1, 16, pixels // 8, pixels // 8, dtype=torch.bfloat16, device=FIRST)
    plan = choose_plan(released_steps, latents, gigabytes * 1e9, EVERYTHING)
    assert plan.device_bytes <= gigabytes * 1e9 and (plan.ram_bytes > 0) == in_ram
    counter = Counter()
    with pretend_streams(Races()), fake_accelerators(counter), torch.no_grad():
        decode = group_norms.Decode(plan, FIRST, torch.bfloat16, group_norms.no_poll, lambda work: None)
        decode.run(released_steps, latents, torch.empty(1, 3, pixels, pixels, dtype=torch.bfloat16))
    assert 0.95 <= plan.device_bytes / counter.peak[FIRST] <= 1.1


def race(vae, polls=10**6):
    """Decode on a pretended GPU with all maps in RAM. Poll number `polls` cancels. Return `Races` and distance."""
    latents, races, numbers = latents_of(1, 4, 9, 6), Races(), iter(range(polls))
    with torch.no_grad(), pretend_cards() as cards, pretend_streams(races):
        card = cards.devices[0]
        steps, on_card = decoder_steps(copy.deepcopy(vae.decoder).to(card)), latents.to(card)
        plan, out = predict(steps, (4, 9, 6), 4, 2**13, 0), torch.empty(1, 3, 36, 24)
        with races, suppress(StopIteration):
            group_norms.Decode(plan, card, torch.float32, lambda: next(numbers), lambda work: None).run(
                steps, on_card, out
            )
    with torch.no_grad():
        return races, distance(out, vae.decoder(latents))


def test_a_gpu_copies_the_next_strip_without_a_race(vae):
    races, error = race(vae)
    assert not races.races and races.are_waited_for() and error <= CLOSE


def test_a_cancelled_decode_leaves_no_race(vae):
    for polls in range(20, 60, 8):
        races, _ = race(vae, polls)
        assert not races.races and races.are_waited_for()


@pytest.mark.parametrize("remaining", [0, 1], ids=["none", "the first of each step"])
def test_a_race_would_be_seen(vae, monkeypatch, remaining):
    wait, calls = Stream.wait_stream, {}

    def waits(stream, other):
        calls[stream] = calls.get(stream, 0) + 1
        if calls[stream] <= remaining:
            wait(stream, other)

    monkeypatch.setattr(Stream, "wait_stream", waits)
    assert race(vae)[0].races


def test_a_result_before_its_copy_would_be_seen(vae, monkeypatch):
    monkeypatch.setattr(Stream, "wait_event", lambda stream, event: None)
    assert race(vae)[0].races


def test_memory_that_runs_out_is_tried_with_less(vae, monkeypatch):
    latents, calls, run = latents_of(1, 4, 8, 8), [], group_norms.Decode.run
    monkeypatch.setattr(group_norms, "CPU_STRIPS", (2**16, 2**13, 2**10))

    def fail_once(decode, *arguments):
        calls.append(decode.plan.device_bytes)
        if len(calls) == 1:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        run(decode, *arguments)

    monkeypatch.setattr(group_norms.Decode, "run", fail_once)
    report = {}
    got = decode_normed(vae.decoder, latents, EVERYTHING, 0, report=report)
    with torch.no_grad():
        assert distance(got, vae.decoder(latents)) <= CLOSE
    assert calls[1] < calls[0] and report["events"] == [
        f"ran out of memory; decoded again within {calls[1] / 1e6:.0f} MB"
    ]


def test_a_poll_that_raises_cancels(vae):
    def cancel():
        raise InterruptedError

    with pytest.raises(InterruptedError):
        decode_normed(vae.decoder, latents_of(1, 4, 8, 8), EVERYTHING, 0, poll=cancel)


def test_what_cannot_be_decoded_is_refused_in_one_line(vae):
    latents = latents_of(1, 4, 8, 8)
    with pytest.raises(InputError, match=r"^budget_gb: got 0.001, expected at least 0.\d+ for an image of 128 x 128"):
        decode_normed(vae.decoder, latents_of(1, 4, 32, 32), 10**6, 0)
    with pytest.raises(InputError, match="^samples: .*NaN"):
        decode_normed(vae.decoder, latents * torch.nan, EVERYTHING, 0)
    dc_ae = AutoencoderDC(
        latent_channels=4, encoder_block_out_channels=(8, 8), decoder_block_out_channels=(8, 8),
        encoder_layers_per_block=(1, 1), decoder_layers_per_block=(1, 1), encoder_block_types="ResBlock",
        decoder_block_types="ResBlock", encoder_qkv_multiscales=((), ()), decoder_qkv_multiscales=((), ()),
    )  # fmt: skip
    with pytest.raises(InputError, match="^vae: got the decoder Decoder, expected that of an AutoencoderKL of images$"):
        decode_normed(dc_ae.decoder, latents, EVERYTHING, 0)


def test_ram_that_is_missing_is_named(released_steps):
    with fake_accelerators():
        latents = torch.empty(1, 16, 512, 512, dtype=torch.bfloat16, device=FIRST)
    with pytest.raises(InputError, match=r"^samples: .* of 4096 x 4096, whose decode needs 1\d.\d GB of RAM"):
        choose_plan(released_steps, latents, 2e9, 1e9)


@pytest.fixture
def files(vae, tmp_path, monkeypatch):
    """A folder with a pipeline's VAE, and the latents of two images."""
    monkeypatch.chdir(tmp_path)
    vae.save_pretrained("pixart/vae")
    save_file({"latents": latents_of(2, 4, 9, 6)}, "two.safetensors")


@pytest.mark.parametrize("folder", ["pixart", "pixart/vae"])
def test_the_command_writes_the_images_of_diffusers(vae, files, folder, capsys):
    assert main(["decode", "two.safetensors", "--vae", folder, "--max-gb", "0.01", "--report"]) == 0
    lines = capsys.readouterr().out.splitlines()
    with torch.no_grad():
        expected = vae.decode(latents_of(2, 4, 9, 6)).sample.clamp(-1, 1)
    for picture, path in zip(expected, lines[::2], strict=True):
        pixels = torch.from_numpy(np.array(Image.open(path))).permute(2, 0, 1)
        assert (pixels - (picture + 1) * 127.5).abs().max() <= 0.52
    assert json.loads(lines[1])["plan"].startswith("layer by layer in strips")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--vae", "gone"], "gone"),
        (["--vae", "dc-ae"], "has AutoencoderDC, expected AutoencoderKL; give SANA's VAE by --checkpoint instead"),
        (["--vae", "half"], "vae: half cannot be loaded ("),
        (["--vae", "pixart", "--method", "tiles"], "method: got tiles with vae, expected auto or strips; leave it out"),
        (["--vae", "pixart", "--max-gb", "0.000001"], "budget"),
    ],
)
def test_the_command_refuses_in_one_line(files, options, message, capsys):
    for name, kind in (("dc-ae", "AutoencoderDC"), ("half", "AutoencoderKL")):
        Path(name).mkdir()
        Path(name, "config.json").write_text(json.dumps({"_class_name": kind}))
    assert main(["decode", "two.safetensors", *options]) == 1
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1 and not list(Path().glob("output/*"))


def test_the_command_refuses_latents_of_another_vae(files, capsys):
    build(channels=16).save_pretrained("flux")
    assert main(["decode", "two.safetensors", "--vae", "flux"]) == 1
    assert "latents: got 4 channels, expected 16; use the VAE of the model" in capsys.readouterr().err
