"""The kinds of checkpoints, a row each with the checks of a file, and the result of inspecting a checkpoint."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import torch

from ..errors import CheckpointError, MissingFileError
from ..model.known_models import GEMMA_WIDTHS, controlnet_name, variant_name
from ..runtime.text import Json, brief, first_few, shown
from .configs import (
    VIDEO2,
    architecture,
    autoencoder_config,
    controlnet_config,
    edit_head_config,
    gemma_config,
    gemma_width,
    is_lite,
    no_qwen_config,
    transformer_config,
    video_autoencoder_name,
    video_config,
    video_name,
)
from .files import FOREIGN, INCOMPLETE, read_json
from .headers import Header, Headers, Weights
from .keys import BASE_BLOCK, Origin
from .schemas import (
    AUTOENCODER_FIELDS,
    GEMMA_FIELDS,
    LARGEST_WIDTH,
    MOST_BLOCKS,
    QWEN_FIELDS,
    TRANSFORMER_FIELDS,
    VIDEO_AUTOENCODER_FIELDS,
    VIDEO_FIELDS,
    Check,
    refuse_code,
)

# Tensors of a text encoder's file that hold a tokenizer as bytes: sentencepiece's model, or JSON of tokenizers.
TOKENIZERS = ("spiece_model", "tokenizer_json")
TRANSFORMER_KINDS = ("transformer", "video_transformer")
EMPTY: Mapping = MappingProxyType({})


class CheckpointKind(NamedTuple):
    """A row of CHECKPOINT_KINDS."""

    # The name in descriptions, as in "a DC-AE".
    title: str
    # For errors that expected a file of this kind: its name, and where to get one.
    wanted: str = ""
    remedy: str = ""
    # The subfolder of a diffusers folder.
    folder: str | None = None
    # Class names that its config.json may have. The first is the usual one.
    classes: tuple[str, ...] = ()
    # A check for each field of its configuration.
    fields: Mapping[str, Check] = EMPTY
    # True: drop configuration fields that are not in `fields`, because a library may act on them. For example,
    # transformers downloads a kernel that attn_implementation names.
    drops_unknown: bool = False
    # The first parts of the names of its tensors. A file's other tensors are not read, and named in a note.
    roots: frozenset[str] = frozenset()
    # The tensors that determine its architecture, with their number of dimensions.
    tensors: Mapping[str, int] = EMPTY
    # The name of the model, from the file's path, the headers and the file's configuration.
    variant: Callable[[Path, Headers, Json | None], str] = lambda file, headers, config: ""
    # The arguments of the library's class, from the first two of these. Without arguments the library has its defaults.
    config: Callable[[str, Headers], Json] = lambda name, headers: {}
    # Whether it belongs to SANA-Video.
    is_video: bool = False


# NVIDIA's blocks that have no name of diffusers are not left out.
TRANSFORMER_ROOTS = frozenset(
    {"caption_norm", "caption_projection", "time_embed", "transformer_blocks", "blocks", "controlnet"}
)
LAST_ROOTS = frozenset({"proj_out", "scale_shift_table"})
TRANSFORMER_TENSORS = {
    "caption_projection.linear_1.weight": 2,
    "transformer_blocks.0.ff.conv_depth.weight": 4,
    "transformer_blocks.0.ff.conv_point.weight": 4,
}
VIDEO2_TENSORS = {
    "patch_embedding.weight": 5,
    "caption_projection.linear_1.weight": 2,
    "transformer_blocks.0.attn1.to_beta.weight": 2,
    "transformer_blocks.0.ff.gate_proj.weight": 2,
}
CHECKPOINT_KINDS = {
    "transformer": CheckpointKind(
        title="SANA transformer",
        wanted="a SANA transformer",
        remedy="get one from Efficient-Large-Model on Hugging Face, such as Sana_1600M_1024px_BF16_diffusers",
        folder="transformer",
        # The second class is VIBE's.
        classes=("SanaTransformer2DModel", "VIBESanaEditingModel"),
        fields=TRANSFORMER_FIELDS,
        roots=TRANSFORMER_ROOTS | LAST_ROOTS | {"patch_embed"},
        tensors={"patch_embed.proj.weight": 4, **TRANSFORMER_TENSORS},
        variant=lambda file, headers, config: variant_name(architecture(headers)),
        config=transformer_config,
    ),
    "video_transformer": CheckpointKind(
        title="SANA-Video transformer",
        wanted="a SANA-Video transformer",
        remedy="get SANA-Video_2B_480p_diffusers from Efficient-Large-Model on Hugging Face",
        folder="transformer",
        classes=("SanaVideoTransformer3DModel", "SanaVideo2Transformer3DModel"),
        fields=VIDEO_FIELDS,
        roots=TRANSFORMER_ROOTS | LAST_ROOTS | {"patch_embedding", "attn_res"},
        tensors={"patch_embedding.weight": 5, **TRANSFORMER_TENSORS},
        variant=video_name,
        config=video_config,
        is_video=True,
    ),
    "controlnet": CheckpointKind(
        title="SANA ControlNet",
        wanted="a SANA ControlNet",
        remedy="get Sana_1600M_1024px_BF16_ControlNet_HED from Efficient-Large-Model on Hugging Face",
        folder="controlnet",
        classes=("SanaControlNetModel",),
        fields=TRANSFORMER_FIELDS,
        roots=TRANSFORMER_ROOTS | {"patch_embed", "input_block", "controlnet_blocks", BASE_BLOCK},
        tensors={"patch_embed.proj.weight": 4, **TRANSFORMER_TENSORS},
        variant=lambda file, headers, config: controlnet_name(architecture(headers)),
        config=controlnet_config,
    ),
    "autoencoder": CheckpointKind(
        title="DC-AE",
        wanted="SANA's VAE, DC-AE f32c32",
        remedy="get dc-ae-f32c32-sana-1.1-diffusers from mit-han-lab on Hugging Face",
        folder="vae",
        classes=("AutoencoderDC",),
        fields=AUTOENCODER_FIELDS,
        roots=frozenset({"encoder", "decoder"}),
        tensors={"decoder.conv_in.weight": 4},
        variant=lambda file, headers, config: (
            f"dc-ae-{'lite-' * is_lite(headers)}f32c{headers['decoder.conv_in.weight'].shape[1]}"
        ),
        config=lambda name, headers: autoencoder_config(headers),
    ),
    "video_autoencoder": CheckpointKind(
        title="video VAE",
        wanted="SANA-Video's VAE",
        remedy="get SANA-Video_2B_480p_diffusers from Efficient-Large-Model on Hugging Face, whole",
        folder="vae",
        classes=("AutoencoderKLWan", "AutoencoderKLLTX2Video"),
        fields=VIDEO_AUTOENCODER_FIELDS,
        drops_unknown=True,
        # The names of diffusers, of Wan and of Lightricks.
        roots=frozenset(
            {
                *("encoder", "decoder", "quant_conv", "post_quant_conv", "latents_mean", "latents_std"),
                *("conv1", "conv2", "per_channel_statistics"),
            }
        ),
        variant=lambda file, headers, config: video_autoencoder_name(headers),
        is_video=True,
    ),
    "text_encoder": CheckpointKind(
        title="Gemma 2 text encoder",
        wanted="SANA's text encoder, Gemma-2-2b-it",
        remedy="get gemma-2-2b-it from Efficient-Large-Model on Hugging Face; no account is needed",
        folder="text_encoder",
        classes=("Gemma2Model", "Gemma2ForCausalLM"),
        fields=GEMMA_FIELDS,
        drops_unknown=True,
        roots=frozenset({"embed_tokens", "layers", "norm", *TOKENIZERS}),
        tensors={
            "embed_tokens.weight": 2,
            "layers.0.pre_feedforward_layernorm.weight": 1,
            "layers.0.mlp.gate_proj.weight": 2,
            "layers.0.self_attn.q_proj.weight": 2,
            "layers.0.self_attn.k_proj.weight": 2,
        },
        variant=lambda file, headers, config: GEMMA_WIDTHS.get(
            gemma_width(headers), f"gemma-2-custom-{gemma_width(headers)}"
        ),
        config=lambda name, headers: gemma_config(headers),
    ),
    # The two parts of VIBE that SANA does not have.
    "qwen3_vl": CheckpointKind(
        title="Qwen3-VL text encoder",
        wanted="VIBE's text encoder, Qwen3-VL",
        remedy="get VIBE-Image-Edit from iitolstykh on Hugging Face, whole",
        folder="text_encoder",
        classes=("Qwen3VLForConditionalGeneration",),
        fields=QWEN_FIELDS,
        drops_unknown=True,
        roots=frozenset({"language_model", "visual"}),
        tensors={"language_model.embed_tokens.weight": 2},
        variant=lambda file, headers, config: f"qwen3-vl-{headers['language_model.embed_tokens.weight'].shape[1]}",
        config=no_qwen_config,
    ),
    "edit_head": CheckpointKind(
        title="VIBE edit head",
        wanted="VIBE's edit head",
        remedy="get VIBE-Image-Edit from iitolstykh on Hugging Face, whole",
        roots=frozenset({"meta_queries", "input_proj", "attn_blocks", "output_proj"}),
        tensors={
            "meta_queries": 2,
            "input_proj.weight": 2,
            "attn_blocks.0.mlp.fc1.weight": 2,
            "output_proj.1.weight": 2,
        },
        variant=lambda file, headers, config: "vibe",
        config=lambda name, headers: edit_head_config(headers),
    ),
    "lora": CheckpointKind(title="LoRA", wanted="a LoRA", remedy="choose a LoRA trained on SANA"),
    "pipeline": CheckpointKind(title="SANA pipeline"),
}
# Subfolders of a diffusers folder, each once.
COMPONENT_FOLDERS = tuple(dict.fromkeys(row.folder for row in CHECKPOINT_KINDS.values() if row.folder is not None))
BLOCK_NUMBER = re.compile(r"\.0*(\d+)(?=\.)", re.ASCII)


def check_config(name: str, kind: str, config: Json) -> Json:
    """Return the fields of `config` that the library's class for `kind` may receive. Errors name the file `name`."""
    refuse_code(name, config)
    row = CHECKPOINT_KINDS[kind]
    if kind == "video_autoencoder" and type(finest_first := config.get("decoder_upsample_type")) is list:
        # The folder of SANA-Video 2.0's VAE has this field from before diffusers named and ordered it.
        config = {"upsample_type": finest_first[::-1], **config}
    for key, check in row.fields.items():
        if key in config and not check(config[key]):
            raise CheckpointError(
                f"{name}: its config has {key}: {brief(config[key])}, which no SANA model has; use the model's own "
                "config.json"
            )
    return {key: config[key] for key in row.fields if key in config} if row.drops_unknown else dict(config)


def check_tensors(name: str, kind: str, headers: Mapping[str, Header]) -> None:
    """Check the tensors that determine the architecture, and the number of blocks."""
    for tensor, dimensions in (VIDEO2_TENSORS if VIDEO2 in headers else CHECKPOINT_KINDS[kind].tensors).items():
        if tensor not in headers:
            parts = [part for part in headers if part.startswith(tensor.removesuffix("weight")) and part != tensor]
            parts = [part for part in parts if not part.endswith(".bias")]
            but, remedy = (f", but {first_few(parts)}", FOREIGN) if parts else ("", INCOMPLETE)
            raise CheckpointError(f"{name}: no {tensor}{but}; {remedy}")
        shape = headers[tensor].shape
        if len(shape) != dimensions or not all(0 < side <= 10 * LARGEST_WIDTH for side in shape):
            raise CheckpointError(
                f"{name}: {tensor} is {brief(list(shape))}, expected {dimensions} dimensions; use another file"
            )
    # Nine digits are enough to see that a number is too large, and quick to convert.
    numbers = (int(digits[:9]) for digits in BLOCK_NUMBER.findall("\n".join(headers)))
    blocks = max(numbers, default=0) + 1
    if blocks > MOST_BLOCKS:
        raise CheckpointError(f"{name}: got {blocks} blocks, expected at most {MOST_BLOCKS}; use another file")


# Tensors of a quantised layer beside its weight: the last part of their names in files, and ComfyUI's name.
QUANTISED_PARTS = {
    **{name: name for name in ("comfy_quant", "weight_scale", "weight_scale_2", "input_scale", "pre_quant_scale")},
    "scale_weight": "weight_scale",
    "weight_scale_inv": "weight_scale",
    "scale_input": "input_scale",
}
# The tensor by which older files of ComfyUI say that their layers are in fp8 with scales.
FP8_FILE = "scaled_fp8"


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint, or one component of it, as its headers describe it."""

    path: Path
    # A key of CHECKPOINT_KINDS, or "other".
    kind: str
    # The name of the model, or for kind "other", a description of the tensors.
    variant: str
    # diffusers, original, transformers, or comfy for a file with several components.
    layout: str
    # The dtype of most bytes.
    dtype: torch.dtype
    # Bytes of all tensors.
    size: int
    # Pixels of the training images' sides, and the source of that number: config, position embedding, file name or
    # assumed.
    resolution: int | None = None
    resolution_from: str = ""
    # The library's configuration, from a file beside the weights or from the file itself.
    config: Json | None = None
    # The headers by the parameter names of the library's module.
    headers: Headers = field(default_factory=dict, repr=False)
    # By the same names: the tensor in the file that has the parameter.
    origins: Mapping[str, Origin] = field(default_factory=dict, repr=False)
    weights: Weights = field(default=Weights({}, {}), repr=False)
    # The components of a pipeline.
    parts: tuple[Checkpoint, ...] = ()
    # A key of RULES: the codebase that the file follows. Text encoders: how prompts are read.
    reference: str = ""
    # Another released model has the same tensors, so `variant` is a guess by the name of the file.
    is_assumed: bool = False
    # Lines for the user: a config.json that was ignored, or an unused moving average.
    notes: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return shown(self.path) if self.path.is_file() else self.path.name

    @property
    def quantised(self) -> bool:
        return any(
            name.rpartition(".")[2] in QUANTISED_PARTS
            or (name.endswith(".weight") and not header.dtype.is_floating_point)
            for name, header in self.headers.items()
        )

    @property
    def parameters(self) -> int:
        return sum(math.prod(header.shape) for header in self.headers.values())

    @property
    def components(self) -> tuple[Checkpoint, ...]:
        return self.parts or (self,)

    @property
    def transformer(self) -> Checkpoint | None:
        return next((part for part in self.components if part.kind in TRANSFORMER_KINDS), None)

    @property
    def is_video(self) -> bool:
        """Whether it is a component of SANA-Video, or a pipeline with a transformer of SANA-Video."""
        row = CHECKPOINT_KINDS.get((self.transformer or self).kind)
        return row is not None and row.is_video

    @property
    def description(self) -> str:
        if self.kind == "other":
            return self.variant
        title = f"a {CHECKPOINT_KINDS[self.kind].title}"
        variant = f"{self.variant}, assumed from the file's name" if self.is_assumed else self.variant
        return f"{title} ({variant})" if variant else title

    @property
    def scheduler_file(self) -> Path | None:
        """The scheduler's configuration in the diffusers folder of this transformer, or None."""
        folder = self.path.absolute().parent
        file = folder.parent / "scheduler" / "scheduler_config.json"
        return file if folder.name == CHECKPOINT_KINDS["transformer"].folder and file.exists() else None

    @cached_property
    def scheduler_config(self) -> Json | None:
        """The content of `scheduler_file`. It is read once."""
        return None if self.scheduler_file is None else read_json(self.scheduler_file)


# A checkpoint, or the path of one. `inspect_checkpoint` turns it into a checkpoint.
Source = str | Path | Checkpoint


def find_part(checkpoint: Checkpoint, *kinds: str) -> Checkpoint:
    """Return the first component of one of `kinds`. Errors are about the first of `kinds`."""
    for part in checkpoint.components:
        if part.kind in kinds:
            return part
    row = CHECKPOINT_KINDS[kinds[0]]
    if (checkpoint.path / "model_index.json").is_file() and row.folder is not None:
        in_folder = [part for part in checkpoint.parts if part.path.parent == checkpoint.path / row.folder]
        # A pipeline has no ControlNet unless it has its folder.
        if not in_folder and (kinds[0] != "controlnet" or (checkpoint.path / row.folder).exists()):
            raise MissingFileError(
                f"{checkpoint.name}: no config.json in {checkpoint.name}/{row.folder}; download the folder again, whole"
            )
        checkpoint = in_folder[0] if in_folder else checkpoint
    descriptions = ", ".join(part.description for part in checkpoint.components)
    raise CheckpointError(f"{checkpoint.name}: not {row.wanted}: found {descriptions}; {row.remedy}")
