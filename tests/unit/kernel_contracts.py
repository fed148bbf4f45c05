"""Kernels in Triton's interpreter: members of a split with different kernels, and which tensors a kernel may change.

test_kernels.py runs this file in a process with TRITON_INTERPRET=1.
"""

from functools import partial
from itertools import combinations_with_replacement

import interpreted
import pytest
import torch
from kernel_numbers import ALL, narrow_transformer, noise

from sana_core.model.forward import Perturbation, prepare, shard_velocity, velocity
from sana_core.split.devices import Split

interpreted.install()

CPU = torch.device("cpu")
SETS = (frozenset(), frozenset({"linear_attention"}), ALL)
ROWS, COLUMNS = 5, 4


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

    found = Split([CPU] * count).run(x, work)
    assert float((found - expected).norm() / expected.norm()) < 1e-6
