"""An adapter that begins where a file's stands, be it of this package or of another trainer, in the usual dialects."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from ..checkpoints import find_part, inspect_checkpoint
from ..checkpoints.headers import read_file
from ..errors import InputError
from ..lora import MAGNITUDE, Tensors, by_layer, file_scale, peft_settings, squeezed
from .adapters import SCALED, adapter_layers, layer_names, parts_of
from .entries import digest_of
from .pictures import Place, read_place
from .runs import find_states, read_run
from .settings import TARGETS, Method, Settings

if TYPE_CHECKING:
    from diffusers import SanaTransformer2DModel

BOTH = Method(targets="both")


def begin_at(transformer: SanaTransformer2DModel, method: Method) -> None:
    """Give the adapter that `add_adapter` put on `transformer` the weights in the file `method.start`.

    Its effect is that of the file: where the file's alpha, which stands beside its tensors or in PEFT's settings,
    scales otherwise than `method`, the weights make up for it. Raises InputError where kind, rank or targets of
    `method` are not the file's, with what they should be, and CheckpointError, MissingFileError or ReadError for what
    is no LoRA.
    """
    info = find_part(inspect_checkpoint(method.start), "lora")
    names = [name for name, _ in transformer.named_modules() if re.fullmatch(layer_names(BOTH), name)]
    found = by_layer(read_file(info.path), names, info.name)
    check_kind(found, method.kind, info.name)
    layers = adapter_layers(transformer)
    check_targets(found.keys(), layers.keys(), names, method.targets, info.name)
    settings = peft_settings(info)
    for name, layer in layers.items():
        own = parts_of(layer, data=False)
        check_parts(found[name], own, f"{info.name}: {name}")
        scale = file_scale(found[name], settings) / method.scale
        for part, parameter in own.items():
            factor = scale if part in SCALED else 1.0
            parameter.data.copy_((found[name][part].float() * factor).reshape(parameter.shape))


def needs_start(settings: Settings) -> bool:
    """Whether a run begins at the file `method.start`; one that has a state goes on without it."""
    return bool(settings.method.start) and not find_states(Path(settings.out))


def start_fact(settings: Settings) -> str:
    """Return the digest of the file `method.start`, or what the run has noted of one that is gone since.

    Raises MissingFileError or ReadError for a file that cannot be read.
    """
    file, known = settings.method.start, read_run(Path(settings.out))[0] or {}
    if not Path(file).exists() and "start" in known:
        return known["start"]
    return digest_of(read_place(Place(Path(file)), file))


def check_kind(found: Mapping[str, Tensors], kind: str, file: str) -> None:
    """Raise InputError unless the file's adapter is of that `kind`."""
    parts = {part for tensors in found.values() for part in tensors}
    if "dora_scale" in parts and MAGNITUDE not in parts:
        raise InputError(
            f"{file}: got a DoRA with dora_scale alone, expected lora_magnitude_vector; begin without start"
        )
    got = "lokr" if any(part.startswith("lokr") for part in parts) else "dora" if MAGNITUDE in parts else "lora"
    if got != kind:
        raise InputError(f"{file}: got a {got}, but method.kind is {kind}; set kind to {got}")


def check_targets(
    found: Collection[str], trained: Collection[str], names: Collection[str], targets: str, file: str
) -> None:
    """Raise InputError unless the file has just the layers that are `trained`."""
    if set(found) == set(trained):
        return
    for fitting in TARGETS:
        if set(found) == {name for name in names if re.fullmatch(layer_names(Method(targets=fitting)), name)}:
            raise InputError(f"{file}: its layers are of targets {fitting}, but method.targets is {targets}; set it so")
    first = min(set(found) ^ set(trained))
    where = "missing" if first in trained else "more than is trained"
    raise InputError(f"{file}: its layers are of no targets, {first} is {where}; begin without start")


def check_parts(found: Tensors, own: Mapping[str, torch.Tensor], name: str) -> None:
    """Raise InputError unless the file's tensors of a layer have the shapes of its adapter."""
    # beside magnitudes the scales are the same for ComfyUI, see `core_magnitudes`
    for part in sorted(own.keys() | found.keys() - {"alpha", "dora_scale"}):
        if part not in found or part not in own:
            raise InputError(f"{name}: {part} is {'missing' if part in own else 'too much'}; begin without start")
        got, expected = (list(tensor.shape) for tensor in (found[part], own[part]))
        if squeezed(got) == squeezed(expected):
            continue
        rank = 1 if part == "lora_B" else 0
        ranked = part in ("lora_A", "lora_B") and len(got) == len(expected)
        if ranked and squeezed(got[:rank] + got[rank + 1 :]) == squeezed(expected[:rank] + expected[rank + 1 :]):
            raise InputError(
                f"{name}: got rank {got[rank]}, but method.rank is {expected[rank]}; set rank to {got[rank]}"
            )
        raise InputError(f"{name}: got {part} of {got}, expected {expected}; choose a LoRA of this model")
