"""Where models are, which of them a name means, and what this server can draw on."""

from __future__ import annotations

import logging
import re
from pathlib import Path

import comfy.model_management
import folder_paths

from ...sana_core.checkpoints.files import brief, parse_json, read_bytes
from ...sana_core.checkpoints.headers import SUFFIXES
from ...sana_core.errors import InputError, MissingFileError, SanaError

logger = logging.getLogger(__name__)

TWO_WORKERS = "cpu x 2"
CLUSTER = "cluster"
LARGEST_CLUSTER_FILE = 10_000
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
    """Return the file that `name` of `list_files` means. Raises InputError or MissingFileError for any other name."""
    if name == BUNDLED and kind in PARTS:
        return BUNDLED_FOLDER
    if not isinstance(name, str) or not name.lower().endswith(SUFFIXES):
        raise InputError(f"{kind}: got {name!r}, expected a file of {', '.join(SUFFIXES)} in models/{kind}")
    path = folder_paths.get_full_path(kind, name)
    if path is None:
        raise MissingFileError(
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
    """Return the folder or file that `name` of `list_models` means. Raises InputError for any other name."""
    if name not in list_models():
        raise InputError(
            f"model: got {name!r}, expected one of {', '.join(list_models())}; "
            "put diffusers folders into models/diffusers and all-in-one files into models/checkpoints"
        )
    if name == BUNDLED:
        return BUNDLED_FOLDER
    roots = map(Path, folder_paths.get_folder_paths("diffusers"))
    folders = (root / name for root in roots if (root / name / "model_index.json").is_file())
    return next(folders, None) or find_file("checkpoints", name)


def list_devices() -> list[str]:
    """Return what SANA Batch Sampler offers: all and default, each accelerator, or the CPU's cores as two workers.

    The cluster is there if the operator has configured it. A broken file of it is left out with a log: the nodes must
    be there all the same.
    """
    devices = comfy.model_management.get_all_torch_devices()
    own = [TWO_WORKERS] if devices[0].type == "cpu" else [f"gpu:{i}" for i in range(len(devices))]
    try:
        more = [CLUSTER] if cluster_address() is not None else []
    except InputError:  # it is in the log
        more = []
    return ["all", "default", *own, *more]


def cluster_address() -> str | None:
    """Return the address of the Ray cluster in cluster.json of the system user "sana", None where no such file is.

    HTTP does not reach that folder, and what is in it is the operator's alone: of a file that is broken only the log
    says where it is and why, and InputError that it is.
    """
    file = Path(folder_paths.get_system_user_directory("sana")) / "cluster.json"
    try:
        found = parse_json(read_bytes(file, LARGEST_CLUSTER_FILE), "cluster.json")
    except MissingFileError:
        return None
    except SanaError as error:
        # without the remedy for files that were downloaded
        reason = str(error).rpartition("; ")[0]
    else:
        match found:
            case {"address": str(address)} if address and len(found) == 1:
                return address
        reason = f"got {brief(found)}"
    logger.error('SANA Batch Sampler: %s: %s; expected {"address": "auto"}, or an address like HOST:6379', file, reason)
    raise InputError("devices: the server's cluster.json is broken; its operator finds why in the log")
