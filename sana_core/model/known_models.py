"""The released models: every fact about them that a file does not say, which all other modules read here."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import log
from typing import TYPE_CHECKING, NamedTuple, Protocol

from ..errors import InputError
from .latents import DOWNSCALE
from .reference import NVIDIA

if TYPE_CHECKING:
    from diffusers import SanaTransformer2DModel


class Architecture(NamedTuple):
    """What differs between SANA's transformers: inner width, blocks, and the later additions."""

    width: int
    layers: int
    qk_norm: bool = False
    guidance_embeds: bool = False
    edits: bool = False  # VIBE: its input has the latents of an image beside the noisy ones.


HEAD_DIM = 32
VIDEO_HEAD_DIM = 112
# {inner width: heads of the cross-attention}
CROSS_HEADS = {1152: 16, 2240: 20}
# {number of blocks: block whose attention NVIDIA perturbs} (pag_applied_layers in configs/sana_app_config, and its
# default in diffusion/utils/config.py for SANA-1.5 4.8B).
PERTURBED_BLOCKS = {20: 8, 28: 14, 60: 8}

# From this many times more or fewer pixels than in training, images fall apart.
FAR = 2.5
# Sides in pixels of the square images in training. DEFAULT_RESOLUTION is assumed if a file does not show its size.
RESOLUTIONS = (512, 1024, 2048, 4096)
DEFAULT_RESOLUTION = 1024
# Models of this side and larger have a position embedding. It has interpolation scale 1 at this side.
POSITIONED = 2048
# SANA-Sprint's angles of TrigFlow: pi / 2 rounded up, which is pure noise, and the angle of the second of two steps.
MAX_TIMESTEP = 1.57080
INTERMEDIATE_TIMESTEP = 1.3


class Defaults(NamedTuple):
    """The authors' settings for sampling a model, except the shift. `sampler` is a name in SAMPLERS."""

    sampler: str
    steps: int
    guidance: float


# SANA's demo and diffusers' pipelines have this guidance.
GUIDANCE = 4.5
# SANA-Sprint was distilled for this sampler.
SPRINT = "scm"
# the sampler of SANA-Video 2.0's preview in 4 steps, which was distilled for it (diffusion/scheduler of NVlabs/Sana)
DMD = "flow_dmd"
DEFAULTS, SPRINT_DEFAULTS = Defaults("flow_dpmpp_2m", 20, GUIDANCE), Defaults(SPRINT, 2, GUIDANCE)
SPRINTED = SPRINT_DEFAULTS, ("sampler",)
# NVIDIA's script samples videos that begin with an image by LTXFlowEuler. The SanaImageToVideoPipeline of diffusers
# expects FlowMatchEulerDiscreteScheduler.
IMAGE_TO_VIDEO_SAMPLER = "flow_euler"
# The negative prompt of inference_video_scripts/inference_sana_video.py in NVlabs/Sana.
VIDEO_NEGATIVE = (
    "A chaotic sequence with misshapen, deformed limbs in heavy motion blur, sudden disappearance, jump cuts, jerky "
    "movements, rapid shot changes, frames out of sync, inconsistent character shapes, temporal artifacts, jitter, and "
    "ghosting effects, creating a disorienting visual experience."
)


@dataclass(frozen=True)
class Model:
    """The record of a released model. The settings in a folder or in a saved MODEL override it field by field."""

    name: str  # Commands and plans have this name.
    title: str  # Lines under loaders and errors have this name.
    defaults: Defaults
    # The fields of `defaults` that the model was distilled for. Other values of them are refused.
    fixed: tuple[str, ...]


@dataclass(frozen=True)
class ImageModel(Model):
    """A SANA model of images."""

    architecture: Architecture
    released_name: str  # How NVIDIA's names of its files and folders begin.
    # The shift of the schedule, and (pixels of a side, shift) where it differs, in all code or in NVIDIA's alone.
    shift: float = 3.0
    shifts: tuple[tuple[int, float], ...] = ((4096, 6.0),)
    nvidia_shifts: tuple[tuple[int, float], ...] = ()
    image_guidance: float = 1.0  # Only models that edit images have another value.


@dataclass(frozen=True, kw_only=True)
class VideoModel(Model):
    """A SANA-Video model."""

    channels: int  # channels of the latents
    downscale: int  # pixels of a latent cell's side
    stride: int  # frames per latent frame, but the first latent frame has one frame
    patch: int  # latent cells of a patch's side
    smallest: int  # pixels of the shortest side that the VAE decodes
    size: tuple[int, int]  # default width and height
    shapes: tuple[tuple[int, int], ...]  # widths and heights of its training
    parameters: int
    vae_parameters: int
    decode_bytes: int  # ComfyUI's decode: bytes per pixel and byte of the dtype
    vae: str  # variant of the VAE's file
    width: int = 2240  # of the hidden states
    hidden: int = 6720  # of the feed-forward
    layers: int = 20
    frames: int = 81
    rate: int = 16  # frames a second
    shift: float = 8.0  # of the schedule
    # The score at the end of each prompt, which NVIDIA's script appends, and the script's negative prompt.
    motion_score: int = 10
    negative: str = VIDEO_NEGATIVE
    is_video2: bool = False  # SANA-Video 2.0, with the layers of sana_core/video/transformer.py
    # Another model has these tensors too. A configuration tells which of them a file is, or else a name.
    has_twin: bool = False


# VIBE edits images by instructions (ai-forever/VIBE, vibe/editor.py). It is SANA-1.5 with another text encoder.
VIBE = ImageModel(
    "vibe-1.6B", "VIBE 1.6B", DEFAULTS, (), Architecture(2240, 20, True, False, True), "VIBE", image_guidance=1.2
)
RECORDS = (
    # NVIDIA's shift: configs/sana_app_config/Sana_600M_app.yaml and configs/sana_config/1024ms/Sana_600M_img1024.yaml.
    ImageModel("0.6B", "SANA 0.6B", DEFAULTS, (), Architecture(1152, 28), "Sana_600M_", nvidia_shifts=((1024, 4.0),)),
    ImageModel("1.6B", "SANA 1.6B", DEFAULTS, (), Architecture(2240, 20), "Sana_1600M_"),
    ImageModel("1.5-1.6B", "SANA-1.5 1.6B", DEFAULTS, (), Architecture(2240, 20, True), "SANA1.5_1.6B_"),
    ImageModel("1.5-4.8B", "SANA-1.5 4.8B", DEFAULTS, (), Architecture(2240, 60, True), "SANA1.5_4.8B_"),
    ImageModel("sprint-0.6B", "SANA-Sprint 0.6B", *SPRINTED, Architecture(1152, 28, True, True), "Sana_Sprint_0.6B_"),
    ImageModel("sprint-1.6B", "SANA-Sprint 1.6B", *SPRINTED, Architecture(2240, 20, True, True), "Sana_Sprint_1.6B_"),
    VIBE,
)
IMAGES = {model.name: model for model in RECORDS}
VARIANTS = {name: model.architecture for name, model in IMAGES.items()}
# The shapes of 480p and 720p are ASPECT_RATIO_VIDEO_480_MS and _720_MS in diffusion/data/datasets/utils.py of
# NVlabs/Sana, their latents those of Wan 2.1 and LTX-2.
VIDEO_480 = VideoModel(
    "video-2B-480p",
    "SANA-Video 2B 480p",
    Defaults("flow_dpmpp_2m", 50, 6.0),
    (),
    channels=16,
    downscale=8,
    stride=4,
    patch=2,
    smallest=32,
    size=(832, 480),
    shapes=((896, 448), (832, 480), (768, 528), (720, 560), (672, 592), (624, 624))
    + ((592, 672), (560, 720), (528, 768), (496, 816), (480, 832), (448, 896)),
    parameters=2_056_862_144,
    vae_parameters=126_892_531,
    decode_bytes=3627,
    vae="wan-2.1",
    has_twin=True,  # LongSANA, which is refused
)
VIDEO_720 = replace(
    VIDEO_480,
    name="video-2B-720p",
    title="SANA-Video 2B 720p",
    channels=128,
    downscale=32,
    stride=8,
    patch=1,
    # The decoder of LTX-2 reflects one cell at each edge, so it needs two.
    smallest=64,
    size=(1280, 704),
    shapes=((1344, 672), (1280, 704), (1152, 800), (1088, 832), (960, 960), (896, 1024), (832, 1088), (800, 1152))
    + ((736, 1248), (704, 1280), (672, 1344)),
    parameters=2_057_148_928,
    vae_parameters=1_222_479_601,
    decode_bytes=1556,
    vae="ltx-2",
    has_twin=False,
)
# SANA-Video 2.0 was released for one size (docs/sana_video2.md of NVlabs/Sana).
VIDEO_5B = replace(
    VIDEO_720,
    name="video-2.0-5B",
    title="SANA-Video 2.0 5B 720p",
    defaults=Defaults("flow_dpmpp_2m", 50, 8.0),
    smallest=32,
    vae_parameters=726_105_969,
    vae="ltx-2.3",
    size=(1280, 736),
    shapes=((1280, 736), (736, 1280)),
    parameters=4_466_980_960,
    width=2560,
    hidden=10240,
    layers=32,
    frames=193,
    rate=24,
    shift=12.0,
    motion_score=20,
    is_video2=True,
    has_twin=True,
)
# The shift of the preview gives the four sigmas of its training, FastVideoDMD4Step in diffusion/scheduler. That class
# raises an error for other numbers of steps and for guidance.
VIDEO_5B_PREVIEW = replace(
    VIDEO_5B,
    name="video-2.0-5B-4step",
    title="4-step preview of SANA-Video 2.0",
    defaults=Defaults(DMD, 4, 1.0),
    fixed=("sampler", "steps", "guidance"),
    frames=81,
    rate=16,
    shift=6.0,
)
VIDEOS = {model.name: model for model in (VIDEO_480, VIDEO_720, VIDEO_5B, VIDEO_5B_PREVIEW)}
LARGEST_FRAMES = 1025

# Memory of usual GPUs in GiB. A GPU that is sold as 8 GB has 8 GiB, which are 8.6 GB of 10^9 bytes.
GPU_SIZES = (4, 6, 8, 12, 16, 24)

# the demo model: its folder in demo/, and its name in ComfyUI's lists
DEMO_MODEL = "sana-posters"
DEMO_MODEL_LISTED = f"{DEMO_MODEL} (bundled)"


class Decoder(NamedTuple):
    """A DC-AE's decoder, the finest stage first: `local` stages are without attention, `scales` are the attention's.

    `shuffles` where upsampling convolves first and shuffles channels to pixels.
    """

    widths: tuple[int, ...]
    layers: tuple[int, ...]
    local: int
    scales: int
    shuffles: bool
    parameters: int


WIDTHS = (128, 256, 512, 512, 1024, 1024)
DECODERS = {
    "dc-ae-f32c32": Decoder(WIDTHS, (3, 3, 3, 3, 3, 3), 3, 2, False, 159_223_171),
    "dc-ae-lite-f32c32": Decoder(WIDTHS, (0, 3, 5, 4, 4, 4), 6, 1, True, 268_154_124),
}
ENCODER_PARAMETERS = 153_027_104  # Both decoders have the same encoder.
DC_AE_SCALE = 0.41407  # what latents are multiplied by

GEMMA_WIDTHS = {2304: "gemma-2-2b", 3584: "gemma-2-9b", 4608: "gemma-2-27b"}
GEMMA_HEAD_DIM = 256  # The same in 2B and 9B.
# gemma-2-2b, without the layer that predicts tokens.
TEXT_WIDTH, TEXT_HIDDEN, TEXT_PARAMETERS = 2304, 9216, 2_614_341_888
MAX_TOKENS = 300  # Tokens of a prompt.
# Qwen3-VL-2B, without the layer that predicts tokens, and VIBE's edit head.
INSTRUCTION_PARAMETERS = 2_127_532_032 + 277_954_816

# height / width to (width, height) at 1024 pixels, 40 shapes of about one area; the other resolutions are multiples
# (SANA's training buckets, diffusion/data/datasets/utils.py)
SHAPES = {
    "0.25": (2048, 512),
    "0.26": (1984, 512),
    "0.27": (1920, 512),
    "0.28": (1856, 512),
    "0.32": (1792, 576),
    "0.33": (1728, 576),
    "0.35": (1664, 576),
    "0.4": (1600, 640),
    "0.42": (1536, 640),
    "0.48": (1472, 704),
    "0.5": (1408, 704),
    "0.52": (1344, 704),
    "0.57": (1344, 768),
    "0.6": (1280, 768),
    "0.68": (1216, 832),
    "0.72": (1152, 832),
    "0.78": (1152, 896),
    "0.82": (1088, 896),
    "0.88": (1088, 960),
    "0.94": (1024, 960),
    "1.0": (1024, 1024),
    "1.07": (960, 1024),
    "1.13": (960, 1088),
    "1.21": (896, 1088),
    "1.29": (896, 1152),
    "1.38": (832, 1152),
    "1.46": (832, 1216),
    "1.67": (768, 1280),
    "1.75": (768, 1344),
    "2.0": (704, 1408),
    "2.09": (704, 1472),
    "2.4": (640, 1536),
    "2.5": (640, 1600),
    "2.89": (576, 1664),
    "3.0": (576, 1728),
    "3.11": (576, 1792),
    "3.62": (512, 1856),
    "3.75": (512, 1920),
    "3.88": (512, 1984),
    "4.0": (512, 2048),
}
# Names that people know, width : height, and the nearest key of SHAPES.
RATIOS = {
    "1:1": "1.0",
    "4:3": "0.78",
    "3:2": "0.68",
    "16:9": "0.57",
    "2:1": "0.5",
    "21:9": "0.42",
    "3:1": "0.33",
    "4:1": "0.25",
    "3:4": "1.29",
    "2:3": "1.46",
    "9:16": "1.75",
    "1:2": "2.0",
    "9:21": "2.4",
    "1:3": "3.0",
    "1:4": "4.0",
}
# (largest area of an image in pixels, resolution at which it is edited); larger images are edited at LARGEST_EDIT.
EDIT_AREAS = ((2 * 512**2 + 256**2, 512), (2 * 1024**2 + 512**2, 1024))
LARGEST_EDIT = 2048
SIZES = tuple(map(str, RESOLUTIONS))
# The choice of the model's own size, listed before SIZES.
AUTO_SIZE = "auto"
# Workflows of ComfyUI_ExtraModels contain these names.
OTHER_SIZES = {f"{size}px": size for size in SIZES} | {"2K": "2048", "4K": "4096", "2Kpx": "2048", "4Kpx": "4096"}
OTHER_RATIOS = {f"{float(ratio):.2f}": ratio for ratio in SHAPES}


def variant_name(arch: Architecture) -> str:
    """Return the name in VARIANTS, or a name that describes the difference."""
    names = [model.name for model in IMAGES.values() if model.architecture == arch]
    return names[0] if names else f"custom-{arch.width}x{arch.layers}"


def released_variant(name: str) -> str | None:
    """Return the variant of the released model with this name of a file or folder. None: another name, or VIBE, which
    training does not run."""
    models = [model for model in IMAGES.values() if not model.architecture.edits]
    return next((model.name for model in models if name.startswith(model.released_name)), None)


def controlnet_name(arch: Architecture) -> str:
    """Return the name of a ControlNet by the first model of its width."""
    names = (name for name, architecture in VARIANTS.items() if architecture.width == arch.width)
    return f"{next(names, 'custom')}-controlnet"


def released_shift(model: ImageModel | VideoModel, resolution: int, reference: str) -> float:
    """Return the shift of the schedule that `model` was released with, for `resolution` pixels."""
    if isinstance(model, VideoModel):
        return model.shift
    shifts = model.shifts + (model.nvidia_shifts if reference == NVIDIA else ())
    return dict(shifts).get(resolution, model.shift)


class TransformerConfig(Protocol):
    """What this package reads of the configuration of diffusers' transformers, SANA's above all."""

    in_channels: int
    out_channels: int | None
    num_layers: int
    num_attention_heads: int
    attention_head_dim: int
    caption_channels: int
    patch_size: int  # SANA-Video has three: frames, rows and columns.
    qk_norm: str | None
    guidance_embeds: bool
    guidance_embeds_scale: float


def is_video(config: TransformerConfig) -> bool:
    """Whether a transformer with `config` is SANA-Video's, whose patches and latents have frames."""
    return not isinstance(config.patch_size, int)


def image_model(arch: Architecture) -> ImageModel:
    """Return the record of a transformer with `arch`. For other shapes, it is like a released one of its kind."""
    name = variant_name(arch)
    family = VIBE if arch.edits else IMAGES["sprint-1.6B" if arch.guidance_embeds else "1.6B"]
    return IMAGES.get(name) or replace(family, name=name, title=family.title.rpartition(" ")[0], architecture=arch)


def edits_images(config: TransformerConfig) -> bool:
    """Whether a transformer with `config` is VIBE's, whose input has the latents of an image beside the noisy ones."""
    return config.in_channels == 2 * (config.out_channels or config.in_channels)


def video_models(channels: int, width: int, layers: int, is_video2: bool) -> list[VideoModel]:
    """Return the records of SANA-Video with these shapes, or else all records with at least this width and depth.

    A file that is larger than the released models is of one that this package does not know, so the list is empty.
    """
    models = [model for model in VIDEOS.values() if (model.channels, model.is_video2) == (channels, is_video2)]
    exact = [model for model in models if (model.width, model.layers) == (width, layers)]
    return exact or [model for model in models if model.width >= width and model.layers >= layers]


def video_model(config: TransformerConfig) -> VideoModel:
    """Return the record of the SANA-Video with `config`. Only SANA-Video 2.0 has groups of layers."""
    width = config.num_attention_heads * config.attention_head_dim
    models = video_models(config.in_channels, width, config.num_layers, hasattr(config, "group_layers"))
    return pick_twin(models, getattr(config, "sampler", None))


def pick_twin(models: Sequence[VideoModel], sampler: str | None) -> VideoModel:
    """Return the one of `models` that was distilled for `sampler`, or the first one that was not distilled."""
    fitting = [model for model in models if model.fixed and model.defaults.sampler == sampler]
    return (fitting or [model for model in models if not model.fixed])[0]


def model_of(config: TransformerConfig) -> ImageModel | VideoModel:
    """Return the record of the transformer with `config`."""
    if is_video(config):
        return video_model(config)
    width = config.num_attention_heads * config.attention_head_dim
    edits = edits_images(config)
    return image_model(Architecture(width, config.num_layers, bool(config.qk_norm), config.guidance_embeds, edits))


def build_transformer(model: Architecture, pixels: int | None = None) -> SanaTransformer2DModel:
    """Return a transformer with random weights that was trained on images of `pixels`. None: less than POSITIONED."""
    from diffusers import SanaTransformer2DModel

    heads = CROSS_HEADS.get(model.width, model.width // HEAD_DIM)
    large = {}
    if pixels is not None and pixels >= POSITIONED:
        large = {"interpolation_scale": pixels / POSITIONED, "sample_size": pixels // DOWNSCALE}
    return SanaTransformer2DModel(
        num_attention_heads=model.width // HEAD_DIM,
        num_layers=model.layers,
        num_cross_attention_heads=heads,
        cross_attention_head_dim=model.width // heads,
        cross_attention_dim=model.width,
        qk_norm="rms_norm_across_heads" if model.qk_norm else None,
        guidance_embeds=model.guidance_embeds,
        **large,
    )


def perturbed_block(layers: int) -> int:
    """Return the block whose self-attention PAG perturbs in a model of `layers` blocks."""
    return PERTURBED_BLOCKS.get(layers, round(0.4 * layers))


def model_defaults(config: TransformerConfig, begins_with_image: bool = False) -> Defaults:
    """Return the defaults of the transformer with `config`. Only videos can begin with an image.

    `config.sampler` is set where a folder's scheduler is another one than the model's usual one.
    """
    model = model_of(config)
    if model.fixed:
        return model.defaults
    sampler = getattr(config, "sampler", model.defaults.sampler)
    if begins_with_image and sampler == model.defaults.sampler:
        sampler = IMAGE_TO_VIDEO_SAMPLER
    return model.defaults._replace(sampler=sampler)


def read_size(size: object) -> int:
    """Return the resolution that `size` names."""
    name = OTHER_SIZES.get(size, size) if isinstance(size, str) else None
    if name not in SIZES:
        raise InputError(f"size: got {size!r:.40}, expected one of {', '.join(SIZES)}")
    return int(name)


def image_size(resolution: int, ratio: object) -> tuple[int, int]:
    """Return (width, height) of the trained shape `ratio`, a key of RATIOS or of SHAPES, at `resolution` pixels."""
    key = RATIOS.get(ratio) or OTHER_RATIOS.get(ratio, ratio) if isinstance(ratio, str) else None
    if key not in SHAPES:
        raise InputError(f"ratio: got {ratio!r:.40}, expected one of {', '.join(RATIOS)}")
    return scale_shape(SHAPES[key], resolution)


def scale_shape(shape: tuple[int, int], resolution: int) -> tuple[int, int]:
    """Return `shape`, (width, height) at 1024 pixels, at `resolution` pixels, in whole latent cells."""
    # A model of 128 pixels has shapes that are no multiples of a cell.
    cells = [max(1, round(side * resolution / DEFAULT_RESOLUTION / DOWNSCALE)) for side in shape]
    return cells[0] * DOWNSCALE, cells[1] * DOWNSCALE


def trained_size(width: int, height: int, resolution: int) -> tuple[int, int]:
    """Return the (width, height) with the aspect ratio of `width` x `height` that a model of `resolution` pixels was
    trained for."""
    return scale_shape(nearest_shape(width, height, SHAPES.values()), resolution)


def edit_size(width: int, height: int) -> tuple[int, int]:
    """Return the (width, height) at which VIBE edits an image of `width` x `height` pixels."""
    resolution = next((side for area, side in EDIT_AREAS if width * height <= area), LARGEST_EDIT)
    shape = min(SHAPES, key=lambda ratio: abs(float(ratio) - height / width))
    return scale_shape(SHAPES[shape], resolution)


def nearest_shape(width: int, height: int, shapes: Iterable[tuple[int, int]]) -> tuple[int, int]:
    """Return the (width, height) in `shapes` whose aspect ratio is nearest to `width` / `height`."""
    ratio = log(width / height)
    return min(shapes, key=lambda shape: abs(log(shape[0] / shape[1]) - ratio))


def size_note(width: int, height: int, trained: tuple[int, int]) -> str:
    """Return a warning if an image has far more or fewer pixels than the `trained` (width, height), else ""."""
    if 1 / FAR < width * height / (trained[0] * trained[1]) < FAR:
        return ""
    return f"{width} x {height} is far from this model's training size; use {trained[0]} x {trained[1]}"
