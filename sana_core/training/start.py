"""An adapter that begins where a file's stands, be it of this package or of another trainer, in the usual dialects."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from ..checkpoints.files import shown
from ..checkpoints.lora import COLUMNS, ROWS, Tensors, read_whole
from ..errors import InputError
from .adapters import SCALED, adapter_layers, layer_names, parts_of
from .entries import digest_of
from .pictures import Place, read_place
from .runs import find_states, read_run
from .settings import ADAPTERS, TARGETS, Method, Settings

if TYPE_CHECKING:
    from diffusers import SanaTransformer2DModel


def begin_at(transformer: SanaTransformer2DModel, method: Method) -> None:
    """Give the adapter that `add_adapter` put on `transformer` the weights in the file `method.start`.

    Its effect is that of the file: where the file's alpha, which stands beside its tensors or in PEFT's settings,
    scales otherwise than `method`, the weights make up for it. Raises InputError where kind, rank or targets of
    `method` are not the file's, with what they should be, and CheckpointError, MissingFileError or ReadError for what
    is no LoRA.
    """
    modules = {name: getattr(module, "base_layer", module) for name, module in transformer.named_modules()}
    weighty = (torch.nn.Linear, torch.nn.Conv2d)
    shapes = {name: module.weight.shape for name, module in modules.items() if isinstance(module, weighty)}
    found, file = read_whole(method.start, shapes), shown(Path(method.start))
    check_kind({part for adapter in found.values() for part in adapter.parts}, method.kind, file)
    layers = adapter_layers(transformer)
    check_targets(found.keys(), layers.keys(), shapes.keys(), method, file)
    for name, layer in layers.items():
        own, (parts, scale) = parts_of(layer), found[name]
        check_parts(parts, own, f"{file}: {name}")
        for part, parameter in own.items():
            factor = scale / method.scale if part in SCALED else 1.0
            parameter.data.copy_((parts[part].float() * factor).reshape(parameter.shape))


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


def check_kind(parts: Collection[str], kind: str, file: str) -> None:
    """Raise InputError unless an adapter with these `parts` is of that `kind`."""
    tells = {"hada_w1_a": "loha", "lokr_w1": "lokr", "lokr_w1_a": "lokr", COLUMNS: "dora of columns", ROWS: "dora"}
    got = next((own for part, own in tells.items() if part in parts), "lora")
    if got not in ADAPTERS:
        raise InputError(f"{file}: got a {got}, expected {', '.join(ADAPTERS)}; begin without start")
    if got != kind:
        raise InputError(f"{file}: got a {got}, but method.kind is {kind}; set kind to {got}")


def check_targets(
    found: Collection[str], trained: Collection[str], names: Collection[str], method: Method, file: str
) -> None:
    """Raise InputError unless the file has just the layers that are `trained`."""
    if set(found) == set(trained):
        return
    for fitting in () if method.layers else TARGETS:
        if set(found) == {name for name in names if re.fullmatch(layer_names(Method(targets=fitting)), name)}:
            raise InputError(
                f"{file}: its layers are of targets {fitting}, but method.targets is {method.targets}; set it so"
            )
    first = min(set(found) ^ set(trained))
    where = "missing" if first in trained else "more than is trained"
    raise InputError(f"{file}: its layers are of no targets, {first} is {where}; begin without start")


def check_parts(found: Tensors, own: Mapping[str, torch.Tensor], name: str) -> None:
    """Raise InputError unless the file's tensors of a layer have the shapes of its adapter."""
    for part in sorted(own.keys() | found.keys()):
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


def squeezed(shape: list[int]) -> list[int]:
    """Return a shape without the ones at its end: 1x1 convolutions are linear layers elsewhere."""
    while shape and shape[-1] == 1:
        shape = shape[:-1]
    return shape
