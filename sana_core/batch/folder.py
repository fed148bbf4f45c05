"""The output folder of a batch, with the images of earlier runs.

Every PNG contains its own description. So a run that was killed at any moment can be resumed, with or without the
manifest. The manifest lists the images for people and other programs. Threads encode and write images while the devices
generate the next ones.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from itertools import groupby
from os import cpu_count
from pathlib import Path
from stat import S_ISREG
from types import MappingProxyType
from typing import Generic, TypeVar

from ..errors import ExistingFileError, InputError
from ..runtime.atomic_files import digest_of, patiently, reason_of, remove, sync_folder, write_whole
from ..runtime.cancellation import Poll
from ..runtime.folder_lock import Hold
from ..runtime.text import Json, get_logger
from .plan import LARGEST_SEED, ImageSpec
from .png import describe_image, file_name, is_damaged, parse_finite, read_entry, write_image

logger = get_logger(__name__)

MANIFEST = "manifest.json"
# Entries of an image that was chosen by its score.
CHOSEN = ("score", "rank")
# Settings that the manifests of all versions contain.
KNOWN_BY = {"width", "height", "steps", "sampler"}
# The manifest is written again after MANIFEST_INTERVAL seconds, or after MANIFEST_PAUSE times the seconds that the last
# write took if this is longer. With 100,000 images it has 30 MB.
MANIFEST_INTERVAL = 5.0
MANIFEST_PAUSE = 20


class OutputFolder:
    """The images in a folder that this run has locked, and its manifest. `settings` come from `describe_settings`."""

    def __init__(self, held: Hold, prompts: Sequence[str], settings: Json) -> None:
        self.held, self.path, self.prompts, self.settings = held, held.folder, prompts, settings
        self.entries: dict[str, Json] = {}
        # For each run in this folder, and consecutive prompts with the same seed: the first prompt, the prompt after
        # the last one, the seed, and the images per prompt.
        self.claims: list[list[int]] = []
        # The digest of the manifest that this run has read or written. None: there is no manifest.
        self.manifest = manifest_digest(self.path / MANIFEST)
        # When the manifest is written again, in time.monotonic().
        self.next_write = 0.0
        # Whether the log has a warning about a manifest that could not be written.
        self.has_warned = False

    def find_done(
        self, images: Sequence[ImageSpec], progress: Callable[[int], None] = lambda count: None
    ) -> frozenset[int]:
        """Return the numbers of the images that are complete in the folder, with the current settings.

        Reads every file. `progress` receives the number of images before each image, and cancels by raising. An image
        of ours that a power failure has damaged is removed.
        """
        document = read_manifest(self.path)
        listed = {name: entry for name, entry in document["images"].items() if (self.path / name).is_file()}
        if listed and document["settings"] != self.settings:
            name, entry = next(iter(listed.items()))
            raise self.mismatch(self.path / name, entry, document["settings"])
        self.entries, self.claims, finished = dict(listed), document["claims"], set()
        for count, image in enumerate(images):
            progress(count)
            name = file_name(image)
            file = self.path / name
            if not file.exists() and not file.is_symlink():
                continue
            if not file.is_file():
                # A folder, a pipe, or a link to one of them or to nowhere. Reading a pipe would wait forever.
                raise InputError(f"out: {file} is not of this batch; choose another folder, or remove it")
            data = patiently(file.read_bytes)
            digest = digest_of(data)
            # Decoding a PNG takes long. An image in the manifest is complete if the digest of its file is the same.
            entry = listed[name] if listed.get(name, {}).get("sha256") == digest else read_entry(data)
            if entry is None:
                if not (is_damaged(data) and (name in listed or self.is_claimed(image))):
                    raise InputError(f"out: {file} is not of this batch; choose another folder, or remove it")
                remove(file)
                self.entries.pop(name, None)
                continue
            if entry.get("key") != self.entry(image)["key"]:
                raise self.mismatch(file, entry, entry.get("settings", self.settings), self.prompts[image.prompt])
            finished.add(image.number)
            self.entries[name] = {**self.entry(image), **chosen(entry), "sha256": digest}
        claims = [*map(tuple, self.claims), *claims_of(images)]
        self.claims = [list(claim) for claim in dict.fromkeys(claims)]
        self.write_manifest()
        return frozenset(finished)

    def mismatch(self, file: Path, entry: Json, settings: Json, prompt: str | None = None) -> InputError:
        """Return the error for an image with another prompt or other settings. It names the first difference."""
        changed = [name for name, value in self.settings.items() if settings.get(name) != value]
        difference = f"{changed[0]} {settings.get(changed[0])!r:.40}" if changed else "unknown"
        if "version" in changed:
            difference = "made by another version of sana_core, which described them otherwise"
        if prompt is not None and entry.get("prompt") != prompt:
            difference = f"prompt {entry.get('prompt')!r:.60}"
        return InputError(f"out: {file} has another prompt or other settings ({difference}); choose another folder")

    def is_claimed(self, image: ImageSpec) -> bool:
        """Whether an earlier run has generated or was going to generate this image.

        It would have stopped if another file had had this name, so the file is ours.
        """
        return any(
            first <= image.prompt < end and (image.seed - seed) % (LARGEST_SEED + 1) < count
            for first, end, seed, count in self.claims
        )

    def entry(self, image: ImageSpec) -> Json:
        return describe_image(self.prompts[image.prompt], image.seed, self.settings)

    def write(self, image: ImageSpec, png: bytes) -> str:
        """Write the PNG of an image, and return its digest. Several threads may call this at once. Raises OSError."""
        self.held.check()
        return write_image(self.path / file_name(image), png, self.held.run)

    def note(self, image: ImageSpec, digest: str, more: Mapping[str, object] = MappingProxyType({})) -> Path:
        """Add an image in the folder to the manifest, with the digest of its file. Returns its path. Raises OSError."""
        path = self.path / file_name(image)
        self.entries[path.name] = {**self.entry(image), **more, "sha256": digest}
        if time.monotonic() > self.next_write:
            self.write_manifest()
        return path

    def write_manifest(self) -> None:
        """Write the manifest: prompt, seed, key and digest of each image.

        The images are flushed to the disk before, so that a power failure cannot damage a listed image. If another
        program has the manifest open, it is written later. Raises OSError.
        """
        self.held.check()
        started = time.monotonic()
        sync_folder(self.path)
        try:
            self.replace_manifest()
        except PermissionError as error:
            if not self.has_warned:
                logger.warning("%s is not up to date (%s); every image is complete", MANIFEST, reason_of(error))
            self.has_warned = True
        now = time.monotonic()
        self.next_write = now + max(MANIFEST_INTERVAL, MANIFEST_PAUSE * (now - started))

    def replace_manifest(self) -> None:
        """Write the manifest. Raises OSError, and ExistingFileError if another program has written it."""
        path = self.path / MANIFEST
        if path.exists() and (self.manifest is None or manifest_digest(path) != self.manifest):
            raise ExistingFileError(f"out: somebody else has written {path}; move it away, the same command resumes")
        document = {"settings": self.settings, "claims": self.claims, "images": dict(sorted(self.entries.items()))}
        data = json.dumps(document, indent=1, allow_nan=False).encode()
        write_whole(path, data, self.held.run, replace=True)
        sync_folder(self.path)
        self.manifest = digest_of(data)


def claims_of(images: Sequence[ImageSpec]) -> Iterator[tuple[int, int, int, int]]:
    """Yield a claim for each group of consecutive prompts with the same seed. `images` are all images of a batch."""
    count = sum(image.prompt == images[0].prompt for image in images)
    for seed, group in groupby(images[::count], key=lambda image: image.seed):
        prompts = [image.prompt for image in group]
        yield prompts[0], prompts[-1] + 1, seed, count


def chosen(entry: Json) -> Json:
    return {name: entry[name] for name in CHOSEN if name in entry}


def read_manifest(folder: Path) -> Json:
    """Return settings, claims and images of the manifest. They are empty if there is no manifest."""
    path = folder / MANIFEST
    try:
        # Reading a pipe would wait forever.
        if not S_ISREG(path.stat().st_mode):
            raise ValueError
        document = parse_finite(patiently(path.read_bytes))
        settings, images, claims = document["settings"], document["images"], document["claims"]
        ours = settings.keys() >= KNOWN_BY and all("key" in entry for entry in images.values())
        ours = ours and all([type(number) for number in claim] == [int] * 4 for claim in claims)
    except FileNotFoundError:
        return {"settings": {}, "claims": [], "images": {}}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        ours = False
    if not ours:
        raise InputError(f"out: {path} is not of a batch; choose another folder, or move it away")
    return {"settings": settings, "claims": claims, "images": images}


def manifest_digest(path: Path) -> str | None:
    try:
        return digest_of(patiently(path.read_bytes)) if path.is_file() else None
    except FileNotFoundError:
        return None


T = TypeVar("T")
# More threads would not help: four devices at 10 images per second each need 2 cores for the PNG files of 1024 px.
LARGEST_THREADS = 8
# Images per thread that may wait or be written at once. If there are more, the batch waits for the disk, because the
# images are in memory until then.
BACKLOG = 2
POLL_INTERVAL = 0.2


def default_threads() -> int:
    """Return the number of threads. There are at least two, because a thread may wait for a slow disk."""
    return max(2, min(LARGEST_THREADS, (cpu_count() or 1) // 2))


class Writers(Generic[T]):
    """Calls `write` for each item, in threads.

    An error of `write` is raised by the next call of `put` or `finish`. Leaving the context waits for the items that
    are being written, so that no file is incomplete. If another exception ends the context, the waiting items are
    written too. After an error of `write`, such as a full disk, and after Ctrl+C they are dropped.
    """

    def __init__(self, write: Callable[[T], None], threads: int) -> None:
        self.write, self.capacity = write, BACKLOG * threads
        self.executor = ThreadPoolExecutor(threads, "sana writer")
        self.pending: set[Future[None]] = set()
        # Whether an error of `write` was raised.
        self.failed = False

    def __enter__(self) -> Writers[T]:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        self.executor.shutdown(wait=True, cancel_futures=self.failed or not isinstance(error, Exception))

    def put(self, item: T, poll: Poll) -> None:
        self.wait_for(self.capacity - 1, poll)
        self.pending.add(self.executor.submit(self.write, item))

    def finish(self, poll: Poll) -> None:
        self.wait_for(0, poll)

    def wait_for(self, allowed: int, poll: Poll) -> None:
        while True:
            finished = {future for future in self.pending if future.done()}
            self.pending -= finished
            for future in finished:
                self.failed |= future.exception() is not None
                future.result()
            if len(self.pending) <= allowed:
                return
            wait(self.pending, POLL_INTERVAL, FIRST_COMPLETED)
            poll()
