"""Read the adapters in a LoRA's file, for generating and for a training that starts from them."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch

from ..errors import InputError
from ..model.reference import RULES
from ..runtime.text import Json, brief
from . import Checkpoint, find_part, inspect_checkpoint
from .files import parse_json, read_json
from .headers import PICKLED, read_file
from .keys import HOLDERS, WRAPPERS
from .load import check_finite
from .schemas import check_peft

if TYPE_CHECKING:
    from diffusers import SanaTransformer2DModel

Tensors = dict[str, torch.Tensor]

# The norms of a DoRA's rows, by PEFT's name, and of its columns, which are OneTrainer's default.
ROWS, COLUMNS = "lora_magnitude_vector", "column_magnitudes"
# Prefixes of a module's name: diffusers', PEFT's, none, ComfyUI's; and of a name with underscores instead of dots:
# kohya's, OneTrainer's, SimpleTuner's.
DOTTED = ("transformer.", "base_model.model.", "transformer.base_model.model.", "", "diffusion_model.")
FLAT = ("lora_unet_", "lora_transformer_", "lycoris_")
# What torch.compile and FSDP insert into names with underscores, and what DDP puts before the module's name.
FLAT_WRAPPERS = re.compile(r"_(?:orig_mod|fsdp_wrapped_module|checkpoint_wrapped_module)_")
FLAT_HOLDERS = re.compile(rf"^({'|'.join(FLAT)})(?:module_|model_)+")
# What comes after a layer's name in the keys of a file. Group 1 is a part of LoRA, DoRA, LoHa or LoKr, without the name
# that PEFT and diffusers give to an adapter in memory, such as default or default_0. The rest are other adapters,
# differences and LoRAs in diffusers' old names, which only ComfyUI reads.
LEAF = re.compile(
    rf"(?:\.(lora_A|lora_B|lora_down|lora_up|lora_mid|hada_(?:w[12]_[ab]|t[12])|lokr_(?:w[12](?:_[ab])?|t2)|{ROWS}"
    r"|alpha|dora_scale)(?:\.(?!weight$|bias$)[\w-]+)?(?:\.weight)?"
    r"|\.lora(?:_linear_layer)?\.(?:up|down)\.weight|_lora\.(?:up|down)\.weight|\.lokr_\w+|\.[ab][12]\.weight"
    r"|\.(?:oft_blocks|rescale|diff|diff_b|w_norm|b_norm|set_weight|reshape_weight))$"
)
SAME = {"lora_down": "lora_A", "lora_up": "lora_B"}
# The factors whose number of rows is the rank.
RANKED = ("lora_A", "hada_w1_b", "lokr_w2_b", "lokr_w1_b")
TWICE = "its weight has another layer in the file"
# The key of PEFT's settings in the metadata of diffusers, and PEFT's two files in a folder.
IN_FILE, BESIDE = "lora_adapter_metadata", ("adapter_model.safetensors", "adapter_config.json")
PEFT_NAMES = {"alpha": ("lora_alpha", "alpha"), "rank": ("r",)}
# Layers in a list of misfits, and characters of the list.
SHOWN, LONGEST = 3, 240


class Adapter(NamedTuple):
    """The tensors of one layer by their parts, and the factor of the product of its matrices."""

    parts: Tensors
    scale: float = 1.0


class FileAdapters(NamedTuple):
    """The content of a file."""

    # By layer of the model.
    adapters: dict[str, Adapter]
    # By layer name in the file: tensors of other layers and of other kinds of adapters.
    other_layers: dict[str, Tensors]
    # By layer name in the file: why the adapter does not fit.
    misfits: dict[str, str]


@torch.no_grad()
def merge_loras(transformer: SanaTransformer2DModel, loras: Sequence[tuple[str, float]]) -> None:
    """Add the adapters of `loras`, pairs of a file and its strength, to the weights of `transformer`.

    On the meta device only names and shapes are checked.
    """
    weights = layer_weights(transformer)
    for file, strength in loras:
        for name, adapter in read_whole(file, {name: weight.shape for name, weight in weights.items()}).items():
            weights[name].copy_(adapted(weights[name], adapter, strength))


def layer_weights(module: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """Return {layer: weight} of the layers of `module` that an adapter may change."""
    ends = ".weight"
    weights = module.named_parameters(remove_duplicate=False)
    return {name.removesuffix(ends): weight for name, weight in weights if name.endswith(ends) and weight.ndim > 1}


def read_whole(file: str | Path, shapes: Mapping[str, torch.Size]) -> dict[str, Adapter]:
    """Return {layer: adapter} of `file`. `shapes` has the shape of each layer's weight."""
    checkpoint = find_part(inspect_checkpoint(file), "lora")
    # A file that does not fit may have gigabytes, so shapes are compared before they are read.
    whole_adapters(checkpoint, without_values(checkpoint), shapes)
    return whole_adapters(checkpoint, read_file(checkpoint.path), shapes)


def without_values(checkpoint: Checkpoint) -> Tensors:
    """Return the file's tensors on the meta device. Tensors of one number are read, because they may be alphas."""
    if checkpoint.path.suffix.lower() in PICKLED:
        return read_file(checkpoint.path)
    headers = checkpoint.weights.headers
    tensors = {name: torch.empty(header.shape, dtype=header.dtype, device="meta") for name, header in headers.items()}
    return tensors | read_file(
        checkpoint.path, {name for name, header in headers.items() if math.prod(header.shape) == 1}
    )


def whole_adapters(
    checkpoint: Checkpoint, tensors: Mapping[str, torch.Tensor], shapes: Mapping[str, torch.Size]
) -> dict[str, Adapter]:
    """Return {layer: adapter} of a file with `tensors`. `shapes` has the shape of each layer's weight."""
    adapters, unknown_layers, misfits = read_adapters(checkpoint, tensors, shapes)
    for name, unknown in unknown_layers.items():
        misfits[name] = "" if parts_of(unknown) else "no LoRA, DoRA, LoHa or LoKr"
    if misfits:
        raise misfit_error(checkpoint.name, len(adapters) + len(misfits), misfits)
    return adapters


def read_adapters(
    checkpoint: Checkpoint, tensors: Mapping[str, torch.Tensor], shapes: Mapping[str, torch.Size]
) -> FileAdapters:
    """Group the `tensors` of a file into adapters for the layers of `shapes`, other layers, and misfits.

    On the meta device only shapes are compared.
    """
    settings, layer_names = peft_settings(checkpoint), written_names(shapes)
    file_adapters = FileAdapters({}, {}, {})
    for written, layer_parts in split_layers(tensors).items():
        layer, parts = layer_names.get(written) or layer_names.get(unwrapped_layer(written)), parts_of(layer_parts)
        if layer is None or parts is None:
            file_adapters.other_layers[written] = layer_parts
            continue
        for key, tensor in layer_parts.items():
            if not tensor.is_meta:
                check_finite(checkpoint.name, key, tensor)
        try:
            adapter = adapter_of(parts, layer, shapes[layer], settings)
        except (KeyError, IndexError, RuntimeError):
            got = ", ".join(f"{part} {list(tensor.shape)}" for part, tensor in sorted(parts.items()))
            file_adapters.misfits[written] = f"got {got}, expected {list(shapes[layer])}"
            continue
        if file_adapters.adapters.setdefault(layer, adapter) is not adapter:
            file_adapters.misfits[written] = TWICE
    return file_adapters


def misfit_error(file: str, total: int, misfits: Mapping[str, str]) -> InputError:
    """Return the error of a LoRA of `total` layers, of which some or all do not fit."""
    fits = total - len(misfits)
    if fits:
        return InputError(f"{file}: {fits} of {total} layers fit, not {listed(misfits)}; choose a LoRA of this model")
    return InputError(
        f"{file}: none of its {total} layers fit this model, among them {listed(misfits)}; "
        "choose a LoRA trained on this SANA"
    )


def listed(misfits: Mapping[str, str]) -> str:
    """Return the names of the first layers that do not fit, with the reason if the layer exists in the model."""
    first = [f"{name} ({why})" if why else name for name, why in sorted(misfits.items())[:SHOWN]]
    return brief(", ".join(first), LONGEST) + (", ..." if len(misfits) > SHOWN else "")


def written_names(layers: Iterable[str]) -> dict[str, str]:
    """Return {name of a layer in a file: layer}, in each dialect."""
    names: dict[str, str] = {}
    for layer in layers:
        names |= {prefix + layer: layer for prefix in DOTTED}
        names |= {prefix + layer.replace(".", "_"): layer for prefix in FLAT}
    return names


def unwrapped_layer(name: str) -> str:
    """Return the name of a layer in a file without what torch.compile, DDP, FSDP and PEFT add to it."""
    return HOLDERS.sub("", FLAT_HOLDERS.sub(r"\1", FLAT_WRAPPERS.sub("", WRAPPERS.sub("", name))))


def split_layers(tensors: Mapping[str, torch.Tensor]) -> dict[str, Tensors]:
    """Return {layer as the file names it: its tensors}."""
    layers: dict[str, Tensors] = {}
    for key, tensor in tensors.items():
        layers.setdefault(LEAF.sub("", key), {})[key] = tensor
    return layers


def parts_of(tensors: Tensors) -> Tensors | None:
    """Return {part: tensor} of a layer's `tensors`, None where one is of another kind of adapter."""
    matches = {key: LEAF.search(key) for key in tensors}
    parts = {SAME.get(match[1], match[1]): tensors[key] for key, match in matches.items() if match and match[1]}
    return parts if len(parts) == len(tensors) else None


def adapter_of(parts: Tensors, layer: str, shape: torch.Size, settings: Json) -> Adapter:
    """Return the adapter that the `parts` in a file are of a weight of `shape`.

    Raises KeyError, IndexError or RuntimeError where they are none; the arithmetic is tried without numbers.
    """
    if not all(tensor.numel() for tensor in parts.values()):
        raise KeyError(layer)
    scale = file_scale(parts, layer, settings)
    weights = {part: tensor for part, tensor in parts.items() if part not in ("alpha", "dora_scale")}
    # Beside PEFT's magnitudes, dora_scale is only their form for ComfyUI's loaders and one base model.
    if "dora_scale" in parts and ROWS not in parts:
        magnitudes = parts["dora_scale"]
        weights[ROWS if magnitudes.shape[:1] == shape[:1] else COLUMNS] = magnitudes
    adapter = Adapter(weights, scale)
    adapted(torch.empty(shape, device="meta"), adapter)
    return adapter


def adapted(weight: torch.Tensor, adapter: Adapter, strength: float = 1.0) -> torch.Tensor:
    """Return `weight` with `adapter`, in float32 and in the order of ComfyUI's operations, to its bits.

    That is W + strength * scale * BA for LoRA. For DoRA (Liu et al., 2024) it is W + scale * BA, its rows or columns
    brought to the file's magnitudes, as in peft (tuners/lora/dora.py), LyCORIS (functional/general.py) and OneTrainer
    (modules/module/LoRAModule.py).
    """
    weight = weight.float()
    parts = {part: tensor.to(weight.device, torch.float32) for part, tensor in adapter.parts.items()}
    delta = product_of(parts).reshape(weight.shape)
    if not parts:
        return weight + strength * adapter.scale * delta
    changed = weight + delta * adapter.scale
    if ROWS in parts:
        factors = dora_scale(weight, changed, parts.pop(ROWS)) / norms_of(weight, 0)
    else:
        norms = norms_of(changed, 1)
        factors = parts.pop(COLUMNS).reshape(norms.shape) / norms
    if parts:
        raise KeyError(*parts)
    changed = changed * factors
    return changed if strength == 1.0 else weight + strength * (changed - weight)


def dora_scale(weight: torch.Tensor, changed: torch.Tensor, magnitudes: torch.Tensor) -> torch.Tensor:
    """Return ComfyUI's form of the `magnitudes` m of the rows of `changed`, W + BA.

    The weight is to be m (W + BA) / |W + BA|. ComfyUI computes s (W + BA) / |W| (comfy/weight_adapter/base.py,
    weight_decompose), so its s is m |W| / |W + BA|.
    """
    norms = norms_of(changed, 0)
    return magnitudes.reshape(norms.shape) * norms_of(weight, 0) / norms


def norms_of(weight: torch.Tensor, axis: int) -> torch.Tensor:
    """Return the norms of the rows (`axis` 0) or columns (1) of `weight`, shaped to divide it, none of them zero."""
    norms = weight.transpose(0, axis).flatten(1).norm(dim=1) + torch.finfo(torch.float32).eps
    return norms.reshape(-1, *[1] * (weight.ndim - 1)).transpose(0, axis)


def product_of(parts: Tensors) -> torch.Tensor:
    """Take the matrices out of `parts` and return their product: of LoRA's two; of LoHa's pairs, number by number; of
    LoKr's, by Kronecker. Raises KeyError for one that is missing."""
    if "lora_A" in parts:
        down, up = parts.pop("lora_A").flatten(1), parts.pop("lora_B").flatten(1)
        return tucker(parts.pop("lora_mid"), up.T, down) if "lora_mid" in parts else up @ down
    if "hada_w1_a" in parts:
        return factor(parts, "hada_w1", "hada_t1") * factor(parts, "hada_w2", "hada_t2")
    return torch.kron(factor(parts, "lokr_w1").flatten(1), factor(parts, "lokr_w2", "lokr_t2").flatten(1))


def factor(parts: Tensors, name: str, core: str = "") -> torch.Tensor:
    """Take a factor out of `parts`, whole or the product of two matrices and maybe a `core`, and return it."""
    if name in parts:
        return parts.pop(name)
    left, right = parts.pop(f"{name}_a"), parts.pop(f"{name}_b")
    return tucker(parts.pop(core), left, right) if core in parts else left.flatten(1) @ right.flatten(1)


def tucker(core: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Return [O, I, ...] of `core` [R, R, ...], `left` [R, O] and `right` [R, I], as LyCORIS' rebuild_tucker does."""
    return torch.einsum("ij...,ip,jr->pr...", core, left, right)


def file_scale(parts: Tensors, layer: str, settings: Json) -> float:
    """Return the factor by which the trainer multiplies the product of a layer's `parts`.

    LyCORIS does not scale a LoKr of two full matrices. PEFT does. Raises RuntimeError for several alphas,
    IndexError for a part without rows.
    """
    rank: float | None = next((parts[part].shape[0] for part in RANKED if part in parts), None)
    if rank is None and "alpha" in parts:
        return 1.0
    alpha = parts["alpha"].item() if "alpha" in parts else of_layer(settings, "alpha", layer)
    rank = rank or of_layer(settings, "rank", layer)
    if alpha is None or rank is None:
        return 1.0
    return alpha / (math.sqrt(rank) if settings.get("use_rslora") else rank)


def of_layer(settings: Json, field: str, layer: str) -> float | None:
    """Return PEFT's alpha or rank of `layer`: of the first pattern that fits the end of its name, or the default."""
    for pattern, value in (settings.get(f"{field}_pattern") or {}).items():
        if re.match(rf"(.*\.)?({pattern})$", layer):
            return value
    return next((settings[name] for name in PEFT_NAMES[field] if settings.get(name) is not None), None)


def peft_settings(checkpoint: Checkpoint) -> Json:
    """Return PEFT's settings: from the file beside the weights, or from the metadata that diffusers wrote, or {}."""
    if beside := peft_file(checkpoint.path):
        settings = read_json(beside)
    else:
        prefix = "transformer."
        written = parse_json(checkpoint.weights.metadata.get(IN_FILE, "{}"), f"{checkpoint.name}: {IN_FILE}")
        settings = {key.removeprefix(prefix): value for key, value in written.items() if key.startswith(prefix)}
    check_peft(checkpoint.name, settings)
    return settings


def peft_file(file: Path) -> Path | None:
    """Return PEFT's own file of the settings of the weights in `file`, None where there is none."""
    beside = file.with_name(BESIDE[1])
    return beside if file.name == BESIDE[0] and beside.is_file() else None


def reference_note(name: str, metadata: Mapping[str, str], reference: str) -> str:
    """Return a line for the user where the LoRA `name` was trained by this package on a model of another reference."""
    trained = metadata.get("reference")
    if trained not in RULES or trained == reference:
        return ""
    return (
        f"{name}: trained with reference {trained}, but the model follows {reference}, which generates other images; "
        f"choose {trained}"
    )
