"""What a training run is told, checked once, with the nearest name for a wrong one; `settings_file` reads it."""

from __future__ import annotations

import difflib
from dataclasses import dataclass, field

from ..errors import InputError
from ..model.latents import DOWNSCALE, LARGEST
from ..runtime.checks import check_number
from .optimizers import NAMES, WHOLE

ADAPTERS = ("lora", "dora", "lokr")
METHODS = (*ADAPTERS, "controlnet", "full")
BASES = ("full", "int8")
# of which an adapter may lie on a base in 8 bits; DoRA needs the lengths of its rows as they are
QUANTISED = ("lora", "lokr")
TARGETS = ("attention", "feed_forward", "both")
SCHEDULES = ("constant", "cosine", "linear")
# of which each has a number of its own
SHAPED = ("cosine_with_restarts", "polynomial")
LOGIT_NORMAL, MODE, UNIFORM = TIMES = ("logit_normal", "mode", "uniform")
DTYPES = ("float32", "bfloat16")
FLOW, CONSISTENCY = "flow", "consistency"
DDP, FSDP, OFFLOADED = KINDS = ("ddp", "fsdp", "fsdp_offload")
# bytes in UTF-8; disks take 255 with the ending
LONGEST_NAME = 240


@dataclass(frozen=True)
class Method:
    """What is trained: an adapter of `kind` with `rank` and `alpha` on the layers of `targets`, a "controlnet" that
    begins as a copy of the model's first `blocks`, or with "full" all weights. An adapter's output is scaled by
    alpha / rank, without an alpha by 1. `weights` is the precision of the weights that "controlnet" and "full" train;
    steps in bfloat16 are rounded stochastically. With `layers`, patterns as of file names, only those layers of
    `targets` get an adapter whose name in the transformer fits one; `dropout` is peft's lora_dropout. `start` is the
    file of an adapter that a new run begins with; `base` "int8" keeps the frozen model under an adapter in 8 bits."""

    kind: str = "lora"
    rank: int = 16
    alpha: float | None = None
    targets: str = "attention"
    weights: str = "float32"
    blocks: int = 7
    start: str = ""
    base: str = "full"
    layers: tuple[str, ...] = ()
    dropout: float = 0.0

    @property
    def whole(self) -> bool:
        """Whether weights themselves are trained, not an adapter beside them."""
        return self.kind not in ADAPTERS

    @property
    def scale(self) -> float:
        return 1.0 if self.alpha is None else self.alpha / self.rank


@dataclass(frozen=True)
class Loss:
    """What is learned: "flow" matching, or with "consistency" to generate in few steps, which SANA-Sprint models are
    for.

    Then `teacher` is the checkpoint of a SANA model that says what to generate, or without one the images do; the part
    of the loss that is unstable at first grows from 0 over `tangent_warmup` steps.

    `times` are those of flow matching, before the model's shift: "logit_normal" with NVIDIA's `logit_mean` (positive:
    more noise; diffusers' scripts count the other way) and `logit_std`, SD3's "mode" with `mode_scale`, or "uniform".
    """

    kind: str = FLOW
    teacher: str = ""
    tangent_warmup: int = 4000
    times: str = LOGIT_NORMAL
    logit_mean: float = 0.0
    logit_std: float = 1.0
    mode_scale: float = 1.29


@dataclass(frozen=True)
class Optimizer:
    """How gradients become steps. `clip` bounds the norm of all gradients together; `ema` is the decay of a moving
    average of the weights, which is then what is saved and previewed, or 0 for none. Prodigy begins with `d0` as its
    estimate of the distance that the weights have to go, and makes its rate `d_coef` times what it has found."""

    name: str = "adamw"
    weight_decay: float = 0.01
    clip: float = 0.1
    ema: float = 0.0
    d0: float = 1e-6
    d_coef: float = 1.0


@dataclass(frozen=True)
class Parallel:
    """How the processes that a launcher starts hold the model: each all of it ("ddp"), or a share of the rows of each
    weight ("fsdp"), which is on the CPU while nothing is computed with it ("fsdp_offload").

    `block` is the class of the modules that are gathered one at a time, without one SANA's block. With `replicas` each
    so many-th part of the processes, those of one or more machines, shares a copy of its own (HSDP)."""

    kind: str = DDP
    block: str = ""
    replicas: int = 1


@dataclass(frozen=True)
class Phase:
    """A stretch of training with data, size and learning rate of its own. Exactly one of `epochs` and `steps` is set.

    `learning_rate` is what the optimizer gets, whatever the batch; it rises from 0 in the first `warmup` steps and then
    follows `schedule`, as diffusers names them: "cosine_with_restarts" falls to 0 `cycles` times, "polynomial" with
    `power`. Each set of `data` is learned `repeats` times an epoch (kohya's num_repeats), its loss times its number of
    `weights`; with `regularisation` as many images of those sets, their loss times `prior_loss_weight` (diffusers' and
    kohya's prior preservation). Every image is learned at `resolution` and at each of `resolutions`. An epoch shows it,
    at random, in one of `crops` places, mirrored with `flip`, with one of its captions in one of `tag_orders` orders. A
    step takes `accumulate` batches of `batch` images, which all processes of a run share.
    """

    data: tuple[str, ...]
    resolution: int = 1024
    batch: int = 1
    accumulate: int = 1
    epochs: int | None = None
    steps: int | None = None
    learning_rate: float = 1e-4
    schedule: str = "constant"
    warmup: int = 0
    cycles: int = 1
    power: float = 1.0
    repeats: tuple[int, ...] = ()
    weights: tuple[float, ...] = ()
    regularisation: tuple[str, ...] = ()
    prior_loss_weight: float = 1.0
    resolutions: tuple[int, ...] = ()
    flip: bool = False
    crops: int = 1
    tag_orders: int = 1
    keep_tags: int = 0

    @property
    def largest(self) -> int:
        """The resolution that takes the most memory."""
        return max(self.resolution, *self.resolutions, 0)


@dataclass(frozen=True)
class Validation:
    """What is looked at every `every` steps: the loss over a `share` of the images, which training never sees, and
    images of `prompts`, each with the seed of its place, at `width` x `height` pixels (0: the phase's resolution).
    `control` are the images that steer a ControlNet there, one, or one for each prompt."""

    every: int = 0
    share: float = 0.0
    prompts: tuple[str, ...] = ()
    negative_prompt: str = ""
    width: int = 0
    height: int = 0
    steps: int | None = None
    guidance: float | None = None
    control: tuple[str, ...] = ()


@dataclass(frozen=True)
class TrainingSettings:
    """A whole run. `model` is a checkpoint of transformer, text encoder and autoencoder, in any layout, or of the first
    alone with files of their own for the others; `out` is the run's folder; `trigger` are words that a LoRA's file is
    labelled with."""

    model: str
    out: str
    phase: tuple[Phase, ...]
    name: str = "sana"
    text_encoder: str = ""  # that of `model`
    autoencoder: str = ""  # that of `model`
    trigger: str = ""
    seed: int = 0
    dtype: str = "bfloat16"
    reference: str = "auto"
    device: str = ""  # the accelerator of this machine, or its CPU
    cache: str = ""  # folder of latents and embeddings; "cache" in `out`
    stream: bool = False  # encode each image when it is learned, and keep nothing of it on disk
    caption_dropout: float = 0.1
    checkpoint_gradients: bool = True
    save_every: int = 500
    keep: int = 3
    method: Method = field(default_factory=Method)
    loss: Loss = field(default_factory=Loss)
    optimizer: Optimizer = field(default_factory=Optimizer)
    validation: Validation = field(default_factory=Validation)
    parallel: Parallel = field(default_factory=Parallel)

    def source(self, kind: str) -> str:
        """Return the checkpoint that has the component: "transformer", "text_encoder" or "autoencoder"."""
        own = {"text_encoder": self.text_encoder, "autoencoder": self.autoencoder}
        return own.get(kind) or self.model


def check_settings(settings: TrainingSettings) -> TrainingSettings:
    """Return `settings`. Raises InputError for the first value that is out of range."""
    method, optimizer, validation = settings.method, settings.optimizer, settings.validation
    one_of("optimizer.name", optimizer.name, NAMES)
    one_of("dtype", settings.dtype, DTYPES)
    check_method(method, settings.dtype)
    check_loss(settings.loss, method)
    check_number("optimizer.weight_decay", optimizer.weight_decay, 0, 1)
    check_number("optimizer.clip", optimizer.clip, 1e-6, 1e6)
    check_number("optimizer.ema", optimizer.ema, 0, 0.999999)
    check_number("optimizer.d0", optimizer.d0, 1e-12, 1)
    check_number("optimizer.d_coef", optimizer.d_coef, 1e-3, 1e3)
    check_number("caption_dropout", settings.caption_dropout, 0, 1)
    check_number("seed", settings.seed, 0, 2**63 - 1)
    check_number("save_every", settings.save_every, 1, 10**9)
    check_number("keep", settings.keep, 1, 10**6)
    check_number("validation.every", validation.every, 0, 10**9)
    check_number("validation.share", validation.share, 0, 0.5)
    for side in ("width", "height"):
        check_side(f"validation.{side}", getattr(validation, side), 0)
    check_control(method, validation)
    if validation.prompts and not validation.every:
        raise InputError(
            "every: got 0 with validation.prompts, expected the steps between two validations; set it, or remove them"
        )
    check_parallel(settings)
    check_name(settings.name)
    if not settings.phase:
        raise InputError("phase: got none, expected one or more [[phase]] tables; see recipes/")
    for number, phase in enumerate(settings.phase, 1):
        check_phase(f"phase {number}", phase)
    return settings


def check_method(method: Method, dtype: str) -> None:
    """Raise InputError unless the values of `method` are in their ranges and fit each other."""
    one_of("method.kind", method.kind, METHODS)
    one_of("method.targets", method.targets, TARGETS)
    one_of("method.weights", method.weights, DTYPES)
    if method.weights == "bfloat16" and dtype == "float32":
        raise InputError("weights: got bfloat16 with dtype float32, expected the same; change one of them")
    check_number("method.rank", method.rank, 1, 1024)
    one_of("method.base", method.base, BASES)
    if method.base == "int8" and method.kind not in QUANTISED:
        raise InputError(f"base: got int8 with method {method.kind}, expected full; or choose {' or '.join(QUANTISED)}")
    if method.start and method.whole:
        raise InputError(f"start: got a file with method {method.kind}, expected one of an adapter; remove it")
    check_number("method.dropout", method.dropout, 0, 0.99)
    if method.dropout and method.kind not in ("lora", "dora"):
        raise InputError(f"dropout: got one with method {method.kind}, expected lora or dora; remove it")
    if method.layers and method.whole:
        raise InputError(f"layers: got some with method {method.kind}, expected {', '.join(ADAPTERS)}; remove them")
    check_number("method.blocks", method.blocks, 1, 255)
    check_number("method.alpha", 1.0 if method.alpha is None else method.alpha, 1e-3, 1e5)


def check_name(name: str) -> None:
    """Raise InputError unless a LoRA's file can have that name."""
    if not name or not name.isprintable() or set(name) & set('/\\:*?"<>|'):
        raise InputError(f"name: got {name!r:.40}, expected the name of a file; use letters and digits")
    if name.casefold() == "state":
        raise InputError(f"name: got {name!r}, which is that of a state's own file; choose another")
    if len(name.encode()) > LONGEST_NAME:
        raise InputError(f"name: got {name!r:.40}, expected at most {LONGEST_NAME} bytes; choose a shorter one")


def check_loss(loss: Loss, method: Method) -> None:
    """Raise InputError unless `method` can be trained by `loss`."""
    one_of("loss.kind", loss.kind, (FLOW, CONSISTENCY))
    check_number("loss.tangent_warmup", loss.tangent_warmup, 0, 10**9)
    one_of("loss.times", loss.times, TIMES)
    check_number("loss.logit_mean", loss.logit_mean, -10, 10)
    check_number("loss.logit_std", loss.logit_std, 1e-3, 10)
    # a density up to here: Esser et al. 2024, arXiv 2403.03206, section 3.1
    check_number("loss.mode_scale", loss.mode_scale, -1, 1.75)
    for field_name, times in (("logit_mean", LOGIT_NORMAL), ("logit_std", LOGIT_NORMAL), ("mode_scale", MODE)):
        check_used("loss", loss, field_name, loss.times == times, f"times {times}")
    if loss.kind == CONSISTENCY and loss != Loss(loss.kind, loss.teacher, loss.tangent_warmup):
        raise InputError("times: got a distribution with loss consistency, which has its own; remove it")
    if loss.kind == CONSISTENCY and method.whole:
        raise InputError(
            f"loss: got consistency with method {method.kind}, expected flow; or choose {', '.join(ADAPTERS)}"
        )
    if loss.kind == FLOW and loss.teacher:
        raise InputError("teacher: got one with loss flow, expected none; remove it, or set loss.kind to consistency")


def check_control(method: Method, validation: Validation) -> None:
    """Raise InputError unless a ControlNet has control images to generate with, and nothing else has."""
    found, needed = len(validation.control), len(validation.prompts)
    if method.kind != "controlnet":
        if found:
            raise InputError(f"control: got {found} images, expected none with method {method.kind}; remove them")
    elif needed and found not in (1, needed):
        raise InputError(
            f"control: got {found} control images for {needed} prompts, expected one, or one for each; name as many"
        )


def check_parallel(settings: TrainingSettings) -> None:
    """Raise InputError unless what is trained can be trained in the way that is asked for."""
    own, method, name = settings.parallel, settings.method, settings.optimizer.name
    one_of("parallel.kind", own.kind, KINDS)
    check_number("parallel.replicas", own.replicas, 1, 4096)
    if own.kind == DDP:
        if own.replicas > 1:
            raise InputError("replicas: got more than 1 with parallel ddp, expected fsdp; remove it, or choose that")
        return
    if method.base != "full":
        raise InputError(f"base: got {method.base} with parallel {own.kind}, expected full; or choose ddp")
    if settings.loss.kind == CONSISTENCY:
        raise InputError(f"loss: got consistency with parallel {own.kind}, expected flow; or choose ddp")
    if name in WHOLE and name != "schedulefree":
        raise InputError(
            f"optimizer: got {name} with parallel {own.kind}, expected adamw, came or came8bit; or choose ddp"
        )
    if name == "adamw8bit" and own.kind == OFFLOADED:
        raise InputError(
            "optimizer: got adamw8bit with parallel fsdp_offload, whose step needs a compiler for the CPU; choose "
            "came8bit"
        )


def check_phase(name: str, phase: Phase) -> None:
    one_of(f"{name}: schedule", phase.schedule, SCHEDULES + SHAPED)
    check_number(f"{name}: cycles", phase.cycles, 1, 10**6)
    check_number(f"{name}: power", phase.power, 1e-3, 1e3)
    sides = (phase.resolution, *phase.resolutions)
    for side in sides:
        check_side(f"{name}: resolution", side, DOWNSCALE)
    if len({*sides}) < len(sides):
        raise InputError(f"{name}: resolutions: got a size twice, expected others than {phase.resolution}; remove it")
    for field_name, used, needed in (
        ("prior_loss_weight", phase.regularisation, "regularisation"),
        ("keep_tags", phase.tag_orders > 1, "tag_orders"),
        ("cycles", phase.schedule == "cosine_with_restarts", "schedule cosine_with_restarts"),
        ("power", phase.schedule == "polynomial", "schedule polynomial"),
    ):
        check_used(name, phase, field_name, bool(used), needed)
    for field_name, numbers, low, high in (("repeats", phase.repeats, 1, 10**4), ("weights", phase.weights, 0, 10**3)):
        for number in numbers:
            check_number(f"{name}: {field_name}", number, low, high)
        if len(numbers) not in (0, len(phase.data)):
            raise InputError(
                f"{name}: got {len(numbers)} {field_name} for {len(phase.data)} sets of data, expected one for each"
            )
    if phase.weights and not any(phase.weights):
        raise InputError(f"{name}: weights: got only 0, so nothing is trained; raise one")
    check_number(f"{name}: prior_loss_weight", phase.prior_loss_weight, 0, 10**3)
    for field_name, low, high in (("crops", 1, 64), ("tag_orders", 1, 64), ("keep_tags", 0, 10**3)):
        check_number(f"{name}: {field_name}", getattr(phase, field_name), low, high)
    for field_name, most in (("batch", 4096), ("accumulate", 4096)):
        check_number(f"{name}: {field_name}", getattr(phase, field_name), 1, most)
    check_number(f"{name}: learning_rate", phase.learning_rate, 0, 10)
    check_number(f"{name}: warmup", phase.warmup, 0, 10**9)
    if (phase.epochs is None) == (phase.steps is None):
        raise InputError(f"{name}: got {'neither' if phase.steps is None else 'both'} of epochs and steps; set one")
    check_number(f"{name}: epochs", 1 if phase.epochs is None else phase.epochs, 1, 10**6)
    check_number(f"{name}: steps", 1 if phase.steps is None else phase.steps, 1, 10**9)
    if not phase.data:
        raise InputError(f"{name}: got no data, expected one or more folders; name the folder of your images")


def check_used(name: str, settings: Phase | Loss, field_name: str, used: bool, needed: str) -> None:
    """Raise InputError where the field of `settings` is not its default, and has no effect without what is `needed`."""
    value = getattr(settings, field_name)
    if value != getattr(type(settings), field_name) and not used:
        raise InputError(
            f"{name}: {field_name}: got {value} without {needed}, where it does nothing; set that, or remove this"
        )


def check_side(name: str, pixels: int, low: int) -> None:
    if pixels % DOWNSCALE or not low <= pixels <= LARGEST:
        raise InputError(f"{name}: got {pixels}, expected a multiple of {DOWNSCALE} from {low} to {LARGEST}; change it")


def one_of(name: str, value: str, names: tuple[str, ...]) -> None:
    if value not in names:
        near = difflib.get_close_matches(str(value), names, 1, 0.0)[0]
        raise InputError(f"{name}: got {value!r:.40}, expected one of {', '.join(names)}; the nearest is {near}")
