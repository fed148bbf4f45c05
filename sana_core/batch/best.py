"""Best of N: generate several images of each prompt, score every finished image, and keep the best."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Generator
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

import torch

from ..checkpoints.clip import clip_files
from ..checkpoints.fingerprint import digest_files, digest_json
from ..errors import CheckpointError, InputError
from ..runtime.checks import RENAME, check_text, check_whole
from ..runtime.text import Json, get_logger
from .pipeline import Request
from .plan import LARGEST_COUNT, FailedImage, Generated, ImageSpec, Workload, failed_images
from .scorer import Scorer, load_scorer

logger = get_logger(__name__)

# Generates the images of a request, on the devices of this machine or on a cluster.
Backend = Callable[[Request], Generator[Generated, None, None]]


class Best(NamedTuple):
    """Keep the `keep` best of `of` images of each prompt, by the scorer in the folder `scorer`."""

    keep: int
    of: int
    scorer: Path

    def describe(self) -> Json:
        """Return the entry of the manifest: these options, and the digest of the scorer's files."""
        check_text("scorer", self.scorer.name, RENAME)
        digests = digest_files(clip_files(self.scorer), lambda count, total: None)
        weights = digest_json([digests[file] for file in sorted(digests)])
        return {"best": self.keep, "of": self.of, "scorer": self.scorer.name, "scorer_weights": weights}


class Pick(NamedTuple):
    """An image that is among the best of its prompt."""

    image: ImageSpec
    # [3, H, W] in [-1, 1].
    pixels: torch.Tensor
    # NaN: the scorer gave NaN or infinity.
    score: float
    # Among the images of the prompt, from 1.
    rank: int

    def describe(self, named: bool = False) -> Json:
        """Return score and rank, and with `named` also the number of the prompt and the seed.

        A score that is not finite becomes None, because JSON has no NaN.
        """
        names = {"prompt": self.image.prompt, "seed": self.image.seed} if named else {}
        score = round(self.score, 4) if math.isfinite(self.score) else None
        return {**names, "score": score, "rank": self.rank}


def find_best(keep: int | None, of: int | None, scorer: str | Path | None, count: int = 1) -> Best | None:
    """Return the options as a Best, or None without any of the first three. Raises InputError if only some are set."""
    if keep is of is scorer is None:
        return None
    if keep is None or of is None or scorer is None:
        raise InputError("best: got only a part of best, of and scorer; give all three, or none")
    if count != 1:
        raise InputError(f"count: got {count} with best, expected 1; set of, the number of images to choose from")
    check_whole("of", of, 1, LARGEST_COUNT)
    check_whole("best", keep, 1, of)
    return Best(int(keep), int(of), Path(scorer))


def place_scorer(best: Best, request: Request) -> Scorer:
    """Load the scorer on the first device of the request."""
    device = request.devices[0]
    dtype = torch.float32 if device.type == "cpu" else getattr(torch, request.settings.dtype)
    return load_scorer(best.scorer, device, dtype)


def best_first(score: float) -> float:
    """Return a sort key that puts high scores first, and scores that are not finite last."""
    return -score if math.isfinite(score) else math.inf


def generate_picks(backend: Backend, request: Request, best: Best, scorer: Scorer) -> Generator[Pick, None, None]:
    """Yield the best images of each prompt in the order of their ranks, as soon as all images of the prompt are scored.

    Only the best images so far stay in memory. Of equal scores the lower seed ranks first, so the choice does not
    depend on the order in which images finish. An image without a finite score ranks last, with a warning. Raises
    CheckpointError if the first `of` scores are all not finite, because such a scorer never works.

    An image that fails is left out. Raises FailedImagesError at the end if a prompt has too few images for that reason.
    """
    finite = not_finite = 0
    failed: dict[int, str] = {}
    incomplete = False
    images_seen: Counter[int] = Counter()
    best_so_far: defaultdict[int, list[Pick]] = defaultdict(list)
    with closing(backend(request)) as generated:
        for image, pixels in generated:
            ranked = best_so_far[image.prompt]
            images_seen[image.prompt] += 1
            if isinstance(pixels, FailedImage):
                failed[image.number] = pixels.reason
                logger.warning("image of prompt %d, seed %d failed: %s", image.prompt, image.seed, pixels.reason)
            else:
                score = float(scorer.score(pixels[None], request.workload.prompts[image.prompt])[0])
                if math.isfinite(score):
                    finite += 1
                else:
                    not_finite += 1
                    name, which = best.scorer.name, f"prompt {image.prompt}, seed {image.seed}"
                    if not finite and not_finite >= best.of:
                        raise CheckpointError(
                            f"scorer: {name} gave {score} for {which}, and no number for any image before; "
                            "use another scorer"
                        )
                    logger.warning(
                        "scorer: %s gave %s for %s, expected a number; this image ranks last", name, score, which
                    )
                    score = math.nan
                ranked.append(Pick(image, pixels, score, 0))
                ranked.sort(key=lambda pick: (best_first(pick.score), pick.image.number))
                del ranked[best.keep :]
            if images_seen[image.prompt] == best.of:
                yield from (pick._replace(rank=rank) for rank, pick in enumerate(best_so_far.pop(image.prompt), 1))
                incomplete |= len(ranked) < best.keep
    if incomplete:
        raise failed_images(failed, "use another prompt or other seeds")


def without_finished(workload: Workload, best: Best) -> Workload:
    """Return `workload` with all images done of the prompts whose best images exist, and no others.

    Images that were not chosen are not stored, so all images of an unfinished prompt are generated again.
    """
    finished = [0] * len(workload.prompts)
    for image in workload.images:
        finished[image.prompt] += image.number in workload.done
    numbers = {image.number for image in workload.images if finished[image.prompt] >= best.keep}
    return workload._replace(done=frozenset(numbers))
