"""A data set as a list of samples: images with captions, masks and control images, from a folder, a jsonl or tars.

Files of one image have the same stem: `a.png`, its caption `a.txt`, or else `a.json` with "prompt", "caption" or
"text", its mask `a-mask.png` or `a.mask.png`, and its control image `a-control.png` or `a.control.png`. An `a-mask.png`
with a caption is an image. An empty `a.txt` means that the image is trained without a caption. A missing caption is an
error.
Names that begin with a dot are ignored. Names that differ only in the encoding of their accents are the same.

Tars are read in place. Their names may also use WebDataset's fields (https://github.com/webdataset/webdataset): in
`a.caption.txt` and `a.seg.png`, everything after the first dot is the field of the sample `a`. NVIDIA's
tools/ImgDataset2WebDatasetMS.py writes such tars, and wids-meta.json lists them.
"""

from __future__ import annotations

import json
import re
import tarfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from io import BytesIO, FileIO
from os import scandir
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import TYPE_CHECKING, NamedTuple, TypeVar
from unicodedata import normalize

from ..checkpoints.files import readable
from ..errors import InputError, MissingFileError, ReadError, SanaError
from ..runtime.atomic_files import reason_of
from ..runtime.cancellation import Poll, no_poll
from ..runtime.checks import check_text
from ..runtime.text import Json, brief, get_logger
from ..runtime.user_files import FileRange, opened_range, read_range
from .images import MIDDLE, OTHER_ENDINGS, Bucket, Crop, SizeOf, decode_image, image_endings, upright_size

if TYPE_CHECKING:
    from PIL.Image import Image

logger = get_logger(__name__)

# The list of a folder of Hugging Face, and the list of WebDataset's tars.
METADATA, WIDS_INDEX = "metadata.jsonl", "wids-meta.json"
# Ends of the stems of masks and control images.
COMPANIONS = {"-mask": "mask", ".mask": "mask", "-control": "control", ".control": "control"}
# Keys of a caption in JSON, and names of WebDataset's text fields.
CAPTIONS = ("prompt", "caption", "text")
# Names of WebDataset's fields with the image. Without one, the field is only the ending.
IMAGES = ("image", "img", "rgb")
COMPRESSED = (".tar.gz", ".tgz", ".tar.xz", ".tar.bz2", ".tar.zst")
# The record of a training run, and its states and images in the same folder.
RUN, STEPS, PICTURES, SHEET = "run.json", "steps", "pictures", "validations.png"
# Folders that macOS adds to archives, that a Synology NAS adds to folders with images, and that old programs create
# from the extended headers of a tar.
HIDDEN = re.compile(r"__MACOSX|@eaDir|PaxHeaders?(\.\d+)?")
# A path that stays in its folder on every operating system, recognised in less time than by its parts.
PLAIN = re.compile(r"(?:[\w-][\w.-]*/)*[\w-][\w.-]*", re.ASCII)
# Limits in bytes. The header of a tar's member contains its name.
LARGEST_CAPTION, LARGEST_LIST, LARGEST_HEADER = 1_000_000, 1 << 30, 1 << 20
# NVIDIA's tars have 10,000 samples.
MOST_MEMBERS = 1_000_000
# The most faults that the log and an error name.
MAX_NAMED_FAULTS = 20
# The most files that the log names for a remark.
MAX_FILES_PER_REMARK = 5
# Seconds to look for broken pixels, once another fault is known.
PIXEL_CHECK_SECONDS = 30.0
# Remarks for the log. The names of the files follow.
LEFT_OUT = "images are left out, which cannot be read here (.heic needs pip install pillow-heif; save others as PNG)"
ALONE = "texts belong to no image"
UNLISTED = "images are not in metadata.jsonl and are left out"
CAPTIONED = "names end like a mask or control image, but have captions and are images"
FIELDS = "fields of samples are not used"
RUNS = "folders of training runs are left out"

# Captions of one image, and how often an epoch uses each, relative to the others.
Captions = tuple[tuple[str, float], ...]
# Names of files that are left out or read in an unexpected way, by remark.
Remarks = defaultdict[str, list[str]]
# Names of the files of one stem, by kind: "image", "mask", "control", or the ending.
Kinds = dict[str, list[str]]
T = TypeVar("T")


class Sample(NamedTuple):
    """An image with its caption. The fields after `size` depend on the phase that uses it."""

    # Path in the data set, or tar:member.
    name: str
    caption: str
    image: FileRange
    mask: FileRange | None = None
    control: FileRange | None = None
    # All captions of the image with their weights. `caption` is one of them. Empty: no caption was found.
    captions: Captions = ()
    # Width and height of the upright image. (0, 0): its header has not been read yet.
    size: tuple[int, int] = (0, 0)
    # Width and height that it is trained at. (0, 0): not chosen yet.
    bucket: Bucket = (0, 0)
    # Factor of the loss.
    weight: float = 1.0
    # A regularisation image.
    prior: bool = False
    crop: Crop = MIDDLE
    # Variants of one image have the same group. An epoch uses one of them, with probabilities according to `share`.
    group: int = 0
    share: float = 1.0

    @property
    def files(self) -> tuple[FileRange, FileRange | None]:
        """The files that the latents depend on: the image and its mask."""
        return self.image, self.mask


class Faults:
    """The faults of a data set: how many there are, and the first MAX_NAMED_FAULTS of them."""

    def __init__(self, faults: Iterable[SanaError] = ()) -> None:
        self.first: list[SanaError] = []
        self.count = 0
        for fault in faults:
            self.add(fault)

    def add(self, fault: SanaError) -> None:
        self.count += 1
        if len(self.first) < MAX_NAMED_FAULTS:
            self.first.append(without_traceback(fault))

    def check(self) -> None:
        """Raise the first fault, if there is one. With several faults, the error also has the names of the files of
        the others, and the log lists them."""
        if self.count == 1:
            raise self.first[0]
        for fault in self.first:
            logger.error("%s", fault)
        if self.count:
            first, names = self.first[0], ", ".join(map(name_in, self.first[1:]))
            names += ", and more" if self.count > MAX_NAMED_FAULTS else ""
            raise type(first)(f"{first}; also {self.count - 1} more of the data set, see the log: {names}")


def without_traceback(fault: SanaError) -> SanaError:
    """Return a copy of `fault`. A traceback would keep the data in memory that was read."""
    return type(fault)(str(fault))


def name_in(fault: SanaError) -> str:
    return str(fault).partition(": ")[0]


def is_unreadable(fault: SanaError) -> bool:
    """Whether `skip_broken` leaves out an image with this fault: it is missing, broken or cannot be read."""
    return isinstance(fault, (MissingFileError, ReadError))


def warn_of_skipped(faults: Sequence[SanaError]) -> None:
    names = ", ".join(map(name_in, faults))
    logger.warning("dataset: skip_broken leaves out %d images: %s; the first: %s", len(faults), names, faults[0])


def read_dataset(
    path: Path, poll: Poll = no_poll, skip_broken: bool = False, caption: str = "", size_of: SizeOf = upright_size
) -> list[Sample]:
    """Return the samples of a folder and its subfolders, of a .jsonl, a .tar, or the tars in a wids-meta.json.

    A metadata.jsonl or wids-meta.json in a folder replaces the other files of the folder. Samples are sorted by name,
    and a .jsonl keeps its order. Only the headers of images are read. `poll` is called for each image and cancels by
    raising. With `skip_broken`, images that are missing or cannot be read are left out, and the log lists them.
    `caption` is the caption of images without one, and `size_of` returns (width, height) of an image.

    Raises InputError for a data set without images, and otherwise the first fault. It names the other faults too.
    """
    faults, samples, skipped = Faults(), list[Sample](), list[SanaError]()
    remarks: Remarks = defaultdict(list)
    for sample in list_samples(Path(path), faults, remarks):
        poll()
        if isinstance(sample, Sample):
            sample = attempt(measure, sample, caption, size_of)
        if isinstance(sample, Sample):
            samples.append(sample)
        elif skip_broken and is_unreadable(sample):
            skipped.append(sample)
        else:
            faults.add(sample)
    # An error should also name the images with a good header and broken pixels.
    end = time.monotonic() + PIXEL_CHECK_SECONDS
    for sample in samples if faults.count else ():
        poll()
        if time.monotonic() > end:
            break
        image = attempt(open_image, sample)
        if isinstance(image, SanaError):
            faults.add(image)
    for remark, names in remarks.items():
        more = f" and {len(names) - MAX_FILES_PER_REMARK} more" if len(names) > MAX_FILES_PER_REMARK else ""
        logger.warning("dataset: %d %s: %s%s", len(names), remark, ", ".join(names[:MAX_FILES_PER_REMARK]), more)
    faults.check()
    if skipped:
        warn_of_skipped(skipped)
    if not samples:
        raise InputError(f"dataset: no image in {path}, expected files that end with .png, .jpg, .webp or the like")
    empty = [sample.name for sample in samples if not sample.caption]
    if empty:
        logger.warning("dataset: %d of %d captions are empty, the first of %s", len(empty), len(samples), empty[0])
    return samples


def measure(sample: Sample, caption: str, size_of: SizeOf) -> Sample:
    """Return `sample` with its size, and with `caption` if it has none."""
    if not sample.captions:
        if not caption:
            raise InputError(
                f"{sample.name}: has no caption, expected a text file of the same name beside it; write one, or set "
                "caption for all images without one"
            )
        sample = sample._replace(caption=caption, captions=((caption, 1.0),))
    size = size_of(sample.image, sample.name)
    for kind, place in (("mask", sample.mask), ("control image", sample.control)):
        other = size if place is None else size_of(place, f"{sample.name} ({kind})")
        if other != size:
            raise InputError(
                f"{sample.name}: its {kind} is {other[0]} x {other[1]}, expected the image's {size[0]} x {size[1]}; "
                "scale it"
            )
    return sample._replace(size=size)


def open_image(sample: Sample) -> Image:
    """Return the image of a sample as RGB, upright, with transparent parts on white."""
    return decode_image(read_range(sample.image, sample.name), sample.name)


def check_controls(samples: Iterable[Sample]) -> None:
    Faults(
        InputError(
            f"{sample.name}: has no control image, expected {PurePosixPath(sample.name).stem}-control.png beside it, "
            "or choose method lora"
        )
        for sample in samples
        if sample.control is None
    ).check()


def list_samples(path: Path, faults: Faults, remarks: Remarks) -> Iterator[Sample | SanaError]:
    """Yield each sample at `path`, whose image has not been opened yet, or the fault of its files.

    A folder or tar that cannot be read may contain many good images, so `skip_broken` never skips it: its fault is
    added to `faults`.
    """
    with readable(path):
        exists = path.exists()
        if path.is_dir():
            path = next((path / name for name in (METADATA, WIDS_INDEX) if (path / name).is_file()), path)
    tars: dict[str, Path] = {}
    if path.is_dir():
        files = list_folder(path, faults, remarks)
        yield from join_files({name: FileRange(file) for name, file in files.items()}, "", remarks)
        tars = {name: file for name, file in files.items() if name.lower().endswith(".tar")}
    elif not exists:
        raise MissingFileError(f"dataset: no file or folder {path}, expected a folder of images; see its spelling")
    elif path.suffix.lower() == ".jsonl":
        yield from read_lines(path, remarks)
    elif path.suffix.lower() == ".tar":
        tars = {path.name: path}
    elif path.name == WIDS_INDEX:
        shards = parse(read_range(FileRange(path), path.name, LARGEST_LIST), path.name).get("shardlist")
        if not isinstance(shards, list) or not all(isinstance(shard, dict) for shard in shards):
            raise InputError(f"{path.name}: expected a list 'shardlist' of tars; make it again, or remove it")
        names = [check_inner(shard.get("url"), path.name) for shard in shards]
        tars = {name: find_inside(path.parent, name, path.name) for name in names}
    else:
        raise InputError(f"dataset: got the file {path.name}, expected a folder, a .jsonl or an uncompressed .tar")
    for name, file in sorted(tars.items()):
        try:
            members = list_tar(file, name)
        except SanaError as fault:
            faults.add(fault)
        else:
            yield from join_files(members, f"{name}:", remarks, has_fields=True)


def list_folder(root: Path, faults: Faults, remarks: Remarks) -> dict[str, Path]:
    """Return the files below `root` by their path in it, with slashes. Links to folders are not followed.

    Hidden files are left out. A training run may write into a folder inside its data. Its previews have no captions,
    and the next run must not learn from them. So folders with run.json are left out, and if `root` has run.json, the
    run's own images.
    """
    files: dict[str, Path] = {}
    folders = [root]
    while folders:
        folder = folders.pop()
        try:
            # An entry of `scandir` has its kind, so 100,000 files need no calls of the system.
            with scandir(folder) as scanned:
                entries = sorted((entry.name, entry) for entry in scanned if not is_hidden(entry.name))
        except OSError as error:
            reason = reason_of(error)
            faults.add(ReadError(f"{folder}: cannot be read ({reason}); see its rights, its links and its disk"))
            continue
        prefix = "" if folder == root else f"{folder.relative_to(root).as_posix()}/"
        if any(name == RUN for name, _ in entries):
            if prefix:
                remarks[RUNS].append(prefix.removesuffix("/"))
                continue
            entries = [(name, entry) for name, entry in entries if name not in (STEPS, PICTURES, SHEET)]
        for name, entry in entries:
            name = prefix + name
            try:
                check_inner(name, "dataset")
                if name.lower().endswith(COMPRESSED):
                    raise InputError(f"{name}: a compressed tar, expected a plain one, to be read anywhere; unpack it")
                if entry.is_symlink():
                    find_inside(root, name, name)
                    if entry.is_dir():
                        continue
            except SanaError as fault:
                faults.add(fault)
                continue
            path = Path(entry.path)
            if entry.is_dir():
                folders.append(path)
            else:
                files[name] = path
    return files


class Headers(FileIO):
    """A tar whose headers cannot ask for more memory than headers need."""

    def read(self, size: int | None = -1, /) -> bytes:
        if size is None or not 0 <= size <= LARGEST_HEADER:
            raise tarfile.ReadError(f"a header of {size} bytes")
        return super().read(size)


def list_tar(file: Path, name: str) -> dict[str, FileRange]:
    """Return where the bytes of each file in the tar are. Errors call the tar `name`. Hidden files are left out."""
    members: dict[str, FileRange] = {}
    try:
        # The tar may be larger than memory. Only its headers are read.
        with opened_range(FileRange(file), name, largest=1 << 62), Headers(file) as stream:
            with tarfile.open(fileobj=stream, mode="r:") as archive:
                while member := archive.next():
                    if member.isdir() or any(map(is_hidden, PurePosixPath(member.name).parts)):
                        continue
                    if not member.isreg() or member.issparse():
                        link = brief(member.name)
                        raise InputError(
                            f"{name}: {link} is a link or device, expected plain files; make the tar again"
                        )
                    inner = check_inner(member.name, name)
                    if inner in members:
                        raise InputError(f"{name}: holds {inner} twice; make the tar again")
                    if len(members) == MOST_MEMBERS:
                        raise InputError(f"{name}: expected at most {MOST_MEMBERS} files in a tar; divide it")
                    members[inner] = FileRange(file, member.offset_data, member.size)
            # To tarfile, any damage after the first member is the end of the tar.
            stream.seek(archive.offset)
            end = stream.read(tarfile.BLOCKSIZE)
    except (tarfile.TarError, RecursionError, OverflowError, ValueError) as error:
        if isinstance(error, InputError):
            raise
        raise ReadError(f"{name}: broken or incomplete tar ({brief(error)}); copy or make it again") from error
    if end != bytes(tarfile.BLOCKSIZE):
        raise ReadError(f"{name}: a tar without its end, the last of {len(members)} files may be lost; copy it again")
    return members


def join_files(
    files: Mapping[str, FileRange], prefix: str, remarks: Remarks, has_fields: bool = False
) -> Iterator[Sample | SanaError]:
    """Yield the sample, or its fault, of every image in `files`, with the caption, mask and control image of its stem.

    `prefix` precedes the names in samples and errors. With `has_fields`, names may have WebDataset's fields.
    """
    endings = image_endings()
    stems: dict[str, Kinds] = {}
    for name in sorted(files):
        stem, suffix = split_suffix(name)
        kind = "image" if suffix.lower() in endings else suffix.lower()
        stem = normalize("NFC", stem)
        stems.setdefault(stem, {}).setdefault(kind, []).append(name)
        if kind in OTHER_ENDINGS:
            remarks[LEFT_OUT].append(prefix + name)
    if has_fields:
        for name in join_fields(stems):
            remarks[FIELDS].append(prefix + name)
    # List all companions before any is moved, because a mask may have a mask too.
    companions = [
        (stem, stem.removesuffix(mark), kind)
        for stem in stems
        for mark, kind in COMPANIONS.items()
        if stem.endswith(mark) and "image" in stems[stem] and "image" in stems.get(stem.removesuffix(mark), ())
    ]
    for stem, image_stem, kind in companions:
        if has_caption(stems[stem]):
            remarks[CAPTIONED].append(prefix + stems[stem]["image"][0])
        else:
            stems[image_stem].setdefault(kind, []).extend(stems[stem].pop("image"))
    for _, kinds in sorted(stems.items()):
        if "image" in kinds:
            yield attempt(read_files, files, prefix, kinds)
        elif ".txt" in kinds and not kinds.keys() & set(OTHER_ENDINGS):
            remarks[ALONE].append(prefix + kinds[".txt"][0])


def split_suffix(name: str) -> tuple[str, str]:
    """Return a path without its suffix, and the suffix as in PurePath, which takes longer for each of many files."""
    stem, dot, ending = name.rpartition(".")
    is_suffix = stem.rpartition("/")[2] and ending and "/" not in ending
    return (stem, dot + ending) if is_suffix else (name, "")


def has_caption(kinds: Kinds) -> bool:
    return ".txt" in kinds or ".json" in kinds


def join_fields(stems: dict[str, Kinds]) -> list[str]:
    """Move the image and the caption of WebDataset's fields to the stem of their sample. Return the names of images and
    texts in other fields, which are removed.

    `stems` are names up to the last dot. WebDataset reads a name up to the first dot as the sample, and the rest as the
    field. An image with a caption, such as v1.2.png with v1.2.txt, is a sample and no field. A .json may also describe
    a field, so it counts as a caption only if v1.png is no sample.
    """
    samples: dict[str, dict[str, str]] = {}
    for stem, kinds in stems.items():
        folder, slash, base = stem.rpartition("/")
        sample, _, field = base.partition(".")
        sample_kinds = stems.get(folder + slash + sample, {})
        is_described = ".json" in kinds and not ("image" in sample_kinds and has_caption(sample_kinds))
        is_sample = "image" in kinds and (".txt" in kinds or is_described)
        if field and not is_sample and field not in COMPANIONS.values():
            samples.setdefault(folder + slash + sample, {})[field.lower()] = stem
    unused = []
    names_of = {"image": IMAGES, ".txt": CAPTIONS, ".json": CAPTIONS}
    for sample, fields in samples.items():
        kinds = stems.get(sample, {})
        # For each kind that the sample itself does not have, the first field that has it.
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
            field_kinds = stems.pop(stem)
            unused += [name for kind in names_of for name in field_kinds.get(kind, [])]
    return unused


def read_lines(path: Path, remarks: Remarks) -> Iterator[Sample | SanaError]:
    """Yield the sample, or its fault, of each line.

    A line is {"file_name" or "image": path, "text" or "caption": ..., "mask": path, "control" or "conditioning_image":
    path}. Paths are relative to the folder of the file and stay in it.
    """
    first_lines: dict[str, int] = {}
    listed: set[str] = set()

    def read_line(number: int, line: bytes) -> Sample:
        where = f"{path.name} line {number}"
        document = parse(line, where)
        inner = check_inner(document.get("file_name", document.get("image")), where)
        if first_lines.setdefault(inner, number) != number:
            first = first_lines[inner]
            raise InputError(f"{where}: {inner} stands in line {first} already, expected it once; remove one")
        image = FileRange(find_inside(path.parent, inner, where))
        listed.add(normalize("NFC", inner))
        # diffusers' trainers of ControlNets call the control image "conditioning_image".
        companions = (document.get("mask"), document.get("control", document.get("conditioning_image")))
        mask, control = (
            None if name is None else FileRange(find_inside(path.parent, check_inner(name, where), where))
            for name in companions
        )
        listed.update(normalize("NFC", str(PurePosixPath(name))) for name in companions if name is not None)
        captions = pick_captions(document, where)
        return Sample(inner, captions[0][0], image, mask, control, captions)

    for number, line in enumerate(BytesIO(read_range(FileRange(path), path.name, LARGEST_LIST)), 1):
        if line.strip():
            yield attempt(read_line, number, line)
    # Another .jsonl may list a part of the folder on purpose.
    if path.name == METADATA:
        endings = image_endings().union(OTHER_ENDINGS)
        for name in sorted(list_folder(path.parent, Faults(), defaultdict(list))):
            if PurePosixPath(name).suffix.lower() in endings and normalize("NFC", name) not in listed:
                remarks[UNLISTED].append(name)


def attempt(function: Callable[..., T], *arguments: object) -> T | SanaError:
    """Return the result of `function`, or the error that it raises."""
    try:
        return function(*arguments)
    except SanaError as fault:
        return without_traceback(fault)


def read_files(files: Mapping[str, FileRange], prefix: str, kinds: Kinds) -> Sample:
    name = prefix + kinds["image"][0]
    for names in (kinds.get(kind, []) for kind in ("mask", "control", "image")):
        if len(names) > 1:
            raise InputError(f"{name}: {names[0]} and {names[1]} have one name, expected one of them; rename the other")
    text = next((kinds[kind][0] for kind in (".txt", ".json") if kind in kinds), None)
    captions: Captions = ()
    if text is not None:
        data, where = read_range(files[text], prefix + text, LARGEST_CAPTION), prefix + text
        captions = ((read_text(data, where), 1.0),) if ".txt" in kinds else pick_captions(parse(data, where), where)
    mask, control = (files[kinds[kind][0]] if kind in kinds else None for kind in ("mask", "control"))
    return Sample(name, captions[0][0] if captions else "", files[kinds["image"][0]], mask, control, captions)


def read_text(data: bytes, name: str) -> str:
    """Return the text in `data` without surrounding spaces."""
    try:
        return data.decode("utf-8-sig").strip()
    except UnicodeDecodeError as error:
        raise InputError(f"{name}: not UTF-8 at byte {error.start}; save it as UTF-8") from None


def parse(data: bytes, name: str) -> Json:
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
    """Return the caption in a JSON object, or all of its "captions" with their "weights"."""
    texts = next(([document[key]] for key in CAPTIONS if isinstance(document.get(key), str)), document.get("captions"))
    if not isinstance(texts, list) or not texts or not all(isinstance(text, str) for text in texts):
        raise InputError(f"{name}: has no caption, expected a text under one of {', '.join(CAPTIONS)}")
    weights = document.get("weights", [1.0] * len(texts)) if len(texts) > 1 else [1.0]
    is_complete = isinstance(weights, list) and len(weights) == len(texts)
    if not is_complete or not all(type(weight) in (int, float) and 0 < weight < 1e6 for weight in weights):
        raise InputError(f"{name}: got invalid weights, expected a number above 0 for each of its captions")
    for text in texts:
        check_text(f"{name}: caption", text)
    return tuple(zip((text.strip() for text in texts), map(float, weights), strict=True))


def is_hidden(name: str) -> bool:
    """Whether an operating system or an archiver created a file or folder with this name."""
    return (name.startswith(".") and name != "..") or HIDDEN.fullmatch(name) is not None


def check_inner(inner: object, name: str) -> str:
    """Return the path `inner`, which must stay in its folder on every operating system, with slashes and without ./"""
    if isinstance(inner, str) and PLAIN.fullmatch(inner):
        return inner
    if isinstance(inner, str) and inner and inner.isprintable():
        windows_path = PureWindowsPath(inner)
        if not windows_path.anchor and ".." not in windows_path.parts:
            return str(PurePosixPath(inner))
    raise InputError(
        f"{name}: got the path {brief(inner)}, expected one inside the data set of printable characters; rename it"
    )


def find_inside(root: Path, inner: str, name: str) -> Path:
    """Return the path `inner` of the folder `root`, which no link may lead out of."""
    path = root / inner
    try:
        if not path.exists():
            path = spelled(root, inner)
        resolved, resolved_root = path.resolve(), root.resolve()
        exists = resolved.exists()
    # RuntimeError: links that form a circle, before Python 3.13.
    except (OSError, RuntimeError) as error:
        raise ReadError(f"{name}: cannot be read ({brief(error)}); see its rights, its links and its disk") from None
    # In the cache of Hugging Face, snapshots/REVISION/a.png is a link to ../../blobs/DIGEST.
    blobs = [parent.parent / "blobs" for parent in resolved_root.parents if parent.name == "snapshots"]
    if not any(map(resolved.is_relative_to, [resolved_root, *blobs])):
        raise InputError(f"{name}: {inner} leads out of the data set's folder; put the file itself there")
    if not exists:
        raise MissingFileError(f"{name}: no such file {inner}; see its spelling")
    return path


def spelled(root: Path, inner: str) -> Path:
    """Return the path of `inner` in `root` with accents composed or decomposed as on the disk.

    macOS decomposes accents in names, and most programs compose them.
    """
    path = root
    for part in PurePosixPath(inner).parts:
        composed = normalize("NFC", part)
        if not part.isascii() and not (path / part).exists() and path.is_dir():
            part = next((entry.name for entry in path.iterdir() if normalize("NFC", entry.name) == composed), part)
        path /= part
    return path
