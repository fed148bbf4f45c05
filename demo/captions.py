"""Captions of scenes."""

from __future__ import annotations

import random

from .world import Combination, Group, Scene

# Phrases for each word. `prompt` uses the first one.
SAID = {
    "dawn": ("at dawn", "at sunrise", "in the early morning"),
    "noon": ("at noon", "at midday", "in bright daylight"),
    "dusk": ("at dusk", "at sunset", "in the evening"),
    "night": ("at night", "under the stars", "by moonlight"),
    "sea": ("on the sea", "on the ocean", "in the middle of the sea"),
    "hills": ("among green hills", "in a hilly landscape", "in the hills"),
    "desert": ("in the desert", "among sand dunes", "in a sandy desert"),
    "snow": ("in the snow", "in a snowy landscape", "on snowy fields"),
    "street": (
        "on a street of houses",
        "in front of a row of houses",
        "in a street",
        "in the city",
        "in a city street",
    ),
    "house": ("house", "cottage", "little house"),
    "lighthouse": ("lighthouse", "striped lighthouse"),
    "boat": ("boat", "sailing boat", "sailboat"),
    "tree": ("tree", "leafy tree"),
    "balloon": ("balloon", "hot-air balloon"),
    "car": ("car", "small car"),
    "mountain": ("mountain", "peak"),
    "windmill": ("windmill", "old windmill"),
    "left": ("on the left", "to the left", "on the left side"),
    "middle": ("in the middle", "in the centre"),
    "right": ("on the right", "to the right", "on the right side"),
    "near": ("close by", "in the foreground"),
    "far": ("far away", "in the distance"),
    "clear": ("under a clear sky", "in fine weather"),
    "cloudy": ("under a cloudy sky", "with clouds in the sky"),
    "rainy": ("in the rain", "on a rainy day"),
    "flat": ("a flat drawing", "a flat illustration", "a poster"),
    "watercolour": ("a watercolour", "a watercolor painting", "a watercolour painting"),
    "line drawing": ("a line drawing", "an ink drawing", "a drawing in ink"),
}
NUMBERS = {2: "two", 3: "three"}


def counted(count: int, noun: str) -> str:
    """Return "a tree", "an orange tree", "two trees"."""
    if count > 1:
        return f"{NUMBERS[count]} {noun}s"
    return ("an " if noun[0] in "aeiou" else "a ") + noun


def prompt(combination: Combination, count: int = 1) -> str:
    """Return the plain caption, which is also the form of the test prompts."""
    time, place, style, kind, colour = combination
    return f"{SAID[style][0]} of {counted(count, f'{colour} {kind}')} {SAID[place][0]} {SAID[time][0]}"


def random_caption(rng: random.Random, scene: Scene) -> str:
    """Describe `scene` in one or two sentences: always its subjects, mostly the rest, in changing words and order."""

    def said(word: str) -> str:
        ways = SAID[word]
        return ways[0] if rng.random() < 0.5 else rng.choice(ways)

    def phrase(group: Group) -> str:
        words = counted(group.count, f"{group.colour} {said(group.kind)}")
        if group.side and rng.random() < 0.45:
            words += f" {said(group.side)}"
        if group.distance and rng.random() < 0.4:
            words += f" {said(group.distance)}"
        return words

    phrases = [phrase(group) for group in scene.groups]
    subjects = " and ".join(filter(None, (", ".join(phrases[:-1]), phrases[-1])))
    around = [said(scene.place)] if rng.random() < 0.95 else []
    around += [said(scene.time)] if rng.random() < 0.95 else []
    if rng.random() < 0.2:
        around.reverse()
    around += [said(scene.weather)] if rng.random() < (0.8 if scene.weather == "rainy" else 0.35) else []
    style, where = said(scene.style), " ".join(around)
    form = rng.random()
    if form < 0.7:
        return f"{style} of {subjects} {where}".strip()
    if form < 0.85:
        return f"{subjects} {where}".strip() + f", {style.split(' ', 1)[1]}"
    return f"{style}. {subjects} {where}".strip()
