"""The scheduler that a diffusers folder was saved with: the sampler of this package that it is, and what differs."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from ..model.known_models import DEFAULTS, SPRINT
from ..runtime.text import Json, brief
from ..sampling.samplers import SAMPLERS
from .checkpoint import Checkpoint
from .files import read_json
from .kinds import CHECKPOINT_KINDS

EULER, DPM_SOLVER = "FlowMatchEulerDiscreteScheduler", "DPMSolverMultistepScheduler"
# For each class, the settings that this package computes with. Without a setting, diffusers has the same value.
SIGMAS: Json = {"use_karras_sigmas": False, "use_exponential_sigmas": False, "use_beta_sigmas": False}
SIGMAS |= {"use_dynamic_shifting": False, "num_train_timesteps": 1000}
FOLLOWED: dict[str, Json] = {
    EULER: SIGMAS | {"shift_terminal": None, "invert_sigmas": False, "stochastic_sampling": False},
    DPM_SOLVER: SIGMAS
    | {
        "algorithm_type": "dpmsolver++",
        "solver_type": "midpoint",
        "final_sigmas_type": "zero",
        "lower_order_final": True,
        "euler_at_final": False,
        "thresholding": False,
        "use_lu_lambdas": False,
        "prediction_type": "flow_prediction",
        "use_flow_sigmas": True,
    },
}


class Scheduler(NamedTuple):
    """What was found in a folder's scheduler."""

    sampler: str  # a name in SAMPLERS
    unknown: tuple[str, ...] = ()  # settings that this package does not have, as "name value"


def scheduler_file(part: Checkpoint) -> Path | None:
    """Return the scheduler's configuration in the diffusers folder of the transformer `part`, None if there is none."""
    folder = part.path.absolute().parent
    file = folder.parent / "scheduler" / "scheduler_config.json"
    return file if folder.name == CHECKPOINT_KINDS["transformer"].folder and file.exists() else None


def scheduler_of(part: Checkpoint) -> Scheduler:
    """Return the scheduler of the image transformer `part`: of its folder, or of the MODEL that was saved.

    Raises CheckpointError for a configuration that is no JSON object, ReadError where the disk refuses.
    """
    file = scheduler_file(part)
    if file is None:
        saved = part.config.get("sampler") if part.config else None
        return Scheduler(saved or DEFAULTS.sampler)
    config = read_json(file)
    name = config.get("_class_name", DPM_SOLVER)
    # SANA-Sprint is always sampled with scm.
    if (name, None) == SAMPLERS[SPRINT].scheduler:
        return Scheduler(DEFAULTS.sampler)
    if not isinstance(name, str) or name not in {row.scheduler[0] for row in SAMPLERS.values()}:
        return Scheduler(DEFAULTS.sampler, (brief(name),))
    samplers = {row.scheduler: key for key, row in SAMPLERS.items()}
    order = config.get("solver_order", 2) if name == DPM_SOLVER else None
    known_order = name != DPM_SOLVER or (type(order) is int and (name, order) in samplers)
    sampler = samplers[name, order] if known_order else DEFAULTS.sampler
    unknown = [
        f"{field} {brief(config[field])}"
        for field, value in FOLLOWED.get(name, SIGMAS).items()
        if config.get(field, value) != value
    ]
    if not known_order:
        unknown.append(f"solver_order {brief(order)}")
    # Steps of order 2 come in two types. Order 3 has such steps, too: the second and the last but one.
    if sampler == "flow_dpmpp_1":
        unknown = [setting for setting in unknown if not setting.startswith("solver_type ")]
    return Scheduler(sampler, tuple(unknown))


def scheduler_notes(part: Checkpoint) -> list[str]:
    """Return lines for the user if the scheduler of the image transformer `part` is not SANA's usual one."""
    scheduler = scheduler_of(part)
    lines = []
    if scheduler.sampler != DEFAULTS.sampler:
        lines.append(f"scheduler: saved with {scheduler.sampler}; choose that sampler, or switch model_defaults on")
    return lines + unavailable_notes(scheduler)


def unavailable_notes(scheduler: Scheduler) -> list[str]:
    """Return a line if `scheduler` has settings that this package does not have."""
    unknown = scheduler.unknown
    return [f"scheduler: {', '.join(unknown)} not available; images differ from diffusers' images"] if unknown else []
