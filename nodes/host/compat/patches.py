"""The pack's own patches of a MODEL by key, and which patches keep one from a cluster, a training or more devices."""

from __future__ import annotations

from typing import TYPE_CHECKING

from comfy.patcher_extension import WrappersMP

from ....sana_core.model.known_models import SPRINT
from .internals import patches_of

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

# the loader's, on every SANA model that needs it: training sees the same model
LOADED = {CORE_NODES, KEEP, SHARED_MASK, SPRINT}
# what a cluster has too, or generates the same without: those, guidance, whose settings travel as attachments, and what
# lets more devices generate the same, of SANA Split Image and of MultiGPU CFG Split
TRAVELLING = LOADED | {INTERVAL, PERTURBED, SPLIT, "multigpu", "multigpu_options"}


def staying(model: ModelPatcher) -> set[str]:
    """Return the patches of MODEL that cannot go to another machine: functions, unknown kinds, other weights."""
    return (patches_of(model) - TRAVELLING) | {key for key in model.patches if not key.startswith(WEIGHTS)}


def untrained(model: ModelPatcher) -> set[str]:
    """Return the patches of MODEL that training, which begins at its file, does not see."""
    return (patches_of(model) - LOADED) | ({"LoRA"} if model.patches else set())


def unshared(model: ModelPatcher, conds: dict) -> set[str]:
    """Return the patches that replace parts of the one model, which other devices cannot have."""
    found = {key for key in model.object_patches if key.startswith("diffusion_model")}
    found |= {key for key, functions in model.injections.items() if functions}
    found |= {"hooks"} if any("hooks" in cond for each in conds.values() for cond in each) else set()
    return found | {"torch.compile"} & set(model.wrappers.get(WrappersMP.APPLY_MODEL, {}))
