"""ControlNets: they begin without effect, learn to follow, and open in diffusers, with either codebase's arithmetic."""

import copy
from dataclasses import replace
from pathlib import Path

import layouts
import nvidia
import pytest
import torch
from adapted import learn_something
from diffusers import SanaControlNetModel
from pictures import write_pictures
from setup import ROOT
from trainers import make_trainer, validation_loss

import sana_core
from sana_core.errors import InputError
from sana_core.model.controlnet import Control
from sana_core.model.reference import model_timestep
from sana_core.training import trainer
from sana_core.training.loss import flow_loss
from sana_core.training.settings import Method, Optimizer, Phase, TrainingSettings, Validation, check_settings
from sana_core.training.trained_model import check_steerable, make_controlnet
from sana_core.training.trainer import Trainer

REFERENCES = ("diffusers", "nvidia")


@pytest.fixture(params=REFERENCES)
def models(request, checkpoint):
    """The bundled transformer and a ControlNet that has learnt something, following that reference."""
    return learnt(checkpoint, request.param)


def learnt(checkpoint, reference, dtype=torch.float32):
    transformer = sana_core.load_transformer(checkpoint, dtype=dtype, reference=reference)
    return transformer, learn_something(make_controlnet(transformer, 3, dtype))


@pytest.fixture
def batch(checkpoint):
    """Latents, embeddings, mask, noise, sigma, weight, control."""
    numbers = torch.Generator().manual_seed(3)
    x0, noise, control = torch.randn(3, 2, 32, 4, 4, generator=numbers)
    embeds = torch.randn(2, 5, 64, generator=numbers)
    mask = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]])
    return x0, embeds, mask, noise, torch.tensor([0.25, 0.8]), None, control


def loss_of(transformer, batch, control=None):
    x0, embeds, mask, noise, sigma, weight, _ = batch
    return flow_loss(transformer, x0, (embeds, mask), noise, sigma, weight, control)


def steered_loss(models, batch):
    return loss_of(models[0], batch, Control(models[1], batch[-1]))


@pytest.mark.parametrize("reference", REFERENCES)
def test_at_first_it_changes_nothing_and_its_projections_alone_have_gradients(checkpoint, batch, reference):
    transformer = sana_core.load_transformer(checkpoint, reference=reference)
    controlnet = make_controlnet(transformer, 3, torch.float32)
    loss = steered_loss((transformer, controlnet), batch)
    torch.testing.assert_close(loss, loss_of(transformer, batch), atol=1e-6, rtol=0)
    loss.sum().backward()
    moved = {
        name for name, parameter in controlnet.named_parameters() if parameter.grad is not None and parameter.grad.any()
    }
    assert moved == {f"controlnet_blocks.{i}.{leaf}" for i in range(3) for leaf in ("weight", "bias")}
    trained = {name.split(".")[0] for name, parameter in controlnet.named_parameters() if parameter.requires_grad}
    assert trained == {"transformer_blocks", "input_block", "controlnet_blocks"}
    assert not any(parameter.requires_grad for parameter in transformer.parameters())


def test_the_loss_is_that_of_the_released_codebase(models, batch):
    """diffusers' two modules, and NVIDIA's forward as plain functions of NVIDIA's tensors."""
    x0, embeds, mask, noise, sigma, _, control = batch
    transformer, controlnet = models
    x = torch.lerp(x0, noise, sigma.view(-1, 1, 1, 1))
    timestep = model_timestep(transformer, 1000 * sigma)
    with torch.no_grad():
        ours = steered_loss(models, batch)
        if transformer.config.reference == "nvidia":
            bare = copy.copy(controlnet)
            bare._modules = {name: item for name, item in controlnet._modules.items() if name != "base_block"}
            tensors = layouts.nvidia(transformer, unused=False)
            nvidia_tensors = layouts.nvidia(bare, unused=False)
            tensors.update({name: item for name, item in nvidia_tensors.items() if name.startswith("controlnet.")})
            config = transformer.config
            sizes = {"heads": config.num_cross_attention_heads, "pe": (config.sample_size, config.interpolation_scale)}
            velocity = nvidia.forward(tensors, x, timestep, embeds, mask, control=control, **sizes)
        else:
            inputs = {"encoder_attention_mask": mask, "return_dict": False}
            samples = controlnet(x, embeds, timestep, control, **inputs)[0]
            velocity = transformer(x, embeds, timestep, controlnet_block_samples=samples, **inputs)[0]
    expected = (velocity - noise + x0).square().mean(dim=(1, 2, 3))
    assert (ours - loss_of(transformer, batch)).abs().min() > 1e-3
    torch.testing.assert_close(ours, expected, atol=1e-5, rtol=1e-5)


def test_training_and_sampling_compute_the_same(models, batch):
    x0, embeds, mask, noise, sigma, _, control = batch
    x = torch.lerp(x0, noise, sigma.view(-1, 1, 1, 1))
    options = {"controlnet": models[1], "control_latents": control}
    velocity = sana_core.predict_velocity(models[0], x, 1000 * sigma, embeds, mask, **options)
    expected = (velocity - noise + x0).square().mean(dim=(1, 2, 3))
    torch.testing.assert_close(steered_loss(models, batch), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("reference", REFERENCES)
def test_gradients_are_those_of_differences(checkpoint, batch, reference, checkpointed):
    transformer, controlnet = learnt(checkpoint, reference, torch.float64)
    if checkpointed:
        transformer.enable_gradient_checkpointing()
        controlnet.enable_gradient_checkpointing()
    batch = [item.double() if item is not None and item.is_floating_point() else item for item in batch]
    loss = steered_loss((transformer, controlnet), batch).sum()
    loss.backward()
    for name, parameter in controlnet.named_parameters():
        chosen = ("input_block.bias", "blocks.0.weight", "attn2.to_k.weight", "ff.conv_depth.weight")
        if not parameter.requires_grad or not name.endswith(chosen):
            continue
        # the library sums its linear attention in float32, whatever the model is in
        direction, step = parameter.grad / parameter.grad.norm(), 3e-3
        with torch.no_grad():
            ends = []
            for sign in (1, -1):
                parameter.add_(direction, alpha=sign * step)
                ends.append(steered_loss((transformer, controlnet), batch).sum())
                parameter.sub_(direction, alpha=sign * step)
        difference = (ends[0] - ends[1]) / (2 * step)
        torch.testing.assert_close(parameter.grad.norm(), difference, rtol=1e-3, atol=1e-6)


def test_a_model_that_no_controlnet_fits_is_refused(checkpoint):
    with pytest.raises(InputError, match=r"^model: got one with norms of query and key \(SANA-1.5\)"):
        check_steerable(layouts.transformer(qk_norm=True).config, 1)
    config = sana_core.load_transformer(checkpoint).config
    check_steerable(config, config.num_layers - 1)
    with pytest.raises(InputError, match="^blocks: got 5 for a model of 5 blocks, expected less than that"):
        check_steerable(config, config.num_layers)


@pytest.fixture
def settings(tmp_path, checkpoint):
    def make(count=12, steps=2, reference="auto", **options):
        data = tmp_path / "pictures"
        write_pictures(data, count, seed=4, controls=True)
        phase = Phase((str(data),), 128, batch=8, steps=steps, learning_rate=1e-3)
        values = {"dtype": "float32", "reference": reference, "checkpoint_gradients": False, **options}
        values.setdefault("validation", Validation(every=steps, share=0.15))
        run_settings = TrainingSettings(
            str(checkpoint), str(tmp_path / "out"), (phase,), method=Method("controlnet", blocks=3), **values
        )
        return check_settings(run_settings)

    return make


@pytest.mark.parametrize("reference", REFERENCES)
def test_what_is_saved_opens_in_diffusers_and_here(settings, batch, checkpoint, reference):
    run_settings = settings(reference=reference)
    folder = trainer.train(run_settings)
    assert folder.name == "controlnet"
    theirs, ours = SanaControlNetModel.from_pretrained(folder), sana_core.load_controlnet(folder)
    assert ours.config.reference == reference
    own_tensors = ours.state_dict()
    assert all(torch.equal(item, own_tensors[name]) for name, item in theirs.state_dict().items())
    assert any(item.any() for name, item in own_tensors.items() if name.startswith("input_block"))
    x0, embeds, mask, noise, sigma, _, control = batch
    transformer = sana_core.load_transformer(checkpoint, reference=reference)
    x = torch.lerp(x0, noise, sigma.view(-1, 1, 1, 1))
    velocity = sana_core.predict_velocity(transformer, x, 1000 * sigma, embeds, mask, None, ours, control)
    if reference == "diffusers":
        inputs = {"encoder_attention_mask": mask, "return_dict": False}
        with torch.no_grad():
            samples = theirs(x, embeds, 1000 * sigma, control, **inputs)[0]
            expected = transformer(x, embeds, 1000 * sigma, controlnet_block_samples=samples, **inputs)[0]
        torch.testing.assert_close(velocity, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.slow
def test_it_learns_to_follow_its_control_images(tmp_path, one_thread, monkeypatch):
    """The loss of held-out images falls far below the model's own, and below the loss with wrong silhouettes."""
    folder = write_pictures(tmp_path / "images", 80, controls=True)
    phase = Phase((folder,), 256, batch=8, steps=150, learning_rate=1e-3)
    run_settings = TrainingSettings(
        str(ROOT / "demo" / "sana-posters"),
        str(tmp_path / "run"),
        (phase,),
        dtype="float32",
        caption_dropout=0.0,
        checkpoint_gradients=False,
        method=Method("controlnet", blocks=3),
        optimizer=Optimizer(clip=1.0),
        validation=Validation(every=150, share=0.1),
    )
    learners, reports = [], []
    export = Trainer.export
    monkeypatch.setattr(Trainer, "export", lambda self, *values: (learners.append(self), export(self, *values)))
    trainer.train(run_settings, reports.append)
    first, last, best = (line["validation_loss"] for line in reports if "validation_loss" in line)
    assert best == last
    assert last < 0.75 * first
    learner = learners[-1]
    learner.prepare_data()
    (data,) = learner.data
    assert validation_loss(learner, data) == pytest.approx(last, abs=1e-4)
    controls = data.cache.controls
    other_values = data._replace(cache=data.cache._replace(controls=[*controls[1:], *controls[:1]]))
    assert validation_loss(learner, other_values) > 1.1 * last
    plain = make_trainer(
        sana_core.load_transformer(run_settings.model), learner.shift, replace(run_settings, method=Method(rank=1))
    )
    assert validation_loss(plain, data) == pytest.approx(first, abs=1e-4)


def test_a_missing_control_picture_is_named_before_anything_is_encoded(settings):
    run_settings = settings(3)
    folder = Path(run_settings.phase[0].data[0])
    (folder / "4-1-control.png").unlink()
    with pytest.raises(InputError, match="^4-1.png: has no control image, expected 4-1-control.png beside it"):
        trainer.train(run_settings)
    assert not list(Path(run_settings.out).rglob("*.safetensors"))


def test_the_validation_draws_each_prompt_with_its_control_picture(settings, checkpoint):
    """Learnt at a high rate, so that it can be seen; at first the control picture changes nothing."""
    run_settings = settings(4, 4)
    pictures = [str(Path(run_settings.phase[0].data[0]) / f"4-{number}-control.png") for number in range(3)]
    phase = replace(run_settings.phase[0], learning_rate=3e-2)
    shown = {}
    for name, prompts, control in (
        ("each", ("a red circle", "a red circle"), pictures[:2]),
        ("one", ("a red circle", "a red circle"), pictures[2:]),
    ):
        look = Validation(every=4, prompts=prompts, control=tuple(control), steps=2, guidance=3.0)
        message = replace(run_settings, out=f"{run_settings.out}-{name}", validation=look, phase=(phase,))
        trainer.train(check_settings(message), show=lambda step, drawn, name=name: shown.update({(name, step): drawn}))
    assert all(torch.equal(*pair) for pair in zip(shown["each", 0], shown["one", 0], strict=True))
    for number in range(2):
        assert (shown["each", 4][number] - shown["one", 4][number]).abs().mean() > 1e-3
