"""What a training run is told, checked once, with the nearest name for a wrong one; `settings_file` reads it."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import dataclass, field, is_dataclass
from functools import partial
from typing import Annotated, Any, NamedTuple, get_args, get_origin, get_type_hints

from ..errors import InputError
from ..model.latents import DOWNSCALE, LARGEST
from ..runtime.checks import RENAME, check_number, check_text
from .optimizers import DDP, KINDS, OPTIMIZERS, alternatives

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
# Names of Windows that are no files, with any ending.
DEVICES = {"con", "prn", "aux", "nul", *(f"{port}{number}" for port in ("com", "lpt") for number in range(1, 10))}
# bytes in UTF-8; disks take 255 with the ending
LONGEST_NAME = 240
# a file or folder, in a settings file relative to that, and on each machine where it likes
Place = Annotated[str, "place"]
# of a field's annotation, called with its name and value
Check = Callable[[str, Any], None]


def within(low: float, high: float) -> Check:
    return partial(check_number, low=low, high=high)


def among(names: tuple[str, ...]) -> Check:
    return partial(one_of, names=names)


def sides_from(low: int) -> Check:
    return partial(check_side, low=low)


@dataclass(frozen=True)
class Help:
    """Explains a field to a person who trains for the first time. The canvas shows it as the tooltip."""

    text: str


@dataclass(frozen=True)
class Method:
    """What is trained: an adapter, a ControlNet, or with "full" all weights."""

    kind: Annotated[
        str,
        among(METHODS),
        Help(
            "Take lora for a first training: every program reads it. dora is slower and learns a little more per step. "
            "lokr makes the smallest file."
        ),
    ] = "lora"
    rank: Annotated[
        int,
        within(1, 1024),
        Help("The size of the LoRA. 8 to 32 is usual. A higher rank can learn more and makes a larger file."),
    ] = 16
    alpha: Annotated[
        float | None, within(0, 1e5), Help("The effect of the LoRA is scaled by alpha / rank. 0: not scaled.")
    ] = None
    targets: Annotated[
        str,
        among(TARGETS),
        Help("The layers that learn. attention is enough to start with. both learns more and needs more images."),
    ] = "attention"
    # "controlnet" and "full" only: precision of the trained weights. Steps in bfloat16 are rounded stochastically.
    weights: Annotated[str, among(DTYPES)] = "float32"
    blocks: Annotated[
        int,
        within(1, 255),
        Help(
            "How many of the model's first blocks the ControlNet begins as a copy of. NVIDIA uses 7. Use 3 for the "
            "demo model."
        ),
    ] = 7
    # Adapters only: the file of an adapter that a new run begins with.
    start: Place = ""
    base: Annotated[
        str,
        among(BASES),
        Help("int8 stores the model in 8 bits while a lora or lokr is trained. This takes about half the memory."),
    ] = "full"
    # Patterns as of file names. Only the layers of `targets` whose name fits one get an adapter.
    layers: tuple[str, ...] = ()
    # peft's lora_dropout
    dropout: Annotated[float, within(0, 0.99)] = 0.0

    @property
    def whole(self) -> bool:
        """Whether weights themselves are trained, not an adapter beside them."""
        return self.kind not in ADAPTERS

    @property
    def scale(self) -> float:
        return self.alpha / self.rank if self.alpha else 1.0


@dataclass(frozen=True)
class Loss:
    """What is learned: "flow" matching, or with "consistency" to generate in few steps, which SANA-Sprint models are
    for.

    With "consistency", the part of the loss that is unstable at first grows from 0 over `tangent_warmup` steps.

    `times` are those of flow matching, before the model's shift: "logit_normal" with NVIDIA's `logit_mean` (positive:
    more noise; diffusers' scripts count the other way) and `logit_std`, SD3's "mode" with `mode_scale`, or "uniform".
    """

    kind: Annotated[str, among((FLOW, CONSISTENCY))] = FLOW
    tangent_warmup: Annotated[int, within(0, 10**9)] = 4000
    times: Annotated[str, among(TIMES)] = LOGIT_NORMAL
    logit_mean: Annotated[float, within(-10, 10)] = 0.0
    logit_std: Annotated[float, within(1e-3, 10)] = 1.0
    # a density up to here: Esser et al. 2024, arXiv 2403.03206, section 3.1
    mode_scale: Annotated[float, within(-1, 1.75)] = 1.29


@dataclass(frozen=True)
class Optimizer:
    """How gradients become steps."""

    name: Annotated[
        str,
        among(tuple(OPTIMIZERS)),
        Help(
            "Take adamw to start with. came needs half of its memory and came8bit an eighth. Both need a warmup of "
            "some hundred steps."
        ),
    ] = "adamw"
    weight_decay: Annotated[
        float, within(0, 1), Help("How strongly each step pulls the weights towards 0, against overfitting.")
    ] = 0.01
    clip: Annotated[
        float,
        within(0, 1e6),
        Help("The largest norm of all gradients of a step. Larger gradients are scaled down to it. 0: no clipping."),
    ] = 0.1
    ema: Annotated[
        float,
        within(0, 0.999999),
        Help(
            "Decay of a moving average of the weights, which is then saved and previewed. 0.99 averages about 100 "
            "steps. 0: no average."
        ),
    ] = 0.0
    d0: Annotated[
        float, within(1e-12, 1), Help("prodigy only: the first estimate of how far the weights have to move.")
    ] = 1e-6
    d_coef: Annotated[
        float, within(1e-3, 1e3), Help("prodigy only: a factor of the learning rate that prodigy finds.")
    ] = 1.0


@dataclass(frozen=True)
class Parallel:
    """How the processes that a launcher starts hold the model: each all of it ("ddp"), or a share of the rows of each
    weight ("fsdp"), which is on the CPU while nothing is computed with it ("fsdp_offload").

    `block` is the class of the modules that are gathered one at a time, without one SANA's block. With `replicas` each
    so many-th part of the processes, those of one or more machines, shares a copy of its own (HSDP)."""

    kind: Annotated[str, among(KINDS)] = DDP
    block: str = ""
    replicas: Annotated[int, within(1, 4096)] = 1


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

    data: tuple[Place, ...]
    resolution: Annotated[int, sides_from(DOWNSCALE)] = 1024
    batch: Annotated[
        int,
        within(1, 4096),
        Help("Images that are learned together. A larger batch learns more steadily and takes more memory."),
    ] = 1
    accumulate: Annotated[
        int, within(1, 4096), Help("Batches in a step. This has the effect of a larger batch without its memory.")
    ] = 1
    epochs: Annotated[int | None, within(1, 10**6)] = None
    steps: Annotated[
        int | None,
        within(1, 10**9),
        Help("Steps in total, also when the training resumes. To train a finished one further, raise this."),
    ] = None
    learning_rate: Annotated[
        float,
        within(0, 10),
        Help(
            "How fast the model learns: 0.0001 for most models, 0.001 for the demo model, 1 with prodigy. If the "
            "images fall apart, lower it."
        ),
    ] = 1e-4
    schedule: Annotated[
        str,
        among(SCHEDULES + SHAPED),
        Help("The learning rate after the warmup: it stays, or it falls to 0 along a cosine or a line."),
    ] = "constant"
    warmup: Annotated[int, within(0, 10**9), Help("Steps in which the learning rate rises from 0.")] = 0
    cycles: Annotated[int, within(1, 10**6)] = 1
    power: Annotated[float, within(1e-3, 1e3)] = 1.0
    repeats: Annotated[tuple[int, ...], within(1, 10**4)] = ()
    weights: Annotated[tuple[float, ...], within(0, 10**3)] = ()
    regularisation: tuple[Place, ...] = ()
    prior_loss_weight: Annotated[float, within(0, 10**3), Help("How much the regularisation images count.")] = 1.0
    resolutions: Annotated[tuple[int, ...], sides_from(DOWNSCALE)] = ()
    flip: bool = False
    crops: Annotated[int, within(1, 64)] = 1
    tag_orders: Annotated[int, within(1, 64)] = 1
    keep_tags: Annotated[int, within(0, 10**3)] = 0

    @property
    def largest(self) -> int:
        """The resolution that takes the most memory."""
        return max(self.resolution, *self.resolutions, 0)


@dataclass(frozen=True)
class Validation:
    """What is looked at every `every` steps: the loss over a `share` of the images, which training never sees, and
    images of `prompts`, each with the seed of its place, at `width` x `height` pixels (0: the phase's resolution).
    `control` are the images that steer a ControlNet there, one, or one for each prompt."""

    every: Annotated[
        int,
        within(0, 10**9),
        Help(
            "Steps between two validations, which generate the validation prompts and measure the held-out images. "
            "0: no validation."
        ),
    ] = 0
    share: Annotated[
        float,
        within(0, 0.5),
        Help(
            "The share of images that are never learned and only measure the loss. The result is then the state with "
            "the lowest loss. 0: all images are learned."
        ),
    ] = 0.0
    prompts: tuple[str, ...] = ()
    negative_prompt: str = ""
    width: Annotated[int, sides_from(0)] = 0
    height: Annotated[int, sides_from(0)] = 0
    steps: int | None = None
    guidance: float | None = None
    control: tuple[Place, ...] = ()


@dataclass(frozen=True)
class TrainingSettings:
    """A whole run. `model` is a checkpoint of transformer, text encoder and autoencoder, in any layout, or of the first
    alone with files of their own for the others; `out` is the run's folder; `trigger` are words that a LoRA's file is
    labelled with."""

    model: Place
    out: Place
    phase: tuple[Phase, ...]
    name: str = "sana"
    text_encoder: Place = ""  # that of `model`
    autoencoder: Place = ""  # that of `model`
    trigger: Annotated[
        str, Help("Words to note in the file of the LoRA, so that others know them. They are not added to captions.")
    ] = ""
    seed: Annotated[
        int,
        within(0, 2**63 - 1),
        Help("Decides the noise and the order of the images. Another seed needs a new name."),
    ] = 0
    dtype: Annotated[str, among(DTYPES)] = "bfloat16"
    reference: str = "auto"
    device: str = ""  # the accelerator of this machine, or its CPU
    cache: Place = ""  # folder of latents and embeddings; "cache" in `out`
    stream: bool = False  # encode each image when it is learned, and keep nothing of it on disk
    skip_broken: bool = False  # leave out images that are missing or cannot be read, and list them in the log
    caption_dropout: Annotated[
        float, within(0, 1), Help("The share of images that are learned without their caption, which guidance needs.")
    ] = 0.1
    checkpoint_gradients: Annotated[
        bool, Help("On: each step computes some values twice. This takes far less memory and a third more time.")
    ] = True
    save_every: Annotated[
        int, within(1, 10**9), Help("Steps between saved states, from which a training resumes. Cancel saves too.")
    ] = 500
    keep: Annotated[
        int, within(1, 10**6), Help("How many of the newest states stay on the disk. The best one stays too.")
    ] = 3
    method: Method = field(default_factory=Method)
    loss: Loss = field(default_factory=Loss)
    optimizer: Optimizer = field(default_factory=Optimizer)
    validation: Validation = field(default_factory=Validation)
    parallel: Parallel = field(default_factory=Parallel)

    def source(self, kind: str) -> str:
        """Return the checkpoint that has the component: "transformer", "text_encoder" or "autoencoder"."""
        own = {"text_encoder": self.text_encoder, "autoencoder": self.autoencoder}
        return own.get(kind) or self.model


class FieldInfo(NamedTuple):
    """A field of the settings as a form shows it."""

    kind: type  # int, float, str or bool
    default: Any
    low: float | None
    high: float | None
    names: tuple[str, ...]  # the options of a choice
    help: str


def describe_field(path: str) -> FieldInfo:
    """Return the type, limits and help of a field such as "seed", "optimizer.clip" or "phase.steps"."""
    table, _, name = path.rpartition(".")
    owner: Any = TrainingSettings
    if table:
        hint = get_type_hints(TrainingSettings)[table]
        owner = get_args(hint)[0] if get_origin(hint) is tuple else hint
    kind, *metadata = get_args(get_type_hints(owner, include_extras=True)[name])
    # `float | None`: None is the default of the settings file only.
    kind = next(each for each in get_args(kind) or (kind,) if each is not type(None))
    limits: dict[str, Any] = {}
    text = ""
    for fact in metadata:
        if isinstance(fact, partial):
            limits |= fact.keywords
        elif isinstance(fact, Help):
            text = fact.text
    default = getattr(owner, name)
    return FieldInfo(kind, default, limits.get("low"), limits.get("high"), limits.get("names", ()), text)


def check_settings(settings: TrainingSettings) -> TrainingSettings:
    """Return `settings`. Raises InputError for the first value that is out of range."""
    method, validation = settings.method, settings.validation
    check_fields(settings)
    check_method(method, settings.dtype)
    check_loss(settings.loss, method)
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
        check_fields(phase, f"phase {number}: ")
        check_phase(f"phase {number}", phase)
    return settings


def check_fields(settings: Any, before: str = "") -> None:
    """Raise InputError for the first value that its annotation forbids; `before` stands before its field's name."""
    for name, hint in get_type_hints(type(settings), include_extras=True).items():
        value = getattr(settings, name)
        if is_dataclass(value):
            check_fields(value, f"{name}.")
        is_path = hint in (Place, tuple[Place, ...])
        remedy = RENAME if is_path else "write the text again"
        # The default "" of a path means that it is not set. Other empty paths would be the current folder.
        needs_path = is_path and getattr(type(settings), name, None) != ""
        for item in value if isinstance(value, tuple) else (value,):
            if needs_path and item == "":
                raise InputError(f"{before}{name}: got an empty path, expected the path of a file or folder; enter it")
            # Files get these texts in UTF-8, the first file long after the start.
            if isinstance(item, str):
                check_text(before + name, item, remedy)
            for check in filter(callable, getattr(hint, "__metadata__", ())):
                if item is not None:
                    check(before + name, item)


def check_method(method: Method, dtype: str) -> None:
    """Raise InputError unless the values of `method` fit each other."""
    if method.weights == "bfloat16" and dtype == "float32":
        raise InputError("weights: got bfloat16 with dtype float32, expected the same; change one of them")
    if method.base == "int8" and method.kind not in QUANTISED:
        raise InputError(f"base: got int8 with method {method.kind}, expected full; or choose {' or '.join(QUANTISED)}")
    if method.start and method.whole:
        raise InputError(f"start: got a file with method {method.kind}, expected one of an adapter; remove it")
    if method.dropout and method.kind not in ("lora", "dora"):
        raise InputError(f"dropout: got one with method {method.kind}, expected lora or dora; remove it")
    if method.layers and method.whole:
        raise InputError(f"layers: got some with method {method.kind}, expected {', '.join(ADAPTERS)}; remove them")


def check_name(name: str) -> None:
    """Raise InputError unless a LoRA's file can have that name."""
    # Windows drops spaces and dots at the end.
    plain = name == name.strip() and not name.endswith(".")
    if not name or not plain or not name.isprintable() or set(name) & set('/\\:*?"<>|'):
        raise InputError(f"name: got {name!r:.40}, expected the name of a file; use letters and digits")
    if name.partition(".")[0].rstrip().casefold() in DEVICES:
        raise InputError(f"name: got {name!r:.40}, which Windows reserves for a device; choose another")
    if name.casefold() == "state":
        raise InputError(f"name: got {name!r}, which is that of a state's own file; choose another")
    if len(name.encode()) > LONGEST_NAME:
        raise InputError(f"name: got {name!r:.40}, expected at most {LONGEST_NAME} bytes; choose a shorter one")


def check_loss(loss: Loss, method: Method) -> None:
    """Raise InputError unless `method` can be trained by `loss`."""
    for field_name, times in (("logit_mean", LOGIT_NORMAL), ("logit_std", LOGIT_NORMAL), ("mode_scale", MODE)):
        check_used("loss", loss, field_name, loss.times == times, f"times {times}")
    if loss.kind == CONSISTENCY and loss != Loss(loss.kind, loss.tangent_warmup):
        raise InputError("times: got a distribution with loss consistency, which has its own; remove it")
    if loss.kind == CONSISTENCY and method.whole:
        raise InputError(
            f"loss: got consistency with method {method.kind}, expected flow; or choose {', '.join(ADAPTERS)}"
        )


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
    if own.kind == DDP:
        if own.replicas > 1:
            raise InputError("replicas: got more than 1 with parallel ddp, expected fsdp; remove it, or choose that")
        return
    if method.base != "full":
        raise InputError(f"base: got {method.base} with parallel {own.kind}, expected full; or choose ddp")
    if settings.loss.kind == CONSISTENCY:
        raise InputError(f"loss: got consistency with parallel {own.kind}, expected flow; or choose ddp")
    if own.kind not in OPTIMIZERS[name].parallel:
        expected = alternatives([other for other, row in OPTIMIZERS.items() if own.kind in row.parallel])
        others = alternatives(list(OPTIMIZERS[name].parallel))
        raise InputError(f"optimizer: got {name} with parallel {own.kind}, expected {expected}; or choose {others}")


def check_phase(name: str, phase: Phase) -> None:
    sides = (phase.resolution, *phase.resolutions)
    if len({*sides}) < len(sides):
        raise InputError(f"{name}: resolutions: got a size twice, expected others than {phase.resolution}; remove it")
    for field_name, used, needed in (
        ("prior_loss_weight", phase.regularisation, "regularisation"),
        ("keep_tags", phase.tag_orders > 1, "tag_orders"),
        ("cycles", phase.schedule == "cosine_with_restarts", "schedule cosine_with_restarts"),
        ("power", phase.schedule == "polynomial", "schedule polynomial"),
    ):
        check_used(name, phase, field_name, bool(used), needed)
    for field_name, numbers in (("repeats", phase.repeats), ("weights", phase.weights)):
        if len(numbers) not in (0, len(phase.data)):
            raise InputError(
                f"{name}: got {len(numbers)} {field_name} for {len(phase.data)} sets of data, expected one for each"
            )
    if phase.weights and not any(phase.weights):
        raise InputError(f"{name}: weights: got only 0, so nothing is trained; raise one")
    if (phase.epochs is None) == (phase.steps is None):
        raise InputError(f"{name}: got {'neither' if phase.steps is None else 'both'} of epochs and steps; set one")
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
