"""Ranks with a GPU each, which are pretended: everything is on its device, and states and images leave room there."""

import re
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from card_ranks import card_of, misplaced
from launched import OLD, results_of
from pretend_card import pretend_cards
from test_training_ranks import METHODS, numbers, settings
from tiny import tiny_transformer
from torch.distributed.fsdp._fully_shard import _fsdp_init
from trainers import make_trainer, take_step, weights_of

from sana_core.model.reference import NVIDIA
from sana_core.training import sharding, states
from sana_core.training.loss import seeded_dropout
from sana_core.training.previews import as_saved
from sana_core.training.ranks import ALONE, choose_device, warn_of_shared_gpus
from sana_core.training.schedule import TrainProgress
from sana_core.training.settings import Method

pytestmark = pytest.mark.skipif(OLD, reason="FSDP2 needs torch 2.9")
GROUP = ((0, 1), (2, 3))
OTHERS = {
    "dora": Method("dora", rank=2, targets="both"),
    "lokr": Method("lokr", rank=2, targets="both"),
    "lora with dropout": Method(rank=2, dropout=0.5),
}


def begin(run_settings, ranks, variant="sana", reference=None, layers=2):
    """Return a state of `ranks`. Its model is on the CPU at first, where `train` loads a divided model."""
    base = tiny_transformer(variant, layers=layers).requires_grad_(run_settings.method.kind != "controlnet")
    if reference:
        base.register_to_config(reference=reference)
    return make_trainer(base, 3.0, run_settings, ranks.device, ranks)


CASES = [
    *(("sana", name, method, None) for name, method in {**METHODS, **OTHERS}.items() if name != "dora"),
    ("sana-1.5", "dora", OTHERS["dora"], None),
    ("sana-4k", "full", METHODS["full"], None),
    ("sana", "controlnet", METHODS["controlnet"], NVIDIA),
]


def one_step(run_settings, ranks, variant, reference):
    state = begin(run_settings, ranks, variant, reference)
    loss, norm = take_step(state, numbers(), GROUP, TrainProgress(), 1e-3)
    return state, loss, norm, weights_of(state.gather_models(torch.device("cpu"), only_trained=True))


@pytest.mark.parametrize("kind", ["ddp", "fsdp", pytest.param("fsdp_offload", marks=pytest.mark.slow)])
def test_everything_is_on_the_device_of_its_rank_and_a_step_is_that_of_one_process(kind):
    def learn_all(ranks):
        results = []
        with card_of(ranks, 2) as (own_ranks, _):
            for variant, _, method, reference in CASES:
                run_settings = replace(settings(kind), method=method)
                state, loss, norm, weights = one_step(run_settings, own_ranks, variant, reference)
                wrong = misplaced(state.models, own_ranks.device, kind == "fsdp_offload")
                device = "cpu" if kind == "fsdp_offload" else "cuda"
                wrong += [name for name, weight in state.parameters.items() if weight.device.type != device]
                results.append((wrong, loss, norm, weights))
        return results

    for case, (first, second) in zip(CASES, zip(*results_of(2, learn_all, 300), strict=True), strict=True):
        variant, name, method, reference = case
        assert first[0] == second[0] == [], (variant, name)
        state, loss, norm, weights = one_step(replace(settings(), method=method), ALONE, variant, reference)
        assert first[1:3] == second[1:3]
        if method.dropout:
            continue  # Each rank drops other values.
        assert first[1:3] == (pytest.approx(loss, abs=2e-6), pytest.approx(norm, rel=1e-4)), (variant, name)
        # AdamW's first steps make much of what rounding leaves of gradients near zero
        mean = sum(float((first[3][key] - weight).abs().mean()) for key, weight in weights.items()) / len(weights)
        assert mean < 1e-5, (variant, name)


@pytest.mark.parametrize(("name", "local_rank", "index"), [("cuda:1", 0, 1), ("cuda", 1, 1), ("", 1, 1), ("", 0, 0)])
def test_the_device_of_a_rank_is_the_current_one_where_fsdp_puts_the_weights(name, local_rank, index, monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", str(local_rank))
    with pretend_cards(2):
        device = choose_device(name)
        mesh = SimpleNamespace(device_type="cuda")
        assert device == torch.device("cuda", index) == _fsdp_init._get_device_from_mesh(mesh)


def test_ranks_with_the_same_gpu_are_named(monkeypatch):
    """Processes that each see another GPU may call it by the same name, and older versions of torch have no uuid."""
    lines = []
    monkeypatch.setattr("sana_core.training.ranks.log_line", lines.append)

    def warn(ranks):
        with pretend_cards(2):
            for uuids in ("aa", "ab", (None, None)):
                properties = SimpleNamespace(uuid=uuids[ranks.rank])
                monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device, gpu=properties: gpu)
                warn_of_shared_gpus(ranks._replace(device=torch.device("cuda", 0)))
                lines.append(uuids)
        warn_of_shared_gpus(ranks._replace(device=torch.device("cpu")))
        return lines

    first, (warning, *second) = results_of(2, warn)
    assert first == second == ["aa", "ab", (None, None)]
    assert re.match("warning: rank 1 uses cuda:0 of .* like another rank, .*; leave device empty", warning)


def bytes_of(tensors):
    return sum(tensor.nbytes for tensor in tensors)


@pytest.mark.parametrize(("method", "count", "replicas"), [("controlnet", 2, 1), ("full", 4, 2)])
def test_states_of_an_offloaded_model_never_come_to_the_gpu(tmp_path, method, count, replicas):
    run_settings = settings("fsdp_offload", method, optimizer="came", replicas=replicas)

    def save_and_resume(ranks):
        with card_of(ranks, count) as (own_ranks, cards):
            first = begin(run_settings, own_ranks)
            take_step(first, numbers(), GROUP, TrainProgress(), 1e-3)
            (tmp_path / "shards").mkdir(exist_ok=True)
            ranks.agree(None)
            device = own_ranks.device
            torch.cuda.reset_peak_memory_stats()
            before = cards.alive[device]
            tensors, values = states.tensors_of(first.parameters, first.optimizer, first.average)
            sharding.save_shards(first.layout, tensors, tmp_path)
            saved = cards.peak[device] - before
            second = begin(run_settings, own_ranks)
            torch.cuda.reset_peak_memory_stats()
            before = cards.alive[device]
            restored = sharding.read_tensors(second.layout, tmp_path, count // replicas)
            states.restore(second.parameters, second.optimizer, second.average, restored, values, "state")
            resumed = cards.peak[device] - before
            same = all(torch.equal(one, second.parameters[name]) for name, one in first.parameters.items())
            return saved, resumed, bytes_of(tensors.values()), same

    for saved, resumed, gathered, same in results_of(count, save_and_resume):
        assert same and gathered > 50_000 and saved == resumed == 0


def test_previews_of_a_divided_model_hold_one_copy_in_their_precision():
    run_settings = replace(settings("fsdp", "full"), dtype="bfloat16")

    def preview(ranks):
        with card_of(ranks, 2) as (own_ranks, cards):
            state = begin(run_settings, own_ranks, layers=6)
            sizes = [weight.numel() for weight in state.layout.shards.trained.values()]
            device = own_ranks.device
            torch.cuda.reset_peak_memory_stats()
            before = cards.alive[device]
            with state.evaluation_weights():
                gathered = state.gather_models(device, only_trained=False)
                if gathered:
                    with as_saved(state.settings, gathered) as (transformer,):
                        assert {weight.dtype for weight in transformer.parameters()} == {torch.bfloat16}
            return cards.peak[device] - before, 2 * sum(sizes), 4 * max(sizes)

    (first, copy, largest), (second, *_) = results_of(2, preview)
    assert copy <= first <= copy + 2 * largest and second <= 2 * largest
    assert copy > 5 * largest


def test_dropout_seeds_the_generator_of_its_own_gpu_alone(monkeypatch):
    run_settings = replace(settings(), method=OTHERS["lora with dropout"])

    def seeds(ranks):
        seeded = []

        def fail(seed):
            raise AssertionError("the generators of all GPUs are seeded")

        with card_of(ranks, 2) as (own_ranks, _):
            state = begin(run_settings, own_ranks)
            monkeypatch.setattr(torch.cuda, "manual_seed_all", fail)
            monkeypatch.setattr(torch, "manual_seed", fail)
            monkeypatch.setattr(
                torch.cuda, "manual_seed", lambda seed: seeded.append((torch.cuda.current_device(), seed))
            )
            with seeded_dropout(state.device, (run_settings.seed, 1, 2)):
                pass
        return seeded

    ((device, seed),), ((other, same),) = results_of(2, seeds)
    assert (device, other) == (0, 1) and seed == same
