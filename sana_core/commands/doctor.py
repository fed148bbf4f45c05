"""Check this machine and model files: one block to paste into a bug report.

It checks versions, the GPU, its kernels, and the model files at PATH. Nothing is sent anywhere, and the report contains
no names of users or folders. The exit status is 1 if the report has a fault.
"""

from __future__ import annotations

import argparse
import json
from contextlib import suppress
from pathlib import Path

from ..doctor import Report, examine
from ..doctor.report import SECONDS
from ..errors import ExistingFileError, OutputError
from ..runtime.atomic_files import output_file
from ..runtime.checks import check_number
from ..runtime.text import write_lines
from .options import path_of, show_status

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
    add("--seconds", type=float, default=SECONDS, help="skip checks that would begin later; default: %(default).0f")
    add("--json", type=path_of, help="also write the report to this file")


def run(arguments: argparse.Namespace) -> int:
    if arguments.json is not None:
        check_target(arguments.json)
    check_number("seconds", arguments.seconds, 0, LARGEST_SECONDS)
    report = Report(seconds=arguments.seconds, on_check=show_progress)
    examine(report, arguments.paths)
    if arguments.json is not None:
        with output_file(arguments.json, field="json") as part:
            part.write_text(json.dumps(report.as_json(), indent=1) + "\n")
    write_lines(*report.markdown().splitlines())
    return int(bool(report.faults))


def show_progress(subject: str) -> None:
    """Write the subject of the next check to stderr. A closed stderr is no error."""
    with suppress(OSError):
        show_status(f"checking {subject}")


def check_target(path: Path) -> None:
    """Raise OutputError if `path` cannot be created, before minutes of work."""
    try:
        path.touch(exist_ok=False)
    except FileExistsError:
        raise ExistingFileError(f"json: {path} exists; choose another name, or remove it") from None
    except OSError as error:
        raise OutputError(f"json: cannot write {path} ({error.strerror}); choose another name") from None
    path.unlink()
