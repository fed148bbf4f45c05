"""A run that starts from a LoRA file has its effect from the first step, for every trainer. Misfits are named."""

import json
from dataclasses import replace

import pytest
import torch
from adapted import learn_something, save_adapter
from checkpoints import CHECKPOINTS, trained_on_both
from diffusers import SanaPipeline
from lora_dialects import DIALECTS, WRAPPED
from peft import LoraConfig, get_peft_model
from peft.utils import get_peft_model_state_dict
from pictures import write_pictures
from safetensors.torch import load_file, save_file
from trained import same, velocity

import sana_core
from sana_core.errors import CheckpointError, InputError, MissingFileError
from sana_core.training import trainer
from sana_core.training.settings import Method, Phase, TrainingSettings, check_settings
from sana_core.training.trained_model import adapter_tensors, add_adapter, load_start

RANK = 4
TARGETS = ["to_q", "to_k", "to_v", "to_out.0"]


def begun(checkpoint, file, **method):
    """The velocity of a transformer that begins at the file."""
    transformer = sana_core.load_transformer(checkpoint)
    run_settings = Method(**{"rank": RANK, **method}, start=str(file))
    add_adapter(transformer, run_settings, seed=3)
    load_start(transformer, run_settings)
    return velocity(transformer)


@pytest.fixture(scope="module")
def lora(checkpoint):
    """The tensors {module: (A, B)} of a LoRA, and the velocity with alpha = rank."""
    transformer = sana_core.load_transformer(checkpoint)
    add_adapter(transformer, Method(rank=RANK), seed=7)
    learn_something(transformer)
    tensors = adapter_tensors(transformer, torch.float32)
    names = {name.removeprefix("transformer.").partition(".lora_")[0] for name in tensors}
    both = {name: tuple(tensors[f"transformer.{name}.lora_{part}.weight"] for part in "AB") for name in names}
    return both, velocity(transformer)


def write(tmp_path, tensors, **metadata):
    file = tmp_path / "it.safetensors"
    save_file(tensors, file, metadata)
    return file


def named(lora, dialect="diffusers"):
    name, first, second = {**DIALECTS, **WRAPPED}[dialect]
    tensors = {}
    for module, (down, up) in lora.items():
        layer = name.format(name=module, flat=module.replace(".", "_"))
        tensors[layer + first], tensors[layer + second] = down, up
    return tensors


@pytest.mark.parametrize("alpha", [None, 3.0])
@pytest.mark.parametrize("kind, targets", [("lora", "both"), ("dora", "attention"), ("lokr", "both")])
def test_from_a_file_of_this_package(checkpoint, tmp_path, kind, targets, alpha):
    file = tmp_path / "it.safetensors"
    transformer = save_adapter(checkpoint, file, Method(kind, RANK, 6.0, targets))
    got = begun(checkpoint, file, kind=kind, targets=targets, alpha=alpha)
    torch.testing.assert_close(got, velocity(transformer), atol=1e-4, rtol=0)
    assert (got - velocity(sana_core.load_transformer(checkpoint))).abs().max() > 0.01


@pytest.mark.parametrize("dialect", [*DIALECTS, *WRAPPED])
def test_from_each_dialect(checkpoint, tmp_path, lora, dialect):
    file = write(tmp_path, named(lora[0], dialect))
    torch.testing.assert_close(begun(checkpoint, file, alpha=2.0), lora[1], atol=1e-4, rtol=0)


def test_alpha_beside_the_tensors_scales_them(checkpoint, tmp_path, lora):
    halved = {module: (down, 2 * up) for module, (down, up) in lora[0].items()}
    tensors = named(halved, "kohya")
    alphas = {name.partition(".")[0] + ".alpha": torch.tensor(RANK / 2) for name in tensors}
    file = write(tmp_path, tensors | alphas)
    torch.testing.assert_close(begun(checkpoint, file), lora[1], atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    "settings", [{}, {"use_rslora": True}, {"use_dora": True}, {"alpha_pattern": {"attn1.to_q": 7, "to_k": 2}}], ids=str
)
def test_from_what_peft_saves(checkpoint, tmp_path, settings):
    """PEFT's folder, with rank, alpha, rslora and dora in adapter_config.json."""
    config = LoraConfig(r=RANK, lora_alpha=3, target_modules=TARGETS, init_lora_weights=False, **settings)
    theirs = get_peft_model(sana_core.load_transformer(checkpoint), config)
    theirs.save_pretrained(tmp_path)
    kind = "dora" if settings.get("use_dora") else "lora"
    got = begun(checkpoint, tmp_path / "adapter_model.safetensors", kind=kind)
    torch.testing.assert_close(got, velocity(theirs.get_base_model()), atol=1e-4, rtol=0)


def test_from_what_diffusers_saves(checkpoint, tmp_path):
    transformer = sana_core.load_transformer(checkpoint)
    config = LoraConfig(r=RANK, lora_alpha=9, target_modules=TARGETS, init_lora_weights=False)
    transformer.add_adapter(config)
    SanaPipeline.save_lora_weights(
        tmp_path,
        transformer_lora_layers=get_peft_model_state_dict(transformer),
        transformer_lora_adapter_metadata=config.to_dict(),
    )
    got = begun(checkpoint, tmp_path / "pytorch_lora_weights.safetensors")
    torch.testing.assert_close(got, velocity(transformer), atol=1e-4, rtol=0)


def changed(name, make):
    def change(tensors):
        key = next(key for key in sorted(tensors) if key.endswith(name))
        tensors[key] = make(tensors[key]).contiguous()

    return change


def with_magnitudes(shape):
    def change(tensors):
        tensors[sorted(tensors)[0].partition(".lora_")[0] + ".dora_scale"] = torch.ones(shape)

    return change


WRONG = {
    "rank": ({"rank": 8}, None, "got rank 4, but method.rank is 8; set rank to 4"),
    "kind": ({"kind": "dora"}, None, "got a lora, but method.kind is dora; set it to lora"),
    "targets": ({"targets": "both"}, None, "are of targets attention, but method.targets is both; set it so"),
    "fewer layers": ({}, lambda tensors: [tensors.pop(key) for key in sorted(tensors)[:2]], "to_k is missing"),
    "other layers": (
        {},
        lambda tensors: tensors.update({"proj_out.lora_A": torch.ones(4, 160), "proj_out.lora_B": torch.ones(32, 4)}),
        "of no targets, proj_out is more than is trained",
    ),
    "another kind": (
        {},
        lambda tensors: tensors.update({"transformer.proj_out.oft_blocks": torch.ones(4, 160)}),
        r"40 of 41 layers fit, not transformer.proj_out \(got oft_blocks \[4, 160\], but no alpha\)",
    ),
    "two alphas": (
        {},
        lambda tensors: tensors.update({sorted(tensors)[0].partition(".lora_")[0] + ".alpha": torch.ones(2)}),
        r"39 of 40 layers fit, not transformer.*alpha \[2\], lora_A",
    ),
    "half a layer": ({}, lambda tensors: tensors.pop(sorted(tensors)[0]), r"got lora_B \[160, 4\], but no lora_A"),
    "another width": ({}, changed("lora_A.weight", lambda each: each[:, :96]), r"got lora_A \[4, 96\], lora_B"),
    "a DoRA of columns": ({}, with_magnitudes((1, 160)), "got a dora of columns, expected lora, dora, lokr"),
    "a DoRA of rows": ({}, with_magnitudes((160, 1)), "got a dora, but method.kind is lora; set it to dora"),
}


@pytest.mark.parametrize("fault", WRONG)
def test_what_does_not_fit_is_named_with_what_to_set(checkpoint, tmp_path, lora, fault):
    method, change, said = WRONG[fault]
    tensors = named(lora[0])
    if change is not None:
        change(tensors)
    with pytest.raises(InputError, match=f"^[^:]*it.safetensors: .*{said}"):
        begun(checkpoint, write(tmp_path, tensors), **method)


def test_settings_that_cannot_be_followed_are_named(checkpoint, tmp_path, lora):
    with pytest.raises(CheckpointError, match="lora_alpha is 0"):
        metadata = json.dumps({"transformer.lora_alpha": 0})
        begun(checkpoint, write(tmp_path, named(lora[0]), lora_adapter_metadata=metadata))
    with pytest.raises(CheckpointError, match="found a SANA transformer"):
        begun(checkpoint, checkpoint / "transformer" / "diffusion_pytorch_model.safetensors")
    with pytest.raises(InputError, match='^method.start: got "a.safetensors" without method.kind lora'):
        check_settings(
            TrainingSettings("m", "o", (Phase(("d",), steps=1),), method=Method("full", start="a.safetensors"))
        )


@trained_on_both
def test_a_run_goes_on_from_the_file_and_resumes_without_it(checkpoint, tmp_path, name):
    checkpoint = CHECKPOINTS[name]
    write_pictures(tmp_path / "pictures", 2)
    phase = Phase((str(tmp_path / "pictures"),), 128, batch=2, steps=4, learning_rate=1e-3)
    first = check_settings(
        TrainingSettings(str(checkpoint), str(tmp_path / "first"), (phase,), dtype="float32", method=Method(rank=RANK))
    )
    file = trainer.train(first)
    idle = replace(phase, learning_rate=0.0)
    second = replace(first, out=str(tmp_path / "second"), phase=(idle,), method=Method(rank=RANK, start=str(file)))
    before = load_file(file)
    assert same(before, trainer.train(second))
    third = replace(second, out=str(tmp_path / "third"), phase=(phase,))
    moved = load_file(trainer.train(third))
    assert same(moved, trainer.train(third)) and not same(moved, before)
    file.write_bytes((tmp_path / "third" / "sana.safetensors").read_bytes())
    with pytest.raises(InputError, match="^start: got .*, but the run in .* has"):
        trainer.train(third)
    file.unlink()
    longer = replace(third, phase=(replace(phase, steps=6),))
    assert not same(moved, trainer.train(longer))
    with pytest.raises(InputError, match="^start: got none, but the run in .* has"):
        trainer.train(replace(longer, method=Method(rank=RANK)))
    with pytest.raises(MissingFileError, match="no such file"):
        trainer.train(replace(third, out=str(tmp_path / "fourth")))


def test_a_file_that_does_not_fit_is_refused_before_anything_is_read_or_written(checkpoint, tmp_path, lora):
    file = write(tmp_path, named(lora[0]))
    phase = Phase((str(tmp_path / "no pictures"),), 128, steps=1)
    method = Method(rank=RANK + 1, start=str(file))
    settings = TrainingSettings(str(checkpoint), str(tmp_path / "out"), (phase,), dtype="float32", method=method)
    with pytest.raises(InputError, match=f"got rank {RANK}, but method.rank is {RANK + 1}"):
        trainer.train(settings)
    assert not (tmp_path / "out").exists()
