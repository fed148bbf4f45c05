"""Load a recognised checkpoint: build the library's module on the meta device, then fill it from the file."""

from __future__ import annotations

import copy
import inspect
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

from ..errors import CheckpointError, VersionError
from ..model.instruction import HEADS, InstructionReader
from ..model.known_models import DEFAULT_RESOLUTION, DEFAULTS, SPRINT, VIDEOS, TransformerConfig
from ..model.layers import arrange_convolutions
from ..model.reference import AUTO, NVIDIA, set_reference
from ..model.text import TextEncoder
from ..runtime.libraries import import_failure
from ..runtime.text import Json, brief, first_few
from .checkpoint import CHECKPOINT_KINDS, FP8_FILE, TOKENIZERS, TRANSFORMER_KINDS, Checkpoint, Source, find_part
from .configs import VIDEO2, count, edit_head_config, resolution_config
from .detect import follow, inspect_checkpoint
from .files import FOREIGN, INCOMPLETE
from .generation import scheduler_of, text_reference
from .headers import Reader, read_file, read_tensors
from .quantised import dequantised, layer_tensors, quantised_layers
from .schemas import EDIT_FIELDS, QWEN_TEXT_FIELDS, QWEN_VISION_FIELDS
from .tokenizer import load_qwen_tokenizer, load_tokenizer

if TYPE_CHECKING:
    from diffusers import AutoencoderDC, SanaControlNetModel, SanaTransformer2DModel, SanaVideoTransformer3DModel

# Numbers of a tensor that are checked at once. Gemma 2's embedding has 590 million, which take 2.4 GB in float32.
COMPARED = 2**20
# Building this many blocks takes less than a second.
MOST_VIDEO_LAYERS = 64
# Fields that this package adds to the library's configuration.
OWN_FIELDS = ("reference", "flow_shift", "latent_scale", "preview", "sampler")

# Held by the thread that constructs a module with empty parameters.
CONSTRUCTION = threading.Lock()


def build_module(part: Checkpoint, resolution: int | None = None) -> torch.nn.Module:
    """Return the library's module for `part`, with its parameters on the meta device.

    Buffers are real, except for a video VAE, whose buffers are on the meta device, too. A transformer or ControlNet
    follows the reference of `part`; `follow` chooses another. `resolution` in pixels overrides the resolution of
    `part`.
    """
    cls = library_class(part)
    try:
        config = library_config(part, resolution)
        if part.kind == "edit_head":
            with empty_parameters():
                return cls(**config)
        if part.kind == "qwen3_vl":
            from transformers import Qwen3VLConfig

            for field, fields in (("text_config", QWEN_TEXT_FIELDS), ("vision_config", QWEN_VISION_FIELDS)):
                config[field] = {key: value for key, value in config[field].items() if key in fields}
            with empty_parameters():
                return cls(Qwen3VLConfig(**config, attn_implementation="sdpa"))
        if part.kind == "text_encoder":
            from transformers import Gemma2Config

            # Other implementations omit the cap of the attention's logits. Older versions of transformers choose them.
            config = Gemma2Config(**{**config, "attn_implementation": "eager"})
            with empty_parameters():
                return cls(config)
        config["_class_name"] = cls.__name__
        if part.is_video:
            if part.kind == "video_transformer":
                config["patch_size"] = tuple(config.get("patch_size", (1, 1, 1)))
                layers = config.get("num_layers", VIDEOS[part.variant].layers)
                blocks = count(part.headers, r"transformer_blocks\.(\d+)\.")
                if not layers == blocks <= MOST_VIDEO_LAYERS:
                    raise CheckpointError(
                        f"{part.name}: got {blocks} blocks, expected {layers} as in its config and at most "
                        f"{MOST_VIDEO_LAYERS}; download both again"
                    )
            # Check the shapes before memory is allocated: `empty_parameters` makes real parameters, one at a time.
            with torch.device("meta"):
                module = cls.from_config(config)
            if not part.quantised:
                shapes = {name: header.shape for name, header in part.headers.items()}
                check_shapes(part.name, module.state_dict(), shapes)
            if part.kind == "video_autoencoder":
                return module
            if module.config.out_channels not in (None, module.config.in_channels):
                raise CheckpointError(
                    f"{part.name}: got {module.config.out_channels} out_channels, expected {module.config.in_channels} "
                    "as in_channels; use a released model"
                )
        with empty_parameters():
            module = cls.from_config(config)
            if part.kind == "controlnet" and part.reference == NVIDIA:
                module.base_block = copy.deepcopy(module.transformer_blocks[0])
        if part.kind != "autoencoder":
            set_reference(module, part.reference)
        if part.kind in TRANSFORMER_KINDS and (sampler := scheduler_of(part).sampler) not in (DEFAULTS.sampler, SPRINT):
            module.register_to_config(sampler=sampler)
        return module
    except (CheckpointError, OSError, MemoryError, torch.OutOfMemoryError):
        # The cause is a disk or the memory, or the error already names the file.
        raise
    except Exception as error:  # the libraries raise many kinds for sizes that do not fit each other
        reason = brief(str(error) or type(error).__name__, 100)
        raise CheckpointError(
            f"{part.name}: its config or its tensors' shapes build no {part.kind} ({reason}); use another file, or the "
            "model's own config.json"
        ) from None


def library_class(part: Checkpoint) -> Any:
    """Return the library's class for `part`.

    Python -OO, a library that cannot be imported, and a diffusers without the class are VersionErrors.
    """
    if sys.flags.optimize > 1:
        raise VersionError("python: got -OO, which drops the docstrings that transformers reads at import; use -O")
    # Before the module is built, because diffusers turns any failed import into a RuntimeError.
    for name in ("diffusers", "transformers"):
        if failure := import_failure(name):
            raise failure
    import diffusers
    from transformers import Gemma2Model

    if part.kind == "text_encoder":
        return Gemma2Model
    if part.kind == "edit_head":
        from ..model.instruction import EditHead

        return EditHead
    if part.kind == "qwen3_vl":
        import transformers

        if not hasattr(transformers, "Qwen3VLModel"):
            raise VersionError(
                f"transformers: got {transformers.__version__}, expected 4.57 or newer for VIBE; "
                "pip install -U transformers"
            )
        return transformers.Qwen3VLModel
    is_ltx = part.variant.startswith("ltx-2")
    # SANA-Video 2.0 has layers of diffusers' SANA-Video.
    name = "AutoencoderKLLTX2Video" if is_ltx else CHECKPOINT_KINDS[part.kind].classes[0]
    if part.is_video and not hasattr(diffusers, name):
        oldest = "0.37" if is_ltx else "0.36"
        raise VersionError(
            f"diffusers: got {diffusers.__version__}, expected {oldest} or newer for SANA-Video; "
            "pip install -U diffusers"
        )
    if VIDEO2 in part.headers:
        from ..video.transformer import SanaVideo2Transformer3DModel

        return SanaVideo2Transformer3DModel
    return getattr(diffusers, name)


def library_config(part: Checkpoint, resolution: int | None = None) -> Json:
    """Return the arguments of the library's class, from the configuration or from the tensors' shapes."""
    config = CHECKPOINT_KINDS[part.kind].config(part.name, part.headers) if part.config is None else part.config
    # diffusers looks up the class that _class_name names, so it never gets the file's value.
    dropped = OWN_FIELDS + EDIT_FIELDS
    config = {key: value for key, value in config.items() if key not in dropped and not key.startswith("_")}
    if part.kind in ("transformer", "controlnet") and (part.config is None or resolution is not None):
        config |= resolution_config(resolution or part.resolution or DEFAULT_RESOLUTION)
    return config


def config_of(part: Checkpoint) -> TransformerConfig:
    """Return the configuration of the transformer `part` with the library's defaults, without building the module."""
    parameters = inspect.signature(library_class(part).__init__).parameters.values()
    defaults: Json = {parameter.name: parameter.default for parameter in parameters}
    if part.kind in TRANSFORMER_KINDS:
        defaults["sampler"] = scheduler_of(part).sampler
    config: Any = SimpleNamespace(**defaults | library_config(part))
    return config


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


def component_tensors(part: Checkpoint, read: Reader = read_file) -> dict[str, torch.Tensor]:
    """Return the tensors of `part` by the module's parameter names. Fused tensors are split into their parts."""
    wanted = {target: origin for target, origin in part.origins.items() if target not in TOKENIZERS}
    stored = read_tensors(part.weights, dict.fromkeys(origin.name for origin in wanted.values()), read)
    return {
        target: stored[name].chunk(parts)[part] if parts > 1 else stored[name]
        for target, (name, part, parts) in wanted.items()
    }


def check_names(name: str, fault: str, keys: set[str]) -> None:
    """Raise an error that lists `keys`, if there are any. `name` is the file's name."""
    if keys:
        remedy = INCOMPLETE if fault == "no" else FOREIGN
        raise CheckpointError(f"{name}: {fault} {first_few(keys)}; {remedy}")


def check_shapes(name: str, expected: Mapping[str, torch.Tensor], shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Check the names and `shapes` of a file's tensors against the module's. `name` is the file's name."""
    # A format that is not read here has other tensors in place of the weights.
    check_names(name, "unexpected", shapes.keys() - expected.keys())
    check_names(name, "no", expected.keys() - shapes.keys())
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
    `name` is the file's name.
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


def check_finite(name: str, key: str, tensor: torch.Tensor) -> None:
    """Refuse a tensor with NaN or infinity. Each of them makes a sum non-finite."""
    if not tensor.is_floating_point() or tensor.dtype.itemsize == 1:
        return
    # Parts, because torch sums in float32 on a float32 copy of the whole tensor. A GPU is waited for once.
    parts = [part.sum(dtype=torch.float32) for part in tensor.flatten().split(COMPARED)]
    if not torch.stack(parts).isfinite().all():
        bad = tensor.numel() - int(torch.isfinite(tensor).sum())
        if bad:
            raise CheckpointError(
                f"{name}: {bad} of {tensor.numel()} values in {key} are NaN or infinite; use another file"
            )


def load_part(
    part: Checkpoint,
    dtype: torch.dtype,
    reader: Reader | None = None,
    resolution: int | None = None,
    device: str | torch.device | None = None,
) -> torch.nn.Module:
    """Return the library's module of `part` in `dtype`, on `device` if it is not None. `reader` replaces `read_file`.

    `resolution` (pixels) overrides the resolution of `part`.
    """
    layers = quantised_layers(part)
    if reader is None:
        # Layers are dequantised on the CPU, from scales as they are in the file. float16 would make large numbers
        # infinite before they are checked.
        is_plain = not layers and dtype in (torch.bfloat16, torch.float32)
        reader = partial(read_file, dtype=dtype, device=device or "cpu") if is_plain else read_file
    module = build_module(part, resolution)
    tensors, parameters = component_tensors(part, reader), dict(module.named_parameters())
    tensors.pop(FP8_FILE, None)
    check_names(part.name, "unexpected", {f"{layer}.weight" for layer in layers} - parameters.keys())
    for layer, form in layers.items():
        key = f"{layer}.weight"
        tensors[key] = dequantised(form, layer_tensors(tensors, layer), parameters[key].shape).to(dtype)
    fill_module(module, tensors, part.name, lambda key: dtype)
    # The module has buffers that are not in the file.
    return module if device is None else module.to(device)


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
    return load_part(part, dtype, resolution=resolution, device=device)  # type: ignore[return-value]


def load_video_transformer(
    path: Source, device: str | torch.device = "cpu", dtype: torch.dtype = torch.float32, reference: str = AUTO
) -> SanaVideoTransformer3DModel:
    """Return SANA-Video's transformer in evaluation mode, from diffusers' or NVIDIA's layout.

    `reference`: see `load_transformer`. Raises CheckpointError, MissingFileError or ReadError, with the file's name, if
    the file is not a complete SANA-Video transformer, and VersionError if diffusers does not have its class yet.
    """
    part = follow(find_part(inspect_checkpoint(path), "video_transformer"), reference)
    return load_part(part, dtype, device=device)  # type: ignore[return-value]


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
    return load_part(part, dtype, device=device)  # type: ignore[return-value]


def load_autoencoder(
    path: Source, device: str | torch.device = "cpu", dtype: torch.dtype = torch.float32
) -> AutoencoderDC:
    """Return SANA's DC-AE from any layout that `inspect_checkpoint` recognises, in evaluation mode.

    Raises CheckpointError, MissingFileError or ReadError, with the file's name, if the file is not a complete SANA
    DC-AE.
    """
    autoencoder = load_part(find_part(inspect_checkpoint(path), "autoencoder"), dtype, device=device)
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
    model: Any = load_part(part, dtype, device=device)
    return TextEncoder(tokenizer, model, text_reference(checkpoint, reference))


def load_instruction_reader(
    path: Source, device: str | torch.device = "cpu", dtype: torch.dtype = torch.float32
) -> InstructionReader:
    """Return VIBE's tokenizer, Qwen3-VL and edit head, in evaluation mode, from a diffusers folder."""
    part, head_part = instruction_parts(inspect_checkpoint(path))
    tokenizer = load_qwen_tokenizer(part)
    head: Any = load_part(head_part, dtype, device=device)
    model: Any = load_part(part, dtype, device=device)
    return InstructionReader(tokenizer, model, head)


def instruction_parts(checkpoint: Checkpoint) -> tuple[Checkpoint, Checkpoint]:
    """Return VIBE's Qwen3-VL and edit head. Raises CheckpointError if the head does not fit the models beside it."""
    part, head = find_part(checkpoint, "qwen3_vl"), find_part(checkpoint, "edit_head")
    config, hidden = edit_head_config(head.headers), part.headers["language_model.embed_tokens.weight"].shape[1]
    caption = config_of(find_part(checkpoint, "transformer")).caption_channels
    got = config["width"], config["hidden"], config["output"]
    if (got[0], got[1] % HEADS, got[2]) != (hidden, 0, caption):
        raise CheckpointError(
            f"{head.name}: got an edit head of widths {brief(list(got))}, expected {hidden} as in Qwen3-VL, a multiple "
            f"of {HEADS}, and {caption} as in the transformer; download the folder again, whole"
        )
    return part, head
