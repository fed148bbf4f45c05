"""From settings to a trained model: data sets, cache, run, and what is generated on the way."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from ..checkpoints import load_transformer
from ..checkpoints.fingerprint import digest_json
from ..errors import ExistingFileError
from ..runtime.accelerator import chosen_device
from ..runtime.atomic_files import make_folder, reason_of
from ..runtime.cancellation import Poll, no_poll
from ..runtime.folder_lock import OWN, Hold, check_run, hold
from ..runtime.text import Json
from .adapters import adapter_tensors, add_adapter, merged, start_digest, write_adapter
from .dataset import PICTURES, SHEET
from .loop import Callbacks, Report, Run, RunDir, run
from .parallel import DDP
from .preflight import check_base, check_launch, check_ranks, check_same
from .prepare import OnProgress, digest_models, no_progress, prepare, read_samples
from .previews import check_own as check_sheet
from .previews import generate_validation, write_sheet
from .ranks import ALONE, Ranks, log_line
from .runs import adopt_states, check_folder, check_places, note_result, publish, step_folder, writing
from .schedule import Best
from .settings import FLOW, TrainingSettings
from .sharding import describe_layout
from .train_state import TrainState, make_train_state

if TYPE_CHECKING:
    from diffusers import SanaTransformer2DModel

logger = logging.getLogger(__name__)

# called with the step and the images [3, H, W] in [-1, 1] of the validation's prompts
Show = Callable[[int, Sequence[torch.Tensor]], None]


def no_show(step: int, images: Sequence[torch.Tensor]) -> None:
    """No-op default."""


def train(
    settings: TrainingSettings,
    report: Report = lambda line: None,
    progress: OnProgress = no_progress,
    poll: Poll = no_poll,
    show: Show = no_show,
    ranks: Ranks = ALONE,
) -> Path:
    """Train as `settings` say, from where the run in `settings.out` stands; return the file or folder of the result:
    the best of the last phase's validations, without any where it ended.

    `report` gets the line of the log of each step and validation, and at the end again that of the best, with the
    "first" validation loss of its phase; `progress` what is being prepared and how much of it
    is done, `show` each validation's images; `poll` is called at least once a step. Each of them cancels by raising,
    after which the same call resumes. `ranks` are the processes that train together, all of which call this. Raises
    InputError for data or settings that cannot be used, or that a rank has otherwise than the others, InUseError for a
    folder in which another run writes, TrainingError for a loss that is not finite, and CheckpointError or
    MissingFileError for a model that cannot be loaded.
    """
    shift = check_base(settings)
    check_launch(settings, ranks)
    check_ranks(ranks, settings)
    out = Path(settings.out)
    with held_folder(out, ranks) as (parts, check_held):

        def watched() -> None:
            check_held()
            if ranks.first:
                # now, while what is learned can still be saved
                check_places(out)
            poll()

        check_run_folder(settings, ranks)
        samples = ranks.run_on_all(lambda: read_samples(settings, watched))
        digests = digest_models(settings, progress if ranks.first else no_progress)
        data, inputs = prepare(settings, samples, device_of(settings, ranks), ranks, digests, progress, watched)
        check_same(ranks, {"model": digest_json(digests), "pictures": [own.digest for own in data]}, "data")
        state = load_state(settings, shift, ranks)

        def preview(state: TrainState, step: int) -> None:
            with as_saved(state) as saved:
                show(step, generate_validation(saved, inputs, out / PICTURES, parts, step, watched))
            try:
                write_sheet(out, parts)
            except ExistingFileError:
                raise
            except OSError as error:
                # The next validation writes it again.
                cause = error.__cause__ if isinstance(error.__cause__, OSError) else error
                logger.warning("%s is not written now (%s)", SHEET, reason_of(cause))

        folder = RunDir(out, parts, settings_config(settings) | {"model": digest_json(digests)})
        ended = run(state, data, folder, Callbacks(report, watched, export, preview))
        return finish(ended, report)


def finish(ended: Run, report: Report) -> Path:
    """Report the best validation of a run's last phase, and return its result on all ranks."""
    ranks, best = ended.ranks, ended.best_of_phase
    if best is not None and ranks.first:
        report({"step": best.step, "validation_loss": best.loss, "first": best.first})
    parts, last = ended.folder.parts, ended.progress.step
    path = ranks.broadcast(ranks.run_on_rank0(lambda: put_result(ended.settings, parts, last, best)))
    assert path is not None
    return path


def check_run_folder(settings: TrainingSettings, ranks: Ranks) -> None:
    """Raise as `check_folder` does for what others have put into the run's folder, or another run has."""
    names = () if settings.method.whole else (lora_file(settings), last_file(settings))
    config = settings_config(settings)
    ranks.run_on_rank0(lambda: check_folder(Path(settings.out), names, len(settings.phase), config))
    if settings.validation.prompts:
        ranks.run_on_rank0(lambda: check_sheet(Path(settings.out) / SHEET))


def device_of(settings: TrainingSettings, ranks: Ranks) -> torch.device:
    return ranks.device or chosen_device(settings.device)


def load_state(settings: TrainingSettings, shift: float, ranks: Ranks) -> TrainState:
    """Return what is trained, before the first step. Raises as `load_transformer` and `make_train_state` do."""
    device = device_of(settings, ranks)
    state = make_train_state(load_base(settings, device, ranks), shift, settings, device, ranks)
    if ranks.launched and ranks.first:
        log_line(describe_layout(state.layout, state.parameters, state.device))
    return state


def put_result(settings: TrainingSettings, parts: Path, last: int, best: Best | None) -> Path:
    """Put the LoRAs of a run that has ended at the step `last` into its folder, the best as its result; return that, or
    the folder of whole weights. Raises as `publish` does."""
    out = Path(settings.out)
    chosen = step_folder(out, last if best is None else best.step)
    if settings.method.whole:
        note_result(out, parts, chosen)
        return chosen / whole_part(settings)
    if best is not None:
        publish(out, parts, last_file(settings), step_folder(out, last))
    return publish(out, parts, lora_file(settings), chosen)


def settings_config(settings: TrainingSettings) -> Json:
    """Return what a run's states depend on, besides models and data, and what a new phase may change.

    Raises MissingFileError or ReadError for a file to start from that cannot be read.
    """
    method = settings.method
    config: Json = {"seed": settings.seed, "dtype": settings.dtype}
    config |= {"reference": settings.reference, "optimizer": settings.optimizer.name}
    config |= {"ema": bool(settings.optimizer.ema), "method": method.kind}
    if settings.optimizer.name == "prodigy":
        config["d0"] = settings.optimizer.d0
    if method.base != "full":
        config["base"] = method.base
    if settings.loss.kind != FLOW:
        config["loss"] = settings.loss.kind
    if method.start:
        config["start"] = start_digest(settings)
    own = {"controlnet": {"blocks": method.blocks}, "full": {}}
    # a state has the weights before alpha scales them
    alpha = None if method.scale == 1.0 else method.alpha
    adapter: Json = {"rank": method.rank, "alpha": alpha, "targets": method.targets}
    if method.layers:
        adapter["layers"] = list(method.layers)
    return config | own.get(method.kind, adapter)


def load_base(settings: TrainingSettings, device: torch.device, ranks: Ranks = ALONE) -> SanaTransformer2DModel:
    """Return the transformer that training begins with. If it is sharded, rank 0 alone holds its weights.

    Raises as `load_transformer` does.
    """
    dtype = getattr(torch, settings.method.weights if settings.method.kind == "full" else settings.dtype)
    # what is put into 8 bits, or into shares, is so on the CPU, so that the device never holds all of it
    divided = ranks.launched and settings.parallel.kind != DDP
    where: str | torch.device = device if settings.method.base == "full" and not divided else "cpu"
    if divided and not ranks.first:
        where = "meta"
    return load_transformer(settings.model, where, dtype, reference=settings.reference)


@contextmanager
def as_saved(state: TrainState) -> Iterator[TrainState]:
    """Give `state`, computing as what is loaded from what `export` writes, on the whole model where its own is in 8
    bits."""
    settings = state.settings
    dtype = getattr(torch, settings.dtype)
    if not settings.method.whole:
        tensors = adapter_tensors(state.transformer, dtype)
        if settings.method.base != "full":
            transformer = load_transformer(settings.model, state.transformer.device, dtype, None, settings.reference)
            add_adapter(transformer, settings.method, settings.seed)
            state = state._replace(transformer=transformer)
        with merged(state.transformer, tensors):
            yield state
        return
    model = state.controlnet or state.transformer
    places = [
        (module._parameters, name, parameter)
        for module in model.modules()
        for name, parameter in module._parameters.items()
        if parameter is not None and parameter.requires_grad
    ]
    try:
        # others in their places: of a parameter whose own data change their dtype, DDP hears of no gradient again
        for parameters, name, parameter in places:
            parameters[name] = torch.nn.Parameter(parameter.detach().to(dtype), requires_grad=False)
        yield state
    finally:
        for parameters, name, parameter in places:
            parameters[name] = parameter


def export(state: TrainState, folder: Path) -> None:
    """Write what other programs load into `folder`: the adapter as NAME.safetensors, or the transformer or ControlNet
    in diffusers' layout. Raises OSError."""
    settings = state.settings
    dtype = getattr(torch, settings.dtype)
    if settings.method.whole:
        with as_saved(state):
            (state.controlnet or state.transformer).save_pretrained(folder / whole_part(settings))
        return
    tensors = adapter_tensors(state.transformer, dtype)
    own = {"kind": settings.method.kind, "rank": settings.method.rank, "seed": settings.seed}
    reference = state.transformer.config.reference  # type: ignore[attr-defined]
    metadata = {"base": Path(settings.model).name, "trigger": settings.trigger, "reference": reference}
    metadata["settings"] = json.dumps(own)
    write_adapter(folder / lora_file(settings), state.transformer, tensors, settings.method, metadata)


def lora_file(settings: TrainingSettings) -> str:
    return f"{settings.name}.safetensors"


def last_file(settings: TrainingSettings) -> str:
    """Return the name of the LoRA that a run ends with, beside the best of its validations."""
    return f"{settings.name}-last.safetensors"


def whole_part(settings: TrainingSettings) -> str:
    """Return the name of the folder that holds the weights, where no adapter is trained."""
    return "controlnet" if settings.method.kind == "controlnet" else "transformer"


@contextmanager
def held_folder(out: Path, ranks: Ranks) -> Iterator[tuple[Path, Poll]]:
    """Hold the run's folder `out` for all `ranks`; give the folder for unfinished files, and what checks the hold.

    Raises InUseError for a folder in which another run writes, OutputError where it cannot be written, and
    MissingFileError for a rank that sees another folder under that name.
    """
    with ExitStack() as stack:

        def begin() -> Hold:
            make_folder(out)
            with writing(out):
                held = stack.enter_context(hold(out))
                adopt_states(out)
                return held

        held = ranks.run_on_rank0(begin)
        name = ranks.broadcast("" if held is None else held.run.name)
        ranks.run_on_all(lambda: check_run(out, name))
        yield out / OWN / name, (lambda: None) if held is None else held.check
