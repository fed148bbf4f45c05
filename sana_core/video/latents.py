"""The shape of a video's latents, which differs between the models, and the bytes of each stage of a video.

ComfyUI decodes videos in chunks of frames. The bytes of its decode were counted on fake tensors.
"""

from __future__ import annotations

from ..errors import InputError
from ..memory import CONTEXT, DTYPES, DecodePlan, MemoryPlan, StagePlan, text_bytes
from ..model.known_models import GPU_SIZES, LARGEST_FRAMES, MAX_TOKENS, TEXT_PARAMETERS, VIDEOS, VideoModel
from ..model.latents import check_side
from ..runtime.checks import check_name, check_whole


def video_shape(width: int, height: int, frames: int, model: VideoModel) -> tuple[int, int, int, int]:
    """Return the latent shape [C, T, h, w] of a video for the SANA-Video `model`.

    Raises InputError for sides that are not of whole patches, that the VAE cannot decode or that are above 16384
    pixels, and for frames, up to 1025, that do not fill the last latent frame.
    """
    for field, pixels in (("width", width), ("height", height)):
        check_side(field, pixels, model.downscale * model.patch, model.smallest)
    check_whole("frames", frames, 1, LARGEST_FRAMES)
    latents = round((frames - 1) / model.stride)
    nearest = latents * model.stride + 1
    if frames != nearest:
        raise InputError(f"frames: got {frames}, expected a multiple of {model.stride} and one more; use {nearest}")
    return model.channels, latents + 1, int(height) // model.downscale, int(width) // model.downscale


def check_first(model: VideoModel) -> None:
    """Raise InputError if videos of `model` cannot begin with an image."""
    if model.fixed:
        raise InputError(
            f"first_image: got one for {model.name}, which generates videos from text alone, expected none; remove it, "
            f"or use {model.name.removesuffix('-4step')}"
        )


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
