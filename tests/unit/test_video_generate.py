"""A video without a host, against diffusers' pipelines, and the command that writes it."""

import re

import pytest
import torch
import video_models
from PIL import Image

from sana_core.__main__ import main
from sana_core.errors import InputError
from sana_core.video.files import read_first
from sana_core.video.generate import generate_video

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
    given = None if image is None else (image[None] + 1) / 2
    (expected,) = video_models.by_pipeline(name, path, (PROMPT, NEGATIVE), (FRAMES, SIDE, SIDE), given)
    got = generate_video(PROMPT, path, 3, FRAMES, (SIDE, SIDE), image, NEGATIVE, steps=4)
    assert got.shape == (3, FRAMES, SIDE, SIDE)
    torch.testing.assert_close(got.movedim(1, 0) / 2 + 0.5, expected, atol=1e-4, rtol=0)


def test_the_command_writes_a_clip(folder, first, tmp_path):
    import av

    name, path = folder
    out = tmp_path / "clips" / "clip.mp4"
    given = ["generate", PROMPT, "--checkpoint", path, "--frames", FRAMES, "--first", first, "--steps", 2, "--out", out]
    given = [str(word) for word in [*given, "--width", SIDE, "--height", SIDE, "--dtype", "float32"]]
    assert not main(given)
    with av.open(str(out)) as clip:
        stream = clip.streams.video[0]
        frames = list(clip.decode(stream))
        assert (len(frames), frames[0].width, frames[0].height, stream.average_rate) == (FRAMES, SIDE, SIDE, 16)


def test_a_first_image_that_is_broken_or_too_large_is_said(tmp_path, monkeypatch):
    file = tmp_path / "first.png"
    Image.effect_noise((64, 64), 50).convert("RGB").save(file)
    whole = file.read_bytes()
    # within the deflated pixels, and in the length of a part
    for place in (len(whole) // 2, 33):
        file.write_bytes(whole[:place] + bytes([whole[place] ^ 0x55] * 8) + whole[place + 8 :])
        with pytest.raises(InputError, match="^first: cannot read .*first.png as an image"):
            read_first(file, (SIDE, SIDE))
    file.write_bytes(whole)
    assert read_first(file, (SIDE, SIDE)).shape == (3, SIDE, SIDE)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1000)
    with pytest.raises(InputError, match="exceeds limit"):
        read_first(file, (SIDE, SIDE))


@pytest.mark.parametrize(
    "more, message",
    [
        (["--out", "clip.gif"], "^out: got 'clip.gif' with --frames, expected a file like clip.mp4; name one$"),
        (["--count", "2"], "^count: it is for images, expected one video of one prompt with --frames; leave it out$"),
        (["--after", "2"], "^after: it is for images, expected one video of one prompt with --frames; leave it out$"),
        (["--first", "none.png"], "^first: cannot read none.png as an image .*; choose another file$"),
        (["--frames", "8"], "^frames: got 8, expected a multiple of [48] and one more; use 9$"),
    ],
)
def test_what_cannot_be_is_said(folder, tmp_path, monkeypatch, capsys, more, message):
    monkeypatch.chdir(tmp_path)
    given = ["generate", PROMPT, "--checkpoint", str(folder[1]), "--frames", "9", "--out", "clip.mp4", "--steps", "1"]
    with pytest.raises((SystemExit, ValueError)) as failed:
        raise SystemExit(main([*given, *more]))
    said = capsys.readouterr().err.strip().splitlines()[-1].removeprefix("sana_core: ").removeprefix("error: ")
    assert failed.value.code and re.match(message, said), said
