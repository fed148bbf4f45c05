"""Recognise a checkpoint by the names and shapes of its tensors. Only headers are read."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from math import isqrt
from pathlib import Path

import torch

from ..errors import CheckpointError, MissingFileError
from ..model.known_models import DEFAULT_RESOLUTION, GEMMA_WIDTHS, RESOLUTIONS, VIDEOS, controlnet_name, variant_name
from ..model.latents import DOWNSCALE
from ..model.reference import AUTO, DIFFUSERS, NVIDIA, REFERENCES, RULES
from ..runtime.checks import check_name
from ..runtime.text import Json, brief, shown
from .checkpoint import SCALES, CheckpointInfo, Source
from .configs import architecture, autoencoder_name, contradiction, gemma_width, resolution_config
from .files import parse_json, read_json, readable
from .foreign_models import CAUSAL_CLASS, LONG_NAMES, LONGSANA, foreign_model, relative
from .headers import SAFETENSORS, Header, Headers, Weights, read_header, read_sharded, tensor_bytes
from .keys import BASE_BLOCK, HOLDERS, VIDEO_TENSORS, Origin, autoencoder_origins, transformer_origins, unwrapped
from .kinds import FOLDERS, KINDS, TRANSFORMERS, VIDEO2, check_config, check_tensors
from .pickled import EMA
from .schemas import MOST_CELLS

# The prefixes of the tensor names of each component in an all-in-one file.
PREFIXES = (
    re.compile(r"(model\.)?diffusion_model\.|transformer\.|module\."),
    re.compile(r"first_stage_model\.|vae\."),
    re.compile(r"text_encoders?\.(gemma2_2b\.(transformer\.)?)?"),
)
# Tensors of a text encoder's file that hold a tokenizer as bytes: sentencepiece's model, or JSON of tokenizers.
TOKENIZERS = ("spiece_model", "tokenizer_json")
# The tensor with the component's configuration as bytes of JSON, in files that ComfyUI's own nodes saved. These nodes
# do not write the metadata of a node pack.
SAVED_CONFIG = "sana_config"
LARGEST_CONFIG = 1_000_000
LORA = re.compile(r"[._](lora_[AB]|lora_(down|up)|lokr_w[12].*|hada_w[12]_[ab]|dora_scale|diff|diff_b)(\.|$)")
SHARD = re.compile(r"(.+)-\d{5}-of-\d{5}$")
NAMED = {str(pixels): pixels for pixels in RESOLUTIONS} | {f"{pixels // 1024}k": pixels for pixels in RESOLUTIONS[1:]}
NAMED_RESOLUTION = re.compile(rf"(?<![0-9a-z])({'|'.join(NAMED)})(?=px|[^0-9a-z]|$)", re.IGNORECASE)
RESOLUTION_WITH_UNIT = re.compile(r"(?<![0-9a-z])(?:(512|1024|2048|4096)px|[124]k(px)?)(?![0-9a-z])", re.IGNORECASE)
# In the name of SANA-Video 2.0's preview.
PREVIEW = "4step"
# (layout, tensors that identify it) of the VAEs of SANA-Video: first Wan 2.1's, then LTX-2's.
VIDEO_VAES = (
    ("diffusers", {"post_quant_conv.weight", "decoder.mid_block.attentions.0.to_qkv.weight"}),
    ("original", {"decoder.head.0.gamma", "decoder.upsamples.0.residual.2.weight"}),
    ("diffusers", {"latents_mean", "decoder.conv_in.conv.weight", "decoder.mid_block.resnets.0.conv1.conv.weight"}),
    ("original", {"per_channel_statistics.mean-of-means", "decoder.conv_in.conv.weight"}),
)
FOURTH_STAGE = {"diffusers": "decoder.up_blocks.3.", "original": "decoder.up_blocks.8."}
# A number that torch's AveragedModel stores beside the weights.
AVERAGED = "n_averaged"
# The language model's head, with its scales if it is quantised, and a number of ComfyUI's wrapper.
UNUSED_TEXT = ("lm_head.", "logit_scale")


def inspect_checkpoint(path: Source, ema: bool = False) -> CheckpointInfo:
    """Return kind, variant, layout, dtype, size and resolution of the file or folder at `path`.

    `ema`: use the moving average in a .pth of a training. If `path` is a CheckpointInfo, it is returned unchanged. A
    folder may be a pipeline of diffusers, one component of diffusers or transformers, or NVIDIA's folder with
    checkpoints/ in it, perhaps with components of diffusers beside that. A file that is not SANA's has kind "other" and
    a variant that names it. Raises MissingFileError if the path does not exist, ReadError if it cannot be read,
    CheckpointError if the file is broken or has no weights.
    """
    if isinstance(path, CheckpointInfo):
        return path
    path = Path(path)
    with readable(path):
        return inspect_path(path, ema)


def inspect_path(path: Path, ema: bool) -> CheckpointInfo:
    """Inspect a path, as `inspect_checkpoint` does. Raises OSError if the operating system refuses the path."""
    if path.exists() and not path.is_dir():
        return inspect_file(path, ema)
    folders = [path / name for name in FOLDERS if (path / name / "config.json").exists()]
    if (path / "model_index.json").is_file():
        found = [inspect_folder(folder) for folder in folders]
        if not found:
            raise MissingFileError(
                f"{path.name}: no component beside model_index.json; download the folder again, whole"
            )
        return bundle(path, "diffusers", found)
    originals = sorted(path.glob("checkpoints/*.pth")) + sorted(path.glob("checkpoints/*.safetensors"))
    # NVIDIA's repositories may have a config.json of their training code beside checkpoints/.
    if originals and not weight_files(path):
        transformer = inspect_file(originals[0], ema)
        # SANA-Video 2.0 comes alone. Users put the folders of its VAE and its text encoder beside checkpoints/.
        components = [inspect_folder(folder) for folder in folders]
        return bundle(path, transformer.layout, [transformer, *components]) if components else transformer
    if any((path / name).exists() for name in ("config.json", "adapter_config.json")):
        return inspect_folder(path)
    if path.is_dir():
        raise MissingFileError(
            f"{brief(path.name)}: got a folder without model_index.json, config.json or checkpoints/, expected the "
            "folder of a model; choose that folder, or download the model again, whole"
        )
    raise MissingFileError(
        f"{brief(path.name)}: no such file or folder, expected a model; check its spelling, or refresh the list"
    )


def inspect_file(file: Path, ema: bool = False) -> CheckpointInfo:
    """Inspect a file, as `inspect_checkpoint` does. If it is one of several shards, all shards are inspected."""
    index = find_index(file)
    weights = read_sharded(index) if index else read_header(file, ema)
    groups = components(file, weights.headers)
    config, is_beside = own_config(file, weights)
    parts = [recognise(file, names, weights, config, is_beside) for names in groups]
    if EMA in weights.metadata:
        note = f"{shown(file)}: also has a moving average of the weights ({EMA}); convert --ema writes it to a new file"
        parts = [replace(part, notes=(*part.notes, note)) for part in parts]
    known = [part for part in parts if part.kind != "other"]
    if len(known) == 1 or not known:
        return (known or parts)[0]
    return bundle(file, "comfy", known)


def find_index(file: Path) -> Path | None:
    """Return the index file if `file` is one of several shards, or None if it is not or the index is missing."""
    shard = SHARD.match(file.stem)
    if not shard:
        return None
    name, _, variant = shard[1].partition(".")
    names = [f"{shard[1]}.safetensors.index.json", f"{name}.safetensors.index.{variant}.json"]
    return next((file.with_name(name) for name in names if file.with_name(name).is_file()), None)


def components(file: Path, names: Iterable[str]) -> list[dict[str, str]]:
    """Return {name without its prefix and wrappers: name} of each component in `file`.

    A LoRA's prefixes are part of its names. Raises CheckpointError for two names that differ only in wrappers.
    """
    groups: dict[int, dict[str, str]] = {}
    for name in names:
        if LORA.search(name):
            return [{name: name for name in names}]
        if name == AVERAGED:
            continue
        inner = unwrapped(name)
        found = [(number, match.end()) for number, prefix in enumerate(PREFIXES) if (match := prefix.match(inner))]
        number, start = found[0] if found else (len(PREFIXES), 0)
        first = groups.setdefault(number, {}).setdefault(inner[start:], name)
        if first != name:
            raise CheckpointError(
                f"{shown(file)}: got {brief(first)} and {brief(name)}, expected one of them; use another file"
            )
    return [without_holders(group) for group in groups.values()] or [{}]


def without_holders(names: dict[str, str]) -> dict[str, str]:
    """Remove the prefixes of wrapping modules, if the shorter names are then recognised."""
    if classify(set(names))[0] != "other":
        return names
    inner_names = {HOLDERS.sub("", inner): name for inner, name in names.items()}
    is_known = len(inner_names) == len(names) and classify(set(inner_names))[0] not in ("other", "lora")
    return inner_names if is_known else names


def inspect_folder(folder: Path) -> CheckpointInfo:
    """Inspect a folder with one component or a PEFT adapter.

    If it has several precisions, use the file without a suffix.
    """
    files = weight_files(folder)
    if not files:
        raise MissingFileError(
            f"{folder.name}: no .safetensors file beside its configuration; download the folder again, whole"
        )
    plain = [file for file in files if "." not in SHARD.sub(r"\1", file.stem)]
    return inspect_file((plain or files)[0])


def weight_files(folder: Path) -> list[Path]:
    """Return the safetensors files in `folder` itself."""
    return [file for file in sorted(folder.glob("*")) if file.suffix.lower() in SAFETENSORS]


def bundle(path: Path, layout: str, parts: list[CheckpointInfo]) -> CheckpointInfo:
    """Join several components. Variant, dtype, resolution and reference are the transformer's, if there is one."""
    first = next((part for part in parts if part.kind in TRANSFORMERS), parts[0])
    return CheckpointInfo(
        path,
        "pipeline",
        first.variant,
        layout,
        first.dtype,
        sum(part.size for part in parts),
        first.resolution,
        first.resolution_from,
        parts=tuple(parts),
        reference=first.reference,
    )


def own_config(file: Path, weights: Weights) -> tuple[Json | None, bool]:
    """Return the configuration in the file's metadata or in config.json beside it, or None, and whether it is beside.

    Raises CheckpointError if it is not a JSON object, MissingFileError for a broken link, and ReadError.
    """
    if "config" in weights.metadata:
        return parse_json(weights.metadata["config"], f"{shown(file)}: its config"), False
    beside = file.with_name("config.json")
    # A broken link is an error, not a missing configuration.
    return (read_json(beside) if beside.exists() or beside.is_symlink() else None), True


def recognise(
    file: Path, names: dict[str, str], weights: Weights, config: Json | None, is_beside: bool
) -> CheckpointInfo:
    """Describe one component. `names`: {name without prefix: name in the file}.

    `config`: the configuration in the file, or beside it (`is_beside`). A folder may contain several models, and
    config.json may belong to another one. So what the file itself shows takes precedence.
    """
    stored = {name: weights.headers[full] for name, full in names.items() if name != SAVED_CONFIG}
    kind, layout, origins = classify(set(stored))
    is_long = kind == "video_transformer" and is_longsana(file, config)
    if is_long:
        kind = "other"
    origins = {target: Origin(names[o.name], o.part, o.parts) for target, o in origins.items()}
    headers = {target: part_header(o.name, weights.headers[o.name], o) for target, o in origins.items()}
    if kind in KINDS and kind != "lora":
        check_tensors(shown(file), kind, headers)
    sizes: Counter[torch.dtype] = Counter()
    for header in stored.values():
        sizes[header.dtype] += header.size
    # An all-in-one file may have a configuration per component.
    saved = None
    if SAVED_CONFIG in names:
        content = tensor_bytes(weights, names[SAVED_CONFIG], LARGEST_CONFIG, "a configuration")
        saved = parse_json(content, f"{shown(file)}: {brief(names[SAVED_CONFIG])}")
    config = next((each for each in (saved, (config or {}).get(kind), config) if is_config_of(each, kind)), None)
    notes = []
    is_beside = is_beside and saved is None
    if config is not None:
        config = check_config(shown(file), kind, config)
        difference = contradiction(kind, headers, config) if is_beside else ""
        if difference:
            notes.append(f"{shown(file)}: config.json beside it is of another model ({difference}) and is ignored")
            config = None
    variant = LONGSANA if is_long else variant_of(file, kind, layout, headers, stored, config)
    resolution, source, reference = None, "", ""
    if config is not None and config.get("reference") in tuple(RULES):
        # `convert` and ComfyUI's save nodes write it.
        reference = config["reference"]
    elif kind in (*TRANSFORMERS, "controlnet"):
        # diffusers has no code of SANA-Video 2.0 that a file with its names could follow.
        reference = NVIDIA if layout == "original" or VIDEO2 in headers else DIFFUSERS
    if kind in ("transformer", "controlnet"):
        positions, patch = stored.get("pos_embed"), headers["patch_embed.proj.weight"].shape[-1]
        resolution, source = find_resolution(file, config, positions, patch)
        evidence = own_resolution(file, positions, patch) if is_beside and source == "config" else None
        if config is not None and evidence is not None and evidence[0] != resolution:
            notes.append(
                f"{shown(file)}: {evidence[0]} px by its {evidence[1]}; config.json beside it has {resolution} px and "
                "is not followed in this"
            )
            resolution, source = evidence
            config = {**config, **resolution_config(resolution)}
        if config is not None and "sample_size" in config and "interpolation_scale" not in config:
            # The configuration is older than this argument.
            config = {**config, **resolution_config(resolution)}
    dtype, size = sizes.most_common(1)[0][0] if sizes else torch.float32, sum(sizes.values())
    found = (file, kind, variant, layout, dtype, size, resolution, source, config, headers, origins, weights)
    return CheckpointInfo(*found, reference=reference, notes=tuple(notes))


def variant_of(
    file: Path, kind: str, layout: str, headers: Headers, stored: Mapping[str, Header], config: Json | None
) -> str:
    """Return the component's variant. For other files, return a description of the tensors `stored`."""
    if kind == "transformer":
        return variant_name(architecture(headers))
    if kind == "controlnet":
        return controlnet_name(architecture(headers))
    if kind == "video_transformer":
        return video_name(file, headers, config)
    if kind == "autoencoder":
        return autoencoder_name(headers)
    if kind == "video_autoencoder":
        if "decoder.conv_in.conv.weight" not in headers:
            return "wan-2.1"
        # The decoder of LTX-2.3 has a fourth stage.
        return "ltx-2.3" if any(name.startswith(FOURTH_STAGE[layout]) for name in headers) else "ltx-2"
    if kind == "text_encoder":
        width = gemma_width(headers)
        return GEMMA_WIDTHS.get(width, f"gemma-2-custom-{width}")
    return foreign_model(stored) if kind == "other" else ""


def follow(info: CheckpointInfo, reference: str) -> CheckpointInfo:
    """Return `info` with another reference; "auto" keeps the reference of the file.

    `info` is a transformer or a ControlNet. Raises InputError for an unknown name, and CheckpointError if NVIDIA's
    reference needs the base model's first block and the ControlNet's file does not have it.
    """
    check_name("reference", reference, REFERENCES)
    info = info if reference == AUTO else replace(info, reference=reference)
    if info.kind != "controlnet":
        return info
    base = {name for name in info.origins if name.startswith(f"{BASE_BLOCK}.")}
    if info.reference == NVIDIA and not base:
        whole = "download the whole .pth, or " if info.layout == "original" else ""
        raise CheckpointError(
            f"{info.name}: got a ControlNet without the base model's first block (blocks.0), from which NVIDIA's "
            f"starts; {whole}choose reference diffusers"
        )
    unused = base if info.reference == DIFFUSERS else set()
    origins = {name: origin for name, origin in info.origins.items() if name not in unused}
    headers = {name: header for name, header in info.headers.items() if name not in unused}
    return replace(info, origins=origins, headers=headers)


def is_longsana(file: Path, config: Json | None) -> bool:
    """Whether a transformer with the tensors of SANA-Video is LongSANA's, by its configuration or its file's name."""
    return (config or {}).get("_class_name") == CAUSAL_CLASS or any(name in file.stem.lower() for name in LONG_NAMES)


def is_config_of(config: object, kind: str) -> bool:
    """Return whether `config` is for a library class of `kind`. config.json may be for another model."""
    if not isinstance(config, dict):
        return False
    architectures = config.get("architectures")
    listed = architectures[:1] if isinstance(architectures, list) else []
    return kind in KINDS and any(name in KINDS[kind].classes for name in [config.get("_class_name"), *listed])


def classify(names: set[str]) -> tuple[str, str, dict[str, Origin]]:
    """Return kind, layout, and the origin of each parameter of the module among `names`."""
    same = {name: Origin(name) for name in names}
    if relative(names):
        return "other", "", same
    if any(LORA.search(name) for name in names):
        return "lora", "", same
    if {"controlnet_blocks.0.weight", "input_block.weight", "patch_embed.proj.weight"} <= names:
        return "controlnet", "diffusers", same
    if "controlnet.0.before_proj.weight" in names:
        return "controlnet", "original", transformer_origins(names)
    if "patch_embedding.weight" in names and names & {"transformer_blocks.0.ff.conv_temp.weight", VIDEO2}:
        return "video_transformer", "diffusers", same
    if "x_embedder.proj.weight" in names and names & VIDEO_TENSORS:
        return "video_transformer", "original", transformer_origins(names)
    if {"caption_projection.linear_1.weight", "transformer_blocks.0.ff.conv_point.weight"} <= names:
        return "transformer", "diffusers", same
    if {"blocks.0.cross_attn.q_linear.weight", "blocks.0.mlp.point_conv.conv.weight"} <= names:
        return "transformer", "original", transformer_origins(names)
    # Only SANA's DC-AEs have attention at several scales.
    if "decoder.conv_in.weight" in names and any(name.endswith("to_qkv_multiscale.0.proj_in.weight") for name in names):
        return "autoencoder", "diffusers", same
    if "decoder.project_in.main.conv.weight" in names and any(name.endswith(".aggreg.0.0.weight") for name in names):
        return "autoencoder", "original", autoencoder_origins(names)
    for layout, known in VIDEO_VAES:
        if known <= names:
            return "video_autoencoder", layout, same
    bare = {name.removeprefix("model."): Origin(name) for name in names if not name.startswith(UNUSED_TEXT)}
    # Gemma 3 has the same norms, and also q_norm.
    if "layers.0.pre_feedforward_layernorm.weight" in bare and "layers.0.self_attn.q_norm.weight" not in bare:
        return "text_encoder", "transformers", bare
    return "other", "", same


def video_name(file: Path, headers: Headers, config: Json | None) -> str:
    """Return the name in VIDEOS of the video transformer with the tensors `headers`.

    The preview in 4 steps has the tensors of the model that it was distilled from. It is recognised by its file's name,
    or by the sampler in the configuration of a saved MODEL. Raises CheckpointError for other models.
    """
    _, channels, *patch = headers["patch_embedding.weight"].shape
    generation = [model for model in VIDEOS.values() if model.is_video2 == (VIDEO2 in headers)]
    models = [model for model in generation if model.channels == channels]
    if not models:
        expected = " or ".join(dict.fromkeys(str(model.channels) for model in generation))
        raise CheckpointError(
            f"{shown(file)}: got a SANA-Video model of latents with {channels} channels, expected {expected}; use a "
            "released model"
        )
    if patch != [1, models[0].patch, models[0].patch]:
        raise CheckpointError(
            f"{shown(file)}: got patches of {brief(patch)}, expected those of a SANA-Video model; use a released model"
        )
    is_preview = PREVIEW in file.stem.lower() or "sampler" in (config or {})
    return models[-1 if is_preview else 0].name


def part_header(name: str, header: Header, origin: Origin) -> Header:
    """Return the header of one part of a fused tensor. Raises CheckpointError if the parts would not be equal."""
    if origin.parts == 1 or name.endswith(SCALES):
        # `load_part` refuses quantised weights, so their scales are not split.
        return header
    first, *rest = header.shape or (1,)
    if first % origin.parts:
        raise CheckpointError(
            f"{shown(header.file)}: {brief(name)} has {first} rows, expected {origin.parts} equal parts; use another"
            " file"
        )
    return header._replace(shape=(first // origin.parts, *rest))


def own_resolution(file: Path, positions: Header | None, patch: int) -> tuple[int, str] | None:
    """Return the resolution in pixels from the position embedding or the file's name, and which of them it was.

    A number in the name counts only with a unit, as in 512px or 4Kpx, because other numbers are steps or dates. Raises
    CheckpointError if the position embedding has another shape.
    """
    if positions is not None:
        side = isqrt(positions.shape[1]) if len(positions.shape) == 3 else 0
        if not 0 < side <= MOST_CELLS:
            raise CheckpointError(
                f"{shown(file)}: pos_embed is {brief(list(positions.shape))}, expected the cells of a square image; "
                "use another file"
            )
        return DOWNSCALE * patch * side, "position embedding"
    matches = [match[0].lower() for match in RESOLUTION_WITH_UNIT.finditer(file.stem)]
    stated = {NAMED[match.removesuffix("px")] for match in matches}
    return (stated.pop(), "file name") if len(stated) == 1 else None


def find_resolution(file: Path, config: Json | None, positions: Header | None, patch: int) -> tuple[int, str]:
    """Return the training resolution in pixels and where it was found. Raises CheckpointError.

    NVIDIA's files have a position embedding of this size, even if the model does not use it. Files of diffusers have
    none.
    """
    if config is not None and "sample_size" in config:
        return DOWNSCALE * config["sample_size"], "config"
    evidence = own_resolution(file, positions, patch)
    if evidence is not None:
        return evidence
    for name in (file.stem, file.parent.name, file.parent.parent.name):
        found = NAMED_RESOLUTION.search(name)
        if found:
            return NAMED[found[1].lower()], "file name"
    return DEFAULT_RESOLUTION, "assumed"
