"""What a checkpoint determines about generation: sampler, shift, scale of latents, prompts, and notes for the user.

Templates and errors take the names, sizes and URLs of the released files from here.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import torch

from ..errors import CheckpointError
from ..model.known_models import (
    DC_AE_SCALE,
    DEFAULT_RESOLUTION,
    VIDEOS,
    ImageModel,
    VideoModel,
    image_model,
    released_shift,
)
from ..model.reference import AUTO, DIFFUSERS, DIFFUSERS_VIDEO, NVIDIA, READINGS, RULES
from ..runtime.checks import check_name
from ..runtime.text import Json, brief, shown
from ..sampling.samplers import DISTILLED, SCHEDULERS
from .checkpoint import TRANSFORMER_KINDS, Checkpoint, find_part
from .configs import architecture
from .files import REDOWNLOAD
from .headers import PICKLED, SUFFIXES, map_file, read_file, read_tensors
from .schemas import SHIFT_RANGE, number

HOST = "https://huggingface.co"


class Download(NamedTuple):
    """A file of `gigabytes` (None: not known) for `folder` in models, at `url`, under another name there."""

    folder: str
    gigabytes: float | None
    url: str


def released_transformer(repository: str, gigabytes: float, variant: str = "") -> Download:
    path = f"transformer/diffusion_pytorch_model{variant}.safetensors"
    return Download("diffusion_models", gigabytes, f"{HOST}/Efficient-Large-Model/{repository}/resolve/main/{path}")


# sizes from the repositories' listings; diffusers writes bf16 and fp16 variants beside fp32
DOWNLOADS = {
    "Sana_600M_1024px.safetensors": released_transformer("Sana_600M_1024px_diffusers", 1.2, ".fp16"),
    "Sana_1600M_1024px_BF16.safetensors": released_transformer("Sana_1600M_1024px_BF16_diffusers", 3.2, ".bf16"),
    "Sana_1600M_2Kpx_BF16.safetensors": released_transformer("Sana_1600M_2Kpx_BF16_diffusers", 3.2, ".bf16"),
    "Sana_1600M_4Kpx_BF16.safetensors": released_transformer("Sana_1600M_4Kpx_BF16_diffusers", 3.2, ".bf16"),
    "Sana_Sprint_1.6B_1024px.safetensors": released_transformer("Sana_Sprint_1.6B_1024px_diffusers", 3.2),
    "gemma_2_2b_it_elm_bf16.safetensors": Download(
        "text_encoders",
        5.2,
        f"{HOST}/Comfy-Org/PixelDiT/resolve/main/text_encoders/gemma_2_2b_it_elm_bf16.safetensors",
    ),
    "dc-ae-f32c32-sana-1.1.safetensors": Download(
        "vae",
        1.25,
        f"{HOST}/mit-han-lab/dc-ae-f32c32-sana-1.1-diffusers/resolve/main/diffusion_pytorch_model.safetensors",
    ),
    "Sana_600M_1024px_ControlNet_HED.pth": Download(
        "controlnet",
        None,
        f"{HOST}/Efficient-Large-Model/Sana_600M_1024px_ControlNet_HED/resolve/main/checkpoints/"
        "Sana_600M_1024px_ControlNet_HED.pth",
    ),
    # whole folders
    "SANA-Video_2B_480p_diffusers": Download(
        "diffusers", None, f"{HOST}/Efficient-Large-Model/SANA-Video_2B_480p_diffusers"
    ),
    "SANA-Video_2B_720p_diffusers": Download(
        "diffusers", None, f"{HOST}/Efficient-Large-Model/SANA-Video_2B_720p_diffusers"
    ),
    "VIBE-Image-Edit": Download("diffusers", None, f"{HOST}/iitolstykh/VIBE-Image-Edit"),
}


GEMMA_FILE = "gemma_2_2b_it_elm_bf16.safetensors"
# Names in the lists of ComfyUI_ExtraModels and its fork: a repository, and the file that takes its place.
REPOSITORIES = {
    "Efficient-Large-Model/gemma-2-2b-it": GEMMA_FILE,
    "google/gemma-2-2b-it": GEMMA_FILE,
    "unsloth/gemma-2-2b-it-bnb-4bit": GEMMA_FILE,
    "mit-han-lab/dc-ae-f32c32-sana-1.1-diffusers": "dc-ae-f32c32-sana-1.1.safetensors",
    "mit-han-lab/dc-ae-f32c32-sana-1.0-diffusers": "dc-ae-f32c32-sana-1.0.safetensors",
    "Efficient-Large-Model/Sana_1600M_1024px": "Sana_1600M_1024px_BF16.safetensors",
}
# The .pth in a repository has the repository's name, with these exceptions.
ORIGINALS = {f"Sana_600M_{pixels}px": f"Sana_600M_{pixels}px_MultiLing" for pixels in (512, 1024)}


def file_names(name: str) -> list[str]:
    """Return the names under which the file that a workflow calls `name` may be stored, the best first.

    `name` is a file's, or a repository's from which ComfyUI_ExtraModels downloads. The repository's own file comes
    before a file that takes its place.
    """
    owner, _, repository = name.partition("/")
    is_file = name.lower().endswith(SUFFIXES)
    if is_file or (name not in REPOSITORIES and owner != "Efficient-Large-Model"):
        return [name]
    stems = dict.fromkeys((ORIGINALS.get(repository, repository), repository))
    names = [f"{stem}{suffix}" for stem in stems for suffix in (".pth", ".safetensors")]
    return [*names, *([REPOSITORIES[name]] if name in REPOSITORIES else [])]


def where_to_get(name: str) -> str:
    """Return the remedy for a missing file or folder: for a released one its size and link, or the download command."""
    if name not in DOWNLOADS:
        return "put it there and refresh"
    released = DOWNLOADS[name]
    if released.folder == "diffusers":
        return f"run {download_command(name)} in ComfyUI's folder and refresh"
    size = "" if released.gigabytes is None else f" ({released.gigabytes} GB)"
    return f"get it{size} from {released.url}, save it there under this name and refresh"


def download_command(folder: str) -> str:
    """Return the command line that downloads a released folder, to be run in ComfyUI's folder.

    The command hf is not on the PATH of ComfyUI's portable version.
    """
    repository = DOWNLOADS[folder].url.removeprefix(f"{HOST}/")
    return f"python -m huggingface_hub.cli.hf download {repository} --local-dir models/diffusers/{folder}"


EULER, DPM_SOLVER = "FlowMatchEulerDiscreteScheduler", "DPMSolverMultistepScheduler"
# For each class, the settings that this package computes with. All other settings of the class change no image.
SIGMAS: Json = {"use_karras_sigmas": False, "use_exponential_sigmas": False, "use_beta_sigmas": False}
FOLLOWED: dict[str, Json] = {
    EULER: SIGMAS
    | {
        "num_train_timesteps": 1000,
        "use_dynamic_shifting": False,
        "shift_terminal": None,
        "invert_sigmas": False,
        "stochastic_sampling": False,
    },
    "FlowMatchHeunDiscreteScheduler": {"num_train_timesteps": 1000},
    "SCMScheduler": {"prediction_type": "trigflow"},
    DPM_SOLVER: SIGMAS
    | {
        "num_train_timesteps": 1000,
        "algorithm_type": "dpmsolver++",
        "solver_type": "midpoint",
        "final_sigmas_type": "zero",
        "lower_order_final": True,
        "thresholding": False,
        "use_lu_lambdas": False,
        "prediction_type": "flow_prediction",
        "use_flow_sigmas": True,
    },
}
# The values in diffusers of settings that a configuration does not have. All others have the value in FOLLOWED.
ABSENT: dict[str, Json] = {DPM_SOLVER: {"prediction_type": "epsilon", "use_flow_sigmas": False}}
# Settings without effect on single samplers. DPM-Solver++ lowers its order before sigma 0 in any case.
IDLE = {"flow_dpmpp_1": ("solver_type", "lower_order_final"), "flow_dpmpp_2m": ("lower_order_final",)}
# The field of the shift in the configuration of each scheduler class.
SHIFT_FIELDS = {
    DPM_SOLVER: "flow_shift",
    EULER: "shift",
    "FlowMatchHeunDiscreteScheduler": "shift",
    "UniPCMultistepScheduler": "flow_shift",
}
BASE_NAME = re.compile(r"gemma[-_. ]?2[-_. ]2b", re.IGNORECASE)
TUNED_NAME = re.compile(r"(?<![a-z])(it|instruct|elm)(?![a-z])", re.IGNORECASE)
# The parts of a path that can name a model: in a cache of the hub, the repository is three levels above the file.
HUB_PARTS = 4
LOWER_CASE = "prompts: read in lower case, and marks like --ar 16:9 are read as text, as in diffusers"


class Scheduler(NamedTuple):
    """The scheduler of a folder or of a saved MODEL."""

    # A name in SAMPLERS.
    sampler: str
    # Settings that this package does not have, as "name value".
    unknown: tuple[str, ...] = ()

    @property
    def notes(self) -> list[str]:
        """A line for the user if there are settings that this package does not have."""
        settings = ", ".join(self.unknown)
        return [f"scheduler: {settings} not available; images differ from diffusers' images"] if settings else []


def record_of(part: Checkpoint) -> ImageModel | VideoModel:
    """Return the record of the transformer `part`."""
    return VIDEOS[part.variant] if part.is_video else image_model(architecture(part.headers))


def scheduler_of(part: Checkpoint) -> Scheduler:
    """Return the scheduler of the transformer `part`: of its folder, of the MODEL that was saved, or of its authors."""
    config, model = part.scheduler_config, record_of(part)
    default = model.defaults.sampler
    if config is None:
        return Scheduler(default if model.fixed else saved_field(part, "sampler") or default)
    name = config.get("_class_name", DPM_SOLVER)
    # A distilled model is always sampled with its sampler, and no other model with that sampler.
    fitting = {
        order: sampler
        for (scheduler, order), sampler in SCHEDULERS.items()
        if scheduler == name and (sampler == default if model.fixed else sampler not in DISTILLED)
    }
    if not fitting:
        return Scheduler(default, (brief(name),))
    order = config.get("solver_order", 2) if None not in fitting else None
    # 2.0 == 2 and True == 1 in Python, but diffusers has no such orders.
    is_known = type(order) in (int, type(None)) and order in fitting
    sampler = fitting[order] if is_known else default
    followed = {field: value for field, value in FOLLOWED.get(name, {}).items() if field not in IDLE.get(sampler, ())}
    stated = followed | ABSENT.get(name, {}) | config
    unknown = [f"{field} {brief(stated[field])}" for field, value in followed.items() if stated[field] != value]
    if not is_known:
        unknown.append(f"solver_order {brief(order)}")
    return Scheduler(sampler, tuple(unknown))


def shift_of(checkpoint: Checkpoint, resolution: int | None = None, reference: str = AUTO) -> float:
    """Return the shift of the schedule for the transformer in `checkpoint`, a checkpoint or its transformer.

    The order is: `resolution` (pixels) if given; the released model's shift, if `reference` changes it; the folder's
    scheduler or the saved MODEL; the released model's shift.
    """
    part = find_part(checkpoint, *TRANSFORMER_KINDS)
    pixels = resolution or part.resolution or DEFAULT_RESOLUTION
    shift = released_shift(record_of(part), pixels, part.reference)
    released = shift if reference == AUTO else released_shift(record_of(part), pixels, reference)
    if resolution is not None or released != shift:
        return released
    config = part.scheduler_config
    if config is None:
        stated = saved_field(part, "flow_shift")
    else:
        field = SHIFT_FIELDS.get(str(config.get("_class_name")))
        # diffusers ignores the other field of the two, and has the default 1.
        stated = config.get("flow_shift", config.get("shift")) if field is None else config.get(field, 1.0)
        if stated is not None and not number(*SHIFT_RANGE)(stated):
            raise CheckpointError(
                f"{shown(part.scheduler_file or part.path)}: its shift is {brief(stated)}, expected a number from "
                f"{SHIFT_RANGE[0]} to {SHIFT_RANGE[1]}; {REDOWNLOAD}"
            )
    return released if stated is None else float(stated)


def saved_field(checkpoint: Checkpoint, field: str) -> Any:
    """Return a field that this package wrote into the configuration of a saved MODEL, or None."""
    part = checkpoint.transformer
    return part.config.get(field) if part and part.config else None


def latent_scale(checkpoint: Checkpoint) -> float:
    """Return the scaling factor of the latents. Without a VAE in `checkpoint`, use the factor of DC-AE f32c32."""
    configs = [part.config for part in checkpoint.components if part.kind == "autoencoder" and part.config is not None]
    if not configs or not configs[0]:
        return saved_field(checkpoint, "latent_scale") or DC_AE_SCALE
    # The default of AutoencoderDC is 1.
    return configs[0].get("scaling_factor", 1.0)


def text_reference(checkpoint: Checkpoint, reference: str = AUTO) -> str:
    """Return the reference for reading prompts.

    It is `reference`, or with "auto" the transformer's, or the text encoder's own, or NVIDIA's.
    """
    check_name("reference", reference, READINGS)
    followed = (checkpoint.reference or NVIDIA) if reference == AUTO else reference
    return DIFFUSERS_VIDEO if checkpoint.is_video and followed == DIFFUSERS else followed


def checkpoint_notes(checkpoint: Checkpoint, reference: str = AUTO) -> list[str]:
    """Return lines about a checkpoint for the loader nodes and `inspect`. `reference` chooses how prompts are read."""
    lines: list[str] = []
    for part in checkpoint.components:
        lines += part.notes
        if part.kind in TRANSFORMER_KINDS:
            scheduler = scheduler_of(part)
            if (sampler := scheduler.sampler) != record_of(part).defaults.sampler:
                lines.append(f"scheduler: saved with {sampler}; choose that sampler, or switch model_defaults on")
            lines += scheduler.notes
        if part.kind == "text_encoder":
            if reason := base_model_evidence(part):
                lines.append(
                    f"{part.name}: probably not Gemma-2-2b-it, which SANA was trained with ({reason}); images follow "
                    f"prompts worse, so use {GEMMA_FILE}"
                )
            if RULES[text_reference(checkpoint, reference)].lower_case:
                lines.append(LOWER_CASE)
    return lines


def base_model_evidence(part: Checkpoint) -> str:
    """Return why a text encoder seems to be the base model Gemma-2-2b, which has the shapes of -it, or "".

    Gemma-2-2b-it was released in bfloat16, so bfloat16 has all its numbers, also where a file stores them in float16 or
    float32. The base model was released in float32. A file of it in bfloat16 is recognised by its name alone.
    """
    if part.variant != "gemma-2-2b" or "norm.weight" not in part.origins:
        return ""
    stored = part.origins["norm.weight"].name
    reader = map_file if part.path.suffix.lower() in PICKLED else read_file
    norm = read_tensors(part.weights, [stored], reader)[stored]
    if not torch.equal(norm.bfloat16().to(norm.dtype), norm):
        return "its numbers are finer than the bfloat16 of Gemma-2-2b-it"
    path = "/".join(part.path.parts[-HUB_PARTS:])
    is_base = BASE_NAME.search(path) and not TUNED_NAME.search(path)
    return "its name is that of the base model" if is_base else ""
