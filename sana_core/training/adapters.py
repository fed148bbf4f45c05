"""LoRA, DoRA and LoKr on a SANA transformer: peft's layers, and files that other programs open.

The file has diffusers' names. The scale alpha / rank is folded into the weights, so that a program that does not know
where PEFT keeps alpha draws the same picture.
"""

from __future__ import annotations

import fnmatch
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ..checkpoints.lora import ROWS, Adapter, Tensors, adapted, dora_scale, product_of
from ..checkpoints.tensor_files import write_tensors
from ..errors import InputError, VersionError
from .settings import Method

if TYPE_CHECKING:
    from diffusers import SanaTransformer2DModel

ADAPTER = "default"
PREFIX = "transformer."
# by which parameters of the layers are trained; the depthwise convolution has 27 numbers a channel and stays as it is
LAYERS = {
    "attention": r"attn[12]\.(to_q|to_k|to_v|to_out\.0)",
    "feed_forward": r"ff\.(conv_inverted|conv_point)",
}
# of each kind, the matrix that the scale is folded into
SCALED = ("lora_B", "lokr_w1", "lokr_w1_a")


def add_adapter(transformer: SanaTransformer2DModel, method: Method, seed: int) -> None:
    """Put the adapter of `method` on `transformer`, in float32 and at first without effect; the rest is frozen.

    Its random numbers depend on `seed` alone; on the meta device it has none. Raises VersionError where peft is not
    installed, and InputError where `method.layers` fit none.
    """
    try:
        from peft import LoKrConfig, LoraConfig, inject_adapter_in_model
    except ImportError as error:
        raise VersionError(f"peft: cannot be imported ({error!s:.120}); pip install peft") from None
    check_layers(dict(transformer.named_modules()), method)
    transformer.requires_grad_(False)
    own: dict[str, Any] = {"r": method.rank, "target_modules": layer_names(method)}
    alpha = method.scale * method.rank
    config: Any
    if method.kind == "lokr":
        config = LoKrConfig(alpha=alpha, **own)  # type: ignore[arg-type]  # it takes any number
    else:
        own |= {"lora_alpha": alpha, "lora_dropout": method.dropout, "use_dora": method.kind == "dora"}
        config = LoraConfig(**own)  # type: ignore[arg-type]
    inject_adapter_in_model(config, transformer, ADAPTER)
    if method.dropout:
        for layer in adapter_layers(transformer).values():
            layer.train()
    numbers = torch.Generator().manual_seed(seed)
    for name, parameter in transformer.named_parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
            # peft draws them from torch's global generator; what is zero stays so
            if ROWS not in name and not parameter.is_meta and parameter.any():
                drawn = torch.empty(parameter.shape)
                torch.nn.init.kaiming_uniform_(drawn, a=5**0.5, generator=numbers)
                parameter.data.copy_(drawn)


def layer_names(method: Method) -> str:
    """Return the pattern of the layers that get an adapter, as peft's target_modules."""
    wanted = LAYERS.values() if method.targets == "both" else [LAYERS[method.targets]]
    chosen = f"(?={'|'.join(map(fnmatch.translate, method.layers))})" if method.layers else ""
    return rf"{chosen}transformer_blocks\.\d+\.({'|'.join(wanted)})"


def check_layers(names: Iterable[str], method: Method) -> None:
    """Raise InputError where none of the layers of these `names` gets an adapter."""
    if not any(map(re.compile(layer_names(method)).fullmatch, names)):
        raise InputError(
            f"layers: got {', '.join(method.layers)!s:.80}, which fits none of targets {method.targets}, expected one "
            'such as "transformer_blocks.1?.*" or "*.attn2.*"'
        )


@contextmanager
def without_dropout(transformer: torch.nn.Module) -> Iterator[None]:
    """Let the adapter compute as it does outside training."""
    layers = [layer for layer in adapter_layers(transformer).values() if layer.training]
    for layer in layers:
        layer.train(False)
    try:
        yield
    finally:
        for layer in layers:
            layer.train()


def adapter_layers(transformer: SanaTransformer2DModel) -> dict[str, Any]:
    """Return {name: layer} of the layers with an adapter."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    return {name: layer for name, layer in transformer.named_modules() if isinstance(layer, BaseTunerLayer)}


def adapter_tensors(transformer: SanaTransformer2DModel, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Return the adapter as its file has it, in `dtype` on the CPU, the scale folded in."""
    from peft import get_peft_model_state_dict

    scales = {name: layer.scaling[ADAPTER] for name, layer in adapter_layers(transformer).items()}
    tensors = {}
    for name, tensor in get_peft_model_state_dict(transformer, adapter_name=ADAPTER).items():
        layer, part = split(name)
        scale = scales[layer] if part in SCALED else 1.0
        tensors[PREFIX + name] = (tensor.detach().float() * scale).to("cpu", dtype).contiguous()
    return tensors


def split(name: str) -> tuple[str, str]:
    """Return the layer and the part of an adapter's tensor: ("...to_q", "lora_B") of "...to_q.lora_B.weight"."""
    layer, _, part = name.removesuffix(".weight").rpartition(".")
    return layer, part


def by_layer(tensors: Mapping[str, torch.Tensor]) -> dict[str, Tensors]:
    """Return {layer: {part: tensor}} of the `tensors` of `adapter_tensors`."""
    found: dict[str, Tensors] = {}
    for name, tensor in tensors.items():
        layer, part = split(name.removeprefix(PREFIX))
        found.setdefault(layer, {})[part] = tensor
    return found


def core_magnitudes(layer: Any, parts: Tensors) -> torch.Tensor:
    """Return what ComfyUI's loaders want of a DoRA of `parts` on `layer`, float32 on the CPU."""
    weight = layer.get_base_layer().weight.detach().float().cpu()
    own = {part: tensor.float().cpu() for part, tensor in parts.items()}
    changed = weight + product_of(own).reshape(weight.shape)
    return dora_scale(weight, changed, own[ROWS]).contiguous()


def write_adapter(
    file: Path,
    transformer: SanaTransformer2DModel,
    tensors: Mapping[str, torch.Tensor],
    method: Method,
    facts: Mapping[str, str],
) -> None:
    """Write `tensors` of `adapter_tensors` to `file`, with `facts` as metadata. Raises OSError."""
    metadata = {"format": "pt", **facts}
    if method.kind != "lokr":
        # what peft's LoraConfig is made of again; diffusers 0.35 asks for the patterns
        peft_settings = {"r": method.rank, "lora_alpha": method.rank, "target_modules": layer_names(method)}
        peft_settings |= {"use_dora": method.kind == "dora", "rank_pattern": {}, "alpha_pattern": {}}
        metadata["lora_adapter_metadata"] = json.dumps({f"{PREFIX}{key}": own for key, own in peft_settings.items()})
    layers = adapter_layers(transformer)
    scales = {
        f"{PREFIX}{name}.dora_scale": core_magnitudes(layers[name], parts)
        for name, parts in by_layer(tensors).items()
        if ROWS in parts
    }
    write_tensors(file, {**tensors, **scales}, metadata)


@contextmanager
def merged(transformer: SanaTransformer2DModel, tensors: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """Let `transformer` compute with the weights that a program gives it which opens the file of `tensors`.

    Such a program adds the adapter to the weights once, in their precision, where training adds outputs. Afterwards
    the weights are what they were, to the bit.
    """
    # of the file's tensors by layer, as those that open it find them
    layers = adapter_layers(transformer)
    weights = {name: layer.get_base_layer().weight.data for name, layer in layers.items()}
    before = {name: weight.to("cpu", copy=True) for name, weight in weights.items()}
    found = by_layer(tensors)
    try:
        for name, layer in layers.items():
            weights[name].copy_(adapted(weights[name], Adapter(found[name])))
            layer.merged_adapters.append(ADAPTER)
        yield
    finally:
        for name, layer in layers.items():
            layer.merged_adapters.clear()
            weights[name].copy_(before[name])


def parts_of(layer: Any) -> dict[str, torch.nn.Parameter]:
    """Return {part: parameter} of a layer's adapter."""
    found = {}
    for name, parameter in layer.named_parameters():
        if parameter.requires_grad:
            part = name.removesuffix(".weight").removesuffix(f".{ADAPTER}")
            found[part] = parameter
    return found
