"""How well images fit a prompt: CLIP, and preference models that are CLIPs, as transformers keeps them in a folder."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ..checkpoints.files import REDOWNLOAD, brief, read_json
from ..checkpoints.schemas import refuse_code
from ..errors import CheckpointError, MissingFileError
from ..runtime.cancellation import Poll, no_poll
from ..runtime.checks import check_text
from ..runtime.image_files import levels

KIND = "clip"
SUITABLE = "use a CLIP that has both, such as openai/clip-vit-large-patch14 or yuvalkirstain/PickScore_v1"


class Scorer(NamedTuple):
    """`score(images, prompt)` returns how well each of the images [B, 3, H, W] in [-1, 1] fits, float32 [B] on the CPU.

    Higher is better; scores compare images of one prompt. `model` is what computes, for those who move it.
    """

    name: str
    model: torch.nn.Module
    score: Callable[..., torch.Tensor]


def load_scorer(folder: str | Path, device: str | torch.device = "cpu", dtype: torch.dtype = torch.float32) -> Scorer:
    """Return the CLIP in `folder`: config.json, model.safetensors, tokenizer.json and preprocessor_config.json.

    Its scores are the cosine of image and prompt times its own scale, as published for CLIP and PickScore_v1. Raises
    MissingFileError or ReadError for a folder that is not whole, CheckpointError for another model and a broken file.
    """
    from safetensors import SafetensorError
    from transformers import CLIPImageProcessor, CLIPModel, PreTrainedTokenizerFast

    folder = Path(folder)
    check_folder(folder)
    try:
        model, found = CLIPModel.from_pretrained(
            folder, local_files_only=True, use_safetensors=True, output_loading_info=True
        )
        tokenizer = PreTrainedTokenizerFast.from_pretrained(folder, local_files_only=True)
        processor = CLIPImageProcessor.from_pretrained(folder, local_files_only=True)
    except (OSError, RuntimeError, ValueError, TypeError, SafetensorError) as error:
        raise CheckpointError(f"{folder.name}: cannot be loaded as CLIP ({brief(error)}); {REDOWNLOAD}") from error
    missing = sorted(found["missing_keys"])
    if missing:
        raise CheckpointError(
            f"{folder.name}: no {missing[0]} and {len(missing) - 1} more; it is not a whole CLIP, {SUITABLE}"
        )
    model = model.requires_grad_(False).to(device, dtype)
    longest = model.config.text_config.max_position_embeddings

    @torch.no_grad()
    def score(images: torch.Tensor, prompt: str, poll: Poll = no_poll) -> torch.Tensor:
        from PIL import Image

        check_text("prompt", prompt)
        # only here: inside a host the model may be moved between two calls
        weights = model.logit_scale
        tokens = tokenizer(prompt, truncation=True, max_length=longest, return_tensors="pt")
        words: Any = {name: tokens[name].to(weights.device) for name in ("input_ids", "attention_mask")}
        scores = []
        for image in images:
            poll()
            # one by one, so that the score is the same in any batch
            pixels = processor(Image.fromarray(levels(image)), return_tensors="pt")["pixel_values"]
            scores.append(model(pixel_values=pixels.to(weights), **words).logits_per_image[0, 0].float().cpu())
        return torch.stack(scores)

    return Scorer(folder.name, model, score)


def check_folder(folder: Path) -> None:
    """Raise CheckpointError for what is no folder of a CLIP of text and images, MissingFileError for one in parts."""
    if folder.is_file():
        raise CheckpointError(
            f"{folder.name}: got one file, expected a folder with config.json, a CLIP of text and images; {SUITABLE}"
        )
    config = read_json(folder / "config.json")
    refuse_code(folder.name, config)
    kind = config.get("model_type")
    if kind != KIND:
        raise CheckpointError(
            f"{folder.name}: got model_type {brief(kind)}, expected {KIND}, of text and images; {SUITABLE}"
        )
    for name in ("tokenizer.json", "preprocessor_config.json"):
        if not (folder / name).is_file():
            raise MissingFileError(f"{folder.name}: no {name}; download it from where the model is from")
    for settings in ("tokenizer_config.json", "preprocessor_config.json"):
        if (folder / settings).is_file():
            refuse_code(folder.name, read_json(folder / settings))
