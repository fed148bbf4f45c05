"""Where models are, and which of them a name means."""

from __future__ import annotations

import re
from pathlib import Path

import comfy.model_management
import folder_paths

from ...sana_core.checkpoints.headers import SUFFIXES

TWO_WORKERS = "cpu x 2"
BUNDLED = "sana-tiny (bundled)"
BUNDLED_FOLDER = Path(__file__).parents[2] / "demo" / "sana-tiny"
# the folders whose part the bundled checkpoint has
PARTS = ("diffusion_models", "text_encoders", "vae")
# of a sharded model, the first file stands for all
LATER_SHARD = re.compile(r"-(?!00001)\d{5}-of-\d{5}\.")


def list_files(kind: str) -> list[str]:
    """Return the names of the weights files in ComfyUI's folders of that kind, the bundled one last where it fits."""
    files = [
        name
        for name in folder_paths.get_filename_list(kind)
        if name.lower().endswith(SUFFIXES) and not LATER_SHARD.search(name)
    ]
    return [*files, BUNDLED] if kind in PARTS else files


def find_file(kind: str, name: str) -> Path:
    """Return the file that `name` of `list_files` means. Raises ValueError or FileNotFoundError for any other name."""
    if name == BUNDLED and kind in PARTS:
        return BUNDLED_FOLDER
    if not name.lower().endswith(SUFFIXES):
        raise ValueError(f"{kind}: got {name!r}, expected a file of {', '.join(SUFFIXES)} in models/{kind}")
    path = folder_paths.get_full_path(kind, name)
    if path is None:
        raise FileNotFoundError(
            f"{kind}: no file {name!r} in models/{kind}; put it there and refresh, or choose another"
        )
    return Path(path)


def list_models() -> list[str]:
    """Return what SANA Loader offers: diffusers folders, files in models/checkpoints, the bundled checkpoint last."""
    found = set()
    for root in map(Path, folder_paths.get_folder_paths("diffusers")):
        for pattern in ("*/model_index.json", "*/*/model_index.json"):
            found.update(file.parent.relative_to(root).as_posix() for file in root.glob(pattern))
    return [*sorted(found), *list_files("checkpoints"), BUNDLED]


def model_path(name: str) -> Path:
    """Return the folder or file that `name` of `list_models` means. Raises ValueError for any other name."""
    if name not in list_models():
        raise ValueError(
            f"model: got {name!r}, expected one of {', '.join(list_models())}; "
            "put diffusers folders into models/diffusers and all-in-one files into models/checkpoints"
        )
    if name == BUNDLED:
        return BUNDLED_FOLDER
    roots = map(Path, folder_paths.get_folder_paths("diffusers"))
    folders = (root / name for root in roots if (root / name / "model_index.json").is_file())
    return next(folders, None) or find_file("checkpoints", name)


def list_devices() -> list[str]:
    """Return what SANA Batch Sampler offers: all and default, each accelerator, or the CPU's cores as two workers."""
    devices = comfy.model_management.get_all_torch_devices()
    if devices[0].type == "cpu":
        return ["all", "default", TWO_WORKERS]
    return ["all", "default", *(f"gpu:{i}" for i in range(len(devices)))]
