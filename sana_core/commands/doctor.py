"""Check this machine and model files: one block to paste into a bug report.

Versions, the GPU, arithmetic against known answers, and what the files at PATH are. Nothing leaves this machine, and no
name of a user or folder is in the report. The exit status is 1 if the report has a fault.
"""

from __future__ import annotations

import argparse
import json
import sys
from contextlib import suppress
from pathlib import Path

from ..doctor import Report, examine
from ..doctor.report import SECONDS
from ..errors import ExistingFileError, OutputError
from ..runtime.atomic_files import output_file
from ..runtime.checks import check_number
from .options import path_of

LARGEST_SECONDS = 1_000_000

EXAMPLE = """example:
  python -m sana_core doctor ../../models"""


def configure(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "paths",
        nargs="*",
        type=path_of,
        default=(),
        metavar="PATH",
        help="model files, or folders of them, such as ComfyUI's models",
    )
    add("--device", default="", help="like cpu or cuda:0; default: the GPU, or the CPU")
    add("--seconds", type=float, default=SECONDS, help="skip checks that would begin later; default: %(default).0f")
    add("--json", type=path_of, help="write the report into this file as well")


def run(arguments: argparse.Namespace) -> int:
    if arguments.json is not None:
        check_target(arguments.json)
    check_number("seconds", arguments.seconds, 0, LARGEST_SECONDS)
    report = Report(seconds=arguments.seconds, tell=tell)
    examine(report, arguments.paths, arguments.device)
    if arguments.json is not None:
        with output_file(arguments.json, field="json") as part:
            part.write_text(json.dumps(report.as_json(), indent=1) + "\n")
    sys.stdout.write(report.markdown())
    return int(bool(report.faults))


def tell(what: str) -> None:
    """Say what is checked next, if anybody can still read it."""
    with suppress(OSError):
        # The name of a file may have a line break.
        sys.stderr.write(f"checking {' '.join(what.split())}\n")


def check_target(path: Path) -> None:
    """Raise OutputError if no file can be made at `path`: it is told before minutes of work."""
    try:
        path.touch(exist_ok=False)
    except FileExistsError:
        raise ExistingFileError(f"json: {path} exists; choose another name, or remove it") from None
    except OSError as error:
        raise OutputError(f"json: cannot write {path} ({error.strerror}); choose another name") from None
    path.unlink()
