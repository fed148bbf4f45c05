"""Headers, indexes and shapes that are wrong. See docs/developer/robustness.md."""

import json
import random

import layouts
import pytest
import torch
from hostile import TENSORS, entry, refused, write_header

from sana_core import CheckpointError


@pytest.mark.parametrize(
    "header, what",
    [
        (b"[" * 200_000, "its header: its JSON nests too deeply"),
        (b'{"a": 1', "its header: not JSON"),
        (b"[1]", "its header: got JSON that is a list, expected an object"),
        (json.dumps({"a": entry(0, 2), "b": entry(2, 4)}).replace('"b"', '"a"').encode(), "leave a gap at byte 2"),
        ({"a": 1}, "its header has no whole dtype, shape and data_offsets of a;"),
        ({"a": {**entry(0, 1), "more": 1}}, "its header has no whole"),
        ({"a": entry(0, 1, [True])}, "its header has no whole"),
        ({"a": entry(0, 1, [-1])}, "its header has no whole"),
        ({"a": entry(0, 1, [1.0])}, "its header has no whole"),
        ({"a": entry(0, 1, [float("nan")])}, "its header has no whole"),
        ({"a": entry(0, 0, [0, 2**62])}, "its header has no whole"),
        ({"a": entry(0, 1, [1] * 9)}, "its header has no whole"),
        ({"a": entry(0, 1, [2**40] * 3)}, "a tensor's shape does not fit its bytes: a;"),
        ({"a": entry(0, 1, dtype="F3")}, "got dtype F3 in a, expected F64, "),
        ({"a": entry(0, 2), "b": entry(1, 3)}, "its tensors overlap or leave a gap at byte 1"),
        ({"a": entry(0, 1), "b": entry(2, 4)}, "its tensors overlap or leave a gap at byte 2"),
        ({"a": entry(0, 10**30, [10**30])}, "its header has no whole"),
        ({"\ud800": entry(0, 1)}, r"a tensor named \\ud800, which is no name"),
        ({"a" * 2000: entry(0, 1)}, r"a tensor named a+\.\.\., which is no name"),
        ({"__metadata__": {"a": 1}}, "its metadata are no table of texts"),
        ({"__metadata__": []}, "its metadata are no table of texts"),
        ({str(number): entry(0, 0) for number in range(100_001)}, "100001 tensors, expected at most 100000"),
        (b" " * 17_000_000, "no safetensors header: it asks for 17000000 bytes"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_header_that_is_wrong_is_named(tmp_path, header, what):
    refused(write_header(tmp_path / "sana.safetensors", header, 4), f"^[^:]*/sana.safetensors: .*{what}")


def test_a_name_of_ten_megabytes_is_cut(tmp_path):
    refused(write_header(tmp_path / "sana.safetensors", {"a" * 10**7: entry(0, 1)}, 1), "which is no name; download")


def names_of(file):
    text = file.read_bytes()
    return json.loads(text[8 : 8 + int.from_bytes(text[:8], "little")])


@pytest.mark.parametrize("part", TENSORS)
def test_a_tensor_that_is_missing_is_named(copy, part):
    file, load = copy / TENSORS[part][0], TENSORS[part][1]
    header = names_of(file)
    names = [name for name in header if name != "__metadata__"]
    for name in random.Random(part).sample(names, min(30, len(names))):
        remaining, end = {}, 0
        for other, value in header.items():
            if other not in (name, "__metadata__"):
                size = value["data_offsets"][1] - value["data_offsets"][0]
                remaining[other], end = {**value, "data_offsets": [end, end + size]}, end + size
        write_header(file, remaining, end)
        with pytest.raises(CheckpointError) as caught:
            load(copy)
        assert str(caught.value).startswith(f"{part}/{file.name}: ") and name in str(caught.value)


def test_a_block_number_of_three_millions_is_refused(copy):
    for part, block in (
        ("transformer", "transformer_blocks"),
        ("vae", "decoder.up_blocks"),
        ("text_encoder", "layers"),
    ):
        file, load = copy / TENSORS[part][0], TENSORS[part][1]
        header = names_of(file)
        end = max(value["data_offsets"][1] for name, value in header.items() if name != "__metadata__")
        write_header(file, {**header, f"{block}.3000000.weight": entry(end, end + 1)}, end + 1)
        refused(file, "got 3000001 blocks, expected at most 256; use another file", load=load)
        write_header(file, {**header, f"{block}.{'9' * 900}.weight": entry(end, end + 1)}, end + 1)
        refused(file, "got 1000000000 blocks, expected at most 256", load=load)


def test_a_telling_tensor_of_other_dimensions_is_refused(tmp_path):
    tensors = {**layouts.transformer().state_dict(), "patch_embed.proj.weight": torch.zeros(1152, 32)}
    refused(
        layouts.save(tensors, tmp_path / "sana.safetensors"),
        r"patch_embed.proj.weight is \[1152, 32\], expected 4 dimensions; use another file",
    )


def test_a_position_embedding_of_no_square_is_refused(tmp_path):
    tensors = {**layouts.nvidia(layouts.transformer(), unused=False), "pos_embed": torch.zeros(1, 300 * 300, 1)}
    refused(
        layouts.save(tensors, tmp_path / "sana.safetensors"), r"pos_embed is \[1, 90000, 1\], expected the cells of"
    )


def test_fused_rows_that_cannot_be_parted_are_named(tmp_path):
    tensors = layouts.nvidia(layouts.transformer())
    tensors["blocks.0.attn.qkv.weight"] = torch.zeros(1000, 8)
    refused(
        layouts.save(tensors, tmp_path / "sana.safetensors"), "attn.qkv.weight has 1000 rows, expected 3 equal parts"
    )


def test_files_without_tensors_are_named(tmp_path):
    for name in ("sana.safetensors", "model-00001-of-00002.safetensors"):
        refused(write_header(tmp_path / name, {}), f"/{name}: not a SANA transformer: found no tensors; get one from")
        (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {}}')
