"""What the pack takes of ComfyUI that is not meant for packs, and that a new version may rename or move.

Where it stands beside its use instead, tests/graph/test_host_contract.py names the file. That test says what has moved.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import comfy.lora
import comfy.model_management
import comfy.model_patcher
import comfy.sd
import comfyui_version
import torch
from comfy.patcher_extension import WrappersMP
from comfy_api.torch_helpers.torch_compile import COMPILE_KEY, TORCH_COMPILE_KWARGS, set_torch_compile_wrapper

from ....sana_core.errors import VersionError

if TYPE_CHECKING:
    from comfy.model_patcher import ModelPatcher

OLDEST = (0, 27)
# collections of a ModelPatcher that hold what ComfyUI or a pack has put on a MODEL
PATCHES = {
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
# and those that change no image: what is loaded, what it replaced, notes of packs, and how to load it again
STATE = {
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


def check_host() -> None:
    """Raise VersionError for a ComfyUI older than OLDEST, whose classes for models take other arguments."""
    version = comfyui_version.__version__
    if tuple(map(int, version.split(".")[:2])) < OLDEST:
        raise VersionError(f"SANA: got ComfyUI {version}, expected {OLDEST[0]}.{OLDEST[1]} or newer; update ComfyUI")


def free_memory(device: torch.device) -> int:
    """Return the bytes of `device` that work may take: the free ones, and what dynamic VRAM would evict for it."""
    # it uses nothing of the patcher
    return comfy.model_patcher.ModelPatcher.get_free_memory(None, device)


def remember_loader(patcher: ModelPatcher, load: Callable[..., ModelPatcher], path: Path, *arguments: object) -> None:
    """Let ComfyUI make another copy of the weights of `patcher` by `load(path, *arguments)`."""
    patcher.cached_patcher_init = (load, (path, *arguments))


def loaded_from(patcher: ModelPatcher) -> tuple:
    """Return the path and the arguments that `remember_loader` was given."""
    return patcher.cached_patcher_init[1]


def path_of(patcher: ModelPatcher) -> str:
    """Return the file or folder that the weights came from."""
    return str(Path(loaded_from(patcher)[0]).absolute())


def compile_again(clone: ModelPatcher) -> None:
    """Compile the modules of `clone`, if TorchCompileModel has compiled the same modules of its MODEL.

    The clone has a copy of ComfyUI's wrapper, which would run the compiled modules, and so the weights, of the MODEL.
    """
    for wrapper in clone.wrappers.get(WrappersMP.APPLY_MODEL, {}).get(COMPILE_KEY, []):
        compiled = inspect.getclosurevars(wrapper).nonlocals["compiled_module_dict"]
        set_torch_compile_wrapper(clone, keys=list(compiled), **clone.model_options[TORCH_COMPILE_KWARGS])


def empty_vae(device: torch.device, dtype: torch.dtype) -> comfy.sd.VAE:
    """Return a VAE of ComfyUI whose module is to be exchanged.

    It has no constructor for a module of a pack's. That of the pixel-space one, which has no weights, sets up all else.
    """
    return comfy.sd.VAE(sd={"pixel_space_vae": torch.ones(())}, device=device, dtype=dtype)


def add_lora_names(names_of: Callable[[torch.nn.Module], dict[str, str]]) -> None:
    """Make ComfyUI's own LoRA loaders find a model's weights by `names_of` it too, {name in a LoRA: weight}.

    ComfyUI knows a model's dialects by its class, from a list in one function with no way to join it; so that function
    is wrapped, once, and answers for other models as before.
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


def pixeldit_tokenizer(tokenizer: object) -> tuple[Callable[[str], list[int]], int] | None:
    """Return how CLIPLoader's Gemma 2 of type pixeldit splits a text, and its padding token; None for any other."""
    from comfy.text_encoders.pixeldit import PixelDiTGemma2Tokenizer

    if not isinstance(tokenizer, PixelDiTGemma2Tokenizer):
        return None
    gemma = tokenizer.gemma2_2b
    return lambda text: gemma.tokenizer(text)["input_ids"], gemma.pad_token


def patches_of(patcher: ModelPatcher) -> set[str]:
    """Return the names of all that ComfyUI or a pack has put on a MODEL beside patches of its weights.

    Also of kinds that are not known here: of a newer ComfyUI's, every collection that is empty in a new patcher.
    """
    options = dict(patcher.model_options)
    names = {*options.pop("transformer_options"), *options, *patcher.object_patches, *patcher.weight_wrapper_patches}
    for kind in (*patcher.wrappers.values(), *patcher.callbacks.values(), patcher.injections):
        names |= {str(key) for key, functions in kind.items() if functions}
    names |= {key for key, models in patcher.additional_models.items() if models}
    if patcher.hook_patches:
        names.add("hooks")
    cpu = torch.device("cpu")
    fresh = vars(comfy.model_patcher.ModelPatcher(torch.nn.Module(), cpu, cpu))
    for name, value in vars(patcher).items():
        if name not in PATCHES and name not in STATE and isinstance(value, dict | list | set | tuple) and value:
            names |= {name} if value != fresh.get(name) else set()
    return set(map(str, names))
