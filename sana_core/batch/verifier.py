"""The verifier: reads hidden states of an early step, and predicts how well a draft will show its prompt, undecoded.

After Bucciarelli et al., "Tiny Inference-Time Scaling with Latent Verifiers" (2026). Theirs for SANA-Sprint is a
language model of half a billion parameters behind block 7, ours a small network for one transformer.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from ..checkpoints.files import REDOWNLOAD, Json, brief, read_json
from ..checkpoints.headers import read_file, read_header
from ..checkpoints.load import fill
from ..errors import CheckpointError, InputError
from ..model.forward import longest_prompt
from ..model.known_models import TransformerConfig

KIND = "sana_verifier"
# the largest that each part of a Shape may be
LARGEST = (255, 16384, 16384, 1024, 64, 12, 64, 100)


class Shape(NamedTuple):
    """What config.json says besides model_type."""

    block: int  # of the transformer, behind which it reads
    hidden: int  # how wide the states there are
    text: int  # and the prompts' embeddings
    width: int
    heads: int
    layers: int
    said: int  # of how many things it says whether they will be right
    percent: int  # of the steps, the first, in which it was taught


class Verifier(nn.Module):
    """Reads the tokens of the prompt beside the states behind a block; says of each thing whether it will be right."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        _, hidden, text, width, heads, layers, said, _ = shape
        self.states = nn.Sequential(nn.LayerNorm(hidden), nn.Linear(hidden, width))
        self.words = nn.Sequential(nn.LayerNorm(text), nn.Linear(text, width))
        layer = nn.TransformerDecoderLayer(width, heads, 2 * width, 0.1, batch_first=True, norm_first=True)
        self.reader = nn.TransformerDecoder(layer, layers, nn.LayerNorm(width))
        self.says = nn.Linear(width, said)

    def last_look(self, steps: int) -> int:
        """Return the last of so many steps after which it knows what it sees."""
        return max(1, steps * self.shape.percent // 100)

    def forward(self, states: torch.Tensor, embeds: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Return logits [B, K] of states [B, N, hidden] and prompts [B, T, text] with their `mask` [B, T]."""
        kept = mask != 0
        read = self.reader(self.words(embeds), self.states(states), tgt_key_padding_mask=~kept)
        weight = kept.to(read)[..., None]
        return self.says((read * weight).sum(1) / weight.sum(1))

    @torch.no_grad()
    def score(self, states: torch.Tensor, embeds: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Return the logarithm [B] of how likely all is right, float32 on the CPU."""
        device = self.says.weight.device
        count, longest = len(states), longest_prompt(mask)
        rows = (each.to(device).float() for each in (states, embeds[:, :longest].expand(count, -1, -1)))
        return F.logsigmoid(self(*rows, mask[:, :longest].to(device).expand(count, -1))).sum(1).cpu()


def is_verifier(folder: Path) -> bool:
    """Whether `folder` says that it holds a verifier. Raises what `read_json` does."""
    return folder.is_dir() and read_json(folder / "config.json").get("model_type") == KIND


def load_verifier(folder: str | Path, device: str | torch.device = "cpu") -> Verifier:
    """Return the verifier in `folder`, in float32: config.json and model.safetensors.

    Raises CheckpointError for what is none or broken, MissingFileError or ReadError for a file that cannot be read.
    """
    folder = Path(folder)
    config: Json = read_json(folder / "config.json")
    for name, largest in zip(Shape._fields, LARGEST, strict=True):
        if type(config.get(name)) is not int or not (name != "block") <= config[name] <= largest:
            got = f"{brief(config.get(name))} in {folder.name}/config.json"
            raise CheckpointError(f"{name}: got {got}, expected a whole number up to {largest}; {REDOWNLOAD}")
    if config["width"] % config["heads"]:
        raise CheckpointError(f"width: got no multiple of heads in {folder.name}/config.json; {REDOWNLOAD}")
    with torch.device("meta"):
        verifier = Verifier(Shape(*(config[name] for name in Shape._fields)))
    file, expected = folder / "model.safetensors", verifier.state_dict()
    headers = read_header(file).headers
    # The tensors may be gigabytes, so their shapes are compared before they are read.
    for tensor in sorted(expected.keys() | headers.keys()):
        weight, header = expected.get(tensor), headers.get(tensor)
        if weight is None or header is None or header.shape != weight.shape or not header.dtype.is_floating_point:
            got = "no such tensor" if header is None else f"{str(header.dtype)[6:]} {list(header.shape)}"
            shape = "none" if weight is None else f"floating-point {list(weight.shape)}"
            raise CheckpointError(
                f"{folder.name}: its weights are of another verifier ({brief(tensor)}: got {got}, expected {shape}); "
                f"{REDOWNLOAD}"
            )
    fill(verifier, read_file(file), folder.name, lambda name: torch.float32)
    return verifier.to(device)


def check_verifier(verifier: Verifier, config: TransformerConfig) -> None:
    """Raise InputError unless `verifier` reads the states of the transformer with `config`."""
    own = config.num_attention_heads * config.attention_head_dim, config.caption_channels
    shape = verifier.shape
    if shape[1:3] != own or shape.block >= config.num_layers:
        got = f"states of width {shape.hidden} behind block {shape.block}"
        raise InputError(f"scorer: got a verifier of {got}, expected one made for this model; use a CLIP")
