"""The folders of models, data sets and runs, the paths of their names, and the devices of this server."""

from __future__ import annotations

import re
import sys
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import comfy.cli_args
import comfy.model_management
import comfyui_version
import folder_paths

from ...sana_core.checkpoints.detect import original_files
from ...sana_core.checkpoints.files import parse_json, read_bytes
from ...sana_core.checkpoints.generation import DOWNLOADS, file_names, where_to_get
from ...sana_core.checkpoints.headers import SUFFIXES
from ...sana_core.cluster.connection import ClusterSettings
from ...sana_core.errors import InputError, InUseError, MissingFileError, SanaError
from ...sana_core.model.known_models import DEMO_MODEL, DEMO_MODEL_LISTED
from ...sana_core.runtime.text import brief, get_logger, one_line
from .compat import survive_deleted_folders

logger = get_logger(__name__)

TWO_WORKERS = "cpu x 2"
CLUSTER = "cluster"
# From this version on, ComfyUI on Windows hides all GPUs but the first unless it is started with --cuda-device. Earlier
# versions do not know its value "all".
HIDES_GPUS = (0, 34)
LARGEST_CLUSTER_FILE = 10_000
CLUSTER_ADDRESS = re.compile(r"ray://\S+:\d{1,5}")
HERE = Path(__file__).parents[2]
# The models that come with the pack.
MODELS = {DEMO_MODEL_LISTED: HERE / "demo" / DEMO_MODEL}
DATASETS = {"cyanotypes (bundled)": HERE / "recipes" / "cyanotypes"}
# The folder of training runs in ComfyUI's output folder.
RUNS = "sana_training"
# The folders in ComfyUI's output folder where loaders find results of training.
RESULTS = ("loras", "controlnet")
# A plain folder name without separators or dots at its ends, and short enough for a file name in UTF-8.
RUN_NAME = re.compile(r"\w([\w .-]{0,48}\w)?")
# ComfyUI folder: the bundled models it lists.
BUNDLED = {
    "diffusion_models": MODELS,
    "text_encoders": MODELS,
    "vae": MODELS,
    "controlnet": {"sana-posters-edges (bundled)": HERE / "demo" / "sana-posters-edges"},
    "clip_vision": {"sana-posters-scorer (bundled)": HERE / "demo" / "sana-posters-scorer"},
    "loras": {"sana-posters-cyanotype (bundled)": HERE / "demo" / "sana-posters-cyanotype.safetensors"},
}
# {ComfyUI folder: the file that identifies one of its subfolders as a model}
MARKS = {"diffusers": "model_index.json", "clip_vision": "config.json"}
# At most this many folders are searched for models in each of ComfyUI's folders.
MOST_FOLDERS = 10_000
# Of a sharded model, only the first file is listed.
LATER_SHARD = re.compile(r"-(?!00001)\d{5}-of-\d{5}\.")


@contextmanager
def without_places() -> Iterator[None]:
    """Shorten paths in errors of data sets and runs, because HTTP shows them. The log has the full paths.

    An InUseError gets another text, which refers to the input `name`.
    """
    try:
        yield
    except SanaError as error:
        text = str(error)
        if isinstance(error, InUseError):
            text = "name: another run is using that folder; wait for its end, or choose another name"
        for root in (
            folder_paths.get_output_directory(),
            folder_paths.get_input_directory(),
            folder_paths.base_path,
            HERE,
        ):
            text = text.replace(one_line(str(Path(root).absolute() / "x"))[:-1], "")
        if text != str(error):
            logger.error("%s", error)
        raise type(error)(text) from None


def listed_name(name: object, names: Iterable[str]) -> str | None:
    """Return the entry of `names` that matches `name`, or None.

    A workflow that was saved on Windows has backslashes where the list on Linux has slashes, and vice versa. On Linux a
    name may contain a backslash, so an exact match comes first.
    """
    if not isinstance(name, str):
        return None
    choices = list(names)
    if name in choices:
        return name
    return next((choice for choice in choices if choice.replace("\\", "/") == name.replace("\\", "/")), None)


def list_files(kind: str) -> list[str]:
    """Return the names of the weights files in ComfyUI's folders of that kind, and last the bundled ones."""
    files = [
        name
        for name in folder_paths.get_filename_list(kind)
        if name.lower().endswith(SUFFIXES) and not LATER_SHARD.search(name)
    ]
    return [*files, *BUNDLED.get(kind, ())]


def find_file(kind: str, name: str, field: str) -> Path:
    """Return the path of an entry of `list_files`.

    The error begins with `field`, the input of the node.
    """
    if isinstance(name, str) and name in BUNDLED.get(kind, ()):
        return BUNDLED[kind][name]
    names = file_names(name) if isinstance(name, str) else []
    # A workflow that was saved on Windows separates folders by backslashes.
    names += [candidate.replace("\\", "/") for candidate in names if "\\" in candidate]
    if not names or not names[0].lower().endswith(SUFFIXES):
        raise InputError(f"{field}: got {name!r:.40}, expected a file of {', '.join(SUFFIXES)} in models/{kind}")
    # ComfyUI_ExtraModels stored transformers in checkpoints.
    folders = [kind, "checkpoints"] if kind == "diffusion_models" else [kind]
    paths = [folder_paths.get_full_path(folder, candidate) for folder in folders for candidate in names]
    path = next(filter(None, paths), None)
    if path is None:
        # Prefer the name of a released file for the error, because it has a link.
        missing = next((candidate for candidate in names if candidate in DOWNLOADS), names[0])
        raise MissingFileError(
            f"{field}: no file {missing!r} in models/{kind}; {where_to_get(missing)}, or choose another"
        )
    return Path(path)


def file_paths(kind: str) -> list[Path]:
    """Return the paths that `find_file` can return."""
    folders = [kind, "checkpoints"] if kind == "diffusion_models" else [kind]
    paths = [folder_paths.get_full_path(folder, name) for folder in folders for name in list_files(folder)]
    return [*(Path(path) for path in paths if path is not None), *BUNDLED.get(kind, {}).values()]


def find_folders(kind: str) -> dict[str, Path]:
    """Return {name: path} of the model folders in ComfyUI's folders of that kind, at any depth.

    Links are followed, as in ComfyUI's DiffusersLoader, because a cache of the Hugging Face Hub consists of links. A
    folder that several links lead to is searched once, by its shortest name. Model folders are not searched, and have
    the names of all links to them.
    """
    models: dict[str, Path] = {}
    for root in map(Path, folder_paths.get_folder_paths(kind)):
        pending = deque([root])
        # {folder behind all links: whether it is a model}
        searched: dict[Path, bool] = {}
        while pending and len(searched) < MOST_FOLDERS:
            folder = pending.popleft()
            # A folder may have been deleted, or not be readable. List the others.
            with suppress(OSError):
                if not folder.is_dir():
                    continue
                target = folder.resolve()
                if target not in searched:
                    searched[target] = folder != root and (
                        (folder / MARKS[kind]).is_file() or (kind == "diffusers" and bool(original_files(folder)))
                    )
                    if not searched[target]:
                        pending += sorted(entry for entry in folder.iterdir() if not entry.name.startswith("."))
                if searched[target]:
                    models.setdefault(folder.relative_to(root).as_posix(), folder)
        if pending:
            logger.warning("models/%s: only the first %d folders are listed; remove the others", kind, MOST_FOLDERS)
    return dict(sorted(models.items()))


def list_models() -> list[str]:
    """Return the choices of SANA Loader: diffusers folders, files in models/checkpoints, and last the bundled ones."""
    return [*find_folders("diffusers"), *list_files("checkpoints"), *MODELS]


def model_path(name: str) -> Path:
    folders = find_folders("diffusers") | MODELS
    listed = listed_name(name, [*folders, *list_files("checkpoints")])
    if listed is None:
        if isinstance(name, str) and name in DOWNLOADS:
            raise MissingFileError(
                f"model: no folder {name!r} in models/diffusers; {where_to_get(name)}, or choose another"
            )
        raise InputError(
            f"model: got {name!r:.40}, expected one of {', '.join(list_models())}; "
            "put diffusers folders into models/diffusers and all-in-one files into models/checkpoints"
        )
    return folders.get(listed) or find_file("checkpoints", listed, "model")


def model_paths() -> list[Path]:
    """Return the paths that `model_path` can return."""
    return [*find_folders("diffusers").values(), *file_paths("checkpoints"), *MODELS.values()]


def scorer_folders() -> dict[str, Path]:
    """Return {choice of SANA Load Scorer: folder}: model folders in models/clip_vision, and last the bundled one."""
    return find_folders("clip_vision") | BUNDLED["clip_vision"]


def scorer_path(name: str) -> Path:
    folders = scorer_folders()
    listed = listed_name(name, folders)
    if listed is None:
        raise InputError(
            f"scorer_name: got {name!r:.40}, expected one of {', '.join(folders)}; put the whole folder of a "
            "CLIP into models/clip_vision"
        )
    return folders[listed]


def list_datasets() -> list[str]:
    """Return the choices of SANA Dataset: the subfolders of ComfyUI's input folder, and last the bundled images."""
    return [*folder_paths.get_input_subfolders(), *DATASETS]


def dataset_paths() -> list[Path]:
    """Return the paths that `dataset_path` can return."""
    folder = Path(folder_paths.get_input_directory())
    return [*(folder / name for name in folder_paths.get_input_subfolders()), *DATASETS.values()]


def dataset_path(name: str) -> Path:
    if isinstance(name, str) and name in DATASETS:
        return DATASETS[name]
    if name not in folder_paths.get_input_subfolders():
        raise InputError(
            f"folder: got {name!r:.40}, expected a folder in ComfyUI's input folder; put your images into one there"
        )
    return Path(folder_paths.get_input_directory()) / name


def run_path(name: str) -> Path:
    if not isinstance(name, str) or not RUN_NAME.fullmatch(name):
        raise InputError(
            f"name: got {name!r:.60}, expected a folder's name of at most 50 characters; use letters, digits, - and _"
        )
    return Path(folder_paths.get_output_directory()) / RUNS / name


def add_result_folders() -> None:
    """Let ComfyUI list the results of training on the canvas, also after their folders were deleted."""
    survive_deleted_folders()
    for kind in RESULTS:
        folder_paths.add_model_folder_path(kind, str(Path(folder_paths.get_output_directory()) / kind))


def list_devices() -> list[str]:
    """Return the choices of SANA Batch Sampler: all, default, GPUs or else the CPU as two workers, and the cluster."""
    devices = comfy.model_management.get_all_torch_devices()
    single = [TWO_WORKERS] if devices[0].type == "cpu" else [f"gpu:{i}" for i in range(len(devices))]
    try:
        cluster = [CLUSTER] if configured_cluster() is not None else []
    except InputError:
        # The reason is in the log. A broken file must not prevent ComfyUI from loading the nodes.
        cluster = []
    return ["all", "default", *single, *cluster]


def one_gpu_note() -> str:
    """Return a line for a node that is set to all GPUs, if ComfyUI sees a single GPU. Otherwise the text is empty."""
    devices = comfy.model_management.get_all_torch_devices()
    if len(devices) > 1 or devices[0].type == "cpu":
        return ""
    version = tuple(map(int, comfyui_version.__version__.split(".")[:2]))
    hides_gpus = sys.platform == "win32" and comfy.model_management.is_nvidia() and version >= HIDES_GPUS
    if hides_gpus and comfy.cli_args.args.cuda_device is None:
        return (
            "1 GPU is visible; if this computer has more, start ComfyUI with --cuda-device all --disable-pinned-memory"
        )
    return "1 GPU is visible"


def configured_cluster() -> ClusterSettings | None:
    """Return the Ray cluster in cluster.json of the system user "sana", or None if the file does not exist.

    The file contains an address like ray://HOST:10001, and optionally the fields gpus, gpus_per_worker and resources of
    ClusterSettings. Only addresses of Ray Client are accepted, because with other connections Ray ends ComfyUI's
    process together with the cluster.

    The folder is private: HTTP does not reach it. If the file is broken, only the log contains its path and the reason.
    """
    file = Path(folder_paths.get_system_user_directory("sana")) / "cluster.json"
    try:
        return cluster_in(parse_json(read_bytes(file, LARGEST_CLUSTER_FILE), "cluster.json"))
    except MissingFileError:
        return None
    except SanaError as error:
        # Without the remedy, which is for downloaded files.
        reason = str(error).rpartition("; ")[0] or str(error)
    logger.error('SANA Batch Sampler: %s: %s; expected {"address": "ray://HOST:10001"}', file, reason)
    raise InputError("devices: the server's cluster.json is broken; its operator finds the reason in the log")


def cluster_in(document: object) -> ClusterSettings:
    match document:
        case {"address": str(address), **options} if CLUSTER_ADDRESS.fullmatch(address):
            match {"gpus": None, "gpus_per_worker": 1, "resources": {}, **options}:
                case {
                    "gpus": int() | None as gpus,
                    "gpus_per_worker": int() | float() as share,
                    "resources": dict(resources),
                }:
                    amounts = all(type(amount) in (int, float) for amount in resources.values())
                    if amounts and options.keys() <= {"gpus", "gpus_per_worker", "resources"}:
                        cluster = ClusterSettings(address, gpus, share, tuple(resources.items()))
                        cluster.check()
                        return cluster
    raise InputError(f"address: got {brief(document)}, expected the format in docs/cluster.md")


def list_splits() -> list[str]:
    """Return the choices of SANA Split Image: all, a number of GPUs, or else the CPU as two workers."""
    devices = comfy.model_management.get_all_torch_devices()
    counts = [TWO_WORKERS] if devices[0].type == "cpu" else [f"gpu x {count}" for count in range(2, len(devices))]
    return ["all", *counts]
