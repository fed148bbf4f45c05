"""How the components of a checkpoint are found and described."""

from __future__ import annotations

from ..errors import CheckpointError, MissingFileError
from .checkpoint import Checkpoint
from .kinds import CHECKPOINT_KINDS


def find_part(checkpoint: Checkpoint, kind: str) -> Checkpoint:
    """Return the component of that kind.

    Raises CheckpointError that names what was found and where to get the right one, MissingFileError for a component's
    folder that is not whole.
    """
    for part in checkpoint.parts or (checkpoint,):
        if part.kind == kind:
            return part
    row = CHECKPOINT_KINDS[kind]
    if (checkpoint.path / "model_index.json").is_file() and row.folder is not None:
        parts_there = [part for part in checkpoint.parts if part.path.parent == checkpoint.path / row.folder]
        if not parts_there:
            raise MissingFileError(
                f"{checkpoint.name}: no config.json in {checkpoint.name}/{row.folder}; download the folder again, whole"
            )
        checkpoint = parts_there[0]
    descriptions = ", ".join(describe(part) for part in checkpoint.parts or (checkpoint,))
    raise CheckpointError(f"{checkpoint.name}: not {row.wanted}: found {descriptions}; {row.remedy}")


def find_transformer(checkpoint: Checkpoint) -> Checkpoint:
    """Return the transformer in `checkpoint`, of images or of videos. Raises as `find_part` does."""
    videos = [part for part in checkpoint.parts or (checkpoint,) if part.kind == "video_transformer"]
    return videos[0] if videos else find_part(checkpoint, "transformer")


def describe(checkpoint: Checkpoint) -> str:
    """Return `checkpoint`'s kind and variant as text."""
    if checkpoint.kind == "other":
        return checkpoint.variant
    title = f"a {CHECKPOINT_KINDS[checkpoint.kind].title}"
    return f"{title} ({checkpoint.variant})" if checkpoint.variant else title
