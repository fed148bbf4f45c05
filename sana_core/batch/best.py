"""Of many drafts of a prompt, the ones that a scorer likes best."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ..checkpoints.fingerprint import digest_files, digest_json
from ..errors import InputError
from ..runtime.checks import check_whole
from ..scorer import Scorer, load_scorer
from .draw import Settings
from .local import local_devices
from .plan import LARGEST_COUNT, Picture, Workload

# of those that are kept, how many times as many are drawn to the end
FINISHED = 2
# prompts whose drafts are looked at early together: a run that is cut off loses no more
GROUP = 64

# draws a workload by settings
Drawing = Callable[[Workload, Settings], Generator[tuple[Picture, torch.Tensor], None, None]]


class Best(NamedTuple):
    """Of `of` drafts of each prompt, the `keep` that the scorer in the folder `scorer` likes best; with `after` it has
    looked at all after so many steps, and only the better ones, `finished`, were drawn to the end."""

    keep: int
    of: int
    scorer: Path
    after: int | None = None

    @property
    def finished(self) -> int:
        return min(self.of, FINISHED * self.keep)

    def describe(self) -> dict[str, Any]:
        """Return what a choice depends on besides the drafts, as the manifest has it."""
        files = {self.scorer / name for name in ("model.safetensors", "config.json", "tokenizer.json")}
        digests = digest_files(files, lambda done, total: None)
        weights = digest_json([digests[file] for file in sorted(files)])
        early = {} if self.after is None else {"after": self.after}
        return {"best": self.keep, "of": self.of, **early, "scorer": self.scorer.name, "scorer_weights": weights}


class Pick(NamedTuple):
    """A draft that is kept: its pixels [3, H, W] in [-1, 1], its score, and its rank in the prompt, from 1."""

    picture: Picture
    pixels: torch.Tensor
    score: float
    rank: int

    def describe(self, named: bool = False) -> dict[str, Any]:
        """Return score and rank, `named` with the number of the prompt and the seed."""
        names = {"prompt": self.picture.prompt, "seed": self.picture.seed} if named else {}
        return {**names, "score": round(self.score, 4), "rank": self.rank}


def find_best(
    keep: int | None, of: int | None, scorer: str | Path | None, after: int | None = None, count: int = 1
) -> Best | None:
    """Return how drafts are chosen, None where none of the four is said. Raises InputError for a part of them."""
    if keep is of is scorer is after is None:
        return None
    if keep is None or of is None or scorer is None:
        raise InputError("best: got only a part of best, of and scorer; give all three, or none")
    if count != 1:
        raise InputError(f"count: got {count} beside best; of says how many drafts of each prompt there are")
    check_whole("of", of, 1, LARGEST_COUNT)
    check_whole("best", keep, 1, of)
    return Best(int(keep), int(of), Path(scorer), after)


def place_scorer(best: Best, settings: Settings, devices: Sequence[str | torch.device] | None) -> Scorer:
    """Return the scorer on the first of `devices`, or the one that this machine would draw on."""
    device = local_devices(devices)[0]
    return load_scorer(best.scorer, device, torch.float32 if device.type == "cpu" else getattr(torch, settings.dtype))


def draw_best(
    drawing: Drawing, workload: Workload, settings: Settings, best: Best, scorer: Scorer
) -> Generator[Pick, None, None]:
    """Yield the best of each prompt of `workload` that is not done, in the order of their ranks.

    Drafts that go on after an early look are drawn from their seeds again, so that they are what each is alone, and any
    worker can: of 8 drafts that are looked at after 4 of 20 steps that is a tenth of the steps.
    """
    if best.after is None:
        with closing(drawing(workload, settings)) as drawn:
            yield from pick_best(drawn, workload, best, scorer)
        return
    left = [picture for picture in workload.pictures if picture.number not in workload.done]
    for first in range(0, len(left), GROUP * best.of):
        group = workload._replace(pictures=left[first : first + GROUP * best.of])
        with closing(drawing(group, settings._replace(stop_after=best.after))) as drafts:
            picks = pick_best(drafts, group, best._replace(keep=best.finished), scorer)
            chosen = sorted(pick.picture for pick in picks)
        # chunks begin by number
        dense = [picture._replace(number=number) for number, picture in enumerate(chosen)]
        finished = group._replace(pictures=dense, done=frozenset())
        with closing(drawing(finished, settings)) as drawn:
            for pick in pick_best(drawn, finished, best._replace(of=best.finished), scorer):
                yield pick._replace(picture=chosen[pick.picture.number])


def pick_best(
    drawn: Iterable[tuple[Picture, torch.Tensor]], workload: Workload, best: Best, scorer: Scorer
) -> Generator[Pick, None, None]:
    """Yield the best of each prompt, in the order of their ranks, when all drafts of the prompt are there.

    `drawn` are the drafts with their pixels, from wherever they were drawn; only the best so far are kept in memory.
    Of equal scores the lower seed goes first, so the choice does not depend on who drew what.
    """
    seen: defaultdict[int, int] = defaultdict(int)
    kept: defaultdict[int, list[Pick]] = defaultdict(list)
    for picture, pixels in drawn:
        score = float(scorer.score(pixels[None], workload.prompts[picture.prompt])[0])
        rivals = [*kept[picture.prompt], Pick(picture, pixels, score, 0)]
        rivals.sort(key=lambda pick: (-pick.score, pick.picture.number))
        kept[picture.prompt] = rivals[: best.keep]
        seen[picture.prompt] += 1
        if seen[picture.prompt] == best.of:
            yield from (pick._replace(rank=rank) for rank, pick in enumerate(kept.pop(picture.prompt), 1))


def without_finished(workload: Workload, best: Best) -> Workload:
    """Return `workload` without the drafts of prompts whose best are done; of the others all are drawn again."""
    finished = [0] * len(workload.prompts)
    for picture in workload.pictures:
        finished[picture.prompt] += picture.number in workload.done
    whole = {picture.number for picture in workload.pictures if finished[picture.prompt] >= best.keep}
    return workload._replace(done=frozenset(whole))
