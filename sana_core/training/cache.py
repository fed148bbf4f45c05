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

from ..checkpoints.fingerprint import size_and_times
from ..errors import ExistingFileError, InputError, MissingFileError, OutputError, ReadError, SanaError
from ..model.latents import CHANNELS, DOWNSCALE
from ..runtime.atomic_files import digest_of, read_small, write_whole
from ..runtime.cancellation import Poll, no_poll
from ..runtime.text import Json, brief
from .dataset import Faults, Sample, without_traceback
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
# errors of an image's own files
IMAGE_FAULTS = (InputError, MissingFileError, ReadError)
# an image and its mask
Files = tuple[FileRange, FileRange | None]
BrokenImages = dict[Files, SanaError]


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
    broken: BrokenImages | None = None,
) -> Cache:
    """Return the cache of `samples`, cropped to their `buckets`, after encoding what `store` does not hold yet.

    Control images are cropped and encoded as images are, where all samples have one. `encode` is called for that
    alone: all captions first, then all images, so that the first call of each may load its model and drop the other.
    `ids` has to change with whatever they depend on. `poll` is called for each entry and cancels by raising; what was
    encoded stays, and the next call resumes. `progress` gets how many entries of how many are there. Images that cannot
    be read are added to `broken`, and the cache that is returned lacks them: encode again without their samples.
    Without `broken`, an error names all of them at the end. Raises OutputError
    for a folder that cannot be written, and as `Digests` and `open_image` do.
    """
    controlled = [control_sample(sample) for sample in samples if sample.control is not None]
    controlled = controlled if len(controlled) == len(samples) else []
    total, done = 2 * len(samples) + len(controlled) + 1, 0
    digests, known = Digests(store), set[Path]()
    faults: BrokenImages = {} if broken is None else broken

    def advance() -> None:
        nonlocal done
        done += 1
        progress(done, total)
        poll()

    def find_or(path: Path, make: Callable[[], Tensors]) -> Path:
        if path not in known:
            store.find_or(path, make)
            known.add(path)
        advance()
        return path

    def find_text(parts: list[str], make: Callable[[], Tensors]) -> Path:
        return find_or(entry_path(store.folder, "texts", [*parts, ids.text_encoder]), make)

    def find_latents(sample: Sample, bucket: Bucket) -> Path | None:
        files, image = files_of(sample), None
        if files in faults:
            advance()
            return None
        try:
            parts = [digests.of(place, sample.name) for place in files if place]
            own = [] if sample.crop == MIDDLE else [sample.crop]
            path = entry_path(store.folder, "latents", [parts, bucket, CROP_RULE, ids.autoencoder, *own])
            if path not in known and not store.has(path):
                image = read_image(sample, bucket, parts)
        except IMAGE_FAULTS as fault:
            faults[files] = without_traceback(fault)
            # The others are encoded first, so that one error names all broken images.
            logger.warning("%s", fault)
            advance()
            return None
        if image is not None:
            store.put(path, encode_image(encode.pixels, sample, *image))
        known.add(path)
        advance()
        return path

    empty = find_text(["empty"], partial(encode_text, encode.caption, "", False))
    captions = [sample.caption for sample in samples]
    texts = [find_text(["caption", each], partial(encode_tokens, encode.caption, each)) for each in captions]
    try:
        latents = [find_latents(*each) for each in zip(samples, buckets, strict=True)]
        controls = [find_latents(*each) for each in zip(controlled, buckets, strict=False)]
    finally:
        digests.save()
    if broken is None:
        Faults(faults.values()).check()
    images, controls_found = ([path for path in paths if path] for paths in (latents, controls))
    return Cache([sample.name for sample in samples], images, texts, read_entry(empty), controls_found)


def files_of(sample: Sample) -> Files:
    """Return the files that the latents of a sample are made from."""
    return sample.image, sample.mask


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


def read_image(
    sample: Sample, bucket: Bucket, digests: Sequence[str] | None = None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the pixels [3, H, W] of a sample, and the loss weight [1, H / 32, W / 32] of its mask or None.

    `digests` are the digests of image and mask by which an entry is found. Raises as `open_image` does, ReadError for
    files that have changed since, and InputError for a mask that is all black.
    """
    parts = [read_range(place, sample.name) for place in (sample.image, sample.mask) if place]
    if digests is not None and [digest_of(part) for part in parts] != digests:
        raise ReadError(f"{sample.name}: was written while it was read; wait until it is whole")
    mask = decode_mask(parts[1], f"{sample.name} (mask)") if sample.mask else None
    pixels, weight = fit_image(decode_image(parts[0], sample.name), mask, bucket, sample.crop)
    if weight is not None and not weight.any():
        raise InputError(f"{sample.name}: its mask is black in the whole crop, expected white where to train")
    return pixels, weight


def encode_image(
    encode: EncodePixels, sample: Sample, pixels: torch.Tensor, weight: torch.Tensor | None = None
) -> Tensors:
    """Return latents [32, h, w] of what `read_image` returns, and the weight [1, h, w] of the mask, if there is one.

    Raises InputError for latents of another shape, and for latents that are not finite.
    """
    latents = encode(pixels[None]).detach()[0].float().cpu()
    shape = [CHANNELS, *(side // DOWNSCALE for side in pixels.shape[1:])]
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

    def load(self, indices: Sequence[int]) -> Batch:
        """Return the samples with these indices, of one bucket, as a cache of them would to the bit.

        Reads the images, and raises as `build_cache` does.
        """
        broken: dict[int, SanaError] = {}
        _, batch = self.load_readable(indices, broken)
        Faults(broken.values()).check()
        return batch

    @torch.no_grad()
    def load_readable(
        self, indices: Sequence[int], broken: dict[int, SanaError], skip: bool = False
    ) -> tuple[list[int], Batch]:
        """Return the indices whose images can be read, and a batch of them, of one bucket.

        The faults of the others are added to `broken`. If there are any, nothing more is encoded unless they are to be
        skipped, and the rest is only read, to find out what else is broken. A batch without any image is `blank`.
        """
        readable, images, controls = list[int](), list[Tensors](), list[Tensors]()
        for index in indices:
            sample, bucket = self.samples[index], self.buckets[index]
            parts = [sample] if sample.control is None else [sample, control_sample(sample)]
            try:
                images_and_weights = [read_image(part, bucket) for part in parts]
            except IMAGE_FAULTS as fault:
                broken[index] = without_traceback(fault)
                continue
            if broken and not skip:
                continue
            encoded = [
                encode_image(self.encode.pixels, part, *image_and_weight)
                for part, image_and_weight in zip(parts, images_and_weights, strict=True)
            ]
            readable.append(index)
            images.append(encoded[0])
            controls += encoded[1:]
        if not readable:
            return [], self.blank(indices[0])
        texts = [encode_tokens(self.encode.caption, self.samples[index].caption) for index in readable]
        names = [self.samples[index].name for index in readable]
        return readable, join_batch(names, images, texts, controls)

    def blank(self, index: int) -> Batch:
        """Return zeros in place of the sample, with the empty prompt. A rank without images computes with them."""
        width, height = self.buckets[index]
        zeros = {"latents": torch.zeros(CHANNELS, height // DOWNSCALE, width // DOWNSCALE)}
        sample = self.samples[index]
        return join_batch([sample.name], [zeros], [self.empty], [zeros] if sample.control else [])


class Store(NamedTuple):
    """A cache's folder, which several runs may share, and the one in it where a run's unfinished entries lie."""

    folder: Path
    parts: Path | None = None  # without one beside the entries

    def find_or(self, path: Path, make: Callable[[], Tensors]) -> Path:
        """Return the entry's `path` once it is there and whole; a damaged one is in the log, and is written over.

        Raises OutputError and leaves nothing half written then.
        """
        if not self.has(path):
            self.put(path, make())
        return path

    def put(self, path: Path, tensors: Tensors) -> None:
        """Write an entry. Raises OutputError."""
        from safetensors.torch import save

        try:
            self.write(path, save({**tensors, CHECK: check_sum(tensors)}))
        except OSError as error:
            reason = error.strerror or type(error).__name__
            raise OutputError(
                f"cache: cannot write {path} ({reason}); make room and start again, what is in it stays"
            ) from error

    def has(self, path: Path) -> bool:
        """Whether the entry `path` is there and whole. A damaged one is in the log."""
        if not path.exists():
            return False
        try:
            read_entry(path)
        except ReadError as error:
            logger.warning("%s", error)
            return False
        return True

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
            stat = size_and_times(place.file)
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
