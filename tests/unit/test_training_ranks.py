"""Several ranks learn the weights that one process learns on the joined batch, for every kind of sharding."""

import weakref
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from launched import OLD, outcomes, results_of
from tiny import CAPTION, tiny_transformer
from trained import difference
from trainers import make_trainer, take_step, validation_loss, weights_of

from sana_core.errors import InputError
from sana_core.training.cache import Batch
from sana_core.training.previews import as_saved
from sana_core.training.ranks import ALONE
from sana_core.training.schedule import TrainProgress
from sana_core.training.settings import Method, Optimizer, Parallel, Phase, TrainingSettings, check_settings
from sana_core.training.sharding import check_steps, describe_layout, microbatches

pytestmark = pytest.mark.skipif(OLD, reason="FSDP2 needs torch 2.9")
PICTURES = 8
METHODS = {"lora": Method(rank=2), "full": Method("full"), "controlnet": Method("controlnet", blocks=1)}
KINDS = ("ddp", "fsdp", "fsdp_offload")


def numbers():
    """Latents, captions of two lengths and control pictures without any meaning, as a run's data."""
    generator = torch.Generator().manual_seed(5)
    latents, controls = (torch.randn(PICTURES, 32, 4, 4, generator=generator) for _ in range(2))
    embeds = torch.randn(PICTURES, 10, CAPTION, generator=generator)

    def load(indices):
        mask = torch.ones(len(indices), 10, dtype=torch.int64)
        return Batch(latents[indices], embeds[indices], mask, None, [str(i) for i in indices], controls[indices])

    empty = {"embeds": torch.zeros(10, CAPTION), "mask": torch.ones(10, dtype=torch.uint8)}
    cache = SimpleNamespace(load=load, empty=empty)
    samples = [SimpleNamespace(name=str(index), weight=1.0) for index in range(PICTURES)]
    return SimpleNamespace(cache=cache, samples=samples, held_out=[5, 6, 7])


def settings(kind="ddp", method="lora", **options):
    phase = Phase(("data",), 128, batch=2, accumulate=2, steps=1)
    optimizer = Optimizer(options.pop("optimizer", "adamw"), clip=options.pop("clip", 0.1))
    parallel = Parallel(kind, options.pop("block", ""), options.pop("replicas", 1))
    run_settings = TrainingSettings("model", "out", (phase,), dtype="float32", method=METHODS[method], **options)
    return check_settings(replace(run_settings, optimizer=optimizer, parallel=parallel))


def learn(own, ranks=ALONE, groups=(((0, 1), (2, 3)),), rate=None):
    """Return the losses, norms and trained weights after a step for each group, of plain descent without a `rate`."""
    trained = own.method.kind != "controlnet"
    learner = make_trainer(tiny_transformer(layers=2).requires_grad_(trained), 3.0, own, ranks=ranks)
    if rate is None:
        group = {"params": list(learner.parameters.values()), "optimizer": "adamw"}
        learner.optimizer = torch.optim.SGD([group], 1.0)
    # a step of gradients by themselves: adaptive ones hide their scale
    results = [
        take_step(learner, numbers(), group, TrainProgress(step), rate or 1.0) for step, group in enumerate(groups)
    ]
    held_out = validation_loss(learner, numbers())
    return results, held_out, weights_of(learner.gather_models(torch.device("cpu"), only_trained=True))


# Each method and each kind. The others are combinations of them.
QUICK = {("lora", "ddp"), ("full", "fsdp"), ("controlnet", "fsdp"), ("lora", "fsdp_offload")}


@pytest.mark.parametrize(
    ("method", "kind"),
    [
        pytest.param(method, kind, marks=() if (method, kind) in QUICK else pytest.mark.slow)
        for method in METHODS
        for kind in KINDS
    ],
)
def test_a_step_of_several_ranks_is_that_of_one_process_on_the_joined_batch(kind, method):
    (steps, held_out, weights), started = learn(settings(method=method)), learn(settings(method=method), groups=())[2]
    run_settings = settings(kind, method)
    # one: its layers are offloaded, which needs no other
    for count in {"full": (1, 2, 3), "lora": (1, 2)}.get(method, (2,)):
        results = results_of(count, lambda ranks: learn(run_settings, ranks))
        assert difference(results[0][2], weights) < 1e-6 < difference(weights, started)
        for own_steps, own_held_out, _ in results:
            assert own_steps[0] == pytest.approx(steps[0], abs=2e-6) and own_held_out == pytest.approx(held_out, 1e-6)


@pytest.mark.parametrize("clip", [0.0, 1e-3])
def test_a_clip_of_0_takes_the_whole_gradient_and_logs_its_norm(clip):
    """Plain descent at the rate 1 changes the weights by the gradient."""
    started = learn(settings(method="full"), groups=())[2]
    ((_, unclipped),), *_ = learn(settings(method="full", clip=1e6))
    for kind, count in (("ddp", 1), ("fsdp", 2)):
        results = results_of(count, lambda ranks, kind=kind: learn(settings(kind, "full", clip=clip), ranks))
        ((_, norm),), _, weights = results[0]
        change = torch.cat([(weights[name] - started[name]).flatten() for name in started]).norm()
        assert norm == pytest.approx(unclipped, rel=1e-5) and norm > 10e-3
        assert float(change) == pytest.approx(clip or norm, rel=1e-3)


@pytest.mark.parametrize("method", METHODS)
def test_ranks_go_on_together_after_the_first_has_saved_in_another_precision(method):
    run_settings = replace(settings(method=method), dtype="bfloat16")

    def learn_and_save(ranks):
        base = tiny_transformer(layers=2).requires_grad_(True).to(torch.bfloat16 if method == "lora" else torch.float32)
        learner = make_trainer(base, 3.0, run_settings, ranks=ranks)
        for step in range(3):
            take_step(learner, numbers(), ((0, 1), (2, 3)), TrainProgress(step), 1e-2)
            with as_saved(learner.settings, learner.models) if ranks.first and ranks.launched else nullcontext():
                pass
        return {name: value.detach().clone() for name, value in learner.parameters.items()}

    alone, (first, second) = learn_and_save(ALONE), results_of(2, learn_and_save)
    assert difference(first, second) == 0 and difference(first, alone) < 1e-2
    assert all(value.dtype == torch.float32 for value in first.values())


def test_a_save_of_a_controlnet_gathers_no_block_of_its_transformer():
    """Only the embeddings that both share are in its file."""

    def gathered(ranks):
        base = tiny_transformer(layers=2).requires_grad_(False)
        models = make_trainer(base, 3.0, settings("fsdp", "controlnet"), ranks=ranks).gather_models(
            torch.device("cpu"), only_trained=True
        )
        return [[name for name, weight in model.named_parameters() if weight.is_meta] for model in models]

    transformer, controlnet = results_of(2, gathered)[0]
    assert controlnet == []
    assert {name.split(".")[0] for name in transformer} == {"transformer_blocks", "proj_out", "scale_shift_table"}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
@pytest.mark.parametrize(("optimizer", "rate"), [("adamw", 1e-3), ("came", 1e-4)])
def test_the_curve_of_the_loss_is_the_same_on_one_two_and_four_ranks(kind, optimizer, rate):
    run_settings = settings(kind, optimizer=optimizer)
    groups = [((step % 8, (step + 3) % 8), ((step + 1) % 8, (step + 6) % 8)) for step in range(50)]
    alone = [loss for loss, _ in learn(settings(optimizer=optimizer), groups=groups, rate=rate)[0]]
    for count in (2, 4):
        results = results_of(count, lambda ranks: learn(run_settings, ranks, groups, rate=rate))
        assert [loss for loss, _ in results[0][0]] == pytest.approx(alone, abs=1e-4)


def test_shares_of_two_copies_are_those_of_one():
    run_settings, plain = settings("fsdp", "full", replicas=2), settings(method="full")
    results = results_of(4, lambda ranks: learn(run_settings, ranks))
    assert difference(results[0][2], learn(plain)[2]) < 1e-6


def test_what_runs_is_what_was_asked_for():
    def describe(ranks):
        from torch.distributed.fsdp import FSDPModule
        from torch.distributed.tensor import DTensor

        learner = make_trainer(
            tiny_transformer(layers=2).requires_grad_(True), 3.0, settings("fsdp", "full"), None, ranks
        )
        shares = [parameter for parameter in learner.transformer.parameters() if isinstance(parameter, DTensor)]
        blocks = [isinstance(block, FSDPModule) for block in learner.transformer.transformer_blocks]
        local = sum(parameter.to_local().numel() for parameter in shares)
        return (
            describe_layout(learner.layout, learner.parameters, learner.device),
            blocks,
            local,
            sum(parameter.numel() for parameter in learner.transformer.parameters()),
        )

    (words, blocks, local, elements_in_all), (_, _, remote, _) = results_of(2, describe)
    assert all(blocks) and local + remote == elements_in_all and max(local, remote) < 0.51 * elements_in_all
    assert words.startswith("FSDP over gloo: 2 processes, 3 gathered modules") and f"{local:,} lie on this one" in words


@pytest.mark.parametrize("method", ["full", "controlnet"])
def test_the_whole_weights_of_a_block_are_freed_before_the_next_block_is_put_into_rows(method, monkeypatch):
    from torch.distributed import fsdp

    put_into_rows, wholes, alive = fsdp.fully_shard, [], []

    def record(block, **options):
        alive.append(sum(weight() is not None for weight in wholes))
        wholes.extend(weakref.ref(weight) for weight in block.parameters() if type(weight) is torch.nn.Parameter)
        return put_into_rows(block, **options)

    def count(ranks):
        make_trainer(tiny_transformer(layers=3), 3.0, settings("fsdp", method), ranks=ranks)
        return alive, len(wholes)

    monkeypatch.setattr(fsdp, "fully_shard", record)
    for living, weights in results_of(2, count):
        assert living == [0] * len(living) and len(living) > 3 and weights > 30


@pytest.mark.parametrize("name", ["SanaBlock", "SanaMSBlock", "SanaTransformerBlock", "GLUMBConv", "SanaDoubleBlock"])
def test_the_names_of_sanas_block_are_known_and_those_that_are_not_list_what_is_there(name):
    def blocks(ranks):
        learner = make_trainer(tiny_transformer(layers=2), 3.0, settings("fsdp", block=name), ranks=ranks)
        return describe_layout(learner.layout, learner.parameters, learner.device)

    ((kind, *words),) = outcomes(1, blocks)
    if name == "SanaDoubleBlock":
        assert kind == "InputError" and words[0].startswith("block: got SanaDoubleBlock, expected one of SanaTransf")
        assert "SanaTransformerBlock (2 of" in words[0] and "GLUMBConv (2 of" in words[0]
    else:
        assert kind == "done", words


@pytest.mark.parametrize("count", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("group", [[[1, 2, 3, 4]], [[1, 2], [3, 4], [5, 6]], [[1], [2, 3, 4, 5], [6]], [[9, 8]] * 5])
def test_every_picture_of_a_step_is_learnt_once_and_all_ranks_are_asked_as_often(group, count):
    shares = [microbatches(group, rank, count) for rank in range(count)]
    assert len({len(share) for share in shares}) == 1
    learnt = [index for share in shares for piece, is_filler in share if not is_filler for index in piece]
    assert sorted(learnt) == sorted(index for batch in group for index in batch)
    longest = max(map(len, group))
    assert all(1 <= len(piece) <= longest for share in shares for piece, _ in share)
    assert all(any(set(piece) <= set(batch) for batch in group) for share in shares for piece, _ in share)


def test_a_step_with_fewer_pictures_than_ranks_is_refused():
    with pytest.raises(InputError, match="batch: got 2 and accumulate 2 in phase 1 for 5 processes.*accumulate to 3"):
        check_steps(settings(), 5)
    with pytest.raises(InputError, match="replicas: got 2 for 3 processes"):
        check_steps(settings("fsdp", replicas=2), 3)
    with pytest.raises(InputError, match="optimizer: got prodigy with parallel fsdp"):
        settings("fsdp", optimizer="prodigy")
    with pytest.raises(InputError, match="optimizer: got adamw8bit with parallel fsdp_offload"):
        settings("fsdp_offload", optimizer="adamw8bit")
    with pytest.raises(InputError, match="parallel.replicas: got 2 without parallel.kind fsdp or fsdp_offload"):
        settings(replicas=2)
