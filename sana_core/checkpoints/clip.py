"""Load a CLIP from a folder, as transformers saves it: configuration, weights, tokenizer and image processor.

`from_pretrained` is not used: the folder's JSON files could make it download kernels, follow an adapter or an index to
another folder, and build any number of layers. Here only known fields of config.json and preprocessor_config.json reach
transformers' classes, and the weights come only from files in this folder. Therefore attn_implementation,
adapter_config.json and processor_config.json have no effect.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from ..errors import CheckpointError, MissingFileError
from ..runtime.text import Json, brief, shown
from .files import LARGEST_TEXT, REDOWNLOAD, read_bytes, read_json, readable
from .headers import Header, Weights, read_header, read_sharded, read_tensors
from .load import fill_module
from .schemas import (
    BLOCKS,
    FACTOR,
    LARGEST_WIDTH,
    SHARE,
    WIDTH,
    Check,
    flag,
    number,
    optional,
    refuse_code,
    several,
    whole,
    word,
)
from .tokenizer import json_tokenizer

if TYPE_CHECKING:
    from PIL import Image
    from transformers import CLIPConfig, CLIPModel

KIND = "clip"
SUITABLE = "use a CLIP of text and images, such as openai/clip-vit-large-patch14 or yuvalkirstain/PickScore_v1"
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
# CLIPs for 224 to 448 pixels are published.
LARGEST_IMAGE = 1024
TOKEN = whole(0, 10_000_000)
TOWER: dict[str, Check] = {
    "hidden_size": WIDTH,
    "intermediate_size": whole(1, 10 * LARGEST_WIDTH),
    "num_hidden_layers": BLOCKS,
    "num_attention_heads": WIDTH,
    "hidden_act": word,
    "layer_norm_eps": SHARE,
}
TEXT = TOWER | {
    "vocab_size": whole(1, 10_000_000),
    "max_position_embeddings": whole(1, 10_000),
    "eos_token_id": TOKEN,
    "bos_token_id": optional(TOKEN),
    "pad_token_id": optional(TOKEN),
}
VISION = TOWER | {
    "num_channels": whole(3, 3),
    "image_size": whole(1, LARGEST_IMAGE),
    "patch_size": whole(1, LARGEST_IMAGE),
}


def is_size(value: object) -> bool:
    """Whether `value` is an image size for CLIPImageProcessor: a number of pixels, or an object of such numbers."""
    if not isinstance(value, dict):
        return whole(1, LARGEST_IMAGE)(value)
    return value.keys() in ({"shortest_edge"}, {"height", "width"}) and all(map(is_size, value.values()))


PROCESSOR: dict[str, Check] = {
    "do_resize": flag,
    "size": optional(is_size),
    # Pillow's numbers for nearest, Lanczos, bilinear and bicubic
    "resample": whole(0, 3),
    "do_center_crop": flag,
    "crop_size": optional(is_size),
    "do_rescale": flag,
    "rescale_factor": FACTOR,
    "do_normalize": flag,
    "image_mean": optional(several(3, number(-1000, 1000))),
    "image_std": optional(several(3, number(0.001, 1000))),
    "do_convert_rgb": flag,
}


def known_fields(name: str, fields: Mapping[str, Check], config: Json) -> Json:
    """Return the `fields` of `config`, the content of the file `name`."""
    for field, check in fields.items():
        if field in config and not check(config[field]):
            raise CheckpointError(f"{name}: {field} is {brief(config[field])}, which no CLIP has; {REDOWNLOAD}")
    return {field: config[field] for field in fields if config.get(field) is not None}


def read_config(folder: Path) -> Json:
    """Return the arguments of transformers' CLIPConfig from the folder's config.json."""
    if folder.is_file():
        raise CheckpointError(f"{folder.name}: got one file, expected a folder with config.json; {SUITABLE}")
    file = folder / "config.json"
    config = read_json(file)
    refuse_code(shown(file), config)
    kind = config.get("model_type")
    if kind != KIND:
        raise CheckpointError(f"{folder.name}: got model_type {brief(kind)}, expected {KIND}; {SUITABLE}")
    if config.get("quantization_config") is not None:
        raise CheckpointError(f"{shown(file)}: got quantization_config, expected plain weights; use the plain model")
    arguments = known_fields(shown(file), {"projection_dim": WIDTH}, config)
    for section, fields in (("text_config", TEXT), ("vision_config", VISION)):
        # Early CLIPs have a section twice. transformers follows the one with "_dict" where it is not null.
        content: object = next((config[key] for key in (f"{section}_dict", section) if config.get(key) is not None), {})
        if not isinstance(content, dict):
            raise CheckpointError(f"{shown(file)}: {section} is {brief(content)}, expected an object; {REDOWNLOAD}")
        refuse_code(f"{shown(file)}: {section}", content)
        arguments[section] = known_fields(f"{shown(file)}: {section}", fields, content)
    return arguments


def check_folder(folder: Path) -> None:
    """Raise MissingFileError unless `folder` exists."""
    with readable(folder):
        exists = folder.exists()
    if not exists:
        raise MissingFileError(
            f"scorer: no folder {brief(folder.name)}, expected the folder of a CLIP model; check its spelling"
        )


def read_weights(folder: Path) -> Weights:
    """Return the headers of the folder's weights, one file or shards of this folder."""
    with readable(folder):
        if (folder / WEIGHTS).exists():
            return read_header(folder / WEIGHTS)
        if (folder / INDEX).exists():
            return read_sharded(folder / INDEX)
    raise MissingFileError(f"{folder.name}: no {WEIGHTS}; download it from the page of the model")


def clip_files(folder: Path) -> set[Path]:
    """Return the files that decide the scores of the CLIP in `folder`."""
    check_folder(folder)
    names = ("config.json", "preprocessor_config.json", "tokenizer.json", "tokenizer_config.json")
    weights = {header.file for header in read_weights(folder).headers.values()}
    # `load_scorer` names a file that is missing, or a pipe in its place.
    return weights | {folder / name for name in names if (folder / name).is_file()}


def load_model(folder: Path, device: str | torch.device, dtype: torch.dtype) -> CLIPModel:
    """Return the CLIP in `folder` in evaluation mode."""
    from transformers import CLIPConfig, CLIPModel

    check_folder(folder)
    arguments, weights = read_config(folder), read_weights(folder)
    for section, prefix in (("text_config", "text_model"), ("vision_config", "vision_model")):
        # Building layers takes time and memory, so the weights must have the last layer of config.json.
        last = arguments[section].get("num_hidden_layers", 1) - 1
        check_whole_clip(folder, weights.headers, {f"{prefix}.encoder.layers.{last}.layer_norm1.weight"})
    try:
        config: CLIPConfig = CLIPConfig(**arguments)
        # accelerate's init_empty_weights allocates every tensor once, at the sizes in config.json.
        with torch.device("meta"):
            model = CLIPModel(config)
    except Exception as error:  # transformers raises many kinds for sizes that do not fit each other
        reason = brief(str(error) or type(error).__name__, 100)
        raise CheckpointError(f"{shown(folder / 'config.json')}: builds no CLIP ({reason}); {REDOWNLOAD}") from None
    expected = dict(model.named_parameters())
    check_whole_clip(folder, weights.headers, expected.keys())
    for name, parameter in expected.items():
        header = weights.headers[name]
        if header.shape != parameter.shape or not header.dtype.is_floating_point:
            got = f"{str(header.dtype).removeprefix('torch.')} {list(header.shape)}"
            raise CheckpointError(
                f"{shown(header.file)}: {name} is {got}, expected floating-point {list(parameter.shape)} as in "
                f"config.json; {REDOWNLOAD}"
            )
    fill_module(model, read_tensors(weights, expected), folder.name, lambda key: dtype)
    # The only buffers are the position numbers. They are computed, not loaded.
    for name, buffer in list(model.named_buffers()):
        owner, _, leaf = name.rpartition(".")
        positions = torch.arange(buffer.shape[-1]).expand(1, -1)
        model.get_submodule(owner).register_buffer(leaf, positions, persistent=False)
    return model.to(device)


def check_whole_clip(folder: Path, headers: Mapping[str, Header], names: Iterable[str]) -> None:
    """Raise CheckpointError unless `headers` has all `names`."""
    missing = sorted(set(names) - headers.keys())
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise CheckpointError(f"{folder.name}: no {missing[0]}{more}; the weights are not a whole CLIP; {SUITABLE}")


def load_processor(folder: Path, pixels: int) -> Callable[[Image.Image], torch.Tensor]:
    """Return a function from an image to `pixel_values` [1, 3, pixels, pixels]."""
    from PIL import Image
    from transformers import CLIPImageProcessor

    file = folder / "preprocessor_config.json"
    settings = read_json(file)
    refuse_code(shown(file), settings)
    arguments = known_fields(shown(file), PROCESSOR, settings)
    try:
        processor = CLIPImageProcessor(**arguments)
        # This image is not square, so without a crop its result has another size than expected.
        pixel_values = processor(Image.new("RGB", (64, 48)), return_tensors="pt")["pixel_values"]
    except Exception as error:
        reason = brief(str(error) or type(error).__name__, 100)
        raise CheckpointError(f"{shown(file)}: transformers cannot use it ({reason}); {REDOWNLOAD}") from None
    if pixel_values.shape != (1, 3, pixels, pixels):
        got = " x ".join(map(str, pixel_values.shape[2:]))
        raise CheckpointError(
            f"{shown(file)}: makes images of {got} pixels, expected {pixels} x {pixels} as in config.json; {REDOWNLOAD}"
        )
    return lambda image: processor(image, return_tensors="pt")["pixel_values"]


def load_tokenizer(folder: Path, longest: int, vocabulary: int) -> Callable[[str], list[int]]:
    """Return a function from a prompt to its tokens, at most `longest`, all below `vocabulary`."""
    file, config_file = folder / "tokenizer.json", folder / "tokenizer_config.json"
    if config_file.exists():
        settings = read_json(config_file)
        refuse_code(shown(config_file), settings)
        side = settings.get("truncation_side", "right")
        if side != "right":
            raise CheckpointError(f"{shown(config_file)}: truncation_side is {brief(side)}, expected right; {SUITABLE}")
    encode = json_tokenizer(read_bytes(file, LARGEST_TEXT), shown(file), vocabulary).encode

    def tokenize(prompt: str) -> list[int]:
        tokens = encode(prompt)
        return tokens if len(tokens) <= longest else [*tokens[: longest - 1], tokens[-1]]

    return tokenize
