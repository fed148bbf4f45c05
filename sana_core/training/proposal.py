"""The settings nearest to those of a run that fit a card, and a plan as a person reads it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

from ..memory import CARDS, CONTEXT
from .plan import Base, Plan, plan_training
from .settings import QUANTISED, Phase, Settings

# of the optimizers the one with the least state
LEAST = "came8bit"

Change = Callable[[Settings], Settings]


class Proposal(NamedTuple):
    """Settings, how they differ from those that were asked about, in words, and what they take."""

    settings: Settings
    changes: tuple[str, ...]
    plan: Plan


def propose(settings: Settings, base: Base, card: float, accelerator: bool = True) -> Proposal:
    """Return the settings nearest to `settings` that fit a card of `card` bytes, or that miss it by the least.

    Changed is, as far as it must be, what slows a run down least: gradient checkpointing first, then smaller batches of
    which a step takes more, an optimizer with less state, no moving average, weights in bf16, a base in 8 bits.
    """

    def changed(changes: list[Change]) -> Settings:
        found = settings
        for change in changes:
            found = change(found)
        return found

    def needs(changes: list[Change]) -> int:
        return plan_training(changed(changes), base, accelerator).card

    chosen: list[Change] = []
    while needs(chosen) > card:
        now = changed(chosen)
        following = next((change for change in CHANGES if change(now) != now), None)
        if following is None:
            break
        chosen.append(following)
    enough = max(card, needs(chosen))
    # with what came last, some before it may not be needed: the dearest of those go first
    for index in reversed(range(len(chosen))):
        without = chosen[:index] + chosen[index + 1 :]
        if needs(without) <= enough:
            chosen = without
    found = changed(chosen)
    return Proposal(found, tuple(differences(settings, found)), plan_training(found, base, accelerator))


def checkpoint_gradients(settings: Settings) -> Settings:
    return replace(settings, checkpoint_gradients=True)


def divide_batches(settings: Settings) -> Settings:
    """Return `settings` with the batches that take the most divided by their least factor, more of them in a step."""
    most = max(phase.batch * phase.largest**2 if phase.batch > 1 else 0 for phase in settings.phase)

    def divide(phase: Phase) -> Phase:
        if phase.batch == 1 or phase.batch * phase.largest**2 < most:
            return phase
        factor = next(each for each in range(2, phase.batch + 1) if phase.batch % each == 0)
        return replace(phase, batch=phase.batch // factor, accumulate=phase.accumulate * factor)

    return replace(settings, phase=tuple(map(divide, settings.phase)))


def shrink_state(settings: Settings) -> Settings:
    return replace(settings, optimizer=replace(settings.optimizer, name=LEAST))


def drop_average(settings: Settings) -> Settings:
    return replace(settings, optimizer=replace(settings.optimizer, ema=0.0))


def round_weights(settings: Settings) -> Settings:
    if not settings.method.whole or settings.dtype == "float32":
        return settings
    return replace(settings, method=replace(settings.method, weights="bfloat16"))


def quantise_base(settings: Settings) -> Settings:
    if settings.method.kind not in QUANTISED:
        return settings
    return replace(settings, method=replace(settings.method, base="int8"))


# those that slow a run down least come first
CHANGES: tuple[Change, ...] = (
    checkpoint_gradients,
    divide_batches,
    shrink_state,
    drop_average,
    round_weights,
    quantise_base,
)


def differences(before: Settings, after: Settings) -> list[str]:
    """Return the keys of a settings file that differ, with their values in `after`."""
    found = []
    if before.checkpoint_gradients != after.checkpoint_gradients:
        found.append("checkpoint_gradients = true")
    for number, (one, other) in enumerate(zip(before.phase, after.phase, strict=True), 1):
        if one != other:
            found.append(f"batch = {other.batch} and accumulate = {other.accumulate} in phase {number}")
    if before.optimizer.name != after.optimizer.name:
        found.append(f'name = "{after.optimizer.name}" in [optimizer], with a warmup of some hundred steps')
    if before.optimizer.ema != after.optimizer.ema:
        found.append("ema = 0.0 in [optimizer]")
    if before.method.base != after.method.base:
        found.append(f'base = "{after.method.base}" in [method]')
    if before.method.weights != after.method.weights:
        found.append(f'weights = "{after.method.weights}" in [method]')
    return found


def table_lines(plan: Plan) -> list[str]:
    """Return the stages of `plan` as a table, in GB."""
    lines = [f"{'GB':32}{'weights':>9}{'state':>9}{'work':>9}{'together':>10}"]
    for stage in plan.stages:
        parts = "".join(f"{size / 1e9:9.2f}" for size in (stage.weights, stage.state, stage.work))
        lines.append(f"{stage.name:32}{parts}{stage.bytes / 1e9:10.2f}")
    return lines


def fit_lines(settings: Settings, base: Base, plan: Plan, card: float | None) -> list[str]:
    """Return whether `plan`, that of `settings`, fits a card of `card` bytes, and if not, what settings do.

    Without a card it is the smallest of CARDS that it fits.
    """
    needed = f"{plan.card / 1e9:.1f} GB with {CONTEXT / 1e9:.1f} GB for the driver"
    if card is None:
        fitting = [size for size in CARDS if plan.card <= size * 2**30]
        return [f"{needed}: " + (f"fits a GPU of {fitting[0]} GB" if fitting else f"more than {CARDS[-1]} GB")]
    name = f"a GPU of {card / 2**30:.4g} GB"
    if plan.card <= card:
        return [f"{needed}: fits {name}"]
    found = propose(settings, base, card)
    lines = [f"{needed}, for {plan.largest.name}: does not fit {name}"]
    if found.plan.card > card:
        least = f"{found.plan.card / 1e9:.1f} GB, for {found.plan.largest.name}"
        changes = ", with " + "; ".join(found.changes) if found.changes else ""
        return [*lines, f"the least that these settings can come to: {least}{changes}"]
    return [*lines, "fits with " + "; ".join(found.changes) + f": {found.plan.card / 1e9:.1f} GB"]
