"""What has to be the same on all ranks before the first step, and the name of what is not."""

from __future__ import annotations

import sys
from dataclasses import fields, is_dataclass
from hashlib import sha256
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from platform import node
from typing import Any

from ..checkpoints.files import brief
from ..errors import InputError
from .ranks import Ranks
from .settings import Settings

# what each machine may keep elsewhere: models and pictures are compared by what is in them
PLACES = ("model", "text_encoder", "autoencoder", "cache", "out", "data", "device", "teacher", "start", "control")
LIBRARIES = ("torch", "diffusers", "transformers", "peft")


def check_same(ranks: Ranks, facts: dict[str, Any], what: str) -> None:
    """Raise InputError, on all ranks, that names the first of `facts` that another rank has otherwise than the first.

    `what` are the facts of, for the error.
    """
    found = ranks.of_all((node(), facts))
    host, expected = found[0]
    for number, (own_host, own) in enumerate(found):
        for name in sorted(expected.keys() | own.keys()):
            if own.get(name) != expected.get(name):
                raise InputError(
                    f"{what}: rank {number} on {own_host} has {name} {brief(own.get(name))}, but rank 0 on {host} has "
                    f"{brief(expected.get(name))}; start all with the same"
                )


def all_values(settings: Any, before: str = "") -> dict[str, Any]:
    """Return the values of `settings` by their names, without places."""
    found: dict[str, Any] = {}
    for each in fields(settings):
        value, name = getattr(settings, each.name), before + each.name
        if each.name in PLACES:
            found[name] = len(value) if isinstance(value, tuple) else bool(value) if each.name != "device" else None
        elif is_dataclass(value):
            found |= all_values(value, f"{name}.")
        elif isinstance(value, tuple) and value and is_dataclass(value[0]):
            for number, inner in enumerate(value, 1):
                found |= all_values(inner, f"{name} {number}: ")
        else:
            found[name] = value
    return found


def code_facts() -> dict[str, Any]:
    """Return the digest of this package's code, and the versions that a step's numbers depend on."""
    package = Path(__file__).parents[1]
    digest = sha256()
    for file in sorted(package.rglob("*.py")):
        digest.update(f"{file.relative_to(package).as_posix()} ".encode() + file.read_bytes())
    found: dict[str, Any] = {"sana_core": digest.hexdigest()[:16], "Python": "{}.{}".format(*sys.version_info)}
    for name in LIBRARIES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    return found


def check_ranks(ranks: Ranks, settings: Settings) -> None:
    """Raise InputError where a rank has other settings or other code than the first."""
    if ranks.size > 1:
        check_same(ranks, all_values(settings), "settings")
        check_same(ranks, code_facts(), "code")
