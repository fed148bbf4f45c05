"""VIBE's text encoder as ComfyUI's CLIP: Qwen3-VL, the meta queries and the edit head."""

from __future__ import annotations

import comfy.model_management
import comfy.ops
import comfy.sd
import node_helpers
import torch

from ....sana_core.checkpoints import inspect_checkpoint
from ....sana_core.checkpoints.checkpoint import Source
from ....sana_core.checkpoints.load import instruction_parts
from ....sana_core.checkpoints.tokenizer import load_qwen_tokenizer
from ....sana_core.edit import resize
from ....sana_core.errors import InputError
from ....sana_core.model.instruction import (
    InstructionReader,
    empty_instruction,
    encode_instruction,
    instruction_ids,
)
from ....sana_core.model.known_models import edit_size
from ....sana_core.model.latents import DOWNSCALE
from ....sana_core.model.text import Tokenizer
from ..compat.internals import remember_loader
from ..compat.patches import IMAGE_GUIDANCE, INSTRUCTION
from ..file_stats import Reloader
from ..report import warn
from ..sampling.core_nodes import no_effect
from .clip import HostTextModel, make_clip, text_dtypes
from .weights import load_component

KEY = "qwen3_vl"


class EditTokenizer:
    """A sentence and an image to one "token", because the number of the image's tokens is known only to the model."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer

    def tokenize_with_weights(self, text: str, return_word_ids: bool = False, image=None, images=(), **options) -> dict:
        """Return {KEY: [[((text, pixels), 1.0)]]}. An empty text without an image means no instruction.

        `image` or one of `images` is an IMAGE [1, H, W, 3].
        """
        all_images = [*([] if image is None else [image]), *(images or ())]
        if len(all_images) > 1 or any(len(one) > 1 for one in all_images):
            raise InputError(
                f"image: got {sum(map(len, all_images))} images, expected one, which VIBE edits; choose one"
            )
        for name, value in options.items():
            if value:
                warn(no_effect(name))
        instruction_ids(self.tokenizer, text, bool(all_images))
        return {KEY: [[((text, levels_of(all_images[0]) if all_images else None), 1.0, *(0,) * return_word_ids)]]}

    def state_dict(self) -> dict:
        """Raise InputError. CLIPSave and CheckpointSave call this before they write a file, which no loader reads."""
        raise InputError("clip: got VIBE's CLIP, expected SANA's Gemma 2 to save; keep the folder VIBE-Image-Edit")


class EditTextModel(HostTextModel):
    """Qwen3-VL and the edit head as ComfyUI's CLIP calls them."""

    def __init__(self, qwen: torch.nn.Module, head: torch.nn.Module, tokenizer: Tokenizer) -> None:
        super().__init__(qwen)
        self.qwen3_vl, self.edit_head = qwen, head
        self.tokenizer = tokenizer

    def encode_token_weights(self, pairs: dict) -> tuple[torch.Tensor, None, dict]:
        """Return embeddings [1, queries, C], no pooled output, and the mark of VIBE's embeddings."""
        text, image = pairs[KEY][0][0][0]
        if image is None and not text.strip():
            like = torch.empty(0, dtype=self.qwen3_vl.visual.dtype, device=self.execution_device)
            cond = empty_instruction(self.edit_head, like)
        else:
            reader = InstructionReader(self.tokenizer, self.qwen3_vl, self.edit_head)
            cond = encode_instruction(reader, text, image, self.execution_device)
        return cond.float().to(comfy.model_management.intermediate_device()), None, {INSTRUCTION: True}


def levels_of(image: torch.Tensor) -> torch.Tensor:
    """Return the first of an IMAGE [B, H, W, 3 or 4] as uint8 [3, H, W] on the CPU, without alpha."""
    return (image[0, :, :, :3].clamp(0, 1) * 255).round().to(torch.uint8).movedim(-1, 0).cpu()


def load_edit_clip(source: Source, disable_dynamic: bool = False) -> comfy.sd.CLIP:
    """Return the CLIP of VIBE's folder."""
    checkpoint = inspect_checkpoint(source)
    reload = Reloader(lambda *args, **options: load_edit_clip(*args, **options).patcher, checkpoint.path)
    part, head_part = instruction_parts(checkpoint)
    tokenizer = load_qwen_tokenizer(part)
    device = comfy.model_management.text_encoder_device()
    dtype, compute = text_dtypes(device)
    operations = comfy.ops.disable_weight_init if dtype == compute else comfy.ops.manual_cast
    head = load_component(head_part, dtype, compute, operations)
    qwen = load_component(part, dtype, compute, operations)
    model = EditTextModel(qwen, head, tokenizer)
    clip = make_clip(EditTokenizer(tokenizer), model, qwen.dtype, disable_dynamic)
    remember_loader(clip.patcher, reload, checkpoint.path)
    return clip


def encode_edit(
    clip: comfy.sd.CLIP, vae: comfy.sd.VAE, image: torch.Tensor, text: str, image_guidance: float
) -> tuple[list, list, dict]:
    """Return positive and negative CONDITIONING of an edit, and the empty LATENT of its size."""
    if not isinstance(clip.tokenizer, EditTokenizer):
        got = type(clip.cond_stage_model).__name__
        raise InputError(f"clip: got {got}, expected VIBE's Qwen3-VL; load VIBE-Image-Edit with SANA Loader")
    if image.ndim != 4 or not all(image.shape) or image.shape[-1] not in (3, 4):
        raise InputError(f"image: got {list(image.shape)}, expected [1, height, width, 3 or 4]; connect an IMAGE")
    size = edit_size(image.shape[2], image.shape[1])
    tokens = clip.tokenize(text, images=[image])
    pixels = resize(levels_of(image), size).movedim(0, -1)[None] / 255
    latents = vae.encode(pixels)
    values = {"concat_latent_image": latents, IMAGE_GUIDANCE: image_guidance}
    positive, negative = (
        node_helpers.conditioning_set_values(clip.encode_from_tokens_scheduled(one), values)
        for one in (tokens, clip.tokenize(""))
    )
    return positive, negative, {"samples": torch.zeros_like(latents), "downscale_ratio_spacial": DOWNSCALE}
