"""Data sets as people have them: folders and lists, captions and masks that are missing or wrong, links and pipes."""

import json
import os
import sys
import unicodedata

import numpy as np
import pytest
from data_sets import PICTURE, SMOOTH, only, open_mask, pixels, save
from PIL import Image, features

from sana_core import InputError, MissingFileError, SanaError
from sana_core.training.dataset import check_controls, open_image, read_dataset
from sana_core.training.schedule import read_phase
from sana_core.training.settings import Phase


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
        assert np.abs(pixels(open_image(sample)) - SMOOTH).max() < 25 and open_mask(sample) is None


def test_missing_captions_are_counted_and_the_first_is_named(tmp_path, caplog):
    for name in ("a", "b", "c", "d"):
        save(tmp_path / "x" / f"{name}.png", caption=None if name in "bd" else "x")
    with pytest.raises(InputError, match="^x/b.png: has no caption, expected a text file of the .*; also 1 more of"):
        read_dataset(tmp_path)
    assert [record.getMessage().split(":")[0] for record in caplog.records] == ["x/b.png", "x/d.png"]


def test_an_empty_text_is_a_picture_without_caption_and_said_in_the_log(tmp_path, caplog):
    save(tmp_path / "a.png", caption="")
    save(tmp_path / "b.png", caption=" \n")
    save(tmp_path / "c.png")
    assert [sample.caption for sample in read_dataset(tmp_path)] == ["", "", "a red circle"]
    assert "2 of 3 captions are empty, the first of a.png" in caplog.text


def test_one_caption_serves_all_images_without_a_file(tmp_path):
    save(tmp_path / "a.png", caption=None)
    save(tmp_path / "b.png", caption="")
    save(tmp_path / "c.png")
    (tmp_path / "prior").mkdir()
    save(tmp_path / "prior" / "d.png", caption=None)
    samples = read_dataset(tmp_path, caption="a photo of sks")
    assert [sample.caption for sample in samples] == ["a photo of sks", "", "a red circle", "a photo of sks"]
    folders = {"data": (str(tmp_path),), "regularisation": (str(tmp_path / "prior"),)}
    phase = Phase(**folders, caption="a photo of sks", regularisation_caption="a photo", steps=1)
    learned = read_phase(phase, lambda: None)
    assert {sample.caption for sample in learned if sample.prior} == {"a photo"}
    assert {sample.caption for sample in learned if not sample.prior} == {"a photo of sks", "", "a red circle"}


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
        ('{"prompt": "\\ud800"}', "caption: contains half a character"),
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
    # This is an image of a mask, because no image is named venetian.
    save(tmp_path / "venetian-mask.png")
    first, second = read_dataset(tmp_path)
    assert open_mask(first).getextrema() == (9, 9) and second.name == "venetian-mask.png" and second.mask is None
    save(tmp_path / "a-mask.png", Image.new("L", (40, 24)), caption=None)
    with pytest.raises(InputError, match="^a.jpg: a-mask.png and a.mask.png have one name"):
        read_dataset(tmp_path)
    (tmp_path / "a.mask.png").unlink()
    save(tmp_path / "a-mask.png", Image.new("L", (24, 40)), caption=None)
    with pytest.raises(InputError, match="^a.jpg: its mask is 24 x 40, expected the image's 40 x 24"):
        read_dataset(tmp_path)


@pytest.mark.parametrize("mark", ["-control", ".control"])
def test_control_pictures_belong_to_the_picture_beside_them_and_have_its_size(tmp_path, mark):
    save(tmp_path / "a.jpg")
    control = save(tmp_path / f"a{mark}.png", Image.new("RGB", (40, 24)), caption=None)
    save(tmp_path / "a-mask.png", Image.new("L", (40, 24), 9), caption=None)
    save(tmp_path / "remote-control.png")
    first, second = read_dataset(tmp_path)
    assert (first.control.file, second.name, second.control) == (control, "remote-control.png", None)
    with pytest.raises(InputError, match="^remote-control.png: has no control image, expected remote-control-control"):
        check_controls([first, second])
    check_controls([first])
    save(tmp_path / f"a{mark}.webp", caption=None)
    with pytest.raises(InputError, match=f"^a.jpg: a{mark}.png and a{mark}.webp have one name"):
        read_dataset(tmp_path)
    (tmp_path / f"a{mark}.webp").unlink()
    save(control, Image.new("RGB", (24, 40)), caption=None)
    with pytest.raises(InputError, match="^a.jpg: its control image is 24 x 40, expected the image's 40 x 24"):
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
    assert len(read_dataset(tmp_path)) == 1 and "1 texts belong to no image: README.txt" in caplog.text


def test_no_picture_at_all_is_said(tmp_path):
    with pytest.raises(InputError, match=r"^dataset: no image in .*, expected files that end with .png, .jpg"):
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
    # A folder with metadata.jsonl has the images of that list.
    first, second = read_dataset(file if name == "data.jsonl" else tmp_path)
    assert (first.name, first.caption, second.name, second.caption) == ("x/b.png", "one", "a.jpg", "two")
    assert open_mask(second).getextrema() == (5, 5) and (pixels(open_image(first)) == SMOOTH).all()


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
    with pytest.raises(InputError, match="also 1 more"):
        read_dataset(write_lines(folder, "{", "[", name="two.jsonl"))


def test_a_jsonl_that_is_not_utf_8_names_the_line(tmp_path):
    (tmp_path / "d.jsonl").write_bytes(b'\n{"file_name": "caf\xe9.png"}\n')
    with pytest.raises(InputError, match="^d.jsonl line 2: not UTF-8 at byte 18"):
        read_dataset(tmp_path / "d.jsonl")


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


def test_broken_lines_of_a_list_keep_nothing_but_the_first_words(tmp_path):
    import tracemalloc

    count, calls = 5000, []
    (tmp_path / "metadata.jsonl").write_bytes(b"[1]\n" * count + b"\n" * count)
    tracemalloc.start()
    with pytest.raises(InputError, match=f"line 1: got a list .* also {count - 1} more of the data set"):
        read_dataset(tmp_path, lambda: calls.append(1))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(calls) == count and peak < 1_000_000


def make_run(folder):
    """Create the files of a training run."""
    for image in ("pictures/step-0000001-00.png", "validations.png", "steps/step-0000001/sample.png"):
        save(folder / image, caption=None)
    (folder / "run.json").write_text("{}")


@pytest.mark.parametrize("place", ["run", "runs/first", "a/b/c", "pictures", "x.png", "\u732b run"])
def test_the_folders_of_training_runs_are_left_out(tmp_path, caplog, place):
    save(tmp_path / "a.png")
    save(tmp_path / "a" / "b.png")
    make_run(tmp_path / place)
    make_run(tmp_path / "old" / "run")
    assert [sample.name for sample in read_dataset(tmp_path)] == ["a.png", "a/b.png"]
    names = ", ".join(sorted([place, "old/run"]))
    assert sorted(caplog.messages[0].partition(": ")[2].partition(": ")[2].split(", ")) == names.split(", ")
    assert caplog.messages[0].startswith("dataset: 2 folders of training runs are left out: ")


def test_a_run_in_the_data_folder_itself_is_left_out(tmp_path):
    save(tmp_path / "a.png")
    save(tmp_path / "sub" / "pictures" / "b.png")
    make_run(tmp_path)
    assert [sample.name for sample in read_dataset(tmp_path)] == ["a.png", "sub/pictures/b.png"]


def test_a_run_s_images_can_be_trained_on_when_they_are_named(tmp_path):
    make_run(tmp_path)
    (tmp_path / "pictures" / "step-0000001-00.txt").write_text("x")
    assert only(tmp_path / "pictures").name == "step-0000001-00.png"


@pytest.mark.parametrize("folder", ["__MACOSX", "@eaDir", "PaxHeader", "PaxHeaders", "PaxHeaders.1234", ".thumbnails"])
def test_folders_of_systems_and_archivers_are_left_out(tmp_path, folder):
    save(tmp_path / "a.png")
    (tmp_path / "x" / folder).mkdir(parents=True)
    (tmp_path / "x" / folder / "a.png").write_bytes(b"30 mtime=1\n")
    assert only(tmp_path).name == "a.png"


@pytest.mark.parametrize(
    "ending", ["jfif", "jpe", "JFIF", "jpeg", "apng", "avif", "AVIF", "avifs", "jp2", "j2k", "jpx", "ppm", "pgm", "qoi"]
)
def test_every_ending_of_a_readable_format_is_read(tmp_path, ending):
    if ending.lower() in ("avif", "avifs") and not features.check("avif"):
        pytest.skip("this Pillow has no AVIF")
    kind = Image.registered_extensions()[f".{ending.lower()}"]
    save(tmp_path / f"a.{ending}", PICTURE.convert("L" if ending == "pgm" else "RGB"), format=kind)
    save(tmp_path / f"a-mask.{ending}", Image.new("L", (40, 24), 9).convert("RGB"), caption=None, format=kind)
    sample = only(tmp_path)
    assert sample.size == (40, 24) and open_image(sample).size == (40, 24)
    assert np.abs(np.asarray(open_mask(sample)).astype(int) - 9).max() < 6


def test_images_that_cannot_be_read_are_counted_and_named(tmp_path, caplog):
    save(tmp_path / "a.png")
    names = ["b.jxl", "c.CR2", "d.psd", "sub/e.dng", "f.svg", "g.tga", "h.exr"]
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"x")
        (tmp_path / name).with_suffix(".txt").write_text("x")
    (tmp_path / "notes.md").write_text("x")
    (tmp_path / "depth.pfm").write_bytes(b"x")
    assert only(tmp_path).name == "a.png"
    (message,) = caplog.messages
    assert message.startswith("dataset: 7 images are left out, which cannot be read here (")
    assert message.endswith(": b.jxl, c.CR2, d.psd, f.svg, g.tga and 2 more")


def test_heic_is_read_with_its_plugin_and_else_left_out(tmp_path, caplog, monkeypatch):
    pytest.importorskip("pillow_heif").register_heif_opener()
    for ending in (".heic", ".heif", ".hif"):
        PICTURE.save(tmp_path / f"a{ending[1:]}{ending}", format="HEIF")
        (tmp_path / f"a{ending[1:]}.txt").write_text("x")
    samples = read_dataset(tmp_path)
    assert len(samples) == 3 and all(open_image(sample).size == (40, 24) for sample in samples)


def test_without_a_plugin_heic_is_left_out(tmp_path, caplog, monkeypatch):
    monkeypatch.setitem(sys.modules, "pillow_heif", None)
    for registry in ("OPEN", "EXTENSION"):
        without_heif = {key: value for key, value in getattr(Image, registry).items() if "HEIF" not in (key, value)}
        monkeypatch.setattr(Image, registry, without_heif)
    save(tmp_path / "a.png")
    (tmp_path / "b.heic").write_bytes(b"x")
    assert only(tmp_path).name == "a.png"
    assert "1 images are left out, which cannot be read here (.heic needs pip install pillow-heif" in caplog.text


def test_images_that_a_list_does_not_name_are_counted_and_named(tmp_path, caplog):
    for name in ("a.png", "b.jpg", "m.png", "c.png", "sub/d.webp", "sub/e.heic", "caf\u00e9.png"):
        save(tmp_path / name, Image.new("RGB", (40, 24)), caption=None, format="PNG")
    lines = [
        {"file_name": "a.png", "text": "x", "mask": "./m.png"},
        {"file_name": "./b.jpg", "text": "x"},
        {"file_name": "cafe\u0301.png", "text": "x"},
    ]
    make_run(tmp_path / "run")
    write_lines(tmp_path, *lines, name="metadata.jsonl")
    for path in (tmp_path, tmp_path / "metadata.jsonl"):
        caplog.clear()
        assert len(read_dataset(path)) == 3
        assert caplog.messages == [
            "dataset: 3 images are not in metadata.jsonl and are left out: c.png, sub/d.webp, sub/e.heic"
        ]
    caplog.clear()
    assert len(read_dataset(write_lines(tmp_path, lines[0]))) == 1 and not caplog.messages


@pytest.mark.parametrize("mark", ["-mask", ".mask", "-control", ".control"])
@pytest.mark.parametrize("caption", [".txt", ".TXT", ".json", "empty"])
def test_a_mask_with_a_caption_is_an_image(tmp_path, caplog, mark, caption):
    save(tmp_path / "knight.png", caption="a knight")
    save(tmp_path / f"knight{mark}.png", caption=None)
    text = tmp_path / f"knight{mark}{'.txt' if caption == 'empty' else caption}"
    text.write_text({".json": '{"prompt": "a mask"}', "empty": ""}.get(caption, "a mask"))
    samples = {sample.name: sample for sample in read_dataset(tmp_path)}
    assert samples.keys() == {"knight.png", f"knight{mark}.png"}
    assert samples[f"knight{mark}.png"].caption == ("" if caption == "empty" else "a mask")
    assert samples["knight.png"].mask is None and samples["knight.png"].control is None
    message = f"dataset: 1 names end like a mask or control image, but have captions and are images: knight{mark}.png"
    assert message in caplog.messages


def test_an_image_that_is_named_like_a_mask_can_have_a_mask(tmp_path):
    save(tmp_path / "a.png")
    save(tmp_path / "a-mask.png")
    save(tmp_path / "a-mask-mask.png", Image.new("L", (40, 24), 9), caption=None)
    first, second = sorted(read_dataset(tmp_path), key=lambda sample: len(sample.name))
    assert first.mask is None and open_mask(second).getextrema() == (9, 9)


WORDS = [
    *("caf\u00e9", "\u00fcber stra\u00dfe", "\ud55c\uad6d", "\u304c\u304e"),
    *("\u1ea5n \u0111\u1ed9", "\u00c5ngstr\u00f6m", "\u0439\u043e\u0433"),
]


@pytest.mark.parametrize("word", WORDS)
@pytest.mark.parametrize("forms", [("NFC", "NFD"), ("NFD", "NFC")])
def test_names_match_however_their_accents_are_encoded(tmp_path, word, forms):
    image, other = (unicodedata.normalize(form, word) for form in forms)
    assert image != other
    save(tmp_path / "sub" / f"{image}.png", caption=None)
    (tmp_path / "sub" / f"{other}.txt").write_text("a caption")
    save(tmp_path / "sub" / f"{other}-mask.png", Image.new("L", (40, 24), 9), caption=None)
    sample = only(tmp_path)
    assert (sample.name, sample.caption) == (f"sub/{image}.png", "a caption")
    assert open_mask(sample).getextrema() == (9, 9)
    file = write_lines(tmp_path, {"file_name": f"sub/{other}.png", "text": "x", "mask": f"sub/{image}-mask.png"})
    assert open_mask(only(file)).getextrema() == (9, 9)
    save(tmp_path / "sub" / f"{other}.jpg", caption=None)
    with pytest.raises(InputError, match="have one name"):
        read_dataset(tmp_path)


def test_a_folder_with_accents_is_found_in_either_encoding(tmp_path):
    save(tmp_path / unicodedata.normalize("NFD", "\u00e9t\u00e9") / "a.png", caption=None)
    file = write_lines(tmp_path, {"file_name": "\u00e9t\u00e9/a.png", "text": "x"})
    assert only(file).size == (40, 24)
    (tmp_path / "out").symlink_to("/")
    file = write_lines(tmp_path, {"file_name": "out/\u00e9t\u00e9.png", "text": "x"}, name="b.jsonl")
    with pytest.raises(InputError, match="leads out of the data set's folder"):
        read_dataset(file)
