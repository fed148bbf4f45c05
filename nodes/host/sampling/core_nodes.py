"""What other nodes put on a MODEL and on prompts for models of another kind: it fits SANA, is refused, or is named.

Named are the functions that they give for layers (attention, blocks), of which SANA's forward runs none: the node that
made a function stands in its qualified name.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from comfy.patcher_extension import WrappersMP

from ....sana_core.checkpoints.lora import reference_note
from ....sana_core.errors import InputError
from ....sana_core.model.latents import DOWNSCALE
from ..compat.patches import CORE_NODES
from ..report import Notes

if TYPE_CHECKING:
    from collections.abc import Callable

    from comfy.model_patcher import ModelPatcher

# in a sampling's transformer_options
NOTES = "sana_notes"
# the Notes of SANA Batch Sampler for all of its samplings, in the transformer_options of its MODELs
BATCH_NOTES = "sana_batch_notes"
# the embeddings as they were encoded, in a conditioning beside what other nodes made of them
ENCODED = "sana_encoded"
# pixels of what Conditioning (Set Area) takes for a latent's cell
AREA_CELL = 8
# settings of a conditioning for other models, and the nodes that make them
UNREAD = {
    "concat_latent_image": "InstructPixToPixConditioning",
    "gligen": "GLIGENTextBoxApply",
    "guidance": "FluxGuidance",
    "reference_latents": "ReferenceLatent",
    "unclip_conditioning": "unCLIPConditioning",
}


def fit_core_nodes(patcher: ModelPatcher) -> None:
    """Let samplings with `patcher`, in whatever node, begin with `begin`."""
    patcher.add_wrapper_with_key(WrappersMP.OUTER_SAMPLE, CORE_NODES, begin)


def begin(executor, noise, *args, **kwargs):
    """What ComfyUI calls around a sampling.

    Raises InputError for an area outside the image, and for guidance that waits for a patch which SANA does not run.
    """
    guider = executor.class_obj
    options, model = guider.model_options, guider.model_patcher.model
    check_guidance(options)
    model.check_latent("latent_image", noise.shape)
    notes = options["transformer_options"].get(BATCH_NOTES) or Notes()
    options["transformer_options"][NOTES] = notes
    if note := model.size_note(noise.shape):
        notes.add(note)
    # what ComfyUI's own loaders leave there of the last LoRA
    metadata = guider.model_patcher.get_attachment("lora_metadata") or {}
    if note := reference_note("LoRA", metadata, model.diffusion_model.config.reference):
        notes.add(note)
    guider.conds = {
        field: [in_cells(field, cond, noise.shape[2:]) for cond in conds] for field, conds in guider.conds.items()
    }
    for field, conds in guider.conds.items():
        for cond in conds:
            for line in unfit(field, cond, model.diffusion_model.config.guidance_embeds):
                notes.add(line)
    return executor(noise, *args, **kwargs)


def note_unused(options: dict) -> None:
    """Note the patches in a call's transformer options that SANA's forward does not run.

    The options of a call include what hooks on prompts and guidance nodes have added.
    """
    notes = options.get(NOTES)
    if notes is not None:
        for name in unused(options):
            notes.add(no_effect(name))


def no_effect(name: str) -> str:
    return f"{name} has no effect on SANA"


def unused(options: dict) -> list[str]:
    """Return the nodes whose patches of layers in a call's transformer options SANA's forward does not run."""
    patches = [patch for group in options.get("patches", {}).values() for patch in group]
    patches += [patch for group in options.get("patches_replace", {}).values() for patch in group.values()]
    names = dict.fromkeys(map(node_of, patches))
    # these are numbers
    return [*names, *(["ScaleROPE"] if "rope_options" in options else [])]


def node_of(patch: Callable) -> str:
    """Return the class or function in which `patch` was defined."""
    return getattr(patch, "__qualname__", type(patch).__qualname__).partition(".")[0]


def check_guidance(options: dict) -> None:
    """Raise InputError for a node that guides by what its patch of a layer would have found."""
    guidance = [*options.get("sampler_pre_cfg_function", ()), *options.get("sampler_post_cfg_function", ())]
    waiting = set(map(node_of, guidance)) & set(unused(options["transformer_options"]))
    if waiting:
        names = ", ".join(sorted(waiting))
        raise InputError(f"model: got {names}, which needs layers that SANA does not have; remove it, or use SANA PAG")


def in_cells(field: str, cond: dict, size: torch.Size) -> dict:
    """Return `cond` with its area in cells of SANA's latents of `size`, where it was in pixels.

    Raises InputError for one that begins outside the image, and for one of a video.
    """
    area = cond.get("area")
    if area is not None and len(size) > 2:
        raise InputError(f"{field}: got an area, which SANA-Video does not have; remove Conditioning (Set Area)")
    if area is None or area[0] == "percentage":
        return cond
    pixels = [AREA_CELL * value for value in area]
    if any(start >= DOWNSCALE * length for start, length in zip(pixels[2:], size, strict=True)):
        image = f"{DOWNSCALE * size[1]} x {DOWNSCALE * size[0]}"
        raise InputError(
            f"{field}: got an area that begins at x {pixels[3]}, y {pixels[2]} of an image of {image}; move it inside"
        )
    cells = [round(value / DOWNSCALE) for value in pixels]
    starts = [min(start, length - 1) for start, length in zip(cells[2:], size, strict=True)]
    return {**cond, "area": (*(max(1, length) for length in cells[:2]), *starts)}


def are_same(encoded: torch.Tensor, embeds: torch.Tensor) -> bool:
    """Whether `embeds` are the embeddings `encoded`, perhaps copied, repeated for a batch, without padding at the end,
    or rounded to bf16."""
    if embeds is encoded:
        return True
    if embeds.ndim != encoded.ndim or embeds.shape[1] > encoded.shape[1] or embeds.shape[2:] != encoded.shape[2:]:
        return False
    encoded = encoded[:, : embeds.shape[1]].to(embeds.device, torch.float32)
    if len(encoded) not in (1, len(embeds)):
        return False
    return torch.allclose(embeds.float(), encoded, rtol=2**-8, atol=1e-5)


def unfit(field: str, cond: dict, has_guidance: bool) -> list[str]:
    """Return a line for each thing in `cond` that SANA does not read as it is meant."""
    names = [name for key, name in UNREAD.items() if key in cond]
    if has_guidance and "guidance" in cond:
        names.remove(UNREAD["guidance"])
    # inpainting goes by the mask of the latent
    if "concat_mask" in cond:
        names.remove(UNREAD["concat_latent_image"])
    lines = [no_effect(name) for name in names]
    if cond.get(ENCODED) is not None and not are_same(cond[ENCODED], cond["cross_attn"]):
        lines.append(
            f"{field}: its embeddings were averaged or scaled, which SANA has not learned; write one text, or use "
            "Conditioning (Combine)"
        )
    return lines
