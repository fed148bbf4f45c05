"""Where model folders are, and which of them a name means."""

from __future__ import annotations

from pathlib import Path

import folder_paths

BUNDLED = "sana-tiny (bundled)"
BUNDLED_FOLDER = Path(__file__).parents[2] / "demo" / "sana-tiny"


def list_models() -> list[str]:
    """Return the names of the diffusers folders under ComfyUI's diffusers roots, the bundled checkpoint last."""
    found = set()
    for root in map(Path, folder_paths.get_folder_paths("diffusers")):
        for pattern in ("*/model_index.json", "*/*/model_index.json"):
            found.update(file.parent.relative_to(root).as_posix() for file in root.glob(pattern))
    return [*sorted(found), BUNDLED]


def model_folder(name: str) -> Path:
    """Return the folder that `name` of `list_models` means. Raises ValueError for any other name."""
    names = list_models()
    if name not in names:
        raise ValueError(
            f"model: got {name!r}, expected one of {', '.join(names)}; put diffusers folders into models/diffusers"
        )
    if name == BUNDLED:
        return BUNDLED_FOLDER
    roots = map(Path, folder_paths.get_folder_paths("diffusers"))
    return next(root / name for root in roots if (root / name / "model_index.json").is_file())
