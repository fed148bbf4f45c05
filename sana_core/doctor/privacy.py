"""What a report leaves out of its lines: who and where."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from ..checkpoints.kinds import COMPONENT_FOLDERS
from ..model.known_models import DEMO_MODEL
from ..runtime.text import brief

# a path from the root on, but its last name: it may have the user's
PATH = re.compile(r"(?<![\w./])(?:[A-Za-z]:|~)?[\\/]+(?:(?!\s)[^\\/:*?\"'<>|\n]+[\\/]+)+")
ADDRESSES = (
    r"\b[\w+.-]+://\S+",
    # user@host, as mail and ssh have it
    r"[\w.+-]+@\w[\w.-]*(?::\S+)?",
    r"\b\d{1,3}(?:\.\d{1,3}){3}(?::\d+)?\b",
    # IPv6: eight groups, or :: instead of some; the last may be IPv4's
    r"(?<![\w:.])\[?(?:(?:[\da-f]{1,4}:){7}[\da-f]{1,4}|(?=:*[\da-f])(?:[\da-f]{1,4}(?::[\da-f]{1,4})*)?::"
    r"(?:[\da-f]{1,4}(?::[\da-f]{1,4})*)?)(?:(?:\.\d{1,3}){3})?(?:%\w+)?(?!\w)\]?(?::\d+)?",
    # of a network card
    r"(?<![\w:-])(?:[\da-f]{2}[:-]){5}[\da-f]{2}(?![\w:-])",
)
ADDRESS = re.compile("|".join(ADDRESSES), re.IGNORECASE)
# by how those of Hugging Face, GitHub, GitLab and OpenAI begin, or by what stands before them, which stays
SECRET = re.compile(
    r"\b(?:hf|gh[opsu]|github_pat|glpat|sk)[-_][\w-]{16,}|(\bbearer\s+|"
    r"(?:[?&]key|token|api[-_]?key|access[-_]?key|secret|password|authorization)[\"']?\s*[=:]\s*(?:bearer\s+)?[\"']?)[^\s&\"',;)]+",
    re.IGNORECASE,
)


# Everybody has folders with these names, from ComfyUI, diffusers and this pack.
USUAL_FOLDERS = {
    *("checkpoints", "clip", "clip_vision", "controlnet", "diffusers", "diffusion_models", "loras", "models"),
    *("text_encoders", "unet", "upscale_models", "vae_approx"),
    *COMPONENT_FOLDERS,
    *("scheduler", "tokenizer", "demo", DEMO_MODEL),
}


def without_places(text: str) -> str:
    """Return `text` with names of files alone where it has paths, without addresses and secrets, and without what is no
    character, as in names of files from another system."""
    text = text.encode("utf-8", "backslashreplace").decode()
    home = home_folder()
    for root in sorted({*home, Path.cwd(), Path(sys.prefix)}, key=lambda root: len(str(root)), reverse=True):
        # as messages have it, quoted or not
        for written in {str(root), root.as_posix(), repr(str(root))[1:-1]} if root.name else ():
            text = re.sub(rf"{re.escape(written)}(?![\w-])", "~", text)
    for root in home:
        # and as they call a file that is in it: folder/file
        text = re.sub(rf"(?<!\w){re.escape(root.name)}[\\/]", "", text) if root.name else text
    return PATH.sub("", ADDRESS.sub("(address)", SECRET.sub(r"\1(secret)", text)))


def without_folders(text: str, labels: Mapping[str, str]) -> str:
    """Return `text` with each folder's name replaced by its label. `labels` maps names to labels.

    Only names before a slash, a quote, a punctuation mark or the end are replaced, because messages have them there.
    """
    for name in sorted(labels, key=len, reverse=True):
        plain = name.encode("utf-8", "backslashreplace").decode()
        # Messages contain names unchanged, in ASCII, or shortened.
        for written in {plain, " ".join(plain.split()), brief(name), brief(name, 10**6), repr(name)[1:-1]}:
            text = re.sub(rf"(?<![\w.-]){re.escape(written)}(?=[:/\\'\",;)]|\.\.\.|$)", labels[name], text)
    return text


def home_folder() -> list[Path]:
    """Return the user's folder, where there is one: some containers have none."""
    with suppress(RuntimeError):
        return [Path.home()]
    return []
