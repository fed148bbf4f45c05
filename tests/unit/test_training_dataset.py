"""Data sets as people have them: pictures of every kind, missing captions, tars that are cut or made to harm."""

import io
import json
import os
import struct
import tarfile
import zlib

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from PIL import Image, ImageOps

from sana_core import InputError, MissingFileError, ReadError, SanaError
from sana_core.training.dataset import check_controls, open_mask, open_picture, read_dataset

SMOOTH = np.linspace(20, 230, 24 * 40 * 3).reshape(24, 40, 3).astype(np.uint8)
PICTURE = Image.fromarray(SMOOTH)


def save(path, picture=PICTURE, caption="a red circle", **options):
    path.parent.mkdir(parents=True, exist_ok=True)
    picture.save(path, **options)
    if caption is not None:
        path.with_suffix(".txt").write_text(caption, encoding="utf-8")
    return path


def encoded(picture=PICTURE, kind="PNG", **options):
    stream = io.BytesIO()
    picture.save(stream, kind, **options)
    return stream.getvalue()


def exif_of(turn):
    exif = Image.Exif()
    exif[0x0112] = turn
    return exif


def write_tar(path, members):
    with tarfile.open(path, "w") as archive:
        for name, data in members:
            info = data if isinstance(data, tarfile.TarInfo) else tarfile.TarInfo(name)
            if isinstance(data, bytes):
                info.size = len(data)
            archive.addfile(info, io.BytesIO(data) if isinstance(data, bytes) else None)
    return path


def only(folder):
    (sample,) = read_dataset(folder)
    return sample


def pixels(picture):
    return np.asarray(picture).astype(int)


def test_a_folder_is_read_with_all_in_it_sorted_by_name(tmp_path):
    for name in ("b.png", "a.JPG", "deep/er/c.webp", "deep/a b.bmp", "z.tiff", "\u732b.png"):
        save(tmp_path / name, caption=f"caption of {name}")
    for ignored in (".hidden.png", ".cache/x.png", "notes.md", "._a.JPG"):
        save(tmp_path / ignored, caption=None, format="PNG")
    samples = read_dataset(tmp_path)
    names = ["a.JPG", "b.png", "deep/a b.bmp", "deep/er/c.webp", "z.tiff", "\u732b.png"]
    assert sorted(names) == [sample.name for sample in samples]
    for sample in samples:
        assert sample.caption == f"caption of {sample.name}" and sample.size == (40, 24) and sample.mask is None
        assert np.abs(pixels(open_picture(sample)) - SMOOTH).max() < 25 and open_mask(sample) is None


@pytest.mark.parametrize("turn", range(1, 9))
@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "TIFF"])
def test_pictures_and_masks_are_upright_in_all_orientations_of_exif(tmp_path, turn, kind):
    """Pillow's own exif_transpose says what upright is."""
    file = save(tmp_path / f"p.{kind.lower()}", exif=exif_of(turn))
    save(tmp_path / f"p-mask.{kind.lower()}", PICTURE.convert("L"), caption=None, exif=exif_of(turn))
    sample = only(tmp_path)
    expected = ImageOps.exif_transpose(Image.open(file)).convert("RGB")
    assert sample.size == expected.size == ((24, 40) if turn > 4 else (40, 24))
    picture = open_picture(sample)
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
    "16-bit.tif": (encoded(Image.fromarray(np.array([[257, 65535]], np.uint16)), "TIFF"), [1] * 3, [255] * 3),
    "black-white.png": (encoded(Image.new("1", (2, 1), 1)), [255] * 3, [255] * 3),
    "grey.gif": (encoded(Image.new("L", (2, 1), 7), "GIF"), [7] * 3, [7] * 3),
}


@pytest.mark.parametrize("name", MODES)
def test_pixels_of_any_kind_become_rgb_on_white(tmp_path, name):
    data, left, right = MODES[name]
    (tmp_path / name).write_bytes(data)
    (tmp_path / name).with_suffix(".txt").write_text("x")
    picture = open_picture(only(tmp_path))
    assert picture.mode == "RGB" and np.abs(pixels(picture) - [[left, right]]).max() <= 1


def test_48_bit_colour_keeps_its_upper_bits(tmp_path):
    """A PNG of 16 bits a channel, made by hand, for Pillow writes none."""

    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    rows = b"\0" + struct.pack(">3H", 0x1234, 0x80FF, 0xFFFF)
    header = struct.pack(">IIBBBBB", 1, 1, 16, 2, 0, 0, 0)
    data = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")
    (tmp_path / "a.png").write_bytes(data)
    (tmp_path / "a.txt").write_text("x")
    assert np.abs(pixels(open_picture(only(tmp_path))) - [[[0x12, 0x80, 0xFF]]]).max() <= 1


def test_numbers_that_are_no_colours_are_refused(tmp_path):
    save(tmp_path / "a.tif", Image.fromarray(np.array([[0.5, 1e9]], np.float32)))
    with pytest.raises(InputError, match="^a.tif: got pixels of mode F, expected 8 or 16 bits"):
        open_picture(only(tmp_path))


@pytest.mark.parametrize("kind", ["GIF", "PNG", "WEBP"])
def test_films_are_refused_and_their_first_frame_is_not_guessed(tmp_path, kind):
    frames = [Image.new("RGB", (8, 8), colour) for colour in ("red", "blue", "green")]
    save(tmp_path / f"a.{kind.lower()}", frames[0], save_all=True, append_images=frames[1:])
    with pytest.raises(InputError, match="got an animated picture, expected a single one"):
        read_dataset(tmp_path)


def test_what_phones_put_behind_a_jpeg_is_left_out(tmp_path):
    file = save(tmp_path / "a.jpg", PICTURE, format="MPO", save_all=True, append_images=[Image.new("RGB", (9, 9))])
    assert Image.open(file).format == "MPO" and Image.open(file).n_frames == 2
    assert only(tmp_path).size == open_picture(only(tmp_path)).size == (40, 24)


BROKEN = {
    "no bytes": b"",
    "text": b"this is no picture",
    "a web page": b"<!doctype html><html>",
    "half a header": encoded()[:20],
    # for which Pillow would start a program
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
        assert open_picture(only(folder)).mode == "RGB"
    except SanaError as error:
        assert str(error).startswith("p.png: ") and "; " in str(error)


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP"])
def test_a_truncated_picture_is_named_when_it_is_decoded(tmp_path, kind):
    picture = Image.fromarray(np.random.default_rng(0).integers(0, 256, (200, 200, 3), dtype=np.uint8))
    data = encoded(picture, kind)
    (tmp_path / "p.png").write_bytes(data[: len(data) // 2])
    (tmp_path / "p.txt").write_text("x")
    with pytest.raises(ReadError, match=r"^p.png: broken or incomplete \(.+\); save it again, or remove it"):
        open_picture(only(tmp_path))


def test_a_decompression_bomb_is_refused_by_pillows_limit(tmp_path, monkeypatch):
    header = b"IHDR" + struct.pack(">IIBBBBB", 20000, 20000, 8, 2, 0, 0, 0)
    data = b"\x89PNG\r\n\x1a\n" + struct.pack(">I", 13) + header + struct.pack(">I", zlib.crc32(header))
    (tmp_path / "p.png").write_bytes(data + struct.pack(">I", 0) + b"IDAT")
    (tmp_path / "p.txt").write_text("x")
    with pytest.raises(InputError, match="^p.png: got more pixels than Pillow's limit .*, expected at most 178956970"):
        read_dataset(tmp_path)


def test_one_pixel_is_a_picture(tmp_path):
    save(tmp_path / "p.png", Image.new("RGB", (1, 1), (1, 2, 3)))
    assert only(tmp_path).size == (1, 1) and open_picture(only(tmp_path)).getpixel((0, 0)) == (1, 2, 3)


def test_missing_captions_are_counted_and_the_first_is_named(tmp_path, caplog):
    for name in ("a", "b", "c", "d"):
        save(tmp_path / "x" / f"{name}.png", caption=None if name in "bd" else "x")
    with pytest.raises(InputError, match="^x/b.png: has no caption, expected b.txt beside it.*; likewise 1 more of"):
        read_dataset(tmp_path)
    assert [record.getMessage().split(":")[0] for record in caplog.records] == ["x/b.png", "x/d.png"]


def test_an_empty_text_is_a_picture_without_caption_and_said_in_the_log(tmp_path, caplog):
    save(tmp_path / "a.png", caption="")
    save(tmp_path / "b.png", caption=" \n")
    save(tmp_path / "c.png")
    assert [sample.caption for sample in read_dataset(tmp_path)] == ["", "", "a red circle"]
    assert "2 of 3 captions are empty, the first of a.png" in caplog.text


def test_captions_in_json_serve_where_there_is_no_text(tmp_path):
    save(tmp_path / "a.png", caption="from the text")
    (tmp_path / "a.json").write_text('{"prompt": "from json"}')
    for name, document in (
        ("b", {"prompt": " p ", "caption": "c"}),
        ("c", {"caption": "c", "text": "t"}),
        ("d", {"text": "t"}),
    ):
        save(tmp_path / f"{name}.png", caption=None)
        (tmp_path / f"{name}.json").write_text(json.dumps(document))
    assert [sample.caption for sample in read_dataset(tmp_path)] == ["from the text", "p", "c", "t"]


@pytest.mark.parametrize(
    "text, said",
    [
        ('{"prompt": 5}', "has no caption, expected a text under one of prompt, caption, text"),
        ("[1]", "got a list of JSON, expected an object"),
        ("{", r"no JSON \("),
        ("[" * 100000, "its JSON nests too deeply"),
        ('{"prompt": "\\ud800"}', "text: holds half a character"),
    ],
)
def test_captions_that_are_none_are_named(tmp_path, text, said):
    save(tmp_path / "a.png", caption=None)
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(InputError, match=f"^a.json: {said}"):
        read_dataset(tmp_path)


def test_captions_are_utf_8_with_or_without_mark(tmp_path):
    save(tmp_path / "a.png", caption="\ufeff  \u732b \U0001f3a8 \n")
    assert only(tmp_path).caption == "\u732b \U0001f3a8"
    (tmp_path / "a.txt").write_bytes("caf\u00e9".encode("latin-1"))
    with pytest.raises(InputError, match="^a.txt: not UTF-8 at byte 3"):
        read_dataset(tmp_path)
    (tmp_path / "a.txt").write_bytes(b"x" * 1_000_001)
    with pytest.raises(InputError, match="^a.txt: got 1000001 bytes, expected at most 1000000"):
        read_dataset(tmp_path)


def test_two_pictures_of_one_caption_are_refused(tmp_path):
    save(tmp_path / "a.png")
    save(tmp_path / "a.jpg")
    with pytest.raises(InputError, match="^a.jpg: a.jpg and a.png have one name"):
        read_dataset(tmp_path)


def test_masks_belong_to_the_picture_beside_them_and_have_its_size(tmp_path):
    save(tmp_path / "a.jpg")
    save(tmp_path / "a.mask.png", Image.new("L", (40, 24), 9), caption=None)
    # a picture of a mask, for there is none named venetian
    save(tmp_path / "venetian-mask.png")
    first, second = read_dataset(tmp_path)
    assert open_mask(first).getextrema() == (9, 9) and second.name == "venetian-mask.png" and second.mask is None
    save(tmp_path / "a-mask.png", Image.new("L", (40, 24)), caption=None)
    with pytest.raises(InputError, match="^a.jpg: a-mask.png and a.mask.png have one name"):
        read_dataset(tmp_path)
    (tmp_path / "a.mask.png").unlink()
    save(tmp_path / "a-mask.png", Image.new("L", (24, 40)), caption=None)
    with pytest.raises(InputError, match="^a.jpg: its mask is 24 x 40, expected the picture's 40 x 24"):
        read_dataset(tmp_path)


@pytest.mark.parametrize("mark", ["-control", ".control"])
def test_control_pictures_belong_to_the_picture_beside_them_and_have_its_size(tmp_path, mark):
    save(tmp_path / "a.jpg")
    control = save(tmp_path / f"a{mark}.png", Image.new("RGB", (40, 24)), caption=None)
    save(tmp_path / "a-mask.png", Image.new("L", (40, 24), 9), caption=None)
    save(tmp_path / "remote-control.png")
    first, second = read_dataset(tmp_path)
    assert (first.control.file, second.name, second.control) == (control, "remote-control.png", None)
    with pytest.raises(
        InputError, match="^remote-control.png: has no control picture, expected remote-control-control"
    ):
        check_controls([first, second])
    check_controls([first])
    save(tmp_path / f"a{mark}.webp", caption=None)
    with pytest.raises(InputError, match=f"^a.jpg: a{mark}.png and a{mark}.webp have one name"):
        read_dataset(tmp_path)
    (tmp_path / f"a{mark}.webp").unlink()
    save(control, Image.new("RGB", (24, 40)), caption=None)
    with pytest.raises(InputError, match="^a.jpg: its control picture is 24 x 40, expected the picture's 40 x 24"):
        read_dataset(tmp_path)


@pytest.mark.parametrize("key", ["control", "conditioning_image"])
def test_a_jsonl_names_control_pictures(tmp_path, key):
    save(tmp_path / "a.png", caption=None)
    save(tmp_path / "edges" / "a.png", caption=None)
    file = write_lines(tmp_path, {"file_name": "a.png", "text": "one", key: "edges/a.png"}, name="data.jsonl")
    assert only(file).control.file == tmp_path / "edges" / "a.png"
    file = write_lines(tmp_path, {"file_name": "a.png", "text": "one", key: "../a.png"}, name="data.jsonl")
    with pytest.raises(InputError, match="got the path ../a.png, expected one inside"):
        read_dataset(file)


def test_texts_without_picture_are_said_in_the_log(tmp_path, caplog):
    save(tmp_path / "a.png")
    (tmp_path / "README.txt").write_text("x")
    assert len(read_dataset(tmp_path)) == 1 and "1 texts belong to no picture, the first is README.txt" in caplog.text


def test_no_picture_at_all_is_said(tmp_path):
    with pytest.raises(InputError, match=r"^dataset: no picture in .*, expected files that end with .png, .jpg"):
        read_dataset(tmp_path)
    with pytest.raises(MissingFileError, match="^dataset: no file or folder .*nowhere"):
        read_dataset(tmp_path / "nowhere")
    (tmp_path / "x.csv").write_text("a,b")
    with pytest.raises(InputError, match="^dataset: got the file x.csv, expected a folder"):
        read_dataset(tmp_path / "x.csv")


def test_links_that_leave_the_folder_are_refused_and_those_inside_serve(tmp_path):
    save(tmp_path / "secret" / "s.png")
    data = tmp_path / "data"
    save(data / "a.png")
    (data / "b.png").symlink_to("a.png")
    (data / "b.txt").symlink_to(data / "a.txt")
    (data / "again").symlink_to(data, target_is_directory=True)
    assert [sample.name for sample in read_dataset(data)] == ["a.png", "b.png"]
    for link, target in (("c.png", "secret/s.png"), ("folder", "secret"), ("c.txt", "secret/s.txt")):
        (data / link).symlink_to(tmp_path / target)
        with pytest.raises(InputError, match=f"^{link}: {link} leads out of the data set's folder"):
            read_dataset(data)
        (data / link).unlink()
    (data / "c.png").symlink_to("c.png")
    with pytest.raises(SanaError, match="^c.png: "):
        read_dataset(data)
    (data / "c.png").unlink()
    (data / "c.png").symlink_to("nothing.png")
    with pytest.raises(MissingFileError, match="^c.png: no such file c.png"):
        read_dataset(data)


@pytest.mark.parametrize("ending", [".png", ".txt", ".tar"])
def test_pipes_are_not_opened(tmp_path, ending):
    save(tmp_path / "b.png")
    save(tmp_path / "a.png")
    (tmp_path / f"a{ending}").unlink(missing_ok=True)
    os.mkfifo(tmp_path / f"a{ending}")
    with pytest.raises(InputError, match=f"^a{ending}: got a folder, pipe or device, expected a regular file"):
        read_dataset(tmp_path)


def test_a_folder_with_the_name_of_a_picture_is_a_folder(tmp_path):
    save(tmp_path / "a.png" / "b.png")
    assert only(tmp_path).name == "a.png/b.png"


def write_lines(folder, *lines, name="data.jsonl"):
    file = folder / name
    file.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines), encoding="utf-8")
    return file


@pytest.mark.parametrize("name", ["data.jsonl", "metadata.jsonl"])
def test_a_jsonl_names_pictures_captions_and_masks(tmp_path, name):
    save(tmp_path / "x" / "b.png", caption="not this one")
    save(tmp_path / "a.jpg", caption=None)
    save(tmp_path / "m.png", Image.new("L", (40, 24), 5), caption=None)
    lines = [
        {"file_name": "x/b.png", "text": "one"},
        "",
        {"image": "./a.jpg", "caption": "two", "mask": "m.png", "k": 1},
    ]
    file = write_lines(tmp_path, *lines, name=name)
    # a folder with metadata.jsonl is what that lists
    first, second = read_dataset(file if name == "data.jsonl" else tmp_path)
    assert (first.name, first.caption, second.name, second.caption) == ("x/b.png", "one", "a.jpg", "two")
    assert open_mask(second).getextrema() == (5, 5) and (pixels(open_picture(first)) == SMOOTH).all()


@pytest.mark.parametrize(
    "line, kind, said",
    [
        ("{broken", InputError, r"no JSON \("),
        ('"text"', InputError, "got a str of JSON, expected an object"),
        ({"file_name": "a.png"}, InputError, "has no caption"),
        ({"text": "x"}, InputError, "got the path None, expected one inside the data set"),
        ({"file_name": 5, "text": "x"}, InputError, "got the path 5"),
        ({"file_name": "", "text": "x"}, InputError, "got the path , expected"),
        ({"file_name": "../a.png", "text": "x"}, InputError, "got the path ../a.png, expected one inside"),
        ({"file_name": "x/../../a.png", "text": "x"}, InputError, "got the path"),
        ({"file_name": "/etc/a.png", "text": "x"}, InputError, "got the path /etc/a.png"),
        ({"file_name": "C:\\a.png", "text": "x"}, InputError, "got the path"),
        ({"file_name": "\\\\host\\a.png", "text": "x"}, InputError, "got the path"),
        ({"file_name": "a\0.png", "text": "x"}, InputError, "got the path"),
        ({"file_name": "link/s.png", "text": "x"}, InputError, "link/s.png leads out of the data set's folder"),
        ({"file_name": "none.png", "text": "x"}, MissingFileError, "no such file none.png"),
        ({"file_name": "a.png", "text": "x", "mask": "../m.png"}, InputError, "got the path ../m.png"),
        ({"file_name": "good.png", "text": "x"}, InputError, "good.png stands in line 1 already"),
    ],
)
def test_bad_lines_are_named_by_number(tmp_path, line, kind, said):
    save(tmp_path / "outside" / "s.png")
    folder = tmp_path / "data"
    save(folder / "a.png", caption=None)
    save(folder / "good.png", caption=None)
    (folder / "link").symlink_to(tmp_path / "outside")
    file = write_lines(folder, {"file_name": "good.png", "text": "x"}, "", line)
    with pytest.raises(kind, match=f"^data.jsonl line 3: {said}"):
        read_dataset(file)
    with pytest.raises(InputError, match="likewise 1 more"):
        read_dataset(write_lines(folder, "{", "[", name="two.jsonl"))


def test_a_jsonl_that_is_not_utf_8_names_the_line(tmp_path):
    (tmp_path / "d.jsonl").write_bytes(b'\n{"file_name": "caf\xe9.png"}\n')
    with pytest.raises(InputError, match="^d.jsonl line 2: not UTF-8 at byte 18"):
        read_dataset(tmp_path / "d.jsonl")


MEMBERS = [
    ("./001.png", encoded()),
    ("./001.json", json.dumps({"prompt": "from json", "width": 1, "height": 2}).encode()),
    ("sub/002.jpg", encoded(kind="JPEG", exif=exif_of(6))),
    ("sub/002.txt", b"from text"),
    ("sub/002.mask.png", encoded(Image.new("L", (24, 40), 77))),
    ("x" * 150 + ".png", encoded()),
    ("x" * 150 + ".txt", b"a long name"),
]


def check_members(samples, before):
    assert [sample.name for sample in samples] == [
        f"{before}{name}" for name in ("001.png", "sub/002.jpg", MEMBERS[5][0])
    ]
    assert [sample.caption for sample in samples] == ["from json", "from text", "a long name"]
    assert [sample.size for sample in samples] == [(40, 24), (24, 40), (40, 24)]
    assert (pixels(open_picture(samples[0])) == SMOOTH).all() and open_mask(samples[1]).getextrema() == (77, 77)
    assert open_picture(samples[1]).size == (24, 40)


@pytest.mark.parametrize("dialect", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_a_tar_is_read_in_place(tmp_path, dialect):
    members = MEMBERS if dialect != tarfile.USTAR_FORMAT else [(name[-90:], data) for name, data in MEMBERS]
    with tarfile.open(tmp_path / "s.tar", "w", format=dialect) as archive:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    if dialect != tarfile.USTAR_FORMAT:
        check_members(read_dataset(tmp_path / "s.tar"), "s.tar:")
    else:
        assert len(read_dataset(tmp_path / "s.tar")) == 3
    assert [file.name for file in tmp_path.iterdir()] == ["s.tar"]


def test_a_folder_of_tars_is_all_of_them_or_those_that_wids_lists(tmp_path):
    write_tar(tmp_path / "00000.tar", MEMBERS)
    write_tar(tmp_path / "deep.tar", MEMBERS)
    both = read_dataset(tmp_path)
    check_members(both[:3], "00000.tar:")
    check_members(both[3:], "deep.tar:")
    shards = {"__kind__": "wids-shard-index-v1", "shardlist": [{"url": "deep.tar", "nsamples": 3}], "wids_version": 1}
    (tmp_path / "wids-meta.json").write_text(json.dumps(shards))
    check_members(read_dataset(tmp_path), "deep.tar:")
    check_members(read_dataset(tmp_path / "wids-meta.json"), "deep.tar:")


@pytest.mark.parametrize(
    "document, said",
    [
        ({}, "expected a list 'shardlist' of tars"),
        ({"shardlist": [5]}, "expected a list 'shardlist' of tars"),
        ({"shardlist": [{"url": "../s.tar"}]}, "got the path ../s.tar, expected one inside"),
        ({"shardlist": [{"url": "http://host/s.tar"}]}, "no such file http:/host/s.tar"),
        ({"shardlist": [{}]}, "got the path None"),
    ],
)
def test_wids_lists_only_what_is_in_its_folder(tmp_path, document, said):
    (tmp_path / "wids-meta.json").write_text(json.dumps(document))
    with pytest.raises(SanaError, match=f"^wids-meta.json: {said}"):
        read_dataset(tmp_path)


def link(kind):
    info = tarfile.TarInfo("001.png")
    info.type, info.linkname = kind, "/etc/passwd"
    return info


@pytest.mark.parametrize(
    "members, said",
    [
        ([("../001.png", encoded())], "got the path ../001.png, expected one inside the data set"),
        ([("/001.png", encoded())], "got the path /001.png"),
        ([("a/../../b.png", encoded())], "got the path"),
        ([("a\n.png", encoded())], "got the path"),
        ([("", link(tarfile.SYMTYPE))], "001.png is a link or device, expected plain files"),
        ([("", link(tarfile.LNKTYPE))], "001.png is a link or device"),
        ([("", link(tarfile.CHRTYPE))], "001.png is a link or device"),
        ([("", link(tarfile.FIFOTYPE))], "001.png is a link or device"),
        ([("a.png", encoded()), ("./a.png", encoded())], "holds a.png twice"),
        ([("a.png", encoded()), ("a.txt", bytes(1_000_001))], "a.txt: got 1000001 bytes, expected at most"),
        ([("a.png", encoded())], "a.png: has no caption, expected a.txt beside it"),
        ([("a.png", b""), ("a.txt", b"x")], "a.png: got an empty file"),
    ],
)
def test_hostile_and_faulty_members_are_refused(tmp_path, members, said):
    write_tar(tmp_path / "s.tar", members)
    with pytest.raises(SanaError, match=f"^s.tar:{' ?' if ':' not in said[:9] else ''}{said}"):
        read_dataset(tmp_path / "s.tar")


def test_a_member_that_claims_to_be_huge_takes_no_memory(tmp_path):
    info = tarfile.TarInfo("a.png")
    info.size = 1 << 40
    (tmp_path / "s.tar").write_bytes(info.tobuf() + encoded())
    with pytest.raises(ReadError, match="^s.tar: broken or incomplete tar"):
        read_dataset(tmp_path / "s.tar")
    # a sparse file of 3 TB, with a name of 2 GB by its header
    for kind in (tarfile.GNUTYPE_LONGNAME, tarfile.XHDTYPE):
        info = tarfile.TarInfo("a.png")
        info.size, info.type = 1 << 31, kind
        with (tmp_path / "s.tar").open("wb") as stream:
            stream.write(info.tobuf())
            stream.truncate(3 << 40)
        with pytest.raises(ReadError, match=r"^s.tar: broken or incomplete tar \(a header of 2147483648 bytes\)"):
            read_dataset(tmp_path / "s.tar")


def test_a_tar_that_was_cut_anywhere_is_never_taken_for_whole(tmp_path):
    data = write_tar(tmp_path / "whole.tar", MEMBERS).read_bytes()
    used = len(data.rstrip(b"\0"))
    file = tmp_path / "s.tar"
    for length in {0, 1, 511, 512, 513, *range(0, used, 512), *range(100, used, 997)}:
        file.write_bytes(data[:length])
        with pytest.raises(ReadError, match="^s.tar: "):
            read_dataset(file)


@settings(database=None, deadline=None, max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(st.integers(0, 20000), st.integers(0, 255)), min_size=1, max_size=20))
@example([(124, 0xFF), (125, 0xFF)])
@example([(124, 0x80), (128, 0xFF)])
def test_damaged_tars_are_ours_to_name(tmp_path, changes):
    data = bytearray(write_tar(tmp_path / "whole.tar", MEMBERS).read_bytes())
    for place, value in changes:
        data[place % len(data)] = value
    repair_sums(data)
    (tmp_path / "s.tar").write_bytes(data)
    try:
        for sample in read_dataset(tmp_path / "s.tar"):
            open_picture(sample)
    except SanaError as error:
        assert str(error).startswith(("s.tar:", "dataset: no picture in "))


def repair_sums(data):
    """Give the first header its right sum again, so that what it says is believed."""
    data[148:156] = b"        "
    data[148:156] = b"%06o\0 " % sum(data[:512])


def test_compressed_tars_are_told_apart_from_plain_ones(tmp_path):
    save(tmp_path / "a.png")
    (tmp_path / "s.tar.gz").write_bytes(b"x")
    with pytest.raises(InputError, match="^s.tar.gz: a compressed tar, expected a plain one"):
        read_dataset(tmp_path)
    with tarfile.open(tmp_path / "s.tar", "w:gz"):
        pass
    (tmp_path / "s.tar.gz").unlink()
    with pytest.raises(ReadError, match="^s.tar: broken or incomplete tar"):
        read_dataset(tmp_path)


def test_reading_polls_and_stops_at_once(tmp_path):
    for number in range(5):
        save(tmp_path / f"{number}.png")
    polled = []

    def poll():
        polled.append(1)
        if len(polled) == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        read_dataset(tmp_path, poll)
    assert len(polled) == 3


def test_a_picture_that_went_away_or_was_cut_is_named(tmp_path):
    file = write_tar(tmp_path / "s.tar", MEMBERS)
    sample = read_dataset(file)[2]
    with file.open("r+b") as stream:
        stream.truncate(sample.picture.start + 10)
    with pytest.raises(ReadError, match=r": got 10 bytes, expected \d+; the file was cut short"):
        open_picture(sample)
    file.unlink()
    with pytest.raises(MissingFileError, match="no such file"):
        open_picture(sample)
