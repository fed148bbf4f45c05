"""The widgets of the training nodes: which training setting each one sets, and errors that name the widget."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ....sana_core.errors import SanaError
from ....sana_core.runtime.text import one_line
from ....sana_core.training.settings import ADAPTERS, SCHEDULES, FieldInfo, describe_field

if TYPE_CHECKING:
    from .view import Dataset


class Field(NamedTuple):
    """A widget of a training node. Range, help and default come from the setting."""

    # The setting, as in a settings file.
    path: str
    # Numbers: the step of the widget's arrows.
    step: float = 1
    # The default, if it is not the default of the setting.
    default: Any = None
    # Choices only: the names that the canvas offers, if it does not offer all.
    names: tuple[str, ...] = ()
    # Nodes 2.0 shows the widget among the advanced ones.
    advanced: bool = False

    def info(self) -> FieldInfo:
        """Return the setting as the canvas shows it."""
        info = describe_field(self.path)
        default = info.default if self.default is None else self.default
        return info._replace(default=default, choices=self.names or info.choices)


MAIN = {
    "steps": Field("phase.steps", default=500),
    "learning_rate": Field("phase.learning_rate", step=1e-6),
    "rank": Field("method.rank"),
    "blocks": Field("method.blocks"),
    "batch_size": Field("phase.batch"),
}
# SANA Train Settings, in the order of its widgets. What a second training is most likely to change comes first.
OPTIONAL = {
    "validate_every": Field("validation.every", default=100),
    "held_out": Field("validation.share", step=0.01),
    "checkpoint_gradients": Field("checkpoint_gradients"),
    "accumulate": Field("phase.accumulate"),
    "optimizer": Field("optimizer.name"),
    "schedule": Field("phase.schedule", names=SCHEDULES),
    "warmup": Field("phase.warmup"),
    "gradient_clip": Field("optimizer.clip", step=0.01),
    "method": Field("method.kind", names=(*ADAPTERS,)),
    "targets": Field("method.targets"),
    "alpha": Field("method.alpha", step=0.5, default=0.0),
    "base": Field("method.base"),
    "caption_dropout": Field("caption_dropout", step=0.01, advanced=True),
    "weight_decay": Field("optimizer.weight_decay", step=0.001, advanced=True),
    "ema": Field("optimizer.ema", step=0.0001, advanced=True),
    "d0": Field("optimizer.d0", step=1e-7, advanced=True),
    "d_coef": Field("optimizer.d_coef", step=0.001, advanced=True),
    "save_every": Field("save_every", advanced=True),
    "keep": Field("keep", advanced=True),
    # The canvas would change a widget "seed" with every run, and another seed is another training.
    "training_seed": Field("seed", advanced=True),
    "trigger": Field("trigger", advanced=True),
    "prior_loss_weight": Field("phase.prior_loss_weight", step=0.05, advanced=True),
}
FIELDS = {**MAIN, **OPTIONAL}
# Widgets whose value is converted to the value of a setting.
OTHERS = {"existing_lora": "method.start", "validation_prompts": "validation.prompts"}
# Inputs of SANA Train Settings that have no effect on a ControlNet.
LORA_ALONE = ("method", "targets", "alpha", "base", "trigger", "prior_loss_weight", "existing_lora", "regularisation")
WIDGETS = {**{field.path: name for name, field in FIELDS.items()}, **{path: name for name, path in OTHERS.items()}}
# Settings whose errors begin with their name alone.
BARE = {"seed": "training_seed", "start": "existing_lora", "loras": "existing_lora"}


@dataclasses.dataclass(frozen=True)
class RunSettings:
    """The output of SANA Train Settings: values by widget, the LoRA to begin with, and the regularisation images."""

    values: Mapping[str, Any]
    existing_lora: str = dataclasses.field(default="", repr=False)  # path
    regularisation: Dataset | None = None


def default_values(names: Mapping[str, Field] = OPTIONAL) -> dict[str, Any]:
    return {name: field.info().default for name, field in names.items()}


def tables_of(values: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return {table of the settings: {field: value}} of `values` by widget; the table of "seed" is ""."""
    tables: dict[str, dict[str, Any]] = {"": {}, "method": {}, "optimizer": {}, "phase": {}, "validation": {}}
    for name, value in values.items():
        if name in FIELDS:
            table, _, field = FIELDS[name].path.rpartition(".")
            tables[table][field] = value
    return tables


def with_widgets(text: str) -> str:
    """Return an error's text with the names of widgets in place of the names of settings."""
    text = text.removeprefix("phase 1: ")
    field, colon, message = text.partition(": ")
    text = BARE.get(field, field) + colon + message
    dotted = "|".join(re.escape(path) for path in WIDGETS if "." in path)
    return re.sub(rf"\b({dotted})\b", lambda match: WIDGETS[match[0]], text)


def proposal_with_widgets(text: str) -> str:
    """Return a proposal of `fit_lines`, such as 'base = "int8" in [method]', with the names of widgets."""
    text = re.sub(r"\bbatch = (\d+ and accumulate = \d+) in phase 1", r"batch_size = \1", text)
    names = re.compile(r"\b(\w+) = (\S+) in \[(\w+)\]")
    return names.sub(lambda match: f"{WIDGETS.get(f'{match[3]}.{match[1]}', match[1])} = {match[2]}", text)


@contextmanager
def naming_widgets(existing_lora: str = "") -> Iterator[None]:
    """Let errors begin with the name of the widget that the user sees, also for the file `existing_lora`."""
    try:
        yield
    except SanaError as error:
        text = with_widgets(str(error))
        if existing_lora and text.partition(": ")[0].endswith(one_line(Path(existing_lora).name)):
            text = f"existing_lora: {text}"
        raise type(error)(text) from None
