"""The lines of a report, as Markdown and JSON, without the user's name, paths, addresses and secrets."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from ..checkpoints.checkpoint import COMPONENT_FOLDERS
from ..errors import first_line
from ..model.known_models import DEMO_MODEL
from ..runtime.cancellation import Poll, no_poll
from ..runtime.text import brief

# An absolute path without its last name. It may contain the user's name.
PATH = re.compile(r"(?<![\w./])(?:[A-Za-z]:|~)?[\\/]+(?:(?!\s)[^\\/:*?\"'<>|\n]+[\\/]+)+")
ADDRESSES = (
    r"\b[\w+.-]+://\S+",
    # user@host, as in e-mail and ssh.
    r"[\w.+-]+@\w[\w.-]*(?::\S+)?",
    r"\b\d{1,3}(?:\.\d{1,3}){3}(?::\d+)?\b",
    # IPv6: eight groups, or :: instead of some of them. The last part may be an IPv4 address.
    r"(?<![\w:.])\[?(?:(?:[\da-f]{1,4}:){7}[\da-f]{1,4}|(?=:*[\da-f])(?:[\da-f]{1,4}(?::[\da-f]{1,4})*)?::"
    r"(?:[\da-f]{1,4}(?::[\da-f]{1,4})*)?)(?:(?:\.\d{1,3}){3})?(?:%\w+)?(?!\w)\]?(?::\d+)?",
    # The address of a network card.
    r"(?<![\w:-])(?:[\da-f]{2}[:-]){5}[\da-f]{2}(?![\w:-])",
)
ADDRESS = re.compile("|".join(ADDRESSES), re.IGNORECASE)
# Tokens are recognised by their prefix (Hugging Face, GitHub, GitLab, OpenAI), or by a preceding word such as "token=".
# That word is not removed.
SECRET = re.compile(
    r"\b(?:hf|gh[opsu]|github_pat|glpat|sk)[-_][\w-]{16,}|(\bbearer\s+|"
    r"(?:[?&]key|token|api[-_]?key|access[-_]?key|secret|password|authorization)[\"']?\s*[=:]\s*(?:bearer\s+)?[\"']?)[^\s&\"',;)]+",
    re.IGNORECASE,
)


# Folders of ComfyUI, diffusers and this pack. Their names are not private.
USUAL_FOLDERS = {
    *("checkpoints", "clip", "clip_vision", "controlnet", "diffusers", "diffusion_models", "loras", "models"),
    *("text_encoders", "unet", "upscale_models", "vae_approx"),
    *COMPONENT_FOLDERS,
    *("scheduler", "tokenizer", "demo", DEMO_MODEL),
}


def without_places(text: str) -> str:
    """Return `text` without addresses and secrets. Paths are reduced to the names of their files.

    Bytes that are not valid characters, for example in file names from another system, are escaped.
    """
    text = text.encode("utf-8", "backslashreplace").decode()
    home = home_folder()
    for root in sorted({*home, Path.cwd(), Path(sys.prefix)}, key=lambda root: len(str(root)), reverse=True):
        # Messages contain the path plain or quoted.
        for spelling in {str(root), root.as_posix(), repr(str(root))[1:-1]} if root.name else ():
            text = re.sub(rf"{re.escape(spelling)}(?![\w-])", "~", text)
    for root in home:
        # Messages about a file in the folder contain folder/file.
        text = re.sub(rf"(?<!\w){re.escape(root.name)}[\\/]", "", text) if root.name else text
    return PATH.sub("", ADDRESS.sub("(address)", SECRET.sub(r"\1(secret)", text)))


def without_folders(text: str, labels: Mapping[str, str]) -> str:
    """Return `text` with each folder's name replaced by its label. `labels` maps names to labels.

    A name is replaced only before a slash, a quote, a punctuation mark or the end of the text, which is where messages
    contain names.
    """
    for name in sorted(labels, key=len, reverse=True):
        plain = name.encode("utf-8", "backslashreplace").decode()
        # Messages contain names unchanged, in ASCII, or shortened.
        for spelling in {plain, " ".join(plain.split()), brief(name), brief(name, 10**6), repr(name)[1:-1]}:
            text = re.sub(rf"(?<![\w.-]){re.escape(spelling)}(?=[:/\\'\",;)]|\.\.\.|$)", labels[name], text)
    return text


def home_folder() -> list[Path]:
    """Return the user's home folder in a list, which is empty in containers without one."""
    with suppress(RuntimeError):
        return [Path.home()]
    return []


RIGHT, WRONG, FAILED, SKIPPED, NOTED = "right", "WRONG", "FAILED", "skipped", "noted"
LONGEST = 300
# The checks that have not begun after this time are skipped.
SECONDS = 110.0
# Characters in names of files that Markdown would interpret.
MARKS = re.compile(r"[\\`*<\[|]")


class Line(NamedTuple):
    section: str
    # The package, device, kernel or file that was checked.
    subject: str
    expected: str
    got: str
    # RIGHT, WRONG, FAILED, SKIPPED or NOTED.
    verdict: str


class Report:
    """Collects lines. `poll` is called before each check and cancels by raising.

    Checks that would begin later than `seconds` are skipped. `on_check` is called with the subject of each check.
    """

    def __init__(self, poll: Poll = no_poll, seconds: float = SECONDS, on_check: Callable[[str], object] = str) -> None:
        self.lines: list[Line] = []
        # {name of one of the user's folders: its label in lines}
        self.folders: dict[str, str] = {}
        self.on_check = on_check
        self.end = time.monotonic() + seconds
        self.cancel = poll
        self.cancelled = False

    def poll(self) -> None:
        """Call the caller's poll. Remember its error, so that `checking` does not turn it into a line."""
        try:
            self.cancel()
        except BaseException:
            self.cancelled = True
            raise

    def add(self, section: str, subject: str, expected: str, got: str, verdict: str) -> None:
        self.lines.append(Line(section, self.anonymous(subject), expected, self.anonymous(got), verdict))

    def anonymous(self, text: str) -> str:
        return without_folders(without_places(text), self.folders)

    def label(self, path: Path) -> str:
        """Return the name of `path` in lines: the name of a file or of a usual folder, or "folder N" for other folders.

        For the root and the current folder it is empty.
        """
        # Behind a folder that cannot be searched, `is_dir` raises PermissionError. Such a path counts as a folder.
        with suppress(OSError):
            if not path.is_dir():
                return path.name
        if not path.name or path.name in USUAL_FOLDERS:
            return path.name
        return self.folders.setdefault(path.name, f"folder {len(self.folders) + 1}")

    def note(self, section: str, subject: str, got: str) -> None:
        self.add(section, subject, "", got, NOTED)

    def judge(self, section: str, subject: str, expected: str, got: str, right: bool) -> None:
        self.add(section, subject, expected, got, RIGHT if right else WRONG)

    @contextmanager
    def checking(self, section: str, subject: str) -> Iterator[None]:
        """A context for one check. An error becomes a line with the verdict FAILED."""
        try:
            self.poll()
            self.on_check(subject)
            yield
        except Exception as error:
            if self.cancelled:
                raise
            # Replace names before the text is cut: half a folder's name would not be recognised.
            self.add(section, subject, "no error", self.anonymous(first_line(error))[:LONGEST], FAILED)

    def skip(self, section: str, subject: str, why: str) -> None:
        self.add(section, subject, "", why, SKIPPED)

    def late(self, section: str, subject: str) -> bool:
        """Whether the time is over. If so, add a line that `subject` was skipped."""
        is_late = time.monotonic() > self.end
        if is_late:
            self.skip(section, subject, "no time left")
        return is_late

    @property
    def faults(self) -> list[Line]:
        return [line for line in self.lines if line.verdict in (WRONG, FAILED)]

    def summary(self) -> str:
        checked = [line for line in self.lines if line.verdict in (RIGHT, WRONG, FAILED)]
        skipped = sum(line.verdict == SKIPPED for line in self.lines)
        return f"{len(checked)} checks, {len(self.faults)} with a fault, {skipped} skipped"

    def markdown(self) -> str:
        """Return the report as Markdown: the faults, then all lines of each section."""
        parts = ["### SANA Doctor", self.summary()]
        if self.faults:
            parts.append(table(self.faults))
        for section in dict.fromkeys(line.section for line in self.lines):
            section_lines = [line for line in self.lines if line.section == section]
            parts.append(f"<details><summary>{section}</summary>\n\n{table(section_lines)}\n</details>")
        return "\n\n".join(parts) + "\n"

    def as_json(self) -> dict[str, object]:
        return {"summary": self.summary(), "lines": [line._asdict() for line in self.lines]}


def table(lines: list[Line]) -> str:
    rows = [("subject", "expected", "got", "verdict"), ("---",) * 4, *(line[1:] for line in lines)]
    escaped = [[MARKS.sub(r"\\\g<0>", " ".join(cell.split())) for cell in row] for row in rows]
    return "\n".join(f"| {' | '.join(row)} |" for row in escaped)
