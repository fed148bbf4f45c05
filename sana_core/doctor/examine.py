"""All checks, one after another."""

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
    """Add to `report` what is found out of this machine and of the model files at `paths`, which are files, model
    folders, or folders with models in them.

    The arithmetic is checked on `device`, by default on this machine's accelerator or its CPU. Raises InputError for a
    device that this machine does not have, and what the report's `poll` raises, which is called before each operation.
    """
    where = chosen_device(device)
    checks: dict[str, Callable[[], None]] = {
        "machine": lambda: describe_machine(report),
        "devices": lambda: describe_devices(report),
        "arithmetic": lambda: check_arithmetic(report, where),
        "files": lambda: check_files(report, [Path(path) for path in paths]),
    }
    with Polled(report.poll):
        for name, check in checks.items():
            # what ends a whole section, as a GPU that is gone
            with report.checking(SECTION, name):
                check()
