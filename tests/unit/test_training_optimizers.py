"""Every optimizer by its name: refused settings, rounding, and states that pass through files bit for bit."""

import json
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from checkpoints import CHECKPOINTS, trained_on_both
from pictures import write_pictures
from safetensors.torch import load_file, save_file

from sana_core import CheckpointError, InputError, TrainingError, VersionError
from sana_core.training.optimizers import (
    OPTIMIZERS,
    average_decay,
    averaged_weights,
    make_optimizer,
    optimizer_state,
    restore_optimizer,
    round_stochastically,
    set_learning_rate,
    start_average,
    step_optimizer,
    update_average,
    validation_weights,
)
from sana_core.training.settings import Method, Optimizer, Phase, TrainingSettings, check_settings
from sana_core.training.states import find_states, restore, tensors_of
from sana_core.training.trainer import train as train_run

LIBRARIES = {"adamw8bit": "torchao.optim", "prodigy": "pytorch_optimizer", "schedulefree": "pytorch_optimizer"}
# matrices, a 1x1 and a depthwise convolution, a bias; the first two have states in 8 bits
SHAPES = [(64, 64), (64, 64, 1, 1), (64, 1, 3, 3), (64,)]


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def weights(dtype=torch.float32):
    return [torch.nn.Parameter(normal(*shape, seed=index).to(dtype)) for index, shape in enumerate(SHAPES)]


@pytest.fixture(params=OPTIMIZERS)
def name(request):
    if request.param in LIBRARIES:
        pytest.importorskip(LIBRARIES[request.param])
    # torchao's step without minutes of compiling
    eager = torch.compiler.set_stance("force_eager") if request.param == "adamw8bit" else nullcontext()
    with eager:
        yield request.param


def rate(name):
    # the factor of a rate that it finds itself
    return 1.0 if name == "prodigy" else 1e-2


def train(optimizer, parameters, steps):
    """Take the steps with those numbers: at rates of their own, and with gradients that depend on the weights."""
    before = float(optimizer.param_groups[0]["lr"])
    for step in steps:
        set_learning_rate(optimizer, before / (1 + step))
        for index, parameter in enumerate(parameters):
            noise = normal(*parameter.shape, seed=100 + 10 * step + index)
            parameter.grad = (parameter.detach().float() + 0.1 * noise).to(parameter.dtype)
        step_optimizer(optimizer, torch.Generator().manual_seed(step))
    set_learning_rate(optimizer, before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_an_optimizer_goes_on_bit_for_bit_from_files(name, dtype, tmp_path):
    if dtype == torch.bfloat16 and name in ("prodigy", "schedulefree"):
        with pytest.raises(InputError, match="got parameters in bfloat16"):
            make_optimizer(name, weights(dtype), rate(name))
        return
    undivided = weights(dtype)
    optimizer = make_optimizer(name, undivided, rate(name), weight_decay=0.1)
    train(optimizer, undivided, range(6))

    first = weights(dtype)
    optimizer = make_optimizer(name, first, rate(name), weight_decay=0.1)
    train(optimizer, first, range(3))
    tensors, values = optimizer_state(optimizer)
    save_file(tensors, tmp_path / "state.safetensors")
    (tmp_path / "state.json").write_text(json.dumps(values, allow_nan=False))

    second = [torch.nn.Parameter(parameter.detach().clone()) for parameter in first]
    resumed = make_optimizer(name, second, rate(name), weight_decay=0.1)
    restore_optimizer(
        resumed, load_file(tmp_path / "state.safetensors"), json.loads((tmp_path / "state.json").read_text())
    )
    train(resumed, second, range(3, 6))
    for parameter, expected, start in zip(second, undivided, weights(dtype), strict=True):
        assert torch.equal(parameter, expected) and not torch.equal(parameter, start)
    # The states agree as well, even where no weight shows them yet.
    again, uninterrupted = optimizer_state(resumed), optimizer_state(make_and_train(name, dtype))
    assert again[1] == uninterrupted[1] and again[0].keys() == uninterrupted[0].keys()
    assert all(torch.equal(tensor, uninterrupted[0][key]) for key, tensor in again[0].items())


def make_and_train(name, dtype):
    parameters = weights(dtype)
    optimizer = make_optimizer(name, parameters, rate(name), weight_decay=0.1)
    train(optimizer, parameters, range(6))
    return optimizer


def test_a_new_phase_brings_its_own_rate_and_decay(name):
    parameters = weights()
    optimizer = make_optimizer(name, parameters, rate(name), weight_decay=0.1)
    train(optimizer, parameters, range(2))
    other = make_optimizer(name, parameters, rate(name) / 4, weight_decay=0.2)
    restore_optimizer(other, *optimizer_state(optimizer))
    (group,) = other.param_groups
    assert float(group["lr"]) == pytest.approx(rate(name) / 4) and group["weight_decay"] == 0.2


def test_a_restored_state_is_no_view_of_what_was_read():
    parameters = weights()
    optimizer = make_optimizer("came8bit", parameters, 1e-2)
    train(optimizer, parameters, range(2))
    tensors, values = optimizer_state(optimizer)
    copies = {key: tensor.clone() for key, tensor in tensors.items()}
    other = make_optimizer("came8bit", parameters, 1e-2)
    restore_optimizer(other, copies, values)
    train(other, parameters, range(2, 4))
    assert all(torch.equal(copies[key], tensor) for key, tensor in tensors.items())


@pytest.mark.parametrize(
    ("change", "which"),
    [
        (lambda own: own[:-1], "3"),
        (lambda own: [*own[:-1], torch.nn.Parameter(torch.zeros(65))], "3"),
        (lambda own: [*own, torch.nn.Parameter(torch.zeros(65))], "4"),
    ],
    ids=["fewer", "others", "more"],
)
def test_a_state_of_other_weights_is_refused(change, which):
    def state(parameters):
        named = {str(index): parameter for index, parameter in enumerate(parameters)}
        return SimpleNamespace(parameters=named, optimizer=make_optimizer("came", parameters, 1e-2))

    saved, other = state(weights()), state(change(weights()))
    train(saved.optimizer, saved.parameters.values(), range(1))
    with pytest.raises(CheckpointError, match=f"^step-0000001: {which} is missing or of another shape"):
        restore(
            other.parameters,
            other.optimizer,
            None,
            *tensors_of(saved.parameters, saved.optimizer, None),
            "step-0000001",
        )
    assert not other.optimizer.state and torch.equal(other.parameters["0"], weights()[0])


def test_an_optimizer_that_has_not_stepped_has_a_state_too(name):
    other = make_optimizer(name, weights(), rate(name))
    restore_optimizer(other, *optimizer_state(make_optimizer(name, weights(), rate(name))))
    assert not other.state


def test_a_dtype_that_an_optimizer_cannot_train_is_refused():
    with pytest.raises(InputError, match="got parameters in float16 for came, expected bfloat16"):
        make_optimizer("came", weights(torch.float16), 1e-4)


@pytest.mark.parametrize("name", LIBRARIES)
def test_a_library_that_is_not_there_is_named_with_the_extra(name, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, LIBRARIES[name], None)
    library = LIBRARIES[name].partition(".")[0]
    with pytest.raises(VersionError, match=rf"{name} needs {library}, .*pip install '.\[optimizers\]'"):
        make_optimizer(name, weights(), 1e-4)


def test_a_missing_compiler_is_named(monkeypatch):
    pytest.importorskip("torchao.optim")
    from torch._inductor import config

    monkeypatch.setattr(config.cpp, "cxx", ("no-such-compiler",))
    parameters = weights()[:1]
    optimizer = make_optimizer("adamw8bit", parameters, 1e-4)
    with pytest.raises(VersionError, match="adamw8bit cannot be compiled"):
        train(optimizer, parameters, range(1))


def test_rounding_keeps_the_expectation():
    """Each number goes to one of its two neighbours, and the mean of many to itself, within five standard errors."""
    count = 20_000
    for value in (1.001, -1.001, 3.1e-4, -2.7e20, 1e-39):
        exact, nearest = torch.tensor(value), torch.tensor(value).bfloat16()
        other = torch.nextafter(nearest, torch.tensor(torch.inf if exact > nearest else -torch.inf).bfloat16())
        below, above = sorted((float(nearest), float(other)))
        rounded = round_stochastically(exact.repeat(count), torch.Generator().manual_seed(0))
        assert set(rounded.unique().tolist()) == {below, above}
        chance = (float(exact) - below) / (above - below)
        share = (rounded == above).double().mean().item()
        assert abs(share - chance) < 5 * (chance * (1 - chance) / count) ** 0.5 + 1e-12


def test_rounding_leaves_what_bf16_holds():
    values = torch.tensor([0.0, -0.0, 1.0, -1.5, torch.inf, -torch.inf, torch.finfo(torch.bfloat16).max])
    assert torch.equal(round_stochastically(values.clone(), torch.Generator().manual_seed(0)), values)
    # CUDA's NaN has all bits set.
    nans = torch.tensor([0x7FC00000, 0x7FFFFFFF, -1, 0x7F800001], dtype=torch.int32).view(torch.float32)
    assert nans.isnan().all() and round_stochastically(nans, torch.Generator()).isnan().all()


@pytest.mark.parametrize("name", ["adamw", "adamw8bit", "came", "came8bit"])
def test_bf16_weights_move_by_updates_that_are_too_small_for_them(name):
    """100 steps of about 1e-4 from 1, where bf16's next number below is 0.0039 away."""
    if name in LIBRARIES:
        pytest.importorskip(LIBRARIES[name])
    weight = torch.nn.Parameter(torch.ones(64, 64, dtype=torch.bfloat16))
    exact = torch.nn.Parameter(torch.ones(64, 64))
    for parameter in (weight, exact):
        # CAME's first steps are ten times the rate and more
        optimizer = make_optimizer(name, [parameter], 1e-5 if "came" in name else 1e-4)
        with torch.compiler.set_stance("force_eager"):
            for step in range(100):
                parameter.grad = (1 + normal(64, 64, seed=step)).bfloat16().to(parameter.dtype)
                step_optimizer(optimizer, torch.Generator().manual_seed(step))
    moved, expected = (1 - float(parameter.detach().float().mean()) for parameter in (weight, exact))
    assert weight.dtype == torch.bfloat16 and 0.003 < expected < 0.03
    assert moved == pytest.approx(expected, abs=3e-4)
    assert all(value.dtype != torch.bfloat16 for value in optimizer.state[exact].values())


def test_validation_weights_are_schedulefree_s_average_and_training_goes_on_as_if_nothing_was():
    library = pytest.importorskip("pytorch_optimizer")
    runs = []
    for validated in (False, True):
        parameters = weights()
        optimizer = make_optimizer("schedulefree", parameters, 1e-2)
        for step in range(4):
            train(optimizer, parameters, [step])
            if validated:
                before = [parameter.detach().clone() for parameter in parameters]
                with validation_weights(optimizer):
                    judged = [parameter.detach().clone() for parameter in parameters]
                assert all(map(torch.equal, parameters, before))
                assert optimizer.param_groups[0]["train_mode"]
        runs.append(parameters)
    assert all(map(torch.equal, *runs))
    # the library's own way from the one to the other, from the same weights and states
    theirs = weights()
    reference = library.ScheduleFreeAdamW(theirs, lr=1e-2)
    for group in reference.param_groups:
        group["optimizer"] = "schedulefree"
    train(reference, theirs, range(4))
    reference.eval()
    assert all(map(torch.equal, judged, theirs)) and not torch.equal(judged[0], before[0])


def test_an_interrupted_switch_of_schedulefree_is_undone_or_marked(monkeypatch):
    pytest.importorskip("pytorch_optimizer")
    parameters = weights()
    optimizer = make_optimizer("schedulefree", parameters, 1e-2)
    train(optimizer, parameters, range(2))
    before = [parameter.detach().clone() for parameter in parameters]
    for name, kind in (("eval", KeyboardInterrupt), ("train", TrainingError)):
        real = getattr(optimizer, name)

        def interrupted(real=real):
            real()
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(optimizer, name, interrupted)
            with pytest.raises(kind) as raised, validation_weights(optimizer):
                pass
        assert getattr(raised.value, "weights_lost", False) == (kind is TrainingError)
        assert all(map(torch.equal, parameters, before)) and optimizer.param_groups[0]["train_mode"]


def test_the_average_is_diffusers():
    from diffusers.training_utils import EMAModel

    parameters = weights()
    theirs = EMAModel(parameters, decay=0.7)
    average = start_average(dict(enumerate(parameters)))
    for step in range(12):
        with torch.no_grad():
            for parameter in parameters:
                parameter.add_(normal(*parameter.shape, seed=step))
        update_average(average, dict(enumerate(parameters)), average_decay(0.7, step))
        theirs.step(parameters)
    for ours, reference in zip(average.values(), theirs.shadow_params, strict=True):
        torch.testing.assert_close(ours, reference, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_the_average_stands_in_for_a_while(dtype):
    parameters = dict(zip("abcd", weights(dtype), strict=True))
    average = start_average(parameters)
    update_average(average, {name: parameter + 1 for name, parameter in parameters.items()}, 0.5)
    assert all(values.dtype == torch.float32 for values in average.values())
    with pytest.raises(KeyboardInterrupt), averaged_weights(parameters, average):
        assert all(torch.equal(parameters[name], average[name].to(dtype)) for name in average)
        raise KeyboardInterrupt
    assert all(map(torch.equal, parameters.values(), weights(dtype)))


@trained_on_both
def test_prodigy_finds_a_rate_in_a_short_run(checkpoint, tmp_path, name):
    pytest.importorskip("pytorch_optimizer")
    write_pictures(tmp_path / "pictures", 4)
    phase = Phase((str(tmp_path / "pictures"),), 128, batch=4, steps=50, learning_rate=1.0)
    values = {"dtype": "float32", "save_every": 50, "method": Method(rank=4), "checkpoint_gradients": False}
    results = {}
    for d_coef in (1.0, 0.1):
        run_settings = TrainingSettings(str(CHECKPOINTS[name]), str(tmp_path / f"{d_coef}"), (phase,), **values)
        run_settings = replace(
            run_settings, optimizer=Optimizer("prodigy", d_coef=d_coef), cache=str(tmp_path / "cache")
        )
        train_run(check_settings(run_settings))
        ((_, state),) = find_states(tmp_path / f"{d_coef}")
        results[d_coef] = json.loads((state / "state.json").read_text())["values"]["group"]["d"]
    # adamw's is 1e-3 or less
    assert 1e-4 < results[1.0] < 3e-2 and results[0.1] < results[1.0]
