"""What is checked before the first step: that model, loss and adapter fit, and that all ranks have the same."""

from __future__ import annotations

import sys
from dataclasses import is_dataclass
from hashlib import sha256
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from platform import node
from typing import Any, get_type_hints

from ..checkpoints import find_part, inspect_checkpoint
from ..checkpoints.generation import shift_of
from ..checkpoints.load import build_module
from ..errors import InputError
from ..model.known_models import TransformerConfig
from ..runtime.text import Json, brief
from .adapters import add_adapter, begin_at, check_layers, needs_start
from .controlnet import check_steerable
from .parallel import DDP
from .ranks import Ranks
from .settings import FLOW, Loss, Place, TrainingSettings

LIBRARIES = ("torch", "diffusers", "transformers", "peft")


def check_launch(settings: TrainingSettings, ranks: Ranks) -> None:
    """Raise InputError where what `settings` ask of several processes cannot be had of `ranks`."""
    check_shares(settings, ranks.size)
    if settings.parallel.kind != DDP and not ranks.launched:
        raise InputError(
            f"parallel: got {settings.parallel.kind} in a process that no launcher has started, expected several; "
            "start with torchrun, see docs/training-command.md, or choose ddp"
        )


def check_base(settings: TrainingSettings) -> float:
    """Return the shift of the model that is trained; only headers are read.

    Raises InputError for a model that does not fit the loss or the ControlNet, and for an adapter to start from that
    does not fit the settings. Raises CheckpointError or MissingFileError for files that are not a whole SANA.
    """
    for kind in ("text_encoder", "autoencoder"):
        find_part(inspect_checkpoint(settings.source(kind)), kind)
    info = find_part(inspect_checkpoint(settings.model), "transformer")
    module: Any = build_module(info)
    check_loss_fits(module.config, settings.loss)
    if settings.method.kind == "controlnet":
        check_steerable(module.config, settings.method.blocks)
    if not settings.method.whole:
        check_layers(dict(module.named_modules()), settings.method)
    if needs_start(settings):
        add_adapter(module, settings.method, settings.seed)
        begin_at(module, settings.method)
    return shift_of(info, None, settings.reference)


def check_loss_fits(config: TransformerConfig, loss: Loss) -> None:
    """Raise InputError unless `loss` is for the transformer with `config`."""
    if loss.kind == FLOW:
        if config.guidance_embeds:
            raise InputError(
                "model: got a SANA-Sprint model, which this loss would undo; train the SANA it came from, or in a "
                "settings file set loss.kind to consistency"
            )
        return
    if not config.guidance_embeds:
        raise InputError(
            "model: got one that is not SANA-Sprint with loss consistency, expected SANA-Sprint; set loss.kind to flow"
        )


def check_shares(settings: TrainingSettings, count: int) -> None:
    """Raise InputError unless a step of each phase has an image for each of `count` ranks, and replicas are even."""
    for number, phase in enumerate(settings.phase, 1):
        images = phase.batch * phase.accumulate
        if images < count:
            raise InputError(
                f"batch: got {phase.batch} and accumulate {phase.accumulate} in phase {number} for {count} processes, "
                f"expected {count} images in a step; set accumulate to {-(-count // phase.batch)}"
            )
    if count % settings.parallel.replicas:
        raise InputError(
            f"replicas: got {settings.parallel.replicas} for {count} processes, expected a number that divides them"
        )


def check_same(ranks: Ranks, values: Json, what: str) -> None:
    """Raise InputError, on all ranks, that names the first of `values` that another rank has otherwise than the first.

    `what` are the facts of, for the error.
    """
    found = ranks.all_gather((node(), values))
    host, expected = found[0]
    for number, (own_host, own) in enumerate(found):
        for name in sorted(expected.keys() | own.keys()):
            if own.get(name) != expected.get(name):
                raise InputError(
                    f"{what}: rank {number} on {own_host} has {name} {brief(own.get(name))}, but rank 0 on {host} has "
                    f"{brief(expected.get(name))}; start all with the same"
                )


def all_values(settings: Any, before: str = "") -> Json:
    """Return the values of `settings` by their names, of places, which each machine may have elsewhere, how many:
    models and images are compared by what is in them."""
    found: Json = {}
    for own_name, hint in get_type_hints(type(settings), include_extras=True).items():
        value, name = getattr(settings, own_name), before + own_name
        if hint in (Place, tuple[Place, ...]):
            found[name] = len(value) if isinstance(value, tuple) else bool(value)
        elif is_dataclass(value):
            found |= all_values(value, f"{name}.")
        elif isinstance(value, tuple) and value and is_dataclass(value[0]):
            for number, inner in enumerate(value, 1):
                found |= all_values(inner, f"{name} {number}: ")
        elif name != "device":
            found[name] = value
    return found


def code_versions() -> Json:
    """Return the digest of this package's code, and the versions that a step's values depend on."""
    package = Path(__file__).parents[1]
    digest = sha256()
    for file in sorted(package.rglob("*.py")):
        digest.update(f"{file.relative_to(package).as_posix()} ".encode() + file.read_bytes())
    found: Json = {"sana_core": digest.hexdigest()[:16], "Python": "{}.{}".format(*sys.version_info)}
    for name in LIBRARIES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    return found


def check_ranks(ranks: Ranks, settings: TrainingSettings) -> None:
    """Raise InputError where a rank has other settings or other code than the first."""
    if ranks.size > 1:
        check_same(ranks, all_values(settings), "settings")
        check_same(ranks, code_versions(), "code")
