"""LoRA, DoRA and LoKr on a SANA transformer: peft's layers, and files that other programs open.

The file has diffusers' names. The scale alpha / rank is folded into the weights, so that a program that does not know
where PEFT keeps alpha generates the same image.
"""

from __future__ import annotations

import fnmatch
import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ..checkpoints.headers import write_tensors
from ..checkpoints.lora import (
    COLUMNS,
    ROWS,
    Adapter,
    Tensors,
    adapted,
    dora_scale,
    parts_of,
    product_of,
    read_whole,
    split_layers,
)
from ..errors import InputError, VersionError
from ..runtime.atomic_files import digest_of
from ..runtime.text import shown
from .images import FileRange, read_range
from .settings import ADAPTERS, TARGETS, Method, TrainingSettings
from .states import find_states, read_run

if TYPE_CHECKING:
    from diffusers import SanaTransformer2DModel

ADAPTER = "default"
PREFIX = "transformer."
# {targets: pattern of the layers that get an adapter}. The depthwise convolution is too small for one.
LAYERS = {
    "attention": r"attn[12]\.(to_q|to_k|to_v|to_out\.0)",
    "feed_forward": r"ff\.(conv_inverted|conv_point)",
}
# The scale alpha / rank is folded into one of these matrices, depending on the kind of the adapter.
SCALED = ("lora_B", "lokr_w1", "lokr_w1_a")


def add_adapter(transformer: SanaTransformer2DModel, method: Method, seed: int) -> None:
    """Put the adapter of `method` on `transformer`, in float32 and at first without effect. Freezes all other weights.

    The random values depend on `seed` only. Raises VersionError if peft is not installed, and InputError if
    `method.layers` match no layer.
    """
    try:
        from peft import LoKrConfig, LoraConfig, inject_adapter_in_model
    except ImportError as error:
        raise VersionError(f"peft: cannot be imported ({error!s:.120}); pip install peft") from None
    check_layers(dict(transformer.named_modules()), method)
    transformer.requires_grad_(False)
    options: dict[str, Any] = {"r": method.rank, "target_modules": layer_names(method)}
    alpha = method.scale * method.rank
    config: Any
    if method.kind == "lokr":
        config = LoKrConfig(alpha=alpha, **options)  # type: ignore[arg-type]  # It accepts any number.
    else:
        options |= {"lora_alpha": alpha, "lora_dropout": method.dropout, "use_dora": method.kind == "dora"}
        config = LoraConfig(**options)  # type: ignore[arg-type]
    inject_adapter_in_model(config, transformer, ADAPTER)
    if method.dropout:
        for layer in adapter_layers(transformer).values():
            layer.train()
    rng = torch.Generator().manual_seed(seed)
    for name, parameter in transformer.named_parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
            # peft uses torch's global generator. Generate the values again from the seed, except the zeros.
            if ROWS not in name and not parameter.is_meta and parameter.any():
                values = torch.empty(parameter.shape)
                torch.nn.init.kaiming_uniform_(values, a=5**0.5, generator=rng)
                parameter.data.copy_(values)


def layer_names(method: Method) -> str:
    """Return the pattern of the layers that get an adapter, as peft's target_modules."""
    patterns = LAYERS.values() if method.targets == "both" else [LAYERS[method.targets]]
    chosen = f"(?={'|'.join(map(fnmatch.translate, method.layers))})" if method.layers else ""
    return rf"{chosen}transformer_blocks\.\d+\.({'|'.join(patterns)})"


def check_layers(names: Iterable[str], method: Method) -> None:
    """Raise InputError if no layer in `names` gets an adapter."""
    if not any(map(re.compile(layer_names(method)).fullmatch, names)):
        raise InputError(
            f"layers: got {', '.join(method.layers)!s:.80}, which fits none of targets {method.targets}, expected one "
            'such as "transformer_blocks.1?.*" or "*.attn2.*"'
        )


@contextmanager
def without_dropout(transformer: torch.nn.Module) -> Iterator[None]:
    """Disable the dropout of the adapter."""
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
    """Return the tensors of the adapter's file, in `dtype` on the CPU. The scale is folded in."""
    from peft import get_peft_model_state_dict

    scales = {name: layer.scaling[ADAPTER] for name, layer in adapter_layers(transformer).items()}
    tensors = {}
    for name, tensor in get_peft_model_state_dict(transformer, adapter_name=ADAPTER).items():
        layer, _, part = name.removesuffix(".weight").rpartition(".")
        scale = scales[layer] if part in SCALED else 1.0
        tensors[PREFIX + name] = (tensor.detach().float() * scale).to("cpu", dtype).contiguous()
    return tensors


def by_layer(tensors: Mapping[str, torch.Tensor]) -> dict[str, Tensors]:
    """Return {layer: {part: tensor}} of the `tensors` of `adapter_tensors`."""
    return {name.removeprefix(PREFIX): parts_of(layer) or {} for name, layer in split_layers(tensors).items()}


def core_magnitudes(layer: Any, parts: Tensors) -> torch.Tensor:
    """Return the magnitudes of a DoRA in the form of ComfyUI's loaders, in float32 on the CPU.

    `parts`: the tensors of the DoRA on `layer`.
    """
    weight = layer.get_base_layer().weight.detach().float().cpu()
    parts = {part: tensor.float().cpu() for part, tensor in parts.items()}
    changed = weight + product_of(parts).reshape(weight.shape)
    return dora_scale(weight, changed, parts[ROWS]).contiguous()


def write_adapter(
    file: Path,
    transformer: SanaTransformer2DModel,
    tensors: Mapping[str, torch.Tensor],
    method: Method,
    metadata: Mapping[str, str],
) -> None:
    """Write the `tensors` of `adapter_tensors` to `file`, with `metadata`. Raises OSError."""
    metadata = {"format": "pt", **metadata}
    if method.kind != "lokr":
        # Loaders build peft's LoraConfig from this. diffusers 0.35 requires the patterns.
        peft_settings = {"r": method.rank, "lora_alpha": method.rank, "target_modules": layer_names(method)}
        peft_settings |= {"use_dora": method.kind == "dora", "rank_pattern": {}, "alpha_pattern": {}}
        metadata["lora_adapter_metadata"] = json.dumps(
            {f"{PREFIX}{key}": value for key, value in peft_settings.items()}
        )
    layers = adapter_layers(transformer)
    scales = {
        f"{PREFIX}{name}.dora_scale": core_magnitudes(layers[name], parts)
        for name, parts in by_layer(tensors).items()
        if ROWS in parts
    }
    write_tensors(file, {**tensors, **scales}, metadata)


@contextmanager
def merged(transformer: SanaTransformer2DModel, tensors: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """Merge the adapter into the weights inside the context, as programs do that load the file of `tensors`.

    Such a program adds the adapter to the weights once, in their precision, while training adds outputs. Afterwards
    the weights have their old bits.
    """
    layers = adapter_layers(transformer)
    weights = {name: layer.get_base_layer().weight.data for name, layer in layers.items()}
    before = {name: weight.to("cpu", copy=True) for name, weight in weights.items()}
    parts = by_layer(tensors)
    try:
        for name, layer in layers.items():
            weights[name].copy_(adapted(weights[name], Adapter(parts[name])))
            layer.merged_adapters.append(ADAPTER)
        yield
    finally:
        for name, layer in layers.items():
            layer.merged_adapters.clear()
            weights[name].copy_(before[name])


def begin_at(transformer: SanaTransformer2DModel, method: Method) -> None:
    """Copy the weights of the file `method.start` into the adapter that `add_adapter` put on `transformer`.

    The adapter then has the effect of the file. If the file's alpha differs from `method`, the weights are scaled to
    compensate. Raises InputError if kind, rank or targets of `method` differ from the file.
    """
    modules = {name: getattr(module, "base_layer", module) for name, module in transformer.named_modules()}
    weighty = (torch.nn.Linear, torch.nn.Conv2d)
    shapes = {name: module.weight.shape for name, module in modules.items() if isinstance(module, weighty)}
    adapters, file = read_whole(method.start, shapes), shown(Path(method.start))
    check_kind({part for adapter in adapters.values() for part in adapter.parts}, method.kind, file)
    layers = adapter_layers(transformer)
    check_targets(adapters.keys(), layers.keys(), shapes.keys(), method, file)
    for name, layer in layers.items():
        trained = {f".{key}": value for key, value in layer.named_parameters() if value.requires_grad}
        parameters, (parts, scale) = parts_of(trained) or {}, adapters[name]
        check_parts(parts, parameters, f"{file}: {name}")
        for part, parameter in parameters.items():
            factor = scale / method.scale if part in SCALED else 1.0
            parameter.detach().copy_((parts[part].float() * factor).reshape(parameter.shape))


def needs_start(settings: TrainingSettings) -> bool:
    """Whether a run begins with the file `method.start`. A run with a saved state resumes without it."""
    return bool(settings.method.start) and not find_states(Path(settings.out))


def start_digest(settings: TrainingSettings) -> str:
    """Return the digest of the file `method.start`. If the file is gone, return the digest in run.json."""
    file, config = settings.method.start, read_run(Path(settings.out))[0] or {}
    if not Path(file).exists() and "start" in config:
        return config["start"]
    return digest_of(read_range(FileRange(Path(file)), file))


def check_kind(parts: Collection[str], kind: str, file: str) -> None:
    """Raise InputError unless an adapter with these `parts` is of `kind`."""
    kinds = {"hada_w1_a": "loha", "lokr_w1": "lokr", "lokr_w1_a": "lokr", COLUMNS: "dora of columns", ROWS: "dora"}
    got = next((name for part, name in kinds.items() if part in parts), "lora")
    if got not in ADAPTERS:
        raise InputError(f"{file}: got a {got}, expected {', '.join(ADAPTERS)}; remove method.start")
    if got != kind:
        raise InputError(f"{file}: got a {got}, but method.kind is {kind}; set it to {got}")


def check_targets(
    layers: Collection[str], trained: Collection[str], names: Collection[str], method: Method, file: str
) -> None:
    """Raise InputError unless the `layers` of the file are the `trained` layers. `names`: all layers of the model."""
    if set(layers) == set(trained):
        return
    for fitting in () if method.layers else TARGETS:
        if set(layers) == {name for name in names if re.fullmatch(layer_names(Method(targets=fitting)), name)}:
            raise InputError(
                f"{file}: its layers are of targets {fitting}, but method.targets is {method.targets}; set it so"
            )
    first = min(set(layers) ^ set(trained))
    where = "missing" if first in trained else "more than is trained"
    raise InputError(f"{file}: its layers are of no targets, {first} is {where}; remove method.start")


def check_parts(parts: Tensors, parameters: Mapping[str, torch.Tensor], name: str) -> None:
    """Raise InputError unless the file's tensors of a layer have the shapes of its adapter."""
    for part in sorted(parameters.keys() ^ parts.keys()):
        raise InputError(f"{name}: {part} is {'missing' if part in parameters else 'unexpected'}; remove method.start")
    for part in sorted(parameters):
        got, expected = (list(tensor.shape) for tensor in (parts[part], parameters[part]))
        # All other sizes of a LoRA are sizes of the model.
        if part == "lora_A" and got[0] != expected[0]:
            raise InputError(f"{name}: got rank {got[0]}, but method.rank is {expected[0]}; set rank to {got[0]}")
        if squeezed(got) != squeezed(expected):
            raise InputError(f"{name}: got {part} of {got}, expected {expected}; choose a LoRA of this model")


def squeezed(shape: list[int]) -> list[int]:
    """Return a shape without trailing ones. Other programs write 1x1 convolutions as linear layers."""
    while shape and shape[-1] == 1:
        shape = shape[:-1]
    return shape
