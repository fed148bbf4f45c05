"""How the components of a checkpoint are found and described."""

from __future__ import annotations

from ..errors import CheckpointError, MissingFileError
from .checkpoint import CheckpointInfo
from .kinds import KINDS


def find_part(info: CheckpointInfo, kind: str) -> CheckpointInfo:
    """Return the component of that kind.

    Raises CheckpointError that names what was found and where to get the right one, MissingFileError for a component's
    folder that is not whole.
    """
    for part in info.parts or (info,):
        if part.kind == kind:
            return part
    row = KINDS[kind]
    if (info.path / "model_index.json").is_file() and row.folder is not None:
        parts_there = [part for part in info.parts if part.path.parent == info.path / row.folder]
        if not parts_there:
            raise MissingFileError(
                f"{info.name}: no config.json in {info.name}/{row.folder}; download the folder again, whole"
            )
        info = parts_there[0]
    descriptions = ", ".join(describe(part) for part in info.parts or (info,))
    raise CheckpointError(f"{info.name}: not {row.wanted}: found {descriptions}; {row.remedy}")


def find_transformer(info: CheckpointInfo) -> CheckpointInfo:
    """Return the transformer in `info`, of images or of videos. Raises as `find_part` does."""
    videos = [part for part in info.parts or (info,) if part.kind == "video_transformer"]
    return videos[0] if videos else find_part(info, "transformer")


def describe(info: CheckpointInfo) -> str:
    """Return `info`'s kind and variant as text."""
    if info.kind == "other":
        return info.variant
    title = f"a {KINDS[info.kind].title}"
    return f"{title} ({info.variant})" if info.variant else title
