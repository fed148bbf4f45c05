"""Kernels in Triton's interpreter: members of a split with different kernels, and which tensors a kernel may change.

test_kernels.py runs this file in a process with TRITON_INTERPRET=1.
"""

from functools import partial
from itertools import combinations_with_replacement
from types import SimpleNamespace

import interpreted
import pytest
import torch
from diffusers import SanaControlNetModel
from kernel_numbers import ALL, narrow_transformer, noise

from sana_core.kernels.channels import add_bias, add_gated, add_then_norm, rms_norm
from sana_core.kernels.gated_depthwise import silu_depthwise_gate
from sana_core.kernels.linear_attention import relu_attention
from sana_core.model import forward
from sana_core.model.block import Perturbation
from sana_core.model.controlnet import control_residuals
from sana_core.model.forward import prepare, shard_velocity, velocity
from sana_core.sampling.guidance import denoiser
from sana_core.sampling.samplers import SAMPLERS
from sana_core.split.generate import Split

interpreted.install()

CPU = torch.device("cpu")
SETS = (frozenset(), frozenset({"linear_attention"}), ALL)
ROWS, COLUMNS = 3, 4


@pytest.fixture(scope="module")
def step():
    """A transformer, and the latents and the constants of two prompts."""
    transformer, x = narrow_transformer("rms_norm_across_heads"), noise(2, 32, ROWS, COLUMNS)
    embeds, mask = noise(2, 10, 24, seed=1), torch.ones(2, 10)
    return transformer, x, prepare(transformer, embeds, mask, ROWS, COLUMNS)


@pytest.mark.parametrize("kernel_sets", list(combinations_with_replacement(range(len(SETS)), 2)), ids=str)
@pytest.mark.parametrize("count", [2, 3])
def test_members_with_any_kernels_generate_the_image_of_one_device(step, count, kernel_sets):
    transformer, x, constants = step
    time = torch.full((len(x),), 500.0)
    expected = velocity(transformer, x, time, constants)

    def work(shard):
        kernels = SETS[kernel_sets[shard.member % 2]]
        forward = partial(velocity, transformer)
        return shard_velocity(forward, shard, time, constants._replace(kernels=kernels), None, None, [])

    image = Split([CPU] * count).run(x, work)
    assert float((image - expected).norm() / expected.norm()) < 1e-6


class Kept:
    """Tensors that a call must not change, with copies of their values."""

    def __init__(self, **tensors):
        self.tensors, self.copies = tensors, {name: tensor.clone() for name, tensor in tensors.items()}

    def check(self):
        changed = [name for name, tensor in self.tensors.items() if not torch.equal(tensor, self.copies[name])]
        assert not changed


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_kernels_change_only_the_tensors_that_they_name(dtype):
    width = 64
    inputs = Kept(
        **{name: noise(2, 5, width, seed=i).to(dtype) for i, name in enumerate(("hidden", "update", "query", "key"))},
        **{name: noise(2, 1, width, seed=i).to(dtype) for i, name in enumerate(("gate", "shift", "scale"))},
        maps=noise(1, 4, 3, 16).to(dtype),
        weight=noise(16, 1, 3, 3).to(dtype),
        bias=noise(16).to(dtype),
        rows=noise(9, width).to(dtype),
        residual=noise(9, width, seed=1).to(dtype),
        vector=noise(width).to(dtype),
    )
    ins = SimpleNamespace(**inputs.tensors)
    add_then_norm(ins.hidden, (None, None), ins.shift, ins.scale, 1e-6)
    # With a branch, the first argument receives the sum.
    add_then_norm(ins.hidden.clone(), (ins.update, None), ins.shift, ins.scale, 1e-6)
    add_then_norm(ins.hidden.clone(), (ins.update, ins.gate), ins.shift, ins.scale, 1e-6)
    add_gated(ins.hidden.clone(), ins.update, ins.gate)
    relu_attention(ins.query, ins.key, ins.hidden, 2, 1e-15)
    relu_attention(ins.query, ins.key, ins.hidden, 2, 1e-15, lambda sums: sums.sum(2, dtype=torch.float64))
    for edges in ((0, 0), (1, 1)):
        silu_depthwise_gate(ins.maps, ins.weight, ins.bias, edges)
    rms_norm(ins.rows, ins.vector, ins.vector, 1e-5, ins.residual)
    add_bias(ins.rows, ins.vector, torch.empty_like(ins.rows), "silu")
    inputs.check()


def tensors_of(constants):
    lists = {f"{name} {i}": one for name in ("keys", "values") for i, one in enumerate(getattr(constants, name))}
    singles = {name: getattr(constants, name) for name in ("bias", "position", "tables")}
    return lists | {name: tensor for name, tensor in singles.items() if tensor is not None}


@pytest.mark.parametrize("kernels", SETS, ids=lambda kernels: "+".join(sorted(kernels)) or "none")
@pytest.mark.parametrize("members", [0, 2])
def test_a_step_changes_none_of_its_inputs(members, kernels):
    """Without members, one device computes the whole step."""
    transformer = narrow_transformer("rms_norm_across_heads")
    embeds, mask = noise(2, 10, 24, seed=1), torch.ones(2, 10)
    mask[1, 6:] = 0
    constants = prepare(transformer, embeds, mask, ROWS, COLUMNS)
    constants = constants._replace(kernels=kernels, position=noise(1, ROWS * COLUMNS, 64, seed=2))
    x, time, control = noise(2, 32, ROWS, COLUMNS), torch.full((2,), 500.0), noise(2, ROWS * COLUMNS, 64, seed=3)
    perturbation = Perturbation(torch.tensor([False, True])[:, None, None], frozenset({1}))
    inputs = Kept(x=x, time=time, control=control, flags=perturbation.images, **tensors_of(constants))
    weights = Kept(**dict(transformer.named_parameters()), **dict(transformer.named_buffers()))
    arguments = time, constants, None, perturbation, [None, control]
    if members:
        Split([CPU] * members).run(x, lambda shard: shard_velocity(partial(velocity, transformer), shard, *arguments))
    else:
        velocity(transformer, x, *arguments)
    inputs.check()
    weights.check()


def narrow_controlnet():
    torch.manual_seed(0)
    controlnet = SanaControlNetModel(
        num_attention_heads=2,
        attention_head_dim=32,
        num_layers=2,
        num_cross_attention_heads=2,
        cross_attention_head_dim=32,
        cross_attention_dim=64,
        caption_channels=24,
        interpolation_scale=1.0,
    ).requires_grad_(False)
    # diffusers initialises them with zeros.
    for layer in (controlnet.input_block, *controlnet.controlnet_blocks):
        torch.nn.init.normal_(layer.weight, std=0.1)
    return controlnet


def test_residuals_of_a_controlnet_keep_their_values():
    """The kernels add to the hidden states in place. The residual of a block must not be a view of them."""
    controlnet = narrow_controlnet()
    x, signal = noise(2, 32, ROWS, COLUMNS), noise(2, 32, ROWS, COLUMNS, seed=1)
    constants = prepare(controlnet, noise(2, 10, 24, seed=2), torch.ones(2, 10), ROWS, COLUMNS)
    time = torch.full((2,), 500.0)
    inputs = Kept(x=x, signal=signal, **tensors_of(constants))
    expected = control_residuals(controlnet, x, time, constants, signal)
    residuals = control_residuals(controlnet, x, time, constants._replace(kernels=ALL), signal)
    inputs.check()
    assert [one is None for one in residuals] == [one is None for one in expected]
    for got, plain in zip(residuals, expected, strict=True):
        torch.testing.assert_close(got, plain, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("name", SAMPLERS)
def test_what_a_callback_sees_keeps_its_values(name, monkeypatch):
    """Previews, saved latents and x0 of a step are read after the next steps have begun."""
    monkeypatch.setattr(forward, "kernels_on", lambda device, dtype: ALL)
    transformer, mask = narrow_transformer(), torch.ones(1, 10)
    model = denoiser(transformer, (noise(1, 10, 24), mask), (noise(1, 10, 24, seed=1), mask), 4.5)
    seen = []

    def callback(state):
        seen.append(Kept(x=state["x"], denoised=state["denoised"]))

    start = noise(1, 32, 1, 1)
    inputs = Kept(start=start)
    sampler = SAMPLERS[name]
    sampler.sample(model, start, sampler.sigmas(3, 3.0), callback)
    assert len(seen) == 3
    for state in [inputs, *seen]:
        state.check()
