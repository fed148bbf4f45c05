"""Bytes of each stage of a video. memory.py has the bytes of an image.

ComfyUI decodes videos in chunks of frames. The bytes of its decode were counted on fake tensors.
"""

from __future__ import annotations

from ..memory import CONTEXT, DTYPES, DecodePlan, MemoryPlan, StagePlan, text_bytes
from ..model.known_models import GPU_SIZES, MAX_TOKENS, TEXT_PARAMETERS, VIDEOS
from ..runtime.checks import check_name
from .latents import video_shape


class VideoPlan(MemoryPlan):
    """What `plan_video` returns."""

    frames: int


def token_bytes(width: int, hidden: int, is_video2: bool = False) -> int:
    """Return the bytes of a forward per position and byte of the dtype. `hidden`: channels within the feed-forward.

    SANA-Video: two tensors of the feed-forward with its gate, and three of the inner width. SANA-Video 2.0: two tensors
    of the feed-forward, and the states of all groups of layers.
    """
    return 2 * hidden + 7 * width if is_video2 else 4 * hidden + 3 * width


def plan_video(
    variant: str, width: int, height: int, frames: int | None = None, batch: int = 1, dtype: str = "bfloat16"
) -> VideoPlan:
    """Return the bytes of each stage of generating `batch` videos of `frames` frames of `width` x `height` pixels.

    It is as `plan_memory` returns it; "smallest" is with one of the two prompts at a time, as ComfyUI computes them
    where memory is short. Raises InputError for an unknown variant or dtype, and for sizes that videos have not.
    """
    check_name("variant", variant, VIDEOS)
    check_name("dtype", dtype, DTYPES)
    model, item = VIDEOS[variant], DTYPES[dtype].itemsize
    frames = model.frames if frames is None else frames
    _, length, rows, columns = video_shape(width, height, frames, model)
    keys = 2 * model.layers * MAX_TOKENS * model.width * item
    alone = batch * length * (rows // model.patch) * (columns // model.patch) * item
    alone *= token_bytes(model.width, model.hidden, model.is_video2)
    decode = model.decode_bytes * width * height * item
    text: StagePlan = {"weights": TEXT_PARAMETERS * item, "activations": text_bytes(1, item)}
    transformer: StagePlan = {"weights": model.parameters * item, "activations": 2 * (keys + alone)}
    chunks: DecodePlan = {
        "weights": model.vae_parameters * item,
        "activations": decode,
        "methods": {"chunks": decode},
    }
    largest = [stage["weights"] + stage["activations"] for stage in (text, transformer, chunks)]
    smallest = max(largest[0], largest[1] - alone - keys, largest[2])
    return {
        "variant": variant,
        "width": width,
        "height": height,
        "frames": frames,
        "batch": batch,
        "dtype": dtype,
        "text": text,
        "transformer": transformer,
        "decode": chunks,
        "peak": max(largest),
        "smallest": smallest,
        "fits": {size: smallest + CONTEXT <= size * 2**30 for size in GPU_SIZES},
    }
