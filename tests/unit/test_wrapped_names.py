"""Names of weights and of LoRAs with what compiling, DDP, FSDP, PEFT and training scripts add to them."""

import layouts
import pytest
import torch
from adapted import save_adapter
from safetensors.torch import load_file, save_file

import sana_core
from sana_core import CheckpointError, InputError
from sana_core.__main__ import main
from sana_core.checkpoints.generation import checkpoint_notes
from sana_core.checkpoints.lora import merge_loras

# Before all names of a model.
BEFORE = [
    "_orig_mod.",
    "module.",
    "model.",
    "base_model.",
    "base_model.model.",
    "module._orig_mod.",
    "_orig_mod.module.",
    "module.module.",
    "model._orig_mod.",
    "_orig_mod.model.",
    "module.model._orig_mod.",
    "model.module.",
    "_fsdp_wrapped_module.",
    "model.diffusion_model._orig_mod.",
    "transformer._orig_mod.",
    "_orig_mod.transformer.",
    "model.transformer.module.",
]
# Inside of names.
INSIDE = {
    "compiled blocks": ("blocks.{}.", "blocks.{}._orig_mod."),
    "sharded blocks": ("blocks.{}.", "blocks.{}._fsdp_wrapped_module."),
    "checkpointed blocks": ("blocks.{}.", "blocks.{}._checkpoint_wrapped_module."),
    "all": ("blocks.{}.", "blocks.{}._fsdp_wrapped_module._checkpoint_wrapped_module._orig_mod."),
}


@pytest.fixture(scope="module")
def transformer():
    return layouts.transformer()


def written(model, layout):
    tensors = layouts.nvidia(model) if layout == "original" else model.state_dict()
    return {name: tensor.contiguous() for name, tensor in tensors.items()}


def check_loads(file, model):
    loaded = sana_core.load_transformer(file).state_dict()
    assert loaded.keys() == model.state_dict().keys()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize("layout", ["original", "diffusers"])
@pytest.mark.parametrize("before", BEFORE)
def test_wrappers_before_the_names_of_a_checkpoint_are_stripped(tmp_path, transformer, layout, before):
    tensors = {before + name: tensor for name, tensor in written(transformer, layout).items()}
    check_loads(layouts.save(tensors, tmp_path / "a.safetensors"), transformer)
    if layout == "original":
        torch.save({"state_dict": tensors, "epoch": 3}, tmp_path / "a.pth")
        check_loads(tmp_path / "a.pth", transformer)


@pytest.mark.parametrize("layout", ["original", "diffusers"])
@pytest.mark.parametrize("plain, wrapped", INSIDE.values(), ids=INSIDE)
@pytest.mark.parametrize("before", ["", "model._orig_mod."])
def test_wrappers_inside_the_names_of_a_checkpoint_are_stripped(tmp_path, transformer, layout, plain, wrapped, before):
    tensors = written(transformer, layout)
    for number in range(transformer.config.num_layers):
        old, new = plain.format(number), wrapped.format(number)
        tensors = {name.replace(old, new, 1): tensor for name, tensor in tensors.items()}
    tensors = {before + name: tensor for name, tensor in tensors.items()}
    check_loads(layouts.save(tensors, tmp_path / "a.safetensors"), transformer)


def test_the_number_of_an_average_is_left_out(tmp_path, transformer):
    averaged = torch.optim.swa_utils.AveragedModel(transformer)
    tensors = {name: tensor.contiguous() for name, tensor in averaged.state_dict().items()}
    assert "n_averaged" in tensors
    check_loads(layouts.save(tensors, tmp_path / "a.safetensors"), transformer)
    held = {f"model.{name}": tensor for name, tensor in tensors.items() if name != "n_averaged"}
    check_loads(layouts.save(held, tmp_path / "b.safetensors"), transformer)


@pytest.mark.parametrize("kind", ["autoencoder", "text_encoder", "controlnet"])
@pytest.mark.parametrize("before", ["_orig_mod.", "module._orig_mod.", "model._orig_mod.", "_orig_mod.module."])
def test_other_components_are_recognised_with_wrappers(tmp_path, kind, before):
    model = layouts.gemma() if kind == "text_encoder" else getattr(layouts, kind)()
    tensors = {f"{before}{name}": tensor.contiguous() for name, tensor in model.state_dict().items()}
    info = sana_core.inspect_checkpoint(layouts.save(tensors, tmp_path / "a.safetensors"))
    assert info.kind == kind and set(info.origins) == set(model.state_dict())


@pytest.mark.parametrize("first, second", [("", "_orig_mod."), ("module.", "module._orig_mod.")])
def test_a_weight_that_is_there_twice_is_refused(tmp_path, transformer, first, second):
    tensors = {first + name: tensor for name, tensor in written(transformer, "original").items()}
    name = "x_embedder.proj.weight"
    file = layouts.save({**tensors, second + name: tensors[first + name].clone()}, tmp_path / "a.safetensors")
    with pytest.raises(CheckpointError, match=f"got .*{name} and .*{name}, expected one of them; use another file"):
        sana_core.load_transformer(file)


@pytest.mark.parametrize("name", ["model.a.weight", "module.blocks.0.weight", "_orig_mod.transformer_blocks.0.x"])
def test_wrappers_make_no_sana_of_another_model(tmp_path, name):
    file = layouts.save({name: torch.zeros(3)}, tmp_path / "a.safetensors")
    assert sana_core.inspect_checkpoint(file).kind == "other"


# Layer {name} or {flat}, with underscores: and what comes behind it.
LORAS = {
    "compiled": ("_orig_mod.{name}", "{part}.weight"),
    "compiled, diffusers": ("transformer._orig_mod.{name}", "{part}.weight"),
    "compiled around diffusers": ("_orig_mod.transformer.{name}", "{part}.weight"),
    "ddp": ("module.{name}", "{part}.weight"),
    "ddp, diffusers": ("transformer.module.{name}", "{part}.weight"),
    "ddp and peft": ("module.base_model.model.{name}", "{part}.weight"),
    "peft around ddp": ("base_model.model.module.{name}", "{part}.default.weight"),
    "peft around compiled": ("base_model.model._orig_mod.{name}", "{part}.weight"),
    "all": ("module._orig_mod.base_model.model.{name}", "{part}.default_0.weight"),
    "all, other order": ("_orig_mod.module.base_model.model._orig_mod.{name}", "{part}.default_0.weight"),
    "default_0": ("transformer.{name}", "{part}.default_0.weight"),
    "default_1": ("{name}", "{part}.default_1.weight"),
    "named": ("transformer.{name}", "{part}.my-style_2.weight"),
    "named, without weight": ("transformer.{name}", "{part}.default_0"),
    "unet": ("unet.{name}", "{part}.weight"),
    "unet, peft": ("unet.base_model.model.{name}", "{part}.default.weight"),
    "unet, ddp": ("module.unet.{name}", "{part}.weight"),
    "core, compiled": ("diffusion_model._orig_mod.{name}", "{part}.weight"),
    "model and diffusion_model": ("model.diffusion_model.{name}", "{part}.weight"),
    "fsdp": ("_fsdp_wrapped_module.{name}", "{part}.weight"),
    "compiled blocks": ("transformer.{block}._orig_mod.{inner}", "{part}.weight"),
    "sharded blocks": ("{block}._fsdp_wrapped_module._checkpoint_wrapped_module.{inner}", "{part}.weight"),
    "kohya, compiled": ("lora_unet__orig_mod_{flat}", "{kohya}.weight"),
    "kohya, ddp": ("lora_unet_module_{flat}", "{kohya}.weight"),
    "kohya, both": ("lora_unet_module__orig_mod_{flat}", "{kohya}.weight"),
    "kohya, compiled blocks": ("lora_unet_{flatblock}__orig_mod_{flatinner}", "{kohya}.weight"),
    "onetrainer, compiled": ("lora_transformer__orig_mod_{flat}", "{kohya}.weight"),
}
KOHYA = {"lora_A": "lora_down", "lora_B": "lora_up"}


def rewrite(tensors, pattern, end):
    """The tensors of a LoRA of this package with other names."""
    renamed = {}
    for key, tensor in tensors.items():
        name, _, part = key.removeprefix("transformer.").removesuffix(".weight").rpartition(".")
        group, number, inner = name.split(".", 2)
        block = f"{group}.{number}"
        names = {"name": name, "block": block, "inner": inner}
        names |= {f"flat{kind.removeprefix('name')}": value.replace(".", "_") for kind, value in names.items()}
        renamed[f"{pattern.format(**names)}.{end.format(part=part, kohya=KOHYA[part])}"] = tensor
    assert len(renamed) == len(tensors)
    return renamed


@pytest.fixture(scope="module")
def lora(checkpoint, tmp_path_factory):
    file = tmp_path_factory.mktemp("lora") / "plain.safetensors"
    save_adapter(checkpoint, file)
    return load_file(file), merged(checkpoint, file)


def merged(checkpoint, file):
    transformer = sana_core.load_transformer(checkpoint)
    merge_loras(transformer, [(str(file), 1.0)])
    return {name: weight.detach().clone() for name, weight in transformer.named_parameters()}


@pytest.mark.parametrize("pattern, end", LORAS.values(), ids=LORAS)
def test_wrappers_in_the_names_of_a_lora_are_stripped(tmp_path, checkpoint, lora, pattern, end):
    tensors, expected = lora
    save_file(rewrite(tensors, pattern, end), tmp_path / "a.safetensors")
    weights = merged(checkpoint, tmp_path / "a.safetensors")
    assert all(torch.equal(weights[name], weight) for name, weight in expected.items())


def test_two_adapters_in_one_file_are_refused(tmp_path, checkpoint, lora):
    tensors, _ = lora
    both = rewrite(tensors, "transformer.{name}", "{part}.default_0.weight")
    both |= rewrite(tensors, "transformer.{name}", "{part}.default_1.weight")
    save_file({name: tensor.clone() for name, tensor in both.items()}, tmp_path / "a.safetensors")
    with pytest.raises(InputError, match="none of its .* layers fit this model"):
        merged(checkpoint, tmp_path / "a.safetensors")
    twice = rewrite(tensors, "{name}", "{part}.weight") | rewrite(tensors, "_orig_mod.{name}", "{part}.weight")
    save_file({name: tensor.clone() for name, tensor in twice.items()}, tmp_path / "b.safetensors")
    with pytest.raises(InputError, match="its weight has another layer in the file"):
        merged(checkpoint, tmp_path / "b.safetensors")


def test_convert_writes_the_weights_or_their_moving_average(tmp_path, transformer, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tensors = layouts.nvidia(transformer)
    average = {f"module.{name}": tensor + 0.25 for name, tensor in tensors.items()}
    torch.save({"state_dict": tensors, "state_dict_ema": average, "epoch": 3}, "a.pth")
    info = sana_core.inspect_checkpoint(tmp_path / "a.pth")
    note = "also has a moving average of the weights (state_dict_ema); convert --ema writes it to a new file"
    assert [line for line in checkpoint_notes(info) if note in line] == [f"{tmp_path.name}/a.pth: {note}"]
    assert main(["inspect", "a.pth"]) == 0 and capsys.readouterr().out.count(note) == 1
    assert main(["convert", "a.pth", "weights.safetensors"]) == 0 and note in capsys.readouterr().out
    assert main(["convert", "a.pth", "average.safetensors", "--ema"]) == 0 and note not in capsys.readouterr().out
    check_loads("weights.safetensors", transformer)
    for name, tensor in sana_core.load_transformer("average.safetensors").state_dict().items():
        assert torch.equal(tensor, transformer.state_dict()[name] + 0.25)
    (tmp_path / "nvidia" / "checkpoints").mkdir(parents=True)
    torch.save({"state_dict": tensors, "state_dict_ema": average}, "nvidia/checkpoints/a.pth")
    assert main(["convert", "nvidia", "folder.safetensors", "--ema"]) == 0
    assert load_file("folder.safetensors").keys() == load_file("average.safetensors").keys()


@pytest.mark.parametrize("source", ["weights.safetensors", "folder", "only.pth"])
def test_ema_of_a_file_without_a_moving_average_is_refused(tmp_path, transformer, checkpoint, capsys, source):
    layouts.save(layouts.nvidia(transformer), tmp_path / "weights.safetensors")
    torch.save({"state_dict": layouts.nvidia(transformer), "state_dict_ema": None}, tmp_path / "only.pth")
    (tmp_path / "folder").symlink_to(checkpoint)
    assert main(["convert", str(tmp_path / source), str(tmp_path / "out.safetensors"), "--ema"]) == 1
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and ("ema: got it with" in said or "got no state_dict_ema" in said)
    assert not (tmp_path / "out.safetensors").exists()


def test_a_checkpoint_with_nothing_but_an_average_is_that(tmp_path, transformer):
    torch.save({"state_dict_ema": layouts.nvidia(transformer)}, tmp_path / "a.pth")
    check_loads(tmp_path / "a.pth", transformer)
    (note,) = checkpoint_notes(sana_core.inspect_checkpoint(tmp_path / "a.pth"))
    assert note.endswith("a.pth: not read: y_embedder.y_embedding")
