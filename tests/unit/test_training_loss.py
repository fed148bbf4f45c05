"""The loss against diffusers' parts of it, and its gradients against differences."""

import math

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from diffusers.training_utils import compute_density_for_timestep_sampling

import sana_core
from sana_core.training.loss import (
    draw_training,
    drop_captions,
    flow_loss,
    logit_normal,
    training_sigmas,
    validation_times,
)
from sana_core.training.settings import Loss


@pytest.fixture(scope="module")
def transformer(checkpoint):
    return sana_core.load_transformer(checkpoint)


@pytest.fixture
def batch(transformer):
    numbers = torch.Generator().manual_seed(3)
    x0, noise = torch.randn(2, 2, 32, 4, 4, generator=numbers)
    embeds = torch.randn(2, 5, transformer.config.caption_channels, generator=numbers)
    return x0, embeds, torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]]), noise, torch.tensor([0.25, 0.8])


def test_the_model_sees_what_diffusers_scheduler_makes_of_noise_and_latents(transformer, batch, monkeypatch):
    x0, embeds, mask, noise, sigma = batch
    seen = {}

    def forward(x, embeds, timestep, **options):
        seen.update(x=x, timestep=timestep)
        return (noise - x0,)

    monkeypatch.setattr(transformer, "forward", forward)
    # its velocity is the target, so nothing is left
    assert not flow_loss(transformer, x0, (embeds, mask), noise, sigma).any()
    scheduler = FlowMatchEulerDiscreteScheduler()
    for k in range(2):
        index = torch.tensor([round(1000 * (1 - float(sigma[k])))])
        timestep = scheduler.timesteps[index]
        expected = scheduler.scale_noise(x0[k : k + 1], timestep, noise[k : k + 1])
        torch.testing.assert_close(seen["x"][k : k + 1], expected, atol=1e-5, rtol=0)
        assert abs(float(seen["timestep"][k]) - float(timestep)) < 1.5


def test_a_model_that_knows_nothing_has_one_and_the_variance_of_the_latents(transformer, batch, monkeypatch):
    _, embeds, mask, _, sigma = batch
    numbers = torch.Generator().manual_seed(5)
    x0, noise = 1.7 * torch.randn(2, 32, 16, 16, generator=numbers), torch.randn(2, 32, 16, 16, generator=numbers)
    monkeypatch.setattr(transformer, "forward", lambda x, *options, **more: (torch.zeros_like(x),))
    loss = flow_loss(transformer, x0, (embeds, mask), noise, sigma)
    assert float(loss.mean()) == pytest.approx(1 + 1.7**2, rel=0.02)


def test_times_are_diffusers_logit_normal(transformer):
    torch.manual_seed(0)
    theirs = compute_density_for_timestep_sampling("logit_normal", 200_000, 0.0, 1.0)
    ours = logit_normal(validation_times(200_000))
    shares = torch.linspace(0.01, 0.99, 25)
    torch.testing.assert_close(ours.float().quantile(shares), theirs.float().quantile(shares), atol=5e-3, rtol=0)


@pytest.mark.parametrize("loss", [Loss(logit_mean=-0.4, logit_std=1.6), Loss(times="mode"), Loss(times="uniform")])
def test_other_times_are_diffusers(loss):
    torch.manual_seed(0)
    parameters = loss.logit_mean, loss.logit_std, loss.mode_scale
    theirs = compute_density_for_timestep_sampling(loss.times, 200_000, *parameters)
    ours = training_sigmas(validation_times(200_000), 1.0, loss)
    shares = torch.linspace(0.01, 0.99, 25)
    torch.testing.assert_close(ours.float().quantile(shares), theirs.float().quantile(shares), atol=5e-3, rtol=0)


def test_sigmas_are_shifted_as_the_scheduler_shifts_them():
    times = validation_times(50)
    scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0)
    unshifted = logit_normal(times)
    # The grid of the scheduler.
    grid = torch.arange(1, 1001, dtype=torch.float64).flip(0) / 1000
    nearest = (unshifted[:, None] - grid).abs().argmin(1)
    torch.testing.assert_close(
        training_sigmas(times, 3.0).float(), scheduler.sigmas[nearest], atol=2e-3, rtol=0, check_dtype=False
    )


def test_a_mask_leaves_out_what_it_covers(transformer, batch):
    x0, embeds, mask, noise, sigma = batch
    weight = torch.ones(2, 1, 4, 4)
    torch.testing.assert_close(
        flow_loss(transformer, x0, (embeds, mask), noise, sigma, weight),
        flow_loss(transformer, x0, (embeds, mask), noise, sigma),
    )
    weight[:, :, :2] = 0
    covered = flow_loss(transformer, x0, (embeds, mask), noise, sigma, weight)
    predicted = (torch.lerp(x0, noise, sigma.view(-1, 1, 1, 1)), embeds, 1000 * sigma)
    velocity = transformer(*predicted, encoder_attention_mask=mask, return_dict=False)[0]
    expected = (velocity - noise + x0)[:, :, 2:].square().mean(dim=(1, 2, 3))
    torch.testing.assert_close(covered, expected)


def test_gradients_are_those_of_differences(checkpoint, batch):
    transformer = sana_core.load_transformer(checkpoint, dtype=torch.float64)
    x0, embeds, mask, noise, sigma = (value.double() if value.is_floating_point() else value for value in batch)
    weight = torch.rand(2, 1, 4, 4, dtype=torch.float64)
    bias = transformer.proj_out.bias.detach()[:3].requires_grad_()

    def loss(first):
        flat_weights = torch.cat([first, transformer.proj_out.bias.detach()[3:]])
        parameters = {"proj_out.bias": flat_weights}

        class Called(torch.nn.Module):
            config, dtype = transformer.config, transformer.dtype

            def forward(self, *values, **named):
                return torch.func.functional_call(transformer, parameters, values, named)

        return flow_loss(Called(), x0, (embeds, mask), noise, sigma, weight)

    assert torch.autograd.gradcheck(loss, (bias,))


def test_random_numbers_depend_on_the_picture_alone():
    together = draw_training((32, 2, 3), [(1, 0, 0, 7), (1, 0, 0, 8)], 0.5)
    alone = draw_training((32, 2, 3), [(1, 0, 0, 8)], 0.5)
    assert torch.equal(together.noise[1], alone.noise[0]) and together.times[1] == alone.times[0]
    other = draw_training((32, 2, 3), [(1, 0, 1, 8)], 0.5)
    assert not torch.equal(other.noise, alone.noise)
    many = draw_training((32, 1, 1), [(1, 0, 0, index) for index in range(4000)], 0.1)
    assert float(many.dropped.float().mean()) == pytest.approx(0.1, abs=0.02)
    assert float(many.noise.std()) == pytest.approx(1, abs=0.01)
    assert float(many.times.mean()) == pytest.approx(0.5, abs=4 / math.sqrt(12 * 4000))


@pytest.mark.parametrize("shared", [True, False])
def test_a_dropped_caption_gives_way_to_the_empty_prompt_as_it_is_drawn_with(shared):
    embeds, mask = torch.ones(2, 3, 4), torch.tensor([[1, 1, 0], [1, 1, 1]])
    empty = {"embeds": torch.zeros(300, 4), "mask": torch.tensor([1] + [0] * 299, dtype=torch.uint8)}
    learnt, masked = drop_captions(embeds, mask, torch.tensor([True, False]), empty, shared)
    assert learnt.mean(dim=(1, 2)).tolist() == [0.0, 1.0]
    assert masked.tolist() == [[1, 1, 0] if shared else [1, 0, 0], [1, 1, 1]] and masked.dtype == mask.dtype
    assert mask.tolist() == [[1, 1, 0], [1, 1, 1]]
