"""What every benchmark writes beside its figures: when, where, with which versions."""

from __future__ import annotations

import os
import platform
import time
from importlib.metadata import version


def description() -> dict:
    return {
        "date": time.strftime("%Y-%m-%d"),
        "machine": f"{os.cpu_count()} cores {platform.machine()}, {platform.system()}",
        "versions": {name: version(name) for name in ("torch", "diffusers", "transformers")}
        | {"python": platform.python_version()},
    }
