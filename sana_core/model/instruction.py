"""VIBE's reading of an instruction: Qwen3-VL over the image, the sentence and the meta queries, then the edit head."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from ..errors import InputError
from ..runtime.checks import check_text
from .text import Tokenizer

if TYPE_CHECKING:
    from transformers import Qwen3VLModel

# The chat template of Qwen3-VL, and VIBE's sentences in it.
TEMPLATE = "<|im_start|>user\n{}<|im_end|>\n"
IMAGE_TOKEN = "<|image_pad|>"
EDIT = f"<|vision_start|>{IMAGE_TOKEN}<|vision_end|>what will this image be like if {{}}"
DRAW = "generate the image by description: {}"
SPECIAL = ("<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", IMAGE_TOKEN)
# Pixels of the image that Qwen3-VL reads, and the side of its patches. A token has 2 x 2 patches.
FEWEST_PIXELS, MOST_PIXELS = 352 * 352, 672 * 672
PATCH, MERGED = 16, 2
LONGEST_RATIO = 200


class InstructionReader(NamedTuple):
    """The tokenizer, the model and the head that make embeddings of an instruction."""

    tokenizer: Tokenizer
    model: Qwen3VLModel
    head: EditHead


def image_patches(image: torch.Tensor) -> tuple[torch.Tensor, tuple[int, int]]:
    """Return the patches [N, 1536] of an image, uint8 [3, H, W], that Qwen3-VL reads, and their rows and columns.

    The image is scaled to between FEWEST_PIXELS and MOST_PIXELS. Raises InputError for an extreme aspect ratio.
    """
    sides = image.shape[1:]
    if max(sides) > LONGEST_RATIO * min(sides):
        raise InputError(
            f"image: got {sides[1]} x {sides[0]}, expected an aspect ratio up to {LONGEST_RATIO}; cut the image"
        )
    cell = PATCH * MERGED
    size = [round(side / cell) * cell for side in sides]
    scale = math.sqrt(math.prod(sides) / MOST_PIXELS), math.sqrt(FEWEST_PIXELS / math.prod(sides))
    if math.prod(size) > MOST_PIXELS:
        size = [max(cell, math.floor(side / scale[0] / cell) * cell) for side in sides]
    elif math.prod(size) < FEWEST_PIXELS:
        size = [math.ceil(side * scale[1] / cell) * cell for side in sides]
    pixels = F.interpolate(image[None], size, mode="bicubic", antialias=True).float() / 127.5 - 1
    rows, columns = size[0] // PATCH, size[1] // PATCH
    # Qwen3-VL reads two frames in each patch. An image has the same frame twice.
    pairs = pixels.repeat(2, 1, 1, 1).unflatten(3, (columns // MERGED, MERGED, PATCH))
    pairs = pairs.unflatten(2, (rows // MERGED, MERGED, PATCH))
    return pairs.permute(2, 5, 3, 6, 1, 0, 4, 7).flatten(0, 3).flatten(1), (rows, columns)


def instruction_ids(tokenizer: Tokenizer, text: str, has_image: bool) -> tuple[list[int], int | None]:
    """Return the token ids of an instruction, and the position of the image's token if there is an image.

    Raises InputError for characters that cannot be encoded, and for the image's token in the text.
    """
    check_text("text", text)
    ids = tokenizer.encode(TEMPLATE.format((EDIT if has_image else DRAW).format(text.strip())))
    places = [place for place, token in enumerate(ids) if token == tokenizer.find(IMAGE_TOKEN)]
    if len(places) != has_image:
        raise InputError(f"text: got {IMAGE_TOKEN}, which stands for an image; leave it out")
    return ids, places[0] if places else None


@torch.no_grad()
def encode_instruction(
    reader: InstructionReader,
    text: str,
    image: torch.Tensor | None = None,
    device: str | torch.device | None = None,
) -> torch.Tensor:
    """Return embeddings [1, queries, C] of the instruction `text` for an image, uint8 [3, H, W].

    Without an image, `text` describes the image to generate. `device` None: the device of the head.
    """
    model, head = reader.model, reader.head
    device = head.meta_queries.device if device is None else device
    ids, place = instruction_ids(reader.tokenizer, text, image is not None)
    masks = {}
    length = len(ids) + len(head.meta_queries)
    positions = torch.arange(length).expand(3, -1)
    if image is not None and place is not None:
        patches, (rows, columns) = image_patches(image.cpu())
        rows, columns = rows // MERGED, columns // MERGED
        seen = model.visual(
            patches.to(device, model.visual.dtype),
            grid_thw=torch.tensor([[1, rows * MERGED, columns * MERGED]], device=device),
        )
        # transformers 4 returns a tuple.
        merged, deepstack = seen if isinstance(seen, tuple) else (seen.pooler_output, seen.deepstack_features)
        ids[place : place + 1] = [ids[place]] * len(merged)
        length += len(merged) - 1
        tokens = torch.arange(rows * columns)
        cells = torch.stack([torch.zeros_like(tokens), tokens // columns, tokens % columns])
        # The image takes one position for each token of its longer side.
        after = torch.arange(length - place - len(merged)) + place + max(rows, columns)
        positions = torch.cat([positions[:, :place], place + cells, after.expand(3, -1)], 1)
        mask = torch.zeros(1, length, dtype=torch.bool, device=device)
        mask[:, place : place + len(merged)] = True
        masks = {"visual_pos_masks": mask, "deepstack_visual_embeds": deepstack}
    embeds = model.language_model.embed_tokens(torch.tensor([ids], device=device))
    if masks:
        embeds = embeds.masked_scatter(mask[:, : len(ids), None], merged.to(embeds))
    states = model.language_model(
        inputs_embeds=torch.cat([embeds, head.meta_queries.to(embeds)[None]], 1),
        # With a mask, the library does not take the positions for several joined texts.
        attention_mask=torch.ones(1, length, dtype=torch.bool, device=device),
        position_ids=positions[:, None].to(device),
        use_cache=False,
        **masks,
    ).last_hidden_state
    return head(states[:, len(ids) :])


@torch.no_grad()
def empty_instruction(head: EditHead, like: torch.Tensor) -> torch.Tensor:
    """Return the embeddings [1, queries, C] of no instruction, in the dtype and on the device of `like`."""
    return head(torch.zeros_like(head.meta_queries).to(like)[None])


# Of all released edit heads. The shapes do not show it.
HEADS = 16
# The feed-forward has this many times the width of the hidden states.
EXPANSION = 4


class GatedLinear(nn.Module):
    """The feed-forward of a block, SwiGLU."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(width, EXPANSION * width)
        self.fc3 = nn.Linear(width, EXPANSION * width)
        self.fc2 = nn.Linear(EXPANSION * width, width)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return self.fc2(F.silu(self.fc1(states)) * self.fc3(states))


class FusedAttention(nn.Module):
    """The attention of torch.nn.MultiheadAttention, from layers that ComfyUI can cast and offload."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.in_proj, self.out_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        parts = [part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.in_proj(states).chunk(3, dim=-1)]
        return self.out_proj(F.scaled_dot_product_attention(*parts).transpose(1, 2).flatten(2))


class HeadBlock(nn.Module):
    """A transformer block with norms before its two parts."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.input_norm, self.attn = nn.LayerNorm(width), FusedAttention(width)
        self.output_norm, self.mlp = nn.LayerNorm(width), GatedLinear(width)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        states = states + self.attn(self.input_norm(states))
        return states + self.mlp(self.output_norm(states))


class EditHead(nn.Module):
    """The meta queries [queries, width], and the head. Its parameters have VIBE's names, except for `attn.in_proj`."""

    def __init__(self, queries: int, width: int, hidden: int, output: int, layers: int) -> None:
        super().__init__()
        self.meta_queries = nn.Parameter(torch.zeros(queries, width))
        self.input_proj = nn.Linear(width, hidden)
        self.attn_blocks = nn.Sequential(*(HeadBlock(hidden) for _ in range(layers)))
        self.output_proj = nn.Sequential(nn.LayerNorm(hidden), nn.Linear(hidden, output))

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """Return embeddings [B, queries, output] for `states` [B, queries, width]. Zeros are the negative prompt."""
        return self.output_proj(self.attn_blocks(self.input_proj(states + self.meta_queries.to(states))))
