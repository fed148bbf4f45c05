"""A small Gemma 2 that continues a caption with what it said: so its states carry every fact of the scene."""

from __future__ import annotations

import random
from collections.abc import Iterator

from ..text import Size
from .captions import counted, random_caption
from .world import training_scenes

SIZE = Size(hidden=128, intermediate=320, layers=3, steps=3000)


def documents(rng: random.Random) -> Iterator[tuple[str, str]]:
    """Yield (caption, description) of training scenes for ever; the description is in plain words, in changing order.

    What a caption leaves out is described too, and nothing can be learnt of it but how often it is so.
    """
    for scene in training_scenes(rng):
        facts = [f"it is {scene.time}.", f"it is {scene.weather}.", f"the place is {scene.place}."]
        facts += [f"it is a {scene.style}."]
        for group in scene.groups:
            where = ", ".join(filter(None, (group.colour, group.side, group.distance)))
            facts.append(f"{counted(group.count, group.kind)}: {where}.")
        rng.shuffle(facts)
        yield random_caption(rng, scene), "\n" + " ".join(facts)
