"""Files made to run code, to fill the memory, or to wait for ever. Cases 11 to 14 and 20 of docs/robustness.md."""

import io
import json
import os
import pickle
import shutil
import socket
import subprocess
import sys
import zipfile

import layouts
import pytest
import torch
from bounded import bounded
from setup import ROOT
from transformers import Gemma2Config

import sana_core
from sana_core import CheckpointError, MissingFileError, ReadError, SanaError
from sana_core.checkpoints import headers, pickled, schemas
from sana_core.checkpoints.load import shift_of

# older transformers leave layer types unread
NEWER = pytest.mark.skipif(not hasattr(Gemma2Config(), "layer_types"), reason="has no layer types")
TENSORS = {
    "transformer": ("transformer/diffusion_pytorch_model.safetensors", sana_core.load_transformer),
    "vae": ("vae/diffusion_pytorch_model.safetensors", sana_core.load_autoencoder),
    "text_encoder": ("text_encoder/model.safetensors", sana_core.load_text_encoder),
}
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a2146\nsize 3209\n"


@pytest.fixture
def copy(checkpoint, tmp_path):
    return shutil.copytree(checkpoint, tmp_path / "model")


def write_header(file, header, size=0):
    """A safetensors file of this header, a document or its text, and so many zeros."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    with file.open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        stream.truncate(8 + len(text) + size)
    return file


def entry(begin, end, shape=None, dtype="U8"):
    return {"dtype": dtype, "shape": [end - begin] if shape is None else shape, "data_offsets": [begin, end]}


def refused(path, pattern, kind=CheckpointError, load=sana_core.load_transformer):
    with bounded(), pytest.raises(kind, match=pattern) as caught:
        load(path)
    assert len(str(caught.value)) < 300


# -- code in the folder


CODE = """
open({marker!r}, "w").close()
from transformers import PreTrainedTokenizer
class Mine(PreTrainedTokenizer): pass
"""
RUN = """
import sys
sys.path.insert(0, sys.argv[1])
import sana_core
try:
    sana_core.load_text_encoder(sys.argv[2])
except sana_core.SanaError as error:
    print(error)
"""
THEIRS = (
    "import sys; from transformers import AutoTokenizer; AutoTokenizer.from_pretrained(sys.argv[2] + '/tokenizer', {})"
)


def with_code(copy, place, marker):
    (copy / place).with_name("mine.py").write_text(CODE.format(marker=str(marker)))
    settings = json.loads((copy / place).read_text())
    settings.update(auto_map={"AutoTokenizer": ["mine.Mine", None], "AutoModel": "mine.Mine"}, tokenizer_class="Mine")
    (copy / place).write_text(json.dumps(settings))


def run_in_a_process(code, copy, cache, answer):
    return subprocess.run(
        [sys.executable, "-c", code, str(ROOT), str(copy)],
        input=answer,
        capture_output=True,
        text=True,
        env={**os.environ, "HF_HOME": str(cache)},
    )


@pytest.mark.parametrize("place", ["tokenizer/tokenizer_config.json", "text_encoder/config.json"])
@pytest.mark.parametrize("answer", ["", "y\n"])
def test_code_of_a_folder_is_neither_run_nor_asked_about(copy, tmp_path, place, answer):
    with_code(copy, place, tmp_path / "ran")
    done = run_in_a_process(RUN, copy, tmp_path / "cache", answer)
    assert "got auto_map, code that comes with the model, which is never run; use the" in done.stdout, done.stderr
    assert "y/N" not in done.stdout + done.stderr
    assert not (tmp_path / "ran").exists()


def test_the_code_above_would_run_where_it_is_trusted(copy, tmp_path):
    with_code(copy, "tokenizer/tokenizer_config.json", tmp_path / "ran")
    run_in_a_process(THEIRS.format("trust_remote_code=True"), copy, tmp_path / "cache", "")
    assert (tmp_path / "ran").exists()


def test_a_configuration_names_no_kernel_to_download(copy):
    file = copy / "text_encoder" / "config.json"
    content = json.loads(file.read_text())
    names = {"attn_implementation": "somebody/kernel", "_attn_implementation": "somebody/kernel"}
    file.write_text(json.dumps({**content, **names}))
    assert sana_core.load_text_encoder(copy).model.config._attn_implementation in ("sdpa", "eager")


# -- .pth


class Call:
    """Anything that a pickle may ask for."""

    def __init__(self, function, *arguments):
        self.function, self.arguments = function, arguments

    def __reduce__(self):
        return self.function, self.arguments


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
        {1, 2},
    ],
    ids=["bytearray", "cast", "quantised", "command", "set"],
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


# -- headers


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
def test_every_tensor_that_is_missing_is_named(copy, part):
    file, load = copy / TENSORS[part][0], TENSORS[part][1]
    header = names_of(file)
    for name in [name for name in header if name != "__metadata__"]:
        left, end = {}, 0
        for other, value in header.items():
            if other not in (name, "__metadata__"):
                size = value["data_offsets"][1] - value["data_offsets"][0]
                left[other], end = {**value, "data_offsets": [end, end + size]}, end + size
        write_header(file, left, end)
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
        refused(file, "got a block 3000000, expected at most 256; use another file", load=load)
        write_header(file, {**header, f"{block}.{'9' * 900}.weight": entry(end, end + 1)}, end + 1)
        refused(file, "got a block 999999999, expected at most 256", load=load)


# -- configurations


@pytest.mark.parametrize(
    "part, field, value",
    [
        ("transformer", "num_layers", 10**7),
        ("transformer", "sample_size", 10**6),
        ("transformer", "sample_size", 32.5),
        ("transformer", "sample_size", None),
        ("transformer", "num_attention_heads", 0),
        ("transformer", "patch_size", -1),
        ("transformer", "mlp_ratio", float("nan")),
        ("transformer", "mlp_ratio", float("inf")),
        ("transformer", "qk_norm", [[[]]]),
        ("transformer", "attention_bias", "false"),
        ("vae", "decoder_layers_per_block", [10**7] * 6),
        ("vae", "decoder_block_out_channels", 5),
        ("vae", "scaling_factor", 0),
        ("vae", "scaling_factor", "0.4"),
        ("text_encoder", "num_hidden_layers", 10**7),
        ("text_encoder", "rope_parameters", {"rope_theta": float("nan")}),
        ("text_encoder", "layer_types", ["full_attention"] * 10**4),
    ],
)
def test_a_field_out_of_bounds_is_named(copy, part, field, value):
    file = copy / part / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), field: value}))
    pattern = (
        rf"^{part}/\w+.safetensors: its config has {field}: .*, which no SANA model has; use the model's own config"
    )
    refused(copy, pattern, load=TENSORS[part][1])


@pytest.mark.parametrize(
    "part, field, value",
    [
        ("transformer", "qk_norm", "none such"),
        ("vae", "decoder_block_types", "none such"),
        ("vae", "decoder_block_out_channels", [16]),
        ("text_encoder", "hidden_activation", "none such"),
        ("text_encoder", "num_key_value_heads", 3),
        pytest.param("text_encoder", "layer_types", ["none such"] * 2, marks=NEWER),
    ],
)
def test_a_configuration_that_the_library_cannot_build_is_named(copy, part, field, value):
    file = copy / part / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), field: value}))
    refused(
        copy, rf"^{part}/\w+.safetensors: (its config or its tensors|\S+ is \[|no |unexpected )", load=TENSORS[part][1]
    )


@pytest.mark.parametrize("pixels, cells", [(256, 8), (768, 24), (1280, 40)])
def test_sizes_between_the_released_ones_load(copy, pixels, cells):
    file = copy / "transformer" / "config.json"
    config = json.loads(file.read_text())
    del config["interpolation_scale"]
    file.write_text(json.dumps({**config, "sample_size": cells}))
    assert sana_core.inspect_checkpoint(copy).resolution == pixels
    assert sana_core.load_transformer(copy).config.sample_size == cells


@pytest.mark.parametrize("content", ['{"flow_shift": NaN}', '{"flow_shift": 1e9}', '{"shift": "3"}', "[]", "{", ""])
def test_a_scheduler_without_a_shift_that_works_is_named(copy, content):
    (copy / "scheduler" / "scheduler_config.json").write_text(content)
    refused(copy, "^scheduler/scheduler_config.json: ", load=lambda path: shift_of(sana_core.inspect_checkpoint(path)))


@pytest.mark.parametrize("content", ["{}", '{"rgb_factors": [[1, 2]], "rgb_bias": [1, 2, 3]}', "[]"])
def test_preview_colours_that_are_none_are_named(tmp_path, content):
    (tmp_path / "preview.json").write_text(content)
    refused(tmp_path / "preview.json", "/preview.json: ", load=schemas.read_preview)


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


# -- indexes


@pytest.mark.parametrize("shard", ["sana.safetensors.index.json", "config.json", "x.pth"])
def test_an_index_names_safetensors_files_only(tmp_path, shard):
    layouts.transformer().save_pretrained(tmp_path / "sana", max_shard_size="10MB")
    index = next((tmp_path / "sana").glob("*.index.json"))
    content = json.loads(index.read_text())
    content["weight_map"]["proj_out.bias"] = shard
    index.write_text(json.dumps(content))
    refused(tmp_path / "sana", "index.json: names .*, expected safetensors files of its own folder; download it again")


def test_files_without_tensors_are_named(tmp_path):
    for name in ("sana.safetensors", "model-00001-of-00002.safetensors"):
        refused(write_header(tmp_path / name, {}), f"/{name}: not a SANA transformer: found no tensors; get one from")
        (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {}}')


# -- tokenizers


@pytest.mark.parametrize("content", [b"", b"{", b"[" * 100_000, b'{"version": "1.0"}', b"\xff\xfe"])
def test_a_broken_tokenizer_is_named(copy, content):
    (copy / "tokenizer" / "tokenizer.json").write_bytes(content)
    refused(copy, "^tokenizer/tokenizer.json: tokenizers cannot read it", load=sana_core.load_text_encoder)


def test_a_tokenizer_over_which_the_library_panics_is_named(copy):
    file = copy / "tokenizer" / "tokenizer.json"
    content = json.loads(file.read_text())
    content["post_processor"]["special_tokens"] = {}
    file.write_text(json.dumps(content))
    refused(copy, "^tokenizer/tokenizer.json: tokenizers cannot read it", load=sana_core.load_text_encoder)


def test_another_models_tokenizer_is_refused(copy):
    file = copy / "tokenizer" / "tokenizer.json"
    content = json.loads(file.read_text())
    file.write_text(json.dumps({**content, "post_processor": None}))
    refused(copy, r"got tokens \[\] for an empty text, expected Gemma's \[2\]", load=sana_core.load_text_encoder)
    content["added_tokens"] += [
        {**content["added_tokens"][0], "id": 10**4 + n, "content": f"<{n}>"} for n in range(900)
    ]
    file.write_text(json.dumps(content))
    refused(copy, r"got \d+ tokens, expected at most the text encoder's 750;", load=sana_core.load_text_encoder)


def test_a_tokenizer_tensor_that_is_not_bytes_is_refused(checkpoint, tmp_path):
    tensors = headers.read_file(checkpoint / "text_encoder" / "model.safetensors")
    tensors["tokenizer_json"] = torch.zeros(4)
    config = (checkpoint / "text_encoder" / "config.json").read_text()
    file = layouts.save(tensors, tmp_path / "gemma.safetensors", config=config)
    refused(file, "tokenizer_json is no tensor of a tokenizer's bytes; download", load=sana_core.load_text_encoder)


# -- what is not a file


PLACES = [
    "transformer/diffusion_pytorch_model.safetensors",
    "transformer/config.json",
    "vae/config.json",
    "text_encoder/model.safetensors",
    "scheduler/scheduler_config.json",
    "tokenizer/tokenizer.json",
    "tokenizer/tokenizer_config.json",
]


def use_all(path):
    info = sana_core.inspect_checkpoint(path)
    shift_of(info)
    for _, load in TENSORS.values():
        load(path)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("kind", ["pipe", "device", "socket", "folder"])
def test_what_is_not_a_file_is_not_opened(copy, place, kind, monkeypatch):
    file = copy / place
    file.unlink()
    monkeypatch.chdir(file.parent)  # a socket's path may only be short
    with socket.socket(socket.AF_UNIX) as end:
        if kind == "pipe":
            os.mkfifo(file)
        elif kind == "device":
            file.symlink_to("/dev/zero")
        elif kind == "socket":
            end.bind(file.name)
        else:
            file.mkdir()
        pattern = f"^{place}: got a folder, pipe or device, expected a regular file; put the file there instead$"
        refused(copy, pattern, load=use_all)


@pytest.mark.parametrize("suffix", [".safetensors", ".pth"])
def test_a_pipe_as_the_model_is_not_opened(tmp_path, suffix):
    os.mkfifo(tmp_path / f"sana{suffix}")
    refused(tmp_path / f"sana{suffix}", "got a folder, pipe or device, expected a regular file")


@pytest.mark.parametrize("place", PLACES[:2])
def test_links_to_nowhere_and_to_themselves_are_named(copy, place):
    file = copy / place
    for target, kind in (("nowhere", MissingFileError), (file.name, ReadError)):
        file.unlink()
        file.symlink_to(target)
        if file.name == "config.json":
            refused(copy, "no config.json in model/transformer", MissingFileError)
            refused(file.with_name("diffusion_pytorch_model.safetensors"), f"^{place}: ", kind)
        else:
            refused(copy, f"^{place}: ", kind)


def test_links_to_files_elsewhere_load(copy, tmp_path):
    for part, (name, load) in TENSORS.items():
        (copy / name).rename(tmp_path / f"{part}.blob")
        (copy / name).symlink_to(tmp_path / f"{part}.blob")
        load(copy)


# -- what is there in place of the file


@pytest.mark.parametrize("place", [*PLACES, "sana.pth", "sana.sft"])
def test_a_git_lfs_pointer_says_git_lfs_pull(copy, place):
    (copy / place).write_bytes(POINTER)
    path = copy if (copy / place).parent != copy else copy / place
    pattern = f"{place}: got a git-lfs pointer, which stands for the file; run git lfs pull in that folder$"
    refused(path, pattern, load=use_all)


@pytest.mark.parametrize("content", [b"<!DOCTYPE html><html>", b"\n <html lang='en'>", b"<?xml version='1.0'?>"])
@pytest.mark.parametrize("name", ["sana.safetensors", "sana.pth"])
def test_a_web_page_says_so(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    refused(
        tmp_path / name, f"/{name}: got a web page, not the file; download it again by its download link, logged in"
    )


def test_every_error_here_is_of_the_family():
    assert issubclass(CheckpointError, SanaError) and issubclass(CheckpointError, ValueError)
