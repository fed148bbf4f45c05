"""Gemma 2 caps the logits of its attention at 50, whatever transformers would choose: against a forward of its own."""

import json
import math

import layouts
import pytest
import torch
from torch.nn.functional import gelu

import sana_core

CAP, HEAD, QUERIES, EPSILON, BASE = 50.0, 256, 2, 1e-6, 10_000.0
TOKENS = torch.tensor([[2, 17, 250, 31, 90, 4, 133, 8]])


def normed(x, weight):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPSILON) * (1 + weight)


def rotated(x):
    """Rotary position embedding of x [heads, positions, HEAD]; pairs are the two halves."""
    angles = torch.arange(x.shape[1])[:, None] * BASE ** -(torch.arange(0, HEAD, 2) / HEAD)
    one, two = x.chunk(2, dim=-1)
    return torch.cat([one * angles.cos() - two * angles.sin(), two * angles.cos() + one * angles.sin()], dim=-1)


def reference(weights, tokens, cap):
    """The last hidden states [positions, C] of one prompt, as the report has them (arXiv:2408.00118, section 2).

    `weights` go by transformers' names. Shorter than the window of the local layers, so that all are global.
    """
    x = weights["embed_tokens.weight"][tokens] * math.sqrt(layouts.CAPTION)
    future = torch.ones(len(tokens), len(tokens)).triu(1).bool()
    for number in range(2):
        values = {name.removeprefix(f"layers.{number}."): weight for name, weight in weights.items()}
        h = normed(x, values["input_layernorm.weight"])
        q, k, v = (
            (h @ values[f"self_attn.{name}_proj.weight"].T).view(len(tokens), -1, HEAD).transpose(0, 1)
            for name in "qkv"
        )
        # both heads of queries share the one of keys
        logits = rotated(q) @ rotated(k).transpose(1, 2) / math.sqrt(HEAD)
        logits = cap * torch.tanh(logits / cap)
        h = logits.masked_fill(future, -torch.inf).softmax(-1) @ v
        h = h.transpose(0, 1).flatten(1) @ values["self_attn.o_proj.weight"].T
        x = x + normed(h, values["post_attention_layernorm.weight"])
        h = normed(x, values["pre_feedforward_layernorm.weight"])
        h = gelu(h @ values["mlp.gate_proj.weight"].T, approximate="tanh") * (h @ values["mlp.up_proj.weight"].T)
        x = x + normed(h @ values["mlp.down_proj.weight"].T, values["post_feedforward_layernorm.weight"])
    return normed(x, weights["norm.weight"])


@pytest.mark.parametrize("asked", [None, "sdpa"])
def test_large_logits_are_capped(tmp_path, spiece, asked):
    """`asked` is the attention that a config.json beside the file may request."""
    model = layouts.gemma(vocabulary=600)
    tensors = {
        name: weight * (64 if "q_proj" in name or "k_proj" in name else 1)
        for name, weight in model.state_dict().items()
    }
    (tmp_path / "tokenizer.model").write_bytes(spiece)
    path = layouts.save({name: weight.clone() for name, weight in tensors.items()}, tmp_path / "gemma.safetensors")
    if asked:
        config = {**model.config.to_dict(), "architectures": ["Gemma2Model"], "attn_implementation": asked}
        (tmp_path / "config.json").write_text(json.dumps(config))
    encoder = sana_core.load_text_encoder(path)
    with torch.no_grad():
        ours = encoder.model(TOKENS, attention_mask=torch.ones_like(TOKENS)).last_hidden_state[0]
    weights = {name: weight.float() for name, weight in tensors.items()}
    expected, uncapped = (reference(weights, TOKENS[0], cap) for cap in (CAP, 1e9))
    assert (expected - uncapped).abs().max() > 0.1
    torch.testing.assert_close(ours, expected, atol=1e-4, rtol=0)
