"""Training inside ComfyUI. sana_core trains from the file of MODEL. ComfyUI shows progress, cancels, lists results."""

from __future__ import annotations

import shutil
from collections.abc import Collection, Mapping
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import comfy.model_management
import folder_paths
import torch

from ....sana_core.batch.prompts import split_prompts
from ....sana_core.checkpoints import inspect_checkpoint
from ....sana_core.checkpoints.headers import read_file
from ....sana_core.errors import InputError, OutputError
from ....sana_core.runtime.atomic_files import digest_file, output_file, reason_of
from ....sana_core.runtime.text import get_logger
from ....sana_core.training.plan import Base, Plan, decide_checkpointing, fit_lines, plan_training, read_base
from ....sana_core.training.settings import Method, Optimizer, Phase, TrainingSettings, Validation, check_settings
from ....sana_core.training.states import find_states, read_losses, read_run
from ....sana_core.training.trainer import check_base, train
from ..compat import loaded_from, path_of, untrained
from ..loading.clip import SanaTokenizer
from ..loading.controlnet import load_controlnet
from ..loading.load_model import apply_lora
from ..loading.vae import vae_path
from ..sampling.guidance import require_images
from .fields import FIELDS, LORA_ALONE, RunSettings, default_values, proposal_with_widgets, tables_of
from .view import Dataset, View, read_sheet

if TYPE_CHECKING:
    import comfy.sd
    from comfy.controlnet import ControlBase
    from comfy.model_patcher import ModelPatcher


def list_result(files: Mapping[str, Path], settings: TrainingSettings, kind: str) -> str:
    """Copy the result of a training to output/`kind`. Returns a sentence with its name in the loaders' lists.

    `files` are {end of the name there: file}, the weights first. A copy replaces only an earlier result of the same
    training. If the name is taken in any of ComfyUI's folders of that kind, the copy gets a number.
    """
    folder = Path(folder_paths.get_output_directory()) / kind
    published = read_run(Path(settings.out))[1]
    weights = next(iter(files))
    names = (settings.name if number == 1 else f"{settings.name}-{number}" for number in count(1))
    name = next(name for name in names if is_free(kind, folder, name, files, published))
    # The weights come last: with them, the loaders list all of it.
    for end, file in reversed(files.items()):
        copy = folder / f"{name}{end}"
        if not copy.exists() or digest_file(copy) != digest_file(file):
            try:
                copy.parent.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise OutputError(
                    f"name: {copy.parent} cannot be made ({reason_of(error)}); see its rights and its disk, then Run "
                    f"again, which trains nothing; the result is {file}"
                ) from None
            with output_file(copy, replace=True, field="name") as part:
                shutil.copyfile(file, part)
    note = "" if name == settings.name else f"; {settings.name}{weights} is another file, which stays"
    return f"press R, then choose {name}{weights}{note}"


def is_free(kind: str, folder: Path, name: str, ends: Collection[str], published: Collection[str]) -> bool:
    """Whether the result may be called `name`: no other file has that name, and no other folder's file hides it."""
    copies = [folder / f"{name}{end}" for end in ends]
    listed = folder_paths.get_full_path(kind, f"{name}{next(iter(ends))}")
    if listed is not None and not (copies[0].exists() and copies[0].samefile(listed)):
        return False
    existing = [copy for copy in copies if copy.exists()]
    return all(copy.is_file() and digest_file(copy) in published for copy in existing)


logger = get_logger(__name__)

# A run's memory is multiplied by this, because allocators lose memory to fragmentation.
FRAGMENTS = 1.1


class Trained(NamedTuple):
    # The tensors of the LoRA's file.
    lora: dict[str, torch.Tensor]
    # The loss of each step.
    losses: list[float]
    # MODEL with the LoRA.
    model: ModelPatcher
    # A text for the user.
    report: str
    # The sheet of the validation images as IMAGE. None: there were no validations.
    sheet: torch.Tensor | None


def check_model(model: ModelPatcher) -> None:
    """Raise InputError unless MODEL is an unpatched SANA model, because training loads its file without patches."""
    require_images(model.model)
    if names := ", ".join(sorted(untrained(model))):
        raise InputError(
            f"model: got a patch that training does not see ({names}), expected the model alone; connect SANA Loader"
        )
    _, weight_dtype, resolution, _, _ = loaded_from(model)
    if weight_dtype != "default" or model.model.model_config.quant_config:
        raise InputError(
            "model: training needs weights as they are in a plain file; choose weight_dtype default and quantise off"
        )
    if resolution is not None:
        raise InputError(f"model: got resolution {resolution} of its loader, which training does not see; choose auto")


def check_parts(model: ModelPatcher, clip: comfy.sd.CLIP | None, vae: comfy.sd.VAE | None) -> None:
    """Raise InputError if the text encoder or the autoencoder is neither in the file of MODEL nor an input."""
    checkpoint = inspect_checkpoint(path_of(model))
    kinds = {part.kind for part in checkpoint.parts or (checkpoint,)}
    for field, value, kind in (("clip", clip, "text_encoder"), ("vae", vae, "autoencoder")):
        if value is None and kind not in kinds:
            raise InputError(f"{field}: got none, expected one for a MODEL of a single file; connect its loader's")


def clip_path(clip: comfy.sd.CLIP | None) -> str:
    """Return the checkpoint of CLIP, or "" for None."""
    if clip is None:
        return ""
    if not isinstance(clip.tokenizer, SanaTokenizer) or clip.patcher.patches:
        raise InputError("clip: got one that training cannot load, or with a LoRA; connect that of a SANA loader")
    return path_of(clip.patcher)


def make_method(chosen: RunSettings, tables: Mapping[str, Mapping[str, Any]]) -> Method:
    if "blocks" not in tables["method"]:
        return Method(**tables["method"], start=chosen.existing_lora)
    defaults = default_values()
    values = {**chosen.values, "existing_lora": chosen.existing_lora, "regularisation": chosen.regularisation}
    for name in LORA_ALONE:
        if values[name] not in (defaults.get(name), None, ""):
            got = "some" if name in ("existing_lora", "regularisation") else repr(values[name])
            raise InputError(
                f"{name}: got {got:.40} for a ControlNet, which has no use for it; reset it in SANA Train Settings"
            )
    return Method("controlnet", blocks=tables["method"]["blocks"])


def make_phase(dataset: Dataset, prior: Dataset | None, values: Mapping[str, Any]) -> Phase:
    """Return the only phase of the run. `prior` are the regularisation images, which have the same resolution."""
    values = {**values, "caption": dataset.caption}
    if prior is None:
        return Phase((dataset.folder,), dataset.resolution, **values)
    if prior.resolution != dataset.resolution:
        raise InputError(
            f"regularisation: got resolution {prior.resolution}, expected dataset's {dataset.resolution}; set it so"
        )
    values |= {"regularisation": (prior.folder,), "regularisation_caption": prior.caption}
    return Phase((dataset.folder,), dataset.resolution, **values)


def make_settings(
    model: ModelPatcher,
    dataset: Dataset,
    out: Path,
    chosen: RunSettings,
    values: Mapping[str, Any],
    clip: comfy.sd.CLIP | None,
    vae: comfy.sd.VAE | None,
) -> TrainingSettings:
    """Return the settings of the run in `out`. `values` are the training node's values by widget."""
    check_model(model)
    check_parts(model, clip, vae)
    _, _, _, reference, _ = loaded_from(model)
    tables = tables_of({**chosen.values, **values})
    prompts = tuple(split_prompts(values.get("validation_prompts", "")))
    validation = tables["validation"]
    if not validation["every"]:
        # 0 switches the validations off. The prompts stay in their widget.
        prompts = ()
    # The settings refuse an interval without anything to validate. The widget has a default, which counts as not set.
    if not prompts and not validation["share"] and validation["every"] == FIELDS["validate_every"].default:
        validation["every"] = 0
    return check_settings(
        TrainingSettings(
            model=path_of(model),
            out=str(out),
            name=out.name,
            text_encoder=clip_path(clip),
            autoencoder="" if vae is None else vae_path(vae, "training"),
            # No model trains in fp16.
            dtype="float32" if model.model.get_dtype_inference() == torch.float32 else "bfloat16",
            reference=reference,
            device=str(model.load_device),
            phase=(make_phase(dataset, chosen.regularisation, tables["phase"]),),
            method=make_method(chosen, tables),
            optimizer=Optimizer(**tables["optimizer"]),
            validation=Validation(**validation, prompts=prompts),
            **tables[""],
        )
    )


def describe_fit(settings: TrainingSettings, base: Base, plan: Plan, memory: int) -> str:
    """Return the memory that a run needs on a GPU of `memory` bytes. If it does not fit, propose other settings."""
    if plan.gpu_bytes <= memory:
        return f"needs {plan.gpu_bytes / 1e9:.1f} of {memory / 1e9:.1f} GB"
    return proposal_with_widgets("; ".join(fit_lines(settings, base, plan, memory)))


def train_lora(model: ModelPatcher, settings: TrainingSettings, node_id: str) -> Trained:
    """Train a LoRA from the newest state in the run's folder. Raises as `run_training` does."""
    file, losses, said = run_training(model, settings, node_id)
    # Copied to memory, because the run replaces the file when it resumes. Windows replaces no file that is mapped.
    lora = read_file(file)
    trained, *_ = apply_lora(model, None, file, tensors=lora)
    listed = list_result({".safetensors": file}, settings, "loras")
    return Trained(lora, losses, trained, f"{listed}; {said}", read_sheet(Path(settings.out)))


def train_controlnet(
    model: ModelPatcher, settings: TrainingSettings, node_id: str
) -> tuple[ControlBase, list[float], str]:
    """Train a ControlNet. Returns it, the loss of each step, and a report. Raises as `run_training` does."""
    folder, losses, said = run_training(model, settings, node_id)
    control, _ = load_controlnet(folder)
    # The weights come before their config.json.
    files = {
        f"/{file.name}": file for file in sorted(folder.iterdir(), key=lambda file: (file.suffix == ".json", file))
    }
    return control, losses, f"{list_result(files, settings, 'controlnet')}; {said}"


def run_training(model: ModelPatcher, settings: TrainingSettings, node_id: str) -> tuple[Path, list[float], str]:
    """Train with `settings`. If their folder has a run, resume it from its newest state.

    Returns the file or folder of the result, the loss of each step, and a text about the run. Cancel saves a state.
    """
    check_base(settings)
    management, device = comfy.model_management, model.load_device
    poll = management.throw_exception_if_processing_interrupted
    view = View(node_id, read_losses(Path(settings.out)), sum(phase.steps or 0 for phase in settings.phase))
    try:
        base = read_base(settings, poll, lambda text: view.status(text, True))
        if device.type != "cpu":
            settings = decide_checkpointing(settings, base, management.get_total_memory(device))
        plan = plan_training(settings, base, accelerator=device.type != "cpu")
        # Other models stay loaded if the run has enough room without their memory, and without the memory that ComfyUI
        # always leaves free.
        needed = int(plan.largest.bytes * FRAGMENTS) + management.minimum_inference_memory()
        management.free_memory(needed, device)
        management.soft_empty_cache()
        if device.type != "cpu":
            memory = management.get_total_memory(device)
            fit = describe_fit(settings, base, plan, memory)
            # The run starts even if it does not fit, because drivers may lend memory, and the plan can be wrong.
            (logger.info if plan.gpu_bytes <= memory else logger.warning)(fit)
            view.fit = f"; {fit}"
        # ComfyUI runs nodes in inference mode, and its tensors have no gradients. The run creates all of its tensors.
        with torch.inference_mode(False), torch.enable_grad():
            file = train(settings, view.report, view.progress, poll, view.show)
    except management.InterruptProcessingException:
        view.stop(max((step for step, _ in find_states(Path(settings.out))), default=0))
        raise
    losses = read_losses(Path(settings.out))
    management.soft_empty_cache()
    said = f"{len(losses)} steps{', ' + view.validation if view.validation else ''}"
    return file, losses, said
