"""Which ComfyUI this is."""

from __future__ import annotations

import comfyui_version

from ...sana_core.errors import VersionError

OLDEST = (0, 27)


def check_host() -> None:
    """Raise VersionError for a ComfyUI older than OLDEST, whose classes for models take other arguments."""
    version = comfyui_version.__version__
    if tuple(map(int, version.split(".")[:2])) < OLDEST:
        raise VersionError(f"SANA: got ComfyUI {version}, expected {OLDEST[0]}.{OLDEST[1]} or newer; update ComfyUI")
