"""Schedules and samplers against the schedulers of diffusers."""

from types import SimpleNamespace

import diffusers
import pytest
import torch
from diffusers import DPMSolverMultistepScheduler, FlowMatchEulerDiscreteScheduler, SCMScheduler

from sana_core.model.reference import DIFFUSERS, NVIDIA, RULES
from sana_core.sampling.samplers import (
    SAMPLERS,
    check_distilled,
    find_sampler,
    flow_dpm_sigmas,
    flow_euler_sigmas,
    sample_flow_dpmpp_2m,
    sample_flow_dpmpp_3m,
    sample_flow_euler,
    sample_flow_heun,
    sample_scm,
)
from sana_core.sampling.schedules import last_steps, scm_sigmas, scm_timesteps, trim_schedule

STEPS_AND_SHIFTS = [(1, 3.0), (2, 3.0), (3, 2.5), (14, 3.0), (20, 3.0), (28, 6.0), (50, 1.5)]


def dpm_scheduler(shift, order=2):
    return DPMSolverMultistepScheduler(
        flow_shift=shift, use_flow_sigmas=True, prediction_type="flow_prediction", solver_order=order
    )


def velocity(x, sigma):
    """A smooth field that depends on x and time, so that any wrong step shows."""
    sigma = torch.as_tensor(sigma)
    return torch.tanh(x * (1 + sigma)) - 0.3 * torch.cos(3 * sigma) * x


def x0_model(x, sigma):
    return x - sigma * velocity(x, sigma)


def library_scheduler(name, shift):
    """The diffusers scheduler of a sampler."""
    kind, order = SAMPLERS[name].scheduler
    return dpm_scheduler(shift, order) if order else getattr(diffusers, kind)(shift=shift)


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


@pytest.mark.parametrize("shift", [1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0])
def test_whole_timesteps_of_every_schedule_are_those_of_diffusers_and_of_nvidia(shift):
    """0.999 k / n is often a whole timestep, where the last bit decides the rounding."""
    for steps in range(1, 101):
        dpm, euler = dpm_scheduler(shift), FlowMatchEulerDiscreteScheduler(shift=shift)
        dpm.set_timesteps(steps)
        euler.set_timesteps(steps)
        assert torch.equal((flow_dpm_sigmas(steps, shift)[:-1] * 1000).floor().long(), dpm.timesteps), steps
        # NVIDIA's code rounds the timesteps of diffusers' Euler.
        assert torch.equal((flow_euler_sigmas(steps, shift)[:-1] * 1000).floor(), euler.timesteps.floor()), steps
        # get_time_steps in NVIDIA's dpm_solver.py, from T = 1 to 1 / 1000
        betas = 1.0 - torch.linspace(1.0, 0.001, steps + 1)
        theirs = (shift * betas / (1 + (shift - 1) * betas)).flip(dims=[0])
        assert torch.equal(SAMPLERS["flow_dpmpp_2m"].sigmas(steps, shift, RULES[NVIDIA]), theirs), steps


@pytest.mark.parametrize("steps", [1, 2, 3, 4, 5, 14, 15, 20, 40])
@pytest.mark.parametrize("name", [name for name in SAMPLERS if name not in ("scm", "flow_dmd")])
def test_samplers_are_those_of_diffusers(steps, name):
    noise = torch.randn(2, 4, 3, 3, generator=torch.Generator().manual_seed(1))
    for shift in (1.5, 3.0, 6.0):
        scheduler = library_scheduler(name, shift)
        ours = SAMPLERS[name].sample(x0_model, noise, SAMPLERS[name].sigmas(steps, shift))
        torch.testing.assert_close(ours, run_scheduler(scheduler, steps, noise), atol=2e-5, rtol=0)


def test_the_angles_of_scm_are_the_printed_ones():
    assert scm_timesteps(2).tolist() == [1.5708, 1.3, 0]
    torch.testing.assert_close(scm_timesteps(4), torch.linspace(1.5708, 0, 5, dtype=torch.float64))


@pytest.mark.parametrize("options", [{}, {"max_timestep": 1.5658, "intermediate_timestep": 1.0}])
@pytest.mark.parametrize("steps", [1, 2, 4, 8])
def test_scm_is_that_of_diffusers(steps, options):
    """diffusers samples in TrigFlow's x, which is sigma_data (sin t + cos t) times the x of the flow."""
    data = 0.5
    generator = torch.Generator().manual_seed(5)
    start = torch.randn(2, 4, 3, 3, generator=generator)
    scheduler = SCMScheduler(prediction_type="trigflow", sigma_data=data)
    angles = scm_timesteps(steps, **options)
    scheduler.set_timesteps(steps, angles.tolist(), max_timesteps=None, intermediate_timesteps=None)
    x = start * data
    fresh = torch.Generator().set_state(generator.get_state())
    noise = (torch.randn(start.shape, generator=fresh) for _ in range(steps))
    for angle in scheduler.timesteps[:-1]:
        scale = torch.sin(angle) + torch.cos(angle)
        sigma = torch.sin(angle) / scale
        flow_x = x / data / scale
        # TrigFlow's F of the flow velocity
        length = (sigma**2 + (1 - sigma) ** 2).sqrt()
        v = velocity(flow_x, sigma)
        f = ((1 - 2 * sigma) * flow_x + (1 - 2 * sigma + 2 * sigma**2) * v) / length * data
        x, denoised = scheduler.step(f, angle, x, generator=generator, return_dict=False)
    sigmas = scm_sigmas(steps, **options)
    # both begin with the noise itself
    x0 = sample_scm(x0_model, start / (torch.sin(angles[0]) + torch.cos(angles[0])).float(), sigmas, noise=noise)
    torch.testing.assert_close(x0, denoised / data, atol=2e-5, rtol=0)


@pytest.mark.parametrize("name", SAMPLERS)
def test_each_sampler_gets_what_is_its_own(name):
    """scm draws its noise from the batch's streams, and NVIDIA's third order falls at the end of long schedules too."""
    noise, x = iter(()), torch.randn(1, 4, 2, 2, generator=torch.Generator().manual_seed(4))
    flow, sigmas = SAMPLERS[name], SAMPLERS[name].sigmas(20, 3.0)
    inputs = {reference: flow.options(RULES[reference], noise) for reference in (NVIDIA, DIFFUSERS)}
    if name in ("scm", "flow_dmd"):
        assert all(more == {"noise": noise} for more in inputs.values())
        return
    nvidia, diffusers = (flow.sample(x0_model, x, sigmas, **inputs[reference]) for reference in (NVIDIA, DIFFUSERS))
    assert torch.equal(nvidia, diffusers) == (name != "flow_dpmpp_3m")


@pytest.mark.parametrize("sample", [sample_flow_euler, sample_flow_heun, sample_flow_dpmpp_2m, sample_flow_dpmpp_3m])
@pytest.mark.parametrize("steps, cut", [(20, 1), (20, 5), (20, 18), (10, 6)])
def test_the_first_part_of_a_schedule_draws_what_all_of_it_draws_there(sample, steps, cut):
    """As SplitSigmas has it: only a schedule that ends at 0 lowers the order at its end."""
    x, sigmas, seen = torch.randn(1, 4, 2, 2), flow_dpm_sigmas(steps, 3.0), []
    sample(x0_model, x, sigmas, lambda state: seen.append(state["x"]))
    assert torch.equal(sample(x0_model, x, sigmas[: cut + 1]), seen[cut])


def test_scm_without_noise_of_its_own_takes_torch_s():
    torch.manual_seed(3)
    start = torch.randn(1, 4, 2, 2)
    default_noise = sample_scm(x0_model, start, scm_sigmas(4))
    assert (
        default_noise.isfinite().all()
        and (default_noise - sample_scm(x0_model, start, scm_sigmas(4))).abs().max() > 1e-3
    )


def test_a_consistency_model_needs_one_step_of_scm():
    """For the exact solution of the flow as the model, which sCM approximates, SCM's x0 is that solution."""
    x = torch.randn(1, 4, 2, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))

    def solution(x, sigma):
        return sample_flow_dpmpp_2m(x0_model, x, sigma * torch.linspace(1, 0, 2001, dtype=torch.float64))

    one = sample_scm(solution, x, torch.tensor([0.9, 0.0], dtype=torch.float64))
    many = sample_flow_euler(x0_model, x, torch.linspace(0.9, 0, 8001, dtype=torch.float64))
    torch.testing.assert_close(one, many, atol=2e-3, rtol=0)


def test_img2img_starts_later():
    sigmas = flow_dpm_sigmas(40, 3.0)
    assert torch.equal(trim_schedule(lambda steps: flow_dpm_sigmas(steps, 3.0), 20, 0.5), sigmas[-21:])
    assert torch.equal(trim_schedule(lambda steps: flow_dpm_sigmas(steps, 3.0), 40, 1.0), sigmas)
    # 20 of 66.67 steps: core's BasicScheduler rounds down
    assert torch.equal(
        trim_schedule(lambda steps: flow_dpm_sigmas(steps, 3.0), 20, 0.3), flow_dpm_sigmas(66, 3.0)[-21:]
    )
    assert len(trim_schedule(lambda steps: flow_dpm_sigmas(steps, 3.0), 20, 0)) == 0
    assert len(trim_schedule(lambda steps: flow_dpm_sigmas(steps, 3.0), 20, 0.001)) == 21
    for steps, strength, remaining in ((2, 1.0, 2), (2, 0.6, 2), (2, 0.5, 1), (4, 0.6, 3), (4, 0.1, 1), (4, 0.0, -1)):
        assert len(last_steps(scm_sigmas(steps), strength)) == remaining + 1


def test_samplers_report_each_step_and_leave_the_noise_alone():
    noise = torch.randn(1, 4, 2, 2)
    before = noise.clone()
    for flow in SAMPLERS.values():
        seen = []
        flow.sample(x0_model, noise, torch.tensor([0.9, 0.5, 0.0]), seen.append)
        assert [state["i"] for state in seen] == [0, 1]
        assert set(seen[0]) == {"i", "x", "sigma", "denoised"}
        for state in seen:
            assert torch.equal(state["denoised"], x0_model(state["x"], state["sigma"]))
    assert torch.equal(noise, before)


@pytest.mark.parametrize("name", SAMPLERS)
def test_a_callback_that_raises_ends_the_sampling(name):
    class Cancelled(BaseException):
        pass

    def cancel(state):
        raise Cancelled

    with pytest.raises(Cancelled):
        SAMPLERS[name].sample(x0_model, torch.zeros(1, 4, 2, 2), torch.tensor([0.9, 0.5, 0.0]), cancel)


BAD_SIGMAS = [[0.0, 0.5, 1.0], [0.9, 0.9, 0.0], [0.9, 0.5, 0.6, 0.0], [14.6, 1.0, 0.0], [0.5], [], [0.5, -0.1]]


@pytest.mark.parametrize("sigmas", [*BAD_SIGMAS, [float("nan"), 0.5, 0.0]])
@pytest.mark.parametrize("name", SAMPLERS)
def test_sigmas_that_do_not_descend_are_named(name, sigmas):
    with pytest.raises(
        ValueError, match=r"^sigmas: got \[.*expected at least two numbers that fall .*; use SANA Sched"
    ):
        SAMPLERS[name].sample(x0_model, torch.zeros(1, 4, 2, 2), torch.tensor(sigmas))


@pytest.mark.parametrize("steps", [0, -1, 1001, 2.5, float("nan")])
@pytest.mark.parametrize("name", SAMPLERS)
def test_steps_that_are_none_are_named(name, steps):
    with pytest.raises(ValueError, match=f"^steps: got {steps}, expected a whole number from 1 to 1000$"):
        SAMPLERS[name].sigmas(steps, 3.0)


@pytest.mark.parametrize(
    "angles, field",
    [((0.0, 1.3), "max"), ((1.6, 1.3), "max"), ((1.3, 1.3), "intermediate"), ((1.3, 0.0), "intermediate")],
)
def test_angles_out_of_range_are_named(angles, field):
    with pytest.raises(ValueError, match=f"^{field}_timestep: got "):
        scm_timesteps(2, *angles)


def test_the_most_steps_and_the_ends_of_every_range_are_taken():
    """1000 timesteps were trained; a schedule of all of them, from pure noise or from none, is one."""
    assert len(flow_dpm_sigmas(1000, 3.0)) == 1001
    assert len(trim_schedule(lambda steps: flow_dpm_sigmas(steps, 3.0), 1000, 1)) == 1001
    assert len(last_steps(scm_sigmas(4), 1)) == 5
    # any angle up to pure noise may begin, and any before the first follow
    torch.testing.assert_close(scm_timesteps(3, 0.3), torch.linspace(0.3, 0, 4, dtype=torch.float64))
    assert scm_timesteps(2, 0.9, 0.1).tolist() == [0.9, 0.1, 0]
    for steps in (1, 3, 4):
        # The third argument has a meaning for two steps only, so its value is not checked here.
        assert len(scm_timesteps(steps, 1.0, 1.3)) == steps + 1
    x = torch.randn(1, 4, 2, 2)
    for flow in SAMPLERS.values():
        assert flow.sample(x0_model, x, torch.tensor([1.0, 0.0])).isfinite().all()


def test_scm_begins_with_pure_noise_and_no_more():
    """1.57080 is larger than pi / 2, so sin t / (sin t + cos t) would exceed 1."""
    assert scm_sigmas(2)[0] == 1 and scm_sigmas(4, 1.5)[0] < 1


def test_denoise_and_strength_out_of_range_are_named():
    for value in (-0.1, 1.1, float("nan")):
        with pytest.raises(ValueError, match="^denoise: got "):
            trim_schedule(lambda steps: flow_dpm_sigmas(steps, 3.0), 20, value)
        with pytest.raises(ValueError, match="^strength: got "):
            last_steps(scm_sigmas(2), value)


@pytest.mark.parametrize("name", [name for name in SAMPLERS if name != "flow_dmd"])
def test_a_sampler_has_whole_timesteps_where_its_scheduler_in_diffusers_has(name):
    scheduler = SCMScheduler() if name == "scm" else library_scheduler(name, 3.0)
    scheduler.set_timesteps(4, **({"intermediate_timesteps": None} if name == "scm" else {}))
    assert SAMPLERS[name].whole_timesteps != scheduler.timesteps.is_floating_point()


def test_an_unknown_sampler_is_named():
    with pytest.raises(ValueError, match="sampler: got 'ddim', expected one of flow_dpmpp_2m"):
        find_sampler("ddim")


IMAGE = {
    "in_channels": 32,
    "out_channels": 32,
    "patch_size": 1,
    "num_attention_heads": 70,
    "attention_head_dim": 32,
    "num_layers": 20,
    "qk_norm": None,
}
VIDEO = {"guidance_embeds": False, "num_attention_heads": 20, "num_layers": 20}
VIDEO2 = VIDEO | {"patch_size": (1, 1, 1), "attention_head_dim": 128, "in_channels": 128, "group_layers": 8}
MODELS = {
    "image": SimpleNamespace(**IMAGE, guidance_embeds=False),
    "sprint": SimpleNamespace(**IMAGE, guidance_embeds=True),
    "video": SimpleNamespace(**VIDEO, patch_size=(1, 2, 2), attention_head_dim=112, in_channels=16),
    "video 2.0": SimpleNamespace(**VIDEO2),
    "preview": SimpleNamespace(**VIDEO2, sampler="flow_dmd"),
}


@pytest.mark.parametrize("name", SAMPLERS)
@pytest.mark.parametrize("model", MODELS)
def test_samplers_of_distilled_models_fit_these_models_alone(name, model):
    """SANA-Sprint takes scm alone, and the preview of SANA-Video 2.0 flow_dmd."""
    config = MODELS[model]
    allowed = {"sprint": {"scm"}, "preview": {"flow_dmd"}}
    if name in allowed.get(model, SAMPLERS.keys() - {"scm", "flow_dmd"}):
        check_distilled(config, sampler=name)
    else:
        with pytest.raises(ValueError, match=f"^sampler: got {name} for .*, expected "):
            check_distilled(config, sampler=name)
