"""From settings to a trained model: data sets, cache, run, and what is drawn on the way."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ..checkpoints import load_transformer
from ..checkpoints.fingerprint import digest_json
from ..runtime.accelerator import chosen_device
from ..runtime.atomic_files import make_folder
from ..runtime.cancellation import Poll, no_poll
from ..runtime.folder_lock import OWN, check_run, hold
from .adapters import (
    adapter_tensors,
    add_adapter,
    merged,
    start_fact,
    write_adapter,
)
from .learner import Learner, make_learner
from .loop import Folder, Report, Watch, export_together, preview_together, run, watch_together
from .preflight import check_base, check_launch, check_ranks, check_same
from .prepare import TEACHER, Progress, digest_models, no_progress, prepare, read_samples
from .previews import SHEET, check_own, draw_validation, write_sheet
from .ranks import ALONE, Ranks, say
from .runs import PICTURES, check_folder, check_places, publish, step_folder, writing
from .schedule import Best
from .settings import DDP, FLOW, Settings
from .sharding import describe_shares

if TYPE_CHECKING:
    from diffusers import SanaTransformer2DModel

# called with the step and the pictures [3, H, W] in [-1, 1] of the validation's prompts
Show = Callable[[int, Sequence[torch.Tensor]], None]


def no_show(step: int, pictures: Sequence[torch.Tensor]) -> None:
    """What shows nobody."""


def train(
    settings: Settings,
    report: Report = lambda line: None,
    progress: Progress = no_progress,
    poll: Poll = no_poll,
    show: Show = no_show,
    ranks: Ranks = ALONE,
) -> Path:
    """Train as `settings` say, from where the run in `settings.out` stands; return the file or folder of the result:
    the best of the last phase's validations, without any where it ended.

    `report` gets the line of the log of each step and validation, and at the end again that of the best, with the
    "first" validation loss of its phase; `progress` what is being prepared and how much of it
    is done, `show` each validation's pictures; `poll` is called at least once a step. Each of them cancels by raising,
    after which the same call goes on. `ranks` are the processes that train together, all of which call this. Raises
    InputError for data or settings that cannot be used, or that a rank has otherwise than the others, InUseError for a
    folder in which another run writes, TrainingError for a loss that is not finite, and CheckpointError or
    MissingFileError for a model that cannot be loaded.
    """
    shift = check_base(settings)
    check_launch(settings, ranks)
    check_ranks(ranks, settings)
    out = Path(settings.out)
    with held_together(out, ranks) as (parts, check_held):

        def watched() -> None:
            check_held()
            if ranks.first:
                # now, while what is learnt can still be saved
                check_places(out)
            poll()

        names = () if settings.method.whole else (lora_file(settings), last_file(settings))
        ranks.first_does(lambda: check_folder(out, names, len(settings.phase), settings_facts(settings)))
        if settings.validation.prompts:
            ranks.first_does(lambda: check_own(out / SHEET))
        samples = ranks.each_does(lambda: read_samples(settings, watched))
        device = ranks.device or chosen_device(settings.device)
        marks = digest_models(settings, progress if ranks.first else no_progress)

        data, inputs = prepare(settings, samples, device, ranks, marks, progress, watched)
        check_same(ranks, {"model": digest_json(marks), "pictures": [own.digest for own in data]}, "data")
        learner = make_learner(load_base(settings, device, ranks), shift, settings, device, ranks)
        learner = learner._replace(teacher=load_teacher(settings, device))
        if ranks.launched and ranks.first:
            say(describe_shares(learner))

        def preview(learner: Learner, step: int) -> None:
            with as_saved(learner) as saved:
                show(step, draw_validation(saved, inputs, out / PICTURES, parts, step, watched))
            write_sheet(out, parts)

        folder = Folder(out, parts, settings_facts(settings) | model_facts(marks))
        watch = Watch(report, watched, export_together(ranks, export), preview_together(ranks, preview))
        place, best = run(learner, data, folder, watch_together(ranks, watch))
        if best is not None and ranks.first:
            report({"step": best.step, "validation_loss": best.loss, "first": best.first})
        return ranks.from_first(ranks.first_does(lambda: put_result(settings, parts, place.step, best)))


def put_result(settings: Settings, parts: Path, last: int, best: Best | None) -> Path:
    """Put the LoRAs of a run that has ended at the step `last` into its folder, the best as its result; return that, or
    the folder of whole weights. Raises as `publish` does."""
    out = Path(settings.out)
    chosen = step_folder(out, last if best is None else best.step)
    if settings.method.whole:
        return chosen / whole_part(settings)
    if best is not None:
        publish(out, parts, last_file(settings), step_folder(out, last))
    return publish(out, parts, lora_file(settings), chosen)


def model_facts(marks: dict[str, Any]) -> dict[str, Any]:
    """Return which models a run's states depend on."""
    model = {name: mark for name, mark in marks.items() if name != TEACHER}
    teacher = {TEACHER: marks[TEACHER]} if TEACHER in marks else {}
    return {"model": digest_json(model), **teacher}


def settings_facts(settings: Settings) -> dict[str, Any]:
    """Return what a run's states depend on, besides models and data, and what a new phase may change.

    Raises MissingFileError or ReadError for a file to start from that cannot be read.
    """
    method = settings.method
    facts: dict[str, Any] = {"seed": settings.seed, "dtype": settings.dtype}
    facts |= {"reference": settings.reference, "optimizer": settings.optimizer.name}
    facts |= {"ema": bool(settings.optimizer.ema), "method": method.kind}
    if settings.optimizer.name == "prodigy":
        facts["d0"] = settings.optimizer.d0
    if method.base != "full":
        facts["base"] = method.base
    if settings.loss.kind != FLOW:
        facts["loss"] = settings.loss.kind
    if method.start:
        facts["start"] = start_fact(settings)
    own = {"controlnet": {"blocks": method.blocks}, "full": {}}
    # a state has the weights before alpha scales them
    alpha = None if method.scale == 1.0 else method.alpha
    adapter: dict[str, Any] = {"rank": method.rank, "alpha": alpha, "targets": method.targets}
    if method.layers:
        adapter["layers"] = list(method.layers)
    return facts | own.get(method.kind, adapter)


def load_base(settings: Settings, device: torch.device, ranks: Ranks = ALONE) -> SanaTransformer2DModel:
    """Return the transformer that training begins with. If it is put into shares, the first rank alone has its numbers.

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
def as_saved(learner: Learner) -> Iterator[Learner]:
    """Give `learner`, computing as what is loaded from what `export` writes, on the whole model where its own is in 8
    bits."""
    settings = learner.settings
    dtype = getattr(torch, settings.dtype)
    if not settings.method.whole:
        tensors = adapter_tensors(learner.transformer, dtype)
        if settings.method.base != "full":
            transformer = load_transformer(settings.model, learner.transformer.device, dtype, None, settings.reference)
            add_adapter(transformer, settings.method, settings.seed)
            learner = learner._replace(transformer=transformer)
        with merged(learner.transformer, tensors):
            yield learner
        return
    model = learner.controlnet or learner.transformer
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
        yield learner
    finally:
        for parameters, name, parameter in places:
            parameters[name] = parameter


def export(learner: Learner, folder: Path) -> None:
    """Write what other programs load into `folder`: the adapter as NAME.safetensors, or the transformer or ControlNet
    in diffusers' layout. Raises OSError."""
    settings = learner.settings
    dtype = getattr(torch, settings.dtype)
    if settings.method.whole:
        with as_saved(learner):
            (learner.controlnet or learner.transformer).save_pretrained(folder / whole_part(settings))
        return
    tensors = adapter_tensors(learner.transformer, dtype)
    config: Any = learner.transformer.config
    facts = {"base": Path(settings.model).name, "trigger": settings.trigger, "reference": config.reference}
    facts["settings"] = json.dumps({"kind": settings.method.kind, "rank": settings.method.rank, "seed": settings.seed})
    write_adapter(folder / lora_file(settings), learner.transformer, tensors, settings.method, facts)


def lora_file(settings: Settings) -> str:
    return f"{settings.name}.safetensors"


def last_file(settings: Settings) -> str:
    """Return the name of the LoRA that a run ends with, beside the best of its validations."""
    return f"{settings.name}-last.safetensors"


def whole_part(settings: Settings) -> str:
    """Return the name of the folder that holds the weights, where no adapter is trained."""
    return "controlnet" if settings.method.kind == "controlnet" else "transformer"


def load_teacher(settings: Settings, device: torch.device) -> SanaTransformer2DModel | None:
    """Return the teacher, frozen, None where there is none. Raises as `load_transformer` does."""
    if not settings.loss.teacher:
        return None
    dtype = getattr(torch, settings.dtype)
    return load_transformer(settings.loss.teacher, device, dtype, reference=settings.reference).requires_grad_(False)


@contextmanager
def held_together(out: Path, ranks: Ranks) -> Iterator[tuple[Path, Poll]]:
    """Hold the run's folder `out` for all `ranks`; give the folder for unfinished files, and what checks the hold.

    Raises InUseError for a folder in which another run writes, OutputError where it cannot be written, and
    MissingFileError for a rank that sees another folder under that name.
    """
    with ExitStack() as stack:

        def begin() -> Any:
            make_folder(out)
            with writing(out):
                return stack.enter_context(hold(out))

        held = ranks.first_does(begin)
        name = ranks.from_first(None if held is None else held.run.name)
        ranks.each_does(lambda: check_run(out, name))
        yield out / OWN / name, (lambda: None) if held is None else held.check
