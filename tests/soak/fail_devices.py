"""Batches on pretended GPUs that fail at random.

`OMP_NUM_THREADS=1 python tests/soak/fail_devices.py --runs 5000` generates small batches on 2 to 4 GPUs of
tests/pretend_card.py. At random calls they raise the errors of CUDA, cuBLAS and cuDNN, run out of memory, hang, or
compute NaN, while they load, encode, sample or decode. Sometimes the consumer of the images stalls. After each run:

- No image is lost or doubled, and all images have the right pixels.
- Each image was computed on one GPU, never on two, and its thread never used another current device.
- The run ends. It has all images if a GPU survives, except images with injected NaN, which are reported as failed.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import gc
import logging
import random
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any
from unittest import mock

ROOT = Path(__file__).resolve().parents[2]
sys.path += [str(ROOT / "tests"), str(ROOT)]

import torch  # noqa: E402
from pretend_card import ERRORS, computed_on, pretend_cards  # noqa: E402

from sana_core import inspect_checkpoint  # noqa: E402
from sana_core.batch import batch_size  # noqa: E402
from sana_core.batch.pipeline import Models, SamplingSettings, prepare, resolve_settings  # noqa: E402
from sana_core.batch.pipeline import load_models as real_load_models  # noqa: E402
from sana_core.batch.plan import FailedImage, ImageSpec, Workload, batch_images  # noqa: E402
from sana_core.engine import body, loop, schedule  # noqa: E402
from sana_core.engine.local import generate_local  # noqa: E402
from sana_core.errors import first_line  # noqa: E402
from sana_core.runtime.accelerator import is_driver_error, is_out_of_memory  # noqa: E402
from sana_core.runtime.limits import LIMITS  # noqa: E402

CHECKPOINT = ROOT / "tests" / "models" / "sana-tiny"
PROMPTS = [f"a {colour} circle" for colour in ("red", "green", "blue", "white", "black")]
SETTINGS = SamplingSettings(32, 32, steps=1)
COUNT = 2
# The first block of prompts is small, so that a run has several blocks.
FIRST_BLOCK = 2
# A run that takes longer counts as endless.
LIMIT = 120.0
CPU = torch.device("cpu")
# Driver errors break a GPU for good. The other kinds of failure happen once.
KINDS = [*ERRORS, "hang", "nan"]
# How much the pixels of a GPU may differ from the pixels of the CPU.
TOLERANCE = 1e-3


@lru_cache(1)
def models_on_cpu() -> Models:
    return real_load_models(
        inspect_checkpoint(CHECKPOINT), CPU, resolve_settings(SETTINGS, CHECKPOINT), inspect_checkpoint(CHECKPOINT)
    )


def copy_models(checkpoint: object, device: torch.device, *settings: object) -> Models:
    """In place of load_models(): copy the weights to `device` without reading the files again."""
    models = models_on_cpu()
    parts = [copy.deepcopy(part).to(device) for part in (models.transformer, models.autoencoder)]
    return models._replace(transformer=parts[0], autoencoder=parts[1])


@lru_cache(1)
def expected_images() -> dict[int, torch.Tensor]:
    """Return all images as a healthy run on one CPU generates them."""
    workload = Workload(PROMPTS, batch_images(len(PROMPTS), COUNT, 0), 1)
    return {image.number: pixels for image, pixels in generate_local(prepare(workload, CHECKPOINT, SETTINGS, ["cpu"]))}


@lru_cache(1)
def calls_of_a_run() -> int:
    """Return how many calls one GPU gets when it generates the whole batch alone."""
    with pretend_cards(1) as cards:
        workload = Workload(PROMPTS, batch_images(len(PROMPTS), COUNT, 0), 1)
        assert len(list(generate_local(prepare(workload, CHECKPOINT, SETTINGS, ["cuda:0"])))) == len(workload.images)
        return cards.calls[torch.device("cuda", 0)]


@contextlib.contextmanager
def origins_of_images() -> Iterator[dict[int, set[tuple[torch.device, frozenset[torch.device]]]]]:
    """A context that notes for each image, and for each copy of it, its worker's device and the GPUs that computed it.

    The images of a run are made of arrays, which do not say so.
    """
    origins: dict[int, set[tuple[torch.device, frozenset[torch.device]]]] = {}
    real = body.Body.content

    def content(self: Any, image: ImageSpec, prompt: object, latent: torch.Tensor, pixels: Any) -> Any:
        if isinstance(pixels, torch.Tensor):
            origins.setdefault(image.number, set()).add((self.device, computed_on(pixels)))
        return real(self, image, prompt, latent, pixels)

    with mock.patch.object(body.Body, "content", content):
        yield origins


def fail_at_random(source: random.Random) -> Counter[str]:
    """Run a batch with random failures, check it, and return what happened.

    Raises AssertionError for an image that is lost, doubled, wrong, or computed on the wrong GPU.
    """
    happened: Counter[str] = Counter(runs=1)
    count, chunk = source.randint(2, 4), source.choice([1, 2, 3, 5])
    stall, calls = source.random() < 0.1, calls_of_a_run()
    workload = Workload(PROMPTS, batch_images(len(PROMPTS), COUNT, 0), chunk)
    images: dict[int, torch.Tensor | FailedImage] = {}
    plan = []
    with pretend_cards(count) as cards, origins_of_images() as origins:
        for index in range(count):
            for _ in range(source.choice([0, 1, 1, 2, 4])):
                # Other GPUs do a part of the work, so most GPUs get fewer calls than one GPU alone.
                kind, at = source.choice(KINDS), 1 + int(calls * source.random() ** 2)
                plan.append((index, kind, at))
                cards.fail(f"cuda:{index}", kind, at)
        # 0: no GPU has room for the text encoder beside the models.
        share = source.choice([batch_size.SHARE, batch_size.SHARE, 0.0])
        # GPUs that hang wake up after a while, so that a run with hanging GPUs only ends.
        waker = threading.Timer(source.choice([0.3, 3.0]), cards.release)
        waker.daemon = True
        waker.start()
        failure = None
        short = LIMITS._replace(starting=5.0, loading=5.0, first=0.5, grace=0.2)
        began = time.monotonic()
        try:
            with (
                mock.patch.object(schedule, "FIRST_BLOCK", FIRST_BLOCK),
                mock.patch.object(batch_size, "SHARE", share),
            ):
                for image, pixels in generate_local(
                    prepare(workload, CHECKPOINT, SETTINGS, [f"cuda:{i}" for i in range(count)]), limits=short
                ):
                    assert image.number not in images, f"image {image.number} came twice"
                    images[image.number] = pixels
                    assert time.monotonic() - began < LIMIT, "the run does not end"
                    if stall and len(images) == 4:
                        time.sleep(0.5)
        except RuntimeError as error:
            failure = error
        finally:
            waker.cancel()
            cards.release()
        broken, elsewhere = set(cards.broken), dict(cards.elsewhere)
        pending = set(cards.failures)
    fired = Counter(kind for index, kind, at in plan if (torch.device("cuda", index), at) not in pending)
    happened.update({f"failure: {kind}": number for kind, number in fired.items()})
    for number, pixels in images.items():
        if isinstance(pixels, FailedImage):
            assert fired["nan"], f"image {number} failed: {pixels.reason}"
            assert "NaN" in pixels.reason, pixels.reason
            happened["images with NaN"] += 1
            continue
        for device, cards_used in origins[number]:
            assert cards_used == {device}, f"image {number} of {device} was computed on {cards_used}"
        difference = (pixels - expected_images()[number]).abs().max()
        assert difference <= TOLERANCE or fired["nan"], f"image {number} differs by {difference}"
    # Only the text encoder may run on another GPU than the thread's.
    assert not elsewhere or fired, elsewhere
    if failure is None:
        assert images.keys() == expected_images().keys(), "images are missing"
        happened["complete"] += 1
    else:
        assert is_driver_error(failure) or is_out_of_memory(failure), f"{type(failure).__name__}: {failure}"
        happened[f"ended with {type(failure).__name__}"] += 1
        dropped = len(broken) + sum(fired[kind] for kind in ERRORS if kind != "driver")
        assert dropped >= count, f"{first_line(failure)}, although only {dropped} failures happened on {count} GPUs"
    return happened


def soak(runs: int, seed: int) -> Counter[str]:
    """Return the counts of all events in `runs` runs. The error of a failing run has the seed that repeats it."""
    total: Counter[str] = Counter()
    expected_images()
    # Every failure runs a full garbage collection, which would spend 0.5 s on the objects of the imported libraries.
    gc.collect()
    gc.freeze()
    with (
        mock.patch.object(body, "load_models", copy_models),
        mock.patch.object(loop, "LOOK", 0.02),
        mock.patch.object(logging.getLogger("sana_core"), "level", logging.CRITICAL),
    ):
        total += repeat(runs, seed)
    return total


def repeat(runs: int, seed: int) -> Counter[str]:
    total: Counter[str] = Counter()
    for number in range(seed, seed + runs):
        try:
            total += fail_at_random(random.Random(number))
        except AssertionError as error:
            raise AssertionError(f"run with seed {number}: {error}") from error
    return total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    began = time.monotonic()
    total = soak(arguments.runs, arguments.seed)
    sys.stdout.write(f"{dict(sorted(total.items()))} in {time.monotonic() - began:.0f} s\n")


if __name__ == "__main__":
    main()
