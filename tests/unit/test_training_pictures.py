"""Pictures of a data set as people have them: of every kind, turned, transparent, cut and broken."""

import struct
import zlib

import numpy as np
import pytest
from data_sets import PICTURE, encoded, exif_of, only, open_mask, pixels, save, write_tar
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageOps, features

from sana_core import InputError, ReadError, SanaError
from sana_core.training.dataset import open_image, read_dataset
from sana_core.training.images import LARGEST_TEXT, decode_image


@pytest.mark.parametrize("turn", range(1, 9))
@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "TIFF", "AVIF"])
def test_pictures_and_masks_are_upright_in_all_orientations_of_exif(tmp_path, turn, kind):
    """Pillow's exif_transpose defines the upright orientation."""
    file = save(tmp_path / f"p.{kind.lower()}", exif=exif_of(turn))
    save(tmp_path / f"p-mask.{kind.lower()}", PICTURE.convert("L"), caption=None, exif=exif_of(turn))
    sample = only(tmp_path)
    expected = ImageOps.exif_transpose(Image.open(file)).convert("RGB")
    assert sample.size == expected.size == ((24, 40) if turn > 4 else (40, 24))
    picture = open_image(sample)
    assert picture.mode == "RGB" and (pixels(picture) == pixels(expected)).all()
    mask = open_mask(sample)
    assert mask.mode == "L" and mask.size == picture.size
    assert np.abs(pixels(mask) - pixels(picture.convert("L"))).max() < 25


def test_orientations_of_no_meaning_turn_nothing(tmp_path):
    for turn in (0, 9, 65535):
        save(tmp_path / f"{turn}.jpg", exif=exif_of(turn))
    assert {sample.size for sample in read_dataset(tmp_path)} == {(40, 24)}


def test_only_headers_are_read(tmp_path, monkeypatch):
    save(tmp_path / "a.png")
    save(tmp_path / "b.jpg", exif=exif_of(6))
    monkeypatch.setattr(Image.Image, "load", lambda self: pytest.fail("decoded"))
    monkeypatch.setattr("PIL.ImageFile.ImageFile.load", lambda self: pytest.fail("decoded"))
    assert [sample.size for sample in read_dataset(tmp_path)] == [(40, 24), (24, 40)]


def transparent_palette():
    picture = Image.new("P", (2, 1))
    picture.putpalette([255, 0, 0, 0, 0, 255])
    picture.putdata([0, 1])
    return encoded(picture, transparency=1)


MODES = {
    "cmyk.jpg": (encoded(Image.new("CMYK", (2, 1), (0, 255, 255, 0)), "JPEG", quality=100), [255, 0, 0], [255, 0, 0]),
    "palette-alpha.png": (transparent_palette(), [255, 0, 0], [255, 255, 255]),
    "rgba.png": (encoded(Image.new("RGBA", (2, 1), (0, 0, 0, 51))), [204, 204, 204], [204, 204, 204]),
    "grey-alpha.png": (encoded(Image.new("LA", (2, 1), (0, 0))), [255] * 3, [255] * 3),
    "tRNS.png": (encoded(Image.new("RGB", (2, 1), (1, 2, 3)), transparency=(1, 2, 3)), [255] * 3, [255] * 3),
    "16-bit.png": (encoded(Image.fromarray(np.array([[0, 32896]], np.uint16))), [0] * 3, [128] * 3),
    "16-bit-transparent.png": (
        encoded(Image.fromarray(np.array([[300, 65535]], np.uint16)), transparency=300),
        [1] * 3,
        [255] * 3,
    ),
    "16-bit-big-endian.tif": (encoded(Image.fromarray(np.array([[257, 65535]], ">u2")), "TIFF"), [1] * 3, [255] * 3),
    "16-bit.tif": (encoded(Image.fromarray(np.array([[257, 65535]], np.uint16)), "TIFF"), [1] * 3, [255] * 3),
    "black-white.png": (encoded(Image.new("1", (2, 1), 1)), [255] * 3, [255] * 3),
    "grey.gif": (encoded(Image.new("L", (2, 1), 7), "GIF"), [7] * 3, [7] * 3),
}


@pytest.mark.parametrize("name", MODES)
def test_pixels_of_any_kind_become_rgb_on_white(tmp_path, name):
    data, left, right = MODES[name]
    (tmp_path / name).write_bytes(data)
    (tmp_path / name).with_suffix(".txt").write_text("x")
    picture = open_image(only(tmp_path))
    assert picture.mode == "RGB" and np.abs(pixels(picture) - [[left, right]]).max() <= 1


def test_48_bit_colour_keeps_its_upper_bits(tmp_path):
    """Pillow cannot write a PNG of 16 bits a channel."""
    rows = b"\0" + struct.pack(">3H", 0x1234, 0x80FF, 0xFFFF)
    header = struct.pack(">IIBBBBB", 1, 1, 16, 2, 0, 0, 0)
    data = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")
    (tmp_path / "a.png").write_bytes(data)
    (tmp_path / "a.txt").write_text("x")
    assert np.abs(pixels(open_image(only(tmp_path))) - [[[0x12, 0x80, 0xFF]]]).max() <= 1


def test_numbers_that_are_no_colours_are_refused(tmp_path):
    save(tmp_path / "a.tif", Image.fromarray(np.array([[0.5, 1e9]], np.float32)))
    with pytest.raises(InputError, match="^a.tif: got pixels of mode F, expected 8 or 16 bits"):
        open_image(only(tmp_path))


@pytest.mark.parametrize("kind", ["GIF", "PNG", "WEBP"])
def test_films_are_refused_and_their_first_frame_is_not_guessed(tmp_path, kind):
    frames = [Image.new("RGB", (8, 8), colour) for colour in ("red", "blue", "green")]
    save(tmp_path / f"a.{kind.lower()}", frames[0], save_all=True, append_images=frames[1:])
    with pytest.raises(InputError, match="got an animated image, expected a single one"):
        read_dataset(tmp_path)


def test_what_phones_put_behind_a_jpeg_is_left_out(tmp_path):
    file = save(tmp_path / "a.jpg", PICTURE, format="MPO", save_all=True, append_images=[Image.new("RGB", (9, 9))])
    assert Image.open(file).format == "MPO" and Image.open(file).n_frames == 2
    assert only(tmp_path).size == open_image(only(tmp_path)).size == (40, 24)


BROKEN = {
    "no bytes": b"",
    "text": b"this is no picture",
    "a web page": b"<!doctype html><html>",
    "half a header": encoded()[:20],
    # Pillow would start a program for this format.
    "PostScript": b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\nshowpage\n",
    "noise": np.random.default_rng(0).bytes(4000),
}


@pytest.mark.parametrize("data", BROKEN.values(), ids=BROKEN)
@pytest.mark.parametrize("ending", ["png", "jpg", "webp", "gif", "tiff", "bmp"])
def test_what_is_no_picture_is_named(tmp_path, data, ending):
    (tmp_path / f"bad.{ending}").write_bytes(data)
    (tmp_path / "bad.txt").write_text("x")
    with pytest.raises(ReadError, match=f"^bad.{ending}: .*; "):
        read_dataset(tmp_path)


@settings(database=None, deadline=None, max_examples=150)
@given(st.sampled_from(["PNG", "JPEG", "WEBP", "TIFF", "GIF", "BMP"]), st.data())
def test_damaged_pictures_are_ours_to_name(tmp_path_factory, kind, data):
    """Cut anywhere, or with bytes changed: a picture or an error with its name."""
    good = bytearray(encoded(kind=kind))
    good = good[: data.draw(st.integers(1, len(good)))]
    for _ in range(data.draw(st.integers(0, 3))):
        good[data.draw(st.integers(0, len(good) - 1))] = data.draw(st.integers(0, 255))
    folder = tmp_path_factory.mktemp("d")
    (folder / "p.png").write_bytes(bytes(good))
    (folder / "p.txt").write_text("x")
    try:
        assert open_image(only(folder)).mode == "RGB"
    except SanaError as error:
        assert str(error).startswith("p.png: ") and "; " in str(error)


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP"])
def test_a_truncated_picture_is_named_when_it_is_decoded(tmp_path, kind):
    picture = Image.fromarray(np.random.default_rng(0).integers(0, 256, (200, 200, 3), dtype=np.uint8))
    data = encoded(picture, kind)
    (tmp_path / "p.png").write_bytes(data[: len(data) // 2])
    (tmp_path / "p.txt").write_text("x")
    with pytest.raises(ReadError, match=r"^p.png: broken or incomplete \(.+\); save it again, or remove it"):
        open_image(only(tmp_path))


def test_a_decompression_bomb_is_refused_by_pillows_limit(tmp_path, monkeypatch):
    header = b"IHDR" + struct.pack(">IIBBBBB", 20000, 20000, 8, 2, 0, 0, 0)
    data = b"\x89PNG\r\n\x1a\n" + struct.pack(">I", 13) + header + struct.pack(">I", zlib.crc32(header))
    (tmp_path / "p.png").write_bytes(data + struct.pack(">I", 0) + b"IDAT")
    (tmp_path / "p.txt").write_text("x")
    with pytest.raises(InputError, match="^p.png: got more pixels than Pillow's limit .*, expected at most 178956970"):
        read_dataset(tmp_path)


def test_one_pixel_is_a_picture(tmp_path):
    save(tmp_path / "p.png", Image.new("RGB", (1, 1), (1, 2, 3)))
    assert only(tmp_path).size == (1, 1) and open_image(only(tmp_path)).getpixel((0, 0)) == (1, 2, 3)


def test_grey_of_16_bits_takes_no_more_memory_than_its_picture():
    import tracemalloc

    side = 2000
    data = encoded(Image.fromarray(np.zeros((side, side), np.uint16)))
    tracemalloc.start()
    decode_image(data, "grey.png")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    # numpy's arrays; Pillow's own memory is not traced
    assert peak < 2 * side**2


def chunk(kind, data):
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def with_chunks(*chunks, place=33, **options):
    """The PNG of the picture with more chunks, behind its header or before its end."""
    data = encoded(**options)
    place = place if place > 0 else len(data) + place
    return data[:place] + b"".join(chunks) + data[place:]


WORKFLOW = b"x" * 2_000_000
NOISE = np.random.default_rng(0).integers(32, 127, 2_000_000, dtype=np.uint8).tobytes()
END = -12
LARGE = {
    "compressed": with_chunks(chunk(b"zTXt", b"workflow\0\0" + zlib.compress(WORKFLOW))),
    "noise": with_chunks(chunk(b"zTXt", b"workflow\0\0" + zlib.compress(NOISE))),
    "plain": with_chunks(chunk(b"tEXt", b"workflow\0" + WORKFLOW)),
    "international": with_chunks(chunk(b"iTXt", b"workflow\0\1\0en\0name\0" + zlib.compress(WORKFLOW))),
    "international, plain": with_chunks(chunk(b"iTXt", b"workflow\0\0\0\0\0" + WORKFLOW)),
    "behind the pixels": with_chunks(chunk(b"zTXt", b"workflow\0\0" + zlib.compress(WORKFLOW)), place=END),
    "three": with_chunks(*[chunk(b"zTXt", b"a\0\0" + zlib.compress(WORKFLOW))] * 3),
    "exactly the limit": with_chunks(chunk(b"zTXt", b"a\0\0" + zlib.compress(b"x" * LARGEST_TEXT))),
    "one less than the limit": with_chunks(chunk(b"zTXt", b"a\0\0" + zlib.compress(b"x" * (LARGEST_TEXT - 1)))),
    "colour profile": with_chunks(chunk(b"iCCP", b"icc\0\0" + zlib.compress(WORKFLOW))),
    "many that are large together": with_chunks(*[chunk(b"zTXt", b"a\0\0" + zlib.compress(b"x" * 1_000_000))] * 80),
    "bomb": with_chunks(chunk(b"zTXt", b"a\0\0" + zlib.compress(bytes(300_000_000), 9))),
    "empty text": with_chunks(chunk(b"tEXt", b""), chunk(b"zTXt", b"workflow\0\0" + zlib.compress(WORKFLOW))),
    "broken text": with_chunks(chunk(b"zTXt", b"a\0\0rubbish"), chunk(b"tEXt", b"b\0" + WORKFLOW)),
    "orientation": with_chunks(chunk(b"zTXt", b"workflow\0\0" + zlib.compress(WORKFLOW)), exif=exif_of(6)),
}


@pytest.mark.parametrize("data", LARGE.values(), ids=LARGE)
@pytest.mark.parametrize("in_tar", [False, True])
def test_a_png_with_large_texts_is_read(tmp_path, data, in_tar):
    from PIL import PngImagePlugin

    limits = PngImagePlugin.MAX_TEXT_CHUNK, PngImagePlugin.MAX_TEXT_MEMORY
    if in_tar:
        sample = only(write_tar(tmp_path / "s.tar", [("a.png", data), ("a.txt", b"x"), ("b.md", b"behind it")]))
    else:
        (tmp_path / "a.png").write_bytes(data)
        (tmp_path / "a.txt").write_text("x")
        sample = only(tmp_path)
    expected = PICTURE.transpose(Image.Transpose.ROTATE_270) if data is LARGE["orientation"] else PICTURE
    assert sample.size == expected.size and (pixels(open_image(sample)) == pixels(expected)).all()
    assert limits == (PngImagePlugin.MAX_TEXT_CHUNK, PngImagePlugin.MAX_TEXT_MEMORY)


def test_the_texts_of_a_png_are_not_decompressed(tmp_path, monkeypatch):
    texts = [chunk(b"zTXt", b"workflow\0\0" + zlib.compress(b"x" * 1_000_000))] * 100
    xmp = chunk(b"iTXt", b'XML:com.adobe.xmp\0\0\0\0\0<rdf:Description tiff:Orientation="6"/>')
    (tmp_path / "a.png").write_bytes(with_chunks(*texts, xmp, xmp, *texts))
    (tmp_path / "a.txt").write_text("x")
    calls, decompress = [], zlib.decompressobj
    monkeypatch.setattr(zlib, "decompressobj", lambda *options: calls.append(options) or decompress(*options))
    sample = only(tmp_path)
    assert (pixels(open_image(sample)) == pixels(PICTURE.transpose(Image.Transpose.ROTATE_270))).all()
    assert len(calls) < 3


GIF = encoded(PICTURE.quantize(2), "GIF")
# The end of the palette of two colours.
GIF_HEADER = 13 + 6
TAGS = [struct.pack("<HHII", number, 4, 1, 0) for number in (256, 257, *range(30_000, 60_000))]
FLOODS = {
    "a.ppm": b"P6\n#" + b"a" * 100_000 + b"\n1 1\n255\nabc",
    "texts.png": with_chunks(*[chunk(b"tEXt", b"a\0")] * 20_000),
    "unknown.png": with_chunks(*[chunk(b"abCd", b"")] * 20_000),
    "comments.jpg": b"\xff\xd8" + b"\xff\xfe\0\3a" * 20_000 + encoded(kind="JPEG")[2:],
    "filled.jpg": b"\xff\xd8" + b"\xff" * 100_000 + encoded(kind="JPEG")[2:],
    "before.gif": GIF[:GIF_HEADER] + b"\x21\xfe\1a\0" * 20_000 + GIF[GIF_HEADER:],
    "behind.gif": GIF[:-1] + b"\x21\xfe\1a\0" * 20_000 + b";",
    "tags.tif": b"II*\0\x08\0\0\0" + struct.pack("<H", len(TAGS)) + b"".join(TAGS),
}


@pytest.mark.parametrize("name", FLOODS)
def test_a_header_of_many_parts_is_named_or_skipped(tmp_path, name):
    (tmp_path / name).write_bytes(FLOODS[name])
    (tmp_path / name).with_suffix(".txt").write_text("x")
    with pytest.raises(ReadError, match=f"^{name}: got (too many comments, texts or tags in its header|no image), "):
        read_dataset(tmp_path)
    with pytest.raises(ReadError, match=f"^{name}: got "):
        decode_image(FLOODS[name], name)
    save(tmp_path / "good.png")
    assert [sample.name for sample in read_dataset(tmp_path, skip_broken=True)] == ["good.png"]


@pytest.mark.parametrize("kind", ["PNG", "GIF"])
def test_a_large_image_is_no_header_of_many_parts(tmp_path, kind):
    noise = Image.fromarray(np.random.default_rng(0).integers(0, 256, (1500, 2000, 3), dtype=np.uint8))
    save(tmp_path / f"a.{kind.lower()}", noise)
    assert only(tmp_path).size == open_image(only(tmp_path)).size == noise.size


@pytest.mark.parametrize("claimed", [0, 2**31 - 1, 2**32 - 1])
@pytest.mark.parametrize("kind", [b"tEXt", b"zTXt", b"iTXt", b"iCCP"])
def test_a_text_that_claims_another_size_is_named(tmp_path, kind, claimed):
    data = encoded()
    (tmp_path / "p.png").write_bytes(data[:33] + struct.pack(">I", claimed) + kind + data[33:])
    (tmp_path / "p.txt").write_text("x")
    with pytest.raises(ReadError, match="^p.png: "):
        open_image(only(tmp_path))


def test_an_animated_avif_is_refused(tmp_path):
    if not features.check("avif"):
        pytest.skip("this Pillow has no AVIF")
    frames = [Image.new("RGB", (8, 8), colour) for colour in ("red", "blue")]
    save(tmp_path / "a.avif", frames[0], save_all=True, append_images=frames[1:])
    with pytest.raises(InputError, match="got an animated image, expected a single one"):
        read_dataset(tmp_path)
