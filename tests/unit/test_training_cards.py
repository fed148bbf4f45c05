"""Planned memory of several GPUs, compared with the counted peak of the trainer's step on one of four."""

import json
from dataclasses import replace

import pytest
from setup import ROOT

from benchmarks.train_memory import EIGHT_BITS, FULL, make_settings
from sana_core.commands import train as command
from sana_core.memory import transformer_parameters
from sana_core.training.plan import (
    arrangement_lines,
    cheapest,
    plan_training,
    rank_share,
    released_base,
    training_stage,
)
from sana_core.training.settings import Parallel, Validation, read_settings
from sana_core.training.sharding import microbatches

GB = 2**30


def share(variant, kind, cards=4, **options):
    settings = replace(make_settings(accumulate=cards, **options), parallel=Parallel(kind))
    return training_stage(settings, released_base(variant), cards=cards)


def test_the_counted_peaks_of_the_released_models_are_predicted():
    from benchmarks.train_parallel import RELEASED, predict

    report = json.loads((ROOT / "benchmarks" / "train_parallel.json").read_text())["memory"]
    assert report.keys() == RELEASED.keys()
    for variant, figures in report.items():
        # the target is 10 %
        assert figures["counted_megabytes"] == pytest.approx(predict(variant) / 1e6, rel=0.02)
        assert figures["fits_card_of"] == RELEASED[variant]


def test_the_cheapest_that_fits_changes_as_little_as_it_has_to():
    settings, base = make_settings(method=FULL, accumulate=4), released_base("1.6B")
    asked = {size: cheapest(settings, base, 4, size * GB) for size in (1, 6, 12, 40)}
    assert asked[40].settings.parallel.kind == "ddp" and len(asked[40].changes) == 1
    assert asked[12].settings.parallel.kind == "fsdp" and len(asked[12].changes) == 1
    assert asked[6].plan.gpu_bytes <= 6 * GB
    assert asked[6].changes[0] != asked[12].changes[0] or len(asked[6].changes) > 1
    assert asked[1] is None
    lines = arrangement_lines(settings, base, 4, 12 * GB)
    assert lines[-1].startswith('fits 4 GPUs of 12 GB with kind = "fsdp" in [parallel]: 7.8 GB on each, 9.63 GB sent')
    assert arrangement_lines(settings, base, 4, GB)[-1].startswith("nothing fits 4 GPUs of 1 GB")


def test_replicas_stay_in_the_table_and_in_what_fits():
    base = released_base("1.6B")
    settings = make_settings(method=FULL, accumulate=8)
    settings = replace(settings, parallel=Parallel("fsdp", replicas=2))
    (row,) = (line for line in arrangement_lines(settings, base, 8, None) if line.startswith("fsdp "))
    plan = plan_training(settings, base, 8)
    assert row.split()[-3] == f"{plan.gpu_bytes / 1e9:.2f}" and row.split()[-1] == f"{plan.sent / 1e9:.2f}"
    proposal = cheapest(settings, base, 8, plan.gpu_bytes)
    assert proposal.settings.parallel == Parallel("fsdp", replicas=2)
    assert proposal.plan.gpu_bytes == plan.gpu_bytes


def test_what_is_sent_is_what_rings_send():
    """All weights of the 1.6B in fp32: a sum sends twice 3/4 of the gradients, a gathering 3/4 of the weights."""
    parameters = 1_604_462_752
    assert share("1.6B", "ddp", method=FULL).sent == pytest.approx(2 * 0.75 * 4 * parameters)
    assert share("1.6B", "fsdp", method=FULL).sent == pytest.approx(0.75 * (2 + 2 + 4) * parameters)
    assert share("1.6B", "ddp").sent < 0.01 * share("1.6B", "ddp", method=FULL).sent
    offloaded = share("1.6B", "fsdp_offload", method=FULL)
    assert offloaded.weights == offloaded.state == 0 and offloaded.host >= 4 * parameters


@pytest.mark.parametrize("cards", [1, 2, 3, 4, 8])
@pytest.mark.parametrize(("batch", "accumulate"), [(1, 8), (8, 1), (4, 2), (3, 5)])
def test_the_planned_pieces_are_those_that_are_learnt(cards, batch, accumulate):
    phase = make_settings(batch=batch, accumulate=accumulate).phase[0]
    group = [[0] * batch for _ in range(accumulate)]
    shares = [microbatches(group, rank, cards) for rank in range(cards)]
    most = max(len(piece) for pieces in shares for piece, _ in pieces)
    assert rank_share(phase, cards) == (len(shares[0]), most)


def test_the_command_prints_the_arrangements(checkpoint):
    settings = read_settings(ROOT / "recipes" / "lora_bundled.toml")
    settings = replace(settings, model=str(checkpoint), phase=(replace(settings.phase[0], accumulate=4),))
    lines = command.plan_lines(settings, 8.0, 4)
    kinds = [line.split()[0] for line in lines if line.startswith(("ddp", "fsdp"))]
    assert sorted(kinds) == ["ddp", "fsdp", "fsdp_offload"] and lines[-1].startswith("fits 4 GPUs of 8 GB")


def test_a_model_that_is_offloaded_on_one_gpu_is_planned(checkpoint):
    settings = read_settings(ROOT / "recipes" / "lora_bundled.toml")
    settings = replace(settings, model=str(checkpoint), parallel=Parallel("fsdp_offload"))
    lines = command.plan_lines(settings, 8.0)
    assert any(line.startswith("fsdp_offload") for line in lines) and lines[-1].startswith("fits 1 GPU of 8 GB")
    undivided, offloaded = (share("1.5-4.8B", kind, cards=1) for kind in ("ddp", "fsdp_offload"))
    assert offloaded.gpu_bytes < undivided.gpu_bytes / 2


def test_a_base_in_8_bits_is_not_divided():
    settings = make_settings(method=EIGHT_BITS, accumulate=2)
    lines = arrangement_lines(settings, released_base("1.6B"), 2, None)
    assert [line.split()[0] for line in lines[1:]] == ["ddp"]


def test_every_gpu_has_room_for_the_text_encoder():
    """The ranks share the captions, so each of them loads the encoder."""
    settings, base = make_settings(accumulate=4), released_base("1.6B")
    smallest = plan_training(settings, base, 4).stages[0].gpu_bytes
    assert cheapest(settings, base, 4, smallest - 1) is None
    assert cheapest(settings, base, 4, smallest).plan.largest.name == "captions"


def test_what_prodigy_cannot_train_is_not_planned():
    """Prodigy sums over all weights at once, so shards are impossible."""
    settings, base = make_settings(optimizer="prodigy", accumulate=2), released_base("1.6B")
    lines = arrangement_lines(settings, base, 2, 8 * GB)
    assert [line.split()[0] for line in lines[1:-1]] == ["ddp"] and 'fits 2 GPUs of 8 GB with kind = "ddp"' in lines[-1]


@pytest.mark.parametrize("cards", [2, 4, 8])
def test_images_of_a_divided_model_are_planned_and_fit_24_gb(cards):
    plain = replace(make_settings(method=FULL, accumulate=cards, optimizer="came8bit"), parallel=Parallel("fsdp"))
    prompts = replace(plain, validation=Validation(every=100, prompts=("a red circle",)))
    base = released_base("1.5-4.8B")
    plans = [plan_training(run_settings, base, cards) for run_settings in (plain, prompts)]
    steps, images = (plan.largest for plan in plans)
    # the whole model in bf16, and the rows of this GPU in fp32 with their state
    copy = 2 * transformer_parameters(base.model)
    assert copy < images.weights + images.state <= copy + (steps.weights + steps.state) * 1.01 or images == steps
    assert steps.gpu_bytes <= images.gpu_bytes < 24 * GB and plans[0].sent == plans[1].sent
    offloaded = plan_training(replace(prompts, parallel=Parallel("fsdp_offload")), base, cards)
    assert copy < offloaded.gpu_bytes < copy + 3 * GB and offloaded.host > 0
