"""The keys of the pack's patches of a MODEL, and the patches that a cluster, training or other devices cannot use."""

from __future__ import annotations

from typing import TYPE_CHECKING

from comfy.patcher_extension import WrappersMP

from ....sana_core.model.known_models import SPRINT
from .internals import patches_of

if TYPE_CHECKING:
    from comfy.model_patcher import ModelPatcher

CORE_NODES = "sana_core_nodes"
# VIBE's image guidance. Also a key of a conditioning, with its strength.
IMAGE_GUIDANCE = "sana_image_guidance"
# Key of a conditioning of VIBE's CLIP.
INSTRUCTION = "sana_instruction"
INTERVAL = "sana_guidance_interval"
KEEP = "sana_keep_on_device"
PERTURBED = "sana_perturbed_attention"
SHARED_MASK = "sana_shared_mask"
# Also a key of transformer_options, with the devices that share the model's calls. See split.py.
SPLIT = "sana_split"

# Prefix of the transformer's weights.
WEIGHTS = "diffusion_model."

# Patches of the loader. Training uses the same ones.
LOADED = {CORE_NODES, KEEP, SHARED_MASK, SPRINT}
# Patches of a MODEL with which a cluster can generate. It has the loader's patches, receives the settings of guidance
# as attachments or with the image of an edit, and generates the same images without SANA Split Image and MultiGPU CFG
# Split.
TRAVELLING = LOADED | {IMAGE_GUIDANCE, INTERVAL, PERTURBED, SPLIT, "multigpu", "multigpu_options"}


def staying(model: ModelPatcher) -> set[str]:
    """Return the patches of MODEL that cannot be sent to another machine: functions, unknown kinds, other weights."""
    return (patches_of(model) - TRAVELLING) | {key for key in model.patches if not key.startswith(WEIGHTS)}


def untrained(model: ModelPatcher) -> set[str]:
    """Return the patches of MODEL that training does not use, because it loads the model from its file."""
    return (patches_of(model) - LOADED) | ({"LoRA"} if model.patches else set())


def unshared(model: ModelPatcher, conds: dict) -> set[str]:
    """Return the patches that replace parts of this model's module, which the copies on other devices do not have."""
    patches = {key for key in model.object_patches if key.startswith("diffusion_model")}
    patches |= {key for key, functions in model.injections.items() if functions}
    patches |= {"hooks"} if any("hooks" in cond for cond_list in conds.values() for cond in cond_list) else set()
    return patches | {"torch.compile"} & set(model.wrappers.get(WrappersMP.APPLY_MODEL, {}))
