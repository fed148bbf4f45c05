"""Latents and embeddings of samples, in a cache on disk or streamed.

Neither VAE nor text encoder is in memory while a model trains from the cache.

    folder/latents/ab/KEY.safetensors    latents [32, h, w] float32, and with a mask the weight [1, h, w] float32;
                                         the same for control images
    folder/texts/ab/KEY.safetensors      embeds [T, C] in the encoder's dtype, mask [T] uint8, without padding
    folder/digests.json, sizes.json      digests and sizes of images, so that unchanged files are not read again

A key is the digest of everything that the entry depends on. A change therefore gives another entry, and no entry is
ever stale. An entry is written as a whole, with the digest of its tensors. All writers write the same bytes. A start
checks only that the entries exist. The digest of an entry is checked when a step reads it first.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from os import stat
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.nn.utils.rnn import pad_sequence

from ..batch.pipeline import load_encoder
from ..checkpoints import load_autoencoder
from ..checkpoints.fingerprint import digest_json, fingerprint, size_and_times
from ..decode import encode_images
from ..errors import ExistingFileError, InputError, MissingFileError, OutputError, ReadError, SanaError
from ..model.latents import CHANNELS, DOWNSCALE, latent_shape
from ..model.text import encode_prompts
from ..runtime.accelerator import empty_cache
from ..runtime.atomic_files import digest_of, read_small, reason_of, write_whole
from ..runtime.cancellation import Poll, no_poll
from ..runtime.text import Json, brief, get_logger
from ..runtime.user_files import FileRange, read_range
from .dataset import Faults, Sample, is_unreadable, warn_of_skipped, without_traceback
from .images import CROP_RULE, MIDDLE, decode_image, fit_image
from .settings import TrainingSettings

# encode(pixels [1, 3, H, W] in [-1, 1]) returns latents [1, 32, H / 32, W / 32], multiplied by scaling_factor.
EncodePixels = Callable[[torch.Tensor], torch.Tensor]
# encode(caption, with_instruction) returns embeds [1, T, C] and mask [1, T].
EncodeCaption = Callable[[str, bool], tuple[torch.Tensor, torch.Tensor]]
logger = get_logger(__name__)
Tensors = dict[str, torch.Tensor]
# Version of the entries. A new version encodes all of them again.
VERSION = 1
DIGESTS, SIZES = "digests.json", "sizes.json"
# Bytes of one of them. A digest takes 140.
LARGEST_MEMO = 10**9
# Name of the tensor with the digest of the others.
CHECK = "sha256"
# Errors of the files of one image.
IMAGE_FAULTS = (InputError, MissingFileError, ReadError)
# The folder in the cache with the digests of the models' files.
MODELS = "models"
# The digests of `fingerprint` that the embeddings and the latents depend on.
TEXT_DIGESTS = ("text_encoder_weights", "text_encoder_config", "tokenizer", "instruction")
IMAGE_DIGESTS = ("autoencoder_weights", "autoencoder_config")
# The faults of images by `Sample.files`.
BrokenImages = dict[tuple[FileRange, FileRange | None], SanaError]
# The faults of samples by (number of the phase, index in the phase), both from 0. The same on all machines.
BrokenPositions = dict[tuple[int, int], SanaError]
# An image, and its control image if there is one: pixels [3, H, W], and with a mask the weight of the loss.
Pixels = list[tuple[torch.Tensor, torch.Tensor | None]]


class Encoders(NamedTuple):
    pixels: EncodePixels
    caption: EncodeCaption


class ModelIds(NamedTuple):
    """Digests of the models that encode images and captions."""

    # Weights and configuration.
    autoencoder: str
    # Weights, configuration, tokenizer, instruction and dtype.
    text_encoder: str


def digest_models(
    settings: TrainingSettings, folder: Path, progress: Callable[[int, int], None]
) -> tuple[str, ModelIds]:
    """Return the digest of the whole model, and the digests of its encoders.

    If settings.text_encoder or settings.autoencoder is set, its digests replace the digests in the model.
    """
    digests = fingerprint(settings.model, progress, folder / MODELS, settings.reference)
    for path, names in ((settings.text_encoder, TEXT_DIGESTS), (settings.autoencoder, IMAGE_DIGESTS)):
        if path:
            part_digests = fingerprint(path, progress, folder / MODELS, settings.reference)
            digests |= {name: part_digests[name] for name in names}
    text, image = ([digests[name] for name in names] for names in (TEXT_DIGESTS, IMAGE_DIGESTS))
    return digest_json(digests), ModelIds(digest_json(image), digest_json([*text, settings.dtype]))


@contextmanager
def load_encoders(settings: TrainingSettings, device: torch.device, poll: Poll) -> Iterator[Encoders]:
    """Give the functions that encode images and captions. Only one of their two models is in memory at a time.

    Each model is loaded at its first use. If the cache has every entry, neither is loaded. A run that streams keeps
    both in memory and uses them after this context too.
    """
    loaded: Json = {}

    def clear() -> None:
        if loaded and not settings.stream:
            loaded.clear()
            # Windows' driver lends system memory, which is slow, before torch would give its cache back.
            empty_cache(device)

    def model(kind: str, load: Callable[..., Any], *options: object) -> Any:
        if kind not in loaded:
            clear()
            loaded[kind] = load(settings.source(kind), device, *options)
        return loaded[kind]

    def encode_pixels(pixels: torch.Tensor) -> torch.Tensor:
        # The VAE runs in float32. It runs once for each image, and every step would inherit its rounding errors.
        vae = model("autoencoder", load_autoencoder, torch.float32)
        return encode_images(vae, pixels, poll=poll) * vae.config.scaling_factor

    def encode_caption(caption: str, instruction: bool) -> tuple[torch.Tensor, torch.Tensor]:
        encoder = model("text_encoder", load_encoder, settings.dtype, settings.reference)
        return encode_prompts(encoder, [caption], instruction)

    try:
        yield Encoders(encode_pixels, encode_caption)
    finally:
        clear()


class Batch(NamedTuple):
    """Samples of one bucket, on the CPU."""

    latents: torch.Tensor  # [B, 32, h, w] float32
    embeds: torch.Tensor  # [B, T, C], zeros after the tokens
    mask: torch.Tensor  # [B, T] int64
    weight: torch.Tensor | None  # weight of the loss [B, 1, h, w] float32; None: no sample has a mask
    names: list[str]
    control: torch.Tensor | None = None  # latents of control images [B, 32, h, w] float32


class Cache(NamedTuple):
    """The paths of the cached entries of samples, in the order of the samples, and the empty prompt."""

    names: list[str]
    latents: list[str]
    texts: list[str]
    empty: Tensors  # embeds [T, C] and mask [T], without instruction, with padding
    store: Store
    controls: Sequence[str] = ()  # empty without a ControlNet

    def load(self, indices: Sequence[int]) -> Batch:
        """Return the samples with these indices. They must have the same bucket."""
        images, texts = ([self.store.read(paths[index]) for index in indices] for paths in (self.latents, self.texts))
        controls = [self.store.read(self.controls[index]) for index in indices] if self.controls else []
        return join_batch([self.names[index] for index in indices], images, texts, controls)


def join_batch(
    names: list[str], images: Sequence[Tensors], texts: Sequence[Tensors], controls: Sequence[Tensors]
) -> Batch:
    """Return a batch of the latents and embeddings of samples with one bucket, padded to the longest caption."""
    embeds = pad_sequence([text["embeds"] for text in texts], batch_first=True)
    mask = pad_sequence([text["mask"] for text in texts], batch_first=True).long()
    weight = None
    if any("weight" in image for image in images):
        ones = torch.ones(1, *images[0]["latents"].shape[1:])
        weight = torch.stack([image.get("weight", ones) for image in images])
    latents = torch.stack([image["latents"] for image in images])
    control = torch.stack([image["latents"] for image in controls]) if controls else None
    return Batch(latents, embeds, mask, weight, names, control)


def build_cache(
    samples: Sequence[Sample],
    store: Store,
    encode: Encoders,
    ids: ModelIds,
    broken: BrokenImages,
    poll: Poll = no_poll,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Cache:
    """Encode the entries of `samples` that `store` does not have yet, and return all of them.

    Images and control images are cropped to their buckets. Either all samples have a control image or none has. All
    captions are encoded before all images, so that `encode` can load one model at a time. `ids` must identify the
    models of `encode`. `poll` is called for each entry and cancels by raising. Finished entries stay on disk, and the
    next call resumes. `progress` receives the number of finished entries and the number of all entries.

    Images that cannot be read are added to `broken` and are missing in the cache, so call again without their samples.
    """
    controls = [control for sample in samples for control in with_control(sample)[1:]]
    images = [*samples, *controls]
    entry_count, finished = 1 + len(samples) + len(images), itertools.count(1)
    digests = FileMemo(store, DIGESTS, lambda place, name: digest_of(read_range(place, name)), is_digest)
    paths: list[str] = []

    def advance() -> None:
        progress(next(finished), entry_count)
        poll()

    def encode_caption(key_values: list[str], make: Callable[[], Tensors]) -> str:
        path = store.ensure(store.path("texts", [*key_values, ids.text_encoder]), make)
        advance()
        return path

    empty = encode_caption(["empty"], partial(encode_padded, encode.caption, "", False))
    captions = [sample.caption for sample in samples]
    texts = [encode_caption(["caption", text], partial(encode_unpadded, encode.caption, text)) for text in captions]
    try:
        for sample in images:
            if sample.files not in broken:
                try:
                    file_digests = [digests.of(file, sample.name) for file in sample.files if file]
                    # The key of the middle has no crop.
                    crop = [] if sample.crop == MIDDLE else [sample.crop]
                    key_values = [file_digests, sample.bucket, CROP_RULE, ids.autoencoder, *crop]
                    path = store.path("latents", key_values)
                    least = math.prod(latent_shape(*sample.bucket, 1)) * torch.float32.itemsize
                    pixels = None if store.has(path, least) else read_image(sample, file_digests)
                except IMAGE_FAULTS as fault:
                    broken[sample.files] = without_traceback(fault)
                    logger.warning("%s", fault)
                else:
                    if pixels is not None:
                        store.put(path, encode_image(encode.pixels, sample, *pixels))
                    paths.append(path)
            advance()
    finally:
        digests.save()
    names = [sample.name for sample in samples]
    return Cache(names, paths[: len(samples)], texts, store.read(empty), store, paths[len(samples) :])


def with_control(sample: Sample) -> list[Sample]:
    """Return `sample`, and if it has a control image, a sample with that image."""
    if sample.control is None:
        return [sample]
    name = f"{sample.name} (control image)"
    return [sample, sample._replace(name=name, image=sample.control, mask=None, control=None)]


def find_broken(samples: Sequence[Sequence[Sample]], broken: BrokenImages) -> BrokenPositions:
    """Return the faults of the `samples` of the phases whose image or control image is in `broken`."""
    if not broken:
        return {}
    return {
        (phase, index): broken[image.files]
        for phase, samples_of_phase in enumerate(samples)
        for index, sample in enumerate(samples_of_phase)
        for image in with_control(sample)
        if image.files in broken
    }


def leave_out(samples: Sequence[Sequence[Sample]], broken: BrokenPositions, skip_broken: bool) -> list[list[Sample]]:
    """Return the samples of each phase without the `broken` ones, and log their names.

    Raises an error that names all of them, unless `skip_broken` is set and all of them are unreadable files.
    """
    # Variants and repeats of an image have the same fault.
    faults = list({str(broken[position]): broken[position] for position in sorted(broken)}.values())
    if not (skip_broken and all(map(is_unreadable, faults))):
        Faults(faults).check()
    warn_of_skipped(faults)
    readable = [
        [sample for index, sample in enumerate(samples_of_phase) if (phase, index) not in broken]
        for phase, samples_of_phase in enumerate(samples)
    ]
    for number, phase_samples in enumerate(readable, 1):
        if not phase_samples:
            raise InputError(f"dataset: phase {number} has no image that can be read, expected one; copy them again")
    return readable


def encode_padded(encode: EncodeCaption, caption: str, instruction: bool) -> Tensors:
    """Return embeds [T, C] and mask [T] of a caption, with padding."""
    embeds, mask = (tensor[0].detach().cpu() for tensor in encode(caption, instruction))
    if not embeds.isfinite().all():
        raise InputError(
            f"caption: its embeddings hold NaN or infinity ({brief(caption)}), expected finite values; load the text "
            "encoder in bf16 or fp32"
        )
    return {"embeds": embeds.contiguous(), "mask": mask.to(torch.uint8)}


def encode_unpadded(encode: EncodeCaption, caption: str) -> Tensors:
    """Return embeds and mask of a caption with the instruction, up to its last token."""
    text = encode_padded(encode, caption, True)
    length = int(text["mask"].nonzero().max()) + 1
    return {name: values[:length].contiguous() for name, values in text.items()}


def read_image(sample: Sample, digests: Sequence[str] | None = None) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the pixels [3, H, W] of a sample, and the weight of the loss [1, H / 32, W / 32] if it has a mask.

    The files must still have the `digests`.
    """
    files = [read_range(file, sample.name) for file in sample.files if file]
    if digests is not None and [digest_of(data) for data in files] != digests:
        raise ReadError(f"{sample.name}: was written while it was read; wait until it is whole")
    mask = decode_image(files[1], f"{sample.name} (mask)").convert("L") if sample.mask else None
    pixels, weight = fit_image(decode_image(files[0], sample.name), mask, sample.bucket, sample.crop)
    if weight is not None and not weight.any():
        raise InputError(f"{sample.name}: its mask is black in the whole crop, expected white where to train")
    return pixels, weight


def encode_image(encode: EncodePixels, sample: Sample, pixels: torch.Tensor, weight: torch.Tensor | None) -> Tensors:
    """Return the latents [32, h, w] of the pixels [3, H, W] of a sample, together with its `weight`."""
    latents = encode(pixels[None]).detach()[0].float().cpu()
    shape = [CHANNELS, *(side // DOWNSCALE for side in pixels.shape[1:])]
    if list(latents.shape) != shape:
        raise InputError(f"{sample.name}: got latents {list(latents.shape)}, expected {shape}; choose SANA's VAE")
    if not latents.isfinite().all():
        raise InputError(
            f"{sample.name}: its latents hold NaN or infinity, expected finite values; load the VAE in fp32"
        )
    return {"latents": latents.contiguous(), **({} if weight is None else {"weight": weight})}


class Stream(NamedTuple):
    """Samples that are encoded for the step that uses them and are not cached. They may be larger than any disk."""

    samples: Sequence[Sample]
    encode: Encoders
    empty: Tensors  # embeds [T, C] and mask [T], without instruction, with padding

    def load(self, indices: Sequence[int]) -> Batch:
        """Return the samples with these indices, on a CPU with the bits of `Cache.load`. All need the same bucket."""
        images = list(map(self.read, indices))
        Faults(image for image in images if isinstance(image, SanaError)).check()
        return self.encode_batch(indices, [image for image in images if not isinstance(image, SanaError)])

    def read(self, index: int) -> Pixels | SanaError:
        """Return the decoded image of a sample, and its control image if it has one, or the fault of their files."""
        try:
            return list(map(read_image, with_control(self.samples[index])))
        except IMAGE_FAULTS as fault:
            return without_traceback(fault)

    @torch.no_grad()
    def encode_batch(self, indices: Sequence[int], images: Sequence[Pixels]) -> Batch:
        """Return a batch of the samples with these indices. `images` are the results of `read`."""
        samples = [self.samples[index] for index in indices]
        encoded = [
            [
                encode_image(self.encode.pixels, one, *pixels_and_weight)
                for one, pixels_and_weight in zip(with_control(sample), image, strict=True)
            ]
            for sample, image in zip(samples, images, strict=True)
        ]
        texts = [encode_unpadded(self.encode.caption, sample.caption) for sample in samples]
        controls = [control for _, *controls in encoded for control in controls]
        return join_batch([sample.name for sample in samples], [image for image, *_ in encoded], texts, controls)

    def check(self, indices: Sequence[int], broken: BrokenImages, poll: Poll) -> None:
        """Add the images with these indices that cannot be read to `broken`."""
        for index in indices:
            for sample in with_control(self.samples[index]):
                poll()
                try:
                    read_image(sample)
                except IMAGE_FAULTS as fault:
                    broken[sample.files] = without_traceback(fault)

    def blank(self, index: int) -> Batch:
        """Return zeros in the sample's bucket with the empty prompt. A rank without images computes with them."""
        sample = self.samples[index]
        width, height = sample.bucket
        zeros = {"latents": torch.zeros(CHANNELS, height // DOWNSCALE, width // DOWNSCALE)}
        return join_batch([sample.name], [zeros], [self.empty], [zeros] if sample.control else [])


class Store:
    """The folder of a cache. Several runs may share it."""

    def __init__(self, folder: Path, parts: Path) -> None:
        self.folder = folder
        # The folder of unfinished entries, one for each run.
        self.parts = parts
        # The entries that this process has written, or whose digest it has checked.
        self.checked_paths: set[str] = set()
        # The key of each file in a `FileMemo`, so that its size and times are read once.
        self.file_keys: dict[FileRange, str] = {}

    def path(self, kind: str, key_values: Sequence[object]) -> str:
        """Return the path of the entry with this key.

        `key_values` are JSON values and must contain everything that the entry depends on.
        """
        key = digest_of(json.dumps([VERSION, *key_values]).encode())
        return f"{self.folder}/{kind}/{key[:2]}/{key}.safetensors"

    def ensure(self, path: str, make: Callable[[], Tensors]) -> str:
        """Write the entry `path` if it is missing. Returns `path`."""
        if not self.has(path):
            self.put(path, make())
        return path

    def put(self, path: str, tensors: Tensors) -> None:
        """Write an entry whole, or nothing of it."""
        from safetensors.torch import save

        try:
            self.write(Path(path), save({**tensors, CHECK: check_sum(tensors)}))
        except OSError as error:
            raise OutputError(
                f"cache: cannot write {path} ({reason_of(error)}); make room and start again, what is in it stays"
            ) from error
        self.checked_paths.add(path)

    def has(self, path: str, least: int = 1) -> bool:
        """Whether the entry `path` exists and has at least `least` bytes. `read` checks its digest."""
        try:
            return stat(path).st_size >= least
        except (FileNotFoundError, NotADirectoryError):
            return False

    def read(self, path: str) -> Tensors:
        """Return the tensors of the entry `path`. A damaged entry is removed, so that the next start encodes it."""
        try:
            tensors = read_entry(Path(path), path not in self.checked_paths)
        except ReadError as error:
            if not isinstance(error.__cause__, OSError):
                with suppress(OSError):
                    Path(path).unlink()
            raise
        self.checked_paths.add(path)
        return tensors

    def write(self, path: Path, data: bytes) -> None:
        for folder in (path.parent, self.parts):
            folder.mkdir(parents=True, exist_ok=True)
        write_whole(path, data, self.parts, replace=True)


def store_of(settings: TrainingSettings) -> Store:
    """Return the cache of a run. Several runs may share it, so each has its own folder for unfinished entries."""
    out = Path(settings.out)
    folder = Path(settings.cache) if settings.cache else out / "cache"
    return Store(folder, folder / f".{digest_json(str(out.absolute()))}.parts")


def check_sum(tensors: Tensors) -> torch.Tensor:
    """Return the digest [32] of the names, shapes, dtypes and bytes of `tensors` as uint8."""
    digest = hashlib.sha256()
    for name, values in sorted(tensors.items()):
        digest.update(f"{name} {values.dtype} {list(values.shape)} ".encode())
        digest.update(values.flatten().view(torch.uint8).numpy().data)
    return torch.tensor(list(digest.digest()), dtype=torch.uint8)


def read_entry(path: Path, checks: bool = True) -> Tensors:
    """Return the tensors of an entry, which `checks` compares with its digest."""
    from safetensors import SafetensorError
    from safetensors.torch import load

    try:
        tensors = load(path.read_bytes())
        check = tensors.pop(CHECK)
    except (OSError, SafetensorError, KeyError, ValueError) as error:
        raise ReadError(f"cache: {path} cannot be read ({brief(error)}); start again, which makes it again") from error
    if checks and not torch.equal(check, check_sum(tensors)):
        raise ReadError(f"cache: {path} is damaged, its digest is another; start again, which makes it again")
    return tensors


class FileMemo:
    """A value of each image file, stored in the cache's folder so that each unchanged file is read once.

    Other users may read this file and must not learn the paths of the images, so it contains no paths. The key of a
    value is a digest: of the image's path, its range of bytes, and the size and times of its file. Nobody can check a
    guessed path against it without these numbers, and a changed image has another key.
    """

    def __init__(
        self, store: Store, name: str, compute: Callable[[FileRange, str], Any], is_value: Callable[[Any], bool]
    ) -> None:
        self.store, self.file = store, store.folder / name
        # compute(place, name) returns the value of the bytes at `place`. Its errors call them `name`.
        self.compute, self.is_value = compute, is_value
        self.values = self.read()
        self.changed = False

    def read(self) -> Json:
        try:
            values = json.loads(read_small(self.file, LARGEST_MEMO))
            if values and all(map(is_digest, values)) and all(map(self.is_value, values.values())):
                return values
        except (FileNotFoundError, NotADirectoryError):
            return {}
        except (OSError, ValueError, TypeError, AttributeError, RecursionError):
            pass
        raise ExistingFileError(
            f"cache: {self.file} is not of a training's cache; move it away, or choose another folder"
        )

    def of(self, place: FileRange, name: str) -> Any:
        """Return the value of the bytes at `place`. Errors call them `name`."""
        key = self.store.file_keys.get(place)
        if key is None:
            try:
                stamps = size_and_times(place.file)
            except OSError:
                # Reading it raises an error that names the image.
                return self.compute(place, name)
            document = [str(place.file.absolute()), place.start, place.length, stamps]
            key = self.store.file_keys[place] = digest_of(json.dumps(document).encode())
        if key not in self.values:
            self.values[key] = self.compute(place, name)
            self.changed = True
        return self.values[key]

    def save(self) -> None:
        """Write the values, together with those that other runs have written meanwhile.

        If the folder cannot be written, the next run reads the images again.
        """
        if self.changed:
            with suppress(OSError):
                self.store.write(self.file, json.dumps({**self.read(), **self.values}).encode())


def is_digest(value: object) -> bool:
    return isinstance(value, str) and len(value) == 64


def is_size(value: object) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(type(side) is int and 0 < side < 2**31 for side in value)
