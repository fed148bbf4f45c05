"""Schedules and samplers against the schedulers of diffusers."""

import pytest
import torch
from diffusers import DPMSolverMultistepScheduler, FlowMatchEulerDiscreteScheduler

from sana_core.sampling import (
    find_sampler,
    flow_dpm_sigmas,
    flow_euler_sigmas,
    sample_flow_dpmpp_2m,
    sample_flow_euler,
)

STEPS_AND_SHIFTS = [(1, 3.0), (2, 3.0), (3, 2.5), (14, 3.0), (20, 3.0), (28, 6.0), (50, 1.5)]


def dpm_scheduler(shift):
    return DPMSolverMultistepScheduler(flow_shift=shift, use_flow_sigmas=True, prediction_type="flow_prediction")


def velocity(x, sigma):
    """A smooth field that depends on x and time, so that any wrong step shows."""
    return torch.tanh(x * (1 + sigma)) - 0.3 * torch.cos(3 * sigma) * x


def x0_model(x, sigma):
    return x - sigma * velocity(x, sigma)


def run_scheduler(scheduler, steps, x):
    scheduler.set_timesteps(steps)
    for timestep, sigma in zip(scheduler.timesteps, scheduler.sigmas[:-1], strict=True):
        x = scheduler.step(velocity(x, sigma), timestep, x, return_dict=False)[0]
    return x


@pytest.mark.parametrize("steps, shift", STEPS_AND_SHIFTS)
def test_schedules_are_those_of_diffusers(steps, shift):
    dpm = dpm_scheduler(shift)
    dpm.set_timesteps(steps)
    torch.testing.assert_close(flow_dpm_sigmas(steps, shift), dpm.sigmas, atol=1e-6, rtol=0)
    assert torch.equal((flow_dpm_sigmas(steps, shift)[:-1] * 1000).floor().long(), dpm.timesteps)
    euler = FlowMatchEulerDiscreteScheduler(shift=shift)
    euler.set_timesteps(steps)
    torch.testing.assert_close(flow_euler_sigmas(steps, shift), euler.sigmas, atol=1e-6, rtol=0)


@pytest.mark.parametrize("steps, shift", STEPS_AND_SHIFTS)
def test_samplers_are_those_of_diffusers(steps, shift):
    noise = torch.randn(2, 4, 3, 3, generator=torch.Generator().manual_seed(0))
    ours = sample_flow_dpmpp_2m(x0_model, noise, flow_dpm_sigmas(steps, shift))
    torch.testing.assert_close(ours, run_scheduler(dpm_scheduler(shift), steps, noise), atol=1e-5, rtol=0)
    ours = sample_flow_euler(x0_model, noise, flow_euler_sigmas(steps, shift))
    theirs = run_scheduler(FlowMatchEulerDiscreteScheduler(shift=shift), steps, noise)
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=0)


def test_dpmpp_2m_converges_to_the_solution_with_order_two():
    x = torch.full((1, 1, 1, 1), 0.7, dtype=torch.float64)

    def solve(steps):
        # from 0.9 to 0.1, where the field is smooth and no end is singular
        return sample_flow_dpmpp_2m(x0_model, x, torch.linspace(0.9, 0.1, steps + 1, dtype=torch.float64))

    exact = solve(4096)
    coarse, fine = (solve(steps) - exact for steps in (32, 64))
    assert 3 < (coarse / fine).item() < 6


def test_dpmpp_2m_starts_from_sigma_one_without_nan():
    noise = torch.randn(1, 4, 2, 2, generator=torch.Generator().manual_seed(0))
    assert sample_flow_dpmpp_2m(x0_model, noise, torch.tensor([1.0, 0.6, 0.3, 0.0])).isfinite().all()


def test_samplers_report_each_step_and_leave_the_noise_alone():
    noise = torch.randn(1, 4, 2, 2)
    before = noise.clone()
    for sample in (sample_flow_dpmpp_2m, sample_flow_euler):
        seen = []
        sample(x0_model, noise, torch.tensor([0.9, 0.5, 0.0]), seen.append)
        assert [state["i"] for state in seen] == [0, 1]
        assert set(seen[0]) == {"i", "x", "sigma", "denoised"}
    assert torch.equal(noise, before)


def test_a_callback_that_raises_ends_the_sampling():
    class Cancelled(BaseException):
        pass

    def cancel(state):
        raise Cancelled

    with pytest.raises(Cancelled):
        sample_flow_euler(x0_model, torch.zeros(1, 4, 2, 2), torch.tensor([0.9, 0.5, 0.0]), cancel)


def test_an_unknown_sampler_is_named():
    with pytest.raises(ValueError, match="sampler: got 'ddim', expected one of flow_dpmpp_2m"):
        find_sampler("ddim")
