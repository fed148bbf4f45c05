"""Which patches of a MODEL keep devices from sharing its calls."""

from __future__ import annotations

from typing import TYPE_CHECKING

from comfy.patcher_extension import WrappersMP

from ...sana_core.errors import InputError

if TYPE_CHECKING:
    from comfy.model_patcher import ModelPatcher

REMEDY = "remove it, or SANA Split Image"


def check_patches(patcher: ModelPatcher, conds: dict) -> None:
    """Raise InputError for patches that replace parts of the one model, which other devices cannot have."""
    found = {key for key in patcher.object_patches if key.startswith("diffusion_model")}
    found |= {key for key, functions in patcher.injections.items() if functions}
    found |= {"hooks"} if any("hooks" in cond for each in conds.values() for cond in each) else set()
    found |= {"torch.compile"} & set(patcher.wrappers.get(WrappersMP.APPLY_MODEL, {}))
    if found:
        names = ", ".join(sorted(found))
        raise InputError(f"model: got a patch that devices cannot share an image with ({names}); {REMEDY}")
