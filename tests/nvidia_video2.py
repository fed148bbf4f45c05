"""SANA-Video 2.0's transformer as plain functions of a file's tensors, by NVIDIA's names.

Written from the public description of the layers (NVlabs/Sana, docs/sana_video2.md and diffusion/model/nets:
sana_video2.py, sana_video2_blocks.py), without this package's code or names. What it shares with SANA-Video is in
nvidia_video.py. Rotations are in float64, all else in float32.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from nvidia import Tensors, cross_attention, embed_scalar, project, random_file, rms
from nvidia_video import turn, turns


def random_video2_file(
    width: int, depth: int, heads: int, channels: int = 128, caption: int = 32, ratio: int = 4, every: int = 4
) -> Tensors:
    """The tensors of a released file: every name and shape, with nothing that is zero or one. Every fourth layer, or
    another number of `every`, is softmax attention; the others have `heads` heads."""
    tensors = random_file(width, depth, 8, caption, qk_norm=True)
    tensors = {name: tensor for name, tensor in tensors.items() if not (name.startswith("blocks.") and ".mlp." in name)}
    generator = torch.Generator().manual_seed(2)

    def put(name: str, *shape: int, std: float, mean: float = 0.0) -> None:
        tensors[name] = mean + std * torch.randn(shape, generator=generator)

    def linear(name: str, out: int, inside: int) -> None:
        put(f"{name}.weight", out, inside, std=inside**-0.5)
        put(f"{name}.bias", out, std=0.3)

    put("x_embedder.proj.weight", width, channels, 1, 1, 1, std=channels**-0.5)
    put("final_layer.linear.weight", channels, width, std=width**-0.5)
    put("final_layer.linear.bias", channels, std=0.3)
    for i in range(depth):
        name = f"blocks.{i}"
        linear(f"{name}.attn.output_gate", width, width)
        if (i + 1) % every:
            linear(f"{name}.attn.beta_proj", heads, width)
            put(f"{name}.attn.o_norm.weight", width // heads, std=0.3, mean=1.0)
        linear(f"{name}.mlp.gate_proj", ratio * width, width)
        linear(f"{name}.mlp.up_proj", ratio * width, width)
        linear(f"{name}.mlp.down_proj", width, ratio * width)
    for part in ("attn", "mlp", "final"):
        put(f"attn_res.{part}_proj.weight", 1, width, std=3 * width**-0.5)
    return tensors


def attention(tensors: Tensors, name: str, x: torch.Tensor, heads: int, size: tuple[int, int, int]) -> torch.Tensor:
    """Gated attention: linear where the file has beta_proj, else softmax with half of the heads."""
    is_linear = f"{name}.beta_proj.weight" in tensors
    heads = heads if is_linear else heads // 2
    query, key, value = project(tensors, f"{name}.qkv", x).chunk(3, -1)
    query, key = (rms(tensors, f"{name}.{part}_norm", x, 1e-5) for part, x in (("q", query), ("k", key)))
    query, key, value = (x.unflatten(-1, (heads, -1)) for x in (query, key, value))
    by = turns(query.shape[-1], size)
    query, key = turn(query, by), turn(key, by)
    if is_linear:
        key = key * project(tensors, f"{name}.beta_proj", x).sigmoid()[..., None]
        out = torch.einsum("bnhi,bhij->bnhj", query, torch.einsum("bnhi,bnhj->bhij", key, value))
        out = rms(tensors, f"{name}.o_norm", out, 1e-5)
    else:
        scores = torch.einsum("bnhi,bmhi->bhnm", query, key) / query.shape[-1] ** 0.5
        out = torch.einsum("bhnm,bmhj->bnhj", scores.softmax(-1), value)
    return project(tensors, f"{name}.proj", out.flatten(2) * project(tensors, f"{name}.output_gate", x).sigmoid())


def feed_forward(tensors: Tensors, name: str, x: torch.Tensor) -> torch.Tensor:
    gated = F.silu(project(tensors, f"{name}.gate_proj", x)) * project(tensors, f"{name}.up_proj", x)
    return project(tensors, f"{name}.down_proj", gated)


def weigh(tensors: Tensors, part: str, sources: list[torch.Tensor]) -> torch.Tensor:
    """The mean of `sources` over depth, by the softmax of a projection of their RMS-normalised values."""
    values = torch.stack(sources)
    keys = values * torch.rsqrt(values.pow(2).mean(-1, keepdim=True) + 1e-6)
    weights = project(tensors, f"attn_res.{part}_proj", keys).softmax(0)
    return (weights * values).sum(0)


@torch.no_grad()
def forward(
    tensors: Tensors,
    x: torch.Tensor,
    timestep: torch.Tensor,
    y: torch.Tensor,
    mask: torch.Tensor,
    heads: int,
    group: int = 8,
) -> torch.Tensor:
    """The velocity [B, C, T, H, W] at `x`, for `timestep` [B] or, with a time for each frame, [B, T]."""
    batch, _, *size = x.shape
    inner = len(tensors["x_embedder.proj.bias"])
    hidden = F.conv3d(x, tensors["x_embedder.proj.weight"], tensors["x_embedder.proj.bias"]).flatten(2).transpose(1, 2)
    times = timestep[:, None].expand(-1, size[0]) if timestep.ndim == 1 else timestep
    t = embed_scalar(tensors, "t_embedder", times.flatten().long())
    t0 = project(tensors, "t_block.1", F.silu(t)).view(batch, size[0], 6, inner)
    y = F.gelu(project(tensors, "y_embedder.y_proj.fc1", y), approximate="tanh")
    y = rms(tensors, "attention_y_norm", project(tensors, "y_embedder.y_proj.fc2", y), 1e-5)

    def spread(part: torch.Tensor) -> torch.Tensor:
        """A value for each frame as one for each position."""
        return part.repeat_interleave(size[1] * size[2], 1)

    def norm(states: torch.Tensor, shift: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(states, (inner,), eps=1e-6) * (1 + scale) + shift

    depth = 1 + max(int(name.split(".")[1]) for name in tensors if name.startswith("blocks."))
    groups, parts = [hidden], []
    for i in range(depth):
        name = f"blocks.{i}"
        modulation = (tensors[f"{name}.scale_shift_table"] + t0).unbind(2)
        shift_a, scale_a, gate_a, shift_m, scale_m, gate_m = map(spread, modulation)
        states = weigh(tensors, "attn", [*groups, *([sum(parts)] if parts else [])])
        update = gate_a * attention(tensors, f"{name}.attn", norm(states, shift_a, scale_a), heads, tuple(size))
        parts.append(update + cross_attention(tensors, f"{name}.cross_attn", states + update, y, mask, heads))
        states = weigh(tensors, "mlp", [*groups, sum(parts)])
        parts.append(gate_m * feed_forward(tensors, f"{name}.mlp", norm(states, shift_m, scale_m)))
        if (i + 1) % group == 0 or i + 1 == depth:
            groups, parts = [*groups, sum(parts)], []
    hidden = weigh(tensors, "final", groups)
    t = t.view(batch, size[0], 1, inner)
    shift, scale = map(spread, (tensors["final_layer.scale_shift_table"] + t).unbind(2))
    return project(tensors, "final_layer.linear", norm(hidden, shift, scale)).transpose(1, 2).reshape(x.shape)


@torch.no_grad()
def text_to_video(
    tensors: Tensors,
    noise: torch.Tensor,
    prompts: tuple[torch.Tensor, torch.Tensor],
    steps: int,
    guidance: float,
    heads: int,
    group: int = 8,
    shift: float = 12.0,
) -> torch.Tensor:
    """The latents [1, C, T, H, W] of DPM-Solver++ of order 2 on the flow (diffusion/model/dpm_solver.py), with order 1
    in the first and in the last step. `prompts`: embeddings and mask of the negative and the positive prompt.

    The steps are in float64: in float32, which NVIDIA has, the noise of the first step loses four digits."""
    line = 1 - torch.linspace(1, 0.001, steps + 1)
    times = (shift * line / (1 + (shift - 1) * line)).flip(0)
    timesteps = (1000 * times).floor()
    times = times.double()
    snr = torch.log(1 - times) - torch.log(times)
    x = before = noise.double()
    for i in range(steps):
        s, t = times[i], times[i + 1]
        both = forward(tensors, x.float().repeat(2, 1, 1, 1, 1), timesteps[i].expand(2), *prompts, heads, group)
        # the guidance acts on the noise
        without, positive = ((1 - s) * both + x).chunk(2)
        data = (x - s * (without + guidance * (positive - without))) / (1 - s)
        h = snr[i + 1] - snr[i]
        step = data
        if 0 < i < steps - 1:
            step = data + 0.5 * h / (snr[i] - snr[i - 1]) * (data - before)
        x, before = t / s * x - (1 - t) * torch.expm1(-h) * step, data
    return x


@torch.no_grad()
def preview(
    tensors: Tensors, noises: list[torch.Tensor], prompt: tuple[torch.Tensor, torch.Tensor], heads: int, group: int = 8
) -> torch.Tensor:
    """The latents of the preview's four steps (diffusion/scheduler/fastvideo_dmd_sampler.py), with new noise after each
    of the first three; `noises` are the first noise and these."""
    x = noises[0]
    sigmas = (0.9998332262, 0.9471688271, 0.8568977118, 0.6663702130, 0.0)
    for i, (sigma, lower) in enumerate(zip(sigmas, sigmas[1:], strict=False)):
        data = x - sigma * forward(tensors, x, torch.tensor([1000 * sigma]), *prompt, heads, group)
        x = data if lower == 0 else (1 - lower) * data + lower * noises[i + 1]
    return x
