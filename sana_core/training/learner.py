"""What is trained, and one step of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ..errors import CheckpointError, TrainingError
from ..model.controlnet import Control
from ..model.known_models import GUIDANCE
from ..model.reference import reference_of
from ..runtime.cancellation import Poll
from .adapters import add_adapter, begin_at, needs_start, without_dropout
from .cache import Batch
from .came import CAME
from .controlnet import begin_controlnet
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
    taught,
    training_angles,
    training_guidance,
    training_sigmas,
    validation_noise,
    validation_times,
)
from .optimizer_state import optimizer_state, restore_optimizer
from .optimizers import (
    average_decay,
    averaged_weights,
    make_optimizer,
    restore_average,
    set_learning_rate,
    start_average,
    step_optimizer,
    update_average,
    validation_weights,
)
from .quantised_base import quantise_base
from .ranks import ALONE, Ranks
from .schedule import Data, Place
from .settings import CONSISTENCY, DDP, Settings
from .sharding import Shards, clip_sharded, gather, local_parameters, replicate, shard, take_gradients

if TYPE_CHECKING:
    from diffusers import SanaControlNetModel, SanaTransformer2DModel

# times at which each held-out picture is looked at
VALIDATION_TIMES = 8
# indices of samples of one shape, and whether they count; they do not where a rank only keeps the others company
Piece = tuple[list[int], bool]


class Learner(NamedTuple):
    """A transformer, or a ControlNet that steers it, of which `parameters` are trained, by name; the rest is frozen.

    Of a model that lies in `shards`, parameters, optimizer and average are the rows of this rank. `replica` is what
    sums gradients where each rank has all of it.
    """

    transformer: SanaTransformer2DModel
    shift: float
    settings: Settings
    parameters: dict[str, torch.nn.Parameter]
    optimizer: torch.optim.Optimizer
    average: dict[str, torch.Tensor] | None  # of the parameters, by name, in float32
    controlnet: SanaControlNetModel | None = None
    teacher: SanaTransformer2DModel | None = None  # of the consistency loss
    ranks: Ranks = ALONE
    replica: torch.nn.Module | None = None
    shards: Shards | None = None

    @property
    def device(self) -> torch.device:
        """Where it computes; rows that are offloaded lie elsewhere."""
        return self.ranks.device or self.transformer.device


def make_learner(
    transformer: SanaTransformer2DModel,
    shift: float,
    settings: Settings,
    device: torch.device | None = None,
    ranks: Ranks = ALONE,
) -> Learner:
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
    if device is not None and not sharded:
        transformer.to(device)
    models = [transformer] if controlnet is None else [transformer, controlnet]
    if settings.checkpoint_gradients:
        for model in models:
            model.enable_gradient_checkpointing()
    # of the whole model no more than a block is on the device at once while it is put into rows
    shards = shard(models, settings, ranks) if sharded else None
    replica = replicate(models[-1]) if ranks.launched and not sharded else None
    parameters = {name: each for name, each in models[-1].named_parameters() if each.requires_grad}
    if shards is not None:
        parameters = local_parameters(shards)
    own = settings.optimizer
    optimizer = make_optimizer(own.name, list(parameters.values()), 0.0, own.weight_decay, d0=own.d0, d_coef=own.d_coef)
    if shards is not None and isinstance(optimizer, CAME):
        optimizer.total = ranks.sum_
    average = start_average(parameters) if own.ema else None
    made = Learner(transformer, shift, settings, parameters, optimizer, average, controlnet)
    return made._replace(ranks=ranks, replica=replica, shards=shards)


def tensors_of(learner: Learner) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Return all that a state needs of `learner`: tensors by name, and values for JSON."""
    state, values = optimizer_state(learner.optimizer)
    tensors = {f"parameter.{name}": parameter.detach() for name, parameter in learner.parameters.items()}
    tensors.update({f"optimizer.{name}": tensor for name, tensor in state.items()})
    tensors.update({f"average.{name}": tensor for name, tensor in (learner.average or {}).items()})
    return tensors, values


def restore(learner: Learner, tensors: dict[str, torch.Tensor], values: dict[str, Any], name: str) -> None:
    """Give `learner` what `tensors_of` returned; `name` is the state's. Raises CheckpointError for another model's."""

    def group(prefix: str) -> dict[str, torch.Tensor]:
        return {key.removeprefix(prefix): each for key, each in tensors.items() if key.startswith(prefix)}

    stored = group("parameter.")
    for key, parameter in learner.parameters.items():
        if key not in stored or stored[key].shape != parameter.shape:
            raise CheckpointError(f"{name}: {key} is missing or of another shape; remove that folder, or name another")
        with torch.no_grad():
            parameter.copy_(stored[key])
    restore_optimizer(learner.optimizer, group("optimizer."), values)
    if learner.average is not None:
        restore_average(learner.average, group("average."))


@contextmanager
def averaged(learner: Learner) -> Iterator[None]:
    """Let `learner` have the weights that are looked at and saved: the moving average, where there is one."""
    with validation_weights(learner.optimizer), without_dropout(learner.transformer):
        if learner.average is None:
            yield
        else:
            with averaged_weights(learner.parameters, learner.average):
                yield


def arrange_sums(learner: Learner, data: Data, group: Sequence[Sequence[int]], place: Place) -> None:
    """Compute gradients as `take_step` would, and throw them away.

    After its first backward DDP puts the gradients into other buckets, and where one lies decides in which order ranks
    add it up. So a run that goes on has to have that behind it, to be to the bit the run that never stopped.
    """
    if learner.replica is not None:
        piece = share_step(group, learner.ranks.rank, learner.ranks.size)[0]
        with one_backward(learner, last=True) as compute:
            compute(lambda: piece_loss(learner, data, piece, place)).sum().backward()
        learner.optimizer.zero_grad()


def take_step(
    learner: Learner, data: Data, group: Sequence[Sequence[int]], place: Place, rate: float
) -> tuple[float, float]:
    """Learn a `group` of batches, of indices of `data`, in one step at the learning rate `rate`.

    Returns the mean loss and the norm of the gradients. Noise and time of a picture depend on the run's seed, its place
    among phases and epochs, and the picture, so they are the same wherever it is learnt. However the pictures are
    divided into batches, each counts the same. Raises TrainingError, before anything has changed, when a loss or a
    gradient is not finite.
    """
    settings, ranks = learner.settings, learner.ranks
    total = sum(map(len, group))
    mean = 0.0
    pieces = share_step(group, ranks.rank, ranks.size)
    for number, piece in enumerate(pieces, 1):
        dropping = seeded_dropout(learner, (place.step, number, ranks.rank))
        with dropping, one_backward(learner, last=number == len(pieces)) as compute:
            losses = compute(lambda piece=piece: piece_loss(learner, data, piece, place))  # type: ignore[misc]
            # the ranks' gradients become their mean
            (losses.sum() / total * ranks.size).backward()
        mean += float(losses.detach().sum()) / total
    (mean,) = ranks.total(mean)
    norm = clip_gradients(learner)
    if not norm < float("inf"):
        names = ", ".join(data.samples[index].name for indices, _ in pieces for index in indices[:2])
        raise TrainingError(
            f"training: in step {place.step} the gradients of {names:.120} are not finite; lower learning_rate"
        )
    set_learning_rate(learner.optimizer, rate)
    device = next(iter(learner.parameters.values())).device
    step_optimizer(learner.optimizer, torch.Generator(device).manual_seed(settings.seed + place.step))
    learner.optimizer.zero_grad()
    if learner.average is not None:
        decay = average_decay(settings.optimizer.ema, place.step)
        update_average(learner.average, learner.parameters, decay)
    return mean, norm


@contextmanager
def seeded_dropout(learner: Learner, key: Sequence[int]) -> Iterator[None]:
    """Let what an adapter drops depend on the run's seed and `key` alone, and torch's generators stay as they are."""
    device = learner.device
    with torch.random.fork_rng([] if device.type == "cpu" else [device], device_type=device.type):
        torch.manual_seed(int(generator(DROPOUT, (learner.settings.seed, *key)).integers(2**63)))
        yield


@contextmanager
def one_backward(learner: Learner, last: bool) -> Iterator[Callable[[Callable[[], torch.Tensor]], torch.Tensor]]:
    """Give what computes a loss; its backward is in this context, the `last` one of a step sums whole gradients."""
    replica: Any = learner.replica
    if replica is None:
        # the gradients of shards are summed in each, for a sum of whole ones would take the memory of the model
        yield lambda compute: compute()
        return
    with nullcontext() if last else replica.no_sync():
        yield replica


def piece_loss(learner: Learner, data: Data, piece: Piece, place: Place) -> torch.Tensor:
    """Return the losses [B] of a piece of a step, zeros with gradients for one that does not count."""
    indices, counts = piece
    settings = learner.settings
    batch = data.cache.load(indices)
    keys = [(settings.seed, place.phase, place.epoch, index) for index in indices]
    draw = draw_training(batch.latents.shape[1:], keys, settings.caption_dropout)
    shared = reference_of(learner.transformer).shared_mask
    embeds, mask = drop_captions(batch.embeds, batch.mask, draw.dropped, data.cache.empty, shared)
    batch = batch._replace(embeds=embeds, mask=mask)
    if settings.loss.kind == CONSISTENCY:
        guidance = training_guidance(draw.choices)
        point, prompt, weight = on_trajectory(learner, data, batch, draw.noise, draw.times, guidance)
        losses = consistency_loss(learner.transformer, point, prompt, tangent_ramp(settings, place), weight)
    else:
        sigma = training_sigmas(draw.times, learner.shift, settings.loss).float().to(learner.device)
        losses = batch_loss(learner, batch, draw.noise, sigma)
    check_losses(losses, batch, place)
    losses = losses * torch.tensor([data.samples[index].weight for index in indices]).to(losses)
    return losses if counts else losses * 0


def clip_gradients(learner: Learner) -> float:
    """Bound the norm of all gradients together, and return what it was; those of shards are moved to their rows."""
    limit = learner.settings.optimizer.clip
    if learner.shards is None:
        return float(torch.nn.utils.clip_grad_norm_(list(learner.parameters.values()), limit))
    take_gradients(learner.shards, learner.parameters)
    return clip_sharded(learner.parameters, limit, learner.ranks, learner.settings.parallel.replicas)


def batch_loss(learner: Learner, batch: Batch, noise: torch.Tensor, sigma: torch.Tensor) -> torch.Tensor:
    """Return the loss of flow matching [B] of a batch, in float32 on the model's device."""
    device = learner.device
    settings = learner.settings
    compute = getattr(torch, settings.dtype)
    mixed = settings.method.whole and settings.method.weights != settings.dtype
    weight = None if batch.weight is None else batch.weight.to(device)
    control = None
    if learner.controlnet is not None and batch.control is not None:
        control = Control(learner.controlnet, batch.control)
    x0, noise, mask = batch.latents.to(device), noise.to(device), batch.mask.to(device)
    # each weight is used once, so that a cache of what is cast would only hold a second model
    with torch.autocast(device.type, compute, enabled=mixed, cache_enabled=False):
        embeds = batch.embeds.to(device, compute)
        return flow_loss(learner.transformer, x0, embeds, mask, noise, sigma, weight, control)


def on_trajectory(
    learner: Learner, data: Data, batch: Batch, noise: torch.Tensor, times: torch.Tensor, guidance: torch.Tensor
) -> tuple[Point, Prompt, torch.Tensor | None]:
    """Return what the consistency loss takes besides the model, on its device: where `batch` is on its trajectories at
    the uniform `times` [B], with the teacher's velocity where there is one, its prompts, and the weight of its masks.
    """
    device, compute = learner.device, getattr(torch, learner.settings.dtype)
    prompt = Prompt(batch.embeds.to(device, compute), batch.mask.to(device), guidance.to(device))
    angle = training_angles(times).float().to(device)
    point = data_point(batch.latents.to(device), noise.to(device), angle)
    if learner.teacher is not None:
        point = taught(point, learner.teacher, prompt, data.cache.empty)
    return point, prompt, None if batch.weight is None else batch.weight.to(device)


def tangent_ramp(settings: Settings, place: Place) -> float:
    """Return the share of the tangent at `place` that has still to be warmed up to."""
    return min(1.0, place.step / settings.loss.tangent_warmup) if settings.loss.tangent_warmup else 1.0


def check_losses(losses: torch.Tensor, batch: Batch, place: Place) -> None:
    """Raise TrainingError that names the step and the first picture whose loss is not finite."""
    finite = losses.detach().isfinite().tolist()
    if not all(finite):
        name = batch.names[finite.index(False)]
        raise TrainingError(
            f"training: in step {place.step} the loss of {name} is not finite; lower learning_rate, or remove it"
        )


@torch.no_grad()
def validation_loss(learner: Learner, data: Data, poll: Poll) -> float:
    """Return the mean loss over the pictures of `data` that are held out, of the consistency loss the error instead.

    Each is looked at with one noise at VALIDATION_TIMES times, the same ones in every validation.
    """
    ranks, held_out = learner.ranks, data.held_out
    total = 0.0
    # each rank looks at its share, and as often as the others, whose shards it takes to look
    for number in range(ranks.rank, -(-len(held_out) // ranks.size) * ranks.size, ranks.size):
        index, counts = held_out[number % len(held_out)], number < len(held_out)
        batch = data.cache.load([index])
        noise = validation_noise(batch.latents.shape[1:], (learner.settings.seed, index))[None]
        for time in validation_times(VALIDATION_TIMES):
            poll()
            loss = picture_loss(learner, data, batch, noise, time[None])
            total += loss if counts else 0.0
    return ranks.total(total)[0] / (len(held_out) * VALIDATION_TIMES)


def picture_loss(learner: Learner, data: Data, batch: Batch, noise: torch.Tensor, time: torch.Tensor) -> float:
    """Return what `validation_loss` is the mean of."""
    if learner.settings.loss.kind == CONSISTENCY:
        point, prompt, weight = on_trajectory(learner, data, batch, noise, time, torch.tensor([GUIDANCE]))
        return float(consistency_error(learner.transformer, point, prompt, weight).sum())
    sigma = training_sigmas(time, learner.shift).float().to(learner.device)
    return float(batch_loss(learner, batch, noise, sigma).sum())


def whole_learner(learner: Learner, device: torch.device, trained_alone: bool) -> Learner | None:
    """Return `learner` with all its weights on `device`, or with those that are trained alone, to be saved or drawn
    with; None on all ranks but the first. All have to call this."""
    if learner.shards is None:
        return learner if learner.ranks.first else None
    wanted = {id(each) for each in learner.shards.trained.values()}
    names = {name for name, each in learner.shards.everything.items() if id(each) in wanted}
    found: Any = gather(
        learner.shards, device, learner.ranks.first, names.__contains__ if trained_alone else lambda name: True
    )
    if found is None:
        return None
    parameters = {name: each for name, each in found[-1].named_parameters() if each.requires_grad}
    controlnet = found[1] if len(found) > 1 else None
    # an optimizer without weights, for nothing learns any more
    optimizer = make_optimizer(learner.settings.optimizer.name, [torch.nn.Parameter(torch.zeros(1))], 0.0)
    return Learner(found[0], learner.shift, learner.settings, parameters, optimizer, None, controlnet)


def share_step(group: Sequence[Sequence[int]], rank: int, count: int) -> list[Piece]:
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
