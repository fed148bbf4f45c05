"""The lines of a report, as Markdown for a bug report and as JSON; nothing in them says who or where."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from ..errors import first_line
from ..runtime.cancellation import Poll, no_poll
from .privacy import USUAL_FOLDERS, without_folders, without_places

RIGHT, WRONG, FAILED, SKIPPED, NOTED = "right", "WRONG", "FAILED", "skipped", "noted"
LONGEST = 300
# The checks that have not begun after this time are skipped.
SECONDS = 110.0
# what Markdown would take for its own in a name of a file
MARKS = re.compile(r"[\\`*<\[|]")


class Line(NamedTuple):
    """What was looked at, what was expected of it, what was got, and one of the verdicts."""

    section: str
    what: str
    expected: str
    got: str
    verdict: str


class Report:
    """Lines, which `poll` may cancel by raising, and which after `seconds` are skipped."""

    def __init__(self, poll: Poll = no_poll, seconds: float = SECONDS, tell: Callable[[str], object] = str) -> None:
        """`tell` hears what is checked next."""
        self.lines: list[Line] = []
        # {name of one of the user's folders: its label in lines}
        self.folders: dict[str, str] = {}
        self.tell = tell
        self.end = time.monotonic() + seconds
        self.cancel = poll
        self.cancelled = False

    def poll(self) -> None:
        """Let the caller cancel, whatever is being checked."""
        try:
            self.cancel()
        except BaseException:
            self.cancelled = True
            raise

    def add(self, section: str, what: str, expected: str, got: str, verdict: str) -> None:
        self.lines.append(Line(section, self.anonymous(what), expected, self.anonymous(got), verdict))

    def anonymous(self, text: str) -> str:
        """Return `text` without places, and with numbers for the names of the user's folders."""
        return without_folders(without_places(text), self.folders)

    def label(self, path: Path) -> str:
        """Return how lines name `path`: a file by its name, a folder by a number unless its name is a usual one.

        The root and the current folder have no name.
        """
        # Behind a folder that cannot be searched, `is_dir` raises PermissionError. Such a path counts as a folder.
        with suppress(OSError):
            if not path.is_dir():
                return path.name
        if not path.name or path.name in USUAL_FOLDERS:
            return path.name
        return self.folders.setdefault(path.name, f"folder {len(self.folders) + 1}")

    def note(self, section: str, what: str, got: str) -> None:
        """Add a line that there is nothing to expect of."""
        self.add(section, what, "", got, NOTED)

    def judge(self, section: str, what: str, expected: str, got: str, right: bool) -> None:
        self.add(section, what, expected, got, RIGHT if right else WRONG)

    @contextmanager
    def checking(self, section: str, what: str) -> Iterator[None]:
        """A context for one check, whose failure becomes a line."""
        try:
            self.poll()
            self.tell(what)
            yield
        except Exception as error:
            if self.cancelled:
                raise
            # Replace names before the text is cut: half a folder's name would not be recognised.
            self.add(section, what, "no error", self.anonymous(first_line(error))[:LONGEST], FAILED)

    def skip(self, section: str, what: str, why: str) -> None:
        self.add(section, what, "", why, SKIPPED)

    def late(self, section: str, what: str) -> bool:
        """Whether the time is over, with a line that says so of what is then not checked."""
        is_late = time.monotonic() > self.end
        if is_late:
            self.skip(section, what, "no time left")
        return is_late

    @property
    def faults(self) -> list[Line]:
        """The lines that something is wrong with."""
        return [line for line in self.lines if line.verdict in (WRONG, FAILED)]

    def summary(self) -> str:
        """Return one line: how many checks there were, and how many found a fault."""
        checked = [line for line in self.lines if line.verdict in (RIGHT, WRONG, FAILED)]
        skipped = sum(line.verdict == SKIPPED for line in self.lines)
        return f"{len(checked)} checks, {len(self.faults)} with a fault, {skipped} skipped"

    def markdown(self) -> str:
        """Return the report as it is pasted: faults first, then all."""
        parts = ["### SANA Doctor", self.summary()]
        if self.faults:
            parts.append(table(self.faults))
        for section in dict.fromkeys(line.section for line in self.lines):
            own = [line for line in self.lines if line.section == section]
            parts.append(f"<details><summary>{section}</summary>\n\n{table(own)}\n</details>")
        return "\n\n".join(parts) + "\n"

    def as_json(self) -> dict[str, object]:
        return {"summary": self.summary(), "lines": [line._asdict() for line in self.lines]}


def table(lines: list[Line]) -> str:
    rows = [("what", "expected", "got", "verdict"), ("---",) * 4, *(line[1:] for line in lines)]
    escaped = [[MARKS.sub(r"\\\g<0>", " ".join(cell.split())) for cell in row] for row in rows]
    return "\n".join(f"| {' | '.join(row)} |" for row in escaped)
