"""Launches and memory of a SANA-Video forward on an accelerator, counted without one, beside diffusers' and the plan.

`python -m benchmarks.video` writes benchmarks/video.json: what tests/fake_accelerator.py counts of the released
configurations in bf16. Nothing of this has run on a card.
"""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
from fake_accelerator import FIRST, Counter, default_dtype, fake_accelerators

from benchmarks.machine import write
from sana_core.model.known_models import MAX_TOKENS, VIDEOS, VideoModel
from sana_core.video import forward as video
from sana_core.video.latents import video_shape
from sana_core.video.memory import plan_video

# what the host gets when it reads the longest prompt, or whether none is padded
READ = {torch.bool: False, torch.int64: MAX_TOKENS, torch.float32: MAX_TOKENS, torch.bfloat16: MAX_TOKENS}


def transformer(model: VideoModel, layers: int | None = None) -> torch.nn.Module:
    from diffusers import SanaVideoTransformer3DModel

    from sana_core.video.transformer import SanaVideo2Transformer3DModel

    layers = layers or model.layers
    if model.is_video2:
        return SanaVideo2Transformer3DModel(num_layers=layers).eval()
    patch = (1, model.patch, model.patch)
    config = {"in_channels": model.channels, "out_channels": model.channels, "patch_size": patch}
    return SanaVideoTransformer3DModel(num_layers=layers, mlp_ratio=3.0, **config).eval()


@torch.no_grad()
def count(
    name: str, prompts: int, given: bool = False, layers: int | None = None, library: bool = False
) -> dict[str, Any]:
    """Return launches, and bytes beyond weights and what is kept of the prompts, of one forward of so many `prompts`.

    With `given`, the first frame is. With `library` it is diffusers' forward, which reads the prompts in each step.
    """
    attend = torch.nn.functional.scaled_dot_product_attention

    def in_places(query: Any, key: Any, value: Any, attn_mask: Any = None, **others: Any) -> torch.Tensor:
        return attend(query, key, value, attn_mask=attn_mask)

    video_model = VIDEOS[name]
    shape = video_shape(*video_model.size, video_model.frames, video_model)
    with fake_accelerators(), default_dtype(torch.bfloat16):
        with FIRST:
            model = transformer(video_model, layers)
            embeds, mask = torch.empty(prompts, MAX_TOKENS, 2304), torch.ones(prompts, MAX_TOKENS)
            x, timestep = torch.empty(prompts, *shape), torch.empty((prompts, shape[1]) if given else (prompts,))
        if library:
            # the counter knows the attention by its arguments in their places
            with Counter() as counter, mock.patch("torch.nn.functional.scaled_dot_product_attention", in_places):
                model(x, embeds, timestep, encoder_attention_mask=mask, return_dict=False)
        else:
            with Counter(READ):
                constants = video.prepare(model, embeds, mask, *shape[1:])
            with Counter() as counter:
                video.velocity(model, x, timestep, constants)
        return {"launches": counter.launches, "bytes": counter.peak[FIRST], "moved": counter.moved}


def main() -> None:
    forwards: dict[str, Any] = {}
    for name, model in VIDEOS.items():
        plan = plan_video(model.name, *model.size)
        kept = 2 * model.layers * MAX_TOKENS * model.width * 2
        for prompts in (1, 2):
            planned = prompts * (plan["transformer"]["activations"] // 2 - kept)
            forwards[f"{name}, {prompts} prompts"] = {
                "frames": model.frames,
                **count(name, prompts),
                "planned_bytes": planned,
                "first_frame_given": count(name, prompts, True),
                **({} if model.is_video2 else {"diffusers": count(name, prompts, library=True)}),
            }
    write(__file__, {"dtype": "bfloat16", "forwards": forwards})


if __name__ == "__main__":
    main()
