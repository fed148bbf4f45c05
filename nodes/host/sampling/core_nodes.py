"""Settings of other nodes on a MODEL and on prompts: converted for SANA, refused, or reported as without effect.

SANA's forward does not run functions of other nodes for single layers, such as patches of attention or blocks. The
report names the node that has defined such a function, which is the beginning of its qualified name.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import torch
from comfy.hooks import EnumHookType

from ....sana_core.checkpoints.lora import reference_note
from ....sana_core.errors import InputError
from ....sana_core.model.known_models import edits_images
from ....sana_core.model.latents import DOWNSCALE
from ..report import Notes

if TYPE_CHECKING:
    from collections.abc import Iterable

# Key in the transformer_options of a sampling: its Notes.
NOTES = "sana_notes"
# Key in the transformer_options of the MODELs of SANA Batch Sampler: the Notes for all of its samplings.
BATCH_NOTES = "sana_batch_notes"
# Key in a conditioning: the embeddings as they were encoded. Other nodes may have changed the embeddings themselves.
ENCODED = "sana_encoded"
# Pixels per latent cell that Conditioning (Set Area) assumes.
AREA_CELL = 8
# Settings of a conditioning that SANA does not use: the node that sets each one.
UNREAD = {
    "concat_latent_image": "InstructPixToPixConditioning",
    "gligen": "GLIGENTextBoxApply",
    "guidance": "FluxGuidance",
    "reference_latents": "ReferenceLatent",
    "unclip_conditioning": "unCLIPConditioning",
}


def begin(executor, noise, latent_image, sampler, *args, **kwargs):
    """Check and convert the settings of other nodes, then sample. ComfyUI calls this wrapper around a sampling."""
    # Over the API, ComfyUI accepts a plain value in place of a SAMPLER.
    if not hasattr(sampler, "sample"):
        raise InputError(f"sampler: got {sampler!r:.40}, expected a SAMPLER; connect an output of that type")
    guider = executor.class_obj
    options, model = guider.model_options, guider.model_patcher.model
    check_guidance(options, edits_images(model.diffusion_model.config))
    model.check_latent("latent_image", noise.shape)
    check_hooks(model.diffusion_model, guider.conds)
    notes = options["transformer_options"].get(BATCH_NOTES) or Notes()
    options["transformer_options"][NOTES] = notes
    for line in replaced(model.diffusion_model):
        notes.add(line)
    if note := model.size_note(noise.shape):
        notes.add(note)
    # ComfyUI's own LoRA loaders store the metadata of the last LoRA there.
    metadata = guider.model_patcher.get_attachment("lora_metadata") or {}
    if note := reference_note("LoRA", metadata, model.diffusion_model.config.reference):
        notes.add(note)
    guider.conds = {
        field: [in_cells(field, cond, noise.shape[2:]) for cond in conds] for field, conds in guider.conds.items()
    }
    for field, conds in guider.conds.items():
        for cond in conds:
            config = model.diffusion_model.config
            for line in unfit(field, cond, config.guidance_embeds, edits_images(config)):
                notes.add(line)
    return executor(noise, latent_image, sampler, *args, **kwargs)


def note_unused(options: dict) -> None:
    """Report the patches in a call's transformer options that SANA's forward does not run.

    The options of a call include the patches of guidance nodes and of hooks on prompts.
    """
    notes = options.get(NOTES)
    if notes is not None:
        for name in unused(options):
            notes.add(no_effect(name))


def no_effect(name: str) -> str:
    return f"{name} has no effect on SANA"


def unused(options: dict) -> list[str]:
    """Return the nodes that have set patches of layers in a call's transformer options. SANA's forward runs none."""
    patches = [patch for group in options.get("patches", {}).values() for patch in group]
    patches += [patch for group in options.get("patches_replace", {}).values() for patch in group.values()]
    names = dict.fromkeys(map(node_of, patches))
    # The options of ScaleROPE are numbers, not functions with a name.
    return [*names, *(["ScaleROPE"] if "rope_options" in options else [])]


def node_of(patch: object) -> str:
    """Return the class or function in which `patch` was defined."""
    return getattr(patch, "__qualname__", type(patch).__qualname__).partition(".")[0]


def check_guidance(options: dict, is_edit: bool) -> None:
    """Raise InputError for a node whose guidance needs a result of its patch of a layer."""
    passes = node_of(options.get("sampler_calc_cond_batch_function"))
    if is_edit and passes == "SkipLayerGuidanceDiTSimple":
        # It computes the positive prompt apart, so the image's guidance would have no effect in its steps.
        require_layers([passes])
    guidance = [*options.get("sampler_pre_cfg_function", ()), *options.get("sampler_post_cfg_function", ())]
    require_layers(set(map(node_of, guidance)) & set(unused(options["transformer_options"])))


def require_layers(nodes: Iterable[str]) -> None:
    """Raise InputError if there are `nodes`, whose guidance needs layers that SANA does not have."""
    if names := ", ".join(sorted(nodes)):
        raise InputError(f"model: got {names}, which needs layers that SANA does not have; remove it, or use SANA PAG")


def check_hooks(transformer: torch.nn.Module, conds: dict) -> None:
    """Raise InputError for a LoRA on a hook of a quantised model. ComfyUI cannot copy its weights between the steps."""
    is_quantised = any(hasattr(layer, "quant_format") for layer in transformer.modules())
    hooks = [cond["hooks"] for cond_list in conds.values() for cond in cond_list if cond.get("hooks") is not None]
    if is_quantised and any(group.get_type(EnumHookType.Weight) for group in hooks):
        raise InputError(
            "model: got a LoRA on a hook for a quantised model, expected plain weights; use SANA Load LoRA, or set "
            "quantise to off"
        )


def replaced(transformer: torch.nn.Module) -> list[str]:
    """Return a line for each forward or class by which another pack has replaced one of `transformer`.

    Such a change outlives the graph. Inside the blocks, SANA's forward calls the layers alone.
    """
    lines = []
    package = __name__.partition(".nodes.")[0]
    for name, module in transformer.named_modules():
        # torch.compile keeps the module that it wraps. ComfyUI's adapters in bypass mode replace the layers' forwards.
        if hasattr(module, "_orig_mod") or module._parameters.get("weight") is not None:
            continue
        new = {"class": type(module)} if module is transformer else {}
        new |= {field: vars(module)[field] for field in ("forward", "_forward") if field in vars(module)}
        for field, value in new.items():
            if not getattr(value, "__module__", "").startswith((package, "torch.", "diffusers.")):
                place = name or "the model"
                effect = "its images may be wrong" if module is transformer else "which has no effect on SANA"
                lines.append(
                    f"{pack_of(value)} has replaced the {field} of {place}, {effect}; restart without its node"
                )
    return list(dict.fromkeys(lines))


def pack_of(value: object) -> str:
    """Return the pack that defines a function or class, or the beginning of its module's name."""
    module = str(getattr(value, "__module__", None) or type(value).__module__)
    match = re.search(r"custom_nodes[./\\]([^./\\]+)", module)
    return match[1] if match else module.partition(".")[0]


def in_cells(field: str, cond: dict, size: torch.Size) -> dict:
    """Return `cond` with its area converted to cells of SANA's latents. `size` is the size of the latents in cells."""
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
    """Whether `embeds` has the values of `encoded`.

    It may be a copy, repeated for a batch, without padding at the end, or rounded to bf16.
    """
    if embeds is encoded:
        return True
    if embeds.ndim != encoded.ndim or embeds.shape[1] > encoded.shape[1] or embeds.shape[2:] != encoded.shape[2:]:
        return False
    encoded = encoded[:, : embeds.shape[1]].to(embeds.device, torch.float32)
    if len(encoded) not in (1, len(embeds)):
        return False
    return torch.allclose(embeds.float(), encoded, rtol=2**-8, atol=1e-5)


def unfit(field: str, cond: dict, has_guidance: bool, edits: bool = False) -> list[str]:
    """Return a line for each setting in `cond` that SANA ignores or cannot use as intended."""
    used = {"guidance"} if has_guidance else set()
    used |= {"concat_latent_image", "reference_latents"} if edits else set()
    # SANA does not need the concatenated image for inpainting, because it uses the mask of the latent.
    used |= {"concat_latent_image"} if "concat_mask" in cond else set()
    names = [name for key, name in UNREAD.items() if key in cond and key not in used]
    lines = [no_effect(name) for name in names]
    if cond.get(ENCODED) is not None and not are_same(cond[ENCODED], cond["cross_attn"]):
        lines.append(
            f"{field}: its embeddings were averaged or scaled, which SANA has not learned; write one text, or use "
            "Conditioning (Combine)"
        )
    return lines
