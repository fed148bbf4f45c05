"""Lines for users on checkpoints that load: a config.json of another model, and a text encoder that is not -it."""

import json

import layouts
import pytest
import torch
from transformers import Gemma2Config, Gemma2Model

import sana_core
from sana_core.checkpoints.generation import LOWER_CASE, checkpoint_notes, shift_of
from sana_core.checkpoints.load import build_module


def put_config(folder, model):
    (folder / "config.json").write_text(layouts.with_config(model))


@pytest.mark.parametrize(
    "name, pixels, shift",
    [
        ("Sana_1600M_4Kpx_BF16", 4096, 6.0),
        ("Sana_1600M_2Kpx_BF16", 2048, 3.0),
        ("Sana_600M_512px", 512, 3.0),
        ("my-sana-4k", 4096, 6.0),
        ("sana 2K", 2048, 3.0),
        ("sana_4096px_v2", 4096, 6.0),
        # The configuration decides for a number without a unit, two sizes, or a size inside of a word.
        ("sana_step_4096", 1024, 3.0),
        ("sana_512px_to_4096px", 1024, 3.0),
        ("sana-14k-steps", 1024, 3.0),
        ("sana4kids", 1024, 3.0),
        ("Sana_1600M_1024px", 1024, 3.0),
        ("diffusion_pytorch_model", 1024, 3.0),
    ],
)
def test_a_resolution_in_the_file_s_name_comes_before_a_shared_configuration(tmp_path, name, pixels, shift):
    put_config(tmp_path, layouts.transformer())
    file = layouts.sparse(layouts.transformer(resolution=pixels), tmp_path / f"{name}.safetensors")
    info = sana_core.inspect_checkpoint(file)
    assert (info.resolution, shift_of(info)) == (pixels, shift)
    config = build_module(info).config
    assert (config.sample_size, config.interpolation_scale) == (pixels // 32, {2048: 1.0, 4096: 2.0}.get(pixels))
    assert [f"{pixels} px by its file name" in note for note in info.notes] == [True] * (pixels != 1024)


@pytest.mark.parametrize("pixels", [512, 2048, 4096])
def test_a_position_embedding_comes_before_a_shared_configuration(tmp_path, pixels):
    put_config(tmp_path, layouts.transformer())
    model = layouts.transformer(resolution=pixels)
    info = sana_core.inspect_checkpoint(layouts.save(layouts.nvidia(model), tmp_path / "sana.safetensors"))
    assert (info.resolution, info.resolution_from) == (pixels, "position embedding")
    assert "config.json beside it has 1024 px" in info.notes[0]


def test_a_configuration_inside_of_the_file_comes_before_its_name(tmp_path):
    model = layouts.transformer(resolution=4096)
    metadata = {"config": layouts.with_config(model)}
    file = layouts.save(model.state_dict(), tmp_path / "was_512px.safetensors", **metadata)
    info = sana_core.inspect_checkpoint(file)
    assert (info.resolution, info.notes) == (4096, ())


OTHERS = {"layers": {"layers": 2}, "qk_norm": {"qk_norm": True}, "sprint": {"sprint": True}}


@pytest.mark.parametrize(
    "ours, theirs",
    [
        ("plain", "plain"),
        ("sprint", "sprint"),
        *(("plain", name) for name in OTHERS),
        *((name, "plain") for name in OTHERS),
    ],
)
def test_the_shapes_come_before_a_shared_configuration_of_another_model(tmp_path, ours, theirs):
    put_config(tmp_path, layouts.transformer(**OTHERS.get(theirs, {})))
    model = layouts.transformer(**OTHERS.get(ours, {}))
    file = layouts.save(model.state_dict(), tmp_path / "sana.safetensors")
    loaded = sana_core.load_transformer(file, dtype=torch.bfloat16).state_dict()
    assert all(torch.equal(loaded[name], value) for name, value in model.state_dict().items())
    notes = sana_core.inspect_checkpoint(file).notes
    assert ["of another model" in note for note in notes] == [True] * (ours != theirs)


def small_gemma(name, folder, change=lambda tensor: tensor, **config):
    """A file of Gemma 2 that is as wide as the 2B and has one block."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    model = Gemma2Model(Gemma2Config(hidden_size=2304, num_key_value_heads=1, head_dim=256, **sizes | config))
    torch.nn.init.normal_(model.norm.weight)
    tensors = {f"model.{key}": change(value.detach()) for key, value in model.bfloat16().state_dict().items()}
    return layouts.save(tensors, folder / name)


def finer(dtype):
    return lambda tensor: tensor.to(dtype) * torch.tensor(1.003, dtype=dtype)


@pytest.mark.parametrize(
    "name, change, reason",
    [
        # the base model of Lumina 2, by its numbers, whatever it is called
        ("gemma_2_2b_fp16.safetensors", finer(torch.float16), "numbers"),
        ("gemma_2_2b_it_fp16.safetensors", finer(torch.float16), "numbers"),
        ("encoder.safetensors", finer(torch.float16), "numbers"),
        ("encoder.safetensors", finer(torch.float32), "numbers"),
        # These tensors are bfloat16. Only the name of the file shows the original precision.
        ("gemma_2_2b_bf16.safetensors", torch.clone, "name"),
        ("gemma-2-2b.safetensors", torch.clone, "name"),
        ("google/gemma-2-2b/model.safetensors", torch.clone, "name"),
        ("models--google--gemma-2-2b/snapshots/0123/model.safetensors", torch.clone, "name"),
        # Gemma-2-2b-it in every dtype and under every name
        ("gemma_2_2b_it_elm_bf16.safetensors", torch.clone, ""),
        ("gemma_2_2b_it_elm_fp16.safetensors", torch.Tensor.half, ""),
        ("gemma_2_2b_it_fp32.safetensors", torch.Tensor.float, ""),
        ("gemma-2-2b-it/model.safetensors", torch.clone, ""),
        ("models--google--gemma-2-2b-it/snapshots/0123/model.safetensors", torch.clone, ""),
        ("encoder.safetensors", torch.clone, ""),
        ("Gemma-2-2B-Instruct.safetensors", torch.clone, ""),
    ],
)
def test_a_text_encoder_that_is_not_the_instruction_tuned_gemma_is_told(tmp_path, name, change, reason):
    info = sana_core.inspect_checkpoint(small_gemma(name, tmp_path / "text_encoders", change))
    assert info.variant == "gemma-2-2b"
    notes = checkpoint_notes(info)
    assert len(notes) == bool(reason)
    assert all("probably not Gemma-2-2b-it" in note and reason in note for note in notes)


def test_a_gemma_beside_the_configuration_of_another_one_is_read_by_its_shapes(tmp_path):
    config = {"architectures": ["Gemma2Model"], "hidden_size": 3584, "num_hidden_layers": 42}
    file = small_gemma("gemma-2-2b-it.safetensors", tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(config))
    info = sana_core.inspect_checkpoint(file)
    assert info.config is None and "hidden_size 3584, the file has 2304" in checkpoint_notes(info)[0]


@pytest.mark.parametrize("reference, told", [("auto", True), ("diffusers", True), ("nvidia", False)])
def test_a_whole_folder_of_diffusers_says_how_prompts_are_read(checkpoint, reference, told):
    assert checkpoint_notes(sana_core.inspect_checkpoint(checkpoint), reference) == [LOWER_CASE] * told


def test_inspect_prints_the_notes(checkpoint, capsys):
    from sana_core.__main__ import main

    main(["inspect", str(checkpoint)])
    assert LOWER_CASE in capsys.readouterr().out
