"""A transformer's layers in ComfyUI's quantised formats, from a plain file or from a quantised file.

The 1x1 convolutions, 47 % of SANA's parameters, become Linear layers, because ComfyUI quantises only these.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping

import comfy.model_management
import comfy.quant_ops
import torch

from ....sana_core.errors import InputError

OFF = "off"
# Choice: ComfyUI's name of the format, and the options of the quantisation.
FORMATS: dict[str, tuple[str, dict[str, object]]] = {
    "fp8": ("float8_e4m3fn", {"scale": "recalculate"}),
    "int8": ("int8_tensorwise", {"per_channel": True}),
    # The weight is rotated by Hadamard matrices, which spread outliers (ConvRot).
    "int8_convrot": ("int8_tensorwise", {"per_channel": True, "convrot": True}),
    "mxfp8": ("mxfp8", {}),
    "nvfp4": ("nvfp4", {"scale": "recalculate"}),
}
# Sizes of these matrices. The largest size that divides a layer's width is used.
ROTATIONS = (256, 64, 16)
# Attention and feed-forward. The layers outside the blocks are small, and affect the inputs of all blocks.
LAYERS = re.compile(r"transformer_blocks\.\d+\.(attn[12]\.to_([qkv]|out\.0|gate)|ff\.(conv_(inverted|point)|\w+_proj))")


def choices() -> list[str]:
    """Return the choices on this computer, off first."""
    return [OFF, *(name for name in FORMATS if is_offered(name))]


def is_offered(name: str) -> bool:
    """Whether this ComfyUI has the format, and its device supports it. mxfp8 and nvfp4 do not run on every device."""
    device = comfy.model_management.get_torch_device()
    runs = {
        "mxfp8": comfy.model_management.supports_mxfp8_compute,
        "nvfp4": comfy.model_management.supports_nvfp4_compute,
    }
    return FORMATS[name][0] in comfy.quant_ops.QUANT_ALGOS and (name not in runs or runs[name](device))


def check_choice(name: str, weight_dtype: str, is_quantised: bool) -> None:
    """Raise InputError unless a file can be loaded in the format `name`."""
    if name not in choices():
        raise InputError(f"quantise: got {name!r:.40}, expected one of {', '.join(choices())} on this computer")
    if name != OFF and weight_dtype != "default":
        raise InputError(f"quantise: got {name} for weight_dtype {weight_dtype}; choose weight_dtype default, or off")
    if name != OFF and is_quantised:
        raise InputError(f"quantise: got {name} for a file that is quantised already; choose off")


class Pointwise:
    """A Linear layer of ComfyUI in place of a 1x1 convolution. It also accepts maps, and is saved as a convolution."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the product for `x` [B, N, C], or for maps [B, C, h, w] as a convolution has them."""
        if x.dim() < 4:
            return super().forward(x)
        return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)

    def state_dict(self, *args, prefix: str = "", **kwargs) -> dict[str, torch.Tensor]:
        tensors = super().state_dict(*args, prefix=prefix, **kwargs)
        tensors[f"{prefix}weight"] = tensors[f"{prefix}weight"][..., None, None]
        return tensors


def is_product(layer: torch.nn.Module) -> bool:
    """Whether `layer` is a product of matrices with its bias: Linear, or a 1x1 convolution."""
    is_pointwise = isinstance(layer, torch.nn.Conv2d) and layer.kernel_size == (1, 1) and layer.groups == 1
    return is_pointwise or isinstance(layer, torch.nn.Linear)


def linear_like(plain: torch.nn.Module, operations: type) -> torch.nn.Module:
    """Return a Linear of `operations` with the input and output width of `plain`, without weights."""
    if isinstance(plain, torch.nn.Linear):
        return operations.Linear(plain.in_features, plain.out_features, plain.bias is not None, device="cpu")
    # ComfyUI's adapters in bypass mode recognise a convolution by the name of its class.
    kind = type("Conv2d", (Pointwise, operations.Linear), {})
    return kind(plain.in_channels, plain.out_channels, plain.bias is not None, device="cpu")


def fill_quantised(layer: torch.nn.Module, tensors: Mapping[str, torch.Tensor]) -> torch.nn.Module:
    """Fill `layer`, a result of `linear_like`, with `tensors`: weight, scales, bias and format. Returns the layer."""
    state = dict(tensors)
    for name in ("weight", "weight_scale"):
        # 1x1 convolutions have four dimensions.
        if name in state and state[name].dim() == 4:
            state[name] = state[name].flatten(1)
    layer.load_state_dict(state, assign=True)
    return layer.requires_grad_(False)


def quantise(module: torch.nn.Module, name: str, operations: type, device: torch.device) -> None:
    """Replace the layers of `module`'s blocks by Linear layers of `operations` in the format `name`.

    They are quantised on `device`, one after another. The results are on the CPU.
    """
    algorithm, options = FORMATS[name]
    layout = comfy.quant_ops.QUANT_ALGOS[algorithm]["comfy_tensor_layout"]
    for path, plain in [pair for pair in module.named_modules() if LAYERS.fullmatch(pair[0])]:
        comfy.model_management.throw_exception_if_processing_interrupted()
        weight = plain.weight.detach().flatten(1).to(device)
        form: dict[str, object] = {"format": algorithm}
        if options.get("convrot"):
            size = next(size for size in ROTATIONS if weight.shape[1] % size == 0)
            form |= {"convrot": True, "convrot_groupsize": size}
        arguments = options | {key: value for key, value in form.items() if key != "format"}
        quantised = comfy.quant_ops.QuantizedTensor.from_float(weight, layout, **arguments)
        tensors = {key: tensor.cpu() for key, tensor in quantised.state_dict("weight").items()}
        tensors["comfy_quant"] = torch.tensor(list(json.dumps(form).encode()), dtype=torch.uint8)
        if plain.bias is not None:
            tensors["bias"] = plain.bias.detach()
        module.set_submodule(path, fill_quantised(linear_like(plain, operations), tensors))
