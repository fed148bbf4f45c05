"""The trainer: one run from its settings to the last saved state.

`Trainer.train` calls the methods below it in this order: hold the folder, prepare the data, load the model, resume,
then the loop (validate, save, step), and publish the result. The components are in other files: the data (dataset,
images, cache), the microbatches of each step (loader), the order of the batches and the learning rate (schedule), the
model (trained_model), the optimizer, the loss, the ranks and their shards, the saved states, and the validation's
images (previews).
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from traceback import clear_frames
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from ..checkpoints import find_part, inspect_checkpoint, load_transformer
from ..checkpoints.generation import shift_of
from ..checkpoints.load import build_module
from ..errors import InputError, TrainingError, first_line
from ..model.controlnet import Control
from ..model.forward import allow_no_float64
from ..model.known_models import GUIDANCE, MAX_TOKENS, edits_images
from ..model.latents import DOWNSCALE
from ..model.reference import reference_of
from ..runtime.accelerator import chosen_device, empty_cache, is_out_of_memory
from ..runtime.atomic_files import digest_of, make_folder
from ..runtime.cancellation import Poll, no_poll
from ..runtime.folder_lock import OWN, Hold, check_run, hold
from ..runtime.text import Json, get_logger
from ..runtime.user_files import FileRange, read_range
from . import optimizers, schedule, states, trained_model
from .cache import Batch
from .came import CAME
from .dataset import SHEET
from .loader import Loader, Microbatch, OnProgress, prepare_data
from .loss import (
    Point,
    Prompt,
    consistency_error,
    consistency_loss,
    data_point,
    flow_loss,
    seeded_dropout,
    training_angles,
    training_guidance,
    training_sigmas,
    validation_noise,
    validation_times,
)
from .previews import Inputs, as_saved, check_own, generate_validation, write_sheet
from .ranks import ALONE, Ranks, check_settings_and_code, log_line
from .schedule import Best, PhaseData, TrainProgress
from .settings import ADAPTERS, AUTO, CONSISTENCY, FLOW, OFF, Phase, TrainingSettings
from .sharding import Layout, check_launch, describe_layout, gather, lay_out, local_parameters
from .states import Line, NewState, RunLog, SavedState, Saver

if TYPE_CHECKING:
    from diffusers import SanaControlNetModel, SanaTransformer2DModel

logger = get_logger(__name__)

# Called with the log line of each step and of each validation, and at the end with `step`, `validation_loss` and
# `first` of the best validation.
Report = Callable[[Line], None]
# Called with the step and the validation's images [3, H, W] in [-1, 1].
Show = Callable[[int, Sequence[torch.Tensor]], None]
# Steps in which compiled blocks save the minute that a compile takes. A LoRA step of 1.6B on an H100 has 0.377 s, all
# of it the CPU's time, and a compiled one has about a third of its operations.
STEPS_PER_COMPILE = 300
# Number of times at which a validation measures the loss of each held-out image.
VALIDATION_TIMES = 8
# Positions of latents that a validation computes in one forward: all times of an image of 1024 px.
VALIDATION_POSITIONS = VALIDATION_TIMES * 32**2


def ignore(*values: object) -> None:
    """No-op default of the callbacks."""


def train(
    settings: TrainingSettings,
    report: Report = ignore,
    progress: OnProgress = ignore,
    poll: Poll = no_poll,
    show: Show = ignore,
    ranks: Ranks = ALONE,
) -> Path:
    """Train, or resume from the newest state in `settings.out`.

    Returns the path of the LoRA or weights with the best validation in the last phase. Without held-out images it is
    the path of the last step's LoRA or weights. An error raised by a callback cancels the run. The same call resumes
    it. Call this on all `ranks`.

    Raises InputError for data or settings that cannot be used, and for settings that differ between ranks. Raises
    InUseError if another run writes into the folder, TrainingError for a loss that is not finite, and CheckpointError
    or MissingFileError for a model that cannot be loaded.
    """
    return Trainer(settings, report, progress, poll, show, ranks).train()


class Trainer:
    """One run. Start at `train`."""

    # The folder for unfinished files. It is on the same disk as `out`.
    parts: Path
    # The images of each phase.
    data: Sequence[PhaseData] = ()
    # The encoded prompts and control images of the validation. None: it generates no images.
    inputs: Inputs | None
    # The microbatches of the steps.
    loader: Loader
    saver: Saver
    # Whether the blocks are compiled.
    is_compiled = False

    # The model. A ControlNet is trained in place of the transformer that it steers.
    transformer: SanaTransformer2DModel
    controlnet: SanaControlNetModel | None
    # The shift of the model's schedule of noise.
    shift: float
    # The trained parameters by name. In a sharded model they are the rows of this rank.
    parameters: dict[str, torch.nn.Parameter]
    optimizer: torch.optim.Optimizer
    # The moving average of the parameters in float32. None: there is no average.
    average: dict[str, torch.Tensor] | None
    # How the ranks hold the model: a replica on each, or its rows.
    layout: Layout

    def __init__(
        self,
        settings: TrainingSettings,
        report: Report = ignore,
        on_progress: OnProgress = ignore,
        poll: Poll = no_poll,
        show: Show = ignore,
        ranks: Ranks = ALONE,
    ) -> None:
        self.settings, self.ranks = settings, ranks
        self.report, self.on_progress, self.poll, self.show = report, on_progress, poll, show
        # The run's folder.
        self.out = Path(settings.out)
        self.log = RunLog(self.out)
        # Raises an error if another process has taken over the folder.
        self.check_held: Poll = no_poll
        # The values that may not change when the run resumes. Every state has them.
        self.config: Json = {}
        # Torch's settings of the compiler are the run's until it closes.
        self.compiling = ExitStack()
        # Whether the adapter begins with the file `method.start`. A resumed run does not.
        self.loads_start = False
        # The number of finished steps, and the position among phases and epochs.
        self.progress = TrainProgress()
        # Whether the last phase has ended.
        self.has_ended = False
        # The best validation so far.
        self.best: Best | None = None
        # The step of the last validation.
        self.validated_step: int | None = None
        # The error that `report` raised. The next `check_step` raises it on all ranks.
        self.report_error: BaseException | None = None

    def train(self) -> Path:
        shift = self.ranks.run_on_all(lambda: check_base(self.settings))
        if self.requested_device.type == "mps":
            check_apple(self.settings)
        check_launch(self.settings, self.ranks)
        if self.ranks.size > 1:
            check_settings_and_code(self.ranks, self.settings)
        with self.hold_folder():
            self.check_folder()
            try:
                self.prepare_data()
                self.set_up(self.load_base(), shift, self.requested_device)
                if self.ranks.launched and self.ranks.first:
                    log_line(describe_layout(self.layout, self.parameters, self.device))
                shared_mask = reference_of(self.transformer).shared_mask
                self.loader = Loader(self.settings, self.ranks, self.data, shared_mask)
                with self.saver.thread, closing(self.loader), closing(self.log), self.compiling:
                    self.resume()
                    self.run_steps()
                return self.finish()
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
                steps = [step for step, _ in states.find_states(self.out)]
                saved = f"step {steps[-1]} is saved" if steps else "no step is saved"
                raise TrainingError(
                    f"training: memory ran out ({first_line(error):.100}), {saved}; lower phase.batch and raise "
                    "phase.accumulate, set checkpoint_gradients to true, or method.base to int8; train --plan names "
                    "settings that fit"
                ) from error
            finally:
                # The encoders of streamed data refer to this trainer, which holds the data. Clearing it breaks the
                # cycle, so the GPU's memory is freed at once.
                self.data = ()

    # Short names

    @property
    def phase(self) -> Phase:
        return self.settings.phase[self.progress.phase]

    @property
    def phase_data(self) -> PhaseData:
        return self.data[self.progress.phase]

    @property
    def models(self) -> list[Any]:
        """The transformer, and the ControlNet if one is trained. The last one is trained."""
        return [self.transformer] if self.controlnet is None else [self.transformer, self.controlnet]

    @property
    def device(self) -> torch.device:
        """The device that computes. Offloaded rows are in the CPU's memory."""
        return self.ranks.device or next(self.transformer.parameters()).device

    @property
    def requested_device(self) -> torch.device:
        """The device for the models, before they are loaded."""
        return self.ranks.device or chosen_device(self.settings.device)

    @property
    def is_sharded(self) -> bool:
        return self.ranks.launched and self.settings.parallel.kind != optimizers.DDP

    @property
    def adapter_file(self) -> str:
        return f"{self.settings.name}.safetensors"

    @property
    def last_adapter_file(self) -> str:
        """The name of the last step's adapter, beside `adapter_file` of the best. Only runs with a best have it."""
        return f"{self.settings.name}-last.safetensors"

    @property
    def weights_folder(self) -> str:
        """The name of the folder with the weights in a state, if no adapter is trained."""
        return "controlnet" if self.settings.method.kind == "controlnet" else "transformer"

    # The folder

    @contextmanager
    def hold_folder(self) -> Iterator[None]:
        """Hold the run's folder for all ranks, so that no other run writes into it."""
        with ExitStack() as stack:

            def begin() -> Hold:
                make_folder(self.out)
                with states.writing(self.out):
                    folder_hold = stack.enter_context(hold(self.out))
                    states.adopt_states(self.out)
                    return folder_hold

            folder_hold = self.ranks.run_on_rank0(begin)
            name = self.ranks.broadcast("" if folder_hold is None else folder_hold.run.name)
            # A rank on another machine may see another folder under the same path.
            self.ranks.run_on_all(lambda: check_run(self.out, name))
            self.parts = self.out / OWN / name
            self.saver = Saver(self.out, self.parts, self.settings.keep, self.ranks)
            if folder_hold is not None:
                self.check_held = folder_hold.check
            yield

    def check_folder(self) -> None:
        settings = self.settings
        names = (self.adapter_file, self.last_adapter_file) if settings.method.is_adapter else ()
        # Ranks may see different contents of a network folder for a while. What rank 0 sees decides.
        described = self.ranks.run_on_rank0(lambda: (describe_config(settings), needs_start(settings)))
        self.config, self.loads_start = self.ranks.broadcast(described or ({}, False))
        self.ranks.run_on_rank0(lambda: states.check_folder(self.out, names, len(settings.phase), self.config))
        if settings.validation.prompts:
            self.ranks.run_on_rank0(lambda: check_own(self.out / SHEET))

    def check_cancelled(self) -> None:
        self.check_held()
        self.poll()

    def check_step(self) -> None:
        """Raise an error on all ranks, at the same step, if one of them should stop."""

        def check() -> None:
            if self.ranks.first:
                # Before each step, not only at a save: the finished steps are then saved under a name that is free.
                with states.writing(self.out):
                    states.check_places(self.out)
            self.check_cancelled()
            if self.report_error is not None:
                raise self.report_error

        self.ranks.run_on_all(check)

    def report_line(self, line: Line) -> None:
        if not self.ranks.first:
            return
        try:
            self.report(line)
        except BaseException as error:
            if self.ranks.size == 1:
                raise
            self.report_error = self.report_error or error

    # The data

    def prepare_data(self) -> None:
        """List the images, and encode those that the cache does not have yet, unless they are streamed."""
        progress = self.on_progress if self.ranks.first else ignore
        self.data, self.inputs, self.config[states.MODEL] = prepare_data(
            self.settings, self.ranks, self.requested_device, self.check_cancelled, progress
        )

    # The model

    def load_base(self) -> SanaTransformer2DModel:
        """Load the transformer that training begins with. If it will be sharded, only rank 0 loads the weights."""
        settings, ranks = self.settings, self.ranks
        dtype = getattr(torch, settings.method.weights if settings.method.kind == "full" else settings.dtype)
        device: str | torch.device
        if self.is_sharded:
            # Shards go to the device block by block.
            device = "cpu" if ranks.first else "meta"
        elif settings.method.base == "full":
            device = self.requested_device
        else:
            # The weights are quantised on the CPU, so that the device never holds the whole model.
            device = "cpu"
        return load_transformer(settings.model, device, dtype, reference=settings.reference)

    def set_up(self, transformer: SanaTransformer2DModel, shift: float, device: torch.device | None = None) -> None:
        """Make `transformer` ready for training: its adapter or ControlNet, device, shards, optimizer and average.

        Without `device` the model stays where it is.
        """
        settings, method, ranks = self.settings, self.settings.method, self.ranks
        self.transformer, self.shift, self.controlnet = transformer, shift, None
        if method.kind == "full":
            transformer.requires_grad_(True)
        elif method.kind == "controlnet":
            self.controlnet = trained_model.make_controlnet(transformer, method.blocks, getattr(torch, method.weights))
        else:
            trained_model.add_adapter(transformer, method, settings.seed)
            if self.loads_start:
                trained_model.load_start(transformer, method)
            if method.base != "full":
                trained_model.quantise_base(transformer)
        for model in self.models:
            if device is not None and not self.is_sharded:
                model.to(device)
            if settings.checkpoint_gradients:
                model.enable_gradient_checkpointing()
            allow_no_float64(model, ranks.device or device or transformer.device)
        # Shards go to the device block by block. Only one block at a time is whole there.
        self.layout = lay_out(self.models, settings, ranks)
        if self.layout.shards is None:
            named = self.models[-1].named_parameters()
            self.parameters = {name: parameter for name, parameter in named if parameter.requires_grad}
        else:
            self.parameters = local_parameters(self.layout)
        options, trained = settings.optimizer, list(self.parameters.values())
        self.optimizer = optimizers.make_optimizer(
            options.name, trained, 0.0, options.weight_decay, d0=options.d0, d_coef=options.d_coef
        )
        if self.layout.shards is not None and isinstance(self.optimizer, CAME):
            # The means of a matrix's columns are over the rows of all ranks.
            self.optimizer.total = ranks.all_reduce
        self.average = optimizers.start_average(self.parameters) if options.ema else None

    # Resume

    def resume(self) -> None:
        """Restore the newest state of the run's folder, and find the next step."""
        ranks = self.ranks
        ranks.run_on_rank0(partial(states.begin_run, self.out, self.parts, self.config))
        # What rank 0 sees decides, as in `check_folder`.
        steps = ranks.broadcast([step for step, _ in states.find_states(self.out)])
        if steps:
            folder = states.step_folder(self.out, steps[-1])
            saved, tensors = ranks.run_on_all(lambda: states.read_state(folder, self.layout))
            states.check_config(self.config, saved.config, self.out)
            states.restore(self.parameters, self.optimizer, self.average, tensors, saved.values, folder.name)
            self.progress, self.best, self.validated_step = saved.progress, saved.best, saved.validated
            if not schedule.same_epochs(saved.data[self.progress.phase], self.phase_data.digest):
                self.begin_epoch_again()
        self.progress, self.has_ended = self.loader.advance(self.progress)
        self.saver.saved_step = self.progress.step
        if not self.has_ended:
            schedule.warn_of_rate(self.phase, self.progress, self.loader.steps_per_epoch[self.progress.phase])
            self.compile_blocks()
            self.warm_up_ddp_buckets()

    def begin_epoch_again(self) -> None:
        if self.progress.position:
            logger.warning(
                "images or batches of phase %d have changed, so its epoch begins again", self.progress.phase + 1
            )
        self.progress = self.progress._replace(position=0)
        _, has_ended = self.loader.advance(self.progress)
        # A run that ended before the epoch keeps its best validation.
        if not has_ended:
            # The phase continues. The held-out images may have changed too, so losses before cannot be compared.
            self.best = self.validated_step = None

    def compile_blocks(self) -> None:
        """Compile the blocks of the model, if the settings ask for it or it saves time.

        A first forward and backward shows whether this works. If it fails on one rank, no rank keeps its compiled
        blocks. The blocks are compiled once for each size and number of images, and for captions of one length (see
        `batch_loss`).
        """
        settings, ranks = self.settings, self.ranks
        if settings.compile == OFF or not settings.can_compile:
            return
        shapes = {
            (bucket, images)
            for phase, data in zip(settings.phase, self.data, strict=True)
            for bucket, count in schedule.images_of_buckets(data).items()
            for images in (min(phase.batch, count), count % phase.batch)
            if images
        }
        steps = schedule.all_steps_left(settings, self.loader.steps_per_epoch, self.progress)
        pays = self.device.type not in ("cpu", "mps") and steps >= STEPS_PER_COMPILE * len(shapes)
        if settings.compile == AUTO and not ranks.broadcast(pays):
            return
        progress = self.on_progress if ranks.first else ignore
        progress("compiling the model", 0, 1)
        microbatches, _ = self.loader.load(self.progress)
        blocks = self.transformer.transformer_blocks
        for block in blocks:
            block.compile(dynamic=False)
        # The first block is compiled apart from the others, because its input needs no gradient. 8 is torch's limit.
        self.compiling.enter_context(torch._dynamo.config.patch(recompile_limit=8 + 2 * len(shapes)))
        self.is_compiled, reason = True, ""
        try:
            with self.layout.backward(last=False) as compute:
                compute(partial(self.microbatch_loss, microbatches[0])).sum().backward()
        except Exception as error:  # Compilers raise many kinds.
            reason = f"{type(error).__name__}: {first_line(error)}"
        self.optimizer.zero_grad()
        (failed,) = ranks.total(float(bool(reason)))
        progress("compiling the model", 1, 1)
        if failed:
            self.is_compiled = False
            for block in blocks:
                block._compiled_call_impl = None
            logger.warning("compile: %.150s; going on without it", reason or "another rank cannot compile")

    def eager(self) -> AbstractContextManager[object]:
        """A context in which no block runs compiled, so that validations do not depend on the compiler."""
        return torch.compiler.set_stance("force_eager") if self.is_compiled else nullcontext()

    def warm_up_ddp_buckets(self) -> None:
        """Compute gradients of the next step and throw them away.

        After its first backward DDP moves the gradients to other buckets, and the buckets decide in which order the
        ranks add them up. With this, a resumed run adds them in the same order as a run that never stopped, and stays
        equal bit by bit.
        """
        if self.layout.replica is not None:
            microbatches, _ = self.loader.load(self.progress)
            with self.layout.backward(last=True) as compute:
                compute(lambda: self.microbatch_loss(microbatches[0])).sum().backward()
            self.optimizer.zero_grad()

    # The loop

    def run_steps(self) -> None:
        total = self.progress.step + schedule.all_steps_left(self.settings, self.loader.steps_per_epoch, self.progress)
        line: Line | None = None
        while True:
            # An error in here saves the finished steps before it is raised.
            with self.saving_on_error():
                if line is not None:
                    self.report_line({**line, "steps": total})
                if self.ranks.size == 1 and self.saver.job is not None and self.saver.job.done():
                    # An error of the thread, such as a full disk, is raised now instead of at the next save.
                    self.wait_for_save()
                self.validate_if_due()
                step = self.progress.step
                is_best = self.best is not None and self.best.step == step
                is_due = self.has_ended or step % self.settings.save_every == 0 or is_best
                if is_due:
                    # The error of an earlier save is raised here, where it saves this step.
                    self.wait_for_save()
            if is_due:
                self.save()
            if self.has_ended:
                self.wait_for_save()
                # A callback of the first rank may have failed at the last step.
                self.ranks.agree(self.report_error)
                return
            line = self.take_step()
            if line is not None:
                self.ranks.run_on_rank0(partial(self.log.add, line))
            self.progress, self.has_ended = self.loader.after(self.progress)

    @contextmanager
    def saving_on_error(self) -> Iterator[None]:
        """Save the finished steps if the body raises. The body must leave the weights unchanged.

        Nothing is saved if a validation could not restore the weights (see `optimizers.restoring`), or if only this
        rank failed, because saving needs all ranks.
        """
        try:
            yield
        except BaseException as error:
            weights_lost = isinstance(error, TrainingError) and error.weights_lost
            if not weights_lost and self.ranks.all_know(error):
                # The frames of the traceback hold the tensors of the failed step. Saving may need their memory.
                clear_frames(error.__traceback__)
                self.optimizer.zero_grad()
                if self.layout.shards is not None:
                    self.layout.shards.drop_step()
                try:
                    self.save()
                    self.wait_for_save()
                except Exception:
                    # The error of the save is raised instead, so log this one.
                    logger.error("%s", str(error) or type(error).__name__)
                    raise
            raise

    # A validation

    def validate_if_due(self) -> None:
        """Measure the validation loss if images are held out, and generate the validation's images.

        A validation is due before the first step, every `every` steps, and at the end.
        """
        step, every = self.progress.step, self.settings.validation.every
        is_due = bool(every) and (step % every == 0 or self.has_ended)
        if not is_due or self.validated_step == step:
            return
        best = self.best
        with self.evaluation_weights():
            if self.phase_data.held_out:
                loss = self.validation_loss()
                best = schedule.better(best, loss, self.progress)
                line: Line = {"step": step, "validation_loss": loss}
                self.ranks.run_on_rank0(partial(self.log.add, line))
                self.report_line(line)
            if self.settings.validation.prompts:
                models = self.gather_models(self.device, only_trained=False)
                self.ranks.run_on_rank0(lambda: self.preview(models, best))
                models = []
                empty_cache(self.device)
        # A validation that is cancelled while it generates images is repeated.
        self.validated_step, self.best = step, best

    @contextmanager
    def evaluation_weights(self) -> Iterator[None]:
        """Put the weights that are validated and saved into the parameters, and turn dropout off.

        These are the moving average or schedulefree's weights, if there are any.
        """
        # Without dropout nothing is turned off. `without_dropout` imports peft, which full training does not need.
        dropout = trained_model.without_dropout(self.transformer) if self.settings.method.dropout else nullcontext()
        with optimizers.validation_weights(self.optimizer), dropout:
            if self.average is None:
                yield
            else:
                with optimizers.averaged_weights(self.parameters, self.average):
                    yield

    @torch.no_grad()
    def validation_loss(self) -> float:
        """Return the mean loss of the phase's held-out images. With the consistency loss it is the mean error.

        Each image is measured at VALIDATION_TIMES times with one noise. All validations have the same times and noise.
        The times are one batch, unless the images are larger than 1024 px.
        """
        ranks, data, step = self.ranks, self.phase_data, self.progress.step
        held_out, total = data.held_out, 0.0
        # Raised at the end: FSDP gathers weights in each forward, so all ranks compute the same number of losses, the
        # last ones perhaps a second time.
        fault: TrainingError | None = None
        rounds = math.ceil(len(held_out) / ranks.size)
        times_per_forward = max(1, VALIDATION_POSITIONS // (self.phase.largest // DOWNSCALE) ** 2)
        for number in range(ranks.rank, rounds * ranks.size, ranks.size):
            index, is_repeated = held_out[number % len(held_out)], number >= len(held_out)
            batch = ranks.run_on_all(partial(data.cache.load, [index]))
            noise = validation_noise(batch.latents.shape[1:], (self.settings.seed, index))[None]
            for times in validation_times(VALIDATION_TIMES).split(times_per_forward):
                self.check_step()
                compute = partial(self.image_loss, batch, noise, times)
                # Only FSDP talks to other ranks in a forward.
                loss = ranks.run_on_all(compute) if self.layout.shards is None else compute()
                if fault is None and not math.isfinite(loss):
                    fault = TrainingError(
                        f"training: after step {step} the validation loss of {batch.names[0]} is not finite; lower "
                        "learning_rate, or remove it"
                    )
                total += 0.0 if is_repeated else loss

        ranks.agree(fault)
        return ranks.total(total)[0] / (len(held_out) * VALIDATION_TIMES)

    def image_loss(self, batch: Batch, noise: torch.Tensor, times: torch.Tensor) -> float:
        """Return the sum of the validation losses of one image at `times`. Takes more forwards if memory is short."""
        count = len(times)
        batch = Batch._make(
            value[:1].expand(count, *value.shape[1:]) if isinstance(value, torch.Tensor) else value for value in batch
        )
        try:
            return float(self.validation_losses(batch, noise[:1].expand(count, *noise.shape[1:]), times).sum())
        except RuntimeError as error:
            # Under FSDP the other ranks compute the same forwards, so one rank cannot compute more of them.
            if count == 1 or self.layout.shards is not None or not is_out_of_memory(error):
                raise
        # After the except clause, because the traceback in it holds the tensors of the failed forward.
        return sum(self.image_loss(batch, noise, half) for half in times.chunk(2))

    def validation_losses(self, batch: Batch, noise: torch.Tensor, times: torch.Tensor) -> torch.Tensor:
        """Return the validation losses [B] of a batch at `times` [B]."""
        if self.settings.loss.kind == CONSISTENCY:
            guidance = torch.full(times.shape, GUIDANCE)
            point, prompt, weight = self.on_trajectory(batch, noise, times, guidance)
            # This loss is never compiled, see `can_compile`.
            return consistency_error(self.transformer, point, prompt, weight)
        with self.eager():
            return self.batch_loss(batch, noise, training_sigmas(times, self.shift).float().to(self.device))

    def gather_models(self, device: torch.device, only_trained: bool) -> list[Any]:
        """Return the models with whole weights on the first rank, no models on the others. All ranks have to call this.

        Without shards they are the models themselves. Shards are gathered on `device`. With `only_trained`, weights
        that the exported file does not need stay empty. If no adapter is trained, shards are gathered in the dtype in
        which they are saved. Adapters keep their dtype, because they are scaled before they are converted.
        """
        shards, settings = self.layout.shards, self.settings
        if shards is None:
            return self.models if self.ranks.first else []
        dtype = None if settings.method.is_adapter else getattr(torch, settings.dtype)
        return gather(shards, device, dtype, self.ranks.first, only_trained)

    def preview(self, models: list[Any], best: Best | None) -> None:
        """Generate and show the validation's images, and write the sheet of all validations, which marks the `best`."""
        step = self.progress.step
        assert self.inputs is not None
        with as_saved(self.settings, models) as saved, self.eager():
            images = generate_validation(
                self.settings, saved, self.shift, self.inputs, self.out, self.parts, step, self.check_cancelled
            )
            self.show(step, images)
        if best is not None and (best.phase != self.progress.phase or not best.step):
            # Neither an earlier phase nor the untrained model is the result.
            best = None
        write_sheet(self.out, self.parts, None if best is None else best.step)

    # A saved state

    def save(self) -> None:
        """Save the current step, unless it is 0 or has a state already.

        The weights are copied to disk here. A thread completes the state and removes old ones.
        """
        self.wait_for_save()
        # Another process may have taken the folder. InUseError explains this better than a failure to write there.
        self.ranks.run_on_rank0(self.check_held)
        step, new = self.progress.step, None
        if step and step != self.saver.saved_step:
            tensors, values = states.tensors_of(self.parameters, self.optimizer, self.average)
            self.ranks.run_on_all(partial(states.check_finite, tensors, step))
            digests = [phase.digest for phase in self.data]
            state = SavedState(self.progress, values, self.config, digests, self.best, self.validated_step)
            new = NewState(self.out, self.parts, state, self.layout)
            new.write(tensors, self.gather_and_export)
        # Without a new state it stores the validation, and removes old states.
        self.saver.begin(new, step, self.best, self.validated_step)

    def wait_for_save(self) -> None:
        """Wait until the last state is in its place. If that has failed, raise the error, but only once."""
        # A failed `wait` resets it.
        last = self.saver.saved_step
        try:
            self.saver.wait()
        except Exception:
            if self.best is not None and self.best.step == last:
                # The state of the best step does not exist. Let the next validation replace it.
                self.best, self.validated_step = self.best._replace(step=0), None
            raise

    def gather_and_export(self, part: Path) -> None:
        """Gather the weights from all ranks, and let the first rank export them into the folder `part` of a state."""
        with self.evaluation_weights():
            method = self.settings.method
            needs_base = method.is_adapter and ADAPTERS[method.kind].needs_base
            models = self.gather_models(torch.device("cpu"), only_trained=not needs_base)
            self.ranks.run_on_rank0(lambda: self.export(models, part))

    def export(self, models: list[Any], folder: Path) -> None:
        """Write the files that other programs load: the adapter, or the weights in diffusers' layout."""
        settings = self.settings
        if not settings.method.is_adapter:
            with as_saved(settings, models) as saved:
                saved[-1].save_pretrained(folder / self.weights_folder)
            return
        (transformer,) = models
        tensors = trained_model.adapter_tensors(transformer, getattr(torch, settings.dtype))
        adapter_info = {"kind": settings.method.kind, "rank": settings.method.rank, "seed": settings.seed}
        metadata = {
            "base": Path(settings.model).name,
            "trigger": settings.trigger,
            "reference": transformer.config.reference,
            "settings": json.dumps(adapter_info),
        }
        trained_model.write_adapter(folder / self.adapter_file, transformer, tensors, settings.method, metadata)

    # A step

    def take_step(self) -> Line | None:
        """Take the next step, and return its line of the log. None: `skip_broken` leaves out all of its images."""
        progress, loader = self.progress, self.loader
        rate = schedule.learning_rate(self.phase, progress)
        with self.saving_on_error():
            self.check_step()
            began = time.perf_counter()
            microbatches, images = loader.load(progress)
            # After an epoch without images, the loader raises.
            loader.steps_without_images = 0 if images else loader.steps_without_images + 1
            if not images:
                return None
            loss, norm = self.compute_within_memory(microbatches, images)
        self.apply_gradients(rate)
        return {
            "step": progress.step + 1,
            "phase": progress.phase + 1,
            "epoch": progress.epoch + 1,
            "loss": loss,
            "learning_rate": rate,
            "grad_norm": norm,
            "images": images,
            "seconds": round(time.perf_counter() - began, 4),
        }

    def compute_within_memory(self, microbatches: Sequence[Microbatch], total: int) -> tuple[float, float]:
        """As `compute_gradients`. If memory runs out without gradient checkpointing, turn it on and try again.

        Several ranks would have to turn it on together, and Apple's GPU may not have it (see `check_apple`).
        """
        is_off = not self.transformer.is_gradient_checkpointing
        if is_off and not self.ranks.launched and self.device.type != "mps":
            try:
                return self.compute_gradients(microbatches, total)
            except RuntimeError as error:
                if not is_out_of_memory(error):
                    raise
                step, reason = self.progress.step, first_line(error)
                logger.warning("memory ran out (%.100s), so checkpoint_gradients is on from step %d", reason, step)
            self.optimizer.zero_grad()
            for model in self.models:
                model.enable_gradient_checkpointing()
        return self.compute_gradients(microbatches, total)

    def compute_gradients(self, microbatches: Sequence[Microbatch], total: int) -> tuple[float, float]:
        """Compute the gradients of a step and clip them. Returns the mean loss and the norm of the gradients.

        `total` is the number of images of all ranks. Every image has the same weight, whatever batch it is in. This
        changes no weights, so that the finished steps can be saved if it fails.

        A loss or gradient that is not finite raises on all ranks. Under DDP, so does an error before the last backward.
        A rank that fails alone in a part with collectives cannot reach the others, which wait for it inside one.
        """
        ranks = self.ranks
        begin = partial(self.compute_up_to_last_backward, microbatches, total)
        # The function of `run_on_all` must not communicate. DDP does only in the last backward, FSDP in each forward.
        losses, last_loss = ranks.run_on_all(begin) if self.layout.shards is None else begin()
        last_loss.backward()
        # The graph of the loss holds memory.
        del last_loss
        step, local_mean, bad_names = self.progress.step, 0.0, list[str]()
        for microbatch, values in zip(microbatches, losses, strict=True):
            local_mean += sum(values) / total
            named_values = zip(microbatch.batch.names, values, strict=True)
            bad_names += [name for name, value in named_values if not math.isfinite(value)]
        mean, failed_ranks = ranks.total(local_mean, float(bool(bad_names)))
        norm = self.layout.clip(self.parameters, self.settings.optimizer.clip)
        fault = None
        if bad_names:
            fault = TrainingError(
                f"training: in step {step} the loss of {bad_names[0]} is not finite; lower learning_rate, or remove it"
            )
        elif not failed_ranks and not math.isfinite(norm):
            names = ", ".join(name for microbatch in microbatches for name in microbatch.batch.names[:2])
            fault = TrainingError(
                f"training: in step {step} the gradients of {names:.120} are not finite; lower learning_rate"
            )
        ranks.agree(fault)
        return mean, norm

    def compute_up_to_last_backward(
        self, microbatches: Sequence[Microbatch], total: int
    ) -> tuple[list[list[float]], torch.Tensor]:
        """Compute the gradients of a step, except for the last backward. `total` is the number of images of all ranks.

        Returns the losses of the images of each microbatch, and the loss whose backward is still to be computed. It may
        run outside of the two contexts below: checkpoints restore their random state, and DDP averages in it.
        """
        values: list[list[float]] = []
        for number, microbatch in enumerate(microbatches, 1):
            is_last = number == len(microbatches)
            key = self.settings.seed, self.progress.step, number, self.ranks.rank
            dropout = seeded_dropout(self.device, key) if self.settings.method.dropout else nullcontext()
            with dropout, self.layout.backward(is_last) as compute:
                # DDP's replica calls it, to prepare the sum of the gradients.
                losses = compute(partial(self.microbatch_loss, microbatch))
                # One copy from the device, which waits for it.
                values.append(losses.detach().tolist())
                # The gradients become the mean over the ranks, so each rank's loss is multiplied by their number.
                loss = losses.sum() / total * self.ranks.size
                if not is_last:
                    loss.backward()
        return values, loss

    def microbatch_loss(self, microbatch: Microbatch) -> torch.Tensor:
        """Return the losses [B] of a microbatch. The losses of a filler are zeros, but with gradients."""
        settings, batch, draw = self.settings, microbatch.batch, microbatch.draw
        if settings.loss.kind == CONSISTENCY:
            guidance = training_guidance(draw.choices)
            point, prompt, weight = self.on_trajectory(batch, draw.noise, draw.times, guidance)
            warmup = settings.loss.tangent_warmup
            ramp = min(1.0, self.progress.step / warmup) if warmup else 1.0
            losses = consistency_loss(self.transformer, point, prompt, ramp, weight)
        else:
            sigma = training_sigmas(draw.times, self.shift, settings.loss).float().to(self.device)
            losses = self.batch_loss(batch, draw.noise, sigma)
        losses = losses * microbatch.weights.to(losses)
        return losses * 0 if microbatch.is_filler else losses

    def batch_loss(self, batch: Batch, noise: torch.Tensor, sigma: torch.Tensor) -> torch.Tensor:
        """Return the loss of flow matching [B] of a batch, in float32 on the model's device."""
        device, compute = self.device, getattr(torch, self.settings.dtype)
        weight = None if batch.weight is None else batch.weight.to(device)
        control = None
        if self.controlnet is not None and batch.control is not None:
            control = Control(self.controlnet, batch.control)
        x0, noise, mask = batch.latents.to(device), noise.to(device), batch.mask.to(device)
        # Each weight is used once, so a cache of the cast weights would only be a second model in memory.
        with torch.autocast(device.type, compute, enabled=self.settings.uses_autocast, cache_enabled=False):
            embeds = batch.embeds.to(device, compute)
            if self.is_compiled:
                # Another number of tokens would be compiled again.
                missing = MAX_TOKENS - embeds.shape[1]
                embeds, mask = F.pad(embeds, (0, 0, 0, missing)), F.pad(mask, (0, missing))
            return flow_loss(self.transformer, x0, (embeds, mask), noise, sigma, weight, control)

    def on_trajectory(
        self, batch: Batch, noise: torch.Tensor, times: torch.Tensor, guidance: torch.Tensor
    ) -> tuple[Point, Prompt, torch.Tensor | None]:
        """Return the inputs of the consistency loss on the model's device.

        They are the points of `batch` on their trajectories at the uniform `times` [B], the prompts, and the weights of
        the masks.
        """
        device, compute = self.device, getattr(torch, self.settings.dtype)
        prompt = Prompt(batch.embeds.to(device, compute), batch.mask.to(device), guidance.to(device))
        angle = training_angles(times).float().to(device)
        point = data_point(batch.latents.to(device), noise.to(device), angle)
        return point, prompt, None if batch.weight is None else batch.weight.to(device)

    def apply_gradients(self, rate: float) -> None:
        """Take the optimizer's step at the learning rate `rate`, and update the average."""
        settings, step = self.settings, self.progress.step
        optimizers.set_learning_rate(self.optimizer, rate)
        # With offloading the trained rows are on the CPU, not on `self.device`.
        device = next(iter(self.parameters.values())).device
        optimizers.step_optimizer(self.optimizer, torch.Generator(device).manual_seed(settings.seed + step))
        self.optimizer.zero_grad()
        if self.average is not None:
            optimizers.update_average(
                self.average, self.parameters, optimizers.average_decay(settings.optimizer.ema, step)
            )

    # The result

    def finish(self) -> Path:
        """Report the best validation of the last phase. Returns the path of the result on all ranks."""
        best = self.best if self.best is not None and self.best.phase == self.progress.phase else None
        path = self.ranks.broadcast(self.ranks.run_on_rank0(lambda: self.publish_result(best)))
        assert path is not None
        return path

    def publish_result(self, best: Best | None) -> Path:
        """Copy the LoRAs of the `best` and the last step into the run's folder. Whole weights stay in their state."""
        if best is not None:
            self.report({"step": best.step, "validation_loss": best.loss, "first": best.first})
        last = states.step_folder(self.out, self.progress.step)
        chosen = last if best is None else states.step_folder(self.out, best.step)
        if not self.settings.method.is_adapter:
            states.note_published(self.out, self.parts, chosen)
            return chosen / self.weights_folder
        if best is not None:
            states.publish(self.out, self.parts, self.last_adapter_file, last)
        return states.publish(self.out, self.parts, self.adapter_file, chosen)


def check_base(settings: TrainingSettings) -> float:
    """Check that model, loss and method fit together. Reads only headers. Returns the shift of the model's schedule."""
    module: Any = build_module(find_part(inspect_checkpoint(settings.model), "transformer"))
    if edits_images(module.config):
        raise InputError("model: got VIBE, which training does not run, expected a SANA model; train SANA-1.5")
    for kind in ("text_encoder", "autoencoder"):
        find_part(inspect_checkpoint(settings.source(kind)), kind)
    if settings.loss.kind == FLOW and module.config.guidance_embeds:
        raise InputError(
            "model: got a SANA-Sprint model, which this loss would undo; train the SANA it came from, or in a "
            "settings file set loss.kind to consistency"
        )
    if settings.loss.kind != FLOW and not module.config.guidance_embeds:
        raise InputError(
            "model: got one that is not SANA-Sprint with loss consistency, expected SANA-Sprint; set loss.kind to flow"
        )
    if settings.method.kind == "controlnet":
        trained_model.check_steerable(module.config, settings.method.blocks)
    if settings.method.is_adapter:
        trained_model.check_layers(dict(module.named_modules()), settings.method)
    if needs_start(settings):
        trained_model.add_adapter(module, settings.method, settings.seed)
        trained_model.load_start(module, settings.method)
    return shift_of(find_part(inspect_checkpoint(settings.model), "transformer"), None, settings.reference)


def check_apple(settings: TrainingSettings) -> None:
    dropout = settings.method.dropout
    if dropout and settings.checkpoint_gradients:
        # torch.utils.checkpoint restores the random state only if the device's module has `_initialized`. torch.mps
        # does not have it, so the backward would belong to a forward with another dropout.
        raise InputError(
            f"dropout: got {dropout} with checkpoint_gradients on Apple's GPU, where torch repeats a block with other "
            "random values, expected 0; set it so, or checkpoint_gradients to false"
        )
    if settings.loss.kind == CONSISTENCY:
        # Apple's linear layer and attention are operations of their own, without a forward-mode derivative.
        raise InputError(
            "loss: got consistency on Apple's GPU, where torch has no forward-mode derivative of linear layers, "
            "expected flow; set device to cpu"
        )


def needs_start(settings: TrainingSettings) -> bool:
    """Whether a run begins with the file `method.start`. A run with a saved state resumes without it."""
    return bool(settings.method.start) and not states.find_states(Path(settings.out))


def describe_config(settings: TrainingSettings) -> Json:
    """Return the settings that states depend on and that no phase may change. The model's digest is added later."""
    method = settings.method
    config: Json = {"seed": settings.seed, "dtype": settings.dtype}
    config |= {"reference": settings.reference, "optimizer": settings.optimizer.name}
    config |= {"ema": bool(settings.optimizer.ema), "method": method.kind}
    if optimizers.OPTIMIZERS[settings.optimizer.name].finds_rate:
        config["d0"] = settings.optimizer.d0
    if method.base != "full":
        config["base"] = method.base
    if settings.loss.kind != FLOW:
        config["loss"] = settings.loss.kind
    if method.start:
        run = states.read_run(Path(settings.out)).config or {}
        if "start" in run and not Path(method.start).exists():
            # A run with a saved state resumes without the file.
            config["start"] = run["start"]
        else:
            config["start"] = digest_of(read_range(FileRange(Path(method.start)), method.start))
    if method.kind == "controlnet":
        config["blocks"] = method.blocks
    elif method.kind != "full":
        # A state contains unscaled weights, so alpha must not change. alpha = rank is the same as no alpha.
        alpha = None if method.scale == 1.0 else method.alpha
        config |= {"rank": method.rank, "alpha": alpha, "targets": method.targets}
        if method.layers:
            config["layers"] = list(method.layers)
    return config
