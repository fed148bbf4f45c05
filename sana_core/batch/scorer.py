"""Score how well images fit a prompt, with a CLIP or a preference model in CLIP's format."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ..checkpoints.clip import load_model, load_processor, load_tokenizer
from ..runtime.cancellation import Poll, no_poll
from ..runtime.checks import check_text
from ..runtime.image_files import levels


class Scorer(NamedTuple):
    """`score(images, prompt)` returns how well each of the images [B, 3, H, W] in [-1, 1] fits, float32 [B] on the CPU.

    Higher is better; scores compare images of one prompt. `model` is the module, for callers that move it.
    """

    name: str
    model: torch.nn.Module
    score: Callable[..., torch.Tensor]


def load_scorer(folder: str | Path, device: str | torch.device = "cpu", dtype: torch.dtype = torch.float32) -> Scorer:
    """Return the CLIP in `folder`: config.json, model.safetensors, tokenizer.json and preprocessor_config.json.

    Its scores are the cosine of image and prompt times the model's scale, as published for CLIP and PickScore_v1.
    Raises MissingFileError or ReadError for a folder that is not whole, CheckpointError for another model and a broken
    file.
    """
    folder = Path(folder)
    model = load_model(folder, device, dtype)
    config = model.config
    tokenize = load_tokenizer(folder, config.text_config.max_position_embeddings, config.text_config.vocab_size)
    processor = load_processor(folder, config.vision_config.image_size)

    @torch.no_grad()
    def score(images: torch.Tensor, prompt: str, poll: Poll = no_poll) -> torch.Tensor:
        from PIL import Image

        check_text("prompt", prompt)
        # Inside a host the model may have moved since the last call.
        weights = model.logit_scale
        tokens = torch.tensor([tokenize(prompt)], device=weights.device)
        words: Any = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
        scores = []
        for image in images:
            poll()
            # One at a time, so that an image has the same score in any batch.
            pixels = processor(Image.fromarray(levels(image)))
            scores.append(model(pixel_values=pixels.to(weights), **words).logits_per_image[0, 0].float().cpu())
        return torch.stack(scores)

    return Scorer(folder.name, model, score)
