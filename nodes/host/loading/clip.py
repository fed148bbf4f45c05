"""SANA's text encoder, and VIBE's, as ComfyUI's CLIP."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import comfy.model_management
import comfy.ops
import comfy.sd
import comfy.supported_models_base
import comfy.utils
import node_helpers
import torch
from tqdm.auto import tqdm

from ....sana_core.checkpoints import find_part, inspect_checkpoint
from ....sana_core.checkpoints.checkpoint import Source
from ....sana_core.checkpoints.generation import text_reference
from ....sana_core.checkpoints.load import instruction_parts
from ....sana_core.checkpoints.tokenizer import load_qwen_tokenizer, load_tokenizer
from ....sana_core.edit import resize
from ....sana_core.errors import InputError
from ....sana_core.model.instruction import InstructionReader, empty_instruction, encode_instruction, instruction_ids
from ....sana_core.model.known_models import edit_size
from ....sana_core.model.latents import DOWNSCALE
from ....sana_core.model.reference import AUTO, NVIDIA
from ....sana_core.model.text import (
    MAX_TOKENS,
    Placement,
    TokenizedPrompt,
    Tokenizer,
    most_likely,
    read_prompt,
    read_request,
    select_tokens,
    stop_tokens,
    write_tokens,
)
from ..compat import IMAGE_GUIDANCE, INSTRUCTION, pixeldit_tokenizer, remember_loader
from ..file_stats import Reloader
from ..report import warn
from ..sampling.core_nodes import ENCODED, no_effect
from .weights import LookupPatcher, config_tensor, keep_on_device, load_component, wide_dtype

if TYPE_CHECKING:
    from transformers import Gemma2Model, PreTrainedModel

TEXT_KEY = "gemma2_2b"
# Inputs that Gemma 2 cannot read. Newer versions of Generate Text have several images.
MEDIA = ("image", "images", "image_embeds", "video", "audio")
# Options that change nothing for any text: Generate Text pads to at least one token, and other nodes forbid no tokens.
HARMLESS = ("min_length", "prevent_empty_text")


class SanaTokenizer:
    """Text to (token, weight) pairs. Weights are always 1: SANA reads brackets as brackets."""

    def __init__(self, tokenizer: Tokenizer, config: dict, reference: str) -> None:
        """`config` is the config of Gemma 2. `reference` is the codebase whose handling of prompts is used."""
        self.tokenizer = tokenizer
        self.config = {**config, "reference": reference}
        self.reference = reference

    def tokenize_with_weights(
        self,
        text: str,
        return_word_ids: bool = False,
        instruction: bool | None = None,
        skip_template: bool | None = None,
        system_prompt: str | None = None,
        **options,
    ) -> dict[str, list[list[tuple]]]:
        """Return the tokens of `text`: a prompt for SANA, or a request that Gemma 2 answers if `skip_template` is set.

        `instruction` None: a prompt gets SANA's instruction, and an empty text, which means no prompt, does not.
        `options` are inputs for other text encoders.
        """
        check_options(options)
        if skip_template is not None:
            ids = read_request(self.tokenizer, text, not skip_template, system_prompt or "")
            return {TEXT_KEY: [[(token, 1.0) for token in ids]]}
        if system_prompt:
            warn(no_effect("system_prompt"))
        instruction = bool(text.strip()) if instruction is None else instruction
        reading = read_prompt(self.tokenizer.encode, text, instruction, MAX_TOKENS, self.reference)
        if reading.note:
            warn(reading.note)
        return token_pairs(reading, self.tokenizer.pad_token, (0,) if return_word_ids else ())

    def decode(self, token_ids: list[int], **kwargs) -> str:
        """Return the text of token ids that `SanaTextModel.generate` has returned."""
        return self.tokenizer.decode(token_ids)

    def state_dict(self) -> dict:
        """Return the tokenizer and the config as tensors, which ComfyUI saves in the file of the weights.

        With the prefix TEXT_KEY, CLIPSave writes them to the file of the weights.
        """
        content = torch.frombuffer(bytearray(self.tokenizer.content), dtype=torch.uint8)
        tensors = {self.tokenizer.kind: content, **config_tensor("text_encoder", self.config)}
        return {f"{TEXT_KEY}.{name}": tensor for name, tensor in tensors.items()}


def token_pairs(reading: TokenizedPrompt, pad_token: int, tail: tuple = ()) -> dict[str, list[list[tuple]]]:
    """Convert the result of `read_prompt` to the tokens that ComfyUI's CLIP expects."""
    ids = reading.ids + [pad_token] * (reading.length - len(reading.ids))
    return {TEXT_KEY: [[(token, 1.0, *tail) for token in ids]]}


def check_options(options: dict) -> None:
    """Write under the node which `options` have no effect on Gemma 2."""
    for name, value in options.items():
        is_unset = value is None or (isinstance(value, (bool, str, list, tuple, dict)) and not value)
        if is_unset or name in HARMLESS:
            continue
        if name in MEDIA:
            raise InputError(f"{name}: Gemma 2 reads text alone; disconnect it")
        warn(no_effect(name))


class HostTextModel(torch.nn.Module):
    """The options that ComfyUI's CLIP sets on a text encoder, whose weights are in `model`."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.dtypes = {model.dtype}
        self.execution_device = model.device

    def reset_clip_options(self) -> None:
        self.execution_device = next(self.parameters()).device

    def set_clip_options(self, options: dict) -> None:
        self.execution_device = options.get("execution_device", self.execution_device)
        if options.get("layer") is not None:
            warn(no_effect("CLIPSetLastLayer"))


def make_clip(
    tokenizer: object, model: torch.nn.Module, dtype: torch.dtype, disable_dynamic: bool = False
) -> comfy.sd.CLIP:
    """Return the CLIP of `tokenizer` and `model`, whose weights are on the CPU in `dtype`."""
    target = comfy.supported_models_base.ClipTarget(lambda **_: tokenizer, lambda **_: model)
    options = {"dtype": dtype, "initial_device": torch.device("cpu")}
    clip = comfy.sd.CLIP(target, model_options=options, disable_dynamic=disable_dynamic)
    if not clip.patcher.is_dynamic():
        # ComfyUI's CLIP creates the patcher itself.
        clip.patcher.__class__ = LookupPatcher
    keep_on_device(clip.patcher)
    return clip


def text_dtypes(device: torch.device) -> tuple[torch.dtype | None, torch.dtype]:
    """Return the dtypes in which Gemma 2 is stored for `device`, and in which it computes.

    A device without bf16 computes in fp32. It converts one layer at a time, because fp32 weights would take 10.5 GB.
    For a CPU the first dtype is None: bf16 if it represents the file's weights exactly, else the file's dtype.
    """
    compute = wide_dtype(device)
    if comfy.model_management.is_device_cpu(device):
        return None, compute
    return torch.bfloat16 if comfy.model_management.supports_cast(device, torch.bfloat16) else compute, compute


class SanaTextModel(HostTextModel):
    """Gemma 2 as ComfyUI's CLIP calls it."""

    def __init__(self, gemma: Gemma2Model, tokenizer: Tokenizer) -> None:
        super().__init__(gemma)
        # ComfyUI's checkpoints and LoRAs have these names for Gemma 2.
        self.gemma2_2b = torch.nn.ModuleDict({"transformer": torch.nn.ModuleDict({"model": gemma})})
        self.pad_token = tokenizer.pad_token
        self.stop_tokens = stop_tokens(tokenizer, gemma)

    @property
    def gemma(self) -> Gemma2Model:
        return self.gemma2_2b["transformer"]["model"]

    def encode_token_weights(self, pairs: dict[str, list[list[tuple]]]) -> tuple[torch.Tensor, None, dict]:
        """Return embeddings [B, 300, C], no pooled output, and the mask."""
        ids = torch.tensor([[pair[0] for pair in row] for row in pairs[TEXT_KEY]], device=self.execution_device)
        mask = (ids != self.pad_token).long()
        states = self.gemma(ids, attention_mask=mask).last_hidden_state
        device = comfy.model_management.intermediate_device()
        cond = select_tokens(states, MAX_TOKENS).float().to(device)
        return cond, None, {"attention_mask": select_tokens(mask, MAX_TOKENS).to(device), ENCODED: cond}

    def generate(
        self, pairs: dict[str, list[list[tuple]]], do_sample: bool, max_length: int, mtp: bool = False, **options
    ) -> list[int]:
        """Return at most `max_length` token ids that Gemma 2 writes after a text. Cancel is polled for each token.

        `mtp` is for models that predict several tokens at once. It has no effect on Gemma 2.
        """
        bar = comfy.utils.ProgressBar(max_length)
        choose = token_sampler(**options) if do_sample else most_likely
        with tqdm(total=max_length, desc="Writing", disable=not comfy.utils.PROGRESS_BAR_ENABLED) as line:

            def report() -> None:
                comfy.model_management.throw_exception_if_processing_interrupted()
                bar.update(1)
                line.update()

            ids = [pair[0] for pair in pairs[TEXT_KEY][0]]
            placed = Placement(self.execution_device, self.gemma.embed_tokens.logits)
            return write_tokens(self.gemma, ids, max_length, self.stop_tokens, choose, report, placed)


def token_sampler(seed: int | None = None, **options) -> Callable[[torch.Tensor, Sequence[int]], int]:
    """Return a function that samples tokens with ComfyUI's options for its own models.

    It samples on the CPU, so that a seed gives the same tokens on all devices.
    """
    from comfy.text_encoders.llama import BaseGenerate

    generator = torch.Generator().manual_seed(seed or 0)

    def choose(logits: torch.Tensor, written: Sequence[int]) -> int:
        rules = {**options, "token_history": written, "generator": generator}
        return int(BaseGenerate().sample_token(logits[None], **rules))

    return choose


def load_clip(source: Source, reference: str = AUTO, disable_dynamic: bool = False) -> comfy.sd.CLIP:
    """Return the CLIP of a checkpoint. `reference`: how to read prompts, see `text_reference`."""
    checkpoint = inspect_checkpoint(source)
    path = checkpoint.path
    reload = Reloader(lambda *args, **options: load_clip(*args, **options).patcher, path)
    part = find_part(checkpoint, "text_encoder")
    tokenizer, reading = load_tokenizer(part), text_reference(checkpoint, reference)
    device = comfy.model_management.text_encoder_device()
    dtype, compute = text_dtypes(device)
    operations = comfy.ops.disable_weight_init if dtype == compute else comfy.ops.manual_cast
    if part.quantised:
        dtype, operations = dtype or compute, comfy.ops.mixed_precision_ops({}, compute, full_precision_mm=True)
    gemma = load_component(part, dtype, compute, operations)
    sana_tokenizer = SanaTokenizer(tokenizer, gemma.config.to_dict(), reading)
    clip = make_clip(sana_tokenizer, SanaTextModel(gemma, tokenizer), gemma.dtype, disable_dynamic)
    remember_loader(clip.patcher, reload, path, reference)
    return clip


def encode(clip: comfy.sd.CLIP, text: str, instruction: bool) -> tuple[list, TokenizedPrompt]:
    """Return the CONDITIONING of `text`, with or without SANA's instruction, and the tokenized prompt.

    `clip` is SANA's CLIP, or the CLIP of ComfyUI's CLIPLoader with type pixeldit, which has the same Gemma 2.
    """
    reference = NVIDIA
    if isinstance(clip.tokenizer, SanaTokenizer):
        split, pad_token = clip.tokenizer.tokenizer.encode, clip.tokenizer.tokenizer.pad_token
        reference = clip.tokenizer.reference
    elif theirs := pixeldit_tokenizer(clip):
        # ComfyUI's tokenization for pixeldit would add the instruction to negative prompts too.
        split, pad_token = theirs
    else:
        raise InputError(
            f"clip: got {type(clip.cond_stage_model).__name__}, expected SANA's Gemma 2; "
            "connect SANA Loader or SANA Load Text Encoder, for VIBE use SANA Edit or CLIP Text Encode"
        )
    reading = read_prompt(split, text, instruction, MAX_TOKENS, reference)
    return clip.encode_from_tokens_scheduled(token_pairs(reading, pad_token)), reading


def encode_list(clip: comfy.sd.CLIP, prompts: list[str], instruction: bool) -> tuple[list, list[str]]:
    """Return the CONDITIONING of `prompts` with one row per prompt, and a line for each prompt that was cut.

    The row of a prompt does not depend on the other prompts.
    """
    rows, notes = [], []
    for number, prompt in enumerate(prompts, 1):
        comfy.model_management.throw_exception_if_processing_interrupted()
        ((embeds, options),), reading = encode(clip, prompt, instruction)
        if reading.note:
            notes.append(f"prompt {number}: {reading.note}")
        rows.append((embeds, options["attention_mask"]))
    embeds, mask = (torch.cat(parts) for parts in zip(*rows, strict=True))
    return [[embeds, {**options, "attention_mask": mask, ENCODED: None}]], notes


EDIT_KEY = "qwen3_vl"


class EditTokenizer:
    """A sentence and an image to one "token", because the number of the image's tokens is known only to the model."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer

    def tokenize_with_weights(self, text: str, return_word_ids: bool = False, image=None, images=(), **options) -> dict:
        """Return {EDIT_KEY: [[((text, pixels), 1.0)]]}. An empty text without an image means no instruction.

        `image` or one of `images` is an IMAGE [1, H, W, 3].
        """
        all_images = [*([] if image is None else [image]), *(images or ())]
        if len(all_images) > 1 or any(len(one) > 1 for one in all_images):
            raise InputError(
                f"image: got {sum(map(len, all_images))} images, expected one, which VIBE edits; choose one"
            )
        for name, value in options.items():
            if value:
                warn(no_effect(name))
        instruction_ids(self.tokenizer, text, bool(all_images))
        return {EDIT_KEY: [[((text, levels_of(all_images[0]) if all_images else None), 1.0, *(0,) * return_word_ids)]]}

    def state_dict(self) -> dict:
        """Raise InputError. CLIPSave and CheckpointSave call this before they write a file, which no loader reads."""
        raise InputError("clip: got VIBE's CLIP, expected SANA's Gemma 2 to save; keep the folder VIBE-Image-Edit")


class EditTextModel(HostTextModel):
    """Qwen3-VL and the edit head as ComfyUI's CLIP calls them."""

    def __init__(self, qwen: torch.nn.Module, head: torch.nn.Module, tokenizer: Tokenizer) -> None:
        super().__init__(qwen)
        self.qwen3_vl, self.edit_head = qwen, head
        self.tokenizer = tokenizer

    def encode_token_weights(self, pairs: dict) -> tuple[torch.Tensor, None, dict]:
        """Return embeddings [1, queries, C], no pooled output, and the mark of VIBE's embeddings."""
        text, image = pairs[EDIT_KEY][0][0][0]
        if image is None and not text.strip():
            like = torch.empty(0, dtype=self.qwen3_vl.visual.dtype, device=self.execution_device)
            cond = empty_instruction(self.edit_head, like)
        else:
            reader = InstructionReader(self.tokenizer, self.qwen3_vl, self.edit_head)
            cond = encode_instruction(reader, text, image, self.execution_device)
        return cond.float().to(comfy.model_management.intermediate_device()), None, {INSTRUCTION: True}


def levels_of(image: torch.Tensor) -> torch.Tensor:
    """Return the first of an IMAGE [B, H, W, 3 or 4] as uint8 [3, H, W] on the CPU, without alpha."""
    return (image[0, :, :, :3].clamp(0, 1) * 255).round().to(torch.uint8).movedim(-1, 0).cpu()


def load_edit_clip(source: Source, disable_dynamic: bool = False) -> comfy.sd.CLIP:
    checkpoint = inspect_checkpoint(source)
    reload = Reloader(lambda *args, **options: load_edit_clip(*args, **options).patcher, checkpoint.path)
    part, head_part = instruction_parts(checkpoint)
    tokenizer = load_qwen_tokenizer(part)
    device = comfy.model_management.text_encoder_device()
    dtype, compute = text_dtypes(device)
    operations = comfy.ops.disable_weight_init if dtype == compute else comfy.ops.manual_cast
    head = load_component(head_part, dtype, compute, operations)
    qwen = load_component(part, dtype, compute, operations)
    model = EditTextModel(qwen, head, tokenizer)
    clip = make_clip(EditTokenizer(tokenizer), model, qwen.dtype, disable_dynamic)
    remember_loader(clip.patcher, reload, checkpoint.path)
    return clip


def encode_edit(
    clip: comfy.sd.CLIP, vae: comfy.sd.VAE, image: torch.Tensor, text: str, image_guidance: float
) -> tuple[list, list, dict]:
    """Return positive and negative CONDITIONING of an edit, and the empty LATENT of its size."""
    if not isinstance(clip.tokenizer, EditTokenizer):
        got = type(clip.cond_stage_model).__name__
        raise InputError(f"clip: got {got}, expected VIBE's Qwen3-VL; load VIBE-Image-Edit with SANA Loader")
    if image.ndim != 4 or not all(image.shape) or image.shape[-1] not in (3, 4):
        raise InputError(f"image: got {list(image.shape)}, expected [1, height, width, 3 or 4]; connect an IMAGE")
    size = edit_size(image.shape[2], image.shape[1])
    tokens = clip.tokenize(text, images=[image])
    pixels = resize(levels_of(image), size).movedim(0, -1)[None] / 255
    latents = vae.encode(pixels)
    values = {"concat_latent_image": latents, IMAGE_GUIDANCE: image_guidance}
    positive, negative = (
        node_helpers.conditioning_set_values(clip.encode_from_tokens_scheduled(one), values)
        for one in (tokens, clip.tokenize(""))
    )
    return positive, negative, {"samples": torch.zeros_like(latents), "downscale_ratio_spacial": DOWNSCALE}
