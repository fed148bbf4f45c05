"""DC-AE as its authors publish it: the names and shapes of its tensors, and its encoder and decoder.

Written from the public source, with its configurations below: mit-han-lab/efficientvit (efficientvit/models/
efficientvit/dc_ae.py, models/nn/ops.py, models/nn/norm.py), and dc_ai/aecore/models/dc_ae.py of dc-ai-projects/DC-Gen
for Lite. Functions of a dictionary of tensors; nothing of diffusers, and nothing of this project.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch.nn import functional

DIM = 32  # channels of a head
EPS, ATTENTION_EPS = 1e-5, 1e-15
RES, EVIT = "ResBlock", "EViTS5_GLU"


class Half(NamedTuple):
    """Of each stage, the finest first: block type, width, depth."""

    types: tuple[str, ...]
    widths: tuple[int, ...]
    depths: tuple[int, ...]


class Config(NamedTuple):
    encoder: Half
    decoder: Half
    upsampling: str  # InterpolateConv or ConvPixelShuffle
    out_act: str
    latent_channels: int = 32


WIDTHS = (128, 256, 512, 512, 1024, 1024)
MIXED = (RES,) * 3 + (EVIT,) * 3
ENCODER = Half(MIXED, WIDTHS, (2, 2, 2, 3, 3, 3))
SANA = Config(ENCODER, Half(MIXED, WIDTHS, (3,) * 6), "InterpolateConv", "relu")
LITE = Config(ENCODER, Half((RES,) * 6, WIDTHS, (0, 3, 5, 4, 4, 4)), "ConvPixelShuffle", "silu")
RELEASED = {"dc-ae-f32c32": SANA, "dc-ae-lite-f32c32": LITE}
NARROW = (8, 16, 32, 32, 64, 64)


def narrow(config: Config) -> Config:
    """The same depth with few channels."""
    return config._replace(
        encoder=config.encoder._replace(widths=NARROW), decoder=config.decoder._replace(widths=NARROW)
    )


def shapes(config: Config) -> dict[str, tuple[int, ...]]:
    """The shape of each tensor of a released file, by name."""
    out: dict[str, tuple[int, ...]] = {}

    def conv(name: str, inner: int, outer: int, kernel: int = 3, bias: bool = True, groups: int = 1) -> None:
        out[f"{name}.weight"] = (outer, inner // groups, kernel, kernel)
        if bias:
            out[f"{name}.bias"] = (outer,)

    def norm(name: str, width: int) -> None:
        out[f"{name}.weight"] = out[f"{name}.bias"] = (width,)

    def up(name: str, inner: int, outer: int) -> None:
        conv(f"{name}.conv.conv", inner, outer * (4 if config.upsampling == "ConvPixelShuffle" else 1))

    half = config.encoder
    conv("encoder.project_in.conv", 3, half.widths[0])
    for stage, (kind, width, depth) in enumerate(zip(*half, strict=True)):
        for number in range(depth):
            block(conv, norm, f"encoder.stages.{stage}.op_list.{number}", kind, width)
        if stage + 1 < len(half.widths):
            conv(f"encoder.stages.{stage}.op_list.{depth}.main.conv", width, half.widths[stage + 1])
    conv("encoder.project_out.main.op_list.0.conv", half.widths[-1], config.latent_channels)

    half = config.decoder
    conv("decoder.project_in.main.conv", config.latent_channels, half.widths[-1])
    for stage, (kind, width, depth) in enumerate(zip(*half, strict=True)):
        first = int(stage + 1 < len(half.widths) and depth > 0)
        if first:
            up(f"decoder.stages.{stage}.op_list.0.main", half.widths[stage + 1], width)
        for number in range(depth):
            block(conv, norm, f"decoder.stages.{stage}.op_list.{first + number}", kind, width)
    if half.depths[0]:
        norm("decoder.project_out.op_list.0", half.widths[0])
        conv("decoder.project_out.op_list.2.conv", half.widths[0], 3)
    else:
        norm("decoder.project_out.op_list.0", half.widths[1])
        up("decoder.project_out.op_list.2", half.widths[1], 3)
    return out


def block(conv: Callable, norm: Callable, name: str, kind: str, width: int) -> None:
    if kind == RES:
        conv(f"{name}.main.conv1.conv", width, width)
        conv(f"{name}.main.conv2.conv", width, width, bias=False)
        norm(f"{name}.main.conv2.norm", width)
        return
    attention, feed_forward = f"{name}.context_module.main", f"{name}.local_module.main"
    conv(f"{attention}.qkv.conv", width, 3 * width, 1, bias=False)
    conv(f"{attention}.aggreg.0.0", 3 * width, 3 * width, 5, bias=False, groups=3 * width)
    conv(f"{attention}.aggreg.0.1", 3 * width, 3 * width, 1, bias=False, groups=3 * width // DIM)
    conv(f"{attention}.proj.conv", 2 * width, width, 1, bias=False)
    norm(f"{attention}.proj.norm", width)
    conv(f"{feed_forward}.inverted_conv.conv", width, 8 * width, 1)
    conv(f"{feed_forward}.depth_conv.conv", 8 * width, 8 * width, 3, groups=8 * width)
    conv(f"{feed_forward}.point_conv.conv", 4 * width, width, 1, bias=False)
    norm(f"{feed_forward}.point_conv.norm", width)


def tensors(config: Config, seed: int = 0) -> dict[str, torch.Tensor]:
    """Random weights that keep the size of what goes through them, with no bias and no scale left out."""
    generator = torch.Generator().manual_seed(seed)
    out = {}
    for name, shape in shapes(config).items():
        values = torch.randn(shape, generator=generator)
        if len(shape) == 4:
            out[name] = values * (shape[1] * shape[2] * shape[3]) ** -0.5
        else:
            # Of the vectors, only the weight of a norm is about 1.
            out[name] = 0.3 * values + ("norm" in name or ".project_out.op_list.0." in name) * name.endswith(".weight")
    return out


class Reference:
    """The forward of `config` on `weights`, in the precision of its arguments."""

    def __init__(self, config: Config, weights: dict[str, torch.Tensor]) -> None:
        self.config, self.weights = config, weights

    def conv(self, name: str, x: torch.Tensor, stride: int = 1) -> torch.Tensor:
        weight, bias = self.weights[f"{name}.weight"].to(x), self.weights.get(f"{name}.bias")
        bias = None if bias is None else bias.to(x)
        return functional.conv2d(x, weight, bias, stride, weight.shape[-1] // 2, groups=x.shape[1] // weight.shape[1])

    def norm(self, name: str, x: torch.Tensor) -> torch.Tensor:
        weight, bias = (self.weights[f"{name}.{leaf}"].to(x)[:, None, None] for leaf in ("weight", "bias"))
        return x / (x.square().mean(1, keepdim=True) + EPS).sqrt() * weight + bias

    def attention(self, name: str, x: torch.Tensor) -> torch.Tensor:
        fused = self.conv(f"{name}.qkv.conv", x)
        scaled = self.conv(f"{name}.aggreg.0.1", self.conv(f"{name}.aggreg.0.0", fused))
        heads = torch.cat([fused, scaled], 1).flatten(2).unflatten(1, (-1, 3, DIM))
        query, key, value = heads[:, :, 0].relu(), heads[:, :, 1].relu(), heads[:, :, 2]
        if query.shape[-1] > DIM:
            total = (value @ key.mT) @ query / (key.sum(-1)[..., None, :] @ query + ATTENTION_EPS)
        else:
            pairs = key.mT @ query
            total = value @ (pairs / (pairs.sum(2, keepdim=True) + ATTENTION_EPS))
        mixed = self.conv(f"{name}.proj.conv", total.flatten(1, 2).unflatten(2, x.shape[2:]))
        return self.norm(f"{name}.proj.norm", mixed)

    def block(self, name: str, kind: str, x: torch.Tensor) -> torch.Tensor:
        if kind == RES:
            hidden = self.conv(f"{name}.main.conv2.conv", functional.silu(self.conv(f"{name}.main.conv1.conv", x)))
            return x + self.norm(f"{name}.main.conv2.norm", hidden)
        x = x + self.attention(f"{name}.context_module.main", x)
        name = f"{name}.local_module.main"
        hidden = self.conv(f"{name}.depth_conv.conv", functional.silu(self.conv(f"{name}.inverted_conv.conv", x)))
        value, gate = hidden.chunk(2, 1)
        return x + self.norm(
            f"{name}.point_conv.norm", self.conv(f"{name}.point_conv.conv", value * functional.silu(gate))
        )

    def up(self, name: str, x: torch.Tensor) -> torch.Tensor:
        if self.config.upsampling == "ConvPixelShuffle":
            return functional.pixel_shuffle(self.conv(f"{name}.conv.conv", x), 2)
        return self.conv(f"{name}.conv.conv", x.repeat_interleave(2, 2).repeat_interleave(2, 3))

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        half = self.config.encoder
        x = self.conv("encoder.project_in.conv", x)
        for stage, (kind, _, depth) in enumerate(zip(*half, strict=True)):
            for number in range(depth):
                x = self.block(f"encoder.stages.{stage}.op_list.{number}", kind, x)
            if stage + 1 < len(half.widths):
                down = self.conv(f"encoder.stages.{stage}.op_list.{depth}.main.conv", x, stride=2)
                x = down + averaged(functional.pixel_unshuffle(x, 2), down.shape[1])
        return self.conv("encoder.project_out.main.op_list.0.conv", x) + averaged(x, self.config.latent_channels)

    def decode(self, x: torch.Tensor) -> torch.Tensor:
        half = self.config.decoder
        x = self.conv("decoder.project_in.main.conv", x) + duplicated(x, half.widths[-1])
        for stage, (kind, width, depth) in reversed(list(enumerate(zip(*half, strict=True)))):
            first = int(stage + 1 < len(half.widths) and depth > 0)
            if first:
                shortcut = functional.pixel_shuffle(duplicated(x, 4 * width), 2)
                x = self.up(f"decoder.stages.{stage}.op_list.0.main", x) + shortcut
            for number in range(depth):
                x = self.block(f"decoder.stages.{stage}.op_list.{first + number}", kind, x)
        x = getattr(functional, self.config.out_act)(self.norm("decoder.project_out.op_list.0", x))
        if half.depths[0]:
            return self.conv("decoder.project_out.op_list.2.conv", x)
        return self.up("decoder.project_out.op_list.2", x)


def averaged(x: torch.Tensor, channels: int) -> torch.Tensor:
    """Groups of neighbouring channels to their mean."""
    return x.unflatten(1, (channels, -1)).mean(2)


def duplicated(x: torch.Tensor, channels: int) -> torch.Tensor:
    """Each channel several times in a row."""
    return x.repeat_interleave(channels // x.shape[1], 1)
