"""How tests stop runs of training, and what they compare them by."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file

from sana_core.training.runs import find_states


class Stopped(Exception):
    pass


def stopping_after(steps):
    """What a run reports to, and a poll that cancels once it was called between so many steps and the next."""
    lines = []

    def poll():
        if len([line for line in lines if "loss" in line]) == steps:
            raise Stopped

    return lines.append, poll


def lines_of(settings):
    """The lines of a run's log, as they are, without how long steps took."""
    lines = map(json.loads, Path(settings.out, "log.jsonl").read_text(encoding="utf-8").splitlines())
    return [{name: value for name, value in line.items() if name != "seconds"} for line in lines]


def newest(settings):
    return find_states(Path(settings.out))[-1][1]


def same_state(first, second):
    one, other = (load_file(newest(each) / "state.safetensors") for each in (first, second))
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def difference(one, other):
    assert one.keys() == other.keys()
    return max(float((one[name] - other[name]).abs().max()) for name in one)
