"""The model that is trained: adapters on a SANA transformer, a ControlNet, and a frozen base in 8 bits.

An adapter consists of peft's layers. Its file has diffusers' names. The scale alpha / rank is folded into the weights,
so that a program that does not know where PEFT stores alpha generates the same image.
"""

from __future__ import annotations

import copy
import fnmatch
import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from ..checkpoints.headers import write_tensors
from ..checkpoints.keys import COLUMNS, ROWS
from ..checkpoints.lora import Adapter, Tensors, adapted, dora_scale, parts_of, product_of, read_whole, split_layers
from ..errors import InputError, VersionError
from ..model.controlnet import Control
from ..model.forward import DROPPED, embed
from ..model.known_models import TransformerConfig
from ..model.reference import DIFFUSERS, NVIDIA
from ..runtime.text import shown
from .settings import ADAPTERS, TARGETS, Method

if TYPE_CHECKING:
    from diffusers import SanaControlNetModel, SanaTransformer2DModel

ADAPTER = "default"
PREFIX = "transformer."
# {targets: pattern of the layers that get an adapter}. The depthwise convolution is too small for one.
LAYERS = {"attention": r"attn[12]\.(to_q|to_k|to_v|to_out\.0)", "feed_forward": r"ff\.(conv_inverted|conv_point)"}
SCALED = {part for spec in ADAPTERS.values() for part in spec.scaled}

# Adapters


def add_adapter(transformer: SanaTransformer2DModel, method: Method, seed: int) -> None:
    """Put the adapter of `method` on `transformer`, in float32 and at first without effect. Freezes all other weights.

    The random values depend on `seed` only.
    """
    try:
        import peft
    except ImportError as error:
        raise VersionError(f"peft: cannot be imported ({error!s:.120}); pip install peft") from None
    check_layers(dict(transformer.named_modules()), method)
    transformer.requires_grad_(False)
    spec = ADAPTERS[method.kind]
    alpha = method.scale * method.rank
    options = {"lora_alpha": alpha, "lora_dropout": method.dropout} if spec.is_lora else {"alpha": alpha}
    config = getattr(peft, spec.config)(r=method.rank, target_modules=layer_names(method), **options, **spec.options)
    peft.inject_adapter_in_model(config, transformer, ADAPTER)
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
    if not any(map(re.compile(layer_names(method)).fullmatch, names)):
        raise InputError(
            f"layers: got {', '.join(method.layers)!s:.80}, which fits none of targets {method.targets}, expected one "
            'such as "transformer_blocks.1?.*" or "*.attn2.*"'
        )


@contextmanager
def without_dropout(transformer: torch.nn.Module) -> Iterator[None]:
    layers = [layer for layer in adapter_layers(transformer).values() if layer.training]
    for layer in layers:
        layer.train(False)
    try:
        yield
    finally:
        for layer in layers:
            layer.train()


def adapter_layers(transformer: SanaTransformer2DModel) -> dict[str, Any]:
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
    """Return the `tensors` of `adapter_tensors` as {layer: {part: tensor}}."""
    return {name.removeprefix(PREFIX): parts_of(layer) for name, layer in split_layers(tensors).items()}


def write_adapter(
    file: Path,
    transformer: SanaTransformer2DModel,
    tensors: Mapping[str, torch.Tensor],
    method: Method,
    metadata: Mapping[str, str],
) -> None:
    metadata = {"format": "pt", **metadata}
    if ADAPTERS[method.kind].is_lora:
        # Loaders build peft's LoraConfig from this. alpha = rank, because the scale is already in the weights.
        # diffusers 0.35 requires the patterns.
        peft_settings = {"r": method.rank, "lora_alpha": method.rank, "target_modules": layer_names(method)}
        peft_settings |= {"use_dora": method.kind == "dora", "rank_pattern": {}, "alpha_pattern": {}}
        metadata["lora_adapter_metadata"] = json.dumps(
            {f"{PREFIX}{key}": value for key, value in peft_settings.items()}
        )
    layers, scales = adapter_layers(transformer), {}
    for name, parts in by_layer(tensors).items():
        if ROWS in parts:
            # The magnitudes in the form of ComfyUI's loaders.
            weight = layers[name].get_base_layer().weight.detach().float().cpu()
            parts = {part: tensor.float().cpu() for part, tensor in parts.items()}
            changed = weight + product_of(parts, weight).reshape(weight.shape)
            scales[f"{PREFIX}{name}.dora_scale"] = dora_scale(weight, changed, parts[ROWS]).contiguous()
    write_tensors(file, {**tensors, **scales}, metadata)


@contextmanager
def merged(transformer: SanaTransformer2DModel, tensors: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """Merge the adapter into the weights inside the context, and restore them bit for bit.

    This is what programs do that load the file of `tensors`: they round once to the weights' dtype, while training adds
    two outputs.
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


def load_start(transformer: SanaTransformer2DModel, method: Method) -> None:
    """Copy the weights of the file `method.start` into the adapter that `add_adapter` put on `transformer`.

    The adapter then has the effect of the file. If the file's alpha differs from `method`, the weights are scaled to
    compensate.
    """
    modules = {name: getattr(module, "base_layer", module) for name, module in transformer.named_modules()}
    layers_with_weights = (torch.nn.Linear, torch.nn.Conv2d)
    shapes = {name: layer.weight.shape for name, layer in modules.items() if isinstance(layer, layers_with_weights)}
    file = shown(Path(method.start))
    file_adapters = read_whole(method.start, {f"{name}.weight": shape for name, shape in shapes.items()})
    adapters = {name.removesuffix(".weight"): adapter for name, adapter in file_adapters.items()}
    check_kind({part for adapter in adapters.values() for part in adapter.parts}, method.kind, file)
    layers = adapter_layers(transformer)
    check_targets(adapters.keys(), layers.keys(), shapes.keys(), method, file)
    for name, layer in layers.items():
        trained = {f".{key}": value for key, value in layer.named_parameters() if value.requires_grad}
        parameters, (parts, scale) = parts_of(trained), adapters[name]
        check_parts(parts, parameters, f"{file}: {name}")
        for part, parameter in parameters.items():
            factor = scale / method.scale if part in SCALED else 1.0
            parameter.detach().copy_((parts[part].float() * factor).reshape(parameter.shape))


def check_kind(parts: Collection[str], kind: str, file: str) -> None:
    """Raise InputError unless an adapter with these `parts` is of `kind`."""
    kinds = {mark: name for name, spec in ADAPTERS.items() for mark in spec.marks}
    # Kinds that cannot be trained.
    kinds = {"hada_w1_a": "loha", **kinds, COLUMNS: "dora of columns"}
    got = next((name for part, name in reversed(kinds.items()) if part in parts), "lora")
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
        if set(layers) == {name for name in names if re.fullmatch(layer_names(replace(method, targets=fitting)), name)}:
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


# A ControlNet
#
# It begins as a copy of the model that it will steer. Copies of the first blocks and the projections around them are
# trained. The projections begin at zero, so the ControlNet has no effect at first. The embeddings of image, time and
# caption are the frozen modules of the model (SanaMSControlNet in NVlabs/Sana,
# diffusion/model/nets/sana_multi_scale_controlnet.py). `sana_core.model.controlnet` documents where NVIDIA's code and
# diffusers add the control signal and the residuals.


def check_steerable(config: TransformerConfig, blocks: int) -> None:
    """Raise InputError unless a ControlNet of `blocks` blocks fits the transformer with `config`."""
    if config.qk_norm is not None:
        raise InputError(
            "model: got one with norms of query and key (SANA-1.5), for which there is no ControlNet; train that of "
            "SANA 0.6B or 1.6B"
        )
    # A residual acts after the copied block. In diffusers it acts after the next block.
    if blocks >= config.num_layers:
        raise InputError(
            f"blocks: got {blocks} for a model of {config.num_layers} blocks, expected less than that; lower it"
        )


def make_controlnet(transformer: SanaTransformer2DModel, blocks: int, dtype: torch.dtype) -> SanaControlNetModel:
    """Return a ControlNet with copies of the first `blocks` of `transformer`, in `dtype`, at first without effect.

    It follows the reference of `transformer`. The copies and the projections require gradients. The other modules are
    the frozen modules of `transformer`, in NVIDIA's arrangement also its first block.
    """
    from accelerate import init_empty_weights
    from diffusers import SanaControlNetModel

    transformer.requires_grad_(False)
    arguments = signature(SanaControlNetModel.__init__).parameters
    config = {name: value for name, value in transformer.config.items() if name in arguments}
    with init_empty_weights():
        controlnet = SanaControlNetModel(**{**config, "num_layers": blocks})
    for name in ("patch_embed", "time_embed", "caption_projection", "caption_norm"):
        setattr(controlnet, name, getattr(transformer, name))
    copies = [copy.deepcopy(block).to(dtype) for block in transformer.transformer_blocks[:blocks]]
    controlnet.transformer_blocks = torch.nn.ModuleList(copies)
    trained = [controlnet.transformer_blocks, controlnet.input_block, controlnet.controlnet_blocks]
    for projection in trained[1:]:
        projection.to_empty(device=transformer.device).to(dtype)
        for parameter in projection.parameters():
            torch.nn.init.zeros_(parameter)
    for module in trained:
        module.requires_grad_(True)
    reference = getattr(transformer.config, "reference", DIFFUSERS)
    controlnet.register_to_config(reference=reference)
    if reference == NVIDIA:
        controlnet.base_block = transformer.transformer_blocks[0]
    return controlnet.train(False)


def steering_residuals(
    control: Control, x: torch.Tensor, embeds: torch.Tensor, timestep: torch.Tensor, mask: torch.Tensor
) -> list[torch.Tensor | None]:
    """Return the residuals of a ControlNet with gradients, through the library's modules.

    Residual i [B, N, D] acts after block i. None: no residual. `x` [B, 32, h, w] is in the model's scale. `embeds`
    [B, T, C] and `mask` [B, T] are the captions.
    """
    controlnet, latents = control.controlnet, control.latents.to(x)
    if getattr(controlnet, "base_block", None) is None:
        library_residuals = controlnet(x, embeds, timestep, latents, encoder_attention_mask=mask, return_dict=False)[0]
        return [None, *(residual.to(x.dtype) for residual in library_residuals)]
    patch = controlnet.config.patch_size
    size = x.shape[-2] // patch, x.shape[-1] // patch
    hidden = controlnet.patch_embed(x)
    time, _ = controlnet.time_embed(timestep, batch_size=len(x), hidden_dtype=hidden.dtype)
    captions = controlnet.caption_norm(controlnet.caption_projection(embeds))
    bias = ((1 - mask.to(x.dtype)) * DROPPED)[:, None]

    def run(block: torch.nn.Module, hidden: torch.Tensor) -> torch.Tensor:
        arguments = (hidden, None, captions, bias, time, *size)
        if controlnet.gradient_checkpointing:
            return checkpoint(block, *arguments, use_reentrant=False)
        return block(*arguments)

    hidden = run(controlnet.base_block, hidden) + controlnet.input_block(embed(controlnet, latents, None))
    residuals: list[torch.Tensor | None] = []
    for block, projection in zip(controlnet.transformer_blocks, controlnet.controlnet_blocks, strict=True):
        hidden = run(block, hidden)
        residuals.append(projection(hidden).to(x.dtype))
    return residuals


@contextmanager
def steered(transformer: SanaTransformer2DModel, residuals: Sequence[torch.Tensor | None]) -> Iterator[Any]:
    """Yield the argument `controlnet_block_samples`, so that residual i acts after block i.

    diffusers adds its first sample after the second block, so a hook adds the residual of the first block.
    """
    first = residuals[0] if residuals else None
    if first is None:
        yield residuals[1:] or None
        return
    hook = transformer.transformer_blocks[0].register_forward_hook(lambda block, inputs, hidden: hidden + first)
    try:
        yield residuals[1:] or None
    finally:
        hook.remove()


# A base in 8 bits
#
# A frozen model in 8 bits under an adapter in float32 takes half the memory of bfloat16 (Dettmers et al. 2023, QLoRA).
# Each row of a weight has one scale: the row's largest absolute value / 127. The weight is dequantised in the forward
# and again in the backward, so only one layer's full weight is in memory.

LARGEST_CODE = 127


def quantise_rows(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return codes [O, I] int8 and the scales [O, 1] of rows, in the dtype of `weight` [O, I]."""
    rows = weight.detach().float()
    # The codes are computed with the rounded scale, because the weight is restored with it.
    scale = (rows.abs().amax(dim=1, keepdim=True) / LARGEST_CODE).to(weight.dtype)
    steps = rows / scale.float().clamp(min=torch.finfo(torch.float32).tiny)
    return steps.round().clamp(-LARGEST_CODE, LARGEST_CODE).to(torch.int8), scale


def dequantise(codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Return the weight [O, I] of the `codes` and `scale` of `quantise_rows`, in the dtype of `scale`."""
    return codes.to(scale.dtype) * scale


class Int8Product(torch.autograd.Function):
    """x @ weight.T + bias with a frozen weight in 8 bits. The dequantised weight is not saved for the backward."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, codes: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        ctx.save_for_backward(codes, scale)
        ctx.save_for_forward(codes, scale)
        return F.linear(x, dequantise(codes, scale), bias)

    @staticmethod
    def jvp(ctx: Any, x: torch.Tensor, *constants: None) -> torch.Tensor:
        codes, scale = ctx.saved_for_forward
        return F.linear(x, dequantise(codes, scale))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        codes, scale = ctx.saved_tensors
        return gradients[0] @ dequantise(codes, scale), None, None, None


class EightBitLinear(torch.nn.Linear):
    """A linear layer with its weight in 8 bits. peft requires the class Linear."""

    codes: torch.Tensor
    scale: torch.Tensor

    @property
    def weight(self) -> torch.Tensor:  # type: ignore[override]
        return dequantise(self.codes, self.scale)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return Int8Product.apply(input, self.codes, self.scale, self.bias)


class EightBitPointwise(torch.nn.Conv2d):
    """A 1x1 convolution with its weight in 8 bits. peft requires the class Conv2d."""

    codes: torch.Tensor
    scale: torch.Tensor

    @property
    def weight(self) -> torch.Tensor:  # type: ignore[override]
        return dequantise(self.codes, self.scale)[..., None, None]

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return Int8Product.apply(input.movedim(1, -1), self.codes, self.scale, self.bias).movedim(-1, 1)


def quantise_layer(layer: torch.nn.Module) -> None:
    """Put the weight of `layer` into 8 bits if it is a linear layer or a 1x1 convolution."""
    if type(layer) is torch.nn.Linear:
        kind: type[torch.nn.Module] = EightBitLinear
    elif type(layer) is torch.nn.Conv2d and layer.kernel_size == (1, 1) and layer.groups == 1:
        kind = EightBitPointwise
    else:
        return
    codes, scale = quantise_rows(layer.weight.flatten(1))
    del layer.weight
    layer.register_buffer("codes", codes)
    layer.register_buffer("scale", scale)
    layer.__class__ = kind  # type: ignore[assignment]


def quantise_base(transformer: SanaTransformer2DModel) -> None:
    """Put the frozen weights of the blocks of `transformer` into 8 bits, one by one.

    They are at least 95 % of the model. The depthwise convolutions, the embeddings of image, time and caption, and an
    adapter do not change.
    """
    for block in transformer.transformer_blocks:
        for layer in block.modules():
            if not any(parameter.requires_grad for parameter in layer.parameters()):
                quantise_layer(layer)
