"""The settings of a training run, with their descriptions, ranges and checks. `settings_file` reads them from a file.

The help of the command, the tables in docs/training-command.md and the tooltips of the training nodes come from here.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from functools import partial
from typing import Annotated, Any, NamedTuple, get_args, get_type_hints

from ..errors import InputError
from ..model.latents import DOWNSCALE, LARGEST
from ..runtime.checks import RENAME, check_number, check_text
from .optimizers import DDP, KINDS, OPTIMIZERS, alternatives

ADAPTERS = ("lora", "dora", "lokr")
METHODS = (*ADAPTERS, "controlnet", "full")
BASES = ("full", "int8")
# Adapters that can be trained on a base in 8 bits. DoRA needs the exact norms of the rows of the base.
QUANTISED = ("lora", "lokr")
TARGETS = ("attention", "feed_forward", "both")
SCHEDULES = ("constant", "cosine", "linear")
# Schedules with a parameter: Phase.cycles and Phase.power.
SHAPED = ("cosine_with_restarts", "polynomial")
LOGIT_NORMAL, MODE, UNIFORM = TIMES = ("logit_normal", "mode", "uniform")
DTYPES = ("float32", "bfloat16")
FLOW, CONSISTENCY = "flow", "consistency"
# Names that Windows reserves for devices, with any ending.
DEVICES = {"con", "prn", "aux", "nul", *(f"{port}{number}" for port in ("com", "lpt") for number in range(1, 10))}
# Bytes of a name in UTF-8. File systems allow 255 bytes with the ending.
LONGEST_NAME = 240
# The path of a file or folder. A settings file contains it relative to the file's folder. It may differ between the
# machines of a run.
Place = Annotated[str, "place"]
# Checks the value of a field. It gets the field's name and value, and raises InputError.
Check = Callable[[str, Any], None]


def check_side(name: str, pixels: int, low: int, high: int) -> None:
    if pixels % DOWNSCALE or not low <= pixels <= high:
        raise InputError(f"{name}: got {pixels}, expected a multiple of {DOWNSCALE} from {low} to {high}; change it")


def one_of(name: str, value: str, names: tuple[str, ...]) -> None:
    if value not in names:
        near = difflib.get_close_matches(str(value), names, 1, 0.0)[0]
        raise InputError(f"{name}: got {value!r:.40}, expected one of {', '.join(names)}; the nearest is {near}")


def within(low: float, high: float) -> Check:
    return partial(check_number, low=low, high=high)


def among(*names: str) -> Check:
    return partial(one_of, names=names)


def sides_from(low: int) -> Check:
    return partial(check_side, low=low, high=LARGEST)


def setting(default: Any, text: str, check: Check | None = None) -> Any:
    """Return a field of a settings class. `text` describes it to users, `check` is applied to its value or values."""
    return field(default=default, metadata={"help": text, "check": check})


@dataclass(frozen=True)
class Method:
    """What is trained: an adapter (lora, dora, lokr), a controlnet, or with full all weights."""

    kind: str = setting(
        "lora",
        "Use lora for a first training: every program reads it. dora is slower and learns a little more per step. lokr "
        "makes the smallest file.",
        among(*METHODS),
    )
    rank: int = setting(
        16,
        "The size of the LoRA. 8 to 32 is usual. A higher rank can learn more and makes a larger file.",
        within(1, 1024),
    )
    alpha: float | None = setting(
        None, "The effect of the LoRA is scaled by alpha / rank. 0: not scaled.", within(0, 1e5)
    )
    targets: str = setting(
        "attention",
        "The layers that learn. attention is enough to start with. both learns more and needs more images.",
        among(*TARGETS),
    )
    weights: str = setting(
        "float32",
        "controlnet and full only: the precision of the trained weights. bfloat16 rounds them stochastically.",
        among(*DTYPES),
    )
    blocks: int = setting(
        7,
        "ControlNet only: how many of the model's first blocks it copies. NVIDIA uses 7. Use 3 for the demo model.",
        within(1, 255),
    )
    start: Place = setting(
        "", "The file of a LoRA, DoRA or LoKr to begin with. The method, rank and targets must be the file's."
    )
    base: str = setting(
        "full",
        "int8 stores the model in 8 bits while a lora or lokr is trained. This takes about half the memory.",
        among(*BASES),
    )
    layers: tuple[str, ...] = setting(
        (), 'Adapters only: patterns such as "transformer_blocks.1?.*". Only matching layers of targets learn.'
    )
    dropout: float = setting(
        0.0,
        "lora and dora only: the share of an adapter's inputs that a step drops (lora_dropout of peft).",
        within(0, 0.99),
    )

    @property
    def whole(self) -> bool:
        """Whether the weights themselves are trained instead of an adapter."""
        return self.kind not in ADAPTERS

    @property
    def scale(self) -> float:
        """The factor of the adapter's output."""
        return self.alpha / self.rank if self.alpha else 1.0


@dataclass(frozen=True)
class Loss:
    """The training objective."""

    kind: str = setting(
        FLOW, "Flow matching, or consistency for SANA-Sprint, which generates in few steps.", among(FLOW, CONSISTENCY)
    )
    tangent_warmup: int = setting(
        4000,
        "consistency only: steps until the part of the loss that is unstable at first has its full weight.",
        within(0, 10**9),
    )
    times: str = setting(
        LOGIT_NORMAL, "flow only: the distribution of the timesteps, before the model's shift.", among(*TIMES)
    )
    logit_mean: float = setting(
        0.0,
        "logit_normal only: the mean, as in NVIDIA's code. Above 0: more noise. diffusers uses the opposite sign.",
        within(-10, 10),
    )
    logit_std: float = setting(1.0, "logit_normal only: the standard deviation.", within(1e-3, 10))
    # It is a density up to 1.75 (Esser et al. 2024, arXiv 2403.03206, section 3.1).
    mode_scale: float = setting(1.29, "mode only: the scale of SD3's distribution.", within(-1, 1.75))


@dataclass(frozen=True)
class Optimizer:
    """How gradients change the weights."""

    name: str = setting(
        "adamw",
        "Use adamw to start with. came needs half of its memory and came8bit an eighth. Both need a warmup of some "
        "hundred steps.",
        among(*OPTIMIZERS),
    )
    weight_decay: float = setting(
        0.01, "How strongly each step pulls the weights towards 0, against overfitting.", within(0, 1)
    )
    clip: float = setting(
        0.1,
        "The largest norm of all gradients of a step. Larger gradients are scaled down to it. 0: no clipping.",
        within(0, 1e6),
    )
    ema: float = setting(
        0.0,
        "Decay of a moving average of the weights, which is then saved and previewed. 0.99 averages about 100 steps. "
        "0: no average.",
        within(0, 0.999999),
    )
    d0: float = setting(1e-6, "prodigy only: the first estimate of how far the weights have to move.", within(1e-12, 1))
    d_coef: float = setting(1.0, "prodigy only: a factor of the learning rate that prodigy finds.", within(1e-3, 1e3))


@dataclass(frozen=True)
class Parallel:
    """How the processes of a launcher such as torchrun share the model."""

    kind: str = setting(
        DDP,
        "ddp: each process has the whole model. fsdp: each has some rows of every weight. fsdp_offload: these are "
        "in the CPU's memory while they are not used.",
        among(*KINDS),
    )
    block: str = setting("", "FSDP only: the class of the modules that are gathered in turn. Empty: SANA's block.")
    replicas: int = setting(
        1,
        "FSDP only: copies of the model (HSDP), usually one per machine. The processes are divided evenly among them.",
        within(1, 4096),
    )


@dataclass(frozen=True)
class Phase:
    """A part of the training. Phases run one after another."""

    data: tuple[Place, ...] = setting(MISSING, "Folders, .jsonl files or tars with the images.")
    resolution: int = setting(
        1024,
        "The training size of the model. Images are cropped to the nearest of SANA's 40 shapes of that area.",
        sides_from(DOWNSCALE),
    )
    batch: int = setting(
        1,
        "Images that are learned together. A larger batch learns more steadily and takes more memory.",
        within(1, 4096),
    )
    accumulate: int = setting(
        1, "Batches in a step. This has the effect of a larger batch without its memory.", within(1, 4096)
    )
    epochs: int | None = setting(None, "How often all images are learned. Set either this or steps.", within(1, 10**6))
    steps: int | None = setting(
        None,
        "Steps in total, also when the training resumes. To train a finished one further, raise this.",
        within(1, 10**9),
    )
    learning_rate: float = setting(
        1e-4,
        "How fast the model learns: 0.0001 for most models, 0.001 for the demo model, 1 with prodigy. If the images "
        "fall apart, lower it.",
        within(0, 10),
    )
    schedule: str = setting(
        "constant",
        "The learning rate after the warmup: it stays, or it falls to 0 along a cosine or a line.",
        among(*SCHEDULES, *SHAPED),
    )
    warmup: int = setting(0, "Steps in which the learning rate rises from 0.", within(0, 10**9))
    cycles: int = setting(1, "cosine_with_restarts only: how often the learning rate falls to 0.", within(1, 10**6))
    power: float = setting(1.0, "polynomial only: the exponent of the fall to 0.", within(1e-3, 1e3))
    repeats: tuple[int, ...] = setting(
        (), "For each of data: how many times an epoch learns it (num_repeats of kohya). []: once.", within(1, 10**4)
    )
    weights: tuple[float, ...] = setting((), "For each of data: the factor of its loss. []: 1.", within(0, 10**3))
    regularisation: tuple[Place, ...] = setting(
        (),
        "Other images of the same kind, such as other people. They are learned as often as yours, so that the model "
        "does not forget them.",
    )
    prior_loss_weight: float = setting(1.0, "How much the regularisation images count.", within(0, 10**3))
    resolutions: tuple[int, ...] = setting(
        (),
        "More sizes. Every image is learned at resolution and at each of these.",
        sides_from(DOWNSCALE),
    )
    flip: bool = setting(False, "Mirror the images half of the time.")
    crops: int = setting(
        1, "Different crops of each image, of which an epoch learns one at random. 1: the middle.", within(1, 64)
    )
    tag_orders: int = setting(
        1,
        'Different orders of a caption\'s tags, which ", " divides. An epoch learns one at random.',
        within(1, 64),
    )
    keep_tags: int = setting(
        0, "tag_orders only: how many first tags stay where they are (keep_tokens of kohya).", within(0, 10**3)
    )

    @property
    def largest(self) -> int:
        """The resolution that takes the most memory."""
        return max(self.resolution, *self.resolutions, 0)


@dataclass(frozen=True)
class Validation:
    """Held-out images and prompts that show the progress."""

    every: int = setting(
        0,
        "Steps between two validations, which generate the validation prompts and measure the held-out images. 0: no "
        "validation.",
        within(0, 10**9),
    )
    share: float = setting(
        0.0,
        "The share of images that are never learned and only measure the loss. The result is then the state with the "
        "lowest loss. 0: all images are learned.",
        within(0, 0.5),
    )
    prompts: tuple[str, ...] = setting(
        (), "Prompts whose images show what has been learned so far. Prompt i uses seed i."
    )
    negative_prompt: str = setting("", "The negative prompt of these images.")
    width: int = setting(0, "The width of these images in pixels. 0: the last phase's resolution.", sides_from(0))
    height: int = setting(0, "The height of these images in pixels. 0: the last phase's resolution.", sides_from(0))
    steps: int | None = setting(None, "The sampling steps of these images. Not set: the model's default.")
    guidance: float | None = setting(None, "The guidance of these images. Not set: the model's default.")
    control: tuple[Place, ...] = setting((), "ControlNet only: a control image for each prompt, or one for all.")


@dataclass(frozen=True)
class TrainingSettings:
    """The whole run."""

    model: Place = setting(
        MISSING, "The checkpoint of the model in any layout. It may be a transformer, if the next two are set."
    )
    out: Place = setting(MISSING, "The folder of everything that the run writes.")
    phase: tuple[Phase, ...] = setting(MISSING, "The phases of the training.")
    name: str = setting("sana", "The name of the LoRA's file.")
    text_encoder: Place = setting("", "The checkpoint of the text encoder. Empty: model.")
    autoencoder: Place = setting("", "The checkpoint of the VAE. Empty: model.")
    trigger: str = setting(
        "", "Words to note in the file of the LoRA, so that others know them. They are not added to captions."
    )
    seed: int = setting(
        0,
        "Decides the noise and the order of the images. A training cannot resume with another seed.",
        within(0, 2**63 - 1),
    )
    dtype: str = setting("bfloat16", "The precision of the computation.", among(*DTYPES))
    reference: str = setting(
        "auto", "Whose code the model follows where they differ: auto, nvidia or diffusers. See docs/reference.md."
    )
    device: str = setting("", "The device, such as cuda:1 or cpu. Empty: the accelerator of this machine, or its CPU.")
    cache: Place = setting("", "The folder of latents and embeddings, which runs may share. Empty: cache in out.")
    stream: bool = setting(False, "Encode each image when it is learned, and keep no cache.")
    skip_broken: bool = setting(False, "Leave out images that are missing or cannot be read, and list them in the log.")
    caption_dropout: float = setting(
        0.1, "The share of images that are learned without their caption, which guidance needs.", within(0, 1)
    )
    checkpoint_gradients: bool = setting(
        True, "On: each step computes some values twice. This takes far less memory and a third more time."
    )
    save_every: int = setting(
        500, "Steps between saved states, from which a training resumes. Stopping saves too.", within(1, 10**9)
    )
    keep: int = setting(3, "How many of the newest states stay on the disk. The best one stays too.", within(1, 10**6))
    method: Method = field(default_factory=Method)
    loss: Loss = field(default_factory=Loss)
    optimizer: Optimizer = field(default_factory=Optimizer)
    validation: Validation = field(default_factory=Validation)
    parallel: Parallel = field(default_factory=Parallel)

    def source(self, kind: str) -> str:
        """Return the checkpoint that contains the component: "transformer", "text_encoder" or "autoencoder"."""
        separate_files = {"text_encoder": self.text_encoder, "autoencoder": self.autoencoder}
        return separate_files.get(kind) or self.model


# The tables of a settings file. "" are the keys before the first table.
TABLES: dict[str, type] = {
    "": TrainingSettings,
    "method": Method,
    "loss": Loss,
    "optimizer": Optimizer,
    "phase": Phase,
    "validation": Validation,
    "parallel": Parallel,
}


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
    (row,) = (row for row in fields(TABLES[table]) if row.name == name)
    # For `float | None`, None is the default in a settings file only. A tuple has values of one type.
    hint = get_type_hints(TABLES[table])[name]
    kind = next(kind for kind in get_args(hint) or (hint,) if kind is not type(None))
    limits = getattr(row.metadata["check"], "keywords", {})
    low, high, names = limits.get("low"), limits.get("high"), limits.get("names", ())
    return FieldInfo(kind, row.default, low, high, names, row.metadata["help"])


def check_settings(settings: TrainingSettings) -> TrainingSettings:
    """Return `settings`. Raises InputError for the first value that is out of range or conflicts with another."""
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


def check_fields(settings: Any, prefix: str = "") -> None:
    """Run the checks of all fields. Errors begin with `prefix` and the field's name."""
    hints = get_type_hints(type(settings), include_extras=True)
    for row in fields(settings):
        name, value = row.name, getattr(settings, row.name)
        if is_dataclass(value):
            check_fields(value, f"{name}.")
        is_path = hints[name] in (Place, tuple[Place, ...])
        # The default "" of a path means that it is not set. Other empty paths would be the current folder.
        needs_path = is_path and row.default != ""
        for item in value if isinstance(value, tuple) else (value,):
            if needs_path and item == "":
                raise InputError(f"{prefix}{name}: got an empty path, expected the path of a file or folder; enter it")
            # Texts are written to files in UTF-8, the first time long after the start.
            if isinstance(item, str):
                check_text(prefix + name, item, RENAME if is_path else "write the text again")
            check = row.metadata.get("check")
            if check is not None and item is not None:
                check(prefix + name, item)


def check_method(method: Method, dtype: str) -> None:
    """Raise InputError for options of `method` that conflict with each other or with the precision `dtype`."""
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
    """Raise InputError unless the file of a LoRA can have this name on every operating system."""
    # Windows drops spaces and dots at the end.
    is_stable = name == name.strip() and not name.endswith(".")
    if not name or not is_stable or not name.isprintable() or set(name) & set('/\\:*?"<>|'):
        raise InputError(f"name: got {name!r:.40}, expected the name of a file; use letters and digits")
    if name.partition(".")[0].rstrip().casefold() in DEVICES:
        raise InputError(f"name: got {name!r:.40}, which Windows reserves for a device; choose another")
    if name.casefold() == "state":
        raise InputError(f"name: got {name!r}, which is that of a state's own file; choose another")
    if len(name.encode()) > LONGEST_NAME:
        raise InputError(f"name: got {name!r:.40}, expected at most {LONGEST_NAME} bytes; choose a shorter one")


def check_loss(loss: Loss, method: Method) -> None:
    """Raise InputError for options of `loss` that conflict with each other or with `method`."""
    for field_name, times in (("logit_mean", LOGIT_NORMAL), ("logit_std", LOGIT_NORMAL), ("mode_scale", MODE)):
        check_used("loss", loss, field_name, loss.times == times, f"times {times}")
    if loss.kind == CONSISTENCY and loss != Loss(loss.kind, loss.tangent_warmup):
        raise InputError("times: got a distribution with loss consistency, which has its own; remove it")
    if loss.kind == CONSISTENCY and method.whole:
        raise InputError(
            f"loss: got consistency with method {method.kind}, expected flow; or choose {', '.join(ADAPTERS)}"
        )


def check_control(method: Method, validation: Validation) -> None:
    """Raise InputError unless a ControlNet has a control image for each prompt, and other methods have none."""
    images, prompts = len(validation.control), len(validation.prompts)
    if method.kind != "controlnet":
        if images:
            raise InputError(f"control: got {images} images, expected none with method {method.kind}; remove them")
    elif prompts and images not in (1, prompts):
        raise InputError(
            f"control: got {images} control images for {prompts} prompts, expected one, or one for each; name as many"
        )


def check_parallel(settings: TrainingSettings) -> None:
    """Raise InputError if the method, the loss or the optimizer cannot be trained with this kind of parallelism."""
    kind, method, name = settings.parallel.kind, settings.method, settings.optimizer.name
    if kind == DDP:
        if settings.parallel.replicas > 1:
            raise InputError("replicas: got more than 1 with parallel ddp, expected fsdp; remove it, or choose that")
        return
    if method.base != "full":
        raise InputError(f"base: got {method.base} with parallel {kind}, expected full; or choose ddp")
    if settings.loss.kind == CONSISTENCY:
        raise InputError(f"loss: got consistency with parallel {kind}, expected flow; or choose ddp")
    if kind not in OPTIMIZERS[name].parallel:
        expected = alternatives([other for other, row in OPTIMIZERS.items() if kind in row.parallel])
        kinds = alternatives(list(OPTIMIZERS[name].parallel))
        raise InputError(f"optimizer: got {name} with parallel {kind}, expected {expected}; or choose {kinds}")


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
    """Raise InputError if a field is set but not `used`, because it has no effect without the option `needed`."""
    value = getattr(settings, field_name)
    if value != getattr(type(settings), field_name) and not used:
        raise InputError(
            f"{name}: {field_name}: got {value} without {needed}, where it does nothing; set that, or remove this"
        )
