"""A training step compared with a bare loop, cached epochs compared with uncached ones, and the time spent on data.

`python -m benchmarks.train` writes benchmarks/train.json, on the CPU in fp32 with one thread. Its parts:
"step": a LoRA of rank 16 on SANA-0.6B with 6 of its 28 blocks and random weights, and on the bundled model. The bare
loop runs the same operations, with its batches in memory and noise from torch. Both take a step in turn, and the
medians of the CPU seconds are compared. "epoch": the bundled model with images of 128 px, encoding compared with
reading the cache. Loading the autoencoder and the text encoder is not counted.
"""

from __future__ import annotations

import random
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from trainers import make_trainer, take_step

from benchmarks.machine import random_transformer, write
from benchmarks.train_lora import CHECKPOINT
from demo.beside import small
from demo.captions import random_caption
from demo.dataset import write_dataset
from demo.world import training_scenes
from sana_core.runtime.accelerator import current_accelerator
from sana_core.training.cache import Cache, Encoders, ModelIds, Store, build_cache
from sana_core.training.dataset import read_dataset
from sana_core.training.schedule import PhaseData, TrainProgress
from sana_core.training.settings import Method, Optimizer, Phase, TrainingSettings
from sana_core.training.trainer import Trainer

STEPS = 30
PICTURES = 96


def settings(batch: int, steps: int = 10**6) -> TrainingSettings:
    return TrainingSettings(
        model=str(CHECKPOINT),
        out="",
        method=Method(rank=16, targets="attention"),
        optimizer=Optimizer(),
        phase=(Phase(data=("",), batch=batch, steps=steps, learning_rate=1e-4),),
        dtype="float32",
        checkpoint_gradients=False,
    )


def read_data(folder: Path, cache_name: str, side: int, encode_pixels: Callable, encode_caption: Callable) -> PhaseData:
    samples = [sample._replace(bucket=(side, side)) for sample in read_dataset(folder / "data")[:PICTURES]]
    cache = build_cache(
        samples,
        Store(folder / cache_name, folder / "parts"),
        Encoders(encode_pixels, encode_caption),
        ModelIds("a", "t"),
        {},
    )
    indices = list(range(len(samples)))
    return PhaseData(samples, cache, indices, [], "", {index: [index] for index in indices})


def random_data(folder: Path, side: int, width: int) -> PhaseData:
    """Return data of the size that the released encoders make, without numbers that mean anything."""
    numbers = torch.Generator().manual_seed(0)

    def pixels(image: torch.Tensor) -> torch.Tensor:
        return torch.randn(1, 32, side // 32, side // 32, generator=numbers)

    def caption(text: str, instruction: bool) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.randn(1, 300, width, generator=numbers), torch.ones(1, 300)

    return read_data(folder, f"random-{side}", side, pixels, caption)


def bare_step(learner: Trainer, batches: Sequence[Any], number: int) -> None:
    """Take the same step as `take_step`, of a batch in memory, and no more than what PyTorch needs for it."""
    batch = batches[number % len(batches)]
    noise = torch.randn_like(batch.latents)
    sigma = torch.sigmoid(torch.randn(len(noise)))
    sigma = learner.shift * sigma / (1 + (learner.shift - 1) * sigma)
    s = sigma.view(-1, 1, 1, 1)
    x = (1 - s) * batch.latents + s * noise
    out = learner.transformer(x, batch.embeds, sigma * 1000, encoder_attention_mask=batch.mask, return_dict=False)[0]
    (out - (noise - batch.latents)).square().mean().backward()
    torch.nn.utils.clip_grad_norm_(learner.parameters.values(), 0.1)
    learner.optimizer.step()
    learner.optimizer.zero_grad()


def step(transformers: Sequence[Any], data: PhaseData, batch: int) -> dict[str, Any]:
    """Compare the steps of the trainer with bare steps, on two transformers."""
    run, bare = (make_trainer(transformer, 3.0, settings(batch)) for transformer in transformers)
    groups = [[list(range(start, start + batch))] for start in range(0, len(data.samples) - batch + 1, batch)]
    batches = [data.cache.load(group[0]) for group in groups]
    for group in bare.optimizer.param_groups:
        group["lr"] = 1e-4
    seconds: dict[str, list[float]] = {"run": [], "bare": []}
    for number in range(STEPS + 3):
        began = time.process_time()
        take_step(run, data, groups[number % len(groups)], TrainProgress(number), 1e-4)
        between = time.process_time()
        bare_step(bare, batches, number)
        seconds["run"].append(between - began)
        seconds["bare"].append(time.process_time() - between)
    medians = {name: statistics.median(values[3:]) for name, values in seconds.items()}
    ratio = round(medians["run"] / medians["bare"], 3)
    return {**{f"{name}_seconds": round(value, 4) for name, value in medians.items()}, "ratio": ratio}


class TimedCache:
    """A cache that measures how long its reader has waited."""

    def __init__(self, cache: Cache) -> None:
        self.cache, self.seconds, self.empty = cache, 0.0, cache.empty

    def load(self, indices: Sequence[int]) -> Any:
        began = time.process_time()
        batch = self.cache.load(indices)
        self.seconds += time.process_time() - began
        return batch


def epoch(folder: Path, batch: int) -> dict[str, Any]:
    """Compare an epoch that encodes its images with an epoch that reads the cache, on the bundled model."""
    from sana_core.batch.pipeline import load_encoder
    from sana_core.checkpoints import load_autoencoder, load_transformer
    from sana_core.decode import encode_images
    from sana_core.model.text import encode_prompts

    device = torch.device("cpu")
    autoencoder = load_autoencoder(CHECKPOINT, device, torch.float32)
    encoder = load_encoder(str(CHECKPOINT), device, "float32")

    def pixels(image: torch.Tensor) -> torch.Tensor:
        return encode_images(autoencoder, image) * autoencoder.config.scaling_factor

    began = time.process_time()
    data = read_data(
        folder, "encoded", 128, pixels, lambda text, instruction: encode_prompts(encoder, [text], instruction)
    )
    encoding = time.process_time() - began
    learner = make_trainer(load_transformer(CHECKPOINT, device, torch.float32), 1.0, settings(batch))
    groups = [[list(range(start, start + batch))] for start in range(0, len(data.samples) - batch + 1, batch)]
    timed = TimedCache(data.cache)
    take_step(learner, data, groups[0], TrainProgress(), 1e-4)
    began = time.process_time()
    for number, group in enumerate(groups):
        take_step(learner, data._replace(cache=timed), group, TrainProgress(number), 1e-4)  # type: ignore[arg-type]
    steps = time.process_time() - began
    return {
        "pictures": len(data.samples),
        "encoding_seconds": round(encoding, 3),
        "steps_seconds": round(steps, 3),
        "uncached_of_cached": round((encoding + steps) / steps, 2),
        "reading_share": round(timed.seconds / steps, 4),
    }


def main() -> None:
    from sana_core.checkpoints import load_transformer

    torch.set_num_threads(1)
    assert current_accelerator() is None, "these are figures of a CPU"
    device = torch.device("cpu")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        rng = random.Random(22)
        write_dataset(folder / "data", islice(training_scenes(rng), PICTURES), rng, small, random_caption)
        bundled = [load_transformer(CHECKPOINT, device, torch.float32) for _ in range(2)]
        result = {
            "threads": 1,
            "step": {
                "0.6B, 6 blocks, 512 px, batch 2": step(
                    [random_transformer(1152, 6), random_transformer(1152, 6)], random_data(folder, 512, 2304), 2
                ),
                "bundled model, 128 px, batch 32": step(
                    bundled, random_data(folder, 128, bundled[0].config.caption_channels), 32
                ),
            },
            "epoch": {"bundled model, 128 px, batch 32": epoch(folder, 32)},
        }
    write(__file__, result)


if __name__ == "__main__":
    main()
