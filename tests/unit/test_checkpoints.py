"""The bundled folder loads as in diffusers, and errors name the defect of a broken file."""

import gc
import json
import pickle
import shutil
import socket
import sys
import weakref

import layouts
import pytest
import torch
from diffusers import AutoencoderDC, SanaTransformer2DModel
from hostile import Call
from live_bytes import LiveBytes
from pretend_card import pretend_cards
from safetensors.torch import save_file
from transformers import Gemma2Model

import sana_core
from sana_core.checkpoints import files
from sana_core.checkpoints.headers import read_file
from sana_core.checkpoints.load import fill_module

LOADERS = {
    "transformer": (sana_core.load_transformer, SanaTransformer2DModel),
    "vae": (sana_core.load_autoencoder, AutoencoderDC),
    "text_encoder": (lambda *a, **k: sana_core.load_text_encoder(*a, **k).model, Gemma2Model),
}
KIND = {"transformer": "a SANA transformer", "vae": "SANA's VAE, DC-AE f32c32", "text_encoder": "SANA's text encoder"}


@pytest.fixture
def weights(checkpoint):
    return checkpoint / "transformer" / "diffusion_pytorch_model.safetensors"


@pytest.mark.parametrize("name", LOADERS)
def test_loads_what_the_library_loads(checkpoint, name):
    load, library_class = LOADERS[name]
    ours, theirs = load(checkpoint), library_class.from_pretrained(checkpoint / name).float()
    assert type(ours) is library_class and not ours.training
    assert not any(p.requires_grad for p in ours.parameters())
    for (key, a), (other, b) in zip(ours.state_dict().items(), theirs.state_dict().items(), strict=True):
        assert key == other and a.dtype == torch.float32 and torch.equal(a, b)
    for (key, a), (other, b) in zip(ours.named_buffers(), theirs.named_buffers(), strict=True):
        assert key == other and torch.equal(a, b)


@pytest.mark.parametrize("name", LOADERS)
def test_loads_in_the_dtype_that_the_file_has(checkpoint, name):
    parts = {part.path.parent.name: part for part in sana_core.inspect_checkpoint(checkpoint).parts}
    dtype = parts[name].dtype
    assert dtype == torch.bfloat16
    assert {p.dtype for p in LOADERS[name][0](checkpoint, dtype=dtype).parameters()} == {dtype}


def test_the_bundled_folder_is_recognised(checkpoint):
    info = sana_core.inspect_checkpoint(checkpoint)
    assert (info.kind, info.layout, info.resolution, info.resolution_from) == ("pipeline", "diffusers", 128, "config")
    assert [part.kind for part in info.parts] == ["transformer", "autoencoder", "text_encoder"]
    assert sana_core.inspect_checkpoint(checkpoint / "vae").kind == "autoencoder"


@pytest.mark.parametrize("name", LOADERS)
def test_broken_folders_are_named(copy, name):
    load = LOADERS[name][0]
    with pytest.raises(
        FileNotFoundError, match="^nowhere: no such file or folder, expected a model; check its spelling"
    ):
        load(copy.parent / "nowhere")

    config = copy / name / "config.json"
    content = config.read_text()
    config.write_text("{")
    with pytest.raises(ValueError, match=rf"^{name}/config.json: not JSON .*; download it again$"):
        load(copy)
    config.unlink()
    with pytest.raises(FileNotFoundError, match=f"^model: no config.json in model/{name}; download the folder again"):
        load(copy)
    config.write_text(content)
    for file in (copy / name).glob("*.safetensors"):
        file.rename(file.with_suffix(".bin"))
    with pytest.raises(FileNotFoundError, match=f"^{name}: no .safetensors file beside its configuration; download"):
        load(copy)


def test_a_config_of_another_model_is_not_believed(copy):
    (copy / "transformer" / "config.json").write_text(json.dumps({"_class_name": "FluxTransformer2DModel"}))
    with pytest.raises(ValueError, match="got width 160, expected 1152 or 2240, .*; put the model's config"):
        sana_core.load_transformer(copy)


def test_a_missing_tokenizer_is_named(copy):
    shutil.rmtree(copy / "tokenizer")
    with pytest.raises(FileNotFoundError, match="^text_encoder/model.safetensors: no tokenizer in the file, and no "):
        sana_core.load_text_encoder(copy)


def test_an_empty_folder_is_named(tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileNotFoundError, match="^empty: got a folder without model_index.json, config.json"):
        sana_core.load_transformer(tmp_path / "empty")
    (tmp_path / "empty" / "model_index.json").write_text("{}")
    with pytest.raises(FileNotFoundError, match="^empty: no component beside model_index.json; download the folder"):
        sana_core.load_transformer(tmp_path / "empty")


@pytest.mark.parametrize(
    "change, what",
    [
        (lambda data: b"", "got 0 bytes"),
        (lambda data: data[:7], "got 7 bytes"),
        (lambda data: data[:100], "got 100 bytes, no safetensors header: it asks for "),
        (lambda data: data[:-1000], "got [0-9]+ bytes, expected [0-9]+ bytes"),
        (lambda data: data + b"\0", "got [0-9]+ bytes, expected [0-9]+ bytes"),
        (lambda data: (2**62).to_bytes(8, "little") + data[8:], "it asks for 4611686018427387904 bytes"),
        (lambda data: data[:8] + b"x" + data[9:], "its header: not JSON"),
        (lambda data: data.replace(b'"shape":[160]', b'"shape":[161]'), "a tensor's shape does not fit its bytes"),
    ],
    ids=["zero bytes", "7 bytes", "half a header", "truncated", "too long", "huge header", "no JSON", "wrong shape"],
)
def test_a_corrupt_file_says_so_before_anything_is_allocated(weights, tmp_path, change, what):
    file = tmp_path / "sana.safetensors"
    file.write_bytes(change(weights.read_bytes()))
    with pytest.raises(ValueError, match=rf"/sana.safetensors: corrupt or incomplete, .*{what}.*; download"):
        sana_core.load_transformer(file)


@pytest.mark.parametrize("name", ["sana.safetensors", "sana.pth"])
@pytest.mark.parametrize("by_torch", [True, False])
def test_nothing_in_a_file_is_executed(tmp_path, name, by_torch):
    makes_a_file, file = Call(open, str(tmp_path / "executed"), "w"), tmp_path / name
    content = {"state_dict": {"x_embedder.proj.weight": makes_a_file}}
    if by_torch:
        torch.save(content, file)
    else:
        file.write_bytes(pickle.dumps(content))
    with pytest.raises(ValueError, match=r"corrupt or incomplete|\((no whole zip|a pickle that calls (io|_io) open\))"):
        sana_core.load_transformer(file)
    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize("name", ["sana.pt", "sana.ckpt", "sana.bin", "sana"])
def test_other_pickles_are_not_opened(tmp_path, name):
    torch.save({}, tmp_path / name)
    with pytest.raises(ValueError, match="expected one of .safetensors, .sft, .pth; use a "):
        sana_core.inspect_checkpoint(tmp_path / name)


def test_a_pth_without_weights_says_so(tmp_path):
    torch.save({"epoch": 3}, tmp_path / "sana.pth")
    with pytest.raises(ValueError, match="got a pickle without weights, expected a state_dict of tensors"):
        sana_core.load_transformer(tmp_path / "sana.pth")


OTHERS = {
    "tensors named double_blocks.0.img_attn.qkv.weight": ["double_blocks.0.img_attn.qkv.weight"],
    # A Gemma 3 has some of Gemma 2's names.
    "tensors named model.layers.0.pre_feedforward_layernorm.weight, model.layers.0.self_attn.q_norm.weight": [
        "model.layers.0.self_attn.q_norm.weight",
        "model.layers.0.pre_feedforward_layernorm.weight",
    ],
    # Damaged files of SANA.
    "a SANA transformer without caption_projection.linear_1.weight": ["transformer_blocks.0.ff.conv_point.weight"],
    "a SANA transformer without blocks.0.cross_attn.q_linear.weight": ["blocks.0.mlp.point_conv.conv.weight"],
    "a DC-AE without decoder.conv_in.weight": ["encoder.down_blocks.3.0.attn.to_qkv_multiscale.0.proj_in.weight"],
    "a Gemma 2 text encoder without layers.0.pre_feedforward_layernorm.weight": [
        "model.layers.1.pre_feedforward_layernorm.weight",
    ],
    "tensors named a, b, c": ["d", "c", "b", "a"],
}


@pytest.mark.parametrize("kind", LOADERS)
@pytest.mark.parametrize("family", OTHERS)
def test_a_file_that_is_not_sanas_is_named_for_what_it_is(tmp_path, kind, family):
    file = layouts.save({name: torch.zeros(2, 2) for name in OTHERS[family]}, tmp_path / "other.safetensors")
    info = sana_core.inspect_checkpoint(file)
    assert (info.kind, info.variant) == ("other", family)
    with pytest.raises(ValueError, match=rf"/other.safetensors: not {KIND[kind]}.*: found {family}; get .* Hugging"):
        LOADERS[kind][0](file)


def test_a_vae_with_16_channels_says_so(tmp_path):
    tensors = {"decoder.conv_in.weight": torch.zeros(8, 16, 3, 3), "decoder.mid.block_1.norm1.weight": torch.zeros(8)}
    with pytest.raises(ValueError, match="found a VAE with 16 channels; get dc-ae-f32c32-sana-1.1-diffusers from mit"):
        sana_core.load_autoencoder(layouts.save(tensors, tmp_path / "ae.safetensors"))


def test_a_name_alone_makes_no_vae(tmp_path):
    file = layouts.save({"decoder.conv_in.weight": torch.zeros(8)}, tmp_path / "ae.safetensors")
    assert sana_core.inspect_checkpoint(file).variant == "tensors named decoder.conv_in.weight"


def test_the_wrong_component_says_which_it_is(weights):
    with pytest.raises(ValueError, match="not SANA's VAE, .*: found a SANA transformer .*; get dc-ae-f32c32"):
        sana_core.load_autoencoder(weights)


def altered(weights, tmp_path, change):
    tensors = sana_core.checkpoints.headers.read_file(weights)
    shutil.copy(weights.parent / "config.json", tmp_path)
    return layouts.save(change({key: value.clone() for key, value in tensors.items()}), tmp_path / "sana.safetensors")


def test_tensors_of_no_part_of_the_model_are_named(weights, tmp_path):
    file = altered(weights, tmp_path, lambda t: {**t, "surprise": torch.zeros(1), "lm_head.weight": torch.zeros(1)})
    info = sana_core.inspect_checkpoint(file)
    assert info.notes == (f"{tmp_path.name}/sana.safetensors: not read: lm_head.weight, surprise",)
    sana_core.load_transformer(file)


def test_missing_and_extra_tensors_are_listed_and_counted(weights, tmp_path):
    fewer = altered(weights, tmp_path, lambda t: {k: v for k, v in t.items() if ".attn2." not in k})
    with pytest.raises(ValueError, match=r"no transformer_blocks.0.attn2.to_k.bias, (\S+), (\S+) and 37 more; the"):
        sana_core.load_transformer(fewer)
    more = altered(weights, tmp_path, lambda t: {**t, "proj_out.surprise": torch.zeros(1)})
    with pytest.raises(ValueError, match="unexpected proj_out.surprise; the file is of another model, or in a format"):
        sana_core.load_transformer(more)
    wrong = altered(weights, tmp_path, lambda t: {**t, "proj_out.bias": torch.zeros(31)})
    with pytest.raises(ValueError, match=r"proj_out.bias is \[31\], expected \[32\]; the file is of another model"):
        sana_core.load_transformer(wrong)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_weights_that_are_no_numbers_are_refused(weights, tmp_path, value):
    def change(tensors):
        tensors["transformer_blocks.2.ff.conv_inverted.weight"][5, 3] = value
        return tensors

    with pytest.raises(ValueError, match="1 of 128000 values in transformer_blocks.2.ff.conv_inverted.weight are NaN"):
        sana_core.load_transformer(altered(weights, tmp_path, change))


@pytest.fixture
def sharded(tmp_path):
    layouts.transformer().save_pretrained(tmp_path / "sana", max_shard_size="10MB")
    return tmp_path / "sana"


def test_a_missing_shard_is_named(sharded):
    shard = sorted(sharded.glob("*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(
        FileNotFoundError, match=f"^sana/{shard.name}: no such file, but diffusion.*index.json names it"
    ):
        sana_core.load_transformer(sharded)


OUTSIDE = ["../x.safetensors", "/x.safetensors", "..\\x.safetensors", "C:x", "a/b", "..", "a\0"]


@pytest.mark.parametrize("name", [*OUTSIDE, "sana.safetensors.index.json", "config.json", "x.pth"])
def test_an_index_names_safetensors_files_of_its_own_folder_alone(sharded, name):
    index = next(sharded.glob("*.index.json"))
    content = json.loads(index.read_text())
    content["weight_map"]["proj_out.bias"] = name
    index.write_text(json.dumps(content))
    save_file({"proj_out.bias": torch.zeros(32)}, sharded.parent / "x.safetensors")
    with pytest.raises(
        ValueError, match="^sana/diffusion.*index.json: names .*, expected safetensors files of its own"
    ):
        sana_core.load_transformer(sharded)


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"weight_map": [1]}'])
def test_an_index_that_is_none_is_named(sharded, content):
    next(sharded.glob("*.index.json")).write_text(content)
    with pytest.raises(
        ValueError, match="^sana/diffusion.*index.json: (not JSON|got JSON|got no index of saf).*; download it again$"
    ):
        sana_core.load_transformer(sharded)


def test_an_index_of_more_files_than_a_model_has_is_refused(sharded):
    index = next(sharded.glob("*.index.json"))
    for count, error, subject in (
        (1000, FileNotFoundError, "no such file"),
        (1001, ValueError, "names 1001 files, exp"),
    ):
        names = {f"layer{number}.weight": f"part-{number}.safetensors" for number in range(count)}
        index.write_text(json.dumps({"weight_map": names}))
        with pytest.raises(error, match=subject):
            sana_core.load_transformer(sharded)


def test_a_file_that_changes_between_its_header_and_its_tensors_is_named(weights, tmp_path):
    """Another program may rewrite a checkpoint between its choice on the canvas and its loading."""
    file = altered(weights, tmp_path, lambda tensors: tensors)
    seen = sana_core.inspect_checkpoint(file)
    tensors = sana_core.checkpoints.headers.read_file(file)
    lost = next(iter(tensors))
    layouts.save({name: tensor for name, tensor in tensors.items() if name != lost}, file)
    with pytest.raises(ValueError, match=f"/sana.safetensors: no tensor {lost} any more, the file has changed; load"):
        sana_core.checkpoints.load.load_part(seen, torch.float32)


def test_a_shard_without_its_tensor_is_named(sharded):
    shard = sorted(sharded.glob("*.safetensors"))[-1]
    save_file({"other": torch.zeros(1)}, shard)
    with pytest.raises(ValueError, match=f"^sana/{shard.name}: no tensor .*, but diffusion.*index.json names it"):
        sana_core.load_transformer(sharded)


def test_no_request_is_ever_made(checkpoint, monkeypatch, tmp_path):
    def refuse(*arguments, **keywords):
        raise AssertionError("a socket was opened")

    monkeypatch.setattr(socket, "socket", refuse)
    for load, _ in LOADERS.values():
        load(checkpoint)
    with pytest.raises(FileNotFoundError):
        sana_core.load_text_encoder("google/gemma-2-2b-it")


def test_a_library_that_cannot_be_imported_is_not_the_file_s_fault(checkpoint, monkeypatch):
    import diffusers.models

    for library in (diffusers, diffusers.models):
        # The library then imports the class again.
        monkeypatch.delitem(vars(library), "AutoencoderDC", raising=False)
    monkeypatch.setitem(sys.modules, AutoencoderDC.__module__, None)
    with pytest.raises(sana_core.errors.VersionError, match=r"cannot be imported \(.*halted.*requirements.txt"):
        sana_core.load_autoencoder(checkpoint)
    assert gc.isenabled()


def test_a_file_and_its_converted_tensors_are_never_in_memory_at_the_same_time(tmp_path, monkeypatch):
    """Gemma 2 in float32 takes 10.5 GB, and 5.2 GB in bfloat16."""
    monkeypatch.setattr(files, "PART", 2**18)
    weights = {f"{index}": torch.randn(256, 1024).bfloat16().float() for index in range(20)}
    file = layouts.save(weights, tmp_path / "model.safetensors")
    with LiveBytes() as memory:
        tensors = read_file(file, half=True)
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    assert all(torch.equal(tensors[name].float(), weights[name]) for name in weights)
    # The result in bfloat16, two buffers, and blocks of the allocator.
    assert memory.peak <= 20 * 256 * 1024 * 2 + 2 * 2**18 + 2**16
    # A tensor that bfloat16 cannot hold keeps its numbers.
    exact = {**weights, "7": weights["7"] + 1e-6}
    tensors = read_file(layouts.save(exact, tmp_path / "exact.safetensors"), half=True)
    assert [name for name in tensors if tensors[name].dtype == torch.float32] == ["7"]
    assert all(torch.equal(tensors[name].float(), exact[name]) for name in exact)


@pytest.mark.parametrize("suffix", ["safetensors", "pth"])
@pytest.mark.parametrize("options", [{"half": True}, {"dtype": torch.bfloat16}, {"device": "meta"}], ids=str)
def test_a_file_that_changes_dtype_or_device_is_read_in_parts(tmp_path, monkeypatch, suffix, options):
    """Otherwise the whole file and its half are in memory at the same time."""
    monkeypatch.setattr(files, "PART", 2**18)
    weights = {f"{index}": torch.randn(256, 1024).bfloat16().float() for index in range(20)}
    file = tmp_path / f"model.{suffix}"
    layouts.save(weights, file) if suffix == "safetensors" else torch.save({"state_dict": weights}, file)
    with LiveBytes() as memory:
        tensors = read_file(file, **options)
    is_real = "device" not in options
    dtype = torch.bfloat16 if is_real else torch.float32
    # The result, two buffers, a part on the device, and blocks of the allocator.
    assert memory.peak <= 20 * 256 * 1024 * dtype.itemsize + 3 * 2**18 + 2**16
    assert {tensor.dtype for tensor in tensors.values()} == {dtype}
    assert {tensor.shape for tensor in tensors.values()} == {(256, 1024)}
    assert not is_real or all(torch.equal(tensors[name].float(), weights[name]) for name in weights)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("device", ["cpu", "cuda:1"])
def test_a_file_read_in_parts_has_the_numbers_of_a_conversion(tmp_path, monkeypatch, dtype, device):
    monkeypatch.setattr(files, "PART", 64)
    stored = {str(kind): torch.randn(7, 11).to(kind) for kind in (torch.float64, torch.float32, torch.float16)}
    stored |= {str(kind): torch.arange(77).reshape(7, 11).to(kind) for kind in (torch.int8, torch.float8_e4m3fn)}
    stored |= {"number": torch.tensor(3.5), "none": torch.zeros(0, 3)}
    file = layouts.save(stored, tmp_path / "model.safetensors")
    with pretend_cards(2):
        for name, tensor in read_file(file, dtype=dtype, device=device).items():
            is_converted = stored[name].is_floating_point() and stored[name].dtype.itemsize > 1
            expected = stored[name].to(dtype) if is_converted else stored[name]
            assert tensor.device == torch.device(device) and tensor.dtype == expected.dtype
            assert tensor.shape == expected.shape and torch.equal(tensor.cpu().float(), expected.float())


def test_a_number_too_large_for_float16_is_no_fault_of_the_file(weights, tmp_path):
    def enlarge(tensors):
        next(iter(tensors.values())).view(-1)[0] = 1e6
        return tensors

    model = sana_core.load_transformer(altered(weights, tmp_path, enlarge), dtype=torch.float16)
    assert any(parameter.isinf().any() for parameter in model.parameters())


def test_fill_drops_each_tensor_once_it_is_converted():
    tensors = {f"{index}.weight": torch.randn(512, 512) for index in range(16)}
    with torch.device("meta"):
        module = torch.nn.Sequential(*(torch.nn.Linear(512, 512, bias=False) for _ in range(16)))
    references = [weakref.ref(tensor) for tensor in tensors.values()]
    alive = []

    def dtype_of(name):
        alive.append(sum(reference() is not None for reference in references))
        return torch.bfloat16

    fill_module(module, tensors, "model", dtype_of)
    # The tensor that is being converted has no other owner any more.
    assert max(count + index for index, count in enumerate(alive)) <= 16
    assert not tensors and module[3].weight.dtype == torch.bfloat16
