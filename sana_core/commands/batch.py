"""Generate many images of many prompts on every device, or on a Ray cluster.

Each image is written as it finishes. A run that was interrupted goes on where it was when it is started again.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Generator
from contextlib import closing, suppress
from pathlib import Path

import torch

from ..batch.best import Best, find_best, generate_picks, place_scorer, without_finished
from ..batch.folder import OutputFolder, read_manifest
from ..batch.pipeline import SamplingSettings, resolve_settings
from ..batch.plan import ImageSpec, Workload, batch_images
from ..batch.png import describe_settings, encode_png
from ..batch.progress import Progress, WorkerReport
from ..checkpoints.files import Json
from ..checkpoints.fingerprint import KEPT
from ..errors import InputError, OutputError, ReadError, SanaError
from ..generate import find_backend
from ..runtime.atomic_files import make_folder
from ..runtime.cancellation import noting_interrupts
from ..runtime.folder_lock import Hold, hold
from .options import add_sampling_options, cluster_of, progress_line, settings_of, show_status

EXAMPLE = """example:
  python -m sana_core batch prompts.txt --count 4 --out output \\
      --checkpoint demo/sana-posters --width 512 --height 512"""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("prompts", type=Path, help="a text file in UTF-8, one prompt a line")
    add_sampling_options(parser)
    parser.add_argument(
        "--out-shared",
        action="store_true",
        help="all machines of the cluster have the folder: each writes there itself",
    )
    parser.add_argument("--report", action="store_true", help="say at the end which worker made how many, and how fast")


def read_prompts(file: Path) -> list[str]:
    """Return the lines of `file` that are not empty. Raises InputError for none, and for a file not in UTF-8,
    ReadError if it cannot be read.
    """
    try:
        text = file.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(f"prompts: {file} is not UTF-8 at byte {error.start}; save it as UTF-8") from None
    except OSError as error:
        raise ReadError(
            f"prompts: {str(file):.240} cannot be read ({error.strerror}); see its name and its rights"
        ) from None
    prompts = [line.strip() for line in text.splitlines() if line.strip()]
    if not prompts:
        raise InputError(f"prompts: {file} holds no prompt; write one a line")
    return prompts


def run(arguments: argparse.Namespace) -> None:
    if arguments.out_shared and arguments.cluster is None:
        raise InputError("out-shared: it is for machines of a cluster; add --cluster, or leave it out")
    best = find_best(arguments.best, arguments.of, arguments.scorer, arguments.count)
    if best and arguments.out_shared:
        raise InputError("out-shared: got it with best, whose images are chosen on this machine; leave one of them out")
    prompts, count = read_prompts(arguments.prompts), best.of if best else arguments.count
    workload = Workload(prompts, batch_images(len(prompts), count, arguments.seed), arguments.chunk)
    settings = resolve_settings(settings_of(arguments), arguments.checkpoint)
    make_folder(arguments.out)
    # a folder of another program is left as it is
    read_manifest(arguments.out)
    with hold(arguments.out) as held:
        carry_on(arguments, workload, settings, held, best)


def carry_on(
    arguments: argparse.Namespace, workload: Workload, settings: SamplingSettings, held: Hold, best: Best | None
) -> None:
    """Generate what is not in the folder yet."""
    with progress_line() as show:

        def show_reading(count: int, total: int) -> None:
            # Smaller weights take only a moment.
            if total >= KEPT:
                show(f"reading the weights, this once: {count / 1e9:.1f} of {total / 1e9:.1f} GB")

        described = describe_settings(settings, arguments.checkpoint, show_reading)
    if best:
        described |= best.describe()
    folder, total = OutputFolder(held, workload.prompts, described), len(workload.images)
    workload = workload._replace(done=folder.find_done(workload.images))
    there = len(workload.done)
    if best:
        workload, total = without_finished(workload, best), len(workload.prompts) * best.keep
        there = len(workload.done) // best.of * best.keep
    if there:
        sys.stdout.write(f"{there} of {total} images are there already\n")
    started = time.monotonic()
    report = WorkerReport()
    progress = Progress(total, there)
    generated = generate_files(arguments, workload, settings, described, report, held, best)
    try:
        with noting_interrupts() as poll, closing(generated):
            for image, png in generated:
                poll()
                path = folder.note(image, png) if isinstance(png, str) else save(folder, image, png, total)
                progress.step()
                sys.stdout.write(f"{path} ({progress.describe(len(report.ready))})\n")
                sys.stdout.flush()
    except BaseException:
        # what ended the run is what is said; the images say themselves what they are
        with suppress(OSError):
            folder.write_manifest()
        raise
    folder.write_manifest()
    if arguments.report:
        seconds, count = time.monotonic() - started, len(workload.remaining)
        sys.stdout.write(f"{count} images in {seconds:.1f} s, {count / seconds:.2f} a second\n")
        for worker, number in report.finished.items():
            sys.stdout.write(f"  {worker}: {number}\n")
        for error in report.refused.values():
            sys.stdout.write(f"  left out: {error}\n")


def generate_files(
    arguments: argparse.Namespace,
    workload: Workload,
    settings: SamplingSettings,
    described: Json,
    report: WorkerReport,
    held: Hold,
    best: Best | None,
) -> Generator[tuple[ImageSpec, bytes | str], None, None]:
    """Yield each image that is not done as a PNG file, or its digest where a machine has written it itself.

    With `best`, only the best images of each prompt, with score and rank.
    """
    checkpoint, devices, cluster = arguments.checkpoint, arguments.devices, cluster_of(arguments)
    if best:
        if workload.remaining:
            scorer = place_scorer(best, settings, devices)
            backend = find_backend(checkpoint, devices, cluster, show_status, report)
            with closing(generate_picks(backend, workload, settings, best, scorer)) as picks:
                for pick in picks:
                    prompt, seed = workload.prompts[pick.image.prompt], pick.image.seed
                    yield pick.image, encode_png(pick.pixels, prompt, seed, described, checkpoint, pick.describe())
        return
    shared = held if arguments.out_shared else None
    backend = find_backend(checkpoint, devices, cluster, show_status, report, described, shared)
    with closing(backend(workload, settings)) as generated:
        try:
            for image, made in generated:
                if isinstance(made, torch.Tensor):
                    made = encode_png(made, workload.prompts[image.prompt], image.seed, described, checkpoint)
                yield image, made
        except SanaError:
            if cluster is not None:
                there = len(workload.done) + sum(report.finished.values())
                # of a chunk that a machine could not end, some may be
                show_status(
                    f"at least {there} of {len(workload.images)} images are there; the same command makes the rest"
                )
            raise


def save(folder: OutputFolder, image: ImageSpec, png: bytes, total: int) -> Path:
    """Write the image. Raises OutputError that says what is safe already, for example on a full disk."""
    try:
        return folder.save(image, png)
    except SanaError:
        raise
    except OSError as error:
        raise OutputError(
            f"out: cannot write into {folder.path} ({error.strerror or error}); {len(folder.entries)} of {total} "
            "images are there, the same command makes the rest"
        ) from error
