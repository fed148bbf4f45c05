"""What is trained, and one step of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ..errors import SanaError, TrainingError
from ..model.controlnet import Control
from ..model.forward import allow_no_float64
from ..model.known_models import GUIDANCE
from ..model.reference import reference_of
from ..runtime.accelerator import current_device
from ..runtime.cancellation import Poll
from .adapters import add_adapter, begin_at, needs_start, without_dropout
from .cache import Batch, Stream
from .came import CAME
from .controlnet import begin_controlnet
from .dataset import Faults, is_unreadable, warn_of_skipped
from .loss import (
    DROPOUT,
    Point,
    Prompt,
    consistency_error,
    consistency_loss,
    data_point,
    draw_training,
    drop_captions,
    flow_loss,
    generator,
    training_angles,
    training_guidance,
    training_sigmas,
    validation_noise,
    validation_times,
)
from .optimizers import (
    average_decay,
    averaged_weights,
    make_optimizer,
    set_learning_rate,
    start_average,
    step_optimizer,
    update_average,
    validation_weights,
)
from .parallel import DDP
from .quantised_base import quantise_base
from .ranks import ALONE, Ranks
from .schedule import Data, TrainProgress
from .settings import CONSISTENCY, TrainingSettings
from .sharding import Layout, gather, lay_out, local_parameters

if TYPE_CHECKING:
    from diffusers import SanaControlNetModel, SanaTransformer2DModel


# times at which each held-out image is looked at
VALIDATION_TIMES = 8

# indices of samples of one shape, and whether they count; they do not where a rank only keeps the others company
Microbatch = tuple[list[int], bool]


class Piece(NamedTuple):
    """A microbatch whose images have been read."""

    indices: list[int]
    counts: bool
    batch: Batch


class TrainState(NamedTuple):
    """A transformer, or a ControlNet that steers it, of which `parameters` are trained, by name; the rest is frozen.

    Of a model whose `layout` has shards, parameters, optimizer and average are the rows of this rank.
    """

    transformer: SanaTransformer2DModel
    shift: float
    settings: TrainingSettings
    parameters: dict[str, torch.nn.Parameter]
    optimizer: torch.optim.Optimizer
    average: dict[str, torch.Tensor] | None  # of the parameters, by name, in float32
    controlnet: SanaControlNetModel | None = None
    layout: Layout = Layout()

    @property
    def ranks(self) -> Ranks:
        return self.layout.ranks

    @property
    def device(self) -> torch.device:
        """Where it computes; rows that are offloaded lie elsewhere."""
        return self.ranks.device or next(self.transformer.parameters()).device


def make_train_state(
    transformer: SanaTransformer2DModel,
    shift: float,
    settings: TrainingSettings,
    device: torch.device | None = None,
    ranks: Ranks = ALONE,
) -> TrainState:
    """Return `transformer`, ready to be trained by `settings.method`, on its device, or on `device`.

    Where a launcher has started `ranks`, they hold it as `settings.parallel` says. Raises VersionError for a library
    that is not installed or too old, and as `begin_at` and `shard` do.
    """
    method, controlnet = settings.method, None
    if method.kind == "full":
        transformer.requires_grad_(True)
    elif method.kind == "controlnet":
        controlnet = begin_controlnet(transformer, method.blocks, getattr(torch, method.weights))
    else:
        add_adapter(transformer, method, settings.seed)
        if needs_start(settings):
            begin_at(transformer, method)
        if method.base != "full":
            quantise_base(transformer)
    sharded = ranks.launched and settings.parallel.kind != DDP
    models = [transformer] if controlnet is None else [transformer, controlnet]
    if device is not None and not sharded:
        for model in models:
            model.to(device)
    if settings.checkpoint_gradients:
        for model in models:
            model.enable_gradient_checkpointing()
    for model in models:
        allow_no_float64(model, ranks.device or device or transformer.device)
    # Shards go to the device block by block. Only one block at a time is whole there.
    layout = lay_out(models, settings, ranks)
    parameters = {name: each for name, each in models[-1].named_parameters() if each.requires_grad}
    if layout.shards is not None:
        parameters = local_parameters(layout)
    own = settings.optimizer
    optimizer = make_optimizer(own.name, list(parameters.values()), 0.0, own.weight_decay, d0=own.d0, d_coef=own.d_coef)
    if layout.shards is not None and isinstance(optimizer, CAME):
        optimizer.total = ranks.all_reduce
    average = start_average(parameters) if own.ema else None
    return TrainState(transformer, shift, settings, parameters, optimizer, average, controlnet, layout)


@contextmanager
def averaged(state: TrainState) -> Iterator[None]:
    """Let `state` have the weights that are looked at and saved: the moving average, where there is one."""
    with validation_weights(state.optimizer), without_dropout(state.transformer):
        if state.average is None:
            yield
        else:
            with averaged_weights(state.parameters, state.average):
                yield


def warm_up_ddp_buckets(state: TrainState, data: Data, group: Sequence[Sequence[int]], progress: TrainProgress) -> None:
    """Compute gradients as `take_step` would, and throw them away.

    After its first backward DDP puts the gradients into other buckets, and where one lies decides in which order ranks
    add it up. So a run that resumes has to have that behind it, to be to the bit the run that never stopped.
    """
    if state.layout.replica is not None:
        pieces, _ = load_step(state, data, group)
        with state.layout.backward(last=True) as compute:
            compute(lambda: piece_loss(state, data, pieces[0], progress)).sum().backward()
        state.optimizer.zero_grad()


def take_step(
    state: TrainState, data: Data, group: Sequence[Sequence[int]], progress: TrainProgress, rate: float
) -> tuple[float, float]:
    """Learn a `group` of batches, of indices of `data`, in one step at the learning rate `rate`.

    Returns the mean loss and the norm of the gradients. Noise and time of an image depend on the run's seed, its
    progress among phases and epochs, and the image, so they are the same wherever it is learned. However the images
    are divided into batches, each counts the same.
    """
    mean, norm = compute_gradients(state, data, group, progress)
    apply_gradients(state, progress, rate)
    return mean, norm


def compute_gradients(
    state: TrainState, data: Data, group: Sequence[Sequence[int]], progress: TrainProgress
) -> tuple[float, float]:
    """Compute the gradients of a step and clip them. Returns the mean loss and the norm of the gradients.

    Changes no weights, so that the steps before can be saved when it fails. All ranks know the errors of loading,
    losses and gradients that are not finite, and under DDP the errors before the last backward. A rank that fails
    alone in a part with collectives cannot reach the others, which wait for it inside one. Raises TrainingError for a
    loss or a gradient that is not finite, and the errors of `load_step`.
    """
    ranks = state.ranks
    pieces, total = load_step(state, data, group)
    # A list, which the last backward empties, because a variable would keep the graph.
    last_loss: list[torch.Tensor] = []

    def begin() -> tuple[float, TrainingError | None]:
        return begin_gradients(state, data, pieces, total, progress, last_loss)

    # FSDP gathers weights in each forward. DDP sums gradients in the last backward only.
    mean, fault = ranks.run_on_all(begin) if state.layout.shards is None else begin()
    last_loss.pop().backward()
    mean, faults = ranks.total(mean, float(fault is not None))
    norm = state.layout.clip(state.parameters, state.settings.optimizer.clip)

    def check() -> None:
        if fault is not None:
            raise fault
        if not faults and not norm < float("inf"):
            names = ", ".join(name for piece in pieces for name in piece.batch.names[:2])
            raise TrainingError(
                f"training: in step {progress.step} the gradients of {names:.120} are not finite; lower learning_rate"
            )

    ranks.run_on_all(check)
    return mean, norm


def apply_gradients(state: TrainState, progress: TrainProgress, rate: float) -> None:
    """Let the optimizer take the step of `compute_gradients` at the learning rate `rate`."""
    settings = state.settings
    set_learning_rate(state.optimizer, rate)
    device = next(iter(state.parameters.values())).device
    step_optimizer(state.optimizer, torch.Generator(device).manual_seed(settings.seed + progress.step))
    state.optimizer.zero_grad()
    if state.average is not None:
        decay = average_decay(settings.optimizer.ema, progress.step)
        update_average(state.average, state.parameters, decay)


def load_step(state: TrainState, data: Data, group: Sequence[Sequence[int]]) -> tuple[list[Piece], int]:
    """Return this rank's pieces of a step, and the number of images that all ranks learn in it.

    A streamed run reads its images here. With `skip_broken` it leaves out the images that cannot be read. Otherwise,
    and where nothing is left to learn, it raises on all ranks an error that names every broken image of the step.
    """
    ranks, cache = state.ranks, data.cache
    microbatches_here = microbatches(group, ranks.rank, ranks.size)
    total = sum(map(len, group))
    if not isinstance(cache, Stream):
        return ranks.run_on_all(lambda: [Piece(*each, cache.load(each[0])) for each in microbatches_here]), total
    skip = state.settings.skip_broken
    broken: dict[int, SanaError] = {}

    def read() -> list[Piece]:
        pieces = []
        for indices, counts in microbatches_here:
            readable, batch = cache.load_readable(indices, broken, skip)
            pieces.append(Piece(readable, counts, batch) if readable else Piece(indices[:1], False, batch))
        return pieces

    pieces = ranks.run_on_all(read)
    broken = {index: fault for faults in ranks.all_gather(broken) for index, fault in faults.items()}
    total -= len(broken)

    def check_broken() -> None:
        faults = [broken[index] for index in sorted(broken)]
        if faults and skip and total and all(map(is_unreadable, faults)):
            if ranks.first:
                warn_of_skipped(faults)
        else:
            Faults(faults).check()

    ranks.run_on_all(check_broken)
    return pieces, total


def begin_gradients(
    state: TrainState,
    data: Data,
    pieces: Sequence[Piece],
    total: int,
    progress: TrainProgress,
    last_loss: list[torch.Tensor],
) -> tuple[float, TrainingError | None]:
    """Compute the gradients of a step except for the last backward, whose loss is put into `last_loss`.

    `total` is the number of images of all ranks. Returns this rank's part of the mean loss, and an error that names the
    first image whose loss is not finite.
    """
    mean, fault = 0.0, None
    for number, piece in enumerate(pieces, 1):
        last = number == len(pieces)
        dropping = seeded_dropout(state, (progress.step, number, state.ranks.rank))
        with dropping, state.layout.backward(last) as compute:
            losses = compute(lambda piece=piece: piece_loss(state, data, piece, progress))  # type: ignore[misc]
            fault = fault or find_fault(losses, piece.batch, progress)
            # the ranks' gradients become their mean
            loss = losses.sum() / total * state.ranks.size
            if last:
                last_loss.append(loss)
            else:
                loss.backward()
        mean += float(losses.detach().sum()) / total
    return mean, fault


def drop_step(state: TrainState) -> None:
    """Free the memory that a failed step still takes: its gradients, and under FSDP the gathered weights."""
    state.optimizer.zero_grad()
    if state.layout.shards is not None:
        state.layout.shards.drop_step()


@contextmanager
def seeded_dropout(state: TrainState, key: Sequence[int]) -> Iterator[None]:
    """Let what an adapter drops depend on the run's seed and `key` alone, and torch's generators stay as they are."""
    device = state.device
    seed = int(generator(DROPOUT, (state.settings.seed, *key)).integers(2**63))
    with torch.random.fork_rng([] if device.type == "cpu" else [device], device_type=device.type):
        # torch.manual_seed would seed the generators of all GPUs, of which only this one's is restored.
        if device.type == "cpu":
            torch.default_generator.manual_seed(seed)
        else:
            with current_device(device):
                torch.get_device_module(device).manual_seed(seed)
        yield


def piece_loss(state: TrainState, data: Data, piece: Piece, progress: TrainProgress) -> torch.Tensor:
    """Return the losses [B] of a piece of a step, zeros with gradients for one that does not count."""
    indices, counts, batch = piece
    settings = state.settings
    keys = [(settings.seed, progress.phase, progress.epoch, index) for index in indices]
    draw = draw_training(batch.latents.shape[1:], keys, settings.caption_dropout)
    shared = reference_of(state.transformer).shared_mask
    embeds, mask = drop_captions(batch.embeds, batch.mask, draw.dropped, data.cache.empty, shared)
    batch = batch._replace(embeds=embeds, mask=mask)
    if settings.loss.kind == CONSISTENCY:
        guidance = training_guidance(draw.choices)
        point, prompt, weight = on_trajectory(state, data, batch, draw.noise, draw.times, guidance)
        losses = consistency_loss(state.transformer, point, prompt, tangent_ramp(settings, progress), weight)
    else:
        sigma = training_sigmas(draw.times, state.shift, settings.loss).float().to(state.device)
        losses = batch_loss(state, batch, draw.noise, sigma)
    losses = losses * torch.tensor([data.samples[index].weight for index in indices]).to(losses)
    return losses if counts else losses * 0


def batch_loss(state: TrainState, batch: Batch, noise: torch.Tensor, sigma: torch.Tensor) -> torch.Tensor:
    """Return the loss of flow matching [B] of a batch, in float32 on the model's device."""
    device = state.device
    settings = state.settings
    compute = getattr(torch, settings.dtype)
    mixed = settings.method.whole and settings.method.weights != settings.dtype
    weight = None if batch.weight is None else batch.weight.to(device)
    control = None
    if state.controlnet is not None and batch.control is not None:
        control = Control(state.controlnet, batch.control)
    x0, noise, mask = batch.latents.to(device), noise.to(device), batch.mask.to(device)
    # each weight is used once, so that a cache of what is cast would only hold a second model
    with torch.autocast(device.type, compute, enabled=mixed, cache_enabled=False):
        embeds = batch.embeds.to(device, compute)
        return flow_loss(state.transformer, x0, (embeds, mask), noise, sigma, weight, control)


def on_trajectory(
    state: TrainState, data: Data, batch: Batch, noise: torch.Tensor, times: torch.Tensor, guidance: torch.Tensor
) -> tuple[Point, Prompt, torch.Tensor | None]:
    """Return what the consistency loss takes besides the model, on its device: where `batch` is on its trajectories at
    the uniform `times` [B], its prompts, and the weight of its masks.
    """
    device, compute = state.device, getattr(torch, state.settings.dtype)
    prompt = Prompt(batch.embeds.to(device, compute), batch.mask.to(device), guidance.to(device))
    angle = training_angles(times).float().to(device)
    point = data_point(batch.latents.to(device), noise.to(device), angle)
    return point, prompt, None if batch.weight is None else batch.weight.to(device)


def tangent_ramp(settings: TrainingSettings, progress: TrainProgress) -> float:
    """Return the share of the tangent at `progress` that has still to be warmed up to."""
    return min(1.0, progress.step / settings.loss.tangent_warmup) if settings.loss.tangent_warmup else 1.0


def find_fault(losses: torch.Tensor, batch: Batch, progress: TrainProgress) -> TrainingError | None:
    """Return an error that names the step and the first image whose loss is not finite, None if all losses are."""
    finite = losses.detach().isfinite().tolist()
    if all(finite):
        return None
    name = batch.names[finite.index(False)]
    return TrainingError(
        f"training: in step {progress.step} the loss of {name} is not finite; lower learning_rate, or remove it"
    )


@torch.no_grad()
def validation_loss(state: TrainState, data: Data, poll: Poll) -> float:
    """Return the mean loss over the images of `data` that are held out, of the consistency loss the error instead.

    Each is looked at with one noise at VALIDATION_TIMES times, the same ones in every validation.
    """
    ranks, held_out = state.ranks, data.held_out
    total = 0.0
    # each rank looks at its share, and as often as the others, whose shards it takes to look
    for number in range(ranks.rank, -(-len(held_out) // ranks.size) * ranks.size, ranks.size):
        index, counts = held_out[number % len(held_out)], number < len(held_out)
        batch = ranks.run_on_all(partial(data.cache.load, [index]))
        noise = validation_noise(batch.latents.shape[1:], (state.settings.seed, index))[None]
        for time in validation_times(VALIDATION_TIMES):
            poll()
            compute = partial(image_loss, state, data, batch, noise, time[None])
            # Only FSDP talks to other ranks in a forward.
            loss = ranks.run_on_all(compute) if state.layout.shards is None else compute()
            total += loss if counts else 0.0
    return ranks.total(total)[0] / (len(held_out) * VALIDATION_TIMES)


def image_loss(state: TrainState, data: Data, batch: Batch, noise: torch.Tensor, time: torch.Tensor) -> float:
    """Return what `validation_loss` is the mean of."""
    if state.settings.loss.kind == CONSISTENCY:
        point, prompt, weight = on_trajectory(state, data, batch, noise, time, torch.tensor([GUIDANCE]))
        return float(consistency_error(state.transformer, point, prompt, weight).sum())
    sigma = training_sigmas(time, state.shift).float().to(state.device)
    return float(batch_loss(state, batch, noise, sigma).sum())


def gather_weights(state: TrainState, device: torch.device, trained_alone: bool) -> TrainState | None:
    """Return `state` with all its weights on `device`, or with those that are trained alone, to be saved or generated
    with; None on all ranks but the first. All have to call this.

    Whole weights in shards are gathered in the dtype in which they are saved; adapters are scaled before that.
    """
    first, shards, settings = state.ranks.first, state.layout.shards, state.settings
    if shards is None:
        return state if first else None
    dtype = getattr(torch, settings.dtype) if settings.method.whole else None
    found: Any = gather(shards, device, dtype, first, trained_alone)
    if found is None:
        return None
    parameters = {name: each for name, each in found[-1].named_parameters() if each.requires_grad}
    controlnet = found[1] if len(found) > 1 else None
    # it keeps the optimizer of the rows, for nothing learns any more
    return TrainState(found[0], state.shift, settings, parameters, state.optimizer, None, controlnet)


def microbatches(group: Sequence[Sequence[int]], rank: int, count: int) -> list[Microbatch]:
    """Return what the rank of that number learns of the batches of a step, in as many pieces as all others.

    A rank that has fewer would leave the others waiting for its gradients. Whole batches are dealt out, or where there
    are fewer than ranks, parts of each. Where some are left over, idle ranks run a dummy batch of zero loss.
    """
    pieces = list(group)
    if len(group) < count:
        parts = -(-count // len(group))
        pieces = [piece for batch in group for piece in divide(batch, parts)]
    rounds = -(-len(pieces) // count)
    own = [(list(piece), True) for piece in pieces[rank::count]]
    return own + [(list(pieces[0][:1]), False)] * (rounds - len(own))


def divide(batch: Sequence[int], parts: int) -> list[Sequence[int]]:
    """Return `batch` in at most so many parts, of which none is more than one longer than another."""
    parts = min(parts, len(batch))
    bounds = [number * len(batch) // parts for number in range(parts + 1)]
    return [batch[start:end] for start, end in zip(bounds, bounds[1:], strict=False)]
