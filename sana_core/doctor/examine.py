"""All checks, one after another."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ..accelerator import chosen_device
from ..polling import Polled
from .arithmetic import check_arithmetic
from .figures import measure
from .files import check_files
from .machine import describe_devices, describe_machine
from .report import Report


def examine(report: Report, paths: Sequence[str | Path] = (), device: str = "", figures: bool = False) -> None:
    """Add to `report` what is found out of this machine and of the model files at `paths`, which are files, model
    folders, or folders with models in them.

    What is computed runs on `device`, without a name this machine's accelerator or its CPU. With `figures`, seconds and
    memory are measured as well, which takes minutes. Raises InputError for a device that this machine has not, and what
    the report's `poll` raises, which is called before each operation.
    """
    where = chosen_device(device)
    with Polled(report.poll):
        describe_machine(report)
        describe_devices(report)
        check_arithmetic(report, where)
        check_files(report, [Path(path) for path in paths], where)
        if figures:
            measure(report, where)
