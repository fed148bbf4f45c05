"""NVIDIA's transformer and ControlNet as plain functions of a file's tensors, by NVIDIA's names.

Written from the public source (NVlabs/Sana, diffusion/model/nets: sana_multi_scale.py, sana_blocks.py,
basic_modules.py, sana_multi_scale_controlnet.py), without this package's code or names. Everything in float32.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F

Tensors = dict[str, torch.Tensor]
CROSS_HEADS = {1152: 16, 2240: 20}


def random_file(
    width: int,
    depth: int,
    hidden: int,
    caption: int = 64,
    qk_norm: bool = False,
    sprint: bool = False,
    cells: int = 32,
    copies: int = 0,
    seed: int = 0,
) -> Tensors:
    """The tensors of a released file: every name and shape, with nothing that is zero or one.

    `hidden` is the feed-forward's, `cells` the side of the position buffer, `copies` the blocks of a ControlNet.
    """
    generator = torch.Generator().manual_seed(seed)
    tensors: Tensors = {}

    def put(name: str, *shape: int, mean: float = 0.0, std: float = 0.3) -> None:
        tensors[name] = mean + std * torch.randn(shape, generator=generator)

    def linear(name: str, out: int, inside: int, *kernel: int, bias: bool = True) -> None:
        put(f"{name}.weight", out, inside, *kernel, std=(inside * math.prod(kernel)) ** -0.5)
        if bias:
            put(f"{name}.bias", out)

    put("pos_embed", 1, cells**2, width)
    put("y_embedder.y_embedding", 300, caption)
    linear("x_embedder.proj", width, 32, 1, 1)
    linear("y_embedder.y_proj.fc1", width, caption)
    linear("y_embedder.y_proj.fc2", width, width)
    put("attention_y_norm.weight", width, mean=0.5)
    for name in ("t_embedder", "cfg_embedder") if sprint else ("t_embedder",):
        linear(f"{name}.mlp.0", width, 256)
        linear(f"{name}.mlp.2", width, width)
    linear("t_block.1", 6 * width, width)
    for i in range(depth):
        block(put, linear, f"blocks.{i}", width, hidden, qk_norm)
    linear("final_layer.linear", 32, width)
    put("final_layer.scale_shift_table", 2, width)
    if sprint:
        linear("logvar_linear", 1, width)
    for i in range(copies):
        block(put, linear, f"controlnet.{i}.copied_block", width, hidden, qk_norm)
        linear(f"controlnet.{i}.after_proj", width, width)
    if copies:
        linear("controlnet.0.before_proj", width, width)
    return tensors


def block(install: Callable, linear: Callable, name: str, width: int, hidden: int, qk_norm: bool) -> None:
    """A block's tensors, by `put` and `linear`."""
    install(f"{name}.scale_shift_table", 6, width)
    linear(f"{name}.attn.qkv", 3 * width, width, bias=False)
    linear(f"{name}.attn.proj", width, width)
    linear(f"{name}.cross_attn.q_linear", width, width)
    linear(f"{name}.cross_attn.kv_linear", 2 * width, width)
    linear(f"{name}.cross_attn.proj", width, width)
    if qk_norm:
        for part in ("attn", "cross_attn"):
            install(f"{name}.{part}.q_norm.weight", width, mean=1.0)
            install(f"{name}.{part}.k_norm.weight", width, mean=1.0)
    linear(f"{name}.mlp.inverted_conv.conv", 2 * hidden, width, 1, 1)
    install(f"{name}.mlp.depth_conv.conv.weight", 2 * hidden, 1, 3, 3)
    install(f"{name}.mlp.depth_conv.conv.bias", 2 * hidden)
    linear(f"{name}.mlp.point_conv.conv", width, hidden, 1, 1, bias=False)


def project(tensors: Tensors, name: str, x: torch.Tensor) -> torch.Tensor:
    weight = tensors[f"{name}.weight"]
    return F.linear(x, weight.reshape(len(weight), -1), tensors.get(f"{name}.bias"))


def rms(tensors: Tensors, name: str, x: torch.Tensor, eps: float) -> torch.Tensor:
    """The norm of that name; without one in the file, x itself."""
    if f"{name}.weight" not in tensors:
        return x
    return tensors[f"{name}.weight"] * (x / (x.square().mean(-1, keepdim=True) + eps).sqrt())


def embed_scalar(tensors: Tensors, name: str, t: torch.Tensor) -> torch.Tensor:
    """Sinusoids of 128 frequencies, cosines first, and two layers."""
    angles = t.float()[:, None] * torch.exp(-math.log(10000) * torch.arange(128) / 128)
    waves = torch.cat([angles.cos(), angles.sin()], 1)
    return project(tensors, f"{name}.mlp.2", F.silu(project(tensors, f"{name}.mlp.0", waves)))


def positions(width: int, h: int, w: int, base: int, interpolation: float) -> torch.Tensor:
    """[h w, width]: for the column and for the row a quarter of sines and a quarter of cosines."""
    rate = 10000.0 ** (-torch.arange(width // 4, dtype=torch.float64) / (width / 4))
    row = torch.arange(h, dtype=torch.float64) / (h / base) / interpolation
    column = torch.arange(w, dtype=torch.float64) / (w / base) / interpolation
    column, row = column.repeat(h), row.repeat_interleave(w)
    parts = [wave(place[:, None] * rate) for place in (column, row) for wave in (torch.sin, torch.cos)]
    return torch.cat(parts, 1).float()


def linear_attention(tensors: Tensors, name: str, x: torch.Tensor) -> torch.Tensor:
    batch, count, width = x.shape
    query, key, value = project(tensors, f"{name}.qkv", x).chunk(3, -1)
    query, key = (rms(tensors, f"{name}.{part}_norm", item, 1e-5) for part, item in (("q", query), ("k", key)))
    query, key, value = (item.view(batch, count, -1, 32) for item in (query, key, value))
    query, key = query.relu(), key.relu()
    total = torch.einsum("bnhi,bhi->bnh", query, key.sum(1))
    out = torch.einsum("bnhi,bhij->bnhj", query, torch.einsum("bnhi,bnhj->bhij", key, value))
    return project(tensors, f"{name}.proj", (out / (total[..., None] + 1e-8)).reshape(batch, count, width))


def cross_attention(tensors: Tensors, name: str, x: torch.Tensor, y: torch.Tensor, keep: torch.Tensor, heads: int):
    query = rms(tensors, f"{name}.q_norm", project(tensors, f"{name}.q_linear", x), 1e-6)
    key, value = project(tensors, f"{name}.kv_linear", y).chunk(2, -1)
    key = rms(tensors, f"{name}.k_norm", key, 1e-6)
    query, key, value = (item.unflatten(-1, (heads, -1)).transpose(1, 2) for item in (query, key, value))
    scores = query @ key.transpose(2, 3) / query.shape[-1] ** 0.5
    weights = scores.masked_fill(keep[:, None, None] == 0, -torch.inf).softmax(-1)
    return project(tensors, f"{name}.proj", (weights @ value).transpose(1, 2).flatten(2))


def run_block(tensors: Tensors, name: str, x, y, t0, keep, h: int, w: int, heads: int) -> torch.Tensor:
    width = x.shape[-1]
    table = tensors[f"{name}.scale_shift_table"] + t0.view(-1, 6, width)
    shift_a, scale_a, gate_a, shift_m, scale_m, gate_m = table[:, :, None].unbind(1)
    states = F.layer_norm(x, (width,), eps=1e-6) * (1 + scale_a) + shift_a
    x = x + gate_a * linear_attention(tensors, f"{name}.attn", states)
    x = x + cross_attention(tensors, f"{name}.cross_attn", x, y, keep, heads)
    states = F.layer_norm(x, (width,), eps=1e-6) * (1 + scale_m) + shift_m
    states = F.silu(project(tensors, f"{name}.mlp.inverted_conv.conv", states))
    states = states.transpose(1, 2).unflatten(2, (h, w))
    depth = tensors[f"{name}.mlp.depth_conv.conv.weight"]
    states = F.conv2d(states, depth, tensors[f"{name}.mlp.depth_conv.conv.bias"], padding=1, groups=len(depth))
    states, gate = states.flatten(2).transpose(1, 2).chunk(2, -1)
    return x + gate_m * project(tensors, f"{name}.mlp.point_conv.conv", states * F.silu(gate))


@torch.no_grad()
def forward(
    tensors: Tensors,
    x: torch.Tensor,
    timestep: torch.Tensor,
    y: torch.Tensor,
    mask: torch.Tensor,
    cfg: torch.Tensor | None = None,
    control: torch.Tensor | None = None,
    pe: tuple[int, float] | None = None,
    heads: int | None = None,
) -> torch.Tensor:
    """The velocity [B, 32, h, w] at `x`, for `timestep` [B] from 0 to 1000 and prompts `y` [B, T, C], `mask` [B, T].

    `cfg` [B] is Sprint's guidance, `control` the control picture's latent, `pe` base size and interpolation.
    """
    batch, _, h, w = x.shape
    width = len(tensors["x_embedder.proj.bias"])
    heads = heads or CROSS_HEADS[width]

    def embed(latent: torch.Tensor) -> torch.Tensor:
        return project(tensors, "x_embedder.proj", latent.flatten(2).transpose(1, 2))

    hidden = embed(x)
    if pe is not None:
        hidden = hidden + positions(width, h, w, *pe)
    t = embed_scalar(tensors, "t_embedder", timestep.long().float() if cfg is None else timestep.float() / 1000)
    if cfg is not None:
        t = t + embed_scalar(tensors, "cfg_embedder", cfg * 0.1)
    t0 = project(tensors, "t_block.1", F.silu(t))
    y = F.gelu(project(tensors, "y_embedder.y_proj.fc1", y), approximate="tanh")
    y = rms(tensors, "attention_y_norm", project(tensors, "y_embedder.y_proj.fc2", y), 1e-5)

    def run(name: str, states: torch.Tensor) -> torch.Tensor:
        return run_block(tensors, name, states, y, t0, mask, h, w, heads)

    depth = 1 + max(int(name.split(".")[1]) for name in tensors if name.startswith("blocks."))
    copies = 1 + max((int(name.split(".")[1]) for name in tensors if name.startswith("controlnet.")), default=-1)
    hidden = run("blocks.0", hidden)
    signal = None
    for i in range(1, depth):
        if control is not None and i <= copies:
            if signal is None:
                signal = hidden + project(tensors, "controlnet.0.before_proj", embed(control))
            signal = run(f"controlnet.{i - 1}.copied_block", signal)
            hidden = hidden + project(tensors, f"controlnet.{i - 1}.after_proj", signal)
        hidden = run(f"blocks.{i}", hidden)
    shift, scale = (tensors["final_layer.scale_shift_table"] + t[:, None])[:, :, None].unbind(1)
    hidden = F.layer_norm(hidden, (width,), eps=1e-6) * (1 + scale) + shift
    return project(tensors, "final_layer.linear", hidden).transpose(1, 2).unflatten(2, (h, w))
