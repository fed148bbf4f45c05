"""The settings of a training run: their descriptions, ranges and checks, and the TOML file that has them.

The help of the command, docs/settings.toml and the tooltips of the training nodes come from the rows of the classes.
"""

from __future__ import annotations

import difflib
import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from functools import partial
from operator import attrgetter
from pathlib import Path
from textwrap import wrap
from typing import Annotated, Any, NamedTuple, get_args, get_origin, get_type_hints

from ..checkpoints.keys import ROWS
from ..errors import InputError
from ..model.latents import DOWNSCALE, LARGEST
from ..runtime.checks import RENAME, check_number, check_text
from ..runtime.text import Json
from ..runtime.user_files import read_user_file
from ..sampling.guidance import LARGEST_GUIDANCE
from ..sampling.schedules import LARGEST_STEPS
from .images import LARGEST_RESOLUTION
from .optimizers import DDP, FSDP, KINDS, OFFLOADED, OPTIMIZERS, alternatives


class AdapterSpec(NamedTuple):
    """A row of ADAPTERS: everything that distinguishes one kind of adapter from another."""

    # The class of its config in peft.
    config: str
    # Matrices that take the factor alpha / rank when the file is written. LoKr has only one of the two.
    scaled: tuple[str, ...]
    # A file that contains one of these tensors is of this kind. If several rows match, the last one counts.
    marks: tuple[str, ...]
    # Additional arguments of the config class.
    options: Mapping[str, bool] = {}
    # The exact base weights are needed to train and to write the file. So no int8 base.
    needs_base: bool = False

    @property
    def is_lora(self) -> bool:
        """Whether it has the options of LoRA: dropout, and metadata in its file from which loaders build the config."""
        return self.config == "LoraConfig"


ADAPTERS = {
    "lora": AdapterSpec("LoraConfig", scaled=("lora_B",), marks=("lora_A",)),
    # The norms of the base's rows are a part of a DoRA.
    "dora": AdapterSpec("LoraConfig", scaled=("lora_B",), marks=(ROWS,), options={"use_dora": True}, needs_base=True),
    "lokr": AdapterSpec("LoKrConfig", scaled=("lokr_w1", "lokr_w1_a"), marks=("lokr_w1", "lokr_w1_a")),
}
METHODS = (*ADAPTERS, "controlnet", "full")
BASES = ("full", "int8")
# Adapters that can be trained on a base in 8 bits.
QUANTISED = tuple(name for name, row in ADAPTERS.items() if not row.needs_base)
# Optimizers that find the learning rate themselves.
FINDING_RATE = tuple(name for name, row in OPTIMIZERS.items() if row.finds_rate)
TARGETS = ("attention", "feed_forward", "both")
SCHEDULES = ("constant", "cosine", "linear")
# The parameter is Phase.cycles or Phase.power.
SCHEDULES_WITH_PARAMETER = ("cosine_with_restarts", "polynomial")
LOGIT_NORMAL, MODE, UNIFORM = TIMES = ("logit_normal", "mode", "uniform")
DTYPES = ("float32", "bfloat16")
FLOW, CONSISTENCY = "flow", "consistency"
AUTO, ON, OFF = "auto", "on", "off"
# What compiled blocks need: FSDP gathers the weights of each block, the consistency loss and a base in 8 bits have
# derivatives that torch does not compile, and the hook of a ControlNet is another one in each step.
COMPILED = {"method.kind": (*ADAPTERS, "full"), "method.base": ("full",), "loss.kind": (FLOW,), "parallel.kind": (DDP,)}
# Names that Windows reserves for devices, with any ending.
WINDOWS_NAMES = {"con", "prn", "aux", "nul", *(f"{port}{digit}" for port in ("com", "lpt") for digit in range(1, 10))}
# Bytes of a name in UTF-8. File systems allow 255 bytes with the ending.
LONGEST_NAME = 240
LARGEST_FILE = 1_000_000
CONTROL_CHARACTER = re.compile(r"[\x00-\x1f\x7f]")
# A key of n parts takes n^2 time and memory. Python does not write numbers of more than 4,300 digits.
PART = r"""(?:[\w-]+|"[^"\n]*"|'[^'\n]*')"""
ENDLESS = re.compile(rf"(?<![\w-]){PART}(?:[ \t]*\.[ \t]*{PART}){{99}}|0[xob]\w{{1000}}")
SINGLE_QUOTES = "write a path with backslashes in single quotes, or with /"
# Columns of the description.
WIDTH = 100
# Larger limits only prevent overflows, and the description leaves them out.
LARGEST_LIMIT = 10**5
# A path. In a settings file it is relative to the file. Ranks on several machines may have different ones.
Place = Annotated[str, "place"]
# Called with the field's name and value. Raises InputError for a value that is not allowed.
Check = Callable[[str, Any], None]
# {option: values}. The field has an effect only if each option has one of these values. (): any value except the
# option's default. "kind" is in the same table, "method.kind" in the table method.
Needs = Mapping[str, Sequence[Any]]


def check_side(name: str, pixels: int, low: int, high: int) -> None:
    if pixels % DOWNSCALE or not low <= pixels <= high:
        raise InputError(f"{name}: got {pixels}, expected a multiple of {DOWNSCALE} from {low} to {high}; change it")


def one_of(name: str, value: str, names: Sequence[str]) -> None:
    if value not in names:
        near = difflib.get_close_matches(str(value), names, 1, 0.0)[0]
        raise InputError(f"{name}: got {value!r:.40}, expected one of {', '.join(names)}; the nearest is {near}")


def within(low: float, high: float) -> Check:
    return partial(check_number, low=low, high=high)


def among(*names: str) -> Check:
    return partial(one_of, names=names)


def sides_from(low: int, high: int = LARGEST) -> Check:
    return partial(check_side, low=low, high=high)


def setting(default: Any, text: str, check: Check | None = None, needs: Needs | None = None) -> Any:
    """Return a field of a settings class. `text` describes it to users, `check` is applied to its value or values.

    It has no effect without the options `needs`, so a value other than the default is then an error.
    """
    return field(default=default, metadata={"help": text, "check": check, "needs": needs or {}})


# Fields that have an effect with an adapter only.
for_adapters = partial(setting, needs={"kind": (*ADAPTERS,)})


@dataclass(frozen=True)
class Method:
    """What is trained: an adapter (lora, dora, lokr), a controlnet, or with full all weights."""

    kind: str = setting(
        "lora",
        "Use lora for a first training: every program reads it. dora is slower and learns a little more per step. lokr "
        "makes the smallest file.",
        among(*METHODS),
    )
    rank: int = for_adapters(
        16,
        "The size of the LoRA. 8 to 32 is usual. A higher rank can learn more and makes a larger file.",
        within(1, 1024),
    )
    alpha: float | None = for_adapters(
        None, "The effect of the LoRA is scaled by alpha / rank. Not set or 0: not scaled.", within(0, 1e5)
    )
    targets: str = for_adapters(
        "attention",
        "The layers that learn. attention is enough to start with. both learns more and needs more images.",
        among(*TARGETS),
    )
    weights: str = setting(
        "float32",
        "controlnet and full only: the precision of the trained weights. bfloat16 rounds them stochastically.",
        among(*DTYPES),
        needs={"kind": ("controlnet", "full")},
    )
    blocks: int = setting(
        7,
        "ControlNet only: how many of the model's first blocks it copies. NVIDIA uses 7. Use 3 for the demo model.",
        within(1, 255),
        needs={"kind": ("controlnet",)},
    )
    start: Place = for_adapters(
        "", "The file of a LoRA, DoRA or LoKr to begin with. The method, rank and targets must be the file's."
    )
    base: str = setting(
        "full",
        "int8 stores the model in 8 bits while a lora or lokr is trained. This takes about half the memory.",
        among(*BASES),
    )
    layers: tuple[str, ...] = for_adapters(
        (), 'Adapters only: patterns such as "transformer_blocks.1?.*". Only matching layers of targets learn.'
    )
    dropout: float = setting(
        0.0,
        "lora and dora only: the share of an adapter's inputs that a step drops (lora_dropout of peft).",
        within(0, 0.99),
        needs={"kind": [name for name, row in ADAPTERS.items() if row.is_lora]},
    )

    @property
    def is_adapter(self) -> bool:
        """Whether an adapter is trained. Otherwise weights are trained directly."""
        return self.kind in ADAPTERS

    @property
    def scale(self) -> float:
        """The factor of the adapter's output."""
        return self.alpha / self.rank if self.alpha else 1.0


for_flow = partial(setting, needs={"kind": (FLOW,)})
for_logit_normal = partial(setting, needs={"kind": (FLOW,), "times": (LOGIT_NORMAL,)})


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
        needs={"kind": (CONSISTENCY,)},
    )
    times: str = for_flow(
        LOGIT_NORMAL, "flow only: the distribution of the timesteps, before the model's shift.", among(*TIMES)
    )
    logit_mean: float = for_logit_normal(
        0.0,
        "logit_normal only: the mean, as in NVIDIA's code. Above 0: more noise. diffusers uses the opposite sign.",
        within(-10, 10),
    )
    logit_std: float = for_logit_normal(1.0, "logit_normal only: the standard deviation.", within(1e-3, 10))
    # It is a density up to 1.75 (Esser et al. 2024, arXiv 2403.03206, section 3.1).
    mode_scale: float = setting(
        1.29, "mode only: the scale of SD3's distribution.", within(-1, 1.75), needs={"kind": (FLOW,), "times": (MODE,)}
    )


for_prodigy = partial(setting, needs={"name": FINDING_RATE})


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
    d0: float = for_prodigy(
        1e-6, "prodigy only: the first estimate of how far the weights have to move.", within(1e-12, 1)
    )
    d_coef: float = for_prodigy(
        1.0, "prodigy only: a factor of the learning rate that prodigy finds.", within(1e-3, 1e3)
    )


for_fsdp = partial(setting, needs={"kind": (FSDP, OFFLOADED)})


@dataclass(frozen=True)
class Parallel:
    """How the processes of a launcher such as torchrun share the model."""

    kind: str = setting(
        DDP,
        "ddp: each process has the whole model. fsdp: each has some rows of every weight. fsdp_offload: these are "
        "in the CPU's memory while they are not used.",
        among(*KINDS),
    )
    block: str = for_fsdp("", "FSDP only: the class of the modules that are gathered in turn. Empty: SANA's block.")
    replicas: int = for_fsdp(
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
        sides_from(DOWNSCALE, LARGEST_RESOLUTION),
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
        among(*SCHEDULES, *SCHEDULES_WITH_PARAMETER),
    )
    warmup: int = setting(0, "Steps in which the learning rate rises from 0.", within(0, 10**9))
    cycles: int = setting(
        1,
        "cosine_with_restarts only: how often the learning rate falls to 0.",
        within(1, 10**6),
        needs={"schedule": ("cosine_with_restarts",)},
    )
    power: float = setting(
        1.0, "polynomial only: the exponent of the fall to 0.", within(1e-3, 1e3), needs={"schedule": ("polynomial",)}
    )
    repeats: tuple[int, ...] = setting(
        (), "For each of data: how many times an epoch learns it (num_repeats of kohya). []: once.", within(1, 10**4)
    )
    weights: tuple[float, ...] = setting((), "For each of data: the factor of its loss. []: 1.", within(0, 10**3))
    regularisation: tuple[Place, ...] = setting(
        (),
        "Other images of the same kind, such as other people. They are learned as often as yours, so that the model "
        "does not forget them.",
    )
    prior_loss_weight: float = setting(
        1.0, "How much the regularisation images count.", within(0, 10**3), needs={"regularisation": ()}
    )
    resolutions: tuple[int, ...] = setting(
        (),
        "More sizes. Every image is learned at resolution and at each of these.",
        sides_from(DOWNSCALE, LARGEST_RESOLUTION),
    )
    flip: bool = setting(False, "Mirror the images half of the time.")
    crops: int = setting(
        1, "Different crops of each image, of which an epoch learns one at random. 1: the middle.", within(1, 64)
    )
    tag_orders: int = setting(
        1, 'Different orders of a caption\'s tags, which ", " divides. An epoch learns one at random.', within(1, 64)
    )
    keep_tags: int = setting(
        0,
        "tag_orders only: how many first tags stay where they are (keep_tokens of kohya).",
        within(0, 10**3),
        needs={"tag_orders": ()},
    )
    caption: str = setting("", "The caption of images that have none beside them, for example with a trigger word.")
    regularisation_caption: str = setting(
        "", "The caption of regularisation images that have none beside them.", needs={"regularisation": ()}
    )

    @property
    def largest(self) -> int:
        """The resolution that takes the most memory."""
        return max((self.resolution, *self.resolutions))


for_prompts = partial(setting, needs={"prompts": ()})


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
        needs={"every": ()},
    )
    prompts: tuple[str, ...] = setting(
        (), "Prompts whose images show what has been learned so far. Prompt i uses seed i.", needs={"every": ()}
    )
    negative_prompt: str = setting(
        "", "The negative prompt of these images.", needs={"prompts": (), "loss.kind": (FLOW,)}
    )
    width: int = for_prompts(0, "The width of these images in pixels. 0: the last phase's resolution.", sides_from(0))
    height: int = for_prompts(0, "The height of these images in pixels. 0: the last phase's resolution.", sides_from(0))
    steps: int | None = for_prompts(
        None, "The sampling steps of these images. Not set: the model's default.", within(1, LARGEST_STEPS)
    )
    guidance: float | None = for_prompts(
        None, "The guidance of these images. Not set: the model's default.", within(0, LARGEST_GUIDANCE)
    )
    control: tuple[Place, ...] = setting(
        (),
        "ControlNet only: a control image for each prompt, or one for all.",
        needs={"method.kind": ("controlnet",), "prompts": ()},
    )


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
        "",
        "Words to note in the file of the LoRA, so that others know them. They are not added to captions.",
        needs={"method.kind": (*ADAPTERS,)},
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
        True,
        "On: if the GPU's memory needs it, each step computes some values twice. This takes far less memory and up to "
        "twice the time. Off: never.",
    )
    compile: str = setting(
        AUTO,
        "Adapters and full only: compile the model's blocks, so that a step takes less of the CPU's time. This takes "
        "about a minute for each size of the images. auto: on a GPU, in runs of many steps.",
        among(AUTO, ON, OFF),
        needs=COMPILED,
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

    @property
    def uses_autocast(self) -> bool:
        """Whether the trained weights have another precision than the computation."""
        return not self.method.is_adapter and self.method.weights != self.dtype

    @property
    def can_compile(self) -> bool:
        """Whether `compile` has an effect."""
        return all(attrgetter(option)(self) in values for option, values in COMPILED.items())

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
    choices: tuple[str, ...]
    help: str


def describe_field(path: str) -> FieldInfo:
    """Return the type, limits and help of a field such as "seed", "optimizer.clip" or "phase.steps"."""
    table, _, name = path.rpartition(".")
    (row,) = (row for row in fields(TABLES[table]) if row.name == name)
    # The type in `float | None` and in `tuple[float, ...]` is float.
    hint = get_type_hints(TABLES[table])[name]
    kind = next(kind for kind in get_args(hint) or (hint,) if kind is not type(None))
    limits = getattr(row.metadata["check"], "keywords", {})
    low, high, choices = limits.get("low"), limits.get("high"), limits.get("names", ())
    return FieldInfo(kind, row.default, low, high, choices, row.metadata["help"])


def check_settings(settings: TrainingSettings) -> TrainingSettings:
    """Return `settings`. Raises InputError for the first value that is out of range or conflicts with another."""
    check_fields(settings)
    for number, phase in enumerate(settings.phase, 1):
        check_fields(phase, f"phase {number}: ")
    check_method(settings)
    validation = settings.validation
    images, prompts = len(validation.control), len(validation.prompts)
    if settings.method.kind == "controlnet" and prompts and images not in (1, prompts):
        raise InputError(
            f"control: got {images} control images for {prompts} prompts, expected one, or one for each; name as many"
        )
    check_used(settings, settings)
    if settings.optimizer.ema and OPTIMIZERS[settings.optimizer.name].averages:
        raise InputError(
            f"ema: got {settings.optimizer.ema} with optimizer {settings.optimizer.name}, which averages the weights "
            "itself, expected 0; remove it"
        )
    if validation.every and not (validation.prompts or validation.share):
        raise unused("validation.every", validation.every, "validation.prompts or validation.share")
    check_parallel(settings)
    check_name(settings.name)
    if not settings.phase:
        raise InputError("phase: got none, expected one or more [[phase]] tables; see recipes/")
    for number, phase in enumerate(settings.phase, 1):
        check_phase(phase, f"phase {number}: ", settings)
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


def check_used(table: Any, settings: TrainingSettings, prefix: str = "", table_name: str = "") -> None:
    """Raise InputError for a field of `table` that is set without the options that it needs to have an effect.

    `table` is `settings` or one of its tables. Errors begin with `prefix` and the field's name. `table_name` precedes
    the names of the options.
    """
    for row in fields(table):
        value = getattr(table, row.name)
        if is_dataclass(value):
            check_used(value, settings, f"{row.name}.", f"{row.name}.")
        if value == row.default:
            continue
        for option, values in row.metadata.get("needs", {}).items():
            *other_table, name = option.split(".")
            owner = getattr(settings, other_table[0]) if other_table else table
            chosen = getattr(owner, name)
            is_used = chosen in values if values else chosen != getattr(type(owner), name)
            if not is_used:
                needed = option if other_table else table_name + option
                raise unused(prefix + row.name, value, f"{needed} {alternatives(list(values))}" if values else needed)


def unused(name: str, value: Any, needed: str) -> InputError:
    """Return the error of a field that is set without the option `needed`."""
    got = json.dumps(value, ensure_ascii=False)
    return InputError(f"{name}: got {got:.40} without {needed}, where it does nothing; set that, or remove this")


def check_method(settings: TrainingSettings) -> None:
    """Check the method with its precision, base and loss."""
    method = settings.method
    if method.weights == "bfloat16" and settings.dtype == "float32":
        raise InputError("weights: got bfloat16 with dtype float32, expected the same; change one of them")
    if method.base == "int8" and method.kind not in QUANTISED:
        raise InputError(f"base: got int8 with method {method.kind}, expected full; or choose {' or '.join(QUANTISED)}")
    if settings.loss.kind == CONSISTENCY and not method.is_adapter:
        raise InputError(
            f"loss: got consistency with method {method.kind}, expected flow; or choose {', '.join(ADAPTERS)}"
        )


def check_parallel(settings: TrainingSettings) -> None:
    """Raise InputError if the method, the loss or the optimizer cannot be trained with this kind of parallelism."""
    kind, method, name = settings.parallel.kind, settings.method, settings.optimizer.name
    if kind == DDP:
        return
    if method.base != "full":
        raise InputError(f"base: got {method.base} with parallel {kind}, expected full; or choose ddp")
    if settings.loss.kind == CONSISTENCY:
        raise InputError(f"loss: got consistency with parallel {kind}, expected flow; or choose ddp")
    if kind not in OPTIMIZERS[name].parallel:
        expected = alternatives([other for other, row in OPTIMIZERS.items() if kind in row.parallel])
        kinds = alternatives(list(OPTIMIZERS[name].parallel))
        raise InputError(f"optimizer: got {name} with parallel {kind}, expected {expected}; or choose {kinds}")


def check_name(name: str) -> None:
    """Raise InputError unless the file of a LoRA can have this name on every operating system."""
    # Windows drops spaces and dots at the end.
    is_stable = name == name.strip() and not name.endswith(".")
    if not name or not is_stable or not name.isprintable() or set(name) & set('/\\:*?"<>|'):
        raise InputError(f"name: got {name!r:.40}, expected the name of a file; use letters and digits")
    if name.partition(".")[0].rstrip().casefold() in WINDOWS_NAMES:
        raise InputError(f"name: got {name!r:.40}, which Windows reserves for a device; choose another")
    if name.casefold() == "state":
        raise InputError(f"name: got {name!r}, which is the name of a state's file; choose another")
    if len(name.encode()) > LONGEST_NAME:
        raise InputError(f"name: got {name!r:.40}, expected at most {LONGEST_NAME} bytes; choose a shorter one")


def check_phase(phase: Phase, prefix: str, run: TrainingSettings) -> None:
    """Raise InputError for values of a phase that conflict with each other. Errors begin with `prefix`."""
    sides = (phase.resolution, *phase.resolutions)
    if len({*sides}) < len(sides):
        raise InputError(f"{prefix}resolutions: got a size twice, expected others than {phase.resolution}; remove it")
    check_used(phase, run, prefix)
    for name, numbers in (("repeats", phase.repeats), ("weights", phase.weights)):
        if len(numbers) not in (0, len(phase.data)):
            raise InputError(
                f"{prefix}got {len(numbers)} {name} for {len(phase.data)} sets of data, expected one for each"
            )
    if phase.weights and not any(phase.weights):
        raise InputError(f"{prefix}weights: got only 0, so nothing is trained; raise one")
    if (phase.epochs is None) == (phase.steps is None):
        raise InputError(f"{prefix}got {'neither' if phase.steps is None else 'both'} of epochs and steps; set one")
    if not phase.data:
        raise InputError(f"{prefix}got no data, expected one or more folders; name the folder of your images")


# The settings file


def describe_settings() -> str:
    """Return all keys of a settings file with their defaults as TOML, and above each its description and range."""
    lines: list[str] = []
    for table, kind in TABLES.items():
        if table:
            lines += ["", f"# {kind.__doc__ or table}", "[[phase]]" if table == "phase" else f"[{table}]"]
        for row in fields(kind):
            if row.name in TABLES:
                continue
            info = describe_field(f"{table}.{row.name}")
            comment = info.help
            if info.choices:
                comment += f" One of {', '.join(info.choices)}."
            elif info.low is not None and info.high is not None:
                limit = f"{info.low:g} to {info.high:g}" if info.high <= LARGEST_LIMIT else f"at least {info.low:g}"
                comment += f" Range: {limit}."
            lines += wrap(comment, WIDTH, initial_indent="# ", subsequent_indent="# ")
            if info.default is MISSING:
                lines.append(f'{row.name} = ""  # required')
            else:
                # TOML has no value for "not set".
                lines.append(f"# {row.name} =" if info.default is None else f"{row.name} = {json.dumps(info.default)}")
    return "\n".join(lines)


def read_settings(file: Path) -> TrainingSettings:
    """Return the settings in the TOML file `file`. Paths in it are relative to its folder.

    Raises MissingFileError, ReadError, and InputError for text that is no TOML, for an unknown or missing key, and for
    values that are out of range.
    """
    data = read_user_file("settings", file, "a TOML file as in recipes/", LARGEST_FILE + 1)
    settings = parse(TrainingSettings, parse_toml(data, file.name), file.name, file.parent)
    try:
        return check_settings(settings)
    except InputError as error:
        raise type(error)(f"{file.name}: {error}") from None


def parse_toml(data: bytes, name: str) -> Json:
    """Return the tables of `data`. Errors call the file `name`."""
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    if len(data) > LARGEST_FILE:
        raise InputError(f"{name}: got more than {LARGEST_FILE} bytes, expected a TOML file; name another")
    try:
        # Windows editors put a byte order mark before the text.
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(f"{name}: got a file that is not UTF-8 at byte {error.start}; save it as UTF-8") from None
    try:
        if ENDLESS.search(text):
            raise tomllib.TOMLDecodeError("a key has 100 parts, or a number 1000 digits")
        return tomllib.loads(text)
    # RecursionError: tables that are nested too deeply.
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        line = re.search(r"at line (\d+)", str(error))
        has_backslash = line is not None and "\\" in text.split("\n")[int(line[1]) - 1]
        remedy = SINGLE_QUOTES if has_backslash else "correct that line"
        raise InputError(f"{name}: not TOML ({str(error) or 'nested too deeply'!s:.80}); {remedy}") from None


def parse(kind: type, table: object, name: str, folder: Path) -> Any:
    """Return `table` as the dataclass `kind`. Its paths are relative to `folder`. Errors call it `name`."""
    if not isinstance(table, Mapping):
        raise InputError(f"{name}: got {table!r:.40}, expected a table; see recipes/")
    hints = get_type_hints(kind, include_extras=True)
    for key in table:
        if key not in hints:
            near = difflib.get_close_matches(key, hints, 1, 0.0)[0]
            raise InputError(f"{name}: got the key {key!r:.40}, which nothing reads; the nearest is {near}")
    required = {row.name for row in fields(kind) if row.default is MISSING and row.default_factory is MISSING}
    for key in sorted(required - table.keys()):
        raise InputError(f"{name}: {key} is missing; add it")
    return kind(**{key: parse_value(hints[key], value, f"{name}: {key}", folder) for key, value in table.items()})


def parse_value(kind: Any, value: object, name: str, folder: Path) -> Any:
    if get_origin(kind) is Annotated:
        path = parse_value(get_args(kind)[0], value, name, folder)
        if not path:
            return path
        if CONTROL_CHARACTER.search(path):
            # For example "D:\new\train" in double quotes.
            raise InputError(f"{name}: got {path!r:.80}, a path with a control character; {SINGLE_QUOTES}")
        return str(folder / path)
    if is_dataclass(kind) and isinstance(kind, type):
        return parse(kind, value, name, folder)
    if get_origin(kind) is tuple:
        inner = get_args(kind)[0]
        # A single text is a list of one.
        values = [value] if inner in (str, Place) and isinstance(value, str) else value
        if is_dataclass(inner) and isinstance(value, Mapping):
            raise InputError(f"{name}: got [phase], expected a list of tables; write [[phase]]")
        if not isinstance(values, list):
            raise InputError(f"{name}: got {value!r:.40}, expected a list; put it into brackets")
        return tuple(parse_value(inner, item, name, folder) for item in values)
    plain = next(option for option in get_args(kind) or (kind,) if option is not type(None))
    if plain is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if type(value) is not plain:
        words = {str: "a text in quotes", int: "a whole number", float: "a number", bool: "true or false"}
        raise InputError(f"{name}: got {value!r:.40}, expected {words[plain]}; correct it")
    return value
