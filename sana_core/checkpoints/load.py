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
    VIDEO_LAYERS,
    TransformerConfig,
    released_shift,
)
from ..model.layers import arrange_convolutions
from ..model.reference import AUTO, DIFFUSERS, DIFFUSERS_VIDEO, NVIDIA, READINGS, set_reference
from ..model.text import TextEncoder
from ..runtime.checks import check_name
from ..runtime.text import Json, brief
from .checkpoint import SCALES, Checkpoint, Source
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
from .kinds import CHECKPOINT_KINDS, TRANSFORMER_KINDS
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


def build_module(part: Checkpoint, resolution: int | None = None) -> torch.nn.Module:
    """Return the library's module for `part`, with its parameters on the meta device.

    Buffers are real, except for a video VAE, whose buffers are on the meta device, too.

    A transformer or ControlNet follows the reference of `part`; `follow` chooses another. `resolution` in pixels
    overrides the resolution of `part`. Raises CheckpointError if neither the configuration nor the shapes determine the
    architecture, or if the library cannot build it. Raises VersionError as `check_libraries` does.
    """
    check_libraries(part)
    try:
        return construct(part, resolution)
    except (CheckpointError, OSError, MemoryError, torch.OutOfMemoryError):
        # The cause is a disk or the memory, not the file.
        raise
    except Exception as error:  # the libraries raise many kinds for sizes that do not fit each other
        reason = brief(str(error) or type(error).__name__, 100)
        raise CheckpointError(
            f"{part.name}: its config or its tensors' shapes build no {part.kind} ({reason}); use another file, or the "
            "model's own config.json"
        ) from error


def check_libraries(part: Checkpoint) -> None:
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
    if part.kind in VIDEO_KINDS and not hasattr(diffusers, library_class(part)):
        oldest = "0.37" if part.variant == "ltx-2" else "0.36"
        raise VersionError(
            f"diffusers: got {diffusers.__version__}, expected {oldest} or newer for SANA-Video; "
            "pip install -U diffusers"
        )


def library_class(part: Checkpoint) -> str:
    """Return the name of diffusers' class for `part`."""
    return "AutoencoderKLLTX2Video" if part.variant == "ltx-2" else CHECKPOINT_KINDS[part.kind].classes[0]


def check_layers(part: Checkpoint, layers: int) -> None:
    """Raise CheckpointError unless the file of a video transformer has `layers` blocks, like its configuration.

    The limit bounds the time: building MOST_VIDEO_LAYERS blocks takes less than a second.
    """
    blocks = count(part.headers, r"transformer_blocks\.(\d+)\.")
    if not layers == blocks <= MOST_VIDEO_LAYERS:
        raise CheckpointError(
            f"{part.name}: got {blocks} blocks, expected {layers} as in its config and at most {MOST_VIDEO_LAYERS}; "
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


def construct(part: Checkpoint, resolution: int | None) -> torch.nn.Module:
    """Build a module. Raises CheckpointError for an unknown width, and the errors of the libraries."""
    import diffusers
    from transformers import Gemma2Config, Gemma2Model

    config = library_config(part)
    if part.kind != "text_encoder":
        config["_class_name"] = library_class(part)
    if resolution is not None and part.kind in ("transformer", "controlnet"):
        config.update(resolution_config(resolution))
    if part.kind == "video_transformer":
        config["patch_size"] = tuple(config["patch_size"])
        check_layers(part, config.get("num_layers", VIDEO_LAYERS))
    if part.kind in VIDEO_KINDS:
        with torch.device("meta"):
            module = getattr(diffusers, library_class(part)).from_config(config)
        # Check the shapes before memory is allocated: `init_empty_weights` makes real parameters, one at a time.
        if not part.quantised:
            shapes = {name: header.shape for name, header in part.headers.items()}
            check_shapes(part.name, module.state_dict(), shapes)
        if part.kind == "video_autoencoder":
            return module
        if module.config.out_channels not in (None, module.config.in_channels):
            raise CheckpointError(
                f"{part.name}: got {module.config.out_channels} out_channels, expected {module.config.in_channels} as "
                "in_channels; use a released model"
            )
    with empty_parameters():
        if part.kind == "text_encoder":
            # Other implementations omit the cap of the attention's logits. Older versions of transformers choose them.
            return Gemma2Model(Gemma2Config(**{**config, "attn_implementation": "eager"}))
        module = getattr(diffusers, library_class(part)).from_config(config)
        if part.kind == "controlnet" and part.reference == NVIDIA:
            module.base_block = copy.deepcopy(module.transformer_blocks[0])
    if part.kind != "autoencoder":
        set_reference(module, part.reference)
    if part.kind == "transformer" and (sampler := scheduler_of(part).sampler) != DEFAULTS.sampler:
        module.register_to_config(sampler=sampler)
    return module


def library_config(part: Checkpoint) -> Json:
    """Return the arguments of the library's class, from the configuration or from the tensors' shapes.

    Raises CheckpointError for an unknown width.
    """
    config = shapes_config(part) if part.config is None else part.config
    # diffusers looks up the class that _class_name names, so it never gets the file's value.
    return {key: value for key, value in config.items() if key not in OWN_FIELDS and not key.startswith("_")}


def shapes_config(part: Checkpoint) -> Json:
    """Derive the configuration from the tensors' shapes. Raises CheckpointError for an unknown width."""
    if part.kind == "text_encoder":
        return gemma_config(part.headers)
    if part.kind == "autoencoder":
        return autoencoder_config(part.headers)
    if part.kind == "video_transformer":
        width = part.headers["patch_embedding.weight"].shape[0]
        known, expected = width % VIDEO_HEAD_DIM == 0, f"a multiple of {VIDEO_HEAD_DIM}"
    else:
        width = architecture(part.headers).width
        known, expected = width in CROSS_HEADS, " or ".join(map(str, CROSS_HEADS))
    if not known:
        raise CheckpointError(
            f"{part.name}: got width {width}, expected {expected}, for weights do not tell the number of attention "
            "heads; put the model's config.json beside the file"
        )
    if part.kind == "video_transformer":
        return video_config(part.headers)
    config = transformer_config(part.headers, part.resolution or DEFAULT_RESOLUTION)
    # Arguments that diffusers' ControlNet does not have.
    unknown = ("guidance_embeds", "qk_norm") if part.kind == "controlnet" else ()
    return {key: value for key, value in config.items() if key not in unknown}


def shift_of(checkpoint: Checkpoint, resolution: int | None = None, reference: str = AUTO) -> float:
    """Return the shift of the schedule for the transformer in `checkpoint`, a checkpoint or its transformer.

    The order is: `resolution` (pixels) if given; the released model's shift, if `reference` changes it; the folder's
    scheduler or the saved MODEL; the released model's shift.
    """
    part = find_transformer(checkpoint)
    pixels = resolution or part.resolution or DEFAULT_RESOLUTION
    own = released_shift(part.variant, pixels, part.reference)
    released = own if reference == AUTO else released_shift(part.variant, pixels, reference)
    if resolution is not None or released != own:
        return released
    file = scheduler_file(part)
    stated = recorded(part, "flow_shift") if file is None else read_shift(file)
    return released if stated is None else float(stated)


def text_reference(checkpoint: Checkpoint, reference: str = AUTO) -> str:
    """Return the reference for reading prompts.

    It is `reference`, or with "auto" the transformer's, or the text encoder's own, or NVIDIA's. Raises InputError for
    an unknown name.
    """
    check_name("reference", reference, READINGS)
    own = (checkpoint.reference or NVIDIA) if reference == AUTO else reference
    makes_videos = any(part.kind == "video_transformer" for part in checkpoint.parts)
    return DIFFUSERS_VIDEO if makes_videos and own == DIFFUSERS else own


def latent_scale(checkpoint: Checkpoint) -> float:
    """Return the scaling factor of the latents. Without a VAE in `checkpoint`, use the factor of DC-AE f32c32."""
    parts = [
        part for part in checkpoint.parts or (checkpoint,) if part.kind == "autoencoder" and part.config is not None
    ]
    if not parts or not parts[0].config:
        return recorded(checkpoint, "latent_scale") or DC_AE_SCALE
    # The default of AutoencoderDC is 1.
    return parts[0].config.get("scaling_factor", 1.0)


def config_of(part: Checkpoint) -> TransformerConfig:
    """Return the configuration of the transformer `part` with the library's defaults, without building the module.

    Raises CheckpointError for an unknown width, and VersionError as `check_libraries` does.
    """
    check_libraries(part)
    import diffusers

    parameters = inspect.signature(getattr(diffusers, library_class(part)).__init__).parameters.values()
    defaults: Json = {parameter.name: parameter.default for parameter in parameters}
    if part.kind == "transformer":
        defaults["sampler"] = scheduler_of(part).sampler
    config: Any = SimpleNamespace(**defaults | library_config(part))
    return config


def recorded(checkpoint: Checkpoint, field: str) -> Any:
    """Return a field that this package wrote into the configuration of a saved MODEL, or None."""
    part = next((part for part in checkpoint.parts or (checkpoint,) if part.kind in TRANSFORMER_KINDS), None)
    return part.config.get(field) if part and part.config else None


def component_tensors(part: Checkpoint, read: Reader = read_file) -> dict[str, torch.Tensor]:
    """Return the tensors of `part` by the module's parameter names. Fused tensors are split into their parts."""
    wanted = {target: origin for target, origin in part.origins.items() if target not in TOKENIZERS}
    stored = read_tensors(part.weights, dict.fromkeys(origin.name for origin in wanted.values()), read)
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


def fill_module(
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
    part: Checkpoint, dtype: torch.dtype, read: Reader = read_file, resolution: int | None = None
) -> torch.nn.Module:
    """Return the library's module of `part` in `dtype`. `read` reads the tensors from the file.

    `resolution` (pixels) overrides the resolution of `part`. Raises CheckpointError for quantised weights, for an
    unknown architecture, and for missing, unexpected, misshapen and non-finite tensors.
    """
    if part.quantised:
        raise CheckpointError(
            f"{part.name}: got quantised weights, which only ComfyUI reads, and not for a VAE; use the plain file"
        )
    module = build_module(part, resolution)
    fill_module(module, component_tensors(part, read), part.name, lambda key: dtype)
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
    part = follow(find_part(inspect_checkpoint(path), "transformer"), reference)
    if torch.device(device).type == "meta":
        module = build_module(part, resolution).requires_grad_(False).train(False)
        for parameter in module.parameters():
            parameter.data = parameter.data.to(dtype)
        return module  # type: ignore[return-value]
    return load_part(part, dtype, resolution=resolution).to(device)  # type: ignore[return-value]


def load_video_transformer(
    path: Source, device: str | torch.device = "cpu", dtype: torch.dtype = torch.float32, reference: str = AUTO
) -> SanaVideoTransformer3DModel:
    """Return SANA-Video's transformer in evaluation mode, from diffusers' or NVIDIA's layout.

    `reference`: see `load_transformer`. Raises CheckpointError, MissingFileError or ReadError, with the file's name, if
    the file is not a complete SANA-Video transformer, and VersionError if diffusers does not have its class yet.
    """
    part = follow(find_part(inspect_checkpoint(path), "video_transformer"), reference)
    return load_part(part, dtype).to(device)  # type: ignore[return-value]


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
    part = follow(find_part(inspect_checkpoint(path), "controlnet"), reference)
    return load_part(part, dtype).to(device)  # type: ignore[return-value]


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
    checkpoint = inspect_checkpoint(path)
    part = find_part(checkpoint, "text_encoder")
    tokenizer = load_tokenizer(part)
    model: Any = load_part(part, dtype).to(device)
    return TextEncoder(tokenizer, model, text_reference(checkpoint, reference))
