"""Lines on model files: their kind, whether they are published files, and which models a LoRA fits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from ..checkpoints import Checkpoint, inspect_checkpoint
from ..checkpoints.fingerprint import files_of
from ..checkpoints.headers import PICKLED, SUFFIXES
from ..checkpoints.lora import unwrapped_layer, whole_adapters, without_values, written_names
from ..errors import CheckpointError, SanaError
from ..runtime.atomic_files import digest_file
from .arithmetic import BUNDLED
from .report import RIGHT, Report

SECTION = "Model files"
# SHA-256 of published files. DC-AE's from three repositories each; the others from one
PUBLISHED = {
    "dfd991d1b54ffabf22745c5885589d8f2a7bc59930d95d92bd741c4fc64454bb": "DC-AE 1.1",
    "15a4b09e56d95b768a0ec9da50b702e21d920333fc9b3480d66bb5c7fad9d87f": "DC-AE 1.0",
    "e7ae59c203c392db4aa4e27783e924ec3225eb563392260cf747e1130ffcdb88": "gemma_2_2b_it_elm_bf16",
    "bf06a1e6cfe1610beb98a2975e5602e7fc108d902b3ff9dd62282d749c7a2394": "gemma-2-2b-it in one file",
    "3f289bc05132635a8bc7aca7aa21255efd5e18f3710f43e3cdb96bcd41be4922": "Gemma 2's tokenizer.json",
    "61a7b147390c64585d6c3543dd6fc636906c9af3865a5548f27f31aee1d4c8e2": "Gemma 2's tokenizer.model",
}
# and bytes of some: a file of that size and another digest was changed, or did not arrive whole
SIZES = {1_249_044_836: "DC-AE 1.0 and 1.1", 5_228_717_512: "gemma-2-2b-it in one file"}


def check_files(report: Report, paths: Sequence[Path]) -> None:
    """Add lines on the files at `paths`."""
    found, others = [], 0
    visited: set[Path] = set()
    for candidate in (model for path in paths for model in candidates(report, path, visited)):
        with report.checking(SECTION, candidate.name):
            try:
                info = inspect_checkpoint(candidate)
            except CheckpointError as error:
                if candidate.suffix not in PICKLED:
                    raise
                # Pickles of other programs contain more than weights.
                report.note(SECTION, candidate.name, f"not read: {error}")
                continue
            if info.kind == "other":
                others += 1
                continue
            found.append(info)
            if info.kind != "lora":
                report.note(SECTION, candidate.name, f"{info.description}, {info.size / 1e9:.3f} GB")
    describe_loras(report, found)
    if others:
        report.note(SECTION, "files of other models", str(others))
    sana = [info for info in found if info.kind not in ("lora", "other")]
    for info in sana:
        tokenizers = info.path.glob("**/tokenizer.[jm]*") if info.path.is_dir() else ()
        # a pipe would be waited for
        for file in sorted(file for file in {*files_of(info), *tokenizers} if file.is_file()):
            check_digest(report, info, file)


def candidates(report: Report, path: Path, visited: set[Path]) -> Iterator[Path]:
    """Yield the models at `path`: the path itself if it is a file or a model's folder, else the models in the folder.

    A folder that several links lead to is visited once. A folder that cannot be read becomes a line of the report. So
    does the rest of the folder when the time is over.
    """
    for folder in path.parents[:1] if path.is_absolute() else path.parents:
        report.label(folder)
    waiting = [path]
    while waiting:
        place = waiting.pop()
        if place != path and report.late(SECTION, f"{report.label(place)} and the files after it"):
            return
        with report.checking(SECTION, place.name):
            report.label(place)
            if not place.is_dir():
                yield place
                continue
            if place != path and place.resolve() in visited:
                continue
            visited.add(place.resolve())
            if (place / "model_index.json").is_file():
                yield place
                continue
            children = list[Path]()
            for child in sorted(place.iterdir()):
                if report.late(SECTION, f"{report.label(child)} and the files after it"):
                    return
                if child.suffix in SUFFIXES or child.is_dir():
                    children.append(child)
            if any(child.suffix in SUFFIXES for child in children) and (place / "config.json").is_file():
                yield place
            else:
                waiting += reversed(children)


def check_digest(report: Report, info: Checkpoint, file: Path) -> None:
    """Add a line with the SHA-256 of `file`, and the name of the published file that it is."""
    inside = info.path.is_dir()
    what = f"SHA-256 of {file.relative_to(info.path.parent).as_posix() if inside else file.name}"
    if report.late(SECTION, what):
        return
    with report.checking(SECTION, what):
        digest = digest_file(file, lambda count: report.poll())
        name = PUBLISHED.get(digest)
        size = file.stat().st_size
        if name is not None:
            report.add(SECTION, what, "", f"{name}, {size} bytes", RIGHT)
            return
        known = f", though of the size of {SIZES[size]}" if size in SIZES else ""
        report.note(SECTION, what, f"{digest}, {size} bytes: not among those that we know{known}")


def describe_loras(report: Report, found: Sequence[Checkpoint]) -> None:
    """Add a line for each LoRA of SANA: which of the transformers here, the bundled one among them, it fits.

    Only headers are read. A LoRA of another model is no fault, so those LoRAs are counted.
    """
    here = list(found)
    if BUNDLED.is_dir():
        with report.checking(SECTION, "the bundled model"):
            here.append(inspect_checkpoint(BUNDLED))
    transformers = [part for info in here for part in info.parts or (info,) if part.kind == "transformer"]
    others = 0
    for info in found:
        if info.kind != "lora":
            continue
        if not has_layers_of_sana(info):
            others += 1
            continue
        if report.late(SECTION, f"{info.path.name} and the LoRAs after it"):
            break
        with report.checking(SECTION, info.path.name):
            report.note(SECTION, info.path.name, f"a LoRA of SANA, {fit_of(info, transformers)}")
    if others:
        report.note(SECTION, "LoRAs of other models", str(others))


def fit_of(info: Checkpoint, transformers: Sequence[Checkpoint]) -> str:
    """Return the variants of `transformers` that a LoRA fits, or why it fits none of them. Compares shapes only."""
    variants, reason = list[str](), "no model is here"
    for part in transformers:
        shapes = {
            name.removesuffix(".weight"): torch.Size(header.shape)
            for name, header in part.headers.items()
            if name.endswith(".weight") and len(header.shape) > 1
        }
        try:
            whole_adapters(info, without_values(info), shapes)
            variants.append(part.variant)
        except SanaError as error:
            reason = str(error)
    return f"fits {', '.join(dict.fromkeys(variants))}" if variants else f"fits no model here: {reason}"


def has_layers_of_sana(info: Checkpoint) -> bool:
    """Whether the LoRA changes a layer that SANA's transformers have by name."""
    names = written_names(
        f"transformer_blocks.0.{layer}" for layer in ("attn1.to_q", "attn2.to_q", "ff.conv_inverted", "ff.conv_point")
    )
    begins = tuple(f"{name}." for name in names)
    return any(unwrapped_layer(header).startswith(begins) for header in info.headers)
