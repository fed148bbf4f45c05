"""Lines about model files: their kind, whether they are published files, and which models a LoRA fits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from ..checkpoints import Checkpoint, inspect_checkpoint
from ..checkpoints.checkpoint import TRANSFORMER_KINDS
from ..checkpoints.fingerprint import files_of
from ..checkpoints.headers import PICKLED, SUFFIXES
from ..checkpoints.lora import unwrapped_layer, whole_adapters, without_values, written_names
from ..errors import CheckpointError, SanaError
from ..model.known_models import DEMO_MODEL
from ..runtime.atomic_files import digest_file
from .report import RIGHT, Report

SECTION = "Model files"
BUNDLED = Path(__file__).parents[2] / "demo" / DEMO_MODEL
# SHA-256 of published files. Each DC-AE is in three repositories, the other files are in one.
PUBLISHED = {
    "dfd991d1b54ffabf22745c5885589d8f2a7bc59930d95d92bd741c4fc64454bb": "DC-AE 1.1",
    "15a4b09e56d95b768a0ec9da50b702e21d920333fc9b3480d66bb5c7fad9d87f": "DC-AE 1.0",
    "e7ae59c203c392db4aa4e27783e924ec3225eb563392260cf747e1130ffcdb88": "gemma_2_2b_it_elm_bf16",
    "bf06a1e6cfe1610beb98a2975e5602e7fc108d902b3ff9dd62282d749c7a2394": "gemma-2-2b-it in one file",
    "3f289bc05132635a8bc7aca7aa21255efd5e18f3710f43e3cdb96bcd41be4922": "Gemma 2's tokenizer.json",
    "61a7b147390c64585d6c3543dd6fc636906c9af3865a5548f27f31aee1d4c8e2": "Gemma 2's tokenizer.model",
}
# Sizes in bytes. A file with such a size and another digest was changed or damaged.
SIZES = {1_249_044_836: "DC-AE 1.0 and 1.1", 5_228_717_512: "gemma-2-2b-it in one file"}


def check_files(report: Report, paths: Sequence[Path]) -> None:
    models, foreign_files = [], 0
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
                foreign_files += 1
                continue
            models.append(info)
            if info.kind != "lora":
                report.note(SECTION, candidate.name, f"{info.description}, {info.size / 1e9:.3f} GB")
    describe_loras(report, models)
    if foreign_files:
        report.note(SECTION, "files of other models", str(foreign_files))
    for info in models:
        if info.kind == "lora":
            continue
        tokenizers = info.path.glob("**/tokenizer.[jm]*") if info.path.is_dir() else ()
        # Reading a pipe would wait for ever.
        for file in sorted(file for file in {*files_of(info), *tokenizers} if file.is_file()):
            check_digest(report, info, file)


def candidates(report: Report, path: Path, visited: set[Path]) -> Iterator[Path]:
    """Yield the models at `path`: the path itself if it is a file or a model's folder, else the models in the folder.

    A folder that several links lead to is visited once. A folder that cannot be read becomes a line of the report. When
    the time is over, a line names the first folder or file that was not visited.
    """
    for folder in path.parents[:1] if path.is_absolute() else path.parents:
        report.label(folder)
    pending = [path]
    while pending:
        candidate = pending.pop()
        if candidate != path and report.late(SECTION, f"{report.label(candidate)} and the files after it"):
            return
        with report.checking(SECTION, candidate.name):
            report.label(candidate)
            if not candidate.is_dir():
                yield candidate
                continue
            if candidate != path and candidate.resolve() in visited:
                continue
            visited.add(candidate.resolve())
            if (candidate / "model_index.json").is_file():
                yield candidate
                continue
            children = list[Path]()
            for child in sorted(candidate.iterdir()):
                if report.late(SECTION, f"{report.label(child)} and the files after it"):
                    return
                if child.suffix in SUFFIXES or child.is_dir():
                    children.append(child)
            if any(child.suffix in SUFFIXES for child in children) and (candidate / "config.json").is_file():
                yield candidate
            else:
                pending += reversed(children)


def check_digest(report: Report, info: Checkpoint, file: Path) -> None:
    """Add a line with the SHA-256 of `file`, or with the name of the published file with this SHA-256."""
    inside = info.path.is_dir()
    subject = f"SHA-256 of {file.relative_to(info.path.parent).as_posix() if inside else file.name}"
    if report.late(SECTION, subject):
        return
    with report.checking(SECTION, subject):
        digest = digest_file(file, lambda count: report.poll())
        name = PUBLISHED.get(digest)
        size = file.stat().st_size
        if name is not None:
            report.add(SECTION, subject, "", f"{name}, {size} bytes", RIGHT)
            return
        similar = f", but it has the size of {SIZES[size]}" if size in SIZES else ""
        report.note(SECTION, subject, f"{digest}, {size} bytes: not a published file that this pack knows{similar}")


def describe_loras(report: Report, models: Sequence[Checkpoint]) -> None:
    """Add a line for each LoRA of SANA: which transformers in `models`, including the bundled one, it fits.

    Reads only headers. LoRAs of other models are not faults. They are only counted.
    """
    bases = list(models)
    if BUNDLED.is_dir():
        with report.checking(SECTION, "the bundled model"):
            bases.append(inspect_checkpoint(BUNDLED))
    transformers = [part for info in bases for part in info.components if part.kind in TRANSFORMER_KINDS]
    foreign_loras = 0
    for info in models:
        if info.kind != "lora":
            continue
        if not has_layers_of_sana(info):
            foreign_loras += 1
            continue
        if report.late(SECTION, f"{info.path.name} and the LoRAs after it"):
            break
        with report.checking(SECTION, info.path.name):
            report.note(SECTION, info.path.name, f"a LoRA of SANA, {fit_of(info, transformers)}")
    if foreign_loras:
        report.note(SECTION, "LoRAs of other models", str(foreign_loras))


def fit_of(info: Checkpoint, transformers: Sequence[Checkpoint]) -> str:
    """Return the variants of `transformers` that a LoRA fits, or why it fits none of them. Compares shapes only."""
    variants, reason = list[str](), "there is no model"
    for part in transformers:
        shapes = {name: torch.Size(header.shape) for name, header in part.headers.items()}
        try:
            whole_adapters(info, without_values(info), shapes)
            variants.append(part.variant)
        except SanaError as error:
            reason = str(error)
    return f"fits {', '.join(dict.fromkeys(variants))}" if variants else f"fits no model here: {reason}"


def has_layers_of_sana(info: Checkpoint) -> bool:
    """Whether the LoRA changes a layer with the name of a layer in SANA's transformers."""
    names = written_names(
        f"transformer_blocks.0.{layer}" for layer in ("attn1.to_q", "attn2.to_q", "ff.conv_inverted", "ff.conv_point")
    )
    prefixes = tuple(f"{name}." for name in names)
    return any(unwrapped_layer(header).startswith(prefixes) for header in info.headers)
