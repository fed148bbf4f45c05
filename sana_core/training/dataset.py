"""A data set as a list of samples: images with captions, masks and control images, from a folder, jsonl or tars.

Files that belong together have one stem: `a.png`, its caption `a.txt`, or else `a.json` with "prompt", "caption" or
"text", its mask `a-mask.png` or `a.mask.png`, and so is the `a-control.png` that a ControlNet learns to follow. An
`a-mask.png` with a caption of its own is an image. An empty `a.txt` is an image that is learned without a caption; a
missing one is an error. Names that begin with a dot are left out. Names that differ only in how accents are encoded are
the same.

In a tar, WebDataset's fields work as well: in `a.caption.txt` and `a.seg.png`, everything after the first dot is the
field of the sample `a`.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from io import BytesIO
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, NamedTuple
from unicodedata import normalize

from ..errors import InputError, MissingFileError, ReadError, SanaError
from ..runtime.cancellation import Poll, no_poll
from ..runtime.checks import check_text
from ..runtime.text import Json, brief
from .data_files import TAR_ENDINGS, check_inner, find_inside, list_folder, list_shards, list_tar
from .images import MIDDLE, OTHER_ENDINGS, Crop, FileRange, decode_image, image_endings, read_range, upright_size

if TYPE_CHECKING:
    from PIL.Image import Image

logger = logging.getLogger(__name__)

# of Hugging Face's folders of images, and of WebDataset's
LISTS = ("metadata.jsonl", "wids-meta.json")
# what the stem of a mask or of a control image ends with
COMPANIONS = {"-mask": "mask", ".mask": "mask", "-control": "control", ".control": "control"}
CAPTIONS = ("prompt", "caption", "text")
# Names of WebDataset's fields with the image, where no field is just its ending. CAPTIONS are names of text fields.
IMAGES = ("image", "img", "rgb")
# bytes
LARGEST_CAPTION = 1_000_000
LARGEST_LIST = 1 << 30
# faults that the log and an error name
NAMED = 20
# seconds
CHECKED = 30.0
# files of each remark that the log names
SHOWN = 5


# texts, each with the share of the epochs that learn it
Captions = tuple[tuple[str, float], ...]


class Sample(NamedTuple):
    """An image, and what it shows."""

    name: str  # relative path, or tar:member
    caption: str
    size: tuple[int, int]  # width, height, upright
    image: FileRange
    mask: FileRange | None = None
    control: FileRange | None = None
    captions: Captions = ()  # where there are several
    # by the settings of a phase, of `variants`
    resolution: int = 0
    weight: float = 1.0  # of its loss
    prior: bool = False  # a regularisation image
    crop: Crop = MIDDLE
    group: int = 0
    share: float = 1.0


# makes a sample, or raises what is wrong with it
Make = Callable[[], Sample]


class Faults:
    """The faults of a data set: the number of all, and the first ones without their tracebacks, which would hold the
    data that was read."""

    def __init__(self, faults: Iterable[SanaError] = ()) -> None:
        self.first: list[SanaError] = []
        self.count = 0
        for fault in faults:
            self.add(fault)

    def add(self, fault: SanaError) -> None:
        self.count += 1
        if len(self.first) < NAMED:
            self.first.append(without_traceback(fault))

    def check(self) -> None:
        """Raise the first fault. If there are more, log the first ones, and add the names of their files to the
        error."""
        if not self.count:
            return
        first = self.first[0]
        if self.count == 1:
            raise first
        for fault in self.first:
            logger.error("%s", fault)
        names = ", ".join(map(name_in, self.first[1:]))
        names += "" if self.count == len(self.first) else ", and more"
        raise type(first)(f"{first}; likewise {self.count - 1} more of the data set, see the log: {names}")


def without_traceback(fault: SanaError) -> SanaError:
    return type(fault)(str(fault))


def name_in(fault: SanaError) -> str:
    """Return the name of the file that a fault begins with."""
    return str(fault).partition(": ")[0]


def is_unreadable(fault: SanaError) -> bool:
    """Whether `fault` is one that `skip_broken` leaves out: an image that is missing, broken or cannot be read."""
    return isinstance(fault, (MissingFileError, ReadError))


def warn_of_skipped(faults: Sequence[SanaError]) -> None:
    """Log the names of the images that `skip_broken` leaves out, and the reason of the first one."""
    names = ", ".join(map(name_in, faults))
    logger.warning("dataset: skip_broken leaves out %d images: %s; the first: %s", len(faults), names, faults[0])


class Remarks:
    """Files of a data set that are left out or read in an unexpected way, with the reason."""

    def __init__(self) -> None:
        # Reason: the number of files, and the names of the first ones.
        self.files: dict[str, tuple[int, list[str]]] = {}

    def add(self, reason: str, name: str) -> None:
        count, first = self.files.get(reason, (0, []))
        self.files[reason] = (count + 1, first if count >= SHOWN else [*first, name])

    def log(self) -> None:
        """Write one line for each reason."""
        for reason, (count, first) in self.files.items():
            more = f" and {count - len(first)} more" if count > len(first) else ""
            logger.warning("dataset: %d %s: %s%s", count, reason, ", ".join(first), more)


LEFT_OUT = "images are left out, which cannot be read here (.heic needs pip install pillow-heif; save others as PNG)"
ALONE = "texts belong to no image"
UNLISTED = "images are not in metadata.jsonl and are left out"
CAPTIONED = "names end like a mask or control image, but have captions and are images"
FIELDS = "fields of samples are not used"
RUNS = "folders of training runs are left out"


def read_dataset(path: Path, poll: Poll = no_poll, skip_broken: bool = False) -> list[Sample]:
    """Return the samples of a folder with all in it, of a .jsonl, a .tar, or the tars that a wids-meta.json lists.

    A folder that holds metadata.jsonl or wids-meta.json is what that lists. Sorted by name, a jsonl's in its own order.
    Of images only the headers are read; `poll` is called for each and cancels by raising. With `skip_broken` images
    that are missing or cannot be read are left out, and the log lists them. Raises SanaError for the
    first fault, with the number of the others, which the log names; InputError for a data set without images.
    """
    faults, samples, skipped, remarks = Faults(), list[Sample](), list[SanaError](), Remarks()
    for make in list_samples(Path(path), remarks):
        poll()
        try:
            samples.append(make())
        except SanaError as fault:
            # A folder or tar that cannot be read may hold many good images, so it is never skipped.
            is_container = isinstance(make, partial) and make.func is refuse
            if skip_broken and is_unreadable(fault) and not is_container:
                skipped.append(without_traceback(fault))
            else:
                faults.add(fault)
    if faults.count:
        # Name the images with a good header and broken pixels in the same error.
        add_broken(faults, samples, poll)
    remarks.log()
    faults.check()
    if skipped:
        warn_of_skipped(skipped)
    if not samples:
        raise InputError(f"dataset: no image in {path}, expected files that end with .png, .jpg, .webp or the like")
    empty = [sample.name for sample in samples if not sample.caption]
    if empty:
        logger.warning("dataset: %d of %d captions are empty, the first of %s", len(empty), len(samples), empty[0])
    return samples


def add_broken(faults: Faults, samples: Iterable[Sample], poll: Poll) -> None:
    """Add the images to `faults` that cannot be decoded, as far as they are found within CHECKED seconds."""
    end = time.monotonic() + CHECKED
    for sample in samples:
        poll()
        if time.monotonic() > end:
            return
        try:
            open_image(sample)
        except SanaError as fault:
            faults.add(fault)


def list_samples(path: Path, remarks: Remarks) -> Iterator[Make]:
    """Yield what makes each of the samples at `path`, by what it is."""
    if path.is_dir():
        for listed in LISTS:
            if (path / listed).is_file():
                yield from list_samples(path / listed, remarks)
                return
        files, faults, runs = list_folder(path)
        for inner in runs:
            remarks.add(RUNS, inner)
        yield from (partial(refuse, fault) for fault in faults)
        yield from list_pairs({name: FileRange(file) for name, file in files.items()}, "", remarks)
        tars = {name: file for name, file in files.items() if name.lower().endswith(TAR_ENDINGS)}
        yield from list_tars(tars, remarks)
    elif not path.exists():
        raise MissingFileError(f"dataset: no file or folder {path}, expected a folder of images; see its spelling")
    elif path.suffix == ".jsonl":
        yield from list_lines(path, remarks)
    elif path.suffix == ".tar":
        yield from list_tars({path.name: path}, remarks)
    elif path.name == "wids-meta.json":
        document = parse(read_range(FileRange(path), path.name, LARGEST_LIST), path.name)
        shards = list_shards(document, path.name)
        yield from list_tars({inner: find_inside(path.parent, inner, path.name) for inner in shards}, remarks)
    else:
        raise InputError(f"dataset: got the file {path.name}, expected a folder, a .jsonl or an uncompressed .tar")


def refuse(fault: SanaError) -> Sample:
    raise fault


def open_image(sample: Sample) -> Image:
    """Return the sample's image as RGB, upright, transparent parts on white.

    Raises ReadError for a broken one, MissingFileError, and InputError.
    """
    return decode_image(read_range(sample.image, sample.name), sample.name)


def list_tars(shards: Mapping[str, Path], remarks: Remarks) -> Iterator[Make]:
    """Yield what makes the samples of each tar, or for a whole tar that is broken what is wrong."""
    for shard, file in sorted(shards.items()):
        try:
            members = list_tar(file, shard)
        except SanaError as fault:
            yield partial(refuse, fault)
        else:
            yield from list_pairs(members, f"{shard}:", remarks, has_fields=True)


# Files of one stem, by their kinds: "image", "mask", "control", or their ending.
Kinds = dict[str, list[str]]


def list_pairs(
    files: Mapping[str, FileRange], before: str, remarks: Remarks, has_fields: bool = False
) -> Iterator[Make]:
    """Yield what makes each image of `files` a sample, with what belongs to it; `before` stands before the names in
    errors. With `has_fields`, names may have WebDataset's fields."""
    endings = image_endings()
    stems: dict[str, Kinds] = {}
    for name in sorted(files):
        suffix = PurePosixPath(name).suffix
        kind = "image" if suffix.lower() in endings else suffix.lower()
        stem = normalize("NFC", name[: len(name) - len(suffix)])
        stems.setdefault(stem, {}).setdefault(kind, []).append(name)
        if kind in OTHER_ENDINGS:
            remarks.add(LEFT_OUT, before + name)
    if has_fields:
        for name in join_fields(stems):
            remarks.add(FIELDS, before + name)
    marked = [
        (stem, stem[: -len(mark)], kind) for stem in stems for mark, kind in COMPANIONS.items() if stem.endswith(mark)
    ]
    # found before any is moved, for a mask may have one too
    for stem, base, kind in [each for each in marked if all("image" in stems.get(name, ()) for name in each[:2])]:
        if has_caption(stems[stem]):
            remarks.add(CAPTIONED, before + stems[stem]["image"][0])
        else:
            stems[base].setdefault(kind, []).extend(stems[stem].pop("image"))
    for stem, kinds in sorted(stems.items()):
        if "image" in kinds:
            yield partial(pair, files, before, stem, kinds)
        elif ".txt" in kinds and not kinds.keys() & set(OTHER_ENDINGS):
            remarks.add(ALONE, before + kinds[".txt"][0])


def has_caption(kinds: Kinds) -> bool:
    return ".txt" in kinds or ".json" in kinds


def join_fields(stems: dict[str, Kinds]) -> list[str]:
    """Move the image and the caption of WebDataset's fields to the stem of their sample. Return the names of images and
    texts in other fields, which are removed.

    `stems` come from names up to the last dot. WebDataset reads a name up to the first dot as the sample, and the rest
    as the field. An image with a caption, such as v1.2.png with v1.2.txt, is a sample and no field. A .json may also
    describe a field, so it counts as a caption only where v1.png is no sample.
    """
    samples: dict[str, dict[str, str]] = {}
    for stem, kinds in stems.items():
        folder, slash, base = stem.rpartition("/")
        sample, _, field = base.partition(".")
        sample_kinds = stems.get(folder + slash + sample, {})
        is_described = ".json" in kinds and not ("image" in sample_kinds and has_caption(sample_kinds))
        is_whole = "image" in kinds and (".txt" in kinds or is_described)
        if field and not is_whole and field not in COMPANIONS.values():
            samples.setdefault(folder + slash + sample, {})[field.lower()] = stem
    unused = []
    for sample, fields in samples.items():
        kinds = stems.get(sample, {})
        names_of = {"image": IMAGES, ".txt": CAPTIONS, ".json": CAPTIONS}
        # The first field that has the kind, where the sample itself has none.
        chosen = {
            kind: next((name for name in names if kind in stems.get(fields.get(name, ""), ())), None)
            for kind, names in names_of.items()
            if kind not in kinds
        }
        if "image" not in kinds and chosen["image"] is None:
            continue
        for kind, name in chosen.items():
            if name is not None:
                kinds[kind] = stems[fields[name]].pop(kind)
        stems[sample] = kinds
        for stem in fields.values():
            other = stems.pop(stem)
            unused += [name for kind in names_of for name in other.get(kind, [])]
    return unused


def pair(files: Mapping[str, FileRange], before: str, stem: str, kinds: Mapping[str, list[str]]) -> Sample:
    """Return the sample of the files with this stem, and of its mask and control image, by their kinds."""
    name = before + kinds["image"][0]
    for names in (kinds.get(kind, []) for kind in ("mask", "control", "image")):
        if len(names) > 1:
            raise InputError(f"{name}: {names[0]} and {names[1]} have one name, expected one of them; rename the other")
    text = next((kinds[kind][0] for kind in (".txt", ".json") if kind in kinds), None)
    if text is None:
        stem = PurePosixPath(stem).name
        raise InputError(f"{name}: has no caption, expected {stem}.txt beside it; an empty one is none")
    data = read_range(files[text], before + text, LARGEST_CAPTION)
    if ".txt" in kinds:
        captions: Captions = ((read_text(data, before + text), 1.0),)
    else:
        captions = pick_captions(parse(data, before + text), before + text)
    mask, control = (files[kinds[kind][0]] if kind in kinds else None for kind in ("mask", "control"))
    return make_sample(name, captions, files[kinds["image"][0]], mask, control)


def make_sample(
    name: str, captions: Captions, image: FileRange, mask: FileRange | None, control: FileRange | None
) -> Sample:
    """Return the sample. Raises as `upright_size` does, and InputError for what is of another size than the image."""
    size = upright_size(image, name)
    for kind, place in (("mask", mask), ("control image", control)):
        other = size if place is None else upright_size(place, f"{name} ({kind})")
        if other != size:
            raise InputError(
                f"{name}: its {kind} is {other[0]} x {other[1]}, expected the image's {size[0]} x {size[1]}; scale it"
            )
    return Sample(name, captions[0][0], size, image, mask, control, captions if len(captions) > 1 else ())


def check_controls(samples: Iterable[Sample]) -> None:
    """Raise InputError for the first sample without a control image, with the number of the others."""
    faults = Faults()
    for name in [sample.name for sample in samples if sample.control is None]:
        stem = PurePosixPath(name).stem
        faults.add(
            InputError(f"{name}: has no control image, expected {stem}-control.png beside it, or choose method lora")
        )
    faults.check()


def read_text(data: bytes, name: str) -> str:
    """Return the text in `data`, without the spaces around it. Raises InputError for anything but UTF-8."""
    try:
        return data.decode("utf-8-sig").strip()
    except UnicodeDecodeError as error:
        raise InputError(f"{name}: not UTF-8 at byte {error.start}; save it as UTF-8") from None


def parse(data: bytes, name: str) -> Json:
    """Return the JSON object in `data`. Raises InputError."""
    try:
        document = json.loads(read_text(data, name))
    except RecursionError:
        raise InputError(f"{name}: its JSON nests too deeply; write it again") from None
    except json.JSONDecodeError as error:
        raise InputError(f"{name}: no JSON ({brief(error)}); correct it") from None
    if not isinstance(document, dict):
        raise InputError(f"{name}: got a {type(document).__name__} of JSON, expected an object; correct it")
    return document


def pick_captions(document: Json, name: str) -> Captions:
    """Return the captions in a JSON object, with the share of each: one, or all of "captions", by their "weights" if
    those stand beside it.

    Raises InputError for an object without, for half a character, and for weights that are none.
    """
    texts = next(([document[key]] for key in CAPTIONS if isinstance(document.get(key), str)), document.get("captions"))
    if isinstance(texts, list) and texts and all(isinstance(each, str) for each in texts):
        weights = document.get("weights", [1.0] * len(texts)) if len(texts) > 1 else [1.0]
        known = isinstance(weights, list) and len(weights) == len(texts)
        if not known or not all(type(each) in (int, float) and 0 < each < 1e6 for each in weights):
            raise InputError(f"{name}: got invalid weights, expected a number above 0 for each of its captions")
        for text in texts:
            check_text(f"{name}: caption", text)
        return tuple(zip((each.strip() for each in texts), map(float, weights), strict=True))
    raise InputError(f"{name}: has no caption, expected a text under one of {', '.join(CAPTIONS)}")


def list_lines(path: Path, remarks: Remarks) -> Iterator[Make]:
    """Yield what makes the sample of each line: {"file_name" or "image": path, "text" or "caption": ..., "mask": path,
    "control" or "conditioning_image": path}.

    Paths are relative to the file's folder and stay in it. The images of the folder that metadata.jsonl does not name
    are remarked.
    """
    lines = BytesIO(read_range(FileRange(path), path.name, LARGEST_LIST))
    first: dict[str, int] = {}
    listed: set[str] = set()

    def read_line(number: int, line: bytes) -> Sample:
        where = f"{path.name} line {number}"
        document = parse(line, where)
        inner = check_inner(document.get("file_name", document.get("image")), where)
        if first.setdefault(inner, number) != number:
            raise InputError(f"{where}: {inner} stands in line {first[inner]} already, expected it once; remove one")
        image = FileRange(find_inside(path.parent, inner, where))
        listed.add(normalize("NFC", inner))
        # the latter is what diffusers' trainers of ControlNets call it
        others = (document.get("mask"), document.get("control", document.get("conditioning_image")))
        mask, control = (
            None if other is None else FileRange(find_inside(path.parent, check_inner(other, where), where))
            for other in others
        )
        listed.update(normalize("NFC", str(PurePosixPath(other))) for other in others if other is not None)
        return make_sample(inner, pick_captions(document, where), image, mask, control)

    for number, line in enumerate(lines, 1):
        if line.strip():
            yield partial(read_line, number, line)
    # Another .jsonl may list a part of the folder on purpose.
    if path.name == LISTS[0]:
        endings = image_endings()
        for name in sorted(list_folder(path.parent).files):
            suffix = PurePosixPath(name).suffix.lower()
            if (suffix in endings or suffix in OTHER_ENDINGS) and normalize("NFC", name) not in listed:
                remarks.add(UNLISTED, name)
