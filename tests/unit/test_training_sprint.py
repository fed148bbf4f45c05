"""The consistency loss: TrigFlow beside diffusers' Sprint, its tangent beside differences, and what runs make of it."""

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torchgen
from diffusers import SanaSprintPipeline, SanaTransformer2DModel, SCMScheduler
from pictures import write_pictures
from PIL import Image
from tiny import random_prompt, tiny_transformer
from trained import Stopped, last_state, lines_of, same, stopping_after

import sana_core
from sana_core.commands.train import plan_lines
from sana_core.errors import InputError
from sana_core.training import trainer
from sana_core.training.loss import (
    Prompt,
    consistency_error,
    consistency_loss,
    data_point,
    draw_training,
    tangent,
    training_angles,
    training_guidance,
    trigflow_velocity,
    validation_times,
)
from sana_core.training.settings import (
    Loss,
    Method,
    Optimizer,
    Phase,
    TrainingSettings,
    Validation,
    check_settings,
    read_settings,
)
from sana_core.training.trained_model import add_adapter, quantise_base

ANGLE = torch.tensor([0.3, 1.2])
GUIDANCE = torch.tensor([4.0, 5.0])


def prompt_of(dtype=torch.float32):
    embeds, mask = random_prompt(2, tokens=7)
    mask[1, 4:] = 0
    return Prompt(embeds.to(dtype), mask, GUIDANCE.to(dtype))


def latents(dtype=torch.float32):
    return torch.randn(2, 2, 32, 4, 4, generator=torch.Generator().manual_seed(3)).to(dtype)


def test_the_model_s_output_becomes_what_diffusers_gives_its_scheduler():
    transformer, prompt = tiny_transformer("sprint"), prompt_of()
    scheduler, seen = SCMScheduler(), []
    step = scheduler.step

    def watched(output, timestep, sample, **options):
        result = step(output, timestep, sample, **options)
        seen.append((output, timestep, sample, result[1]))
        return result

    scheduler.step = watched
    pipeline = SanaSprintPipeline(None, None, None, transformer, scheduler)
    pipeline.set_progress_bar_config(disable=True)
    for guidance in (4.0, 5.0):
        pipeline(
            prompt_embeds=prompt.embeds,
            prompt_attention_mask=prompt.mask,
            height=128,
            width=128,
            guidance_scale=guidance,
            use_resolution_binning=False,
            output_type="latent",
            generator=torch.Generator().manual_seed(1),
        )
        run_settings = prompt._replace(guidance=torch.full((2,), guidance))
        assert len(seen) == 2
        for output, timestep, sample, denoised in seen:
            # theirs are scaled by 0.5
            x, angle = sample / 0.5, timestep.expand(2)
            result = trigflow_velocity(transformer, x, angle, run_settings)
            torch.testing.assert_close(result, output / 0.5, atol=2e-5, rtol=1e-5)
            x0 = math.cos(float(angle[0])) * x - math.sin(float(angle[0])) * result
            torch.testing.assert_close(x0, denoised / 0.5, atol=2e-5, rtol=1e-5)
        seen.clear()


def test_the_data_s_own_velocity_is_the_derivative_of_its_trajectory():
    x0, noise = latents(torch.float64)
    angle, step = ANGLE.double(), 1e-5
    ahead, behind = (data_point(x0, noise, angle + sign * step).x for sign in (1, -1))
    point = data_point(x0, noise, angle)
    torch.testing.assert_close((ahead - behind) / (2 * step), point.velocity, atol=1e-8, rtol=1e-6)
    # The two ends: pure data and pure noise.
    torch.testing.assert_close(data_point(x0, noise, torch.zeros(2)).x, x0)
    torch.testing.assert_close(data_point(x0, noise, torch.full((2,), math.pi / 2)).x, noise, atol=1e-6, rtol=0)


def test_angles_and_guidance_are_those_of_sana_sprint_s_training():
    angles = training_angles(validation_times(20_000))
    logs = torch.log(0.5 * torch.tan(angles))
    assert float(logs.mean()) == pytest.approx(0.2, abs=0.01) and float(logs.std()) == pytest.approx(1.6, abs=0.01)
    assert float(angles.min()) > 0 and float(angles.max()) < math.pi / 2
    draw = draw_training((32, 1, 1), [(1, 0, 0, index) for index in range(3000)], 0.1)
    figures, counts = training_guidance(draw.choices).unique(return_counts=True)
    assert figures.tolist() == [4.0, 4.5, 5.0] and all(abs(count - 1000) < 100 for count in counts.tolist())


def adapted(kind, base="full", dtype=torch.float64):
    transformer = tiny_transformer("sprint").to(dtype)
    add_adapter(transformer, Method(kind, 2, targets="both"), seed=0)
    numbers = torch.Generator().manual_seed(1)
    for parameter in transformer.parameters():
        if parameter.requires_grad:
            parameter.data = (parameter.data + 0.05 * torch.randn(parameter.shape, generator=numbers)).to(dtype)
    if base == "int8":
        quantise_base(transformer)
    return transformer


ADAPTERS = [("lora", "full"), ("dora", "full"), ("lokr", "full"), ("lora", "int8")]


@pytest.mark.parametrize("kind, base", ADAPTERS)
def test_the_tangent_is_that_of_differences_along_the_trajectory(kind, base):
    transformer, prompt = adapted(kind, base), prompt_of(torch.float64)
    x0, noise = latents(torch.float64)
    point = data_point(x0, noise, ANGLE.double())
    point = point._replace(velocity=point.velocity + 0.3 * noise.flip(0))

    def pictured(step):
        """x0 a little further along the trajectory, as the sampler computes it: x - sigma velocity."""
        angle, x = point.angle + step, point.x + step * point.velocity
        total = (torch.cos(angle) + torch.sin(angle)).view(-1, 1, 1, 1)
        sigma = torch.sin(angle) / total.flatten()
        guidance = prompt.guidance * transformer.config.guidance_embeds_scale
        inputs = {"guidance": guidance, "encoder_attention_mask": prompt.mask, "return_dict": False}
        flow = transformer(x / total, prompt.embeds, sigma, **inputs)[0]
        return x / total - sigma.view(-1, 1, 1, 1) * flow

    # the library sums its linear attention in float32, whatever the model is in
    step = 1e-3
    with torch.no_grad():
        slope = (pictured(step) - pictured(-step)) / (2 * step)
    expected = torch.cos(point.angle).view(-1, 1, 1, 1) * slope
    expected_tangent = tangent(transformer, point, prompt)
    assert float((expected_tangent - expected).norm() / expected.norm()) < 1e-3
    torch.testing.assert_close(
        consistency_error(transformer, point, prompt), expected_tangent.square().mean(dim=(1, 2, 3)), atol=0, rtol=1e-6
    )


def test_at_no_ramp_the_tangent_points_from_the_model_to_the_trajectory():
    """sCM without its second part is diffusion: the error of the model's velocity remains."""
    transformer, prompt = adapted("lora"), prompt_of(torch.float64)
    point = data_point(*latents(torch.float64), ANGLE.double())
    current = trigflow_velocity(transformer, point.x, point.angle, prompt).detach()
    expected = torch.cos(point.angle).square().view(-1, 1, 1, 1) * (point.velocity - current)
    torch.testing.assert_close(tangent(transformer, point, prompt, 0.0), expected, atol=1e-5, rtol=1e-4)
    full, half = (tangent(transformer, point, prompt, ramp) for ramp in (1.0, 0.5))
    torch.testing.assert_close(half, (full + expected) / 2, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("weighted, checkpointed", [(False, True), (True, False)])
@pytest.mark.parametrize("kind, base", ADAPTERS)
def test_gradients_are_those_of_differences(kind, base, checkpointed, weighted):
    """The tangent stays as it is while the weights move, as in the papers."""
    transformer, prompt = adapted(kind, base), prompt_of(torch.float64)
    if checkpointed:
        transformer.enable_gradient_checkpointing()
    point = data_point(*latents(torch.float64), ANGLE.double())
    weight = torch.rand(2, 1, 4, 4, generator=torch.Generator().manual_seed(6)).double() if weighted else None
    consistency_loss(transformer, point, prompt, 0.7, weight).sum().backward()
    # peft's DoRA takes the norm of its rows for fixed (arXiv 2402.09353, section 4.3), so only the magnitudes are exact
    trained = [
        item
        for name, item in transformer.named_parameters()
        if item.requires_grad and (kind != "dora" or "mag" in name)
    ]
    length = torch.stack([item.grad.norm() for item in trained]).norm()
    # NVIDIA's arithmetic, in NVIDIA's scale of the latents
    change = 0.5 * tangent(transformer, point, prompt, 0.7)
    goal = change / (change.flatten(1).norm(dim=1).view(-1, 1, 1, 1) + 0.1)
    with torch.no_grad():
        goal = goal + trigflow_velocity(transformer, point.x, point.angle, prompt)

        def loss():
            error = (trigflow_velocity(transformer, point.x, point.angle, prompt) - goal).square()
            share = torch.ones_like(error) if weight is None else weight.expand_as(error)
            mean = (error * share).sum(dim=(1, 2, 3)) / share.sum(dim=(1, 2, 3))
            return (mean / (0.5 * torch.tan(point.angle))).sum()

        step, ends = 1e-2, []
        for sign in (1, -1):
            for item in trained:
                item.add_(item.grad / length, alpha=sign * step)
            ends.append(loss())
            for item in trained:
                item.sub_(item.grad / length, alpha=sign * step)
    torch.testing.assert_close((ends[0] - ends[1]) / (2 * step), length, rtol=5e-3, atol=1e-6)


def test_in_bf16_the_tangent_is_nearly_that_of_fp32():
    full, half = adapted("lora", dtype=torch.float32), adapted("lora", dtype=torch.float32)
    for parameter in half.parameters():
        if not parameter.requires_grad:
            parameter.data = parameter.data.bfloat16()
    point = data_point(*latents(), ANGLE)
    expected, result = (
        tangent(model, point, prompt_of(dtype)) for model, dtype in ((full, torch.float32), (half, torch.bfloat16))
    )
    assert result.dtype == torch.float32
    assert 0 < float((result - expected).norm() / expected.norm()) < 0.05
    loss = consistency_loss(half, point, prompt_of(torch.bfloat16), 1.0)
    loss.sum().backward()
    assert loss.dtype == torch.float32 and loss.isfinite().all()
    assert any(item.grad.any() for item in half.parameters() if item.requires_grad)


@pytest.fixture(scope="module")
def sprint(checkpoint, tmp_path_factory):
    """The bundled checkpoint with a transformer that embeds sigma and guidance and starts with its weights."""
    folder = tmp_path_factory.mktemp("sprint") / "model"
    shutil.copytree(checkpoint, folder)
    base = sana_core.load_transformer(checkpoint)
    written = json.loads((folder / "transformer/config.json").read_text())
    config = {name: base.config[name] for name in written if not name.startswith("_")}
    torch.manual_seed(0)
    model = SanaTransformer2DModel(
        **{name: item for name, item in config.items() if name[0] != "_"} | {"guidance_embeds": True}
    )
    names = {name.replace("time_embed.emb.", "time_embed."): item for name, item in base.state_dict().items()}
    model.load_state_dict(names, strict=False)
    shutil.rmtree(folder / "transformer")
    model.save_pretrained(folder / "transformer")
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Pictures, and a cache that all runs here share."""
    folder = tmp_path_factory.mktemp("training")
    write_pictures(folder / "pictures", 12, seed=4)
    return folder


@pytest.fixture
def settings(folder, tmp_path, sprint):
    def make(out="out", steps=4, warmup=8, batch=2, rate=2e-3, **options):
        phase = Phase((str(folder / "pictures"),), 64, batch=batch, steps=steps, learning_rate=rate)
        values = {"dtype": "float32", "method": Method(rank=2), "caption_dropout": 0.2, "save_every": steps, **options}
        values.setdefault("validation", Validation(every=2, share=0.3))
        loss = Loss("consistency", warmup)
        cache = str(folder / "cache")
        return check_settings(
            TrainingSettings(str(sprint), str(tmp_path / out), (phase,), cache=cache, loss=loss, **values)
        )

    return make


WAYS = {
    "data": {},
    "dora": {"method": Method("dora", rank=2, targets="both")},
    "lokr, int8, average": {"method": Method("lokr", rank=2, base="int8"), "optimizer": Optimizer(ema=0.9)},
}


@pytest.mark.parametrize("way", ["data", *(pytest.param(way, marks=pytest.mark.slow) for way in WAYS if way != "data")])
def test_a_run_that_was_stopped_goes_on_as_if_it_never_was(settings, way, one_thread):
    full, broken = (settings(out, **WAYS[way]) for out in ("whole", "broken"))
    trainer.train(full)

    report, poll = stopping_after(3)
    with pytest.raises(Stopped):
        trainer.train(broken, report, poll=poll)
    trainer.train(broken)
    assert lines_of(broken.out) == lines_of(full.out) and same(last_state(full.out), last_state(broken.out))


@pytest.mark.slow
def test_gradients_kept_or_computed_again_are_the_same(settings, one_thread):
    saved, again = (settings(out, steps=3, checkpoint_gradients=out == "again") for out in ("kept", "again"))
    trainer.train(saved)
    trainer.train(again)
    assert lines_of(saved.out) == lines_of(again.out) and same(last_state(saved.out), last_state(again.out))


@pytest.mark.slow
def test_the_held_out_error_falls_and_the_pictures_are_those_of_the_file(settings, checkpoint, tmp_path):
    look = Validation(every=40, share=0.2, prompts=("a red circle on a blue background",))
    method = Method(rank=8, targets="both")
    run_settings = settings("own", 40, 10, batch=4, method=method, optimizer=Optimizer(clip=1.0), caption_dropout=0.0)
    run_settings = replace(run_settings, validation=look)
    file = trainer.train(run_settings)
    first, last = (line["validation_loss"] for line in lines_of(run_settings.out) if "validation_loss" in line)
    assert last < 0.7 * first
    before, after = (
        np.asarray(Image.open(Path(run_settings.out) / "pictures" / f"step-{step:07d}-00.png")).astype(int)
        for step in (0, 40)
    )
    assert np.abs(after - before).mean() > 3

    # The file on the model, as the canvas opens it: a run with learning rate 0 gives the same image.
    idle = replace(run_settings.phase[0], learning_rate=0.0, steps=1)
    still = replace(run_settings, out=str(tmp_path / "still"), phase=(idle,), method=replace(method, start=str(file)))
    trainer.train(replace(still, validation=replace(look, every=1)))
    again = np.asarray(Image.open(tmp_path / "still" / "pictures" / "step-0000000-00.png"))
    assert (again == after).all()


class Pointwise(torch.nn.Module):
    """A small network of each number and the time, called as a transformer is."""

    config = SimpleNamespace(guidance_embeds=True, guidance_embeds_scale=0.1)

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        wide = [torch.nn.Linear(2, 48), torch.nn.Tanh(), torch.nn.Linear(48, 48), torch.nn.Tanh()]
        self.layers = torch.nn.Sequential(*wide, torch.nn.Linear(48, 1))

    def forward(self, x, embeds, timestep, **options):
        return (self.layers(torch.stack([x, timestep.view(-1, 1, 1, 1).expand_as(x)], dim=-1))[..., 0],)


def test_what_is_learnt_from_normal_numbers_is_known():
    """Of data that are normal (m, s^2) the trajectories, and so x0 of each of their points, have a closed form."""
    mean, std, steps = 0.8, 0.5, 600
    model, numbers = Pointwise(), torch.Generator().manual_seed(1)
    optimizer = torch.optim.Adam(model.parameters())
    prompt = Prompt(torch.zeros(8, 1, 1), torch.ones(8, 1), torch.full((8,), 4.5))

    def draw(angle):
        noise, normal = torch.randn(2, 8, 32, 4, 4, generator=numbers)
        return data_point(mean + std * normal, noise, angle)

    for step in range(steps):
        point = draw(training_angles(torch.rand(8, generator=numbers)))
        consistency_loss(model, point, prompt, min(1.0, 4 * step / steps)).mean().backward()
        optimizer.param_groups[0]["lr"] = 3e-3 * (1 - step / steps)
        optimizer.step()
        optimizer.zero_grad()
    # a model of flow matching gives the mean at nearly pure noise, and is off by all of std there
    for angle, most in ((0.5, 0.05), (1.0, 0.08), (1.5, 0.2)):
        cos, sin = math.cos(angle), math.sin(angle)
        point = draw(torch.full((8,), angle))
        with torch.no_grad():
            result = cos * point.x - sin * trigflow_velocity(model, point.x, point.angle, prompt)
        exact = mean + std * (point.x - cos * mean) / math.sqrt((cos * std) ** 2 + sin**2)
        assert float((result - exact).square().mean().sqrt()) < most


def block_of(file, first_line):
    """Return the lines of the entry of a YAML file that begins with `first_line`."""
    text = (Path(torchgen.__file__).parent / "packaged" / file).read_text()
    return text[text.index(first_line) :].partition("\n\n")[0]


def test_apples_gpu_is_refused_because_its_layers_have_no_forward_mode_derivative(settings, monkeypatch):
    """A layer with a kernel of its own for a device takes the derivative of its name, and not of its parts."""
    assert "MPS: _mps_linear" in block_of("ATen/native/native_functions.yaml", "- func: linear(")
    assert "result:" not in block_of("autograd/derivatives.yaml", "- name: linear(")
    assert "result:" in block_of("autograd/derivatives.yaml", "- name: addmm(")
    monkeypatch.setattr("sana_core.runtime.accelerator.current_accelerator", lambda: torch.device("mps"))
    with pytest.raises(
        InputError, match=r"^loss: got consistency on Apple's GPU, .* expected flow; set device to cpu$"
    ):
        trainer.train(settings())


def test_a_model_that_the_loss_is_not_for_is_refused(settings, checkpoint, sprint):
    run_settings = settings()
    with pytest.raises(InputError, match="^model: got one that is not SANA-Sprint with loss consistency, expected"):
        trainer.train(replace(run_settings, model=str(checkpoint)))
    with pytest.raises(InputError, match="^model: got a SANA-Sprint model, which this loss would undo; train the SANA"):
        trainer.train(replace(run_settings, loss=Loss()))
    assert not Path(run_settings.out).exists()


WRONG = {
    "[loss]\nkind = 'consistent'": "loss.kind: got 'consistent', expected one of flow, consistency; the nearest",
    "[loss]\nkind = 'consistency'\ntangent_warmup = -1": "loss.tangent_warmup: got -1, expected a number from 0",
    "[loss]\nkind = 'consistency'\n[method]\nkind = 'full'": "loss: got consistency with method full, expected flow",
    "[loss]\nkind = 'consistency'\n[method]\nkind = 'controlnet'": "loss: got consistency with method controlnet",
}


@pytest.mark.parametrize("text", WRONG)
def test_settings_that_contradict_each_other_are_named(tmp_path, text):
    file = tmp_path / "run.toml"
    file.write_text(f"model = 'm'\nout = 'o'\n{text}\n[[phase]]\ndata = 'pictures'\nsteps = 3\n", encoding="utf-8")
    with pytest.raises(InputError, match=f"^run.toml: {WRONG[text]}"):
        read_settings(file)


def test_a_plan_counts_the_loss(settings):
    lines = plan_lines(settings(), 8)
    assert any(line.startswith("phase 1: ") for line in lines) and lines[-1].endswith("fits a GPU of 8 GB")
