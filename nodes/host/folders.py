"""The folders of models, data sets and runs, the paths of their names, and the devices of this server."""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import comfy.cli_args
import comfy.model_management
import comfyui_version
import folder_paths

from ...sana_core.checkpoints.downloads import DOWNLOADS, file_names, where_to_get
from ...sana_core.checkpoints.files import parse_json, read_bytes
from ...sana_core.checkpoints.headers import SUFFIXES
from ...sana_core.cluster.connection import ClusterSettings
from ...sana_core.errors import InputError, InUseError, MissingFileError, SanaError
from ...sana_core.model.known_models import DEMO_MODEL, DEMO_MODEL_LISTED
from ...sana_core.runtime.text import brief

logger = logging.getLogger(__name__)

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
# one name of a folder: no separators, nothing that means another folder, and short enough for a file's name in UTF-8
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
# The file by which a folder in ComfyUI's folder of that kind is recognised as a whole model.
MARKS = {"diffusers": "model_index.json", "clip_vision": "config.json"}
# of a sharded model, the first file stands for all
LATER_SHARD = re.compile(r"-(?!00001)\d{5}-of-\d{5}\.")


@contextmanager
def without_places() -> Iterator[None]:
    """Shorten paths in errors of data sets and runs, because HTTP shows them. The log has the full paths.

    An InUseError gets another text, because its own names a process.
    """
    try:
        yield
    except SanaError as error:
        text = str(error)
        if isinstance(error, InUseError):
            text = "name: another run is at work in that folder; wait for its end, or choose another name"
        for root in (
            folder_paths.get_output_directory(),
            folder_paths.get_input_directory(),
            folder_paths.base_path,
            HERE,
        ):
            text = text.replace(str(Path(root).absolute() / "x")[:-1], "")
        if text == str(error):
            raise
        logger.error("%s", error)
        raise type(error)(text) from None


def listed_name(name: object, names: Iterable[str]) -> str | None:
    """Return the entry of `names` that matches `name`, or None.

    A workflow saved on Windows has a backslash where the list on Linux has a slash, and the other way round. On Linux a
    name may contain a backslash, so an exact match comes first.
    """
    if not isinstance(name, str):
        return None
    choices = list(names)
    if name in choices:
        return name
    return next((one for one in choices if one.replace("\\", "/") == name.replace("\\", "/")), None)


def list_files(kind: str) -> list[str]:
    """Return the names of the weights files in ComfyUI's folders of that kind, and last what comes with the pack."""
    files = [
        name
        for name in folder_paths.get_filename_list(kind)
        if name.lower().endswith(SUFFIXES) and not LATER_SHARD.search(name)
    ]
    return [*files, *BUNDLED.get(kind, ())]


def find_file(kind: str, name: str, field: str) -> Path:
    """Return the file that `name` of `list_files` means.

    Raises InputError or MissingFileError for any other name. The error begins with `field`, the input of the node.
    """
    if isinstance(name, str) and name in BUNDLED.get(kind, ()):
        return BUNDLED[kind][name]
    names = file_names(name) if isinstance(name, str) else []
    # A workflow saved on Windows separates folders by backslashes.
    names += [candidate.replace("\\", "/") for candidate in names if "\\" in candidate]
    if not names or not names[0].lower().endswith(SUFFIXES):
        raise InputError(f"{field}: got {name!r:.40}, expected a file of {', '.join(SUFFIXES)} in models/{kind}")
    # ComfyUI_ExtraModels kept transformers in checkpoints
    folders = [kind, "checkpoints"] if kind == "diffusion_models" else [kind]
    paths = [folder_paths.get_full_path(folder, each) for folder in folders for each in names]
    path = next(filter(None, paths), None)
    if path is None:
        # The error names a released file if there is one, because it has a link.
        missing = next((candidate for candidate in names if candidate in DOWNLOADS), names[0])
        raise MissingFileError(
            f"{field}: no file {missing!r} in models/{kind}; {where_to_get(missing)}, or choose another"
        )
    return Path(path)


def file_paths(kind: str) -> list[Path]:
    """Return the files that `find_file` can find, and the bundled ones."""
    folders = [kind, "checkpoints"] if kind == "diffusion_models" else [kind]
    paths = [folder_paths.get_full_path(folder, name) for folder in folders for name in list_files(folder)]
    return [*(Path(path) for path in paths if path is not None), *BUNDLED.get(kind, {}).values()]


def find_folders(kind: str) -> dict[str, Path]:
    """Return {name: path} of the whole models in ComfyUI's folders of that kind, at any depth.

    Links are followed, as in ComfyUI's own DiffusersLoader, because a cache of the Hugging Face Hub consists of links.
    The search stops at a model and at a link to a folder above.
    """
    found: dict[str, Path] = {}
    for root in map(Path, folder_paths.get_folder_paths(kind)):
        pending = [root]
        while pending:
            folder = pending.pop()
            above = {(root / parent).resolve() for parent in folder.relative_to(root).parents}
            try:
                if folder != root and (folder / MARKS[kind]).is_file():
                    found.setdefault(folder.relative_to(root).as_posix(), folder)
                elif folder.is_dir() and folder.resolve() not in above:
                    pending += [path for path in folder.iterdir() if not path.name.startswith(".")]
            except OSError:
                # The folder has gone, or it may not be read. The others are listed.
                continue
    return dict(sorted(found.items()))


def list_models() -> list[str]:
    """Return what SANA Loader offers: diffusers folders, files in models/checkpoints, the bundled ones last."""
    return [*find_folders("diffusers"), *list_files("checkpoints"), *MODELS]


def model_path(name: str) -> Path:
    """Return the folder or file that `name` of `list_models` means.

    Raises MissingFileError for a released folder that is not there, InputError for any other name.
    """
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
    """Return the folders and files that `model_path` can find."""
    return [*find_folders("diffusers").values(), *file_paths("checkpoints"), *MODELS.values()]


def list_scorers() -> list[str]:
    """Return what SANA Load Scorer offers: folders with a config.json in models/clip_vision, the bundled one last."""
    return [*find_folders("clip_vision"), *BUNDLED["clip_vision"]]


def scorer_paths() -> list[Path]:
    """Return the folders that `scorer_path` can find."""
    return [*find_folders("clip_vision").values(), *BUNDLED["clip_vision"].values()]


def scorer_path(name: str) -> Path:
    """Return the folder that `name` of `list_scorers` means. Raises InputError for any other name."""
    folders = find_folders("clip_vision") | BUNDLED["clip_vision"]
    listed = listed_name(name, folders)
    if listed is None:
        raise InputError(
            f"scorer_name: got {name!r:.40}, expected one of {', '.join(list_scorers())}; put the whole folder of a "
            "CLIP into models/clip_vision"
        )
    return folders[listed]


def list_datasets() -> list[str]:
    """Return what SANA Dataset offers: the folders that ComfyUI's own nodes for it list, the bundled images last."""
    return [*folder_paths.get_input_subfolders(), *DATASETS]


def dataset_paths() -> list[Path]:
    """Return the folders that `dataset_path` can find."""
    folder = Path(folder_paths.get_input_directory())
    return [*(folder / name for name in folder_paths.get_input_subfolders()), *DATASETS.values()]


def dataset_path(name: str) -> Path:
    """Return the folder that `name` of `list_datasets` means. Raises InputError for any other name."""
    if isinstance(name, str) and name in DATASETS:
        return DATASETS[name]
    if name not in folder_paths.get_input_subfolders():
        raise InputError(
            f"folder: got {name!r:.40}, expected one in ComfyUI's input folder; put your images into one there"
        )
    return Path(folder_paths.get_input_directory()) / name


def run_path(name: str) -> Path:
    """Return the folder of the training run `name`. Raises InputError for what is no plain name of a folder."""
    if not isinstance(name, str) or not RUN_NAME.fullmatch(name):
        raise InputError(
            f"name: got {name!r:.60}, expected a folder's name of at most 50 characters; use letters, digits, - and _"
        )
    return Path(folder_paths.get_output_directory()) / RUNS / name


def add_result_folders() -> None:
    """Let ComfyUI list results of training on the canvas. It lists output/loras itself, but no output/controlnet."""
    for kind in RESULTS:
        folder_paths.add_model_folder_path(kind, str(Path(folder_paths.get_output_directory()) / kind))


def list_devices() -> list[str]:
    """Return what SANA Batch Sampler offers: all and default, each accelerator, or the CPU's cores as two workers.

    The cluster is there if the operator has configured it. A broken file of it is left out with a log: the nodes must
    be there all the same.
    """
    devices = comfy.model_management.get_all_torch_devices()
    own = [TWO_WORKERS] if devices[0].type == "cpu" else [f"gpu:{i}" for i in range(len(devices))]
    return ["all", "default", *own, *list_cluster()]


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


def list_cluster() -> list[str]:
    """Return the cluster as a choice of devices, if the operator has configured it."""
    try:
        return [CLUSTER] if configured_cluster() is not None else []
    except InputError:  # it is in the log
        return []


def configured_cluster() -> ClusterSettings | None:
    """Return the Ray cluster in cluster.json of the system user "sana", None where no such file is.

    It has an address like ray://HOST:10001 and, if wanted, the fields of ClusterSettings gpus, gpus_per_worker and
    resources. Only Ray Client's addresses: Ray ends a process that is connected in another way together with the
    cluster.

    HTTP does not reach that folder, and what is in it is the operator's alone: of a file that is broken only the log
    says where it is and why, and InputError that it is.
    """
    file = Path(folder_paths.get_system_user_directory("sana")) / "cluster.json"
    try:
        found = parse_json(read_bytes(file, LARGEST_CLUSTER_FILE), "cluster.json")
        return cluster_in(found)
    except MissingFileError:
        return None
    except SanaError as error:
        # without the remedy for files that were downloaded
        reason = str(error).rpartition("; ")[0] or str(error)
    logger.error('SANA Batch Sampler: %s: %s; expected {"address": "ray://HOST:10001"}', file, reason)
    raise InputError("devices: the server's cluster.json is broken; its operator finds why in the log")


def cluster_in(document: object) -> ClusterSettings:
    """Return what `document` says of a cluster. Raises InputError for anything else."""
    match document:
        case {"address": str(address), **rest} if CLUSTER_ADDRESS.fullmatch(address):
            match {"gpus": None, "gpus_per_worker": 1, "resources": {}, **rest}:
                case {"gpus": int() | None as gpus, "gpus_per_worker": int() | float() as each, "resources": dict(own)}:
                    amounts = all(type(amount) in (int, float) for amount in own.values())
                    if amounts and rest.keys() <= {"gpus", "gpus_per_worker", "resources"}:
                        cluster = ClusterSettings(address, gpus, each, tuple(own.items()))
                        cluster.check()
                        return cluster
    raise InputError(f"address: got {brief(document)}, expected what docs/cluster.md shows")


def list_splits() -> list[str]:
    """Return the choices of SANA Split Image: all, a number of the accelerators, or the CPU's cores in two halves."""
    devices = comfy.model_management.get_all_torch_devices()
    own = [TWO_WORKERS] if devices[0].type == "cpu" else [f"gpu x {count}" for count in range(2, len(devices))]
    return ["all", *own]
