"""Checks this machine: versions, GPUs, the kernels that run on them, and the user's model files.

A report consists of lines. Each line has a subject, the expected value, the actual value and a verdict. A check that
raises an error becomes a line too. `make gpu` checks the arithmetic of a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from ..runtime.cancellation import Polled
from .files import check_files
from .machine import SECTION, describe_devices, describe_machine
from .report import Line, Report

__all__ = ["Line", "Report", "examine"]


def examine(report: Report, paths: Sequence[str | Path] = ()) -> None:
    """Add lines about this machine and the model files at `paths` to `report`.

    `paths` are files, model folders, or folders that contain models. The report's `poll` is called before each
    operation and may raise to cancel.
    """
    files = partial(check_files, paths=[Path(path) for path in paths])
    with Polled(report.poll):
        for name, check in (("machine", describe_machine), ("devices", describe_devices), ("files", files)):
            # For errors that end all checks of a section, such as a lost GPU.
            with report.checking(SECTION, name):
                check(report)
