"""Options of `generate` and `batch`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import get_args, get_type_hints

import torch

from ..batch.pipeline import DTYPES, SamplingSettings, local_devices
from ..checkpoints import Checkpoint
from ..checkpoints.generation import record_of, scheduler_of
from ..cluster.connection import ClusterSettings
from ..errors import InputError
from ..model.reference import REFERENCES
from ..runtime.accelerator import has_bf16
from ..runtime.text import Json, one_line


def path_of(text: str) -> Path:
    """Return the path. Refuse an empty path: an unset shell variable would mean the current folder."""
    if not text:
        raise argparse.ArgumentTypeError("got an empty path, expected the path of a file or folder")
    return Path(text)


def lora_of(text: str) -> tuple[str, float]:
    """Parse "file.safetensors=0.8" to file and strength. The default strength is 1."""
    file, strength = text, 1.0
    before, separator, after = text.rpartition("=")
    # A file name may contain "=", too.
    with suppress(ValueError):
        file, strength = (before, float(after)) if separator else (text, 1.0)
    path_of(file)
    return file, strength


# The parser's arguments for fields of SamplingSettings that are not one text or number.
FORMS: Json = {
    "guidance_interval": {"type": float, "nargs": 2, "metavar": ("START", "END")},
    "dtype": {"choices": DTYPES},
    "compiled": {"action": "store_true"},
    "reference": {"choices": REFERENCES},
    "loras": {"type": lora_of, "action": "append", "metavar": "FILE[=STRENGTH]"},
}
# Fields whose options have another name.
FLAGS = {"compiled": "compile", "loras": "lora"}


def add_sampling_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that `generate` and `batch` share, including those for `settings_of` and `cluster_of`."""
    add = parser.add_argument
    add("--checkpoint", required=True, type=path_of, help="a folder or file; on a cluster, it exists on each machine")
    add("--out", type=path_of, default=Path("output"), help="folder for the PNG files")
    add("--seed", type=int, default=0, help="image i of each prompt uses seed + i")
    add("--count", type=int, default=1, help="images of each prompt")
    add("--best", type=int, metavar="K", help="keep only the best K of --of images of each prompt, by --scorer")
    add("--of", type=int, metavar="N", help="images of each prompt to choose from; image i uses seed + i")
    add(
        "--scorer",
        type=path_of,
        help="folder of a CLIP, such as PickScore_v1, that rates how well an image fits a prompt",
    )
    add_settings(parser)
    add("--chunk", type=int, help="images that a device generates at once; 0, the default, finds a number that fits")
    add("--devices", nargs="+", help="such as cpu, or cuda:0 cuda:1; default: all GPUs, or else the CPU")
    add_cluster(parser)


def add_settings(parser: argparse.ArgumentParser) -> None:
    for field, hint in get_type_hints(SamplingSettings, include_extras=True).items():
        kind, text = get_args(hint)
        # The type in `int | None` is int.
        form = FORMS.get(field) or {"type": next(iter(get_args(kind)), kind)}
        parser.add_argument(f"--{FLAGS.get(field, field).replace('_', '-')}", help=text, **form)


def add_cluster(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--cluster", metavar="ADDRESS", help="use the GPUs of this Ray cluster; auto finds the address")
    add("--gpus", type=int, help="cluster only: use at most N GPUs; default: all", metavar="N")
    add("--gpus-per-worker", type=float, default=1.0, help="cluster only: GPUs per process; 0.5 for two on a GPU")
    add(
        "--resource",
        type=resource_of,
        action="append",
        metavar="NAME[=AMOUNT]",
        help="cluster only: use machines with this custom Ray resource, of which each process takes AMOUNT",
    )


def resource_of(text: str) -> tuple[str, float]:
    """Parse "NAME=AMOUNT". The default is 0.001, so that many processes fit."""
    name, separator, amount = text.partition("=")
    return name, float(amount) if separator else 0.001


def cluster_of(arguments: argparse.Namespace) -> ClusterSettings | None:
    """Return the cluster that generates, or None for this machine."""
    share = {"gpus": None, "gpus_per_worker": 1.0, "resource": None}
    if arguments.cluster is None:
        for name, default in share.items():
            if getattr(arguments, name) != default:
                raise InputError(f"{name}: it is only for a cluster; add --cluster, or leave it out")
        return None
    if arguments.devices is not None:
        raise InputError("devices: got devices of this machine with --cluster; leave one of them out")
    resources = tuple(arguments.resource or ())
    return ClusterSettings(arguments.cluster, arguments.gpus, arguments.gpus_per_worker, resources)


def devices_of(arguments: argparse.Namespace) -> list[torch.device] | None:
    """Return the devices that generate, None for a cluster. It warns of missing devices, so call it once."""
    return None if arguments.cluster is not None else local_devices(arguments.devices)


def choose_dtype(arguments: argparse.Namespace, devices: list[torch.device] | None) -> str:
    """Return the chosen dtype or a suitable one, and print it if there are accelerators."""
    if devices is None:
        return arguments.dtype or "float32"
    dtype = arguments.dtype or ("bfloat16" if all(map(has_bf16, devices)) else "float32")
    if any(device.type != "cpu" for device in devices):
        show_status(f"generating in {dtype} on {', '.join(map(str, devices))}")
    return dtype


def settings_of(arguments: argparse.Namespace, devices: list[torch.device] | None) -> SamplingSettings:
    values = {field: getattr(arguments, FLAGS.get(field, field)) for field in SamplingSettings._fields}
    values["dtype"] = choose_dtype(arguments, devices)
    # The parser makes lists.
    settings: Json = {field: tuple(value) if isinstance(value, list) else value for field, value in values.items()}
    return SamplingSettings(**{field: value for field, value in settings.items() if value is not None})


def show_model(checkpoint: Checkpoint) -> None:
    """Write a line if the model is a guess, and one with the settings of its scheduler that do not exist here."""
    part = checkpoint.transformer
    if part is not None:
        if part.is_assumed:
            show_status(f"{part.name}: {record_of(part).title}, assumed from the file's name")
        for line in scheduler_of(part).notes:
            show_status(line)


def show_status(text: str) -> None:
    sys.stderr.write(f"{one_line(text)}\n")
    sys.stderr.flush()


@contextmanager
def progress_line() -> Iterator[Callable[[str], None]]:
    """Yield a function that replaces the text on the current line of stderr.

    The line ends with the context, so that an error begins on a new line.
    """
    used = False

    def show(text: str) -> None:
        nonlocal used
        used = True
        sys.stderr.write(f"\r{text}")
        sys.stderr.flush()

    try:
        yield show
    finally:
        if used:
            with suppress(OSError, ValueError):
                sys.stderr.write("\n")
