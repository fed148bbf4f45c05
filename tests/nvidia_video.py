"""NVIDIA's SANA-Video transformer as plain functions of a file's tensors, by NVIDIA's names.

Written from the public source (NVlabs/Sana, diffusion/model/nets: sana_multi_scale_video.py, LiteLAReLURope and
WanRotaryPosEmbed of sana_blocks.py, GLUMBConvTemp of basic_modules.py), without this package's code or names. What it
shares with the image models is in nvidia.py. Rotations are in float64, all else in float32.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from diffusers import FlowMatchEulerDiscreteScheduler
from nvidia import Tensors, cross_attention, embed_scalar, project, random_file, rms


def random_video_file(width: int, depth: int, hidden: int, channels: int, patch: int, caption: int = 32) -> Tensors:
    """The tensors of a released file: every name and shape, with nothing that is zero or one."""
    tensors = random_file(width, depth, hidden, caption, qk_norm=True)
    generator = torch.Generator().manual_seed(1)
    fan = channels * patch * patch
    tensors["x_embedder.proj.weight"] = torch.randn(width, channels, 1, patch, patch, generator=generator) / fan**0.5
    tensors["final_layer.linear.weight"] = torch.randn(fan, width, generator=generator) / width**0.5
    tensors["final_layer.linear.bias"] = torch.randn(fan, generator=generator)
    for i in range(depth):
        name = f"blocks.{i}.mlp.t_conv.weight"
        tensors[name] = torch.randn(width, width, 3, 1, generator=generator) / (3 * width) ** 0.5
    return tensors


def turns(dim: int, size: tuple[int, int, int]) -> torch.Tensor:
    """[T H W, dim / 2], complex128: for the frame, the row and the column."""
    side = 2 * (dim // 6)
    places = torch.cartesian_prod(*(torch.arange(length, dtype=torch.float64) for length in size))
    out = []
    for place, channels in zip(places.unbind(1), (dim - 2 * side, side, side), strict=True):
        rate = 1.0 / 10000 ** (torch.arange(0, channels, 2, dtype=torch.float64) / channels)
        out.append(torch.exp(1j * torch.outer(place, rate)))
    return torch.cat(out, 1)


def turn(x: torch.Tensor, by: torch.Tensor) -> torch.Tensor:
    """`x` [B, N, heads, d] times `by` [N, d / 2]."""
    pairs = torch.complex(x[..., 0::2].double(), x[..., 1::2].double()) * by[:, None]
    return torch.stack([pairs.real, pairs.imag], -1).flatten(-2).float()


def linear_attention(tensors: Tensors, name: str, x: torch.Tensor, heads: int, by: torch.Tensor) -> torch.Tensor:
    query, key, value = project(tensors, f"{name}.qkv", x).chunk(3, -1)
    query, key = (rms(tensors, f"{name}.{part}_norm", item, 1e-5) for part, item in (("q", query), ("k", key)))
    query, key, value = (item.unflatten(-1, (heads, -1)) for item in (query, key, value))
    query, key = query.relu(), key.relu()
    total = torch.einsum("bnhi,bhi->bnh", query, key.sum(1))
    sums = torch.einsum("bnhi,bnhj->bhij", turn(key, by), value)
    out = torch.einsum("bnhi,bhij->bnhj", turn(query, by), sums) / (total[..., None] + 1e-8)
    return project(tensors, f"{name}.proj", out.flatten(2))


def feed_forward(tensors: Tensors, name: str, x: torch.Tensor, size: tuple[int, int, int]) -> torch.Tensor:
    states = F.silu(project(tensors, f"{name}.inverted_conv.conv", x)).unflatten(1, size)
    depth = tensors[f"{name}.depth_conv.conv.weight"]
    maps = states.flatten(0, 1).permute(0, 3, 1, 2)
    maps = F.conv2d(maps, depth, tensors[f"{name}.depth_conv.conv.bias"], padding=1, groups=len(depth))
    value, gate = maps.permute(0, 2, 3, 1).chunk(2, -1)
    maps = project(tensors, f"{name}.point_conv.conv", value * F.silu(gate)).unflatten(0, (len(x), -1))
    around = F.pad(maps, (0, 0, 0, 0, 0, 0, 1, 1))
    taps = tensors[f"{name}.t_conv.weight"][..., 0].unbind(2)
    return (maps + sum(F.linear(around[:, i : i + size[0]], tap) for i, tap in enumerate(taps))).flatten(1, 3)


@torch.no_grad()
def forward(
    tensors: Tensors,
    x: torch.Tensor,
    timestep: torch.Tensor,
    y: torch.Tensor,
    mask: torch.Tensor,
    heads: int,
    patch: int,
) -> torch.Tensor:
    """The velocity [B, C, T, H, W] at `x`, for `timestep` [B] or, with a time for each frame, [B, T]."""
    batch, channels, frames, height, width = x.shape
    size = frames, height // patch, width // patch
    inner = len(tensors["x_embedder.proj.bias"])
    hidden = F.conv3d(x, tensors["x_embedder.proj.weight"], tensors["x_embedder.proj.bias"], stride=(1, patch, patch))
    hidden = hidden.flatten(2).transpose(1, 2)
    # a time for each position
    times = timestep[:, None].expand(-1, frames) if timestep.ndim == 1 else timestep
    t = embed_scalar(tensors, "t_embedder", times.flatten().long())
    t0 = project(tensors, "t_block.1", F.silu(t)).view(batch, frames, 6, inner)
    t, t0 = (item.unflatten(0, (batch, -1)) if item.ndim == 2 else item for item in (t, t0))
    y = F.gelu(project(tensors, "y_embedder.y_proj.fc1", y), approximate="tanh")
    y = rms(tensors, "attention_y_norm", project(tensors, "y_embedder.y_proj.fc2", y), 1e-5)
    by = turns(inner // heads, size)
    per_frame = size[1] * size[2]

    def spread(part: torch.Tensor) -> torch.Tensor:
        return part.repeat_interleave(per_frame, 1)

    depth = 1 + max(int(name.split(".")[1]) for name in tensors if name.startswith("blocks."))
    for i in range(depth):
        name = f"blocks.{i}"
        shift_and_scale = (tensors[f"{name}.scale_shift_table"] + t0).unbind(2)
        shift_a, scale_a, gate_a, shift_m, scale_m, gate_m = map(spread, shift_and_scale)
        states = F.layer_norm(hidden, (inner,), eps=1e-6) * (1 + scale_a) + shift_a
        hidden = hidden + gate_a * linear_attention(tensors, f"{name}.attn", states, heads, by)
        hidden = hidden + cross_attention(tensors, f"{name}.cross_attn", hidden, y, mask, heads)
        states = F.layer_norm(hidden, (inner,), eps=1e-6) * (1 + scale_m) + shift_m
        hidden = hidden + gate_m * feed_forward(tensors, f"{name}.mlp", states, size)
    shift, scale = map(spread, (tensors["final_layer.scale_shift_table"] + t[:, :, None]).unbind(2))
    out = project(tensors, "final_layer.linear", F.layer_norm(hidden, (inner,), eps=1e-6) * (1 + scale) + shift)
    # NVIDIA's unpatchify: the channels of an output token are ordered (row, column, channel).
    out = out.view(batch, *size, patch, patch, channels)
    return torch.einsum("nthwpqc->ncthpwq", out).reshape(x.shape)


@torch.no_grad()
def image_to_video(
    tensors: Tensors,
    noise: torch.Tensor,
    first: torch.Tensor,
    prompts: tuple[torch.Tensor, torch.Tensor],
    steps: int,
    guidance: float,
    heads: int,
    patch: int,
    shift: float = 8.0,
    model: Callable[..., torch.Tensor] = forward,
) -> torch.Tensor:
    """The latents [1, C, T, H, W] of LTXFlowEuler.sample (diffusion/scheduler/flow_euler_sampler.py) without the noise
    on the first frame, which `first` [1, C, 1, H, W] is; `prompts` are embeddings and mask of the negative and the
    positive prompt, `model` is called as `forward` is."""
    scheduler = FlowMatchEulerDiscreteScheduler(shift=shift)
    scheduler.set_timesteps(steps)
    condition = torch.zeros_like(noise)
    condition[:, :, 0] = 1
    latents = torch.cat([first, noise[:, :, 1:]], 2)
    for t in scheduler.timesteps:
        timestep = torch.min(t.expand(condition.shape), (1 - condition) * 1000.0)
        times = timestep[:, 0, :, 0, 0].repeat(2, 1)
        both = model(tensors, latents.repeat(2, 1, 1, 1, 1), times, *prompts, heads, patch)
        negative, positive = both.chunk(2)
        velocity = negative + guidance * (positive - negative)
        change, tokens = (x.flatten(2).transpose(1, 2) for x in (-velocity, latents))
        times = timestep.flatten(2)[:, 0]
        (stepped,) = scheduler.step(change, t, tokens, per_token_timesteps=times, return_dict=False)
        stepped = stepped.transpose(1, 2).reshape(latents.shape)
        latents = torch.where(t / 1000 - 1e-6 < 1.0 - condition, stepped, latents)
    return latents
