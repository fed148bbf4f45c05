"""Small random models, and the layouts in which SANA's files come, written here by tables of their own."""

from __future__ import annotations

import json
import math
from pathlib import Path

import torch
from diffusers import AutoencoderDC, SanaControlNetModel, SanaTransformer2DModel
from safetensors.torch import save_file
from transformers import Gemma2Config, Gemma2Model

NVIDIA = """
x_embedder.proj.weight                       patch_embed.proj.weight
x_embedder.proj.bias                         patch_embed.proj.bias
y_embedder.y_proj.fc1.weight                 caption_projection.linear_1.weight
y_embedder.y_proj.fc1.bias                   caption_projection.linear_1.bias
y_embedder.y_proj.fc2.weight                 caption_projection.linear_2.weight
y_embedder.y_proj.fc2.bias                   caption_projection.linear_2.bias
attention_y_norm.weight                      caption_norm.weight
t_embedder.mlp.0.weight                      time_embed.emb.timestep_embedder.linear_1.weight
t_embedder.mlp.0.bias                        time_embed.emb.timestep_embedder.linear_1.bias
t_embedder.mlp.2.weight                      time_embed.emb.timestep_embedder.linear_2.weight
t_embedder.mlp.2.bias                        time_embed.emb.timestep_embedder.linear_2.bias
t_block.1.weight                             time_embed.linear.weight
t_block.1.bias                               time_embed.linear.bias
final_layer.linear.weight                    proj_out.weight
final_layer.linear.bias                      proj_out.bias
final_layer.scale_shift_table                scale_shift_table
"""
NVIDIA_SPRINT = """
t_embedder.mlp.0.weight                      time_embed.timestep_embedder.linear_1.weight
t_embedder.mlp.0.bias                        time_embed.timestep_embedder.linear_1.bias
t_embedder.mlp.2.weight                      time_embed.timestep_embedder.linear_2.weight
t_embedder.mlp.2.bias                        time_embed.timestep_embedder.linear_2.bias
cfg_embedder.mlp.0.weight                    time_embed.guidance_embedder.linear_1.weight
cfg_embedder.mlp.0.bias                      time_embed.guidance_embedder.linear_1.bias
cfg_embedder.mlp.2.weight                    time_embed.guidance_embedder.linear_2.weight
cfg_embedder.mlp.2.bias                      time_embed.guidance_embedder.linear_2.bias
"""
NVIDIA_BLOCK = """
scale_shift_table                            scale_shift_table
attn.qkv.weight                              attn1.to_q.weight attn1.to_k.weight attn1.to_v.weight
attn.q_norm.weight                           attn1.norm_q.weight
attn.k_norm.weight                           attn1.norm_k.weight
attn.proj.weight                             attn1.to_out.0.weight
attn.proj.bias                               attn1.to_out.0.bias
mlp.inverted_conv.conv.weight                ff.conv_inverted.weight
mlp.inverted_conv.conv.bias                  ff.conv_inverted.bias
mlp.depth_conv.conv.weight                   ff.conv_depth.weight
mlp.depth_conv.conv.bias                     ff.conv_depth.bias
mlp.point_conv.conv.weight                   ff.conv_point.weight
cross_attn.q_linear.weight                   attn2.to_q.weight
cross_attn.q_linear.bias                     attn2.to_q.bias
cross_attn.kv_linear.weight                  attn2.to_k.weight attn2.to_v.weight
cross_attn.kv_linear.bias                    attn2.to_k.bias attn2.to_v.bias
cross_attn.q_norm.weight                     attn2.norm_q.weight
cross_attn.k_norm.weight                     attn2.norm_k.weight
cross_attn.proj.weight                       attn2.to_out.0.weight
cross_attn.proj.bias                         attn2.to_out.0.bias
"""
CAPTION = 64
WIDTH = 1152  # The width of SANA 0.6B, whose number of heads is known.


def table(text: str) -> dict[str, list[str]]:
    return {line.split()[0]: line.split()[1:] for line in text.strip().splitlines()}


def transformer(layers: int = 1, qk_norm: bool = False, sprint: bool = False, resolution: int = 1024, **config):
    """A random transformer that is as wide as SANA 0.6B, in bf16."""
    torch.manual_seed(1)
    arguments = {
        "num_attention_heads": WIDTH // 32,
        "num_layers": layers,
        "num_cross_attention_heads": 16,
        "cross_attention_head_dim": WIDTH // 16,
        "cross_attention_dim": WIDTH,
        "caption_channels": CAPTION,
        "sample_size": resolution // 32,
        "interpolation_scale": {2048: 1.0, 4096: 2.0}.get(resolution),
        "qk_norm": "rms_norm_across_heads" if qk_norm or sprint else None,
        "guidance_embeds": sprint,
    }
    return SanaTransformer2DModel(**{**arguments, **config}).bfloat16().train(False)


def controlnet(layers: int = 2):
    torch.manual_seed(2)
    model = SanaControlNetModel(
        num_attention_heads=WIDTH // 32,
        num_layers=layers,
        num_cross_attention_heads=16,
        cross_attention_head_dim=WIDTH // 16,
        cross_attention_dim=WIDTH,
        caption_channels=CAPTION,
    )
    for layer in (model.input_block, *model.controlnet_blocks):  # They are zero by default, which would hide errors.
        torch.nn.init.normal_(layer.weight, std=0.02)
    return model.bfloat16().train(False)


def f32c32(divisor: int, **changes):
    """SANA's DC-AE in mit-han-lab's configuration, with random weights and the channels divided by `divisor`.

    The other sizes are defaults of the library.
    """
    torch.manual_seed(0)
    blocks = ("ResBlock",) * 3 + ("EfficientViTBlock",) * 3
    widths = tuple(width // divisor for width in (128, 256, 512, 512, 1024, 1024))
    config = {
        "encoder_block_types": blocks,
        "decoder_block_types": blocks,
        "encoder_block_out_channels": widths,
        "decoder_block_out_channels": widths,
        "upsample_block_type": "interpolate",
        "downsample_block_type": "Conv",
        "scaling_factor": 0.41407,
    }
    return AutoencoderDC(**config | changes).requires_grad_(False)


def released_autoencoder():
    return f32c32(1)


def autoencoder():
    """A DC-AE of few blocks and channels."""
    widths = {f"{side}_block_out_channels": (8, 8, 16, 32, 32, 64) for side in ("encoder", "decoder")}
    depths = {"encoder_layers_per_block": (1, 1, 1, 2, 1, 1), "decoder_layers_per_block": (1, 2, 1, 1, 1, 1)}
    return f32c32(1, attention_head_dim=16, **widths, **depths).bfloat16().train(False)


def gemma(vocabulary: int = 300):
    """A random Gemma 2 with heads as wide as the real one's."""
    torch.manual_seed(4)
    config = Gemma2Config(
        vocab_size=vocabulary,
        hidden_size=CAPTION,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=256,
    )
    return Gemma2Model(config).bfloat16().train(False)


def nvidia(model: torch.nn.Module, unused: bool = True) -> dict[str, torch.Tensor]:
    """The tensors of a transformer or ControlNet as NVIDIA's files have them."""
    remaining = dict(model.state_dict())
    names = {original: targets for original, targets in table(NVIDIA).items() if targets[0] in remaining}
    if "time_embed.guidance_embedder.linear_1.weight" in remaining:
        names.update(table(NVIDIA_SPRINT))
    is_controlnet = isinstance(model, SanaControlNetModel)
    for number in range(model.config.num_layers):
        block = f"controlnet.{number}.copied_block" if is_controlnet else f"blocks.{number}"
        for original, targets in table(NVIDIA_BLOCK).items():
            full = [f"transformer_blocks.{number}.{target}" for target in targets]
            if full[0] in remaining:
                names[f"{block}.{original}"] = full
        if is_controlnet:
            for leaf in ("weight", "bias"):
                names[f"controlnet.{number}.after_proj.{leaf}"] = [f"controlnet_blocks.{number}.{leaf}"]
    if is_controlnet:
        names.update({f"controlnet.0.before_proj.{leaf}": [f"input_block.{leaf}"] for leaf in ("weight", "bias")})
    out = {name: torch.cat([remaining.pop(target) for target in targets]) for name, targets in names.items()}
    assert not remaining, remaining.keys()
    if unused:
        side = model.config.sample_size
        out["pos_embed"] = torch.zeros(1, side**2, 8)
        out["y_embedder.y_embedding"] = torch.zeros(300, CAPTION)
    return out


def mit(model: AutoencoderDC) -> dict[str, torch.Tensor]:
    """The tensors of a DC-AE under the names of MIT's files, which mit_dc_ae.py lists."""
    remaining, out = dict(model.state_dict()), {}

    def move(original: str, *targets: str, conv: bool = False) -> None:
        for leaf in ("weight", "bias"):
            if f"{targets[0]}.{leaf}" in remaining:
                tensor = torch.cat([remaining.pop(f"{target}.{leaf}") for target in targets])
                out[f"{original}.{leaf}"] = tensor[..., None, None] if conv else tensor

    move("encoder.project_in.conv", "encoder.conv_in")
    move("encoder.project_out.main.op_list.0.conv", "encoder.conv_out")
    move("decoder.project_in.main.conv", "decoder.conv_in")
    move("decoder.project_out.op_list.0", "decoder.norm_out")
    move("decoder.project_out.op_list.2.conv", "decoder.conv_out")
    for theirs, ours in (("encoder.stages", "encoder.down_blocks"), ("decoder.stages", "decoder.up_blocks")):
        blocks = sorted({tuple(map(int, name.split(".")[2:4])) for name in remaining if name.startswith(ours)})
        for stage, number in blocks:
            a, b = f"{theirs}.{stage}.op_list.{number}", f"{ours}.{stage}.{number}"
            sampling = "main.conv" if ours.startswith("encoder") else "main.conv.conv"
            move(f"{a}.{sampling}", f"{b}.conv")
            for n in (1, 2):
                move(f"{a}.main.conv{n}.conv", f"{b}.conv{n}")
            move(f"{a}.main.conv2.norm", f"{b}.norm")
            attn, glu = f"{a}.context_module.main", f"{a}.local_module.main"
            move(f"{attn}.qkv.conv", *(f"{b}.attn.to_{letter}" for letter in "qkv"), conv=True)
            move(f"{attn}.aggreg.0.0", f"{b}.attn.to_qkv_multiscale.0.proj_in")
            move(f"{attn}.aggreg.0.1", f"{b}.attn.to_qkv_multiscale.0.proj_out")
            move(f"{attn}.proj.conv", f"{b}.attn.to_out", conv=True)
            move(f"{attn}.proj.norm", f"{b}.attn.norm_out")
            for kind in ("inverted", "depth", "point"):
                move(f"{glu}.{kind}_conv.conv", f"{b}.conv_out.conv_{kind}")
            move(f"{glu}.point_conv.norm", f"{b}.conv_out.norm")
    assert not remaining, remaining.keys()
    return out


def save(tensors: dict[str, torch.Tensor], path: Path, **metadata: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path, metadata or None)
    return path


def with_config(model: torch.nn.Module) -> str:
    """A model's configuration as its metadata have it."""
    config = {key: value for key, value in model.config.items() if key != "reference"}
    return json.dumps({**config, "_class_name": type(model).__name__})


def sparse(model: torch.nn.Module | dict[str, tuple[int, ...]], path: Path) -> Path:
    """A file with the header of `model`, or of these shapes, in bf16 and no bytes written behind it."""
    shapes = model if isinstance(model, dict) else {name: tensor.shape for name, tensor in model.state_dict().items()}
    header, end = {}, 0
    for name, shape in shapes.items():
        size = 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [end, end + size]}
        end += size
    content = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(len(content).to_bytes(8, "little") + content)
        file.truncate(8 + len(content) + end)
    return path
