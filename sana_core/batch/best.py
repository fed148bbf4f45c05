"""Of many drafts of a prompt, the ones that a scorer likes best."""

from __future__ import annotations

import logging
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from itertools import chain, count, groupby, islice
from pathlib import Path
from typing import NamedTuple

import torch

from ..checkpoints.clip import clip_files
from ..checkpoints.files import Json
from ..checkpoints.fingerprint import digest_files, digest_json
from ..errors import CheckpointError, InputError
from ..model.latents import CHANNELS, latent_shape
from ..runtime.checks import RENAME, check_text, check_whole
from ..sampling.trail import WHOLE, Draft, Round
from .local import local_devices
from .pipeline import SamplingSettings
from .plan import LARGEST_COUNT, Generated, ImageSpec, Workload
from .scorer import Scorer, load_scorer
from .verifier import Verifier, is_verifier, load_verifier

# of those that are kept, how many times as many are generated to the end
FINISHED = 2
# prompts whose drafts are looked at early together, of which a run that is cut off loses no more; and what their x0
# may take of the memory
GROUP, KEPT_BYTES = 64, 2**29

logger = logging.getLogger(__name__)

# generates a workload by settings
Backend = Callable[[Workload, SamplingSettings], Generator[Generated, None, None]]


class Best(NamedTuple):
    """Of `of` drafts of each prompt, the `keep` that the scorer in the folder `scorer` likes best.

    With `after` it looks at them every so many steps, and the worse half goes, until twice as many as are kept are
    left, or at the last look all but those. A `verifier`, which reads hidden states, looks until those that are kept
    are left.
    """

    keep: int
    of: int
    scorer: Path
    after: int | None = None
    verifier: Verifier | None = None

    def looks(self, steps: int) -> list[tuple[int, int]]:
        """Return after how many of `steps` there is a look, and how many drafts of a prompt go on from there."""
        if self.after is None:
            return []
        last = last_look(self.verifier, steps)
        check_whole("after", self.after, 1, steps if self.verifier is None else last)
        return looks_every(self.after, last, self.of, self.keep * (FINISHED if self.verifier is None else 1))

    def describe(self) -> Json:
        """Return what a choice depends on besides the drafts, as the manifest has it."""
        check_text("scorer", self.scorer.name, RENAME)
        if self.verifier is None:
            files = clip_files(self.scorer)
        else:
            files = {self.scorer / name for name in ("model.safetensors", "config.json")}
        digests = digest_files(files, lambda done, total: None)
        weights = digest_json([digests[file] for file in sorted(files)])
        early = {} if self.after is None else {"after": self.after}
        return {"best": self.keep, "of": self.of, **early, "scorer": self.scorer.name, "scorer_weights": weights}


class Pick(NamedTuple):
    """A draft that is kept."""

    image: ImageSpec
    pixels: torch.Tensor  # [3, H, W] in [-1, 1]
    score: float  # NaN: the scorer gave no number
    rank: int  # in the prompt, from 1

    def describe(self, named: bool = False) -> Json:
        """Return score and rank, and with `named` also the number of the prompt and the seed.

        A score that is not finite becomes None, because JSON has no NaN.
        """
        names = {"prompt": self.image.prompt, "seed": self.image.seed} if named else {}
        score = round(self.score, 4) if math.isfinite(self.score) else None
        return {**names, "score": score, "rank": self.rank}


def find_best(
    keep: int | None, of: int | None, scorer: str | Path | None, after: int | None = None, count: int = 1
) -> Best | None:
    """Return how drafts are chosen, None where none of the four is said. Raises InputError for a part of them."""
    if keep is of is scorer is after is None:
        return None
    if keep is None or of is None or scorer is None:
        raise InputError("best: got only a part of best, of and scorer; give all three, or none")
    if count != 1:
        raise InputError(f"count: got {count} with best, expected 1; set of, the drafts of each prompt")
    check_whole("of", of, 1, LARGEST_COUNT)
    check_whole("best", keep, 1, of)
    verifier = load_verifier(scorer) if is_verifier(Path(scorer)) else None
    if verifier is not None and after is None:
        raise InputError(
            "after: got none with a verifier, which scores unfinished drafts; set it to the steps between two looks"
        )
    return Best(int(keep), int(of), Path(scorer), after, verifier)


def place_scorer(best: Best, settings: SamplingSettings, devices: Sequence[str | torch.device] | None) -> Scorer | None:
    """Return the scorer on the first of `devices`, or the one that this machine would generate on; a verifier is where
    drafts are."""
    if best.verifier is not None:
        return None
    device = local_devices(devices)[0]
    return load_scorer(best.scorer, device, torch.float32 if device.type == "cpu" else getattr(torch, settings.dtype))


def last_look(verifier: Verifier | None, steps: int) -> int:
    """Return the last of so many steps after which drafts are scored; an image after the last step is the whole."""
    return steps - 1 if verifier is None else verifier.last_look(steps)


def looks_every(after: int, last: int, of: int, finish: int) -> list[tuple[int, int]]:
    """Return the looks at `of` drafts every `after` steps up to the step `last`: the step, and how many go on then.

    Half of them each time, at the last one the `finish` that are generated to the end.
    """
    found, left = list[tuple[int, int]](), of
    for step in range(after, last + 1, after):
        if left > finish:
            left = finish if step + after > last else max(finish, math.ceil(left / 2))
            found.append((step, left))
    return found


def best_first(score: float) -> float:
    """Return a key that sorts high scores first, and drafts without a number last."""
    return -score if math.isfinite(score) else math.inf


class Rounds:
    """The drafts of a workload, a round after the other: all run some steps, at a look the worse half of each prompt
    goes, and the others go on from their own steps. Nothing is generated twice."""

    def __init__(self, workload: Workload, of: int, looks: Sequence[tuple[int, int]], cells: int, scorer: str) -> None:
        """Each prompt has `of` drafts of `cells` latent cells. `looks` come from `looks_every`.

        Messages name `scorer`.
        """
        self.workload, self.looks, self.of, self.scorer = workload, looks, of, scorer
        # how many scores of this run were finite, and how many were not
        self.scored = self.unscored = 0
        x0s = 4 * CHANNELS * cells * of * max((step for step, _ in looks), default=1)
        self.group = max(1, min(GROUP, KEPT_BYTES // x0s)) * of if looks else max(1, len(workload.remaining))
        self.numbers = count()
        # of this round: the drafts by their numbers in it, and what a look has found of them
        self.drafts: dict[int, ImageSpec] = {}
        self.x0s: dict[ImageSpec, torch.Tensor] = {}
        self.scores: dict[ImageSpec, float] = {}

    def workloads(self) -> Iterator[Workload]:
        """Yield each round; before the next is asked for, all that it has generated must be noted."""
        remaining = self.workload.remaining
        for first in range(0, len(remaining), self.group):
            group = remaining[first : first + self.group]
            for step, kept in self.looks:
                yield self.begin(group, step)
                group = self.better(kept)
            yield self.begin(group, None)

    def note(self, image: ImageSpec, score: float, x0s: torch.Tensor, added: bool) -> None:
        """Store the score of a draft at a look, and `x0s` [k, 32, h, w], the x0 of its steps so far.

        With `added`, the score is added to the scores of earlier looks. A verifier's scores are logarithms, and its
        errors differ from step to step.
        """
        self.scores[image] = self.checked(image, score) + (self.scores.get(image, 0.0) if added else 0.0)
        self.x0s[image] = x0s

    def checked(self, image: ImageSpec, score: float) -> float:
        """Return `score`. If it is not finite, log a warning and return NaN, which ranks the draft last.

        One bad score does not end a batch, but a scorer that never works does. Raises CheckpointError if the first `of`
        scores are all not finite.
        """
        if math.isfinite(score):
            self.scored += 1
            return score
        self.unscored += 1
        which = f"prompt {image.prompt}, seed {image.seed}"
        if not self.scored and self.unscored >= self.of:
            raise CheckpointError(
                f"scorer: {self.scorer} gave {score} for {which}, and no number for any draft before; "
                "use another scorer"
            )
        logger.warning("scorer: %s gave %s for %s, expected a number; this draft ranks last", self.scorer, score, which)
        return math.nan

    def better(self, kept: int) -> list[ImageSpec]:
        """Return the `kept` best of each prompt in this round; of equal scores the lower seed goes first."""
        ranked = sorted(self.x0s, key=lambda image: (image.prompt, best_first(self.scores[image]), image.number))
        rivals = (islice(group, kept) for _, group in groupby(ranked, key=lambda image: image.prompt))
        return sorted(chain.from_iterable(rivals))

    def begin(self, group: list[ImageSpec], until: int | None) -> Workload:
        """Return the workload of `group`, on from the steps that were noted, with numbers that are new and without
        gaps."""
        self.drafts = {next(self.numbers): image for image in group}
        past = {number: self.x0s[image] for number, image in self.drafts.items() if self.x0s}
        images, self.x0s = [image._replace(number=number) for number, image in self.drafts.items()], {}
        own = Round(until, past) if until or past else WHOLE
        return self.workload._replace(images=images, done=frozenset(), round=own)


def generate_picks(
    backend: Backend, workload: Workload, settings: SamplingSettings, best: Best, scorer: Scorer | None
) -> Generator[Pick, None, None]:
    """Yield the best of each prompt of `workload` that is not done, in the order of their ranks, when all drafts of the
    prompt are there.

    Only the best so far are kept in memory. Of equal scores the lower seed goes first, so the choice does not depend on
    which worker generated what. Raises InputError where the first look would be after more steps than `settings` have.
    """
    assert settings.steps is not None
    if settings.step_cache and best.after is not None:
        raise InputError("step_cache: got it with after, whose drafts are continued later; leave one of them out")
    cells = math.prod(latent_shape(settings.width, settings.height, 1)[2:])
    rounds = Rounds(workload, best.of, best.looks(settings.steps), cells, best.scorer.name)
    later = rounds.workloads()
    first = next(later)

    def read(image: ImageSpec, pixels: torch.Tensor) -> float:
        assert scorer is not None
        return float(scorer.score(pixels[None], workload.prompts[image.prompt])[0])

    def score(image: ImageSpec, pixels: torch.Tensor) -> float:
        return rounds.scores[image] if scorer is None else rounds.checked(image, read(image, pixels))

    finished = rounds.looks[-1][1] if rounds.looks else best.of
    settings = settings._replace(verifier=str(best.scorer) if best.verifier else None)
    seen: Counter[int] = Counter()
    kept: defaultdict[int, list[Pick]] = defaultdict(list)
    with closing(backend(first._replace(later=later), settings)) as generated:
        for image, result in generated:
            image = rounds.drafts[image.number]
            if isinstance(result, Draft):
                if result.score is None:
                    rounds.note(image, read(image, result.pixels), result.x0s, added=False)
                else:
                    rounds.note(image, result.score, result.x0s, added=True)
                continue
            rivals = [*kept[image.prompt], Pick(image, result, score(image, result), 0)]
            rivals.sort(key=lambda pick: (best_first(pick.score), pick.image.number))
            kept[image.prompt] = rivals[: best.keep]
            seen[image.prompt] += 1
            if seen[image.prompt] == finished:
                yield from (pick._replace(rank=rank) for rank, pick in enumerate(kept.pop(image.prompt), 1))


def without_finished(workload: Workload, best: Best) -> Workload:
    """Return `workload` without the drafts of prompts whose best are done; of the others all are generated again."""
    finished = [0] * len(workload.prompts)
    for image in workload.images:
        finished[image.prompt] += image.number in workload.done
    whole = {image.number for image in workload.images if finished[image.prompt] >= best.keep}
    return workload._replace(done=frozenset(whole))
