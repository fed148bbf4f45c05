"""Training runs in tests: a file of settings, what stops a run, and whether two runs have come to the same."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file

from sana_core.training.states import find_states, read_log


class Stopped(Exception):
    """What a test breaks a run off with."""


def stopping_after(steps):
    """A list for the reports of a run, and a poll that cancels the run after `steps` steps."""
    lines = []

    def poll():
        if len([line for line in lines if "loss" in line]) == steps:
            raise Stopped

    return lines.append, poll


def write_settings(folder, checkpoint, name, own, phase):
    """Write the settings of a LoRA of the images in `folder`. `own` and `phase` replace and add settings."""
    paths = {"model": str(checkpoint), "out": str(folder / name), "cache": str(folder / "cache")}
    all_settings = {**paths, "dtype": "float32", "keep": 2, "method.rank": 2, **own}
    data = {"data": str(folder / "pictures"), "resolution": 128, "batch": 1, "learning_rate": 1e-3, **phase}
    # a value is written in JSON as it is in TOML
    lines, learnt = ([f"{key} = {json.dumps(value)}" for key, value in table.items()] for table in (all_settings, data))
    file = folder / f"{name}.toml"
    file.write_text("\n".join([*lines, "[[phase]]", *learnt]))
    return file


def lines_of(out):
    """The log of a run in `out` but for the seconds that it took."""
    return [{name: value for name, value in line.items() if name != "seconds"} for line in read_log(Path(out))]


def same(one, other):
    """Whether two dicts of tensors, or the files of them, are the same to the bit."""
    one, other = (load_file(item) if isinstance(item, Path) else item for item in (one, other))
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def difference(one, other):
    """The largest difference of two dicts of tensors."""
    assert one.keys() == other.keys()
    return max(float((one[name] - other[name]).abs().max()) for name in one)


def newest(out):
    """The folder of the last state of a run in `out`."""
    return find_states(Path(out))[-1][1]


def last_state(out):
    """The tensors of the last state of a run in `out`."""
    return load_file(newest(out) / "state.safetensors")


def velocity(transformer):
    """What a transformer makes of a latent and a caption without meaning."""
    numbers = torch.Generator().manual_seed(2)
    x = torch.randn(1, 32, 4, 4, generator=numbers).to(transformer.dtype)
    embeds = torch.randn(1, 7, transformer.config.caption_channels, generator=numbers).to(transformer.dtype)
    with torch.no_grad():
        return transformer(x, embeds, torch.tensor([500.0]), return_dict=False)[0]
