"""Predicted memory of training, compared with the counted peak of the trainer's step, and settings that fit a GPU."""

import json
import re
from collections import Counter
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from decoders import f32c32
from setup import ROOT

from benchmarks import train_memory
from benchmarks.train_memory import CONTROLNET, EIGHT_BITS, FULL, ROUNDED, count_step, make_settings
from sana_core.__main__ import main
from sana_core.commands import train as command
from sana_core.decode.stages import encoder_stages
from sana_core.errors import InputError
from sana_core.memory import CONTEXT, transformer_parameters
from sana_core.model.known_models import (
    MAX_TOKENS,
    TEXT_WIDTH,
    VARIANTS,
    Architecture,
    build_transformer,
    released_variant,
)
from sana_core.model.latents import CHANNELS
from sana_core.runtime.accelerator import current_accelerator
from sana_core.training.cache import Batch
from sana_core.training.memory_counter import compute_norms_in_fp32, count_optimizer, counting, to_fake
from sana_core.training.optimizers import OPTIMIZERS, OptimizerSpec, make_optimizer, step_optimizer
from sana_core.training.plan import (
    count_batch,
    decide_checkpointing,
    fit_lines,
    plan_training,
    propose,
    propose_larger,
    read_base,
    released_base,
    training_stage,
)
from sana_core.training.ranks import ALONE, Ranks
from sana_core.training.settings import CONSISTENCY, FLOW, Loss, Method, Parallel, Validation, read_settings
from sana_core.training.trained_model import adapter_layers, add_adapter
from sana_core.training.trainer import Trainer

SMALL = Architecture(640, 2)
DISTILLED = Architecture(640, 5, qk_norm=True, guidance_embeds=True)
CARDS = {name: size * 2**30 for name, size in (("4", 4), ("6", 6), ("8", 8), ("12", 12), ("16", 16), ("24", 24))}


def committed():
    return json.loads((ROOT / "benchmarks" / "train_memory.json").read_text())["steps"]


# The tests share the counts of a model. `released_base` begins without counts.
shared_base = cache(released_base)


def predicted(model, settings):
    return training_stage(settings, shared_base("1.6B")._replace(model=model)).bytes


def counted_step(model, settings):
    return count_batch(settings, shared_base("1.6B")._replace(model=model), settings.phase[0], 1, False)


# One case of each kind, by its number. All cases together are slow.
QUICK = {("0.6B", 3), ("1.6B", 8), ("1.6B", 12), ("1.6B", 20), ("1.6B", 27), ("1.6B", 31), ("1.5-4.8B", 1)}


@pytest.mark.parametrize(
    ("variant", "number"),
    [
        pytest.param(variant, number, marks=() if (variant, number) in QUICK else pytest.mark.slow)
        for variant, cases in train_memory.CASES.items()
        for number in range(len(cases))
    ],
)
def test_the_counted_peaks_of_the_released_models_are_predicted(variant, number):
    settings = make_settings(**train_memory.CASES[variant][number])
    figures = committed()[variant][train_memory.describe(settings)]
    prediction = train_memory.predict(variant, settings) / 1e6
    # the target is 3 %
    assert figures["counted_megabytes"] == pytest.approx(prediction, rel=0.01)
    assert figures["predicted_megabytes"] == pytest.approx(prediction, abs=0.1)


def test_every_case_has_a_committed_figure():
    proposal = {variant: len(cases) for variant, cases in committed().items()}
    assert proposal == {variant: len(cases) for variant, cases in train_memory.CASES.items()}


@pytest.mark.slow
@pytest.mark.parametrize("case", [{}, {"method": ROUNDED, "optimizer": "came8bit"}], ids=["lora", "full"])
def test_the_counter_still_counts_what_was_committed_of_the_smallest_model(case):
    """The step of today, at the real size: a change that makes it take more is seen here."""
    settings = make_settings(**case)
    counted = count_step(VARIANTS["0.6B"], settings).peak
    figure = committed()["0.6B"][train_memory.describe(settings)]["counted_megabytes"]
    assert counted / 1e6 == pytest.approx(figure, rel=0.03)


def test_weights_in_fp32_are_not_held_a_second_time_while_a_step_accumulates():
    """Autocast would keep all that it has cast until the forward ends: here 42 MB more."""
    model = Architecture(640, 4)
    settings = make_settings(256, method=FULL, optimizer="came8bit", accumulate=2)
    counted = count_step(model, settings).peak
    assert counted == pytest.approx(predicted(model, settings), rel=0.03)


REAL = {
    "lora": {"checkpoint": False, "batch": 2},
    "lora, norms": {"method": Method(targets="both"), "ema": 0.9, "model": SMALL._replace(qk_norm=True)},
    "lora, dropout": {"method": Method(targets="both", dropout=0.2), "checkpoint": False},
    "lora, dropout, checkpointing": {"method": Method(dropout=0.2)},
    "dora": {"method": Method("dora", targets="both"), "checkpoint": False},
    "lora of a distilled model": {"model": DISTILLED, "loss": CONSISTENCY, "checkpoint": False},
    "lora of a distilled model, checkpointing": {"model": DISTILLED, "loss": CONSISTENCY, "batch": 2},
    "lora of a distilled model over 8 bits": {"model": DISTILLED, "loss": CONSISTENCY, "method": EIGHT_BITS},
    "full": {"method": FULL, "optimizer": "came8bit"},
    "full, accumulated": {"method": FULL, "accumulate": 2, "checkpoint": False},
    "lora over 8 bits": {"method": EIGHT_BITS},
    "lokr over 8 bits": {"method": Method("lokr", targets="both", base="int8"), "checkpoint": False},
    "controlnet": {"method": Method("controlnet", blocks=2), "accumulate": 2, "model": Architecture(640, 4)},
    "controlnet, no checkpointing": {
        "method": Method("controlnet", blocks=1),
        "optimizer": "came8bit",
        "checkpoint": False,
        "model": Architecture(640, 4),
    },
}


# Those of which the others are combinations.
QUICK = ("lora", "lora, dropout, checkpointing", "dora", "full", "lora over 8 bits", "controlnet")


@pytest.mark.parametrize("name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in REAL])
def test_scaled_models_take_as_much_memory_as_predicted(name):
    case = dict(REAL[name])
    model, loss = case.pop("model", SMALL), Loss(case.pop("loss", FLOW))
    settings = replace(make_settings(pixels=512, dtype="float32", **case), loss=loss)
    assert count_step(model, settings, fake=False).peak == pytest.approx(predicted(model, settings), rel=0.03)


def test_the_encoder_is_the_library_s():
    with torch.device("meta"):
        assert released_base("1.6B").encoder == encoder_stages(f32c32(1))


def test_layers_by_pattern_are_those_that_get_an_adapter_and_that_are_counted():
    model = Architecture(320, 7)
    module = train_memory.transformer(model, torch.float32, 512)
    method = Method(rank=4, targets="both", layers=("*blocks.[2-5].*", "*.attn2.to_[qk]"))
    add_adapter(module, method, 0)
    proposal = {name.removeprefix("transformer_blocks.") for name in adapter_layers(module)}
    assert len(proposal) == 4 * 10 + 3 * 2 and {"2.ff.conv_point", "3.attn1.to_v", "0.attn2.to_k"} < proposal
    trained = sum(parameter.numel() for parameter in module.parameters() if parameter.requires_grad)
    assert counted_step(model, make_settings(512, method=method)).elements == trained
    with pytest.raises(InputError, match=r"layers: got proj_out, which fits none of targets attention"):
        add_adapter(module, Method(layers=("proj_out",)), 0)


@pytest.mark.parametrize(
    "layers",
    [("*blocks.[2-5].*", "*.attn2.to_[qk]"), pytest.param(("*blocks.[4-7].attn1.*",), marks=pytest.mark.slow)],
)
def test_blocks_that_differ_take_as_much_memory_as_predicted(layers):
    """In the second case no gradient goes through the first four blocks."""
    model = Architecture(640, 8)
    settings = make_settings(1024, method=Method(layers=layers, targets="both"), checkpoint=False)
    assert count_step(model, settings).peak == pytest.approx(predicted(model, settings), rel=0.03)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_takes_the_predicted_memory_on_a_gpu_too(name):
    """Libraries choose another step for CUDA. Its tensors are fake, so no GPU is needed."""
    library = {"adamw8bit": "torchao.optim", "prodigy": "pytorch_optimizer", "schedulefree": "pytorch_optimizer"}
    pytest.importorskip(library.get(name, "torch"))
    trained = [((16, 512), 4), ((512, 16, 1, 1), 4), ((2000, 512), 1), ((512,), 3)]
    counted = count_optimizer(name, trained, torch.float32, 1)
    with counting() as live:
        parameters = [
            torch.nn.Parameter(torch.empty(shape, device="cuda")) for shape, number in trained for _ in range(number)
        ]
        for parameter in parameters:
            parameter.grad = torch.empty_like(parameter)
        optimizer = make_optimizer(name, parameters, 1e-4)
        before = live.peak = live.alive
        step_optimizer(optimizer, torch.Generator().manual_seed(0))
        assert counted == pytest.approx((live.alive - before, live.peak - live.alive), rel=0.01)


@pytest.mark.parametrize("method", [FULL, CONTROLNET], ids=["full", "controlnet"])
def test_autocast_saves_the_predicted_tensors_on_a_gpu_too(method, monkeypatch):
    """Autocast chooses other dtypes on CUDA than on the CPU. The tensors are fake, so no GPU is needed."""
    # torch.autocast calls these two functions. Attention is replaced by a product, because SDPA has other kernels.
    monkeypatch.setattr("torch.cuda.amp.common.amp_definitely_not_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda *arguments, **options: True)
    monkeypatch.setattr(
        "torch.nn.functional.scaled_dot_product_attention", lambda q, k, v, **options: q @ k.transpose(-1, -2) @ v
    )
    settings = make_settings(method=method, checkpoint=False, dtype="bfloat16")

    def saved(device, fp32_norms=False):
        """Return how often the forward saves each shape and dtype for the backward."""
        with torch.device("meta"):
            transformer = build_transformer(VARIANTS["0.6B"]._replace(layers=4))
            trainer = Trainer(replace(settings, method=replace(method, blocks=2)))
            trainer.set_up(transformer, 1.0)
        tensors = Counter()

        def pack(tensor):
            tensors[tuple(tensor.shape), tensor.dtype] += 1
            return tensor

        with counting():
            to_fake(trainer.models, device)
            if fp32_norms:
                compute_norms_in_fp32(trainer.models)
            latents = torch.empty(1, CHANNELS, 8, 8)
            embeds = torch.empty(1, MAX_TOKENS, TEXT_WIDTH, dtype=torch.bfloat16)
            mask = torch.empty(1, MAX_TOKENS, dtype=torch.int64)
            batch = Batch(latents, embeds, mask, None, [], latents if method.kind == "controlnet" else None)
            with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
                trainer.batch_loss(batch, latents, torch.empty(1, device=device))
        return tensors

    expected = saved("cuda")
    assert saved("cpu", fp32_norms=True) == expected
    assert saved("cpu") != expected


def test_a_count_leaves_torchao_s_table_of_8_bit_values_intact():
    """torchao computes the table once per process, and has not done it yet."""
    subclass = pytest.importorskip("torchao.optim.subclass_8bit")
    subclass.get_qmap_signed.cache_clear()
    subclass.get_qmap_unsigned.cache_clear()
    count_optimizer("adamw8bit", [((64, 64), 1)], torch.float32, 1)
    parameter = torch.nn.Parameter(torch.zeros(64, 64))
    parameter.grad = torch.linspace(0.5, 1, 256).repeat(16).reshape(64, 64)
    optimizer = make_optimizer("adamw8bit", [parameter], 1e-3)
    with torch.compiler.set_stance("force_eager"):
        optimizer.step()
    average = optimizer.state[parameter]["exp_avg"].dequantize()
    torch.testing.assert_close(average, 0.1 * parameter.grad, rtol=0.05, atol=0)


def make_lion(groups, settings):
    from pytorch_optimizer import Lion

    return Lion(groups, **settings)


# Each optimizer and each method. The others are combinations of them.
QUICK_STEPS = {("lion", 0), ("adamw8bit", 1), ("came8bit", 1), ("prodigy", 2), ("schedulefree", 0)}
METHODS = (FULL, ROUNDED, Method(targets="both"))


@pytest.mark.parametrize(
    ("name", "method"),
    [
        pytest.param(name, method, marks=() if (name, number) in QUICK_STEPS else pytest.mark.slow)
        for name in ("lion", "adamw8bit", "came8bit", "prodigy", "schedulefree")
        for number, method in enumerate(METHODS)
    ],
)
def test_a_step_of_any_optimizer_is_predicted(name, method, monkeypatch):
    """Of Lion there is nothing but its row."""
    pytest.importorskip("torchao.optim" if name == "adamw8bit" else "pytorch_optimizer")
    row = OptimizerSpec(make_lion, betas=(0.9, 0.99), library="pytorch_optimizer")
    monkeypatch.setitem(OPTIMIZERS, "lion", row)
    if method == ROUNDED and not OPTIMIZERS[name].per_parameter:
        pytest.skip("it trains weights in fp32 alone")
    # The real cases above have more layers. Here only the optimizer differs.
    model = Architecture(640, 2)
    settings = make_settings(512, method=method, optimizer="adamw")
    settings = replace(settings, optimizer=replace(settings.optimizer, name=name))
    assert count_step(model, settings).peak == pytest.approx(predicted(model, settings), rel=0.02)


def test_a_case_is_counted_once_and_a_plan_can_be_cancelled():
    reports = []
    base = released_base("1.6B", report=reports.append)._replace(model=SMALL)
    settings = make_settings(512, ema=0.9)
    first = plan_training(settings, base)
    assert reports == ["estimating the memory of lora, 1024x256 px, batch 1", "estimating the memory of adamw"]
    changed = replace(settings, optimizer=replace(settings.optimizer, ema=0.0))
    assert plan_training(changed, base).stages[2].state < first.stages[2].state and len(reports) == 2

    def cancel():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        plan_training(settings, released_base("1.6B", cancel))


def test_a_plan_reads_headers_alone(monkeypatch):
    """No weight of the bundled model is read. The sizes come from the headers of its files."""
    from sana_core.checkpoints import headers, load

    for module in (headers, load):
        monkeypatch.setattr(module, "read_file", lambda *arguments: pytest.fail("weights were read"))
    settings = read_settings(ROOT / "recipes" / "lora_bundled.toml")
    base = read_base(settings)
    assert base.model == Architecture(192, 14)
    names = [stage.name for stage in plan_training(settings, base).stages]
    assert names == ["captions", "latents", "phase 1: 256 px, batch 4", "validation's images"]
    assert max(stage.bytes for stage in plan_training(settings, base).stages) < 2e8


RECIPES = {
    "lora_1024": ("1.6B", "6"),
    "full_1024": ("1.6B", "16"),
    "lora_4096": ("1.6B", "12"),
    "controlnet_1024": ("1.6B", "12"),
}


@pytest.mark.parametrize(
    "name", ["lora_1024", *(pytest.param(name, marks=pytest.mark.slow) for name in RECIPES if name != "lora_1024")]
)
def test_the_recipes_fit_the_cards_that_they_name(name):
    variant, card = RECIPES[name]
    file = ROOT / "recipes" / f"{name}.toml"
    assert re.search(rf"GPU of {card} GB", file.read_text().split("\nmodel")[0])
    assert plan_training(read_settings(file), shared_base(variant)).gpu_bytes <= CARDS[card]


def test_every_recipe_of_a_released_model_is_held_to_a_card():
    assert {file.stem for file in (ROOT / "recipes").glob("*.toml")} == {*RECIPES, "lora_bundled", "full_8_gpus"}


TRAINED = {
    "LoRA": {},
    "LoRA, no checkpointing": {"checkpoint": False},
    "LoRA, base in int8": {"method": EIGHT_BITS},
    "ControlNet of 7 blocks, came": {"method": CONTROLNET, "optimizer": "came", "accumulate": 2},
    "all, adamw": {"method": FULL},
    "all, came8bit": {"method": FULL, "optimizer": "came8bit"},
    "all in bfloat16, came8bit": {"method": ROUNDED, "optimizer": "came8bit"},
}


@pytest.mark.slow
def test_the_tables_of_the_guides_are_what_is_predicted():
    text = "".join((ROOT / "docs" / f"{page}.md").read_text() for page in ("training", "training-command"))
    rows = re.findall(r"^\| ([\d.]+B) \| (.+?) \| (\d+) \| ([\d.]+) GB \| (\d+ GB|more) \|$", text, re.M)
    assert len(rows) == 17
    for variant, trained, pixels, step, card in rows:
        settings = make_settings(int(pixels), **TRAINED[trained])
        base = shared_base({"4.8B": "1.5-4.8B"}.get(variant, variant))
        plan = plan_training(settings, base)
        assert plan.stages[2].bytes / 1e9 == pytest.approx(float(step), abs=0.06), (variant, trained)
        (line,) = fit_lines(settings, base, plan, None)
        assert line.endswith("more than 24 GB" if card == "more" else f"fits a GPU of {card}"), (variant, trained)


def test_the_range_on_the_page_of_benchmarks_matches_the_figures():
    ratios = [figures["predicted_of_counted"] for cases in committed().values() for figures in cases.values()]
    (named,) = re.findall(
        r"([\d.]+) to ([\d.]+) times of what was counted", (ROOT / "docs" / "developer" / "benchmarks.md").read_text()
    )
    assert list(map(float, named)) == [min(ratios), max(ratios)]


CHECKPOINTED = "checkpoint_gradients = true"
SMALL_STATE = 'name = "came8bit" in [optimizer], with a warmup of some hundred steps'
ALL_WEIGHTS = {"batch": 4, "checkpoint": False, "method": FULL, "optimizer": "adamw"}


@pytest.mark.parametrize(
    ("variant", "card", "options", "changes"),
    [
        ("1.6B", "24", {"batch": 2, "checkpoint": False}, ()),
        ("1.6B", "8", {"batch": 2, "checkpoint": False}, (CHECKPOINTED,)),
        ("1.6B", "24", ALL_WEIGHTS, (CHECKPOINTED, SMALL_STATE)),
        ("1.5-4.8B", "12", {"checkpoint": False}, (CHECKPOINTED,)),
        ("1.5-4.8B", "8", {}, ('base = "int8" in [method]',)),
    ],
)
def test_the_cheapest_changes_that_fit_are_proposed(variant, card, options, changes):
    proposal = propose(make_settings(**options), shared_base(variant), CARDS[card])
    assert proposal.changes == changes and proposal.plan.gpu_bytes <= CARDS[card]


def test_gradients_are_checkpointed_only_where_the_memory_needs_it():
    base, settings = shared_base("1.6B"), make_settings()
    for card, is_on in (("6", True), ("8", True), ("12", False), ("24", False)):
        assert decide_checkpointing(settings, base, CARDS[card]).checkpoint_gradients == is_on
    without = make_settings(checkpoint=False)
    assert decide_checkpointing(without, base, CARDS["6"]) == without


def test_batches_that_fit_are_proposed_in_place_of_accumulation():
    base, settings = shared_base("1.6B"), make_settings(accumulate=4)
    assert propose_larger(settings, base, CARDS["6"]) == ["batch = 4 and accumulate = 1 in phase 1"]
    lines = fit_lines(settings, base, plan_training(settings, base), CARDS["6"])
    assert lines[1:] == ["fits too, with fewer batches a step: batch = 4 and accumulate = 1 in phase 1"]
    assert propose_larger(make_settings(batch=4), base, CARDS["6"]) == []
    # Each of four GPUs computes one image of a step already.
    assert propose_larger(settings, base, CARDS["6"], 4) == []
    two = propose_larger(make_settings(accumulate=8), base, CARDS["6"], 2)
    assert two == ["batch = 4 and accumulate = 2 in phase 1"]
    full = make_settings(4096, method=FULL, optimizer="came8bit", accumulate=2)
    assert propose_larger(full, base, plan_training(full, base).gpu_bytes) == []


def test_a_batch_is_divided_so_that_a_step_learns_as_many_pictures():
    base = shared_base("1.6B")
    settings = make_settings(2048, batch=6, accumulate=2)
    proposal = propose(settings, base, CARDS["8"])
    (phase,) = proposal.settings.phase
    assert phase.batch < 6 and phase.batch * phase.accumulate == 12
    assert proposal.changes == (f"batch = {phase.batch} and accumulate = {phase.accumulate} in phase 1",)
    assert proposal.plan.gpu_bytes <= CARDS["8"]


def test_what_is_not_needed_is_not_proposed():
    """Here gradient checkpointing and smaller batches are tried first, and are not enough."""
    base = shared_base("1.5-4.8B")
    settings = make_settings(512, method=FULL, optimizer="adamw", ema=0.999, batch=2)
    proposal = propose(settings, base, 40 * 2**30)
    assert proposal.plan.gpu_bytes <= 40 * 2**30
    assert proposal.settings.method.weights == "bfloat16" and proposal.settings.phase[0].batch == 2


def test_a_base_in_8_bits_is_not_proposed_where_validation_draws_beside_it():
    """The pictures are drawn from the whole model, which is then there as well."""
    base = shared_base("1.5-4.8B")
    # A DoRA cannot have one.
    assert propose(make_settings(method=Method("dora")), base, CARDS["8"]).settings.method.base == "full"
    settings = replace(make_settings(), validation=Validation(10, prompts=("a fox",)))
    proposal = propose(settings, base, CARDS["8"])
    assert proposal.settings.method.base == "full"
    eight = replace(settings, method=EIGHT_BITS)
    assert plan_training(eight, base).stages[-1].weights > 1.4 * plan_training(settings, base).stages[-1].weights


def test_weights_in_bf16_are_not_proposed_with_an_optimizer_that_cannot_round_them():
    """With weights in bf16, the model would fit without another optimizer, but Prodigy trains fp32 weights only."""
    base = shared_base("1.6B")
    proposal = propose(make_settings(method=FULL, optimizer="prodigy"), base, CARDS["12"])
    assert proposal.plan.gpu_bytes <= CARDS["12"]
    assert OPTIMIZERS[proposal.settings.optimizer.name].per_parameter
    assert proposal.settings.method.weights == "bfloat16"


def test_where_nothing_fits_the_least_is_said():
    base, settings = shared_base("1.6B"), make_settings()
    plan = plan_training(settings, base)
    assert plan.largest.name == "captions"
    lines = fit_lines(settings, base, plan, CARDS["4"])
    assert "does not fit a GPU of 4 GB" in lines[0]
    assert lines[1].startswith(
        f"the least that these settings can come to: {plan.gpu_bytes / 1e9:.1f} GB, for captions"
    )
    assert fit_lines(settings, base, plan, None) == [
        f"{plan.gpu_bytes / 1e9:.1f} GB with {CONTEXT / 1e9:.1f} GB for the driver: fits a GPU of 6 GB"
    ]


def test_validation_draws_beside_what_is_trained():
    base = shared_base("1.6B")
    settings = make_settings(method=FULL, optimizer="came8bit")
    drawing = replace(settings, validation=Validation(10, prompts=("a fox",)))
    stage = plan_training(drawing, base).stages[-1]
    parameters = transformer_parameters(base.model)
    # the weights in fp32, a copy in bf16 as they are saved, CAME's state
    assert stage.name == "validation's images" and stage.bytes > parameters * (4 + 2 + 1)


def test_validation_draws_with_a_copy_of_a_controlnet():
    base = shared_base("1.6B")
    settings = replace(make_settings(method=CONTROLNET), validation=Validation(10, prompts=("a fox",), control=("a",)))
    stage = plan_training(settings, base).stages[-1]
    trained = transformer_parameters(base.model) - transformer_parameters(base.model._replace(layers=13))
    trained += 8 * (base.model.width**2 + base.model.width)
    # the model in bf16, the ControlNet in fp32 and as it is saved in bf16
    assert stage.weights == 2 * transformer_parameters(base.model) + 6 * trained


def test_the_command_prints_the_stages_and_whether_they_fit(monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    assert main(["train", str(ROOT / "recipes" / "lora_bundled.toml"), "--plan", "--card", "4"]) == 0
    out = capsys.readouterr().out
    assert "phase 1: 256 px, batch 4" in out and out.endswith(": fits a GPU of 4 GB\n")
    assert not (ROOT / "output").exists() or "lora-bundled" not in {item.name for item in (ROOT / "output").iterdir()}


def test_a_card_that_is_none_is_refused():
    settings = read_settings(ROOT / "recipes" / "lora_bundled.toml")
    with pytest.raises(InputError, match=r"^card: got 0, expected a number from 1 to 10000"):
        command.plan_lines(settings, 0)


def test_without_a_card_it_is_the_one_that_trains(monkeypatch):
    settings = read_settings(ROOT / "recipes" / "lora_bundled.toml")
    rooms = {torch.device("cuda:0"): 80 * 2**30, torch.device("cuda:1"): 4 * 2**30}
    monkeypatch.setattr("sana_core.runtime.accelerator.current_accelerator", lambda: torch.device("cuda:0"))
    monkeypatch.setattr("torch.accelerator.device_count", lambda: len(rooms))
    monkeypatch.setattr("sana_core.runtime.accelerator.memory_info", lambda device: (0, rooms[device]))
    assert command.plan_lines(settings, None)[-1].endswith("fits a GPU of 80 GB")
    assert command.plan_lines(replace(settings, device="cuda:1"), None)[-1].endswith("fits a GPU of 4 GB")


def test_a_card_that_is_too_small_is_warned_of(monkeypatch, capsys):
    settings = read_settings(ROOT / "recipes" / "lora_bundled.toml")
    if current_accelerator() is None:
        assert command.fit_memory(settings) == settings
        assert capsys.readouterr().err == ""
    card = torch.device("cuda:0")
    monkeypatch.setattr("sana_core.runtime.accelerator.current_accelerator", lambda: card)
    for room, warned in ((10**12, False), (10**8, True)):
        monkeypatch.setattr("sana_core.runtime.accelerator.memory_info", lambda device, room=room: (room, room))
        settings = replace(settings, checkpoint_gradients=True)
        # Where the memory is enough, no value is computed twice.
        assert command.fit_memory(settings) == replace(settings, checkpoint_gradients=warned)
        *progress, last = capsys.readouterr().err.splitlines()
        assert last.startswith("warning: ") == warned and not any("warning" in line for line in progress)
    assert last == "warning: captions may take 0.7 GB, and cuda:0 has 0.1 GB; see --plan"


@pytest.mark.parametrize("ranks", [ALONE, Ranks(0, 2, True, torch.device("cuda:0"))], ids=["alone", "two"])
def test_a_wrong_number_of_replicas_is_named_before_memory_is_predicted(monkeypatch, tmp_path, ranks):
    monkeypatch.setattr("sana_core.runtime.accelerator.current_accelerator", lambda: torch.device("cuda:0"))
    monkeypatch.setattr("sana_core.runtime.accelerator.memory_info", lambda device: (10**12, 10**12))
    settings = read_settings(ROOT / "recipes" / "lora_bundled.toml")
    settings = replace(settings, out=str(tmp_path), parallel=Parallel("fsdp", replicas=4))
    with pytest.raises(InputError, match="^replicas: got 4 for [12] processes, expected a number that divides them$"):
        command.run_training(settings, ranks, False, False)


@pytest.mark.parametrize(
    "recipe",
    [
        pytest.param(file.stem, marks=() if file.stem in ("lora_1024", "lora_bundled") else pytest.mark.slow)
        for file in sorted((ROOT / "recipes").glob("*.toml"))
    ],
)
def test_each_recipe_is_planned_before_the_download(recipe, capsys):
    """The example of `train --help`. Recipes of the bundled model have their files, all others name a released one."""
    file = ROOT / "recipes" / f"{recipe}.toml"
    assert main(["train", str(file), "--plan", "--card", "24"]) == 0
    first, *lines = capsys.readouterr().out.splitlines()
    model = Path(read_settings(file).model)
    assert model.exists() != first.endswith("planned as the released 1.6B") and "captions" in "".join(lines[:4])


@pytest.mark.parametrize(
    "name, variant",
    [
        ("Sana_600M_512px_diffusers", "0.6B"),
        ("Sana_1600M_4Kpx_BF16.safetensors", "1.6B"),
        ("SANA1.5_4.8B_1024px_diffusers", "1.5-4.8B"),
        ("Sana_Sprint_0.6B_1024px_diffusers", "sprint-0.6B"),
        ("my-sana", None),
        ("Sana_1600N_1024px", None),
    ],
)
def test_a_released_model_is_known_by_its_name(name, variant):
    assert released_variant(name) == variant


def test_a_mistyped_model_of_a_recipe_is_not_taken_for_a_released_one(tmp_path, capsys):
    text = (ROOT / "recipes" / "full_1024.toml").read_text()
    (tmp_path / "run.toml").write_text(text.replace("Sana_1600M_1024px_BF16_diffusers", "Sana_1600"))
    assert main(["train", str(tmp_path / "run.toml"), "--plan"]) == 1
    assert "Sana_1600: no such file or folder, expected a model; check its spelling" in capsys.readouterr().err
