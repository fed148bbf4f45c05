"""Latents and embeddings on disk, so that neither VAE nor text encoder is in memory while a model learns.

    folder/latents/ab/KEY.safetensors    latents [32, h, w] float32, weight [1, h, w] float32 where there is a mask;
                                         of control images likewise
    folder/texts/ab/KEY.safetensors      embeds [T, C] in the encoder's dtype, mask [T] uint8, without the padding
    folder/digests.json                  the digests of images, so that unchanged files are not read again

A key is the digest of all that the entry depends on. So what changes is another entry, and nothing is ever stale. An
entry is written whole, with the digest of its tensors; every writer writes the same.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

from ..checkpoints.files import Json, brief
from ..checkpoints.fingerprint import file_stat
from ..errors import ExistingFileError, InputError, OutputError, ReadError
from ..model.latents import CHANNELS, DOWNSCALE
from ..runtime.atomic_files import digest_of, read_small, write_whole
from ..runtime.cancellation import Poll, no_poll
from .dataset import Sample
from .images import CROP_RULE, MIDDLE, Bucket, FileRange, decode_image, decode_mask, fit_image, read_range

# pixels [1, 3, H, W] in [-1, 1] to latents [1, 32, H / 32, W / 32], scaled by the autoencoder's scaling_factor
EncodePixels = Callable[[torch.Tensor], torch.Tensor]
# caption, and whether the instruction stands before it, to embeds [1, T, C] and mask [1, T]
EncodeCaption = Callable[[str, bool], tuple[torch.Tensor, torch.Tensor]]
logger = logging.getLogger(__name__)
Tensors = dict[str, torch.Tensor]
# of the entries; a higher one makes all of them again
VERSION = 1
DIGESTS = "digests.json"
# bytes of that file; an image takes 140
LARGEST_DIGESTS = 10**9
# the tensor in an entry that tells whether the others are what was written
CHECK = "sha256"


class Encoders(NamedTuple):
    """What latents and embeddings are made by."""

    pixels: EncodePixels
    caption: EncodeCaption


class ModelIds(NamedTuple):
    """Identifies the models that entries come from: weights, configuration, dtype, tokenizer and instruction."""

    autoencoder: str
    text_encoder: str


class Batch(NamedTuple):
    """Samples of one bucket, on the CPU."""

    latents: torch.Tensor  # [B, 32, h, w] float32
    embeds: torch.Tensor  # [B, T, C], zeros behind the tokens
    mask: torch.Tensor  # [B, T] int64
    weight: torch.Tensor | None  # [B, 1, h, w] float32 of the loss, None where no sample has a mask
    names: list[str]
    control: torch.Tensor | None = None  # [B, 32, h, w] float32, the control images'


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
        images, texts = ([read_entry(paths[index]) for index in indices] for paths in (self.latents, self.texts))
        controls = [read_entry(self.controls[index]) for index in indices] if self.controls else []
        return join_batch([self.names[index] for index in indices], images, texts, controls)


def join_batch(
    names: list[str], images: Sequence[Tensors], texts: Sequence[Tensors], controls: Sequence[Tensors]
) -> Batch:
    """Return samples of one bucket as a batch, from what `encode_image` and `encode_tokens` return of each."""
    length = max(len(text["mask"]) for text in texts)
    embeds = torch.stack([pad(text["embeds"], length) for text in texts])
    mask = torch.stack([pad(text["mask"], length).long() for text in texts])
    weight = None
    if any("weight" in image for image in images):
        ones = torch.ones(1, *images[0]["latents"].shape[1:])
        weight = torch.stack([image.get("weight", ones) for image in images])
    latents = torch.stack([image["latents"] for image in images])
    control = torch.stack([image["latents"] for image in controls]) if controls else None
    return Batch(latents, embeds, mask, weight, names, control)


def build_cache(
    samples: Sequence[Sample],
    buckets: Sequence[Bucket],
    store: Store,
    encode: Encoders,
    ids: ModelIds,
    poll: Poll = no_poll,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Cache:
    """Return the cache of `samples`, cropped to their `buckets`, after encoding what `store` does not hold yet.

    Control images are cropped and encoded as images are, where all samples have one. `encode` is called for that
    alone: all captions first, then all images, so that the first call of each may load its model and drop the other.
    `ids` has to change with whatever they depend on. `poll` is called for each entry and cancels by raising; what was
    encoded stays, and the next call resumes. `progress` gets how many entries of how many are there. Raises OutputError
    for a folder that cannot be written, and as `Digests` and `open_image` do.
    """
    controlled = [control_sample(sample) for sample in samples if sample.control is not None]
    controlled = controlled if len(controlled) == len(samples) else []
    total, done = 2 * len(samples) + len(controlled) + 1, 0
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

    def find_text(parts: list[str], make: Callable[[], Tensors]) -> Path:
        return find_or(entry_path(store.folder, "texts", [*parts, ids.text_encoder]), make)

    def find_latents(sample: Sample, bucket: Bucket) -> Path:
        parts = [digests.of(place, sample.name) for place in (sample.image, sample.mask) if place]
        own = [] if sample.crop == MIDDLE else [sample.crop]
        path = entry_path(store.folder, "latents", [parts, bucket, CROP_RULE, ids.autoencoder, *own])
        return find_or(path, partial(encode_image, encode.pixels, sample, bucket, parts))

    empty = find_text(["empty"], partial(encode_text, encode.caption, "", False))
    captions = [sample.caption for sample in samples]
    texts = [find_text(["caption", each], partial(encode_tokens, encode.caption, each)) for each in captions]
    try:
        latents = [find_latents(*each) for each in zip(samples, buckets, strict=True)]
        controls = [find_latents(*each) for each in zip(controlled, buckets, strict=False)]
    finally:
        digests.save()
    return Cache([sample.name for sample in samples], latents, texts, read_entry(empty), controls)


def control_sample(sample: Sample) -> Sample:
    """Return the control image of `sample`, which has one, as a sample of its own."""
    assert sample.control is not None
    return Sample(f"{sample.name} (control image)", "", sample.size, sample.control, crop=sample.crop)


def encode_text(encode: EncodeCaption, caption: str, instruction: bool) -> Tensors:
    """Return embeds [T, C] and mask [T] of a caption. Raises InputError for what is not finite."""
    embeds, mask = (tensor[0].detach().cpu() for tensor in encode(caption, instruction))
    if not embeds.isfinite().all():
        raise InputError(
            f"caption: its embeddings hold NaN or infinity ({brief(caption)}), expected finite values; load the text "
            "encoder in bf16 or fp32"
        )
    return {"embeds": embeds.contiguous(), "mask": mask.to(torch.uint8)}


def encode_tokens(encode: EncodeCaption, caption: str) -> Tensors:
    """Return embeds and mask of a caption with the instruction, without what is behind its last token."""
    text = encode_text(encode, caption, True)
    length = int(text["mask"].nonzero().max()) + 1
    return {name: values[:length].contiguous() for name, values in text.items()}


def encode_image(encode: EncodePixels, sample: Sample, bucket: Bucket, digests: Sequence[str] | None = None) -> Tensors:
    """Return latents [32, h, w] of a sample's image, and weight [1, h, w] of its mask, if it has one.

    `digests` are those of image and mask by which an entry is found. Raises as `open_image` does, ReadError for
    files that have changed since, and InputError for a mask that is all black and for latents that are not finite.
    """
    parts = [read_range(place, sample.name) for place in (sample.image, sample.mask) if place]
    if digests is not None and [digest_of(part) for part in parts] != digests:
        raise ReadError(f"{sample.name}: was written while it was read; wait until it is whole")
    mask = decode_mask(parts[1], f"{sample.name} (mask)") if sample.mask else None
    pixels, weight = fit_image(decode_image(parts[0], sample.name), mask, bucket, sample.crop)
    if weight is not None and not weight.any():
        raise InputError(f"{sample.name}: its mask is black in the whole crop, expected white where to train")
    latents = encode(pixels[None]).detach()[0].float().cpu()
    shape = [CHANNELS, bucket[1] // DOWNSCALE, bucket[0] // DOWNSCALE]
    if list(latents.shape) != shape:
        raise InputError(f"{sample.name}: got latents {list(latents.shape)}, expected {shape}; choose SANA's VAE")
    if not latents.isfinite().all():
        raise InputError(
            f"{sample.name}: its latents hold NaN or infinity, expected finite values; load the VAE in fp32"
        )
    return {"latents": latents.contiguous(), **({} if weight is None else {"weight": weight})}


def pad(values: torch.Tensor, length: int) -> torch.Tensor:
    """Return `values` [t, ...] with zeros behind them, [length, ...]."""
    return torch.cat([values, values.new_zeros(length - len(values), *values.shape[1:])])


class Stream(NamedTuple):
    """Samples in their buckets, encoded for the step that learns them and kept nowhere: data sets larger than any
    disk."""

    samples: Sequence[Sample]
    buckets: Sequence[Bucket]
    encode: Encoders
    empty: Tensors  # embeds [T, C] and mask [T], without instruction, the padding included

    @torch.no_grad()
    def load(self, indices: Sequence[int]) -> Batch:
        """Return the samples with these indices, of one bucket, as a cache of them would to the bit.

        Reads the images, and raises as `build_cache` does.
        """
        chosen = [self.samples[index] for index in indices]
        buckets = [self.buckets[index] for index in indices]
        images = [encode_image(self.encode.pixels, *each) for each in zip(chosen, buckets, strict=True)]
        texts = [encode_tokens(self.encode.caption, sample.caption) for sample in chosen]
        controls = [
            encode_image(self.encode.pixels, control_sample(sample), bucket)
            for sample, bucket in zip(chosen, buckets, strict=True)
            if sample.control is not None
        ]
        return join_batch([sample.name for sample in chosen], images, texts, controls)


class Store(NamedTuple):
    """A cache's folder, which several runs may share, and the one in it where a run's unfinished entries lie."""

    folder: Path
    parts: Path | None = None  # without one beside the entries

    def find_or(self, path: Path, make: Callable[[], Tensors]) -> Path:
        """Return the entry's `path` once it is there and whole; a damaged one is in the log, and is written over.

        Raises OutputError and leaves nothing half written then.
        """
        from safetensors.torch import save

        if path.exists():
            try:
                read_entry(path)
                return path
            except ReadError as error:
                logger.warning("%s", error)
        tensors = make()
        try:
            self.write(path, save({**tensors, CHECK: check_sum(tensors)}))
        except OSError as error:
            reason = error.strerror or type(error).__name__
            raise OutputError(
                f"cache: cannot write {path} ({reason}); make room and start again, what is in it stays"
            ) from error
        return path

    def write(self, path: Path, data: bytes) -> None:
        """Write a file of the cache, over an earlier one too. Raises OSError."""
        for folder in filter(None, (path.parent, self.parts)):
            folder.mkdir(parents=True, exist_ok=True)
        write_whole(path, data, self.parts or path.parent, replace=True)


def entry_path(folder: Path, kind: str, parts: Sequence[object]) -> Path:
    """Return where the entry is that depends on `parts`, of JSON, and on nothing else."""
    key = digest_of(json.dumps([VERSION, *parts]).encode())
    return folder / kind / key[:2] / f"{key}.safetensors"


def check_sum(tensors: Tensors) -> torch.Tensor:
    """Return the digest [32] of names, shapes, dtypes and bytes of `tensors`, as uint8."""
    digest = hashlib.sha256()
    for name, values in sorted(tensors.items()):
        digest.update(f"{name} {values.dtype} {list(values.shape)} ".encode())
        digest.update(values.contiguous().view(torch.uint8).numpy().tobytes())
    return torch.tensor(list(digest.digest()), dtype=torch.uint8)


def read_entry(path: Path) -> Tensors:
    """Return the tensors of an entry. Raises ReadError for one that is missing, damaged or not whole."""
    from safetensors import SafetensorError
    from safetensors.torch import load

    try:
        tensors = load(path.read_bytes())
        check = tensors.pop(CHECK)
    except (OSError, SafetensorError, KeyError, ValueError) as error:
        raise ReadError(f"cache: {path} cannot be read ({brief(error)}); start again, which makes it again") from error
    if not torch.equal(check, check_sum(tensors)):
        raise ReadError(f"cache: {path} is damaged, its digest is another; start again, which makes it again")
    return tensors


class Digests:
    """The digests of images, stored in the cache's folder so that each unchanged image is read once.

    Its file may be readable by people who must not learn where the images are, so it contains no paths. The key of a
    digest is itself a digest: of the image's path, its range of bytes, and the size, times and inode of its file.
    Nobody can check a guessed path against it without knowing those numbers, and a changed image has another key.

    Raises ExistingFileError for a file of others under that name, which stays as it is if it comes later too.
    """

    def __init__(self, store: Store) -> None:
        self.store, self.file = store, store.folder / DIGESTS
        self.kept = self.read()
        self.changed = False

    def read(self) -> Json:
        """Return what the folder has. Raises ExistingFileError for a file that no run has written."""
        try:
            digests = json.loads(read_small(self.file, LARGEST_DIGESTS))
            if digests and all(len(digest) == 64 for pair in digests.items() for digest in pair):
                return digests
        except (FileNotFoundError, NotADirectoryError):
            return {}
        except (OSError, ValueError, TypeError, AttributeError, RecursionError):
            pass
        raise ExistingFileError(
            f"cache: {self.file} is not of a training's cache; move it away, or choose another folder"
        )

    def of(self, place: FileRange, name: str) -> str:
        """Return the digest of the bytes at `place`. Raises as `read_range` does."""
        try:
            stat = file_stat(place.file)
        except OSError:
            # Reading it raises an error that names the image.
            return digest_of(read_range(place, name))
        key = digest_of(json.dumps([str(place.file.absolute()), place.start, place.length, stat]).encode())
        if key not in self.kept:
            self.kept[key] = digest_of(read_range(place, name))
            self.changed = True
        return self.kept[key]

    def save(self) -> None:
        """Keep them beside what others have kept meanwhile; a folder that cannot be written makes the next run read the
        images again."""
        if self.changed:
            with suppress(OSError):
                self.store.write(self.file, json.dumps({**self.read(), **self.kept}).encode())
