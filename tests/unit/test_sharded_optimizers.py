"""Optimizers on shards whose rows do not divide evenly: the steps of one process, and states that can be saved."""

import copy
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from launched import OLD, outcomes, results_of
from torch import nn

from sana_core.training import sharding, states
from sana_core.training.came import CAME
from sana_core.training.optimizers import make_optimizer
from sana_core.training.sharding import Layout, Shards, local_parameters

pytestmark = pytest.mark.skipif(OLD, reason="FSDP2 needs torch 2.9")
# Shapes of which some shards have 4096 elements or more, and others fewer or none.
SHAPES = [(33, 256), (7, 640), (64, 256), (18, 256, 1, 1), (97, 1, 3, 3), (4097,), (5,), (1, 4096), (3, 4100)]
STEPS = 4


def make_model(dtype):
    numbers = torch.Generator().manual_seed(1)
    parameters = [nn.Parameter(torch.randn(shape, generator=numbers).to(dtype)) for shape in SHAPES]
    return nn.ParameterList(parameters)


def gradient(step, index, shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(100 * step + index)) * (1 + index)


def eager(name):
    return torch.compiler.set_stance("force_eager") if name == "adamw8bit" else nullcontext()


def train_whole(name, steps=STEPS):
    model = make_model(torch.float32)
    optimizer = make_optimizer(name, model.parameters(), 1e-2, 0.01)
    for step in range(steps):
        for index, parameter in enumerate(model):
            parameter.grad = gradient(step, index, parameter.shape)
        with eager(name):
            optimizer.step()
    return [parameter.detach() for parameter in model]


def sharded_state(ranks, name):
    """Return the fields of a trainer that saved states need, with the shards of this rank."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = make_model(torch.float32)
    unsharded = copy.deepcopy(model)
    mesh = init_device_mesh("cpu", (ranks.size,))
    fully_shard(model, mesh=mesh)
    layout = Layout(ranks, None, Shards(dict(model.named_parameters()), [model], [unsharded], mesh))
    parameters = local_parameters(layout)
    optimizer = make_optimizer(name, parameters.values(), 1e-2, 0.01)
    if isinstance(optimizer, CAME):
        optimizer.total = ranks.all_reduce
    return SimpleNamespace(layout=layout, parameters=parameters, optimizer=optimizer)


def take_steps(state, name, steps):
    for step in steps:
        for index, (parameter, weight) in enumerate(
            zip(state.parameters.values(), state.layout.shards.trained.values(), strict=True)
        ):
            chunks = gradient(step, index, weight.shape).chunk(state.layout.shard_count)
            rank = state.layout.shard
            parameter.grad = chunks[rank].clone() if rank < len(chunks) else torch.zeros_like(parameter)
        with eager(name):
            state.optimizer.step()


def train_in_shards(ranks, name, folder):
    """Train, save in the middle, resume in other objects, and return the whole weights."""
    first = sharded_state(ranks, name)
    take_steps(first, name, range(STEPS // 2))
    tensors, values = states.tensors_of(first.parameters, first.optimizer, None)
    part = folder / name
    if ranks.first:
        (part / "shards").mkdir(parents=True)
    ranks.agree(None)
    sharding.save_shards(first.layout, tensors, part)
    ranks.agree(None)
    second = sharded_state(ranks, name)
    stored = sharding.read_tensors(second.layout, part, ranks.size)
    states.restore(second.parameters, second.optimizer, None, stored, values, "state")
    for one, other in zip(first.parameters.values(), second.parameters.values(), strict=True):
        assert torch.equal(one, other)
    take_steps(second, name, range(STEPS // 2, STEPS))
    take_steps(first, name, range(STEPS // 2, STEPS))
    for one, other in zip(first.parameters.values(), second.parameters.values(), strict=True):
        assert torch.equal(one, other), "the resumed run differs"
    return [weight.full_tensor() for weight in second.layout.shards.trained.values()]


NAMES = ["adamw", "came", "came8bit", "adamw8bit", "schedulefree"]
# The largest mean difference from one process, as a share of the mean change of a weight. In 8 bits, the blocks of a
# shard are other blocks than those of the whole weight.
TOLERANCES = {"adamw": 1e-5, "schedulefree": 1e-5, "came": 1e-4, "came8bit": 0.02, "adamw8bit": 0.02}


@pytest.mark.parametrize("count", [5, *[pytest.param(n, marks=pytest.mark.slow) for n in (2, 3, 4, 6, 7, 8)]])
def test_shards_of_uneven_rows_train_as_one_process_does(tmp_path, count):
    pytest.importorskip("torchao.optim")
    pytest.importorskip("pytorch_optimizer")
    results = results_of(count, lambda ranks: {name: train_in_shards(ranks, name, tmp_path) for name in NAMES})
    for name in NAMES:
        expected = train_whole(name)
        for result in results:
            for weight, other, start in zip(result[name], expected, make_model(torch.float32), strict=True):
                change = (other - start).abs().mean()
                assert (weight - other).abs().mean() < TOLERANCES[name] * change, (name, weight.shape)


def test_all_ranks_add_up_the_same_parameters_together(monkeypatch):
    from sana_core.training import came

    # About three of the parameters fit.
    monkeypatch.setattr(came, "BUCKET", 3 * 4096)

    def sums(ranks):
        state = sharded_state(ranks, "came")
        sizes = []

        def total(tensor):
            sizes.append(len(tensor))
            return ranks.all_reduce(tensor)

        state.optimizer.total = total
        take_steps(state, "came", range(1))
        return sizes

    first, *other_values = results_of(5, sums)
    assert len(first) > 4 and all(sizes == first for sizes in other_values)


FAULTS = [
    (OSError(28, "No space left on device"), "OutputError", "No space left on device); see its rights and its disk"),
    (torch.OutOfMemoryError("CUDA out of memory"), "TrainingError", "(CUDA out of memory); the same command resumes"),
    (MemoryError(), "TrainingError", "(MemoryError); the same command resumes"),
    (KeyboardInterrupt(), "KeyboardInterrupt", ""),
]


@pytest.mark.parametrize(("fault", "kind", "text"), FAULTS, ids=["disk", "GPU memory", "memory", "interrupt"])
def test_only_an_error_of_the_system_is_called_a_fault_of_the_disk(tmp_path, monkeypatch, fault, kind, text):
    from torch.distributed.checkpoint import HuggingFaceStorageWriter

    def save(ranks):
        def fail(*_):
            raise fault

        state = sharded_state(ranks, "adamw")
        if ranks.rank == 1:
            monkeypatch.setattr(HuggingFaceStorageWriter, "write_data", fail)
        tensors, _ = states.tensors_of(state.parameters, state.optimizer, None)
        sharding.save_shards(state.layout, tensors, tmp_path)

    for raised, message, trace in outcomes(2, save):
        assert raised == kind and message.endswith(text), trace
