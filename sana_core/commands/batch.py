"""Generate many images of many prompts on every device, or on a Ray cluster.

Each image is written as soon as it is finished. An interrupted run resumes when you start it again.
"""

from __future__ import annotations

import argparse
import threading
import time
from collections.abc import Generator, Mapping
from contextlib import closing, suppress
from types import MappingProxyType
from typing import NamedTuple

import torch

from ..batch.best import Best, find_best, generate_picks, place_scorer, without_finished
from ..batch.folder import OutputFolder, Writers, default_threads, read_manifest
from ..batch.pipeline import Request, prepare
from ..batch.plan import FailedImage, ImageSpec, Progress, WorkerReport, Workload, batch_images, failed_images
from ..batch.png import describe_settings, encode_png, file_name
from ..batch.prompts import read_prompts
from ..checkpoints.fingerprint import LARGE
from ..cluster.connection import ClusterSettings
from ..errors import InputError, OutputError, SanaError
from ..generate import find_backend
from ..runtime.atomic_files import make_folder
from ..runtime.cancellation import noting_interrupts
from ..runtime.folder_lock import Hold, hold
from ..runtime.text import Json, write_lines
from .options import (
    add_sampling_options,
    cluster_of,
    devices_of,
    path_of,
    progress_line,
    settings_of,
    show_model,
    show_status,
)

EXAMPLE = """example:
  python -m sana_core batch demo/prompts.txt --count 4 --out output \\
      --checkpoint demo/sana-posters --width 512 --height 512"""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "prompts",
        type=path_of,
        help="a text file in UTF-8 with one prompt a line; or a .csv, .tsv, .json or .jsonl with prompts and seeds",
    )
    add_sampling_options(parser)
    parser.add_argument(
        "--out-shared",
        action="store_true",
        help="all machines of the cluster have the folder: each writes there itself",
    )
    parser.add_argument("--report", action="store_true", help="say at the end which worker made how many, and how fast")


def run(arguments: argparse.Namespace) -> None:
    if arguments.out_shared and arguments.cluster is None:
        raise InputError("out-shared: it is for machines of a cluster; add --cluster, or leave it out")
    best = find_best(arguments.best, arguments.of, arguments.scorer, arguments.count)
    if best and arguments.out_shared:
        raise InputError("out-shared: got it with best, whose images are chosen on this machine; leave one of them out")
    prompts, count = read_prompts(arguments.prompts), best.of if best else arguments.count
    seeds = [arguments.seed if prompt.seed is None else prompt.seed for prompt in prompts]
    images = batch_images(len(prompts), count, seeds)
    workload = Workload([prompt.text for prompt in prompts], images, arguments.chunk)
    devices, cluster = devices_of(arguments), cluster_of(arguments)
    settings = settings_of(arguments, devices)
    request = prepare(workload, arguments.checkpoint, settings, devices)
    show_model(request.checkpoint)
    make_folder(arguments.out)
    # Check that the folder is not another program's.
    read_manifest(arguments.out)
    with hold(arguments.out) as held:
        generate_missing(arguments, request, cluster, held, best)


def generate_missing(
    arguments: argparse.Namespace, request: Request, cluster: ClusterSettings | None, held: Hold, best: Best | None
) -> None:
    workload = request.workload
    with progress_line() as show:

        def show_reading(count: int, total: int) -> None:
            # Smaller weights take only a moment.
            if total >= LARGE:
                show(f"reading the weights, this once: {count / 1e9:.1f} of {total / 1e9:.1f} GB")

        described = describe_settings(request.settings, request.checkpoint, show_reading)
    if best:
        described |= best.describe()
    folder, total = OutputFolder(held, workload.prompts, described), len(workload.images)
    with progress_line() as show, noting_interrupts() as poll:
        shown = time.monotonic()

        def show_checking(count: int) -> None:
            nonlocal shown
            poll()
            # A few images take only a moment.
            if time.monotonic() > shown + 1:
                shown = time.monotonic()
                show(f"reading the images that are there: {count} of {len(workload.images)}")

        workload = workload._replace(done=folder.find_done(workload.images, show_checking))
    existing = len(workload.done)
    if best:
        workload, total = without_finished(workload, best), len(workload.prompts) * best.keep
        existing = len(workload.done) // best.of * best.keep
    if existing:
        write_lines(f"{existing} of {total} images exist")
    started = time.monotonic()
    report, shared = WorkerReport(), held if arguments.out_shared else None
    run = BatchRun(folder, Progress(total, existing), report, str(arguments.checkpoint))
    generated = generate_results(request._replace(workload=workload), cluster, described, report, shared, best)
    try:
        with noting_interrupts() as poll, closing(generated), Writers(run.write, default_threads()) as writers:
            for result in generated:
                poll()
                if isinstance(result.content, FailedImage):
                    run.fail(result.image, result.content.reason)
                else:
                    writers.put(result, poll)
            writers.finish(poll)
    except BaseException as error:
        # The images that are there are in the manifest, whatever ended the run.
        with suppress(OSError):
            folder.write_manifest()
        if isinstance(error, DiskError):
            raise OutputError(
                f"out: cannot write into {folder.path} ({error.strerror or error}); {len(folder.entries)} of {total} "
                "images exist; run the same command for the rest"
            ) from None
        raise
    folder.write_manifest()
    if arguments.report:
        seconds, count = time.monotonic() - started, len(workload.remaining)
        write_lines(f"{count} images in {seconds:.1f} s, {count / seconds:.2f} a second")
        for worker, number in report.finished.items():
            write_lines(f"  {worker}: {number}")
        if replayed := report.steps.get("replayed"):
            write_lines(f"  steps replayed from CUDA graphs: {replayed}")
        for refusal in report.refused.values():
            write_lines(f"  left out: {refusal}")
    if run.failed:
        raise failed_images(run.failed, "the same command tries them again")


class Result(NamedTuple):
    image: ImageSpec
    # Its pixels, its PNG file, or the digest of the PNG file that a machine has written itself.
    content: torch.Tensor | bytes | str | FailedImage
    # Score and rank of an image that was chosen by its score.
    more: Mapping[str, object] = MappingProxyType({})


class DiskError(OSError):
    """An image could not be written."""


class BatchRun:
    """The images of a run on their way into the folder. Several threads write at the same time."""

    def __init__(self, folder: OutputFolder, progress: Progress, report: WorkerReport, checkpoint: str) -> None:
        self.folder, self.progress, self.report, self.checkpoint = folder, progress, report, checkpoint
        # Number of the image: the reason.
        self.failed: dict[int, str] = {}
        # Protects the manifest, the progress and the output.
        self.lock = threading.Lock()

    def write(self, result: Result) -> None:
        """Encode the image if necessary, write it, and report it. Raises DiskError, for example on a full disk."""
        image, content, more = result
        folder = self.folder
        try:
            if isinstance(content, torch.Tensor):
                prompt = folder.prompts[image.prompt]
                content = encode_png(content, prompt, image.seed, folder.settings, self.checkpoint, more)
            assert not isinstance(content, FailedImage | torch.Tensor)
            digest = content if isinstance(content, str) else folder.write(image, content)
            with self.lock:
                path = folder.note(image, digest, more)
        except SanaError:
            raise
        except OSError as error:
            raise DiskError(*error.args) from error
        with self.lock:
            self.progress.step()
            write_lines(f"{path} ({self.progress.describe(len(self.report.ready))})", flush=True)

    def fail(self, image: ImageSpec, reason: str) -> None:
        self.failed[image.number] = reason
        prompt = self.folder.prompts[image.prompt]
        show_status(f"failed: {file_name(image)} (prompt {prompt!r:.60}, seed {image.seed}): {reason}")


def generate_results(
    request: Request,
    cluster: ClusterSettings | None,
    described: Json,
    report: WorkerReport,
    shared: Hold | None,
    best: Best | None,
) -> Generator[Result, None, None]:
    """Yield each image that is not done. With `best`, only the best images of each prompt, with score and rank."""
    workload = request.workload
    if best:
        if workload.remaining:
            backend = find_backend(cluster, show_status, report=report)
            with closing(generate_picks(backend, request, best, place_scorer(best, request))) as picks:
                for pick in picks:
                    yield Result(pick.image, pick.pixels, pick.describe())
        return
    backend = find_backend(cluster, show_status, report=report, described=described, shared=shared)
    with closing(backend(request)) as generated:
        try:
            for image, content in generated:
                yield Result(image, content)
        except SanaError:
            if cluster is not None:
                existing = len(workload.done) + sum(report.finished.values())
                # Some images of an unfinished chunk may already be on disk.
                show_status(
                    f"at least {existing} of {len(workload.images)} images exist; run the same command for the rest"
                )
            raise
