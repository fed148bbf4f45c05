"""The pack's own patches of a MODEL by key, and which patches keep one from a cluster, a training or more devices."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from comfy.patcher_extension import WrappersMP

from ...sana_core.model.known_models import SPRINT
from .compat import patches_of

if TYPE_CHECKING:
    from comfy.model_patcher import ModelPatcher

CORE_NODES = "sana_core_nodes"
INTERVAL = "sana_guidance_interval"
KEEP = "sana_keep_on_device"
PERTURBED = "sana_perturbed_attention"
SHARED_MASK = "sana_shared_mask"
# also in transformer_options: who shares the model's calls, by the device of a call, see split.py
SPLIT = "sana_split"

# of the transformer's weights
WEIGHTS = "diffusion_model."


class Known(NamedTuple):
    """`travels`: a cluster has it too, or generates the same without; `trains`: training sees the same model."""

    travels: bool
    trains: bool


KNOWN = {
    # the loader's, on every SANA model that needs it
    CORE_NODES: Known(travels=True, trains=True),
    KEEP: Known(travels=True, trains=True),
    SHARED_MASK: Known(travels=True, trains=True),
    SPRINT: Known(travels=True, trains=True),
    # guidance, whose settings travel as attachments
    INTERVAL: Known(travels=True, trains=False),
    PERTURBED: Known(travels=True, trains=False),
    # SANA Split Image's and MultiGPU CFG Split's: more devices generate the same
    SPLIT: Known(travels=True, trains=False),
    "multigpu": Known(travels=True, trains=False),
    "multigpu_options": Known(travels=True, trains=False),
}


def staying(model: ModelPatcher) -> set[str]:
    """Return the patches of MODEL that cannot go to another machine: functions, unknown kinds, other weights."""
    found = {name for name in patches_of(model) if name not in KNOWN or not KNOWN[name].travels}
    return found | {key for key in model.patches if not key.startswith(WEIGHTS)}


def untrained(model: ModelPatcher) -> set[str]:
    """Return the patches of MODEL that training, which begins at its file, does not see."""
    found = {name for name in patches_of(model) if name not in KNOWN or not KNOWN[name].trains}
    return found | ({"LoRA"} if model.patches else set())


def unshared(model: ModelPatcher, conds: dict) -> set[str]:
    """Return the patches that replace parts of the one model, which other devices cannot have."""
    found = {key for key in model.object_patches if key.startswith("diffusion_model")}
    found |= {key for key, functions in model.injections.items() if functions}
    found |= {"hooks"} if any("hooks" in cond for each in conds.values() for cond in each) else set()
    return found | {"torch.compile"} & set(model.wrappers.get(WrappersMP.APPLY_MODEL, {}))
