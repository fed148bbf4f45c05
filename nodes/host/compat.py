"""Patches of ComfyUI, uses of its internals, and the patches of a MODEL, in this order.

A new version of ComfyUI may rename or move parts that it uses. Then tests/graph/test_host_contract.py fails, which also
lists the uses in other files.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import comfy.lora
import comfy.sd
import comfyui_version
import folder_paths
import torch
from comfy import model_prefetch
from comfy.model_patcher import LowVramPatch, ModelPatcher
from comfy.patcher_extension import WrappersMP
from server import PromptServer

import nodes

from ...sana_core.errors import VersionError
from ...sana_core.model.known_models import SPRINT
from ...sana_core.model.text import checked_encode

OLDEST = (0, 27)


def check_host() -> None:
    """Raise VersionError for a ComfyUI older than OLDEST, because the arguments of its model classes differ."""
    version = comfyui_version.__version__
    if tuple(map(int, version.split(".")[:2])) < OLDEST:
        raise VersionError(f"SANA: got ComfyUI {version}, expected {OLDEST[0]}.{OLDEST[1]} or newer; update ComfyUI")


def survive_deleted_folders() -> None:
    """Let ComfyUI list the models again after one of its folders was deleted.

    Its cache reads the time of each listed folder. Without this, an emptied output folder makes all loaders of LoRAs
    fail, until the folder exists again.
    """
    core = folder_paths.cached_filename_list_

    def cached_filename_list_(folder_name):
        try:
            return core(folder_name)
        except OSError:
            # ComfyUI searches the folders again.
            return None

    folder_paths.cached_filename_list_ = cached_filename_list_


def add_lora_names(names_of: Callable[[torch.nn.Module], dict[str, str]]) -> None:
    """Add names to ComfyUI's LoRA loaders. `names_of` returns {name in a LoRA: name of the weight} for a model.

    ComfyUI has a fixed list of names by model class in one function, and no way to extend it. This wraps the function
    once. Results for other models do not change.
    """
    core = comfy.lora.model_lora_keys_unet
    if getattr(core, "knows_sana", False):
        return

    def model_lora_keys_unet(model, key_map={}):
        key_map = core(model, key_map)
        key_map.update(names_of(model))
        return key_map

    model_lora_keys_unet.knows_sana = True
    comfy.lora.model_lora_keys_unet = model_lora_keys_unet


# The new node's id, and for each of its inputs a dict with new_id and either old_id or set_value.
Replacement = tuple[str, list[dict[str, object]]]


def replace_in_prompts(replacements: Mapping[str, Replacement]) -> None:
    """Replace nodes in each prompt of the server, unless they are installed. Keys are the ids of the old nodes.

    This happens before ComfyUI's own replacement, which fails with HTTP 500 if a client sends no `_meta` or leaves an
    input out, and if a replaced node is linked to another replaced node by an input that has a new name.
    """

    def is_old(node: object) -> bool:
        # A client may send anything. The server refuses wrong nodes later.
        if not isinstance(node, dict) or not isinstance(node.get("inputs"), dict):
            return False
        kind = node.get("class_type")
        return isinstance(kind, str) and kind in replacements and kind not in nodes.NODE_CLASS_MAPPINGS

    def replace(request: dict) -> dict:
        prompt = request.get("prompt")
        for node in filter(is_old, prompt.values()) if isinstance(prompt, dict) else ():
            node["class_type"], mapping = replacements[node["class_type"]]
            old = node["inputs"]
            node["inputs"] = {field["new_id"]: old[field["old_id"]] for field in mapping if field.get("old_id") in old}
            node["inputs"] |= {field["new_id"]: field["set_value"] for field in mapping if "set_value" in field}
        return request

    PromptServer.instance.add_on_prompt_handler(replace)


def free_memory(device: torch.device) -> int:
    """Return the bytes of `device` that are available: free memory, and memory that dynamic VRAM would evict."""
    # The method does not use `self`.
    return ModelPatcher.get_free_memory(None, device)


def remember_loader(patcher: ModelPatcher, load: Callable[..., ModelPatcher], path: Path, *arguments: object) -> None:
    """Let ComfyUI load another copy of the weights of `patcher` with `load(path, *arguments)`."""
    patcher.cached_patcher_init = (load, (path, *arguments))


def loaded_from(patcher: ModelPatcher) -> tuple:
    """Return the path and the arguments that were passed to `remember_loader`."""
    return patcher.cached_patcher_init[1]


def check_files(patcher: ModelPatcher) -> str:
    """Return the fingerprint of the files of `patcher`. Raises CheckpointError if they have changed since then."""
    return patcher.cached_patcher_init[0].check()


def path_of(patcher: ModelPatcher) -> str:
    """Return the file or folder that the weights were loaded from."""
    return str(Path(loaded_from(patcher)[0]).absolute())


def is_half_unloaded(model: torch.nn.Module) -> bool:
    """Return whether ComfyUI counts `model` as unloaded while some of its modules are in the state of loaded ones.

    ComfyUI unloads a model whose load fails. A GPU with an error refuses to move the weights, and then modules keep the
    mark that their LoRAs are merged. If the load was to be partial, modules keep functions that add LoRAs in each call.
    The next load leaves such modules as they are, so images would lack the new LoRAs or have the old ones.
    """
    if model.current_weight_patches_uuid is not None:
        return False
    for module in model.modules():
        functions = [*getattr(module, "weight_function", ()), *getattr(module, "bias_function", ())]
        if getattr(module, "comfy_patched_weights", False) or any(isinstance(f, LowVramPatch) for f in functions):
            return True
    return False


def prefetched_blocks(blocks: torch.nn.ModuleList, device: torch.device, options: dict) -> Iterator[torch.nn.Module]:
    """Yield `blocks`. With dynamic VRAM, the layers of a block are copied together while the previous block runs."""
    prompt_layers = {part for block in blocks for part in (block.attn2.to_k, block.attn2.to_v, block.attn2.norm_k)}
    streamed = [[layer for layer in block.modules() if hasattr(layer, "_v")] for block in blocks]
    units = [torch.nn.ModuleList(layer for layer in unit if layer not in prompt_layers) for unit in streamed]
    queue = model_prefetch.make_prefetch_queue(units, device, options)
    try:
        for block in blocks:
            model_prefetch.prefetch_queue_pop(queue, device, block)
            yield block
    finally:
        if queue is not None:
            # After an error, other layers may have copies too, which later calls would use.
            queue[:] = [(None, (None, list(blocks.modules()))), None]
            model_prefetch.prefetch_queue_pop(queue, device, None)


def empty_vae(device: torch.device, dtype: torch.dtype) -> comfy.sd.VAE:
    """Return a VAE of ComfyUI whose module the caller replaces.

    ComfyUI's VAE has no constructor for another pack's module. Its pixel-space VAE has no weights, but is otherwise set
    up completely.
    """
    return comfy.sd.VAE(sd={"pixel_space_vae": torch.ones(())}, device=device, dtype=dtype)


def pixeldit_tokenizer(clip: comfy.sd.CLIP) -> tuple[Callable[[str], list[int]], int] | None:
    """Return the tokenizer function and the padding token of CLIPLoader's Gemma 2 of type pixeldit, else None."""
    from comfy.text_encoders.pixeldit import PixelDiTGemma2Tokenizer

    if not isinstance(clip.tokenizer, PixelDiTGemma2Tokenizer):
        return None
    gemma = clip.tokenizer.gemma2_2b
    vocabulary = clip.cond_stage_model.gemma2_2b.transformer.get_input_embeddings().weight.shape[0]
    return checked_encode(lambda text: gemma.tokenizer(text)["input_ids"], vocabulary, "clip"), gemma.pad_token


# Attributes of a ModelPatcher that contain the patches of ComfyUI or a pack.
PATCH_FIELDS = {
    "patches",
    "object_patches",
    "weight_wrapper_patches",
    "model_options",
    "wrappers",
    "callbacks",
    "injections",
    "hook_patches",
    "additional_models",
}
# Attributes that do not change images: loaded and replaced weights, notes of packs, and the function that loads again.
STATE_FIELDS = {
    "attachments",
    "backup",
    "backup_buffers",
    "cached_hook_patches",
    "cached_patcher_init",
    "hook_backup",
    "hook_patches_backup",
    "object_patches_backup",
    "pinned",
    "_free_methods",
    "_last_prepare_log_key",
    "non_dynamic_delegate_model",
}

# The keys of the pack's patches of a MODEL.
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


def patches_of(patcher: ModelPatcher) -> set[str]:
    """Return the names of all patches of a MODEL by ComfyUI or a pack, except patches of its weights.

    A newer ComfyUI may have other kinds of patches. Each collection that is empty in a new patcher and not in this one
    counts as a patch.
    """
    options = dict(patcher.model_options)
    names = {*options.pop("transformer_options"), *options, *patcher.object_patches, *patcher.weight_wrapper_patches}
    for kind in (*patcher.wrappers.values(), *patcher.callbacks.values(), patcher.injections):
        names |= {str(key) for key, functions in kind.items() if functions}
    names |= {key for key, models in patcher.additional_models.items() if models}
    if patcher.hook_patches:
        names.add("hooks")
    cpu = torch.device("cpu")
    fresh = vars(ModelPatcher(torch.nn.Module(), cpu, cpu))
    for name, value in vars(patcher).items():
        if name not in PATCH_FIELDS | STATE_FIELDS and isinstance(value, dict | list | set | tuple) and value:
            names |= {name} if value != fresh.get(name) else set()
    return set(map(str, names))


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
