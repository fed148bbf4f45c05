"""Latents and embeddings on disk, so that neither VAE nor text encoder is in memory while a model learns.

    folder/latents/ab/KEY.safetensors    latents [32, h, w] float32, weight [1, h, w] float32 where there is a mask;
                                         of control pictures likewise
    folder/texts/ab/KEY.safetensors      embeds [T, C] in the encoder's dtype, mask [T] uint8, without the padding
    folder/digests.json                  the digests of pictures, so that unchanged files are not read again

A key is the digest of all that the entry depends on. So what changes is another entry, and nothing is ever stale. An
entry is written whole, with the digest of its numbers; whoever writes it writes the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

from ..checkpoints.files import brief
from ..errors import InputError, ReadError
from ..model.latents import CHANNELS, DOWNSCALE
from ..runtime.cancellation import Poll, no_poll
from .buckets import CROP_RULE, MIDDLE, Bucket, fit_picture
from .dataset import Sample
from .entries import Digests, Store, Tensors, digest_of, entry_path, read_entry
from .pictures import decode_mask, decode_picture, read_place

# pixels [1, 3, H, W] in [-1, 1] to latents [1, 32, H / 32, W / 32], scaled by the autoencoder's scaling_factor
EncodePixels = Callable[[torch.Tensor], torch.Tensor]
# caption, and whether the instruction stands before it, to embeds [1, T, C] and mask [1, T]
EncodeCaption = Callable[[str, bool], tuple[torch.Tensor, torch.Tensor]]
Progress = Callable[[int, int], None]


class ModelIds(NamedTuple):
    """What tells the models apart that entries come from: weights, configuration, dtype, tokenizer and instruction."""

    autoencoder: str
    text_encoder: str


class Batch(NamedTuple):
    """Samples of one bucket, on the CPU."""

    latents: torch.Tensor  # [B, 32, h, w] float32
    embeds: torch.Tensor  # [B, T, C], zeros behind the tokens
    mask: torch.Tensor  # [B, T] int64
    weight: torch.Tensor | None  # [B, 1, h, w] float32 of the loss, None where no sample has a mask
    names: list[str]
    control: torch.Tensor | None = None  # [B, 32, h, w] float32, the control pictures'


class Cache(NamedTuple):
    """The entries of a list of samples, by their indices, and the empty prompt."""

    names: list[str]
    latents: list[Path]
    texts: list[Path]
    empty: Tensors  # embeds [T, C] and mask [T], without instruction, the padding included
    controls: Sequence[Path] = ()  # of a ControlNet's training, as many as the others

    def load(self, indices: Sequence[int]) -> Batch:
        """Return the samples with these indices, of one bucket, padded to the longest caption among them.

        Raises ReadError for an entry that was damaged or removed since the cache was built.
        """
        pictures, texts = ([read_entry(paths[index]) for index in indices] for paths in (self.latents, self.texts))
        controls = [read_entry(self.controls[index]) for index in indices] if self.controls else []
        return join_batch([self.names[index] for index in indices], pictures, texts, controls)


def join_batch(
    names: list[str], pictures: Sequence[Tensors], texts: Sequence[Tensors], controls: Sequence[Tensors]
) -> Batch:
    """Return samples of one bucket as a batch, from what `encode_picture` and `encode_tokens` return of each."""
    length = max(len(text["mask"]) for text in texts)
    embeds = torch.stack([pad(text["embeds"], length) for text in texts])
    mask = torch.stack([pad(text["mask"], length).long() for text in texts])
    weight = None
    if any("weight" in picture for picture in pictures):
        ones = torch.ones(1, *pictures[0]["latents"].shape[1:])
        weight = torch.stack([picture.get("weight", ones) for picture in pictures])
    latents = torch.stack([picture["latents"] for picture in pictures])
    control = torch.stack([picture["latents"] for picture in controls]) if controls else None
    return Batch(latents, embeds, mask, weight, names, control)


def build_cache(
    samples: Sequence[Sample],
    buckets: Sequence[Bucket],
    store: Store,
    encode_pixels: EncodePixels,
    encode_caption: EncodeCaption,
    ids: ModelIds,
    poll: Poll = no_poll,
    progress: Progress = lambda done, total: None,
) -> Cache:
    """Return the cache of `samples`, cropped to their `buckets`, after encoding what `store` does not hold yet.

    Control pictures are cropped and encoded as pictures are, where all samples have one.
    The encoders are called for that alone: all captions first, then all pictures, so that the first call of each may
    load its model and drop the other. `ids` has to change with whatever they depend on. `poll` is called for each entry
    and cancels by raising; what was encoded stays, and the next call goes on. `progress` gets how many entries of how
    many are there. Raises OutputError for a folder that cannot be written, and as `Digests` and `open_picture` do.
    """
    steering = [control_sample(sample) for sample in samples if sample.control is not None]
    steering = steering if len(steering) == len(samples) else []
    total, done = 2 * len(samples) + len(steering) + 1, 0
    digests, known = Digests(store), set[Path]()

    def find_or(path: Path, make: Callable[[], Tensors]) -> Path:
        nonlocal done
        if path not in known:
            store.find_or(path, make)
            known.add(path)
        done += 1
        progress(done, total)
        poll()
        return path

    empty = find_or(
        entry_path(store.folder, "texts", ["empty", ids.text_encoder]), partial(encode_text, encode_caption, "", False)
    )
    texts = []
    for sample in samples:
        path = entry_path(store.folder, "texts", ["caption", sample.caption, ids.text_encoder])
        texts.append(find_or(path, partial(encode_tokens, encode_caption, sample.caption)))

    def find_latents(sample: Sample, bucket: Bucket) -> Path:
        parts = [digests.of(place, sample.name) for place in (sample.picture, sample.mask) if place]
        own = [] if sample.crop == MIDDLE else [sample.crop]
        path = entry_path(store.folder, "latents", [parts, bucket, CROP_RULE, ids.autoencoder, *own])
        return find_or(path, partial(encode_picture, encode_pixels, sample, bucket, parts))

    try:
        latents = [find_latents(*each) for each in zip(samples, buckets, strict=True)]
        controls = [find_latents(*each) for each in zip(steering, buckets, strict=False)]
    finally:
        digests.save()
    return Cache([sample.name for sample in samples], latents, texts, read_entry(empty), controls)


def control_sample(sample: Sample) -> Sample:
    """Return the control picture of `sample`, which has one, as a sample of its own."""
    assert sample.control is not None
    return Sample(f"{sample.name} (control image)", "", sample.size, sample.control, crop=sample.crop)


def encode_text(encode: EncodeCaption, caption: str, instruction: bool) -> Tensors:
    """Return embeds [T, C] and mask [T] of a caption. Raises InputError for what is not finite."""
    embeds, mask = (tensor[0].detach().cpu() for tensor in encode(caption, instruction))
    if not embeds.isfinite().all():
        raise InputError(
            f"caption: its embeddings hold NaN or infinity ({brief(caption)}), expected numbers; load the text encoder "
            "in bf16 or fp32"
        )
    return {"embeds": embeds.contiguous(), "mask": mask.to(torch.uint8)}


def encode_tokens(encode: EncodeCaption, caption: str) -> Tensors:
    """Return embeds and mask of a caption with the instruction, without what is behind its last token."""
    text = encode_text(encode, caption, True)
    length = int(text["mask"].nonzero().max()) + 1
    return {name: values[:length].contiguous() for name, values in text.items()}


def encode_picture(
    encode: EncodePixels, sample: Sample, bucket: Bucket, digests: Sequence[str] | None = None
) -> Tensors:
    """Return latents [32, h, w] of a sample's picture, and weight [1, h, w] of its mask, if it has one.

    `digests` are those of picture and mask by which an entry is found. Raises as `open_picture` does, ReadError for
    files that have changed since, and InputError for a mask that is all black and for latents that are not finite.
    """
    parts = [read_place(place, sample.name) for place in (sample.picture, sample.mask) if place]
    if digests is not None and [digest_of(part) for part in parts] != digests:
        raise ReadError(f"{sample.name}: was written while it was read; wait until it is whole")
    mask = decode_mask(parts[1], f"{sample.name} (mask)") if sample.mask else None
    pixels, weight = fit_picture(decode_picture(parts[0], sample.name), mask, bucket, sample.crop)
    if weight is not None and not weight.any():
        raise InputError(f"{sample.name}: its mask is black where it is cropped, expected white where to learn")
    latents = encode(pixels[None]).detach()[0].float().cpu()
    shape = [CHANNELS, bucket[1] // DOWNSCALE, bucket[0] // DOWNSCALE]
    if list(latents.shape) != shape:
        raise InputError(f"{sample.name}: got latents {list(latents.shape)}, expected {shape}; choose SANA's VAE")
    if not latents.isfinite().all():
        raise InputError(f"{sample.name}: its latents hold NaN or infinity, expected numbers; load the VAE in fp32")
    return {"latents": latents.contiguous(), **({} if weight is None else {"weight": weight})}


def pad(values: torch.Tensor, length: int) -> torch.Tensor:
    """Return `values` [t, ...] with zeros behind them, [length, ...]."""
    return torch.cat([values, values.new_zeros(length - len(values), *values.shape[1:])])
