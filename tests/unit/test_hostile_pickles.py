"""A .pth made to run code or to fill the memory. See docs/developer/robustness.md."""

import io
import os
import pickle
import re
import zipfile

import pytest
import torch
from hostile import Call, refused

from sana_core.checkpoints import pickled


def pth(file, content, packing=zipfile.ZIP_STORED, **members):
    """An archive like torch's, of a pickle's bytes."""
    with zipfile.ZipFile(file, "w", packing) as archive:
        archive.writestr("archive/data.pkl", content)
        for name, data in {"byteorder": b"little", "version": b"3\n", **members}.items():
            archive.writestr(f"archive/{name}", data)
    return file


def test_a_pth_that_inflates_is_refused(tmp_path):
    bomb = pickle.dumps({"state_dict": {"a": "a" * 500_000_000}}, protocol=2)
    file = pth(tmp_path / "bomb.pth", bomb, zipfile.ZIP_DEFLATED)
    del bomb
    assert file.stat().st_size < 2_000_000
    refused(file, "^.*/bomb.pth: got an archive that is compressed, or larger inside than outside, which torch never")


def test_a_pth_of_compressed_storages_is_refused_where_it_is_no_bomb_too(tmp_path):
    stream = io.BytesIO()
    torch.save({"state_dict": {"a": torch.zeros(40)}}, stream)
    with zipfile.ZipFile(stream) as archive:
        members = {name.partition("/")[2]: archive.read(name) for name in archive.namelist()}
    file = pth(tmp_path / "small.pth", members.pop("data.pkl"), zipfile.ZIP_DEFLATED, **members)
    assert sum(member.file_size for member in zipfile.ZipFile(file).infolist()) < file.stat().st_size
    refused(file, "got an archive that is compressed, or larger inside than outside, which torch never saves; use the")


def test_members_that_claim_more_than_the_file_holds_are_refused(tmp_path):
    file = tmp_path / "bomb.pth"
    torch.save({"state_dict": {"a": torch.ones(1000)}}, file)
    content = bytearray(file.read_bytes())
    # the sizes of the first member in the archive's table, compressed and not
    at = content.index(b"PK\1\2") + 20
    content[at : at + 8] = (2**30).to_bytes(4, "little") * 2
    file.write_bytes(content)
    refused(file, "compressed, or larger inside than outside")


def test_an_archive_with_another_one_behind_it_is_refused(tmp_path):
    file = tmp_path / "two.pth"
    torch.save({"state_dict": {"a": torch.ones(10)}}, file)
    content = file.read_bytes()
    for name, data in {"comment": content[:-2] + b"\4\0more", "before": b"x" * 64 + content}.items():
        (tmp_path / f"{name}.pth").write_bytes(data)
        refused(tmp_path / f"{name}.pth", "got no zip archive|an archive that torch has not saved|not saved")


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
        # of torch, and no storage or dtype
        Call(torch.set_num_threads, 1),
        {1, 2},
    ],
    ids=["bytearray", "cast", "quantised", "command", "torch's", "set"],
)
def test_a_pickle_that_calls_anything_but_tensors_is_refused(tmp_path, content):
    torch.save({"state_dict": {"a": content}}, tmp_path / "call.pth")
    refused(
        tmp_path / "call.pth", "got a pickle that (calls [^,]+, expected nothing but tensors|is no state_dict's); use"
    )


def test_a_pickle_of_a_million_small_things_is_refused(tmp_path):
    lists = b"\x80\x02(" + b"]" * 2_000_000 + b"t."
    refused(pth(tmp_path / "many.pth", lists), "got a pickle that is no state_dict's")


def shared(count):
    base = torch.ones(1000)
    return {f"a{number}": base for number in range(count)}


@pytest.mark.parametrize(
    "tensors, what",
    [
        ({"a": torch.zeros(1).expand(10**12)}, "got a tensor a that is no plain one of bytes in the file"),
        ({"a": torch.zeros(1000).as_strided((500, 500), (1, 1))}, "got a tensor a that is no plain one"),
        ({"a": torch.ones(3, device="meta")}, "torch cannot read it|calls|no plain one"),
        ({"a": torch.ones(3).to_sparse()}, "got a pickle that calls torch._utils _rebuild_sparse_tensor"),
        (shared(100), r"got tensors of 400000 bytes in a file of \d+, expected each to have its own"),
    ],
    ids=["expanded", "overlapping", "meta", "sparse", "shared"],
)
def test_tensors_that_are_more_than_the_file_are_refused(tmp_path, tensors, what):
    torch.save({"state_dict": tensors}, tmp_path / "large.pth")
    refused(tmp_path / "large.pth", what)


def test_a_storage_that_claims_more_than_it_has_stays_within_the_file(tmp_path):
    stream = io.BytesIO()
    torch.save({"state_dict": {"a": torch.ones(7777)}}, stream)
    members = {name: zipfile.ZipFile(stream).read(name) for name in zipfile.ZipFile(stream).namelist()}
    data = next(content for name, content in members.items() if name.endswith("data.pkl"))
    length = b"M" + (7777).to_bytes(2, "little")
    assert data.count(length) == 2  # in the storage, then in the shape
    claimed = pickle.dumps(10**11, protocol=2)[2:-1]
    refused(
        pth(tmp_path / "both.pth", data.replace(length, claimed), **{"data/0": bytes(4 * 7777)}),
        "torch cannot read it safely",
    )
    file = pth(tmp_path / "storage.pth", data.replace(length, claimed, 1), **{"data/0": bytes(4 * 7777)})
    (tensor,) = pickled.read_pickled(file).values()
    assert tensor.untyped_storage().nbytes() < file.stat().st_size and not tensor.any()


@pytest.mark.parametrize(
    "version, safe", [("2.5.1+cu124", False), ("1.13.1", False), ("2.6.0", True), ("2.10.0", True)]
)
def test_a_torch_whose_safe_unpickler_was_not_opens_no_pth(tmp_path, monkeypatch, version, safe):
    """CVE-2025-32434: fixed in torch 2.6."""
    torch.save({"state_dict": {"a": torch.ones(3)}}, tmp_path / "a.pth")
    monkeypatch.setattr(torch, "__version__", version)
    if safe:
        assert pickled.read_pickled(tmp_path / "a.pth").keys() == {"a"}
    else:
        refused(tmp_path / "a.pth", f"got torch {re.escape(version)}, expected 2.6 or newer for .pth; use .safetensors")


def test_an_old_pth_says_how_to_go_on(tmp_path):
    torch.save({"state_dict": {"a": torch.ones(3)}}, tmp_path / "old.pth", _use_new_zipfile_serialization=False)
    refused(
        tmp_path / "old.pth", "saved by a torch before 1.6: got no zip archive .*; download it again, or use the .saf"
    )


def test_the_scan_of_a_pickle_lets_a_training_state_pass(tmp_path):
    model = torch.nn.Linear(3, 3)
    optimiser = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimiser.step()
    state = {"state_dict": model.state_dict(), "optimizer": optimiser.state_dict(), "epoch": 3, "dtype": torch.bfloat16}
    torch.save(state, tmp_path / "training.pth")
    assert set(pickled.read_pickled(tmp_path / "training.pth")) == {"weight", "bias"}
