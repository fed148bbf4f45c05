"""Data sets in tars: read in place, as NVIDIA lays them out, cut, damaged and made to harm."""

import io
import json
import tarfile

import pytest
from data_sets import SMOOTH, encoded, exif_of, only, open_mask, pixels, save, write_tar
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from PIL import Image

from sana_core import InputError, MissingFileError, ReadError, SanaError
from sana_core.training.dataset import open_image, read_dataset

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
    assert (pixels(open_image(samples[0])) == SMOOTH).all() and open_mask(samples[1]).getextrema() == (77, 77)
    assert open_image(samples[1]).size == (24, 40)


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


def test_the_ending_of_a_tar_may_be_in_upper_case(tmp_path):
    write_tar(tmp_path / "S.TAR", MEMBERS)
    check_members(read_dataset(tmp_path / "S.TAR"), "S.TAR:")


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
        ([("a.png", encoded())], "a.png: has no caption, expected a text file of the same name beside it"),
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
            open_image(sample)
    except SanaError as error:
        assert str(error).startswith(("s.tar:", "dataset: no image in "))


def repair_sums(data):
    """Correct the checksum of the first header, so that readers trust it."""
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


def test_a_picture_that_went_away_or_was_cut_is_named(tmp_path):
    file = write_tar(tmp_path / "s.tar", MEMBERS)
    sample = read_dataset(file)[2]
    with file.open("r+b") as stream:
        stream.truncate(sample.image.start + 10)
    with pytest.raises(ReadError, match=r": got 10 bytes, expected \d+; the file was cut short"):
        open_image(sample)
    file.unlink()
    with pytest.raises(MissingFileError, match="no such file"):
        open_image(sample)


HIDDEN = {
    "AppleDouble": "._001.png",
    "AppleDouble in a folder": "a/._001.png",
    "AppleDouble text": "._001.txt",
    "AppleDouble with a folder": "./._a/001.png",
    "resource folder": "__MACOSX/001.png",
    "resource file": "__MACOSX/a/._001.png",
    "folder settings": ".DS_Store",
    "thumbnails": "@eaDir/001.png/SYNOPHOTO_THUMB_M.jpg",
    "headers": "PaxHeader/001.png",
    "headers of BSD": "a/PaxHeader/001.png",
    "headers of GNU": "PaxHeaders.1234/001.png",
    "hidden": ".hidden/001.jpg",
}


@pytest.mark.parametrize("name", HIDDEN.values(), ids=HIDDEN)
def test_members_of_systems_and_archivers_are_left_out(tmp_path, name):
    for data in (b"\0\5\x16\7 Mac OS X", encoded()):
        write_tar(tmp_path / "s.tar", [(name, data), *MEMBERS, (name, data)])
        check_members(read_dataset(tmp_path / "s.tar"), "s.tar:")
    hidden_link = link(tarfile.SYMTYPE)
    hidden_link.name = name
    write_tar(tmp_path / "s.tar", [("", hidden_link), *MEMBERS])
    check_members(read_dataset(tmp_path / "s.tar"), "s.tar:")


def test_a_tar_of_macos_is_read(tmp_path):
    """bsdtar writes extended headers with binary attributes, and a ._ file before each file."""
    with tarfile.open(tmp_path / "s.tar", "w", format=tarfile.PAX_FORMAT) as archive:
        for name, data in MEMBERS:
            for inner, content in (
                (f"{name.rpartition('/')[0] or '.'}/._{name.rpartition('/')[2]}", b"\0\5"),
                (name, data),
            ):
                info = tarfile.TarInfo(inner)
                info.size = len(content)
                attribute = "com.apple.quarantine"
                info.pax_headers = {f"SCHILY.xattr.{attribute}": "\udcff\0q", f"LIBARCHIVE.xattr.{attribute}": "AHE"}
                archive.addfile(info, io.BytesIO(content))
    check_members(read_dataset(tmp_path / "s.tar"), "s.tar:")


TEXT = b"a caption"
FIELDS = {
    "segmentation": ({"1.png", "1.txt", "1.seg.png"}, ["1.seg.png"]),
    "caption": ({"1.png", "1.caption.txt"}, []),
    "prompt": ({"1.jpg", "1.prompt.txt", "1.seg.png"}, ["1.seg.png"]),
    "text": ({"1.png", "1.Text.TXT"}, []),
    "caption and text": ({"1.png", "1.caption.txt", "1.prompt.txt"}, ["1.caption.txt"]),
    "caption beside the text": ({"1.png", "1.txt", "1.old.txt"}, ["1.old.txt"]),
    "caption in json": ({"1.png", "1.json", "1.seg.json"}, ["1.seg.json"]),
    "json field": ({"1.png", "1.caption.json"}, []),
    "described field": ({"1.png", "1.txt", "1.seg.png", "1.seg.json"}, ["1.seg.png", "1.seg.json"]),
    "image": ({"1.image.png", "1.txt"}, []),
    "image and caption": ({"1.img.png", "1.caption.txt", "1.depth.png"}, ["1.depth.png"]),
    "image of many": ({"1.rgb.png", "1.seg.png", "1.depth.png", "1.json"}, ["1.depth.png", "1.seg.png"]),
    "two dots": ({"1.png", "1.txt", "1.seg.left.png"}, ["1.seg.left.png"]),
    "folder": ({"v1.0/1.png", "v1.0/1.caption.txt", "v1.0/1.seg.png"}, ["v1.0/1.seg.png"]),
    "arrays": ({"1.png", "1.txt", "1.depth.npy", "1.cls"}, []),
    "mask": ({"1.png", "1.txt", "1.mask.png"}, []),
    "mask of a named image": ({"1.image.png", "1.caption.txt", "1.mask.png"}, []),
}


@pytest.mark.parametrize("names, unused", FIELDS.values(), ids=FIELDS)
def test_fields_of_webdataset_belong_to_their_sample(tmp_path, caplog, names, unused):
    grey = encoded(Image.new("L", (40, 24), 9))
    members = []
    for name in sorted(names):
        is_image = name in ("1.png", "1.jpg", "v1.0/1.png") or any(
            f".{kind}." in name for kind in ("image", "img", "rgb")
        )
        text = b'{"prompt": "a caption"}' if name.endswith(".json") else TEXT
        members.append((name, encoded() if is_image else grey if name.endswith(".png") else text))
    sample = only(write_tar(tmp_path / "s.tar", members))
    assert sample.caption == "a caption" and (pixels(open_image(sample)) == SMOOTH).all()
    assert (sample.mask is not None) == ("1.mask.png" in names)
    expected = ", ".join(f"s.tar:{name}" for name in sorted(unused, key=unused.index))
    assert [message.partition(": ")[2] for message in caplog.messages] == (
        [f"{len(unused)} fields of samples are not used: {expected}"] if unused else []
    )


NO_FIELDS = [
    {"v1.2.png", "v1.2.txt", "v1.3.png", "v1.3.txt"},
    {"v1.png", "v1.txt", "v1.2.png", "v1.2.txt"},
    {"a.b.c.png", "a.b.c.json", "a.b.d.png", "a.b.d.json"},
]


@pytest.mark.parametrize("names", NO_FIELDS)
def test_dots_in_names_are_no_fields_where_each_image_has_a_caption(tmp_path, names):
    members = [(name, encoded() if name.endswith(".png") else b'{"text": "x"}') for name in sorted(names)]
    samples = read_dataset(write_tar(tmp_path / "s.tar", members))
    assert {sample.name for sample in samples} == {f"s.tar:{name}" for name in names if name.endswith(".png")}


@pytest.mark.parametrize("names", [{"1.seg.png", "1.txt"}, {"v1.2.png", "v1.3.txt"}, {"1.seg.png"}])
def test_a_field_alone_is_no_sample(tmp_path, names):
    write_tar(tmp_path / "s.tar", [(name, encoded() if name.endswith(".png") else TEXT) for name in names])
    with pytest.raises(InputError, match="has no caption, expected"):
        read_dataset(tmp_path / "s.tar")


def test_in_a_folder_an_image_without_caption_is_an_error_and_no_field(tmp_path):
    save(tmp_path / "1.png")
    save(tmp_path / "1.edited.png", caption=None)
    with pytest.raises(
        InputError, match="^1.edited.png: has no caption, expected a text file of the same name beside it"
    ):
        read_dataset(tmp_path)
