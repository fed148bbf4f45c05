"""Files of quantised models as ten tools write them, and the same files without a marker, a table, a scale or a prefix.

ComfyUI's formats are quantised by ComfyUI's own code. The names of the other tools' tensors are from their sources:
torchao 0.18 (prototype/safetensors), bitsandbytes 0.50 (functional.py, QuantState.as_dict), nunchaku (src/Linear.cpp),
AutoGPTQ (qlinear), optimum-quanto (tensor/weights/qbytes.py), compressed-tensors and transformers' fine-grained fp8.
"""

import json
from typing import NamedTuple

import torch

FORMATS = {
    "fp8": ("float8_e4m3fn", {"scale": "recalculate"}, 0.04),
    "fp8 of 5 bits": ("float8_e5m2", {"scale": "recalculate"}, 0.08),
    "int8": ("int8_tensorwise", {}, 0.02),
    "int8 by row": ("int8_tensorwise", {"per_channel": True}, 0.02),
    "int8 rotated": ("int8_tensorwise", {"per_channel": True, "convrot": True, "convrot_groupsize": 16}, 0.02),
    "mxfp8": ("mxfp8", {"stochastic_rounding": 1}, 0.06),
    "nvfp4": ("nvfp4", {"scale": "recalculate", "stochastic_rounding": 1}, 0.3),
}
# Formats that a weight and its scales show without a word about the format.
SHOWN = {"fp8", "fp8 of 5 bits"}


class Written(NamedTuple):
    """A file. `error` is None if it is to be read within `tolerance`, or a pattern of the line that refuses it."""

    tensors: dict[str, torch.Tensor]
    metadata: dict[str, str]
    tolerance: float
    error: str | None = None


def in_comfyui_s(weight: torch.Tensor, kind: str) -> tuple[dict[str, torch.Tensor], dict]:
    """The tensors of a layer by the ends of their names, and the entry that names the format."""
    import comfy.quant_ops

    algorithm, options, _ = FORMATS[kind]
    layout = comfy.quant_ops.QUANT_ALGOS[algorithm]["comfy_tensor_layout"]
    quantised = comfy.quant_ops.QuantizedTensor.from_float(weight.flatten(1).float(), layout, **options)
    form = {"format": algorithm, **{key: value for key, value in options.items() if key.startswith("convrot")}}
    return quantised.state_dict("weight"), form


def by_comfyui(plain, layers, kind, said, prefix, table_prefix):
    """A file of `plain` whose `layers` are quantised, in which the format is `said` in one of four ways."""
    tensors = {prefix + name: value for name, value in plain.items()}
    table = {}
    for layer in layers:
        parts, form = in_comfyui_s(tensors.pop(f"{prefix}{layer}.weight"), kind)
        if said == "scaled_fp8":
            parts["scale_weight"] = parts.pop("weight_scale")
            parts["scale_input"] = torch.tensor(0.5)
        if said == "marker":
            parts["comfy_quant"] = torch.tensor(list(json.dumps(form).encode()), dtype=torch.uint8)
        table[table_prefix + layer] = form
        tensors |= {f"{prefix}{layer}.{name}": value for name, value in parts.items()}
    if said == "scaled_fp8":
        tensors[f"{prefix}scaled_fp8"] = torch.zeros(2, dtype=tensors[f"{prefix}{layers[0]}.weight"].dtype)
    return tensors, {"_quantization_metadata": json.dumps({"layers": table})} if said == "table" else {}


def comfyui_files(plain, layers, prefixes):
    """Yield (name, Written) in every format, as ComfyUI and its converters write it, and with each word left out."""
    for prefix in prefixes:
        for kind, (_, _, tolerance) in FORMATS.items():
            unknown = None if kind in SHOWN else "the file does not say in which format its .* are"
            ways = [("marker", "", None), ("table", prefix, None), ("table", "", None), ("table", "net.", None)]
            ways += [("table", "another.model.", None)] if kind in SHOWN else []
            ways += [("nothing", "", unknown)] + ([("scaled_fp8", "", None)] if kind in SHOWN else [])
            for said, table_prefix, error in ways:
                tensors, metadata = by_comfyui(plain, layers, kind, said, prefix, table_prefix)
                yield f"{kind}, {said} {table_prefix}, {prefix}", Written(tensors, metadata, tolerance, error)
                if said == "scaled_fp8":
                    less = {name: value for name, value in tensors.items() if not name.endswith("scaled_fp8")}
                    yield f"{kind}, scale_weight alone, {prefix}", Written(less, {}, tolerance)
                    elsewhere = {**less, "scaled_fp8": tensors[f"{prefix}scaled_fp8"]}
                    yield f"{kind}, scaled_fp8 without {prefix}", Written(elsewhere, {}, tolerance)
                if said == "marker":
                    scale = f"{prefix}{layers[0]}.weight_scale"
                    less = {name: value for name, value in tensors.items() if name != scale}
                    yield f"{kind}, a scale left out, {prefix}", Written(less, {}, 0, "it has no weight_scale, which")
                    longer = {**tensors, scale: torch.ones(3)}
                    yield (
                        f"{kind}, a scale of another shape, {prefix}",
                        Written(longer, {}, 0, r"its weight_scale is \[3\], expected"),
                    )
                    stranger = {**tensors, f"{prefix}{layers[0]}.weight_rotation": torch.ones(3)}
                    yield (
                        f"{kind}, an unknown part, {prefix}",
                        Written(stranger, {}, 0, "unexpected .*weight_rotation; the file is of another model, or in a"),
                    )


def fp8_of_others(plain, layers, prefix):
    """Yield (name, Written) of fp8 without a word about the format: three spellings of scales, and none."""
    for name, end, error in (
        ("a scale for each row", "weight_scale", None),
        ("its inverse's name", "weight_scale_inv", None),
        ("no scales", "", None),
        ("blocks of scales", "weight_scale_inv", "in which format its float8_e4m3fn and weight_scale are"),
    ):
        tensors = {prefix + key: value for key, value in plain.items()}
        for layer in layers:
            weight = tensors[f"{prefix}{layer}.weight"].float()
            scale = weight.abs().max() / 448 if end else torch.tensor(1.0)
            if "row" in name:
                scale = weight.flatten(1).abs().amax(1).view(-1, *[1] * (weight.ndim - 1)) / 448
            tensors[f"{prefix}{layer}.weight"] = (weight / scale).to(torch.float8_e4m3fn)
            if "blocks" in name:
                scale = scale.repeat(2, 3)
            if end:
                tensors[f"{prefix}{layer}.{end}"] = scale.flatten(1) if scale.ndim else scale
        yield f"fp8, {name}, {prefix}", Written(tensors, {}, 0.04, error)


def foreign_files(plain, layers, prefix):
    """Yield (name, Written) in formats that only their own programs compute with."""
    rows, small = torch.ones(8, 1), torch.ones(8, 8)
    tools = {
        "torchao": ({"_weight_qdata": small.to(torch.int8), "_weight_scale": rows}, "torchao"),
        "torchao's 4 bits": ({"_weight_qdata": small.to(torch.int32), "_weight_scale_and_zero": rows}, "torchao"),
        "quanto": ({"weight._data": small.to(torch.int8), "weight._scale": rows}, "torchao or quanto"),
        "bitsandbytes, 4 bits": (
            {
                "weight": torch.ones(32, 1, dtype=torch.uint8),
                "weight.absmax": torch.ones(4),
                "weight.quant_map": torch.ones(16),
                "weight.quant_state.bitsandbytes__nf4": torch.ones(9, dtype=torch.uint8),
            },
            "bitsandbytes",
        ),
        "bitsandbytes, 8 bits": ({"weight": small.to(torch.int8), "SCB": torch.ones(8)}, "bitsandbytes"),
        "nunchaku": ({"qweight": small.to(torch.int8), "wscales": rows, "smooth_factor": rows}, "4 bits"),
        "GPTQ": ({"qweight": small.to(torch.int32), "qzeros": small.to(torch.int32), "scales": rows}, "4 bits"),
    }
    for tool, (parts, word) in tools.items():
        for left_out in ("", *parts):
            present = {name: value for name, value in parts.items() if name != left_out}
            tensors = {prefix + key: value for key, value in plain.items()}
            for layer in layers:
                del tensors[f"{prefix}{layer}.weight"]
                tensors |= {f"{prefix}{layer}.{name}": value.clone() for name, value in present.items()}
            # A lone part may still show its tool, or else it is an unexpected tensor.
            error = f"{word}|(unexpected|but) .*; the file is of another model|quantised layer" if left_out else word
            yield f"{tool} without {left_out or 'nothing'}, {prefix}", Written(tensors, {}, 0, error)
