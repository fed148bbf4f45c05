"""A LoRA on a model in 8 bits: its forward, gradients and memory, and previews on the unquantised model."""

import copy
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from pictures import write_pictures
from PIL import Image
from safetensors.torch import load_file
from trained import Stopped, same, stopping_after

import sana_core
from sana_core.errors import InputError
from sana_core.training import trainer
from sana_core.training.settings import Method, Phase, TrainingSettings, Validation, check_settings
from sana_core.training.states import find_states, read_losses
from sana_core.training.trained_model import adapter_layers, add_adapter, quantise_base, quantise_layer, quantise_rows

LAYERS = {
    "linear": (lambda: torch.nn.Linear(96, 40), (3, 5, 96)),
    "no bias": (lambda: torch.nn.Linear(96, 40, bias=False), (2, 96)),
    "pointwise": (lambda: torch.nn.Conv2d(96, 40, 1), (2, 96, 3, 5)),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_keeps_its_largest_number_and_no_number_moves_by_more_than_half_a_step(dtype):
    weight = torch.randn(50, 300, generator=torch.Generator().manual_seed(1)) * torch.logspace(-3, 2, 50)[:, None]
    weight[7] = 0
    weight = weight.to(dtype)
    codes, scale = quantise_rows(weight)
    assert codes.dtype == torch.int8 and scale.dtype == dtype and scale.shape == (50, 1)
    error = (codes.double() * scale.double() - weight.double()).abs()
    # a scale in bf16 may be too small for the largest number by 1 / 256, half a step
    assert (error <= (0.5 if dtype == torch.float32 else 1.01) * scale.double() * (1 + 1e-5)).all()
    assert not codes[7].any()
    assert float(error.norm() / weight.double().norm()) < 0.01


@pytest.mark.parametrize("kind", LAYERS)
def test_a_layer_and_its_gradient_are_those_of_its_own_weight(kind):
    make, shape = LAYERS[kind]
    torch.manual_seed(1)
    layer = make().requires_grad_(False)
    eight, plain = copy.deepcopy(layer), make().requires_grad_(False)
    quantise_layer(eight)
    plain.weight.copy_(eight.weight)
    if plain.bias is not None:
        plain.bias.copy_(layer.bias)
    x = torch.randn(shape, generator=torch.Generator().manual_seed(2))
    one, other = (x.clone().requires_grad_() for _ in range(2))
    results = eight(one), plain(other)
    torch.testing.assert_close(*results, atol=1e-5, rtol=1e-5)
    for result in results:
        result.square().sum().backward()
    torch.testing.assert_close(one.grad, other.grad, atol=1e-4, rtol=1e-5)
    assert float((eight.weight - layer.weight).norm() / layer.weight.norm()) < 0.01


def bytes_of(model):
    return sum(buffer.nbytes for buffer in [*model.parameters(), *model.buffers()])


@pytest.mark.parametrize("kind", ["lora", "lokr"])
def test_the_blocks_take_half_of_bf16_and_the_model_computes_nearly_the_same(checkpoint, kind):
    undivided = sana_core.load_transformer(checkpoint, dtype=torch.bfloat16)
    eight = sana_core.load_transformer(checkpoint, dtype=torch.bfloat16)
    add_adapter(eight, Method(kind, 4, targets="both"), seed=1)
    before = {name: parameter.clone() for name, parameter in eight.named_parameters() if parameter.requires_grad}
    quantise_base(eight)
    after = {name: parameter for name, parameter in eight.named_parameters() if parameter.requires_grad}
    assert before.keys() == after.keys() and all(
        torch.equal(parameter, after[name]) for name, parameter in before.items()
    )
    adapter = sum(parameter.nbytes for parameter in after.values())
    assert bytes_of(eight.transformer_blocks) - adapter < 0.56 * bytes_of(undivided.transformer_blocks)
    layers = adapter_layers(eight).values()
    assert len(layers) == 50 and all(hasattr(layer.get_base_layer(), "codes") for layer in layers)
    numbers = torch.Generator().manual_seed(2)
    x = torch.randn(2, 32, 4, 4, generator=numbers).bfloat16()
    embeds = torch.randn(2, 7, 64, generator=numbers).bfloat16()
    with torch.no_grad():
        one, other = (
            model(x, embeds, torch.tensor([300.0, 700.0]), return_dict=False)[0].float() for model in (eight, undivided)
        )
    assert 0 < float((one - other).norm() / other.norm()) < 0.05


@pytest.fixture
def settings(tmp_path, checkpoint):
    def make(out="out", **options):
        write_pictures(tmp_path / "pictures", 4)
        phase = Phase((str(tmp_path / "pictures"),), 128, batch=2, steps=40, learning_rate=3e-3)
        values = {
            "dtype": "float32",
            "save_every": 20,
            "method": Method(rank=4, targets="both", base="int8"),
            **options,
        }
        run_settings = TrainingSettings(str(checkpoint), str(tmp_path / out), (phase,), **values)
        return check_settings(replace(run_settings, cache=str(tmp_path / "cache")))

    return make


@pytest.mark.slow
def test_it_learns_as_on_the_whole_model_and_goes_on_where_it_stood(settings):
    eight, uninterrupted, broken = (
        settings(),
        settings("whole", method=Method(rank=4, targets="both")),
        settings("broken"),
    )
    eight_file, whole_file = trainer.train(eight), trainer.train(uninterrupted)
    losses, other_values = (read_losses(Path(item.out)) for item in (eight, uninterrupted))
    assert sum(losses[-10:]) < 0.8 * sum(losses[:10])
    np.testing.assert_allclose(losses, other_values, rtol=0.1)
    assert load_file(eight_file).keys() == load_file(whole_file).keys()

    report, poll = stopping_after(7)
    with pytest.raises(Stopped):
        trainer.train(broken, report, poll=poll)
    assert same(trainer.train(broken), eight_file)
    with pytest.raises(InputError, match="^base: got none, but the run in .* has int8"):
        trainer.train(replace(eight, method=uninterrupted.method))


def test_its_pictures_are_those_of_the_lora_on_the_whole_model(settings, checkpoint):
    look = Validation(every=40, prompts=("a red circle on a blue background",), steps=4)
    run_settings = settings(validation=look)
    file = trainer.train(run_settings)
    seen = np.asarray(Image.open(Path(run_settings.out) / "pictures" / "step-0000040-00.png")).astype(int)
    # A run with learning rate 0 on the unquantised model, started at the weights of the file.
    idle = replace(run_settings.phase[0], learning_rate=0.0, steps=1)
    method = Method(rank=4, targets="both", start=str(file))
    plain = replace(
        run_settings, out=run_settings.out + "-plain", phase=(idle,), method=method, validation=replace(look, every=1)
    )
    trainer.train(plain)
    drawn = np.asarray(Image.open(Path(plain.out) / "pictures" / "step-0000000-00.png"))
    assert (seen == drawn).all()
    before = np.asarray(Image.open(Path(run_settings.out) / "pictures" / "step-0000000-00.png"))
    assert np.abs(seen - before).mean() > 0.3
    assert [step for step, _ in find_states(Path(run_settings.out))] == [20, 40]


@pytest.mark.parametrize("kind", ["dora", "controlnet", "full"])
def test_other_methods_want_the_whole_model(kind):
    with pytest.raises(InputError, match=f"^base: got int8 with method {kind}, expected full; or choose lora or lokr"):
        check_settings(TrainingSettings("m", "o", (Phase(("d",), steps=1),), method=Method(kind, base="int8")))
