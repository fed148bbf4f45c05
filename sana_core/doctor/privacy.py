"""Removes the user's name, paths, addresses and secrets from a report."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from ..checkpoints.kinds import COMPONENT_FOLDERS
from ..model.known_models import DEMO_MODEL
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
