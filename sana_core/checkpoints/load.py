"""Load a recognised checkpoint: build the library's module on the meta device, then fill it from the file."""

from __future__ import annotations

import copy
import inspect
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

from ..errors import CheckpointError, VersionError
from ..model.known_models import (
    CROSS_HEADS,
    DC_AE_SCALE,
    DEFAULT_RESOLUTION,
    DEFAULTS,
    VIDEO_HEAD_DIM,
    VIDEOS,
    TransformerConfig,
    released_shift,
)
from ..model.layers import arrange_convolutions
from ..model.reference import AUTO, DIFFUSERS, DIFFUSERS_VIDEO, NVIDIA, READINGS, set_reference
from ..model.text import TextEncoder
from ..runtime.checks import check_name
from ..runtime.text import Json, brief
from .checkpoint import SCALES, CheckpointInfo, Source
from .configs import (
    architecture,
    autoencoder_config,
    count,
    gemma_config,
    resolution_config,
    transformer_config,
    video_config,
)
from .detect import TOKENIZERS, follow, inspect_checkpoint
from .files import INCOMPLETE
from .headers import Reader, read_file, read_tensors
from .kinds import KINDS, TRANSFORMERS, VIDEO2
from .parts import find_part, find_transformer
from .schedulers import scheduler_file, scheduler_of
from .schemas import read_shift
from .tokenizer import load_tokenizer

if TYPE_CHECKING:
    from diffusers import AutoencoderDC, SanaControlNetModel, SanaTransformer2DModel, SanaVideoTransformer3DModel

SHOWN = 3
# Numbers of a tensor that are checked at once. Gemma 2's embedding has 590 million, which take 2.4 GB in float32.
COMPARED = 2**20
MOST_VIDEO_LAYERS = 64
VIDEO_KINDS = ("video_transformer", "video_autoencoder")
# Fields that this package adds to the library's configuration.
OWN_FIELDS = ("reference", "flow_shift", "latent_scale", "preview", "sampler")

# Held by the thread that constructs a module with empty parameters.
CONSTRUCTION = threading.Lock()


def build_module(info: CheckpointInfo, resolution: int | None = None) -> torch.nn.Module:
    """Return the library's module for `info`, with its parameters on the meta device.

    Buffers are real, except for a video VAE, whose buffers are on the meta device, too.

    A transformer or ControlNet follows the reference of `info`; `follow` chooses another. `resolution` in pixels
    overrides the resolution of `info`. Raises CheckpointError if neither the configuration nor the shapes determine the
    architecture, or if the library cannot build it. Raises VersionError as `check_libraries` does.
    """
    check_libraries(info)
    try:
        return construct(info, resolution)
    except (CheckpointError, OSError, MemoryError, torch.OutOfMemoryError):
        # The cause is a disk or the memory, not the file.
        raise
    except Exception as error:  # the libraries raise many kinds for sizes that do not fit each other
        reason = brief(str(error) or type(error).__name__, 100)
        raise CheckpointError(
            f"{info.name}: its config or its tensors' shapes build no {info.kind} ({reason}); use another file, or the "
            "model's own config.json"
        ) from error


def check_libraries(info: CheckpointInfo) -> None:
    """Raise VersionError under python -OO, and if diffusers or transformers cannot be imported or is too old."""
    if sys.flags.optimize > 1:
        raise VersionError("python: got -OO, which drops the docstrings that transformers reads at import; use -O")
    try:
        # Before `construct`, because diffusers turns any failed import into a RuntimeError.
        import diffusers
        from diffusers import AutoencoderDC, SanaControlNetModel, SanaTransformer2DModel  # noqa: F401
        from transformers import Gemma2Model  # noqa: F401
    except Exception as error:
        raise VersionError(
            f"requirements: diffusers or transformers cannot be imported ({brief(error.__cause__ or error, 120)}); pip "
            "install -r requirements.txt with the Python that runs this"
        ) from error
    if info.kind in VIDEO_KINDS and not hasattr(diffusers, class_name(info)):
        oldest = "0.37" if info.variant.startswith("ltx-2") else "0.36"
        raise VersionError(
            f"diffusers: got {diffusers.__version__}, expected {oldest} or newer for SANA-Video; "
            "pip install -U diffusers"
        )


def class_name(info: CheckpointInfo) -> str:
    """Return the name of diffusers' class for `info`, or of the class whose parts SANA-Video 2.0 has."""
    return "AutoencoderKLLTX2Video" if info.variant.startswith("ltx-2") else KINDS[info.kind].classes[0]


def library_class(info: CheckpointInfo) -> Any:
    """Return diffusers' class for `info`, or the class of this package for SANA-Video 2.0."""
    import diffusers

    if info.kind == "video_transformer" and VIDEO2 in info.headers:
        from ..video.transformer import SanaVideo2Transformer3DModel

        return SanaVideo2Transformer3DModel
    return getattr(diffusers, class_name(info))


def check_layers(info: CheckpointInfo, layers: int) -> None:
    """Raise CheckpointError unless the file of a video transformer has `layers` blocks, like its configuration.

    The limit bounds the time: building MOST_VIDEO_LAYERS blocks takes less than a second.
    """
    blocks = count(info.headers, r"transformer_blocks\.(\d+)\.")
    if not layers == blocks <= MOST_VIDEO_LAYERS:
        raise CheckpointError(
            f"{info.name}: got {blocks} blocks, expected {layers} as in its config and at most {MOST_VIDEO_LAYERS}; "
            "download both again"
        )


@contextmanager
def empty_parameters() -> Iterator[None]:
    """Let modules that this thread constructs have their parameters on the meta device, but real buffers.

    accelerate's init_empty_weights() also changes the modules of other threads, and the devices of a batch load in
    parallel.
    """
    thread = threading.get_ident()

    def register_empty(module: torch.nn.Module, name: str, parameter: torch.nn.Parameter | None) -> None:
        register(module, name, parameter)
        if parameter is not None and threading.get_ident() == thread:
            empty = parameter.to("meta")
            module._parameters[name] = torch.nn.Parameter(empty, requires_grad=parameter.requires_grad)

    with CONSTRUCTION:
        register = torch.nn.Module.register_parameter
        torch.nn.Module.register_parameter = register_empty  # type: ignore[assignment, method-assign]
        try:
            yield
        finally:
            torch.nn.Module.register_parameter = register  # type: ignore[method-assign]


def construct(info: CheckpointInfo, resolution: int | None) -> torch.nn.Module:
    """Build a module. Raises CheckpointError for an unknown width, and the errors of the libraries."""
    from transformers import Gemma2Config, Gemma2Model

    config = library_config(info)
    if info.kind != "text_encoder":
        library = library_class(info)
        config["_class_name"] = library.__name__
    if resolution is not None and info.kind in ("transformer", "controlnet"):
        config.update(resolution_config(resolution))
    if info.kind == "video_transformer":
        config["patch_size"] = tuple(config.get("patch_size", (1, 1, 1)))
        check_layers(info, config.get("num_layers", VIDEOS[info.variant].layers))
    if info.kind in VIDEO_KINDS:
        with torch.device("meta"):
            module = library.from_config(config)
        # Check the shapes before memory is allocated: `init_empty_weights` makes real parameters, one at a time.
        if not info.quantised:
            shapes = {name: header.shape for name, header in info.headers.items()}
            check_shapes(info.name, module.state_dict(), shapes)
        if info.kind == "video_autoencoder":
            return module
        if module.config.out_channels not in (None, module.config.in_channels):
            raise CheckpointError(
                f"{info.name}: got {module.config.out_channels} out_channels, expected {module.config.in_channels} as "
                "in_channels; use a released model"
            )
    with empty_parameters():
        if info.kind == "text_encoder":
            # Other implementations omit the cap of the attention's logits. Older versions of transformers choose them.
            return Gemma2Model(Gemma2Config(**{**config, "attn_implementation": "eager"}))
        module = library.from_config(config)
        if info.kind == "controlnet" and info.reference == NVIDIA:
            module.base_block = copy.deepcopy(module.transformer_blocks[0])
    if info.kind != "autoencoder":
        set_reference(module, info.reference)
    if (sampler := usual_sampler(info)) is not None:
        module.register_to_config(sampler=sampler)
    return module


def usual_sampler(info: CheckpointInfo) -> str | None:
    """Return the sampler of the transformer `info` if it is not SANA's usual one: the scheduler of the folder of an
    image model, or the sampler that a preview of SANA-Video was distilled for."""
    if info.kind == "transformer":
        sampler = scheduler_of(info).sampler
    elif info.kind == "video_transformer":
        sampler = VIDEOS[info.variant].defaults.sampler
    else:
        return None
    return None if sampler == DEFAULTS.sampler else sampler


def library_config(info: CheckpointInfo) -> Json:
    """Return the arguments of the library's class, from the configuration or from the tensors' shapes.

    Raises CheckpointError for an unknown width.
    """
    config = shapes_config(info) if info.config is None else info.config
    # diffusers looks up the class that _class_name names, so it never gets the file's value.
    return {key: value for key, value in config.items() if key not in OWN_FIELDS and not key.startswith("_")}


def shapes_config(info: CheckpointInfo) -> Json:
    """Derive the configuration from the tensors' shapes. Raises CheckpointError for an unknown width."""
    if info.kind == "text_encoder":
        return gemma_config(info.headers)
    if info.kind == "autoencoder":
        return autoencoder_config(info.headers)
    if info.kind == "video_transformer":
        width = info.headers["patch_embedding.weight"].shape[0]
        known = width % VIDEO_HEAD_DIM == 0 or VIDEO2 in info.headers
        expected = f"a multiple of {VIDEO_HEAD_DIM}"
    else:
        width = architecture(info.headers).width
        known, expected = width in CROSS_HEADS, " or ".join(map(str, CROSS_HEADS))
    if not known:
        raise CheckpointError(
            f"{info.name}: got width {width}, expected {expected}, for weights do not tell the number of attention "
            "heads; put the model's config.json beside the file"
        )
    if info.kind == "video_transformer":
        return video_config(info.headers)
    config = transformer_config(info.headers, info.resolution or DEFAULT_RESOLUTION)
    # Arguments that diffusers' ControlNet does not have.
    unknown = ("guidance_embeds", "qk_norm") if info.kind == "controlnet" else ()
    return {key: value for key, value in config.items() if key not in unknown}


def shift_of(info: CheckpointInfo, resolution: int | None = None, reference: str = AUTO) -> float:
    """Return the shift of the schedule for the transformer in `info`, a checkpoint or its transformer.

    The order is: `resolution` (pixels) if given; the released model's shift, if `reference` changes it; the folder's
    scheduler or the saved MODEL; the released model's shift.
    """
    part = find_transformer(info)
    pixels = resolution or part.resolution or DEFAULT_RESOLUTION
    own = released_shift(part.variant, pixels, part.reference)
    released = own if reference == AUTO else released_shift(part.variant, pixels, reference)
    if resolution is not None or released != own:
        return released
    file = scheduler_file(part)
    stated = recorded(part, "flow_shift") if file is None else read_shift(file)
    return released if stated is None else float(stated)


def text_reference(info: CheckpointInfo, reference: str = AUTO) -> str:
    """Return the reference for reading prompts.

    It is `reference`, or with "auto" the transformer's, or the text encoder's own, or NVIDIA's. Raises InputError for
    an unknown name.
    """
    check_name("reference", reference, READINGS)
    own = (info.reference or NVIDIA) if reference == AUTO else reference
    makes_videos = any(part.kind == "video_transformer" for part in info.parts)
    return DIFFUSERS_VIDEO if makes_videos and own == DIFFUSERS else own


def latent_scale(info: CheckpointInfo) -> float:
    """Return the scaling factor of the latents. Without a VAE in `info`, use the factor of DC-AE f32c32."""
    parts = [part for part in info.parts or (info,) if part.kind == "autoencoder" and part.config is not None]
    if not parts or not parts[0].config:
        return recorded(info, "latent_scale") or DC_AE_SCALE
    # The default of AutoencoderDC is 1.
    return parts[0].config.get("scaling_factor", 1.0)


def config_of(info: CheckpointInfo) -> TransformerConfig:
    """Return the configuration of the transformer `info` with the library's defaults, without building the module.

    Raises CheckpointError for an unknown width, and VersionError as `check_libraries` does.
    """
    check_libraries(info)
    parameters = inspect.signature(library_class(info).__init__).parameters.values()
    defaults: Json = {parameter.name: parameter.default for parameter in parameters}
    if (sampler := usual_sampler(info)) is not None:
        defaults["sampler"] = sampler
    config: Any = SimpleNamespace(**defaults | library_config(info))
    return config


def recorded(info: CheckpointInfo, field: str) -> Any:
    """Return a field that this package wrote into the configuration of a saved MODEL, or None."""
    part = next((part for part in info.parts or (info,) if part.kind in TRANSFORMERS), None)
    return part.config.get(field) if part and part.config else None


def component_tensors(info: CheckpointInfo, read: Reader = read_file) -> dict[str, torch.Tensor]:
    """Return the tensors of `info` by the module's parameter names. Fused tensors are split into their parts."""
    wanted = {target: origin for target, origin in info.origins.items() if target not in TOKENIZERS}
    stored = read_tensors(info.weights, dict.fromkeys(origin.name for origin in wanted.values()), read)
    return {
        target: stored[name].chunk(parts)[part] if parts > 1 else stored[name]
        for target, (name, part, parts) in wanted.items()
    }


def check_shapes(name: str, expected: Mapping[str, torch.Tensor], shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raise CheckpointError for missing, unexpected and misshapen tensors. `name` is the file's name."""
    check_names(name, "no", expected.keys() - shapes.keys())
    check_names(name, "unexpected", {key for key in shapes.keys() - expected.keys() if not key.endswith(SCALES)})
    for key, tensor in expected.items():
        # 1x1 convolutions of the original layout are linear layers in diffusers'.
        if [side for side in shapes[key] if side != 1] != [side for side in tensor.shape if side != 1]:
            raise CheckpointError(
                f"{name}: {key} is {list(shapes[key])}, expected {list(tensor.shape)}; "
                "the file is of another model, or its config.json is: download both again"
            )


def fill(
    module: torch.nn.Module,
    tensors: MutableMapping[str, torch.Tensor],
    name: str,
    dtype_of: Callable[[str], torch.dtype | None],
) -> None:
    """Replace the meta tensors of `module` by `tensors`. These are parameters, and buffers that files contain.

    `dtype_of` returns the dtype for a name, or None to keep the dtype of the tensor. `tensors` is empty afterwards,
    because each tensor is dropped as soon as it is converted. A tensor that needs no conversion shares its memory.

    Raises CheckpointError for missing, unexpected, misshapen and non-finite tensors. `name` is the file's name.
    """
    parameters = dict(module.named_parameters())
    expected = {key: tensor for key, tensor in module.state_dict(keep_vars=True).items() if tensor.is_meta}
    check_shapes(name, expected, {key: tuple(tensor.shape) for key, tensor in tensors.items()})
    modules = dict(module.named_modules())
    for key in expected:
        tensor = tensors.pop(key).reshape(expected[key].shape)
        check_finite(name, key, tensor)
        owner, _, leaf = key.rpartition(".")
        value = tensor.to(dtype_of(key) or tensor.dtype)
        del tensor
        if key in parameters:
            modules[owner].register_parameter(leaf, torch.nn.Parameter(value, requires_grad=False))
        else:
            modules[owner].register_buffer(leaf, value)
    module.train(False)


def check_names(name: str, fault: str, keys: set[str]) -> None:
    if keys:
        shown = ", ".join(brief(key, 90) for key in sorted(keys)[:SHOWN])
        more = f" and {len(keys) - SHOWN} more" if len(keys) > SHOWN else ""
        raise CheckpointError(f"{name}: {fault} {shown}{more}; {INCOMPLETE}")


def check_finite(name: str, key: str, tensor: torch.Tensor) -> None:
    """Raise CheckpointError for NaN and infinity. Each of them makes a sum non-finite."""
    if not tensor.is_floating_point() or tensor.dtype.itemsize == 1:
        return
    # Parts, because torch sums in float32 on a float32 copy of the whole tensor.
    parts = tensor.flatten().split(COMPARED)
    if not all(torch.isfinite(part.sum(dtype=torch.float32)) for part in parts):
        bad = tensor.numel() - int(torch.isfinite(tensor).sum())
        if bad:
            raise CheckpointError(
                f"{name}: {bad} of {tensor.numel()} values in {key} are NaN or infinite; use another file"
            )


def load_part(
    info: CheckpointInfo, dtype: torch.dtype, read: Reader = read_file, resolution: int | None = None
) -> torch.nn.Module:
    """Return the library's module of `info` in `dtype`. `read` reads the tensors from the file.

    `resolution` (pixels) overrides the resolution of `info`. Raises CheckpointError for quantised weights, for an
    unknown architecture, and for missing, unexpected, misshapen and non-finite tensors.
    """
    if info.quantised:
        raise CheckpointError(
            f"{info.name}: got quantised weights, which only ComfyUI reads, and not for a VAE; use the plain file"
        )
    module = build_module(info, resolution)
    fill(module, component_tensors(info, read), info.name, lambda key: dtype)
    return module


def load_transformer(
    path: Source,
    device: str | torch.device = "cpu",
    dtype: torch.dtype = torch.float32,
    resolution: int | None = None,
    reference: str = AUTO,
) -> SanaTransformer2DModel:
    """Return SANA's transformer from any layout that `inspect_checkpoint` recognises, in evaluation mode.

    `resolution` (pixels) overrides the checkpoint's resolution for the position embedding. `reference`: the codebase to
    follow where they differ, "nvidia" or "diffusers"; "auto" follows the file. On the device "meta" the parameters have
    no values, and none are read. Raises CheckpointError, MissingFileError or ReadError, with the file's name, if the
    file is not a complete SANA transformer.
    """
    info = follow(find_part(inspect_checkpoint(path), "transformer"), reference)
    if torch.device(device).type == "meta":
        module = build_module(info, resolution).requires_grad_(False).train(False)
        for parameter in module.parameters():
            parameter.data = parameter.data.to(dtype)
        return module  # type: ignore[return-value]
    return load_part(info, dtype, resolution=resolution).to(device)  # type: ignore[return-value]


def load_video_transformer(
    path: Source, device: str | torch.device = "cpu", dtype: torch.dtype = torch.float32, reference: str = AUTO
) -> SanaVideoTransformer3DModel:
    """Return SANA-Video's transformer in evaluation mode, from diffusers' or NVIDIA's layout.

    `reference`: see `load_transformer`. Raises CheckpointError, MissingFileError or ReadError, with the file's name, if
    the file is not a complete SANA-Video transformer, and VersionError if diffusers does not have its class yet.
    """
    info = follow(find_part(inspect_checkpoint(path), "video_transformer"), reference)
    return load_part(info, dtype).to(device)  # type: ignore[return-value]


def load_controlnet(
    path: Source,
    device: str | torch.device = "cpu",
    dtype: torch.dtype = torch.float32,
    reference: str = AUTO,
) -> SanaControlNetModel:
    """Return a SANA ControlNet in evaluation mode, from diffusers' or NVIDIA's layout.

    `reference`: see `load_transformer`. With "nvidia" the module has the base model's first block as `base_block`.
    Raises CheckpointError or MissingFileError, with the file's name, if the file is not a complete SANA ControlNet, or
    if `reference` is "nvidia" and the file does not have this block.
    """
    info = follow(find_part(inspect_checkpoint(path), "controlnet"), reference)
    return load_part(info, dtype).to(device)  # type: ignore[return-value]


def load_autoencoder(
    path: Source, device: str | torch.device = "cpu", dtype: torch.dtype = torch.float32
) -> AutoencoderDC:
    """Return SANA's DC-AE from any layout that `inspect_checkpoint` recognises, in evaluation mode.

    Raises CheckpointError, MissingFileError or ReadError, with the file's name, if the file is not a complete SANA
    DC-AE.
    """
    autoencoder = load_part(find_part(inspect_checkpoint(path), "autoencoder"), dtype).to(device)
    arrange_convolutions(autoencoder)
    return autoencoder  # type: ignore[return-value]


def load_text_encoder(
    path: Source, device: str | torch.device = "cpu", dtype: torch.dtype = torch.float32, reference: str = AUTO
) -> TextEncoder:
    """Return tokenizer and Gemma 2 from any layout that `inspect_checkpoint` recognises, in evaluation mode.

    `reference`: how to read prompts, see `text_reference`. Raises CheckpointError, MissingFileError or ReadError, with
    the file's name, if the file is not a complete Gemma 2 or the tokenizer is missing.
    """
    info = inspect_checkpoint(path)
    part = find_part(info, "text_encoder")
    tokenizer = load_tokenizer(part)
    model: Any = load_part(part, dtype).to(device)
    return TextEncoder(tokenizer, model, text_reference(info, reference))
