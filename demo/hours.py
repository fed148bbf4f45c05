"""The light of the hours."""

from __future__ import annotations

from typing import NamedTuple

from .brush import Colour


class Hour(NamedTuple):
    """What a time of day does: the sky from the top to the horizon, what remains of a colour on land and on subjects,
    and the colours of the sun or moon, of the haze, and of shadows."""

    top: Colour
    middle: Colour
    bottom: Colour
    land: Colour
    subject: Colour
    orb: Colour
    glow: Colour
    shadow: Colour
    lamp: Colour


HOURS = {
    "dawn": Hour(
        (116, 164, 206), (190, 200, 206), (255, 210, 176), (0.97, 0.9, 0.86), (1.0, 0.96, 0.94),
        (255, 250, 226), (255, 238, 200), (92, 74, 110), (236, 240, 236),
    ),
    "noon": Hour(
        (62, 150, 228), (124, 192, 242), (206, 234, 248), (1.0, 1.0, 1.0), (1.0, 1.0, 1.0),
        (255, 230, 110), (255, 246, 196), (40, 60, 110), (216, 236, 246),
    ),
    "dusk": Hour(
        (72, 54, 124), (196, 84, 112), (255, 158, 84), (0.74, 0.58, 0.62), (0.94, 0.84, 0.84),
        (255, 224, 130), (255, 184, 96), (54, 26, 70), (255, 226, 130),
    ),
    "night": Hour(
        (12, 18, 52), (26, 38, 84), (56, 76, 132), (0.37, 0.42, 0.62), (0.76, 0.77, 0.88),
        (252, 246, 218), (150, 168, 216), (6, 8, 30), (255, 224, 118),
    ),
}  # fmt: skip
