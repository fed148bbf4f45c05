"""A .pth made to run code or to fill the memory. See docs/developer/robustness.md."""

import io
import os
import pickle
import random
import re
import struct
import sys
import zipfile
import zlib
from collections import OrderedDict

import numpy as np
import pytest
import torch
from hostile import Call, refused
from pickles import STORAGE, doubled, entry, named, outcome, pth, storage, tensor, text, whole

from sana_core import CheckpointError
from sana_core.checkpoints import pickled

BROKEN = r"got \d+ bytes \(%s\), expected a state_dict as torch 1.6 or newer saves it; download it again, or use the "
PACKED = BROKEN % "an archive that is compressed, or larger inside than outside"


def saved(document):
    """{name: bytes} of the members that torch saves."""
    stream = io.BytesIO()
    torch.save(document, stream)
    with zipfile.ZipFile(stream) as archive:
        return {name.partition("/")[2]: archive.read(name) for name in archive.namelist()}


def test_a_pth_that_inflates_is_refused(tmp_path):
    bomb = pickle.dumps({"state_dict": {"a": "a" * 500_000_000}}, protocol=2)
    file = pth(tmp_path / "bomb.pth", bomb, zipfile.ZIP_DEFLATED)
    del bomb
    assert file.stat().st_size < 2_000_000
    refused(file, "^.*/bomb.pth: " + PACKED)


def test_a_pth_of_compressed_storages_is_refused_where_it_is_no_bomb_too(tmp_path):
    members = saved({"state_dict": {"a": torch.zeros(40)}})
    file = pth(tmp_path / "small.pth", members.pop("data.pkl"), zipfile.ZIP_DEFLATED, **members)
    assert sum(member.file_size for member in zipfile.ZipFile(file).infolist()) < file.stat().st_size
    refused(file, PACKED)


def test_members_that_claim_more_than_the_file_holds_are_refused(tmp_path):
    file = tmp_path / "bomb.pth"
    torch.save({"state_dict": {"a": torch.ones(1000)}}, file)
    content = bytearray(file.read_bytes())
    # the sizes of the first member in the archive's table, compressed and not
    at = content.index(b"PK\1\2") + 20
    content[at : at + 8] = (2**30).to_bytes(4, "little") * 2
    file.write_bytes(content)
    refused(file, PACKED)


def test_an_archive_with_another_one_behind_it_is_refused(tmp_path):
    file = tmp_path / "two.pth"
    torch.save({"state_dict": {"a": torch.ones(10)}}, file)
    content = file.read_bytes()
    for name, data in {"comment": content[:-2] + b"\4\0more", "before": b"x" * 64 + content}.items():
        (tmp_path / f"{name}.pth").write_bytes(data)
        refused(tmp_path / f"{name}.pth", BROKEN % "(no whole zip archive|an archive that torch has not saved)")


def test_a_table_of_three_gigabytes_is_not_read(tmp_path):
    size = 3 * 10**9
    with (tmp_path / "table.pth").open("wb") as file:
        file.truncate(size)
        file.seek(size)
        file.write(struct.pack("<4s4H2LH", b"PK\5\6", 0, 0, 1, 1, size, 0, 0))
    refused(tmp_path / "table.pth", BROKEN % "Bad magic number for central directory")


def test_a_byte_order_of_three_gigabytes_is_not_read(tmp_path):
    members = saved({"state_dict": {"a": torch.ones(3)}})
    file, size = tmp_path / "order.pth", 3 * 10**9
    pth(file, members["data.pkl"], byteorder=b"")
    content = bytearray(file.read_bytes())
    # the size in the member's header and in the table, and the place of the table
    start, table = content.index(b"archive/byteorder") - 30, content.index(b"PK\1\2")
    second = content.index(b"PK\1\2", table + 4)
    for at in (start + 18, second + 20):
        content[at : at + 8] = size.to_bytes(4, "little") * 2
    data = start + 30 + len("archive/byteorder")
    for at in (content.index(b"PK\1\2", second + 4) + 42, len(content) - 6):
        content[at : at + 4] = (int.from_bytes(content[at : at + 4], "little") + size).to_bytes(4, "little")
    with file.open("wb") as stream:
        stream.write(content[:data])
        stream.seek(size, 1)
        stream.write(content[data:])
    refused(file, BROKEN % "the byte order of another computer")


HUGE = 4 * 10**9


@pytest.mark.parametrize(
    "content",
    [
        Call(bytearray, HUGE),
        Call(
            torch._utils._rebuild_device_tensor_from_cpu_tensor,
            torch.zeros(1).expand(HUGE),
            torch.float64,
            "cpu",
            False,
        ),
        Call(torch._utils._rebuild_qtensor, torch.zeros(1).untyped_storage(), 0, (HUGE,), (1,), (1, 1.0, 0), False, {}),
        Call(os.system, "true"),
        # This function is part of torch, but neither a storage nor a dtype.
        Call(torch.set_num_threads, 1),
        {1, 2},
    ],
    ids=["bytearray", "cast", "quantised", "command", "torch's", "set"],
)
def test_a_pickle_that_calls_anything_but_tensors_is_refused(tmp_path, content):
    torch.save({"state_dict": {"a": content}}, tmp_path / "call.pth")
    refused(tmp_path / "call.pth", BROKEN % "a pickle that calls [^,]+")


def test_a_pickle_of_a_million_small_things_is_refused(tmp_path):
    lists = b"\x80\x02(" + b"]" * 2_000_000 + b"t."
    refused(pth(tmp_path / "many.pth", lists), BROKEN % "more operations .*")


def shared(count):
    base = torch.ones(1000)
    return {f"a{number}": base for number in range(count)}


LARGE = r"got tensors of %d bytes in a file of \d+, expected each to have its own"


@pytest.mark.parametrize(
    "tensors, what",
    [
        ({"a": torch.zeros(1).expand(10**12)}, LARGE % 4_000_000_000_000),
        ({"a": torch.zeros(1000).as_strided((500, 500), (1, 1))}, LARGE % 1_000_000),
        ({"a": torch.zeros(1).expand(10), "b": torch.ones(1000)}, LARGE % 4040),
        ({"a": torch.ones(3, device="meta")}, "a pickle that calls torch._utils _rebuild_meta_tensor"),
        ({"a": torch.ones(3).to_sparse()}, "a pickle that calls torch._utils _rebuild_sparse_tensor"),
        (shared(100), LARGE % 400_000),
    ],
    ids=["expanded", "overlapping", "small", "meta", "sparse", "shared"],
)
def test_tensors_that_are_more_than_the_file_are_refused(tmp_path, tensors, what):
    torch.save({"state_dict": tensors}, tmp_path / "large.pth")
    refused(tmp_path / "large.pth", what)


def test_a_storage_that_claims_more_than_it_has_stays_within_the_file(tmp_path):
    data = saved({"state_dict": {"a": torch.ones(7777)}})["data.pkl"]
    length = b"M" + (7777).to_bytes(2, "little")
    assert data.count(length) == 2  # One is in the storage, one in the shape.
    claimed = pickle.dumps(10**11, protocol=2)[2:-1]
    file = pth(tmp_path / "both.pth", data.replace(length, claimed), **{"data/0": bytes(4 * 7777)})
    refused(file, BROKEN % r"a tensor of \(100000000000,\) in 31108 bytes")
    file = pth(tmp_path / "storage.pth", data.replace(length, claimed, 1), **{"data/0": bytes(4 * 7777)})
    (value,) = pickled.read_pickled(file).values()
    assert value.untyped_storage().nbytes() < file.stat().st_size and not value.any()


def test_an_old_pth_says_how_to_go_on(tmp_path):
    torch.save({"state_dict": {"a": torch.ones(3)}}, tmp_path / "old.pth", _use_new_zipfile_serialization=False)
    refused(tmp_path / "old.pth", BROKEN % "no whole zip archive")


def training(**more):
    """What NVIDIA's trainer saves: weights, their moving average, optimizer, and states of random generators."""
    model, average = torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    generators = {
        "torch": torch.get_rng_state(),
        "torch_cuda": [],
        "numpy": np.random.get_state(),
        "python": random.getstate(),
        "generator": torch.Generator().get_state(),
    }
    return {
        "state_dict": model.state_dict(),
        "state_dict_ema": average.state_dict(),
        "optimizer": optimizer.state_dict(),
        "scheduler": scheduler.state_dict(),
        "epoch": 3,
        "step": np.int64(1000),
        "rng_state": generators,
        **more,
    }


@pytest.mark.parametrize("mapped", [True, False])
def test_of_a_training_s_checkpoint_the_weights_or_their_average_are_read(tmp_path, mapped):
    state, file = training(), tmp_path / "a.pth"
    torch.save(state, file)
    for ema, name in ((False, "state_dict"), (True, "state_dict_ema")):
        tensors = pickled.read_pickled(file, mapped, ema=ema)
        assert tensors.keys() == {"weight", "bias"} and pickled.list_pickled(file, ema).has_ema is not ema
        assert all(torch.equal(tensors[key], value) for key, value in state[name].items())
    assert pickled.read_pickled(file, mapped, names=["bias"]).keys() == {"bias"}
    del state["state_dict_ema"]
    torch.save(state, file)
    assert not pickled.list_pickled(file).has_ema
    with pytest.raises(CheckpointError, match="^[^ ]*a.pth: got no state_dict_ema, expected a training's checkpoint"):
        pickled.list_pickled(file, ema=True)


INERT = {
    "array": np.arange(12.0).reshape(3, 4),
    "arrays of all kinds": [
        np.zeros(2, kind) for kind in ("?", "b", "H", "i8", "f2", "c16", "S3", "U3", "M8[s]", "V5")
    ],
    "objects": np.array([None, "a", (1, 2)], dtype=object),
    "record": np.zeros(2, [("a", "f4"), ("b", "U3")]),
    "numbers": (np.float32(3.5), np.int64(4), np.bool_(True), np.datetime64("2026-01-01"), np.str_("a")),
    "fortran": np.asfortranarray(np.ones((3, 4))),
    "empty": np.zeros((0, 3)),
    "in a dict": {1: {"a": [np.ones(2)]}},
    "huge array": Call(np._core.multiarray._reconstruct, np.ndarray, (10**12,), b"b"),
    "huge number": Call(np._core.multiarray.scalar, np.dtype("V1"), b"x" * 100),
    "no dtype": Call(np.dtype, "no such dtype"),
    "array of nothing": Call(np._core.multiarray._reconstruct),
    "array of strings": Call(np.ndarray, "a", "b"),
    "codec": Call(__import__("_codecs").encode, "a", "no such codec"),
}


@pytest.mark.parametrize("value", INERT.values(), ids=INERT)
@pytest.mark.parametrize("core", ["_core", "core"])
def test_numpy_in_a_checkpoint_is_skipped_and_never_called(tmp_path, value, core):
    """Older numpy pickles name numpy.core."""
    members = saved({"before": value, "state_dict": {"a": torch.ones(3)}, "after": {"b": value}})
    content = members.pop("data.pkl").replace(b"cnumpy._core.", b"cnumpy.%s." % core.encode())
    pth(tmp_path / "a.pth", content, **members)
    calls = []
    sys.setprofile(lambda frame, event, function: calls.append(function) if event == "c_call" else None)
    try:
        tensors = pickled.read_pickled(tmp_path / "a.pth")
    finally:
        sys.setprofile(None)
    assert tensors.keys() == {"a"} and torch.equal(tensors["a"], torch.ones(3))
    names = {f"{call.__module__}.{call.__name__}" for call in calls}
    assert not [name for name in names if name.startswith("numpy") or name == "_codecs.encode"]


HOSTILE = {
    "command in an array": np.array([Call(os.system, "true")], dtype=object),
    "command in a record": np.array([(1, Call(os.system, "true"))], dtype=[("a", "i4"), ("b", "O")]),
    "file": Call(np.fromfile, "/etc/passwd"),
    "text file": Call(np.loadtxt, "/etc/passwd"),
    "loading": Call(np.load, "/etc/passwd"),
    "mapping": Call(np.memmap, "/etc/passwd"),
    "buffer": Call(np.frombuffer, b"abcd"),
    "allocation": Call(np.zeros, 10**12),
    "generator": np.random.default_rng(0),
    "decoding": Call(__import__("_codecs").decode, b"a", "rot13"),
    "codec lookup": Call(__import__("_codecs").lookup, "rot13"),
    "character array": np.char.array(["a"]),
    "masked array": np.ma.array([1]),
    "polynomial": np.polynomial.Polynomial([1, 2]),
    "evaluation": Call(eval, "1"),
    "attribute": Call(getattr, "a", "upper"),
    "import": Call(__import__, "numpy"),
}


@pytest.mark.parametrize("value", HOSTILE.values(), ids=HOSTILE)
def test_a_checkpoint_that_calls_anything_else_of_numpy_is_refused(tmp_path, value):
    torch.save(training(rng_state={"numpy": value}), tmp_path / "a.pth")
    refused(tmp_path / "a.pth", BROKEN % "a pickle that calls [^,]+")


@pytest.mark.parametrize(
    "weights", [{"a": np.ones(3)}, np.ones(3), {"a": [torch.ones(3)]}, {}, None, {"a": np.float32(1)}]
)
def test_arrays_are_no_weights(tmp_path, weights):
    torch.save({"state_dict": weights, "rng_state": np.ones(3)}, tmp_path / "a.pth")
    refused(tmp_path / "a.pth", "got a pickle without weights, expected a state_dict of tensors; use another file")


MALFORMED = {
    "no end": b"}",
    "nothing": b"",
    "empty stack": b"\x80\x020000.",
    "unknown memo": b"h\x05.",
    "no mark": b"K\x01t.",
    "key without value": b"}(K\x01u.",
    "items of a number": b"K\x01K\x01K\x01s.",
    "number as storage": b"K\x01Q.",
    "storage that is not there": entry(tensor(storage(key=text("7")))),
    "storage of nothing": entry(tensor(storage(kind=b"K\1"))),
    "storage named by a text": entry(tensor(storage(kind=text("torch FloatStorage")))),
    "storage of an unknown kind": entry(tensor(storage(kind=named("torch FooStorage")))),
    "call without arguments": named("torch._utils _rebuild_tensor_v2") + b"K\x01R.",
    "tensor without arguments": named("torch._utils _rebuild_tensor_v2") + b")R.",
    "tensor of text": entry(tensor(shape=text("a"), stride=text("a"))),
    "negative shape": entry(tensor(shape=b"J\xff\xff\xff\xff\x85", stride=b"K\1\x85")),
    "negative offset": entry(tensor(offset=b"J\xff\xff\xff\xff")),
    "true as offset": entry(tensor(offset=b"\x88")),
    "beyond the storage": entry(tensor(offset=b"K\x0d")),
    "shape without strides": entry(tensor(stride=b")")),
    "number of numpy as offset": entry(tensor(offset=named("numpy dtype") + b")R")),
    "parameter of nothing": entry(named("torch._utils _rebuild_parameter") + b")R"),
    "itself": entry(b"h\0", text("state_dict")).replace(b"}", b"}q\0"),
    "state of a tensor": tensor() + b"}b.",
    "name of half a character": entry(tensor(), text("\ud800")),
    "name of two lines": entry(tensor(), text("a\nb")),
    "name of ten megabytes": entry(tensor(), text("a" * 10**7)),
    "number as name": entry(tensor(), b"K\1"),
    # These ended the process, hung, or were errors of Python before a pickle's values had types.
    "state_dict is a text": entry(text("abc"), text("state_dict")),
    "state_dict is a number": entry(b"K\5", text("state_dict")),
    "state_dict is true": entry(b"\x88", text("state_dict")),
    "state_dict is a tuple": entry(b"K\5\x85", text("state_dict")),
    "state_dict is a tensor": entry(tensor(), text("state_dict")),
    "state_dict is a storage": entry(STORAGE, text("state_dict")),
    "state_dict is a name": entry(named("torch Size"), text("state_dict")),
    "dict as shape": entry(tensor(shape=b"}K\2K\2sK\3K\2s")),
    "dict as strides": entry(tensor(stride=b"}K\2K\2sK\1K\2s")),
    "dicts as shape and strides": entry(tensor(shape=b"}", stride=b"}")),
    "dict as shape, no strides": entry(tensor(shape=b"}", stride=b")")),
    "shape doubled": entry(tensor(shape=doubled(b"K\1", 60))),
    "key doubled": entry(tensor(storage(key=doubled(b"K\1", 60)))),
    "deep key of 10,000": entry(tensor(storage(key=b"K\1" + b"\x85" * 10_000))),
    "deep shape": entry(tensor(shape=b"K\1" + b"\x85" * 200_000)),
    "deep tuple as name": b"}" + b")" + b"\x85" * 200_000 + b"K\x01s.",
    "deep tuple": b")" + b"\x85" * 200_000 + b".",
    "deep dicts": b"}X\1\0\0\0a" * 60_000 + b"N" + b"s" * 60_000 + b".",
    "deep calls": b"N(" * 60_000 + b"N" + b"tR" * 60_000 + b".",
    "200,000 marks": b"(" * 200_000 + b".",
    "long number": entry(tensor(offset=whole(1 << 24_000_000))),
    "long shape": entry(tensor(shape=b"(" + b"K\0" * 17 + b"t", stride=b"(" + b"K\0" * 17 + b"t")),
    "quadratic tuples": b"(" + b"N" * 150_000 + b"tq\0" + b"h\0\x850" * 60_000 + b".",
}


@pytest.mark.parametrize("content", MALFORMED.values(), ids=MALFORMED)
def test_a_malformed_pickle_is_refused_in_one_line(tmp_path, content):
    file = pth(tmp_path / "a.pth", content, **{"data/0": bytes(64)})
    assert re.search(f"{BROKEN % '.*'}|got a pickle without weights, expected a state_dict", outcome(file))


def test_numbers_that_collide_in_a_dict_take_no_longer(tmp_path):
    """The places in a dict of 2^17 follow i -> 5 i + 1, and the late numbers have to search through all of them."""
    bits, place, early = 17, 0, []
    for _ in range(2 ** (bits - 1)):
        early.append(place or 2**bits)
        place = (5 * place + 1) % 2**bits
    late = [number << bits for number in range(2, 20_000)]
    memo = b"".join(b"r" + number.to_bytes(4, "little") for number in early + late)
    again = b"".join(b"j" + number.to_bytes(4, "little") + b"0" for number in late)
    file = pth(tmp_path / "a.pth", b"N" + memo + again * 5 + entry(tensor()), **{"data/0": bytes(64)})
    assert outcome(file) == ""


def test_of_a_big_endian_computer_nothing_is_read(tmp_path):
    members = saved({"a": torch.ones(3)})
    file = pth(tmp_path / "a.pth", members.pop("data.pkl"), **{**members, "byteorder": b"big"})
    refused(file, BROKEN % "the byte order of another computer")


# What torch.load has to be allowed for numpy's random state and a number.
NUMPY = [np._core.multiarray._reconstruct, np._core.multiarray.scalar, np.ndarray, np.dtype]
NUMPY += [type(np.dtype(kind)) for kind in ("u4", "i8")]


@pytest.mark.parametrize("mapped", [True, False])
def test_tensors_of_every_kind_are_as_torch_reads_them(tmp_path, mapped):
    base = torch.arange(60.0).reshape(3, 4, 5)
    kinds = (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16)
    tensors = {str(kind): base.to(kind) for kind in (*kinds, torch.int8, torch.uint8, torch.bool)}
    tensors |= {
        "transposed": base.clone().permute(2, 0, 1),
        "part": base.clone()[1:, ::2, 1],
        "number": torch.tensor(3.5),
        "empty": torch.zeros(0, 3),
        "one storage": base,
        "one storage again": base.view(-1)[7:40],
        "parameter": torch.nn.Parameter(base.clone()),
        "channels last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    }
    with_metadata = OrderedDict(tensors)
    with_metadata._metadata = OrderedDict({"": {"version": 1}})
    file, older = tmp_path / "a.pth", tmp_path / "older.pth"
    for document in (tensors, {"state_dict": tensors}, training(state_dict=with_metadata)):
        torch.save(document, file)
        # torch 1.6 to 2.0 saved no byte order, and storages that begin at any byte.
        members = {name: data for name, data in saved(document).items() if name not in ("byteorder", "data.pkl")}
        with zipfile.ZipFile(older, "w") as archive:
            for name, data in {"data.pkl": saved(document)["data.pkl"], **members}.items():
                archive.writestr(f"archive/{name}", data)
        with torch.serialization.safe_globals(NUMPY):
            expected = torch.load(file, weights_only=True)
        expected = expected.get("state_dict", expected)
        for loaded in (pickled.read_pickled(file, mapped), pickled.read_pickled(older, mapped)):
            assert loaded.keys() == expected.keys()
            for name, value in loaded.items():
                assert value.dtype == expected[name].dtype and value.stride() == expected[name].stride(), name
                assert torch.equal(value, expected[name]), name
            assert (
                len({loaded[name].untyped_storage().data_ptr() for name in ("one storage", "one storage again")}) == 1
            )


def test_a_damaged_checkpoint_is_named_or_read(tmp_path):
    torch.save(training(), tmp_path / "whole.pth")
    original, generator = (tmp_path / "whole.pth").read_bytes(), random.Random(0)
    begin, end = original.index(b"data.pkl"), original.index(b"PK\3\4", 100)
    for _ in range(600):
        data = bytearray(original)
        for _ in range(generator.choice([1, 1, 2, 5])):
            place = generator.choice([generator.randrange(len(data)), generator.randrange(begin, end)])
            data[place] = generator.choice([generator.randrange(256), *b".)(}]tRbQKh"])
        repair_checksum(data)
        (tmp_path / "a.pth").write_bytes(data)
        try:
            tensors = pickled.read_pickled(tmp_path / "a.pth", mapped=False)
        except CheckpointError as error:
            assert "\n" not in str(error)
        else:
            assert all(tensor.sum() is not None for tensor in tensors.values())


def repair_checksum(data):
    """Give the pickle its right checksum again, so that the changes in it are read."""
    begin = 30 + int.from_bytes(data[26:28], "little") + int.from_bytes(data[28:30], "little")
    table = data.find(b"PK\1\2")
    size = int.from_bytes(data[table + 24 : table + 28], "little")
    data[table + 16 : table + 20] = zlib.crc32(data[begin : begin + size]).to_bytes(4, "little")
