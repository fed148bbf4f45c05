"""All checks, one after another."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from ..runtime.accelerator import chosen_device
from ..runtime.cancellation import Polled
from .arithmetic import check_arithmetic
from .figures import measure
from .files import check_files
from .machine import SECTION, describe_devices, describe_machine
from .report import Report


def examine(report: Report, paths: Sequence[str | Path] = (), device: str = "", figures: bool = False) -> None:
    """Add to `report` what is found out of this machine and of the model files at `paths`, which are files, model
    folders, or folders with models in them.

    What is computed runs on `device`, without a name this machine's accelerator or its CPU. With `figures`, seconds and
    memory are measured as well, which takes minutes. Raises InputError for a device that this machine has not, and what
    the report's `poll` raises, which is called before each operation.
    """
    where = chosen_device(device)
    checks: dict[str, Callable[[], None]] = {
        "machine": lambda: describe_machine(report),
        "devices": lambda: describe_devices(report),
        "arithmetic": lambda: check_arithmetic(report, where),
        "files": lambda: check_files(report, [Path(path) for path in paths], where),
    }
    if figures:
        checks["figures"] = lambda: measure(report, where)
    with Polled(report.poll):
        for name, check in checks.items():
            # what ends a whole section, as a GPU that is gone
            with report.checking(SECTION, name):
                check()
