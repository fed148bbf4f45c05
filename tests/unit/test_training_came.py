"""CAME against somebody else's, its state counted on SANA's own shapes, and what its 8 bits lose."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from sana_core.training import came
from sana_core.training.came import BLOCK, dequantise, empty_codes, quantise
from sana_core.training.optimizers import make_optimizer, optimizer_state, start_average, step_optimizer, update_average


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def train(optimizer, parameters, steps=20):
    """Step with gradients whose sizes differ by rows, and that are the same whatever the shape of a weight."""
    for step in range(steps):
        for index, parameter in enumerate(parameters):
            flat = normal(parameter.numel(), seed=100 * step + index) + 0.3
            parameter.grad = (flat * (1 + 5 * torch.arange(len(flat)) / len(flat))).view_as(parameter)
        optimizer.step()


@pytest.mark.parametrize("shape", [(48, 32), (48, 32, 1, 1), (48, 1, 3, 3), (48,), (6, 48)], ids=str)
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_steps_are_those_of_pytorch_optimizer_s_came(shape, weight_decay):
    """Its weights are [O, I] where ours are 1x1 convolutions, and flat where ours have no factors: it factors all."""
    library = pytest.importorskip("pytorch_optimizer")
    reference_shape = shape[:2] if len(shape) == 2 or shape[2:] == (1, 1) else (torch.Size(shape).numel(),)
    ours, theirs = (torch.nn.Parameter(normal(*shape).view(number)) for number in (shape, reference_shape))
    train(make_optimizer("came", [ours], 1e-2, weight_decay), [ours])
    train(library.CAME([theirs], lr=1e-2, weight_decay=weight_decay), [theirs])
    assert (theirs - normal(*shape).view(reference_shape)).abs().mean() > 0.02
    torch.testing.assert_close(ours.view(reference_shape), theirs, rtol=1e-5, atol=1e-6)


def test_a_weight_whose_gradient_is_zero_stays():
    """As the first half of a LoRA at the first step, whose second half is zero."""
    for name in ("came", "came8bit"):
        weight = torch.nn.Parameter(normal(64, 64))
        weight.grad = torch.zeros(64, 64)
        make_optimizer(name, [weight], 1e-2).step()
        assert torch.equal(weight, normal(64, 64))


@pytest.fixture(scope="module")
def state_bytes():
    """A function: how many bytes an optimizer keeps for each parameter of SANA 1.6B, once it has stepped."""
    from diffusers import SanaTransformer2DModel

    with torch.device("meta"):
        # the library's defaults are the released 1.6B
        model = SanaTransformer2DModel()
    parameters = list(model.parameters())
    total = sum(parameter.numel() for parameter in parameters)
    assert total == 1_604_462_752
    for parameter in parameters:
        parameter.grad = torch.empty_like(parameter)

    def measure(name):
        optimizer = make_optimizer(name, parameters, 1e-4)
        optimizer.step()
        tensors, _ = optimizer_state(optimizer)
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values()) / total

    return measure


def test_came_keeps_half_of_what_adamw_keeps(state_bytes):
    """The average of updates in fp32 is exactly half; the factors add 0.3 % to it."""
    adamw, came = state_bytes("adamw"), state_bytes("came")
    assert adamw == pytest.approx(8.0, abs=0.01) and came / adamw < 0.502


def test_came8bit_keeps_at_most_1_1_bytes_a_parameter(state_bytes):
    assert 1.0 < state_bytes("came8bit") <= 1.04


class Operations(TorchDispatchMode):
    """Counts the operations within it."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        # Fake tensors ask for devices.
        self.count += func.overloadpacket.__name__ != "device"
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("dtype", [pytest.param(torch.float32, marks=pytest.mark.slow), torch.bfloat16])
def test_a_step_of_sana_1_6b_takes_few_operations(dtype):
    """The weights, one after another, took 26,360 operations in fp32 and 32,298 in bf16."""
    from diffusers import SanaTransformer2DModel

    with torch.device("meta"):
        shapes = [weight.shape for weight in SanaTransformer2DModel().parameters()]
    with FakeTensorMode(allow_non_fake_inputs=True):
        parameters = [torch.nn.Parameter(torch.empty(shape, dtype=dtype)) for shape in shapes]
        for parameter in parameters:
            parameter.grad = torch.empty_like(parameter)
        optimizer, average = make_optimizer("came8bit", parameters, 1e-4), start_average(dict(enumerate(parameters)))
        step_optimizer(optimizer, torch.Generator())
        with Operations() as operations:
            step_optimizer(optimizer, torch.Generator())
        assert operations.count <= (2000 if dtype == torch.float32 else 2400)
        with Operations() as operations:
            update_average(average, dict(enumerate(parameters)), 0.9)
        assert operations.count <= 150


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", ["came", "came8bit", "adamw"])
def test_equal_parameters_together_take_the_steps_of_each_alone(name, dtype, monkeypatch):
    shapes = [shape for shape in [(64, 96), (64, 65, 1, 1), (64, 1, 3, 3), (4100,), (7,)] for _ in range(3)]

    def trained(bucket):
        monkeypatch.setattr(came, "BUCKET", bucket)
        parameters = [torch.nn.Parameter(normal(*shape, seed=index).to(dtype)) for index, shape in enumerate(shapes)]
        optimizer, average = make_optimizer(name, parameters, 1e-2, 0.1), start_average(dict(enumerate(parameters)))
        for step in range(5):
            for index, parameter in enumerate(parameters):
                # A parameter without a gradient leaves the others their states.
                gradient = normal(*parameter.shape, seed=100 * step + index).to(dtype) * (1 + index)
                parameter.grad = None if (step, index) == (2, 1) else gradient
            step_optimizer(optimizer, torch.Generator().manual_seed(step))
            update_average(average, dict(enumerate(parameters)), 0.9)
        tensors, _ = optimizer_state(optimizer)
        return [*parameters, *average.values(), *(tensors[key] for key in sorted(tensors))]

    together, alone = trained(came.BUCKET), trained(1)
    assert len(together) == len(alone) > 3 * len(shapes)
    assert all(torch.equal(one, other) for one, other in zip(together, alone, strict=True))


@pytest.mark.parametrize("count", [1, BLOCK, 10 * BLOCK, 10 * BLOCK + 7])
def test_codes_are_near_what_they_stand_for(count):
    values = normal(count) * torch.exp(2 * normal(count, seed=1))
    codes, scales = empty_codes(values)
    quantise(values, codes, scales)
    assert codes.dtype == torch.int8 and codes.shape == values.shape and len(scales) == -(-count // BLOCK)
    result = dequantise(codes, scales)
    # half a code apart in square roots
    largest = scales.repeat_interleave(BLOCK)[:count]
    apart = (result.abs().sqrt() - values.abs().sqrt()).abs() / largest.sqrt()
    assert apart.max() <= 0.5 / 127 + 1e-6
    assert ((result >= 0) == (values >= 0)).logical_or(result == 0).all()
    assert torch.equal(result[values.abs() == largest], values[values.abs() == largest])


def test_a_block_of_zeros_and_one_of_tiny_numbers_are_safe():
    values = torch.cat([torch.zeros(BLOCK), normal(BLOCK) * 1e-30])
    codes, scales = empty_codes(values)
    quantise(values, codes, scales)
    result = dequantise(codes, scales)
    assert torch.equal(result[:BLOCK], torch.zeros(BLOCK))
    torch.testing.assert_close(result[BLOCK:], values[BLOCK:], rtol=0, atol=1.6e-2 * 5e-30)


def test_nan_is_not_hidden_in_codes():
    values = normal(BLOCK)
    values[3] = torch.nan
    codes, scales = empty_codes(values)
    quantise(values, codes, scales)
    assert dequantise(codes, scales).isnan().all()


def test_8_bits_lose_less_than_the_rounding_type_that_torchao_has():
    subclass = pytest.importorskip("torchao.optim.subclass_8bit")
    values = normal(64 * BLOCK)
    theirs = subclass.OptimState8bit.zeros(values.shape, signed=True)
    theirs.copy_(values)
    codes, scales = empty_codes(values)
    quantise(values, codes, scales)
    assert (dequantise(codes, scales) - values).norm() < (theirs.dequantize() - values).norm()


def fitted(name):
    """The loss of a small network after 200 steps on noisy batches."""
    inputs, weights = normal(1024, 64), normal(64, 64, seed=1) / 8
    targets = torch.sin(2 * inputs @ weights)
    model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.SiLU(), torch.nn.Linear(128, 64))
    for index, parameter in enumerate(model.parameters()):
        parameter.data = normal(*parameter.shape, seed=index) / 10
    optimizer = make_optimizer(name, model.parameters(), 3e-3)
    generator = torch.Generator().manual_seed(2)
    for _ in range(200):
        batch = torch.randint(len(inputs), (128,), generator=generator)
        loss = (model(inputs[batch]) - targets[batch]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        return float((model(inputs) - targets).square().mean())


def test_a_network_learns_as_well_in_8_bits():
    loss = fitted("came")
    assert loss < 0.4 and fitted("came8bit") == pytest.approx(loss, rel=0.02)
