"""Runs all checks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from ..runtime.accelerator import chosen_device
from ..runtime.cancellation import Polled
from .arithmetic import check_arithmetic
from .files import check_files
from .machine import SECTION, describe_devices, describe_machine
from .report import Report


def examine(report: Report, paths: Sequence[str | Path] = (), device: str = "") -> None:
    """Add lines about this machine and the model files at `paths` to `report`.

    `paths` are files, model folders, or folders that contain models. `device`: computes the arithmetic, by default this
    machine's accelerator or else its CPU. The report's `poll` is called before each operation and may raise to cancel.
    Raises InputError for a device that this machine does not have.
    """
    chosen = chosen_device(device)
    checks: dict[str, Callable[[], None]] = {
        "machine": lambda: describe_machine(report),
        "devices": lambda: describe_devices(report),
        "arithmetic": lambda: check_arithmetic(report, chosen),
        "files": lambda: check_files(report, [Path(path) for path in paths]),
    }
    with Polled(report.poll):
        for name, check in checks.items():
            # For errors that end all checks of a section, such as a lost GPU.
            with report.checking(SECTION, name):
                check()
