"""A small VIBE with random weights, of the classes of diffusers, transformers and tokenizers, and torch's attention."""

from __future__ import annotations

import json
from pathlib import Path
from tempfile import TemporaryDirectory

import layouts
import torch
from diffusers import DPMSolverMultistepScheduler, SanaTransformer2DModel
from safetensors.torch import save_file
from torch import nn

QUERIES, WIDTH, CAPTION = 7, 64, 48
SPECIAL = ("<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>")
VOCABULARY = 400


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.input_norm, self.output_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attn = nn.MultiheadAttention(width, 16, batch_first=True)
        self.mlp = nn.ModuleDict(
            {
                "fc1": nn.Linear(width, 4 * width),
                "fc2": nn.Linear(4 * width, width),
                "fc3": nn.Linear(width, 4 * width),
            }
        )

    def forward(self, x):
        normed = self.input_norm(x)
        x = x + self.attn(normed, normed, normed)[0]
        normed = self.output_norm(x)
        return x + self.mlp["fc2"](nn.functional.silu(self.mlp["fc1"](normed)) * self.mlp["fc3"](normed))


class Head(nn.Module):
    """VIBE's edit head as the paper and the names in its file show it."""

    def __init__(self, width=WIDTH, hidden=64, output=CAPTION, layers=2, queries=QUERIES) -> None:
        super().__init__()
        self.queries = nn.Parameter(torch.randn(queries, width))
        self.input_proj = nn.Linear(width, hidden)
        self.attn_blocks = nn.ModuleList(Block(hidden) for _ in range(layers))
        self.output_proj = nn.Sequential(nn.LayerNorm(hidden), nn.Linear(hidden, output))

    def forward(self, states):
        x = self.input_proj(states + self.queries)
        for block in self.attn_blocks:
            x = block(x)
        return self.output_proj(x)

    def tensors(self):
        named = self.state_dict()
        queries = named.pop("queries")
        return {"meta_queries": queries, **{f"edit_head.{name}": tensor for name, tensor in named.items()}}


def head(seed=0, **sizes) -> Head:
    torch.manual_seed(seed)
    module = Head(**sizes).train(False).requires_grad_(False)
    for parameter in module.parameters():
        if parameter.ndim == 1:
            parameter.add_(0.1 * torch.randn_like(parameter))
    return rounded(module)


def rounded(module):
    """Round the weights to bf16, in which ComfyUI stores text encoders for a GPU."""
    for parameter in module.parameters():
        parameter.copy_(parameter.bfloat16())
    return module


def transformer(**changes) -> SanaTransformer2DModel:
    torch.manual_seed(1)
    config = {
        "in_channels": 64,
        "out_channels": 32,
        "num_attention_heads": 2,
        "num_layers": 2,
        "num_cross_attention_heads": 2,
        "cross_attention_head_dim": 32,
        "cross_attention_dim": 64,
        "caption_channels": CAPTION,
        "qk_norm": "rms_norm_across_heads",
        "sample_size": 32,
    }
    return SanaTransformer2DModel(**{**config, **changes}).train(False).requires_grad_(False)


def tokenizer():
    """A tokenizer of bytes, some pairs and Qwen's special tokens, with the steps of transformers' Qwen2Tokenizer."""
    from tokenizers import AddedToken, pre_tokenizers
    from transformers import Qwen2TokenizerFast

    vocabulary = {character: i for i, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    pairs = [("i", "n"), ("t", "e"), ("te", "r"), ("\u0120", "w"), ("'", "t"), ("3", "\u0120")]
    vocabulary |= {first + second: 256 + i for i, (first, second) in enumerate(pairs)}
    with TemporaryDirectory() as folder:
        vocab_file, merges_file = Path(folder) / "vocab.json", Path(folder) / "merges.txt"
        vocab_file.write_text(json.dumps(vocabulary))
        merges_file.write_text("\n".join(map(" ".join, pairs)), encoding="utf-8")
        files = {"vocab_file": str(vocab_file), "merges_file": str(merges_file)}
        # transformers 5 has the arguments vocab and merges.
        fast = Qwen2TokenizerFast(vocab=vocabulary, merges=pairs, **files).backend_tokenizer
    fast.add_special_tokens([AddedToken(name, normalized=False, special=True) for name in SPECIAL])
    return fast


def qwen_config(text=None, vision=None, **ids):
    """The config of a small Qwen3-VL, with other fields of its two parts."""
    from transformers import Qwen3VLConfig

    return Qwen3VLConfig(
        text_config={
            "vocab_size": VOCABULARY,
            "hidden_size": WIDTH,
            "intermediate_size": 96,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "rope_theta": 5e6,
            "rope_scaling": {"rope_type": "default", "mrope_section": [4, 2, 2], "mrope_interleaved": True},
            **(text or {}),
        },
        vision_config={
            "depth": 4,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_heads": 2,
            "out_hidden_size": WIDTH,
            "num_position_embeddings": 64,
            "deepstack_visual_indexes": [0, 1, 2],
            **(vision or {}),
        },
        tie_word_embeddings=True,
        **ids,
    )


def qwen(fast):
    from transformers import Qwen3VLForConditionalGeneration

    names = {"image_token_id": "<|image_pad|>", "vision_start_token_id": "<|vision_start|>"}
    names["vision_end_token_id"] = "<|vision_end|>"
    config = qwen_config(**{field: fast.token_to_id(name) for field, name in names.items()})
    torch.manual_seed(3)
    model = Qwen3VLForConditionalGeneration(config).train(False).requires_grad_(False)
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1:
            parameter.add_(0.1 * torch.randn_like(parameter))
        else:
            parameter.normal_(std=0.5 if "embed" in name else parameter[0].numel() ** -0.5)
    return rounded(model)


def save_transformer(folder: Path, model: SanaTransformer2DModel, edit_head: Head, kind: str = "channel_cat") -> Path:
    """Save both as VIBE's folder of its transformer."""
    folder.mkdir(parents=True)
    config = {key: value for key, value in model.config.items() if not key.startswith("_")}
    queries = list(edit_head.queries.shape)
    config |= {"_class_name": "VIBESanaEditingModel", "input_condition_type": kind, "edit_head_stacks_num": 2}
    config |= {"num_meta_queries": queries[0], "meta_queries_dim": queries[1], "edit_head_input_dim": queries[1]}
    (folder / "config.json").write_text(json.dumps(config))
    file = folder / "diffusion_pytorch_model.safetensors"
    save_file({**model.state_dict(), **edit_head.tensors()}, file)
    return file


def save_vibe(folder: Path):
    """Save a whole model. Returns its tokenizer, Qwen3-VL, edit head, transformer and VAE."""
    fast, edit_head, model, vae = tokenizer(), head(), transformer(), layouts.f32c32(16).train(False)
    text = qwen(fast)
    save_transformer(folder / "transformer", model, edit_head)
    text.save_pretrained(folder / "text_encoder")
    vae.save_pretrained(folder / "vae")
    scheduler = DPMSolverMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0)
    scheduler.save_pretrained(folder / "scheduler")
    (folder / "tokenizer").mkdir()
    fast.save(str(folder / "tokenizer" / "tokenizer.json"))
    (folder / "model_index.json").write_text(json.dumps({"_class_name": "VIBESanaEditingPipeline"}))
    return fast, text, edit_head, model, vae
