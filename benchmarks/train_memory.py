"""The memory of a training step on fake tensors, compared with the prediction of sana_core.training.plan: `make bench`.

Writes benchmarks/train_memory.json. The trainer's step runs with the released sizes and the CPU's operations, on
tensors with a shape and no values. tests/live_bytes.py counts their bytes. No GPU has run this: the workspaces of
kernels, fragmentation and the driver are not included.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import torch
from fake_accelerator import FAKE, default_dtype
from live_bytes import LiveBytes
from torch._subclasses.fake_tensor import FakeTensor
from trainers import make_trainer, take_step

from benchmarks.machine import write
from sana_core.model.known_models import (
    MAX_TOKENS,
    TEXT_WIDTH,
    VARIANTS,
    Architecture,
    build_transformer,
)
from sana_core.runtime.user_files import FileRange
from sana_core.training.cache import Batch
from sana_core.training.dataset import Sample
from sana_core.training.plan import released_base, training_stage
from sana_core.training.ranks import ALONE, Ranks
from sana_core.training.schedule import TrainProgress
from sana_core.training.settings import Method, Optimizer, Phase, TrainingSettings, check_settings

# A step reads the weights of the losses from these.
SAMPLES = [Sample("", "", FileRange(Path()))] * 64
FULL, ROUNDED = Method("full"), Method("full", weights="bfloat16")
CONTROLNET, ROUNDED_CONTROLNET = Method("controlnet"), Method("controlnet", weights="bfloat16")
EIGHT_BITS = Method(base="int8")
# {variant: settings that differ from a LoRA of the attention at 1024 px with batch size 1 and AdamW}
CASES: dict[str, list[dict[str, Any]]] = {
    "0.6B": [
        {},
        {"checkpoint": False},
        {"pixels": 4096},
        {"method": FULL},
        {"method": ROUNDED, "optimizer": "came8bit"},
    ],
    "1.6B": [
        {},
        {"checkpoint": False},
        {"batch": 4},
        {"pixels": 512, "checkpoint": False, "batch": 4},
        {"pixels": 2048},
        {"pixels": 4096},
        {"method": Method(rank=64, targets="both"), "ema": 0.999},
        {"method": Method("dora")},
        {"method": Method("dora", targets="both"), "checkpoint": False},
        {"method": Method("lokr")},
        {"method": Method("lokr", targets="both"), "checkpoint": False},
        {"dtype": "float32"},
        {"method": FULL},
        {"method": FULL, "optimizer": "came"},
        {"method": FULL, "optimizer": "came8bit"},
        {"method": FULL, "optimizer": "came8bit", "pixels": 512, "batch": 4, "accumulate": 2},
        {"method": FULL, "optimizer": "came8bit", "checkpoint": False},
        {"method": ROUNDED, "optimizer": "came8bit", "accumulate": 2},
        {"method": ROUNDED, "optimizer": "adamw", "pixels": 2048},
        {"method": EIGHT_BITS},
        {"method": EIGHT_BITS, "checkpoint": False},
        {"method": Method(targets="both", base="int8"), "batch": 4},
        {"method": Method("lokr", base="int8")},
        {"method": Method("lokr", targets="both", base="int8"), "checkpoint": False},
        {"method": CONTROLNET},
        {"method": CONTROLNET, "checkpoint": False},
        {"method": CONTROLNET, "optimizer": "came", "accumulate": 2},
        {"method": CONTROLNET, "optimizer": "came", "accumulate": 2, "pixels": 2048},
        {"method": ROUNDED_CONTROLNET, "optimizer": "came8bit", "accumulate": 2},
        {"method": ROUNDED_CONTROLNET, "optimizer": "came8bit", "accumulate": 2, "pixels": 2048},
        {"method": ROUNDED_CONTROLNET, "checkpoint": False},
    ],
    "1.5-1.6B": [{"checkpoint": False}, {"method": FULL, "optimizer": "came8bit", "pixels": 2048}],
    "1.5-4.8B": [
        {},
        {"method": EIGHT_BITS},
        {"method": ROUNDED, "optimizer": "came8bit"},
        {"method": ROUNDED, "optimizer": "came8bit", "pixels": 512},
    ],
}


class Counted(NamedTuple):
    """Bytes of a training."""

    # Between two steps.
    idle: int
    # The peak in a step.
    peak: int


def make_settings(
    pixels: int = 1024,
    batch: int = 1,
    accumulate: int = 1,
    method: Method | None = None,
    optimizer: str = "adamw",
    ema: float = 0.0,
    checkpoint: bool = True,
    dtype: str = "bfloat16",
) -> TrainingSettings:
    phase = Phase(("data",), pixels, batch, accumulate, steps=1)
    optimizer_settings = Optimizer(optimizer, ema=ema)
    return check_settings(
        TrainingSettings(
            "model",
            "out",
            (phase,),
            dtype=dtype,
            method=method or Method(),
            optimizer=optimizer_settings,
            checkpoint_gradients=checkpoint,
        )
    )


def transformer(model: Architecture, dtype: torch.dtype, pixels: int) -> Any:
    """Return a transformer of that architecture with torch's initial weights."""
    with default_dtype(dtype):
        return build_transformer(model, pixels if pixels > 2048 else None)


def empty_prompt(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Return a replacement for Cache.empty, filled with zeros."""
    mask = torch.tensor([1] + [0] * (MAX_TOKENS - 1), dtype=torch.uint8)
    return {"embeds": torch.zeros(MAX_TOKENS, TEXT_WIDTH, dtype=dtype), "mask": mask}


def fake_batch(count: int, side: int, dtype: torch.dtype, control: bool = False) -> Batch:
    """Return a batch with latents of zeros and the longest captions, and with `control` latents of control images."""
    embeds = torch.zeros(count, MAX_TOKENS, TEXT_WIDTH, dtype=dtype)
    mask = torch.ones(count, MAX_TOKENS, dtype=torch.int64)
    latents = torch.zeros(count, 32, side, side)
    return Batch(latents, embeds, mask, None, ["image"] * count, latents.clone() if control else None)


def count_step(
    model: Architecture,
    settings: TrainingSettings,
    fake: bool = True,
    steps: int = 2,
    live: LiveBytes | None = None,
    ranks: Ranks = ALONE,
) -> Counted:
    """Return the bytes of the last of `steps` steps, in the first phase of `settings`. `live` counts them."""
    phase, live = settings.phase[0], live or LiveBytes(fake)
    side, dtype = phase.resolution // 32, getattr(torch, settings.dtype)

    def load(indices: list[int]) -> Batch:
        return fake_batch(len(indices), side, dtype, settings.method.kind == "controlnet")

    with contextlib.ExitStack() as stack:
        if fake:
            stack.enter_context(FAKE)
            stack.enter_context(mock.patch.object(torch.nn.Module, "_apply", replace_parameters))
            stack.enter_context(mock.patch.object(FakeTensor, "__deepcopy__", copy_parameter))
        stack.enter_context(live)
        # Run torchao's optimizers without a compiler.
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        weights = getattr(torch, settings.method.weights if settings.method.kind == "full" else settings.dtype)
        learner = make_trainer(transformer(model, weights, phase.resolution), 3.0, settings, ranks=ranks)
        data: Any = SimpleNamespace(cache=SimpleNamespace(load=load, empty=empty_prompt(dtype)), samples=SAMPLES)
        group = [list(range(phase.batch)) for _ in range(phase.accumulate)]
        for step in range(steps):
            live.restart()
            take_step(learner, data, group, TrainProgress(step), 1e-4)
        return Counted(live.alive, live.peak)


def replace_parameters(module: Any, function: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
    """Replace torch.nn.Module._apply: create new parameters, because the data of fake parameters cannot be replaced."""
    for owner in module.modules():
        for name, parameter in owner.named_parameters(recurse=False):
            setattr(owner, name, torch.nn.Parameter(function(parameter.detach()), parameter.requires_grad))
    return module


def copy_parameter(parameter: torch.Tensor, memo: dict[int, Any]) -> torch.nn.Parameter:
    """Copy a parameter. torch's copy would access the memory, which a fake parameter does not have."""
    return torch.nn.Parameter(parameter.detach().clone(), parameter.requires_grad)


def describe(settings: TrainingSettings) -> str:
    """Return the name of a case: its settings as text."""
    method, phase, optimizer = settings.method, settings.phase[0], settings.optimizer
    words = [f"{phase.resolution} px", f"batch {phase.batch}"]
    words += ["accumulated"] if phase.accumulate > 1 else []
    if method.kind == "full":
        words.append(f"all weights in {method.weights}")
    elif method.kind == "controlnet":
        words.append(f"ControlNet of {method.blocks} blocks in {method.weights}")
    else:
        base = settings.dtype if method.base == "full" else f"{method.base} and {settings.dtype}"
        words.append(f"{method.kind} of {method.targets}, rank {method.rank}, on {base}")
    words.append(optimizer.name)
    words += ["moving average"] if optimizer.ema else []
    words += [] if settings.checkpoint_gradients else ["no checkpointing"]
    return ", ".join(words)


def predict(variant: str, settings: TrainingSettings) -> int:
    """Return the bytes that the plan predicts for the first phase of `settings`."""
    return training_stage(settings, released_base(variant)).bytes


def compare(variant: str, settings: TrainingSettings) -> dict[str, Any]:
    counted, predicted = count_step(VARIANTS[variant], settings).peak, predict(variant, settings)
    return {
        "counted_megabytes": round(counted / 1e6, 1),
        "predicted_megabytes": round(predicted / 1e6, 1),
        "predicted_of_counted": round(predicted / counted, 3),
    }


def main() -> None:
    figures: dict[str, Any] = {}
    for variant, cases in CASES.items():
        for case in cases:
            settings = make_settings(**case)
            figures.setdefault(variant, {})[describe(settings)] = compare(variant, settings)
            sys.stderr.write(f"{variant} {describe(settings)}: {figures[variant][describe(settings)]}\n")
    note = "counted on fake tensors in a second step; none of this was measured on a GPU"
    write(__file__, {"note": note, "steps": figures})


if __name__ == "__main__":
    main()
