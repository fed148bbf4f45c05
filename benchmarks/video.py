"""Launches and memory of a SANA-Video forward on an accelerator, compared with diffusers and with the plan.

`python -m benchmarks.video` writes benchmarks/video.json. tests/fake_accelerator.py counts them on fake tensors for the
released configurations, in bf16. No GPU has run this.
"""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
from fake_accelerator import FIRST, Counter, default_dtype, fake_accelerators

from benchmarks.machine import write
from sana_core.model.known_models import MAX_TOKENS, VIDEOS, VideoModel
from sana_core.video import forward as video
from sana_core.video.latents import plan_video, video_shape

# Values that a fake tensor returns to the host: the length of the longest prompt, and whether no prompt is padded.
SCALARS = {torch.bool: False, torch.int64: MAX_TOKENS, torch.float32: MAX_TOKENS, torch.bfloat16: MAX_TOKENS}


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
    name: str, prompts: int, first_frame: bool = False, layers: int | None = None, library: bool = False
) -> dict[str, Any]:
    """Return the launches of one forward of `prompts` prompts, and its bytes without weights and prepared prompts.

    `first_frame`: the first frame is an input. `library`: use diffusers' forward, which projects the prompts in each
    step.
    """
    attend = torch.nn.functional.scaled_dot_product_attention

    def positional(query: Any, key: Any, value: Any, attn_mask: Any = None, **options: Any) -> torch.Tensor:
        return attend(query, key, value, attn_mask=attn_mask)

    video_model = VIDEOS[name]
    shape = video_shape(*video_model.size, video_model.frames, video_model)
    with fake_accelerators(), default_dtype(torch.bfloat16):
        with FIRST:
            model = transformer(video_model, layers)
            embeds, mask = torch.empty(prompts, MAX_TOKENS, 2304), torch.ones(prompts, MAX_TOKENS)
            x, timestep = torch.empty(prompts, *shape), torch.empty((prompts, shape[1]) if first_frame else (prompts,))
        if library:
            # The counter expects positional arguments of the attention.
            with Counter() as counter, mock.patch("torch.nn.functional.scaled_dot_product_attention", positional):
                model(x, embeds, timestep, encoder_attention_mask=mask, return_dict=False)
        else:
            with Counter(SCALARS):
                constants = video.prepare(model, embeds, mask, *shape[1:])
            with Counter() as counter:
                video.velocity(model, x, timestep, constants)
        return {"launches": counter.launches, "bytes": counter.peak[FIRST], "moved": counter.moved}


def main() -> None:
    forwards: dict[str, Any] = {}
    for name, model in VIDEOS.items():
        plan = plan_video(model.name, *model.size)
        # Keys and values of a prompt in all layers, in bf16.
        prepared = 2 * model.layers * MAX_TOKENS * model.width * 2
        for prompts in (1, 2):
            planned = prompts * (plan["transformer"]["activations"] // 2 - prepared)
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
