"""SANA's text encoder as ComfyUI's CLIP."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import comfy.model_management
import comfy.model_patcher
import comfy.ops
import comfy.sd
import comfy.supported_models_base
import torch

from ...sana_core.checkpoints import load_text_encoder
from ...sana_core.text import MAX_TOKENS, select_tokens, tokenize
from .adopt import adopt, wide_dtype

if TYPE_CHECKING:
    from transformers import Gemma2Model, PreTrainedTokenizerBase

KEY = "gemma2_2b"


class SanaTokenizer:
    """Text to (token, weight) pairs. Weights are always 1: SANA reads brackets as brackets."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer

    def tokenize_with_weights(
        self, text: str, return_word_ids: bool = False, instruction: bool | None = None, **kwargs
    ) -> dict[str, list[list[tuple]]]:
        """Without `instruction` from the caller, a prompt has it and the empty text, which stands for none, has not."""
        instruction = bool(text.strip()) if instruction is None else instruction
        ids, _ = tokenize(self.tokenizer, [text], instruction)
        tail = (0,) if return_word_ids else ()
        return {KEY: [[(token, 1.0, *tail) for token in ids[0].tolist()]]}

    def state_dict(self) -> dict:
        return {}


class SanaTextModel(torch.nn.Module):
    """Gemma 2 behind the calls that ComfyUI's CLIP makes."""

    def __init__(self, gemma: Gemma2Model, pad_token: int) -> None:
        super().__init__()
        self.gemma = gemma
        self.pad_token = pad_token
        self.dtypes = {gemma.dtype}
        self.execution_device = gemma.device

    def reset_clip_options(self) -> None:
        self.execution_device = self.gemma.device

    def set_clip_options(self, options: dict) -> None:
        self.execution_device = options.get("execution_device", self.execution_device)

    def encode_token_weights(self, pairs: dict[str, list[list[tuple]]]) -> tuple[torch.Tensor, None, dict]:
        """Return embeddings [B, 300, C], no pooled output, and the mask."""
        ids = torch.tensor([[pair[0] for pair in row] for row in pairs[KEY]], device=self.execution_device)
        mask = (ids != self.pad_token).long()
        states = self.gemma(ids, attention_mask=mask).last_hidden_state
        device = comfy.model_management.intermediate_device()
        cond = select_tokens(states, MAX_TOKENS).float().to(device)
        return cond, None, {"attention_mask": select_tokens(mask, MAX_TOKENS).to(device)}


def load_clip(folder: Path, disable_dynamic: bool = False) -> comfy.sd.CLIP:
    """Return the CLIP of the diffusers folder `folder`."""
    dtype = wide_dtype(comfy.model_management.text_encoder_device())
    encoder = load_text_encoder(folder, dtype=dtype)
    adopt(encoder.model, comfy.ops.disable_weight_init)
    target = comfy.supported_models_base.ClipTarget(
        lambda **_: SanaTokenizer(encoder.tokenizer),
        lambda **_: SanaTextModel(encoder.model, encoder.tokenizer.pad_token_id),
    )
    clip = comfy.sd.CLIP(
        target,
        model_options={"dtype": dtype, "initial_device": torch.device("cpu")},
        disable_dynamic=disable_dynamic,
    )
    clip.patcher.cached_patcher_init = (load_clip_patcher, (folder,))
    return clip


def load_clip_patcher(folder: Path, disable_dynamic: bool = False) -> comfy.model_patcher.ModelPatcher:
    """What ComfyUI calls for another copy of the weights."""
    return load_clip(folder, disable_dynamic).patcher
