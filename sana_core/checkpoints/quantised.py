"""Read the quantised layers of a file: their tensors, their formats, and their dequantised weights.

The formats have ComfyUI's names (comfy/quant_ops.py and comfy_kitchen). Other tools write them under
other names, and often without a word about the format. A layer whose format is not certain is refused.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from itertools import takewhile
from typing import Any

import torch

from ..errors import CheckpointError
from ..runtime.text import Json, brief
from .checkpoint import FP8_FILE, QUANTISED_PARTS, Checkpoint
from .files import parse_json
from .headers import Header, read_tensors

# The table of formats in a file's metadata, and the largest entry for a layer, in bytes.
TABLE, LARGEST_ENTRY = "_quantization_metadata", 10_000
# By format: the dtype of the weight, how many of its columns share a scale (0: all), and the parts of a layer. A scale
# per row is also possible where all columns share one.
FORMATS: dict[str, tuple[torch.dtype, int, tuple[str, ...]]] = {
    "float8_e4m3fn": (torch.float8_e4m3fn, 0, ("weight_scale",)),
    "float8_e5m2": (torch.float8_e5m2, 0, ("weight_scale",)),
    "int8_tensorwise": (torch.int8, 0, ("weight_scale",)),
    "convrot_w4a4": (torch.int8, 0, ("weight_scale",)),
    "mxfp8": (torch.float8_e4m3fn, 32, ("weight_scale",)),
    "nvfp4": (torch.uint8, 16, ("weight_scale", "weight_scale_2")),
}
# Parts that are not needed: the range of the layer's inputs for products in fp8, and a factor of each input.
OPTIONAL = ("input_scale", "pre_quant_scale")
# Formats that a weight and its scale show by themselves. int8 weights may be rotated, and blocks may be in any order.
SHOWN = {torch.float8_e4m3fn: "float8_e4m3fn", torch.float8_e5m2: "float8_e5m2"}
# The values of 4-bit floats without their sign, which is the fourth bit.
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def quantised_layers(part: Checkpoint) -> dict[str, Json]:
    """Return {layer: its format and the options of the format} of a component."""
    scales: dict[str, dict[str, Header]] = {}
    for name, header in part.headers.items():
        layer, _, leaf = name.rpartition(".")
        if leaf in QUANTISED_PARTS:
            scales.setdefault(layer, {})[QUANTISED_PARTS[leaf]] = header
        elif leaf == "weight" and not header.dtype.is_floating_point:
            scales.setdefault(layer, {})
    forms = stated_forms(part, scales)
    layers: dict[str, Any] = {}
    for layer in sorted(scales.keys() | forms.keys()):
        weight, parts = part.headers.get(f"{layer}.weight"), scales.get(layer, {})
        scale = parts.get("weight_scale")
        form = forms.get(layer)
        if form is None and weight is not None and scale is not None and is_shared(scale, weight):
            form = {"format": SHOWN[weight.dtype]} if weight.dtype in SHOWN else None
        fault = "it has no weight" if weight is None else fault_of(form, weight, parts)
        if fault:
            raise CheckpointError(
                f"{part.name}: got the quantised layer {brief(layer)}, but {fault}; use a file that ComfyUI has "
                "quantised, or the plain file"
            )
        layers[layer] = form
    return layers


def stated_forms(part: Checkpoint, scales: Mapping[str, Mapping[str, Header]]) -> dict[str, Any]:
    """Return {layer: form} as the file states it: in a table, or in a tensor of each layer.

    The names in a table may have another prefix than the tensors' names.
    """
    # Name in the file, with and without its prefix, or diffusers' name: the layers that it became.
    layers: defaultdict[str, set[str]] = defaultdict(set)
    names = [origin.name for origin in part.origins.values()]
    pairs = zip(min(names, default="").split("."), max(names, default="").split("."), strict=False)
    start = sum(len(word) + 1 for word, other in takewhile(lambda pair: pair[0] == pair[1], pairs))
    for name, origin in part.origins.items():
        if name.endswith(".weight"):
            for spelling in (name, origin.name, origin.name[start:]):
                layers[spelling.removesuffix(".weight")].add(name.removesuffix(".weight"))
    forms: dict[str, Any] = {}
    if TABLE in part.weights.metadata:
        entries = parse_json(part.weights.metadata[TABLE], f"{part.name}: {TABLE}").get("layers")
        if not isinstance(entries, dict):
            raise CheckpointError(f"{part.name}: {TABLE} has no table of layers; use the plain file")
        for name, form in entries.items():
            while name not in layers and "." in name:
                name = name.partition(".")[2]
            forms |= dict.fromkeys(layers.get(name, ()), form)
    markers = {layer: part.origins[f"{layer}.comfy_quant"].name for layer in scales if "comfy_quant" in scales[layer]}
    for name in markers.values():
        header = part.weights.headers[name]
        if header.dtype != torch.uint8 or header.size > LARGEST_ENTRY:
            raise CheckpointError(f"{part.name}: {brief(name)} is no tensor of a format's bytes; use the plain file")
    contents = read_tensors(part.weights, markers.values())
    for layer, name in markers.items():
        forms[layer] = parse_json(contents[name].numpy().tobytes(), f"{part.name}: {brief(name)}")
    # Two numbers in the marker of scaled fp8 ask for products of full precision.
    if FP8_FILE in part.headers and math.prod(part.headers[FP8_FILE].shape) == 2:
        for layer, parts in scales.items():
            weight = part.headers.get(f"{layer}.weight")
            if layer not in forms and "weight_scale" in parts and weight is not None and weight.dtype in SHOWN:
                forms[layer] = {"format": SHOWN[weight.dtype], "full_precision_matrix_mult": True}
    return forms


def is_shared(scale: Header, weight: Header) -> bool:
    """Whether all columns of a `weight` share a `scale`, which may be another one for each row."""
    rows = weight.shape[0] if weight.shape else 1
    return scale.dtype.is_floating_point and scale.dtype.itemsize > 1 and math.prod(scale.shape) in (1, rows)


def fault_of(form: Any, weight: Header, parts: Mapping[str, Header]) -> str:
    kind = str(weight.dtype).removeprefix("torch.")
    listed = ", ".join(name for name in parts if name != "comfy_quant")
    if form is None:
        return f"the file does not say in which format its {kind} and {listed or 'no scales'} are"
    if not isinstance(form, dict) or form.get("format") not in FORMATS:
        got = form.get("format") if isinstance(form, dict) else form
        return f"its format is {brief(got)}, expected one of {', '.join(FORMATS)}"
    dtype, block, needed = FORMATS[form["format"]]
    missing = [name for name in needed if name not in parts]
    extra = [name for name in parts if name not in (*needed, *OPTIONAL, "comfy_quant")]
    if weight.dtype != dtype or len(weight.shape) < 2:
        return f"its weight is {kind} {list(weight.shape)}, which {form['format']} is not"
    if missing:
        return f"it has no {missing[0]}, which {form['format']} needs"
    if extra:
        return f"it has {extra[0]}, which {form['format']} does not know"
    numbers = 2 if form["format"] in ("nvfp4", "convrot_w4a4") else 1
    rows, columns, scale = weight.shape[0], math.prod(weight.shape[1:]) * numbers, parts["weight_scale"]
    blocks = math.ceil(rows / 128) * 128 * math.ceil(columns / block / 4) * 4 if block else 0
    if math.prod(scale.shape) != blocks if block else not is_shared(scale, weight):
        expected = f"{blocks} numbers" if block else "one number, or one per row"
        return f"its weight_scale is {list(scale.shape)}, expected {expected}"
    group = rotated_columns(form)
    if group and (group not in (4, 16, 64, 256, 1024) or columns % group):
        return f"its rows of {columns} cannot be rotated in groups of {brief(group)}"
    return ""


def rotated_columns(form: Json) -> Any:
    """Return how many columns of the weight are rotated together by Hadamard matrices (ConvRot), 0 for none."""
    options = {**form["params"], **form} if isinstance(form.get("params"), dict) else form
    is_rotated = form["format"] == "convrot_w4a4" or (form["format"] == "int8_tensorwise" and options.get("convrot"))
    return options.get("convrot_groupsize", 256) if is_rotated else 0


def dequantised(form: Json, tensors: Mapping[str, torch.Tensor], shape: tuple[int, ...]) -> torch.Tensor:
    """Return the float32 weight of `shape` of a layer with `tensors`, by the names of QUANTISED_PARTS."""
    kind, weight, scale = form["format"], tensors["weight"].flatten(1), tensors["weight_scale"]
    if kind == "nvfp4":
        values = torch.tensor([*E2M1, *(-value for value in E2M1)])
        # A byte has two numbers, the first one in its high bits.
        numbers = values[torch.stack([weight >> 4, weight & 15], dim=-1).flatten(1).long()]
        scale = in_rows(scale.view(torch.float8_e4m3fn), numbers, 16).float() * tensors["weight_scale_2"].float()
    elif kind == "mxfp8":
        numbers = weight.float()
        scale = torch.exp2(in_rows(scale.view(torch.uint8), numbers, 32).float() - 127)
    else:
        if kind == "convrot_w4a4":
            # A byte has two numbers of 4 bits with a sign, the first one in its low bits.
            weight = torch.stack([weight << 4 >> 4, weight >> 4], dim=-1).flatten(1)
        numbers, scale = weight.float(), scale.float().reshape(-1, 1)
    numbers = (numbers.unflatten(1, (scale.shape[1], -1)) * scale[..., None]).flatten(1)
    if group := rotated_columns(form):
        hadamard = quarter = torch.ones(4, 4) - 2 * torch.eye(4).flip(0)
        while len(hadamard) < group:
            hadamard = torch.kron(hadamard, quarter)
        # The matrix is its own inverse.
        numbers = (numbers.unflatten(1, (-1, group)) @ hadamard.mT / math.sqrt(group)).flatten(1)
    if "pre_quant_scale" in tensors:
        numbers = numbers * tensors["pre_quant_scale"].float().flatten()
    # Formats with blocks pad the rows and the columns.
    return numbers[: shape[0], : math.prod(shape[1:])].reshape(shape)


def in_rows(scale: torch.Tensor, numbers: torch.Tensor, block: int) -> torch.Tensor:
    """Return `scale` as [rows, blocks] of `numbers` [rows, columns].

    They are stored in tiles of 128 x 4 (docs.nvidia.com/cuda/cublas, 1D Block Scaling Factors Layout).
    """
    rows, blocks = numbers.shape[0], numbers.shape[1] // block
    tiles = scale.reshape(math.ceil(rows / 128), math.ceil(blocks / 4), 32, 4, 4)
    return tiles.permute(0, 3, 2, 1, 4).reshape(128 * tiles.shape[0], -1)[:rows, :blocks]


def layer_tensors(tensors: dict[str, torch.Tensor], layer: str) -> dict[str, torch.Tensor]:
    """Take the weight and the scales of a quantised `layer` out of `tensors`, by the names of QUANTISED_PARTS."""
    names = {"weight": "weight", **QUANTISED_PARTS}
    return {part: tensors.pop(f"{layer}.{leaf}") for leaf, part in names.items() if f"{layer}.{leaf}" in tensors}
