"""From noise to latents: schedules of sigmas, samplers, guidance, and masks."""

from .samplers import (
    sample_flow_dpmpp_1,
    sample_flow_dpmpp_2m,
    sample_flow_dpmpp_3m,
    sample_flow_euler,
    sample_flow_heun,
    sample_scm,
)
from .schedules import flow_dpm_sigmas, flow_euler_sigmas, scm_sigmas, shift_sigmas

__all__ = [
    "flow_dpm_sigmas",
    "flow_euler_sigmas",
    "sample_flow_dpmpp_1",
    "sample_flow_dpmpp_2m",
    "sample_flow_dpmpp_3m",
    "sample_flow_euler",
    "sample_flow_heun",
    "sample_scm",
    "scm_sigmas",
    "shift_sigmas",
]
