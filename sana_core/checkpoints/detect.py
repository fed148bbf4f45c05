"""Recognise a checkpoint by the names and shapes of its tensors. Only headers are read."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Set
from dataclasses import replace
from pathlib import Path

import torch

from ..errors import CheckpointError, MissingFileError
from ..model.known_models import DEFAULT_RESOLUTION, RESOLUTIONS, VIDEOS
from ..model.latents import DOWNSCALE
from ..model.reference import AUTO, DIFFUSERS, NVIDIA, REFERENCES, RULES
from ..runtime.checks import check_name
from ..runtime.text import Json, brief, first_few, shown
from .checkpoint import (
    CHECKPOINT_KINDS,
    COMPONENT_FOLDERS,
    FP8_FILE,
    TRANSFORMER_KINDS,
    Checkpoint,
    Source,
    check_config,
    check_tensors,
)
from .configs import VIDEO2, architecture, contradiction, count, named, resolution_config
from .files import parse_json, read_json, readable
from .headers import SAFETENSORS, Header, Weights, read_header, read_sharded, tensor_bytes
from .keys import (
    BASE_BLOCK,
    HOLDERS,
    VIDEO_TENSORS,
    WRAPPERS,
    Origin,
    autoencoder_origins,
    is_adapter,
    transformer_origins,
)
from .pickled import EMA
from .schemas import MOST_CELLS

# The prefixes of the tensor names of each component in an all-in-one file.
COMPONENT_PREFIXES = (
    re.compile(r"(model\.)?diffusion_model\.|transformer\.|module\."),
    re.compile(r"first_stage_model\.|vae\."),
    re.compile(r"text_encoders?\.(gemma2_2b\.(transformer\.)?)?"),
    # In VIBE's transformer.
    re.compile(r"edit_head\.|(?=meta_queries$)"),
)
# VIBE's transformer with image latents after the noisy ones. The released one has them beside these, in 64 channels.
SEQUENCE = 'VIBE of the kind "seq_cat", which this pack does not run, only the released kind "channel_cat"'
# The tensor with the component's configuration as bytes of JSON, in files that ComfyUI's own nodes saved. These nodes
# do not write the metadata of a node pack.
SAVED_CONFIG = "sana_config"
LARGEST_CONFIG = 1_000_000
# In the names of LongSANA and of its folders.
LONG = re.compile(r"(?<![a-z])long[-_. ]?(?:live|sana)", re.IGNORECASE)
SHARD = re.compile(r"(.+)-\d{5}-of-\d{5}$")
# Resolutions by the texts in file names, such as 512 and 4k.
NAMED_RESOLUTIONS = {str(pixels): pixels for pixels in RESOLUTIONS}
NAMED_RESOLUTIONS |= {f"{pixels // 1024}k": pixels for pixels in RESOLUTIONS[1:]}
RESOLUTION = re.compile(rf"(?<![0-9a-z])({'|'.join(NAMED_RESOLUTIONS)})(?=px|[^0-9a-z]|$)", re.IGNORECASE)
RESOLUTION_WITH_UNIT = re.compile(r"(?<![0-9a-z])(?:(512|1024|2048|4096)px|[124]k(px)?)(?![0-9a-z])", re.IGNORECASE)
# (layout, tensors that identify it) of the VAEs of SANA-Video: first Wan 2.1's, then LTX-2's.
VIDEO_VAES = (
    ("diffusers", {"post_quant_conv.weight", "decoder.mid_block.attentions.0.to_qkv.weight"}),
    ("original", {"decoder.head.0.gamma", "decoder.upsamples.0.residual.2.weight"}),
    ("diffusers", {"latents_mean", "decoder.conv_in.conv.weight", "decoder.mid_block.resnets.0.conv1.conv.weight"}),
    ("original", {"per_channel_statistics.mean-of-means", "decoder.conv_in.conv.weight"}),
)
# Models of SANA's family that this pack does not run. Their files also have the names that identify SANA's parts, so
# they are looked for first. A pattern matches the end of a tensor's name, the specific ones first. The names are from
# diffusers, NVlabs/Sana (diffusion/model/nets), nunchaku (src/SanaModel.cpp, src/Linear.cpp) and bitsandbytes.
RELATIVES = (
    (r"raymap_embedder\.proj\.weight", "SANA-WM, which makes videos along a camera's path"),
    (r"\.attn\.A_log", "SANA-Streaming, which edits videos"),
    (r"\.mlp\.point_conv\.linear\.weight", "Sol-RL's SANA, which has linear layers for its 1x1 convolutions"),
    (r"\.ff\.inverted_conv\.qweight", "SANA in 4 bits for nunchaku; the loader's quantise saves memory in its place"),
    (r"\.qweight", "a model in 4 bits for the kernels of another program"),
    (r"\.quant_state\.bitsandbytes__\w+", "a model in 4 bits of bitsandbytes"),
    (r"\.(absmax|quant_map|SCB)", "a model that bitsandbytes has quantised"),
    (r"\._?weight[:_.]+(qdata|_data|_scale|zero_point)", "a model that torchao or quanto has quantised"),
)
# LongSANA has the tensors of SANA-Video 2B, but its attention and its convolutions over time are causal. 50 steps of
# SANA-Video would generate noise. These are the classes in their config.json.
LONGSANA = "LongSANA, whose layers read earlier frames from a cache that this pack does not have, unlike SANA-Video's"
CAUSAL_CLASS, VIDEO_CLASS = "SanaVideoCausalTransformer3DModel", "SanaVideoTransformer3DModel"
# Damaged parts of SANA: a pattern for a tensor's name, the part, and the tensors by which the part is identified.
DAMAGED = (
    (
        r"\.ff\.conv_(inverted|depth|point)\.",
        "a SANA transformer",
        ("caption_projection.linear_1.weight", "transformer_blocks.0.ff.conv_point.weight"),
    ),
    # Nunchaku keeps the layers that it does not quantise in a second file.
    (r"^caption_norm\.", "a SANA transformer", ("transformer_blocks.0.ff.conv_point.weight",)),
    (
        r"\.cross_attn\.q_linear\.|\.mlp\.point_conv\.conv\.",
        "a SANA transformer",
        ("blocks.0.cross_attn.q_linear.weight", "blocks.0.mlp.point_conv.conv.weight"),
    ),
    (r"to_qkv_multiscale\.", "a DC-AE", ("decoder.conv_in.weight",)),
    (r"\.op_list\.", "a DC-AE", ("encoder.project_in.conv.weight", "decoder.project_in.main.conv.weight")),
    (r"\.pre_feedforward_layernorm\.", "a Gemma 2 text encoder", ("layers.0.pre_feedforward_layernorm.weight",)),
)
# The decoder's stages and first layer, as diffusers and as MIT name them.
DC_AE_STAGE = re.compile(r"decoder\.(?:up_blocks|stages)\.(\d{1,2})\.(?:op_list\.)?\d+\.")
DC_AE_FIRST = re.compile(r"decoder\.(conv_in|project_in(\.main)?\.conv)\.weight")


def inspect_checkpoint(path: Source, ema: bool = False) -> Checkpoint:
    """Return kind, variant, layout, dtype, size and resolution of the file or folder at `path`.

    `ema`: use the moving average in a .pth of a training. If `path` is a Checkpoint, it is returned unchanged. A
    folder may be a pipeline of diffusers, one component of diffusers or transformers, or NVIDIA's folder with
    checkpoints/ in it, perhaps with components of diffusers beside that. A file that is not SANA's has kind "other" and
    a variant that names it. Raises MissingFileError if the path does not exist, ReadError if it cannot be read,
    CheckpointError if the file is broken or has no weights.
    """
    if isinstance(path, Checkpoint):
        return path
    path = Path(path)
    with readable(path):
        if path.exists() and not path.is_dir():
            return inspect_file(path, ema)
        folders = [path / name for name in COMPONENT_FOLDERS if (path / name / "config.json").exists()]
        if (path / "model_index.json").is_file():
            parts = [part for folder in folders for part in inspect_file(weights_file(folder)).components]
            if not parts:
                raise MissingFileError(
                    f"{path.name}: no component beside model_index.json; download the folder again, whole"
                )
            return join_parts(path, "diffusers", parts)
        if originals := original_files(path):
            transformer = inspect_file(originals[0], ema)
            # SANA-Video 2.0 comes alone. Users put the folders of its VAE and its text encoder beside checkpoints/.
            # A folder may also have only a configuration, or weights in another format.
            components = [
                inspect_file(weights_file(folder))
                for folder in folders
                if folder.name != "transformer" and any(file.suffix.lower() in SAFETENSORS for file in folder.glob("*"))
            ]
            return join_parts(path, transformer.layout, [transformer, *components]) if components else transformer
        if any((path / name).exists() for name in ("config.json", "adapter_config.json")):
            return inspect_file(weights_file(path))
        if path.is_dir():
            raise MissingFileError(
                f"{brief(path.name)}: got a folder without model_index.json, config.json or checkpoints/, expected the "
                "folder of a model; choose that folder, or download the model again, whole"
            )
        raise MissingFileError(
            f"{brief(path.name)}: no such file or folder, expected a model; check its spelling, or refresh the list"
        )


def original_files(folder: Path) -> list[Path]:
    """Return the weights in checkpoints/ of NVIDIA's folder, the preferred one first, or [] for any other folder.

    NVIDIA's repositories may have a config.json of their training code beside checkpoints/, but no weights.
    """
    if any(file.suffix.lower() in SAFETENSORS for file in folder.glob("*")):
        return []
    return sorted(folder.glob("checkpoints/*.pth")) + sorted(folder.glob("checkpoints/*.safetensors"))


def weights_file(folder: Path) -> Path:
    """Return the weights of a component's or an adapter's folder. If it has several precisions: without a suffix."""
    files = [file for file in sorted(folder.glob("*")) if file.suffix.lower() in SAFETENSORS]
    if not files:
        raise MissingFileError(
            f"{folder.name}: no .safetensors file beside its configuration; download the folder again, whole"
        )
    return next((file for file in files if "." not in SHARD.sub(r"\1", file.stem)), files[0])


def inspect_file(file: Path, ema: bool = False) -> Checkpoint:
    """Inspect a file, or all shards if it is one of several shards and their index is beside it."""
    index = None
    if shard := SHARD.match(file.stem):
        name, _, variant = shard[1].partition(".")
        indexes = [f"{shard[1]}.safetensors.index.json", f"{name}.safetensors.index.{variant}.json"]
        index = next((file.with_name(name) for name in indexes if file.with_name(name).is_file()), None)
    weights = read_sharded(index) if index else read_header(file, ema)
    groups = split_components(file, weights.headers)
    config, is_beside = None, "config" not in weights.metadata
    if not is_beside:
        config = parse_json(weights.metadata["config"], f"{shown(file)}: its config")
    else:
        beside = file.with_name("config.json")
        # A broken link is an error, not a missing configuration.
        if beside.exists() or beside.is_symlink():
            config = read_json(beside)
    parts = [recognise(file, names, weights, config, is_beside) for names in groups]
    kinds = {part.kind: part for part in parts}
    if "edit_head" in kinds and "transformer" in kinds and not architecture(kinds["transformer"].headers).edits:
        parts = [replace(part, kind="other", variant=SEQUENCE) for part in parts]
    sana_parts = [part for part in parts if part.kind != "other"]
    unread = [
        name for part, names in zip(parts, groups, strict=True) if part.kind == "other" for name in names.values()
    ]
    if sana_parts and unread:
        sana_parts[0] = with_note(sana_parts[0], f"{shown(file)}: not read: {first_few(unread)}")
    parts = sana_parts or parts
    if EMA in weights.metadata:
        note = f"{shown(file)}: also has a moving average of the weights ({EMA}); convert --ema writes it to a new file"
        parts = [with_note(part, note) for part in parts]
    return join_parts(file, "comfy", parts) if len(sana_parts) > 1 else parts[0]


def with_note(part: Checkpoint, note: str) -> Checkpoint:
    return replace(part, notes=(*part.notes, note))


def join_parts(path: Path, layout: str, parts: list[Checkpoint]) -> Checkpoint:
    """Join several components. Variant, dtype, resolution and reference are the transformer's, if there is one."""
    first = next((part for part in parts if part.kind in TRANSFORMER_KINDS), parts[0])
    return Checkpoint(
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


def split_components(file: Path, names: Iterable[str]) -> list[dict[str, str]]:
    """Return {name without the component's prefix and without wrappers: name} of each component in `file`.

    The prefixes of a LoRA are part of its names.
    """
    groups: dict[int, dict[str, str]] = {}
    names = list(names)
    if is_adapter(names):
        return [{name: name for name in names}]
    for name in names:
        inner = WRAPPERS.sub("", name)
        matches = [(number, match.end()) for number, p in enumerate(COMPONENT_PREFIXES) if (match := p.match(inner))]
        number, start = matches[0] if matches else (len(COMPONENT_PREFIXES), 0)
        first = groups.setdefault(number, {}).setdefault(inner[start:], name)
        if first != name:
            raise CheckpointError(
                f"{shown(file)}: got {brief(first)} and {brief(name)}, expected one of them; use another file"
            )
    return list(groups.values()) or [{}]


def recognise(file: Path, names: dict[str, str], weights: Weights, config: Json | None, is_beside: bool) -> Checkpoint:
    """Describe one component. `names`: {name without prefix: name in the file}.

    `config`: the configuration in the file, or beside it (`is_beside`). A folder may contain several models, and
    config.json may belong to another one. So what the file itself shows takes precedence.
    """
    kind, layout, origins = classify(names.keys() - {SAVED_CONFIG})
    if kind == "other":
        # Scripts may save the module inside of others, whose names are prefixes then.
        inner_names = {HOLDERS.sub("", inner): name for inner, name in names.items()}
        inner = classify(inner_names.keys() - {SAVED_CONFIG})
        if len(inner_names) == len(names) and inner[0] not in ("other", "lora"):
            names, (kind, layout, origins) = inner_names, inner
    # A class in the configuration is certain, a name is not.
    stated = next((one.get("_class_name") for one in ((config or {}).get(kind), config) if isinstance(one, dict)), None)
    is_causal = stated == CAUSAL_CLASS if stated in (CAUSAL_CLASS, VIDEO_CLASS) else named(LONG, LONG, file)
    is_long = kind == "video_transformer" and is_causal
    if is_long:
        kind = "other"
    headers = {}
    if kind in CHECKPOINT_KINDS and kind != "lora":
        roots = CHECKPOINT_KINDS[kind].roots | {FP8_FILE}
        origins = {target: origin for target, origin in origins.items() if target.partition(".")[0] in roots}
    for target, origin in origins.items():
        name = names[origin.name]
        header = weights.headers[name]
        if target.endswith(".comfy_quant") or math.prod(header.shape) == 1:
            # The parts of a fused layer share its format, and its scale if it has one.
            origin = origin._replace(part=0, parts=1)
        if origin.parts > 1:
            rows, *columns = header.shape or (1,)
            if rows % origin.parts:
                raise CheckpointError(
                    f"{shown(header.file)}: {brief(name)} has {rows} rows, expected {origin.parts} equal parts; use "
                    "another file"
                )
            header = header._replace(shape=(rows // origin.parts, *columns))
        headers[target], origins[target] = header, origin._replace(name=name)
    if kind in CHECKPOINT_KINDS and kind != "lora":
        check_tensors(shown(file), kind, headers)
    # An all-in-one file may have a configuration per component.
    saved = None
    if SAVED_CONFIG in names:
        content = tensor_bytes(weights, names[SAVED_CONFIG], LARGEST_CONFIG, "a configuration")
        saved = parse_json(content, f"{shown(file)}: {brief(names[SAVED_CONFIG])}")
        is_beside = False
    candidates = (saved, (config or {}).get(kind), config)
    config = next((candidate for candidate in candidates if is_config_of(candidate, kind)), None)
    notes = []
    stored = {name: weights.headers[full] for name, full in names.items() if name != SAVED_CONFIG}
    positions = stored.get("pos_embed") if kind in ("transformer", "controlnet") else None
    used = {names.get("pos_embed") if positions else "", *(origin.name for origin in origins.values())}
    if config is not None:
        config = check_config(shown(file), kind, config)
        difference = contradiction(kind, headers, config) if is_beside else ""
        if difference:
            notes.append(f"{shown(file)}: config.json beside it is of another model ({difference}) and is ignored")
            config = None
    if kind == "other":
        variant = LONGSANA if is_long else foreign_model(stored)
    else:
        variant = CHECKPOINT_KINDS[kind].variant(file, headers, config)
    is_assumed = False
    if kind == "video_transformer":
        model, width = VIDEOS[variant], headers["patch_embedding.weight"].shape[0]
        is_assumed = model.has_twin and config is None
        layers = count(headers, r"transformer_blocks\.(\d+)\.")
        if (width, layers) != (model.width, model.layers):
            # The tensors of SANA-Video 2.0 do not determine the number of softmax heads.
            heads = "softmax heads, " if model.is_video2 and config is None else ""
            notes.append(
                f"{shown(file)}: {layers} layers of width {width}, not {model.layers} of {model.width}; {heads}shift, "
                f"size and frames are as in {model.title}"
            )
    reference = ""
    if config is not None and config.get("reference") in tuple(RULES):
        # `convert` and ComfyUI's save nodes write it.
        reference = config["reference"]
    elif kind in (*TRANSFORMER_KINDS, "controlnet"):
        # diffusers has no code of SANA-Video 2.0 that a file with its names could follow.
        reference = NVIDIA if layout == "original" or VIDEO2 in headers else DIFFUSERS
    resolution, source = None, ""
    if kind in ("transformer", "controlnet"):
        patch = headers["patch_embed.proj.weight"].shape[-1]
        if config is not None and "sample_size" in config:
            resolution, source = DOWNSCALE * config["sample_size"], "config"
            evidence = resolution_of(file, positions, patch) if is_beside else None
            if evidence is not None and evidence[0] != resolution:
                notes.append(
                    f"{shown(file)}: {evidence[0]} px by its {evidence[1]}; config.json beside it has {resolution} px "
                    "and is not followed in this"
                )
                resolution, source = evidence
                config |= resolution_config(resolution)
            if "interpolation_scale" not in config:
                # The configuration is older than this argument.
                config |= resolution_config(resolution)
        else:
            resolution, source = resolution_of(file, positions, patch) or resolution_by_path(file)
    if unread := [full for name, full in names.items() if name != SAVED_CONFIG and full not in used]:
        notes.append(f"{shown(file)}: not read: {first_few(unread)}")
    sizes: Counter[torch.dtype] = Counter()
    for header in stored.values():
        sizes[header.dtype] += header.size
    return Checkpoint(
        path=file,
        kind=kind,
        variant=variant,
        layout=layout,
        dtype=sizes.most_common(1)[0][0] if sizes else torch.float32,
        size=sum(sizes.values()),
        resolution=resolution,
        resolution_from=source,
        config=config,
        headers=headers,
        origins=origins,
        weights=weights,
        reference=reference,
        is_assumed=is_assumed,
        notes=tuple(notes),
    )


def is_config_of(config: object, kind: str) -> bool:
    if not isinstance(config, dict) or kind not in CHECKPOINT_KINDS:
        return False
    architectures = config.get("architectures")
    listed = architectures[:1] if isinstance(architectures, list) else []
    return any(name in CHECKPOINT_KINDS[kind].classes for name in [config.get("_class_name"), *listed])


def follow(checkpoint: Checkpoint, reference: str) -> Checkpoint:
    """Return `checkpoint` with another reference; "auto" keeps the reference of the file.

    `checkpoint` is a transformer or a ControlNet.
    """
    check_name("reference", reference, REFERENCES)
    checkpoint = checkpoint if reference == AUTO else replace(checkpoint, reference=reference)
    if checkpoint.kind != "controlnet":
        return checkpoint
    base = {name for name in checkpoint.origins if name.startswith(f"{BASE_BLOCK}.")}
    if checkpoint.reference == NVIDIA and not base:
        download_advice = "download the whole .pth, or " if checkpoint.layout == "original" else ""
        raise CheckpointError(
            f"{checkpoint.name}: got a ControlNet without the base model's first block (blocks.0), from which NVIDIA's "
            f"starts; {download_advice}choose reference diffusers"
        )
    unused = base if checkpoint.reference == DIFFUSERS else set()
    origins = {name: origin for name, origin in checkpoint.origins.items() if name not in unused}
    headers = {name: header for name, header in checkpoint.headers.items() if name not in unused}
    return replace(checkpoint, origins=origins, headers=headers)


def classify(names: Set[str]) -> tuple[str, str, dict[str, Origin]]:
    """Return kind, layout, and the origin of each parameter of the module among `names`."""
    same = {name: Origin(name) for name in names}
    if relative(names):
        return "other", "", same
    if is_adapter(names):
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
    for layout, vae_names in VIDEO_VAES:
        if vae_names <= names:
            return "video_autoencoder", layout, same
    if {"meta_queries", "output_proj.1.weight"} <= names:
        origins = {name.replace("attn.in_proj_", "attn.in_proj."): Origin(name) for name in names}
        return "edit_head", "diffusers", origins
    bare = {name.removeprefix("model."): Origin(name) for name in names}
    if {"language_model.embed_tokens.weight", "visual.deepstack_merger_list.0.norm.weight"} <= bare.keys():
        return "qwen3_vl", "transformers", bare
    # Gemma 3 has the same norms, and also q_norm.
    if "layers.0.pre_feedforward_layernorm.weight" in bare and "layers.0.self_attn.q_norm.weight" not in bare:
        return "text_encoder", "transformers", bare
    return "other", "", same


def resolution_of(file: Path, positions: Header | None, patch: int) -> tuple[int, str] | None:
    """Return the resolution in pixels from the position embedding or the file's name, and which of them it was.

    NVIDIA's files have a position embedding of this size, even if the model does not use it. A number in the name
    counts only with a unit, as in 512px or 4Kpx, because other numbers are steps or dates.
    """
    if positions is not None:
        side = math.isqrt(positions.shape[1]) if len(positions.shape) == 3 else 0
        if not 0 < side <= MOST_CELLS:
            raise CheckpointError(
                f"{shown(file)}: pos_embed is {brief(list(positions.shape))}, expected the cells of a square image; "
                "use another file"
            )
        return DOWNSCALE * patch * side, "position embedding"
    matches = [match[0].lower() for match in RESOLUTION_WITH_UNIT.finditer(file.stem)]
    stated = {NAMED_RESOLUTIONS[match.removesuffix("px")] for match in matches}
    return (stated.pop(), "file name") if len(stated) == 1 else None


def resolution_by_path(file: Path) -> tuple[int, str]:
    """Return the first resolution in the names of the file and of its two folders, or the default, and its source."""
    for name in (file.stem, file.parent.name, file.parent.parent.name):
        if match := RESOLUTION.search(name):
            return NAMED_RESOLUTIONS[match[1].lower()], "file name"
    return DEFAULT_RESOLUTION, "assumed"


def relative(names: Iterable[str]) -> str:
    """Return the model of SANA's family that has tensors with these names, "" for none."""
    text = "\n".join(names)
    return next((label for pattern, label in RELATIVES if re.search(f"(?:{pattern})$", text, re.MULTILINE)), "")


def foreign_model(headers: Mapping[str, Header]) -> str:
    """Return a description of a file that is not SANA's. An unknown file is described by its first three names."""
    if relative_name := relative(headers):
        return relative_name
    stages = [int(match[1]) for name in headers if (match := DC_AE_STAGE.match(name))]
    first = next((header.shape for name, header in headers.items() if DC_AE_FIRST.fullmatch(name)), ())
    if stages and len(first) > 1:
        return f"a DC-AE f{2 ** max(stages)}c{first[1]} that is not SANA's"
    decoder = [header for name, header in headers.items() if name.endswith("decoder.conv_in.weight")]
    if decoder and len(decoder[0].shape) > 1:
        return f"a {'video ' * (len(decoder[0].shape) == 5)}VAE with {decoder[0].shape[1]} channels"
    for pattern, label, known_by in DAMAGED:
        missing = [name for name in known_by if name not in headers]
        # Gemma 3 has these norms, and also a q_norm.
        if missing and any(re.search(pattern, name) for name in headers) and not any("q_norm" in n for n in headers):
            return f"{label} without {missing[0]}"
    return f"tensors named {', '.join(brief(name) for name in sorted(headers)[:3])}" if headers else "no tensors"
