"""A video without a host, against diffusers' pipelines, and the command that writes it."""

import os
import re
import shutil

import numpy as np
import pytest
import torch
import video_models
from diffusers import FlowMatchEulerDiscreteScheduler
from PIL import Image
from safetensors.torch import load_file, save_file

from sana_core.__main__ import main
from sana_core.errors import InputError, ReadError
from sana_core.model.known_models import VIDEOS
from sana_core.training.images import decode_image, fit_image
from sana_core.video import generate
from sana_core.video.generate import generate_video, read_first, write_video
from sana_core.video.latents import video_shape

PROMPT, NEGATIVE, SIDE, FRAMES = "A red circle rolls away. motion score: 30.", "a chaotic sequence", 64, 9


@pytest.fixture(scope="module", params=video_models.MODELS)
def folder(request, tmp_path_factory):
    return request.param, video_models.save_folder(request.param, tmp_path_factory.mktemp("video"))


@pytest.fixture
def first(tmp_path):
    """The path of an image of another shape."""
    pixels = torch.randint(256, (90, 120, 3), generator=torch.Generator().manual_seed(5), dtype=torch.uint8)
    Image.fromarray(pixels.numpy()).save(tmp_path / "first.png")
    return tmp_path / "first.png"


@pytest.mark.parametrize("begins", ["text", "image"])
def test_it_is_the_pipelines_video(folder, first, begins):
    name, path = folder
    image = None if begins == "text" else read_first(first, (SIDE, SIDE))
    first_image = None if image is None else (image[None] + 1) / 2
    # diffusers' pipeline of videos that begin with an image is made for this scheduler, as is NVIDIA's script
    solver = None if image is None else FlowMatchEulerDiscreteScheduler(shift=8.0)
    (expected,) = video_models.by_pipeline(
        name, path, (PROMPT, NEGATIVE), (FRAMES, SIDE, SIDE), first_image, solver=solver
    )
    got = generate_video(PROMPT, path, 3, FRAMES, (SIDE, SIDE), image, NEGATIVE, steps=4)
    assert got.shape == (3, FRAMES, SIDE, SIDE)
    torch.testing.assert_close(got.movedim(1, 0) / 2 + 0.5, expected, atol=1e-4, rtol=0)


def test_the_other_sampler_can_be_chosen_with_a_first_image(folder, first):
    name, path = folder
    image = read_first(first, (SIDE, SIDE))
    (expected,) = video_models.by_pipeline(name, path, (PROMPT, NEGATIVE), (FRAMES, SIDE, SIDE), (image[None] + 1) / 2)
    got = generate_video(PROMPT, path, 3, FRAMES, (SIDE, SIDE), image, NEGATIVE, steps=4, sampler="flow_dpmpp_2m")
    torch.testing.assert_close(got.movedim(1, 0) / 2 + 0.5, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("guidance", [0.0, 0.5, 1.0, 1.5])
def test_guidance_of_1_and_below_is_the_pipelines(folder, guidance):
    name, path = folder
    size = FRAMES, SIDE, SIDE
    (expected,) = video_models.by_pipeline(name, path, (PROMPT, NEGATIVE), size, guidance=guidance)
    got = generate_video(PROMPT, path, 3, FRAMES, (SIDE, SIDE), None, NEGATIVE, steps=4, guidance=guidance)
    torch.testing.assert_close(got.movedim(1, 0) / 2 + 0.5, expected, atol=1e-4, rtol=0)


def test_negative_and_motion_score_are_nvidias_by_default(folder):
    _, path = folder
    how = {"seed": 3, "frames": FRAMES, "size": (SIDE, SIDE), "steps": 1}
    negative = VIDEOS["video-2B-480p"].negative
    got = generate_video("A red circle.", path, **how)
    assert torch.equal(got, generate_video("A red circle. motion score: 10.", path, negative_prompt=negative, **how))
    other = generate_video(" A red circle. ", path, negative_prompt="", motion_score=30, **how)
    assert torch.equal(
        other, generate_video("A red circle. Motion score: 30.".replace("M", "m"), path, negative_prompt="", **how)
    )
    none = generate_video("A red circle.", path, negative_prompt="", motion_score=0, **how)
    assert not torch.equal(none, other) and not torch.equal(got, other)


def test_float16_leaves_text_encoder_and_vae_in_bfloat16(folder, monkeypatch):
    """As for images, because they overflow in float16."""
    dtypes = {}
    for name in ("load_text_encoder", "load_video_transformer", "load_video_autoencoder"):
        original = getattr(generate, name)

        def load(checkpoint, device, dtype, *more, name=name, original=original):
            dtypes[name] = dtype
            return original(checkpoint, device, dtype, *more)

        monkeypatch.setattr(generate, name, load)
    _, path = folder
    assert generate_video(PROMPT, path, 3, FRAMES, (SIDE, SIDE), steps=1, dtype="float16").isfinite().all()
    assert list(dtypes.values()) == [torch.bfloat16, torch.float16, torch.bfloat16]


def test_the_command_writes_a_clip(folder, first, tmp_path):
    import av

    name, path = folder
    out = tmp_path / "clips" / "clip.mp4"
    arguments = [
        "generate",
        PROMPT,
        "--checkpoint",
        path,
        "--frames",
        FRAMES,
        "--first",
        first,
        "--steps",
        2,
        "--out",
        out,
    ]
    arguments = [str(word) for word in [*arguments, "--width", SIDE, "--height", SIDE, "--dtype", "float32"]]
    assert not main(arguments)
    with av.open(str(out)) as clip:
        stream = clip.streams.video[0]
        frames = list(clip.decode(stream))
        assert (len(frames), frames[0].width, frames[0].height, stream.average_rate) == (FRAMES, SIDE, SIDE, 16)


def test_a_broken_or_too_large_first_image_is_one_line(tmp_path, monkeypatch):
    file = tmp_path / "first.png"
    Image.effect_noise((64, 64), 50).convert("RGB").save(file)
    content = file.read_bytes()
    # within the deflated pixels, and in the length of a part
    for place in (len(content) // 2, 33):
        file.write_bytes(content[:place] + bytes([content[place] ^ 0x55] * 8) + content[place + 8 :])
        with pytest.raises(ReadError, match="^first: .*first.png: broken or incomplete "):
            read_first(file, (SIDE, SIDE))
    file.write_bytes(content)
    assert read_first(file, (SIDE, SIDE)).shape == (3, SIDE, SIDE)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1000)
    with pytest.raises(InputError, match="^first: .*first.png: got more pixels than Pillow's limit"):
        read_first(file, (SIDE, SIDE))


@pytest.mark.parametrize("kind", ["EPS", "PDF", "TGA", "ICO"])
def test_a_first_image_has_a_format_of_training(tmp_path, kind):
    file = tmp_path / "first.png"
    Image.new("RGB", (64, 64), "red").save(file, kind)
    with pytest.raises(ReadError, match="^first: .*first.png: got no image, expected one of PNG, JPEG, WEBP, BMP, "):
        read_first(file, (SIDE, SIDE))


@pytest.mark.parametrize("kind", ["pipe", "folder", "device"])
def test_a_first_image_is_a_regular_file(tmp_path, kind):
    file = tmp_path / "first.png"
    if kind == "pipe":
        os.mkfifo(file)
    elif kind == "folder":
        file.mkdir()
    else:
        file.symlink_to("/dev/zero")
    with pytest.raises(InputError, match="^first: .*first.png: got a folder, pipe or device, expected a regular file"):
        read_first(file, (SIDE, SIDE))


@pytest.mark.parametrize("kind", ["PNG", "TIFF"])
def test_grey_of_16_bits_keeps_its_levels(tmp_path, kind):
    file = tmp_path / "first.image"
    values = np.linspace(0, 65535, SIDE * SIDE).reshape(SIDE, SIDE).astype(np.uint16)
    Image.fromarray(values).save(file, kind)
    got = (read_first(file, (SIDE, SIDE)) + 1) * 127.5
    expected = torch.from_numpy(values.astype(np.float32) / 257).expand(3, -1, -1)
    # Rounding changes a value by at most half a level.
    assert (got - expected).abs().max() < 0.5001


def test_transparent_pixels_are_on_white_as_in_training(tmp_path):
    file = tmp_path / "first.png"
    # black, from transparent at the left to opaque at the right
    alpha = np.linspace(0, 255, SIDE).astype(np.uint8)[None].repeat(SIDE, 0)
    Image.merge("LA", (Image.new("L", (SIDE, SIDE)), Image.fromarray(alpha))).save(file)
    got = (read_first(file, (SIDE, SIDE)) + 1) * 127.5
    expected = (255 - torch.from_numpy(alpha).float()).expand(3, -1, -1)
    assert (got - expected).abs().max() <= 1
    trained, _ = fit_image(decode_image(file.read_bytes(), "first.png"), None, (SIDE, SIDE))
    torch.testing.assert_close(got, (trained + 1) * 127.5)


@pytest.mark.parametrize(
    "more, message",
    [
        (["--out", "clip.gif"], "^out: got 'clip.gif' with --frames, expected a file like clip.mp4; name one$"),
        (["--count", "2"], "^count: it is for images, expected one video of one prompt with --frames; leave it out$"),
        (["--best", "2"], "^best: it is for images, expected one video of one prompt with --frames; leave it out$"),
        (["--first", "none.png"], "^first: none.png: no such file; see its spelling, and whether it was moved$"),
        (["--chunk", "1"], "^chunk: it is for images, expected one video of one prompt with --frames; leave it out$"),
        (["--compile"], "^compile: it is for images, expected one video of one prompt with --frames; leave it out$"),
        (["--gpus", "1"], "^gpus: it is for images, expected one video of one prompt with --frames; leave it out$"),
        (["--guidance-interval", "0.1", "0.9"], "^guidance_interval: it is for images, expected one video of one "),
        (["--devices", "cpu", "cpu"], "^devices: it is for images, expected one video of one prompt with --frames; "),
        (["--frames", "8"], "^frames: got 8, expected a multiple of [48] and one more; use 9$"),
        (["--frames", "0"], "^frames: got 0, expected a whole number from 1 to 1025$"),
        (["--motion-score", "101"], "^motion_score: got 101, expected a whole number from 0 to 100$"),
        (["--width", "0"], "^width: got 0, expected a multiple of (16 from 32|32 from 64) to 16384; use (32|64)$"),
        (["--seed", "-1"], "^seed: got -1, expected a whole number from 0 to 18446744073709551615$"),
        (["--guidance", "nan"], "^guidance: got nan, expected a number from 0 to 100.0$"),
        (
            ["--sampler", "scm"],
            "^sampler: got scm for SANA-Video 2B (480|720)p, expected another, .* SANA-Sprint 1.6B; choose flow_",
        ),
        (["--sampler", "euler"], "^sampler: got 'euler', expected one of flow_dpmpp_2m, flow_euler, "),
    ],
)
def test_what_cannot_be_is_said(folder, tmp_path, monkeypatch, capsys, more, message):
    monkeypatch.chdir(tmp_path)
    arguments = [
        "generate",
        PROMPT,
        "--checkpoint",
        str(folder[1]),
        "--frames",
        "9",
        "--out",
        "clip.mp4",
        "--steps",
        "1",
    ]
    with pytest.raises((SystemExit, ValueError)) as failed:
        raise SystemExit(main([*arguments, *more]))
    said = capsys.readouterr().err.strip().splitlines()[-1].removeprefix("sana_core: ").removeprefix("error: ")
    assert failed.value.code and re.match(message, said), said


def test_sizes_that_the_vae_cannot_decode_are_refused_before_sampling(folder, monkeypatch):
    name, path = folder
    channels, patch, cell, stride = video_models.MODELS[name]
    vae, step = video_models.autoencoder(name), patch * cell
    for width, height in ((1, 1), (1, 2), (2, 1), (2, 2), (1, 4), (3, 2)):
        size = 32 * width, 32 * height
        latents = torch.zeros(1, channels, 2, size[1] // cell, size[0] // cell)
        try:
            shape = video_shape(*size, 1 + stride, VIDEOS[f"video-2B-{name}"])
        except InputError as error:
            assert re.match(
                f"(width|height): got 32, expected a multiple of {step} from 64 to 16384; use 64$", str(error)
            )
            with pytest.raises(RuntimeError, match="Padding size"), torch.no_grad():
                vae.decode(latents)
        else:
            assert shape == latents.shape[1:]
            with torch.no_grad():
                assert vae.decode(latents).sample.shape == (1, 3, 1 + stride, size[1], size[0])
    if name == "720p":
        monkeypatch.setattr("sana_core.video.generate.encode", lambda *words: pytest.fail("encoded"))
        with pytest.raises(InputError, match="^width: got 32"):
            generate_video(PROMPT, path, 0, 9, (32, 64))


def test_nan_latents_end_in_one_line_and_no_file(folder, tmp_path, monkeypatch, capsys):
    """float16 overflows in the transformer of this model."""
    copy = shutil.copytree(folder[1], tmp_path / "model", symlinks=True)
    weights = copy / "transformer" / "diffusion_pytorch_model.safetensors"
    tensors = load_file(weights)
    # The weights fit into float16, but their products do not.
    save_file({key: value * 200 if "ff" in key else value for key, value in tensors.items()}, weights)
    words = ["generate", PROMPT, "--checkpoint", copy, "--frames", 9, "--width", 64, "--height", 64, "--steps", 1]
    words += ["--out", tmp_path / "clip.mp4", "--dtype", "float16"]
    assert main([str(word) for word in words]) == 1
    said = capsys.readouterr().err
    assert re.fullmatch(
        r"latents: [0-9]+ of [0-9]+ values are NaN or infinite, the first in image [01], channel [0-9]+, row "
        r"[0-9]+, column [0-9]+; sample again in bf16 or fp32\n",
        said,
    ), said
    assert not (tmp_path / "clip.mp4").exists()


def test_nan_pixels_are_not_written_as_black(tmp_path):
    video = torch.zeros(3, 2, 32, 32)
    video[1, 1, 3, 4] = float("nan")
    with pytest.raises(InputError, match="^pixels: got NaN from the VAE; generate or decode again in bf16 or fp32$"):
        write_video(tmp_path / "clip.mp4", video)
    assert not list(tmp_path.iterdir())
