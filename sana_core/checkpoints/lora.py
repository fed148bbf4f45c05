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
from .keys import COLUMNS, HOLDERS, LEAF, ROWS, WRAPPERS, part_of
from .load import check_finite
from .schemas import check_peft

if TYPE_CHECKING:
    from diffusers import SanaTransformer2DModel

Tensors = dict[str, torch.Tensor]

# Prefixes of a module's name: diffusers', PEFT's, none, ComfyUI's; and of a name with underscores instead of dots:
# kohya's, OneTrainer's, SimpleTuner's.
DOTTED = ("transformer.", "base_model.model.", "transformer.base_model.model.", "", "diffusion_model.")
FLAT = ("lora_unet_", "lora_transformer_", "lycoris_")
# What torch.compile and FSDP insert into names with underscores, and what DDP puts before the module's name.
FLAT_WRAPPERS = re.compile(r"_(?:orig_mod|fsdp_wrapped_module|checkpoint_wrapped_module)_")
FLAT_HOLDERS = re.compile(rf"^({'|'.join(FLAT)})(?:module_|model_)+")
# The parts of a file that change a layer's bias, and the part of the bias.
BIASES = {"lora_bias": "diff", "diff_b": "diff", "bias": "weight"}
# The factors whose number of rows is the rank.
PRODUCTS = {"lora_A", "hada_w1_a", "lokr_w1", "lokr_w1_a", "a1"}
RANKED = ("lora_A", "hada_w1_b", "lokr_w2_b", "lokr_w1_b")
TWICE = "its weight has another layer in the file"
# The key of PEFT's settings in the metadata of diffusers, and PEFT's two files in a folder.
IN_FILE, BESIDE = "lora_adapter_metadata", ("adapter_model.safetensors", "adapter_config.json")
PEFT_NAMES = {"alpha": ("lora_alpha", "alpha"), "rank": ("r",)}
# Layers in a list of misfits, and characters of the list.
SHOWN, LONGEST = 3, 240


class Adapter(NamedTuple):
    """The tensors that change a parameter by their parts, and the factor of the product of its matrices."""

    parts: Tensors
    scale: float = 1.0


class FileAdapters(NamedTuple):
    # By parameter of the model.
    adapters: dict[str, Adapter]
    # By layer name in the file: why its adapter does not fit, empty for a layer that the model does not have.
    misfits: dict[str, str]
    # The number of layers in the file.
    total: int


@torch.no_grad()
def merge_loras(transformer: SanaTransformer2DModel, loras: Sequence[tuple[str, float]]) -> None:
    """Add the adapters of `loras`, pairs of a file and its strength, to the weights of `transformer`.

    On the meta device only names and shapes are checked.
    """
    parameters = dict(transformer.named_parameters(remove_duplicate=False))
    for file, strength in loras:
        for name, adapter in read_whole(file, {name: value.shape for name, value in parameters.items()}).items():
            parameters[name].copy_(adapted(parameters[name], adapter, strength))


def read_whole(file: str | Path, shapes: Mapping[str, torch.Size]) -> dict[str, Adapter]:
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
    """Return {parameter: adapter} of a file with `tensors`. `shapes` has the shape of each parameter of the model."""
    adapters, misfits, total = read_adapters(checkpoint, tensors, shapes, written_names(layers_of(shapes)))
    if misfits:
        raise misfit_error(checkpoint.name, total, misfits)
    return adapters


def layers_of(parameters: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(name.removesuffix(".weight").removesuffix(".bias") for name in parameters))


def read_adapters(
    checkpoint: Checkpoint,
    tensors: Mapping[str, torch.Tensor],
    shapes: Mapping[str, torch.Size],
    layer_names: Mapping[str, str],
) -> FileAdapters:
    """Group the `tensors` of a file into adapters for the parameters of `shapes`, and misfits.

    `layer_names` is {layer as a file may write it: layer}. A layer is applied completely or not at all. On the meta
    device only shapes are compared.
    """
    settings, layers = peft_settings(checkpoint), split_layers(tensors)
    file_adapters = FileAdapters({}, {}, len(layers))
    for written, layer_parts in layers.items():
        layer = layer_names.get(written) or layer_names.get(unwrapped_layer(written))
        if layer is None:
            file_adapters.misfits[written] = ""
            continue
        for key, tensor in layer_parts.items():
            if not tensor.is_meta:
                check_finite(checkpoint.name, key, tensor)
        weight, parts = layer if layer in shapes else f"{layer}.weight", parts_of(layer_parts)
        got = ", ".join(f"{part} {list(tensor.shape)}" for part, tensor in sorted(parts.items()))
        try:
            if len(parts) < len(layer_parts):
                raise ValueError("of several adapters")
            adapters = adapters_of(parts, weight, f"{layer}.bias", shapes, settings)
        except KeyError as missing:
            file_adapters.misfits[written] = f"got {got}, but no {missing.args[0]}"
            continue
        except ValueError as unread:
            file_adapters.misfits[written] = f"got {got}, but {unread}"
            continue
        except (IndexError, RuntimeError):
            file_adapters.misfits[written] = f"got {got}, expected {list(shapes[weight])}"
            continue
        if file_adapters.adapters.keys() & adapters.keys():
            file_adapters.misfits[written] = TWICE
        else:
            file_adapters.adapters.update(adapters)
    return file_adapters


def misfit_error(file: str, total: int, misfits: Mapping[str, str]) -> InputError:
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
    layers: dict[str, Tensors] = {}
    for key, tensor in tensors.items():
        layers.setdefault(LEAF.sub("", key) if part_of(key) else key, {})[key] = tensor
    return layers


def parts_of(tensors: Tensors) -> Tensors:
    """Return {part: tensor} of a layer's `tensors`. A tensor that is the layer itself is its whole weight."""
    return {part_of(key) or "weight": tensor for key, tensor in tensors.items()}


def adapters_of(
    parts: Tensors, weight: str, bias: str, shapes: Mapping[str, torch.Size], settings: Json
) -> dict[str, Adapter]:
    """Return {parameter: adapter} that the `parts` in a file are of the parameters `weight` and `bias`.

    Raises KeyError with the name of a part that is missing or unknown, IndexError or RuntimeError where the shapes do
    not fit; the arithmetic is tried without numbers.
    """
    if not all(tensor.numel() for tensor in parts.values()):
        raise RuntimeError(weight)
    scale = file_scale(parts, weight.removesuffix(".weight"), settings)
    adapters: dict[str, Adapter] = {}
    for part, bias_part in BIASES.items():
        if part in parts:
            factor = scale if part == "lora_bias" else 1.0
            adapters[bias] = Adapter({**adapters.get(bias, Adapter({})).parts, bias_part: parts[part]}, factor)
    parts = {part: tensor for part, tensor in parts.items() if part not in BIASES}
    alpha, reshaped = parts.pop("alpha", None), parts.pop("reshape_weight", None)
    if parts:
        shape = shapes.get(weight) or torch.Size()
        if reshaped is not None and not reshaped.is_meta and reshaped.tolist() != list(shape):
            raise RuntimeError(weight)
        # Beside PEFT's magnitudes, dora_scale is only their form for ComfyUI's loaders and one base model.
        magnitudes = parts.pop("dora_scale", None)
        if magnitudes is not None and ROWS not in parts:
            parts[ROWS if magnitudes.shape[:1] == shape[:1] else COLUMNS] = magnitudes
        if "oft_blocks" in parts:
            if alpha is None:
                raise KeyError("alpha")
            parts["limit"] = alpha.reshape(())
        adapters[weight] = Adapter(parts, scale)
    for name, adapter in adapters.items():
        if name not in shapes:
            raise KeyError(name.rpartition(".")[2])
        adapted(torch.empty(shapes[name], device="meta"), adapter)
    return adapters


def adapted(weight: torch.Tensor, adapter: Adapter, strength: float = 1.0) -> torch.Tensor:
    """Return a parameter `weight` with `adapter`, in float32 and in the order of ComfyUI's operations, to its bits.

    That is W + strength * scale * BA for LoRA. For DoRA (Liu et al., 2024) it is W + scale * BA, its rows or columns
    brought to the file's magnitudes, as in peft (tuners/lora/dora.py), LyCORIS (functional/general.py) and OneTrainer
    (modules/module/LoRAModule.py).
    """
    weight = weight.float()
    parts = {part: tensor.to(weight.device, torch.float32) for part, tensor in adapter.parts.items()}
    if "oft_blocks" in parts:
        changed = rotated(weight, parts, strength)
    elif "weight" in parts:
        changed = fitted(parts.pop("weight"), weight.shape)
        changed = changed if strength == 1.0 else weight + strength * (changed - weight)
    else:
        delta = product_of(parts, weight).reshape(weight.shape)
        if not parts:
            return weight + strength * adapter.scale * delta
        changed = weight + delta * adapter.scale
        if ROWS in parts:
            factors = dora_scale(weight, changed, parts.pop(ROWS)) / norms_of(weight, 0)
        elif COLUMNS in parts:
            norms = norms_of(changed, 1)
            factors = parts.pop(COLUMNS).reshape(norms.shape) / norms
        else:
            raise ValueError(f"{', '.join(parts)} is not read")
        changed = changed * factors
        changed = changed if strength == 1.0 else weight + strength * (changed - weight)
    if parts:
        raise ValueError(f"{', '.join(parts)} is not read")
    return changed


def fitted(tensor: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """Return `tensor` in a `shape` that has other sides of 1. Raises RuntimeError for any other shape."""
    if [side for side in tensor.shape if side != 1] != [side for side in shape if side != 1]:
        raise RuntimeError(f"{list(tensor.shape)} for {list(shape)}")
    return tensor.reshape(shape)


def rotated(weight: torch.Tensor, parts: Tensors, strength: float) -> torch.Tensor:
    """Take the blocks of OFT or BOFT out of `parts` and return the rows of `weight`, rotated by them.

    A limit of the rotation is read as ComfyUI reads it. LyCORIS multiplies it by the number of rows.
    """
    blocks, limit, rescale = parts.pop("oft_blocks"), parts.pop("limit"), parts.pop("rescale", None)
    skew = blocks - blocks.transpose(-1, -2)
    shrunk = torch.clamp(limit / (skew.norm() + 1e-8), max=1.0)
    skew = skew * torch.where(limit > 0, shrunk, torch.ones_like(shrunk))
    unit = torch.eye(blocks.shape[-1], device=blocks.device)
    rotation = strength * ((unit + skew) @ (unit - skew).inverse()) + (1 - strength) * unit
    if blocks.ndim == 3:
        out = torch.einsum("knm,kn...->km...", rotation, weight.unflatten(0, blocks.shape[:2])).flatten(0, 1)
    else:
        out = weight
        for number, factor in enumerate(rotation):
            # A butterfly: each factor rotates rows twice as far apart as the factor before.
            apart = 2**number * (blocks.shape[-1] // 2)
            out = out.unflatten(0, (-1, 2, apart)).transpose(1, 2).flatten(0, 2).unflatten(0, blocks.shape[1:3])
            out = torch.einsum("bij,bj...->bi...", factor, out).flatten(0, 1)
            out = out.unflatten(0, (-1, apart, 2)).transpose(1, 2).flatten(0, 2)
    return out if rescale is None else out * rescale.reshape(-1, *[1] * (weight.ndim - 1))


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


def product_of(parts: Tensors, weight: torch.Tensor) -> torch.Tensor:
    """Take the matrices out of `parts` and return their product: of LoRA's two; of LoHa's pairs, number by number; of
    LoKr's, by Kronecker; of GLoRA's, of which two multiply `weight`. Raises KeyError for one that is missing."""
    if "diff" in parts:
        return fitted(parts.pop("diff"), weight.shape)
    kinds = {part.partition("_")[0] for part in parts if part != ROWS}
    if "lora" in kinds:
        down, up = parts.pop("lora_A").flatten(1), parts.pop("lora_B").flatten(1)
        return tucker(parts.pop("lora_mid"), up.T, down) if "lora_mid" in parts else up @ down
    if "hada" in kinds:
        return factor(parts, "hada_w1", "hada_t1") * factor(parts, "hada_w2", "hada_t2")
    if kinds & {"a1", "a2", "b1", "b2"}:
        a1, a2, b1, b2 = (parts.pop(name).flatten(1) for name in ("a1", "a2", "b1", "b2"))
        if len({b2.shape[0], b1.shape[1], a1.shape[1], a2.shape[0]}) > 1:
            # LyCORIS before 3.0 has the factors in the other order.
            a1, a2, b1, b2 = a2, a1, b2, b1
        columns = torch.einsum("oi...,ij->oj...", torch.einsum("oi...,ij->oj...", weight, a1), a2)
        return columns + (b1 @ b2).reshape(weight.shape)
    if "lokr" not in kinds:
        raise ValueError(f"{', '.join(parts)} is not read")
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
    if not parts.keys() & PRODUCTS:
        return 1.0
    rank: float | None = next((parts[part].shape[0] for part in RANKED if part in parts), None)
    if "a2" in parts and "b1" in parts:
        # The side that the factors of GLoRA share, in either order.
        rank = min(parts["a2"].shape[:2])
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
