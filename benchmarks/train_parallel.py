"""Training on several processes: the memory of a step per GPU, the speed of ranks, and an estimate for up to 64 GPUs.

`python -m benchmarks.train_parallel` writes benchmarks/train_parallel.json. No GPU has run it. Its parts:
"memory": the trainer's step under FSDP2, on fake tensors in a fake group of 4, compared with the plan's prediction.
"overhead": the trainer's step compared with a bare loop under the same wrapper, with two ranks over gloo on the CPU.
"speed": two ranks with one core each, compared with one rank on one core.
"on_paper": seconds of a step of SANA 1.6B for sending and for computing, from the plan's volumes.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from launched import results_of
from live_bytes import BLOCK, LiveBytes
from trainers import make_trainer, take_step

from benchmarks import ROOT
from benchmarks.machine import description, random_transformer
from benchmarks.train_memory import (
    FULL,
    SAMPLES,
    count_step,
    empty_prompt,
    fake_batch,
    make_settings,
)
from sana_core.memory import CONTEXT
from sana_core.model.known_models import VARIANTS, Architecture
from sana_core.training.cache import Batch
from sana_core.training.plan import released_base, ring, training_stage
from sana_core.training.ranks import ALONE, Ranks
from sana_core.training.schedule import TrainProgress
from sana_core.training.settings import Method, Parallel, TrainingSettings

CARDS, STEPS, BLOCKS = 4, 8, 6
# {variant: GiB of a GPU}, for training all weights with AdamW at 1024 px with batch size 1.
RELEASED = {"1.6B": 12, "1.5-4.8B": 24}
# An H100: dense bf16 operations per second, the share that training reaches, bytes per second of NVLink in one
# direction and of 100 GbE between machines, and GPUs per machine.
FLOPS, REACHED, NVLINK, ETHERNET, MACHINE = 989e12, 0.4, 450e9, 12.5e9, 8
# Forward, backward, and with gradient checkpointing the forward again. Each has 2 operations per weight and position.
PASSES, POSITIONS, PICTURES = 4, 1024, 8


class Shared(LiveBytes):
    """Also counts memory that FSDP allocates and frees by resizing. Does not count meta tensors."""

    def track(self, tensor: Any, counted: bool) -> None:
        super().track(tensor, counted and getattr(tensor, "device", torch.device("cpu")).type != "meta")

    def freed(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage.size():
            self.alive -= -(-storage.nbytes() // BLOCK) * BLOCK
            storage.resize_(0)

    def taken(self, tensor: torch.Tensor) -> None:
        storage, size = tensor.untyped_storage(), tensor.numel() * tensor.itemsize
        if storage.size() != size:
            storage.resize_(size)
            self.alive += -(-size // BLOCK) * BLOCK
            self.peak = max(self.peak, self.alive)


def count_rank(model: Architecture, settings: TrainingSettings) -> int:
    """Return the peak bytes of a second step on one of CARDS ranks. Creates and destroys the process group."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp._fully_shard import _fsdp_param, _fsdp_param_group
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=CARDS)
    mesh, live = init_device_mesh("cpu", (CARDS,), mesh_dim_names=("shard",)), Shared(True)
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch("torch.distributed.device_mesh.init_device_mesh", lambda *_, **__: mesh))
        for module in (_fsdp_param, _fsdp_param_group):
            for name, function in (("alloc_storage", live.taken), ("free_storage", live.freed)):
                if hasattr(module, name):
                    stack.enter_context(mock.patch.object(module, name, function))
        counted = count_step(model, settings, live=live, ranks=Ranks(0, CARDS, True, torch.device("cpu")))
    torch.distributed.destroy_process_group()
    return counted.peak


def memory_settings() -> TrainingSettings:
    return replace(make_settings(method=FULL, accumulate=CARDS), parallel=Parallel("fsdp"))


def predict(variant: str) -> int:
    settings = memory_settings()
    return training_stage(settings, released_base(variant), cards=CARDS).bytes


def memory() -> dict[str, Any]:
    """Count each variant of RELEASED in a separate process, because each needs a process group."""
    figures = {}
    for variant, card in RELEASED.items():
        with multiprocessing.get_context("fork").Pool(1) as pool:
            counted = pool.apply(count_rank, (VARIANTS[variant], memory_settings()))
        predicted = predict(variant)
        figures[variant] = {
            "counted_megabytes": round(counted / 1e6, 1),
            "predicted_megabytes": round(predicted / 1e6, 1),
            "predicted_of_counted": round(predicted / counted, 3),
            "fits_card_of": card if counted + CONTEXT <= card * 2**30 else None,
        }
    return figures


def speed_settings(kind: str) -> TrainingSettings:
    settings = make_settings(method=Method(targets="both"), accumulate=2, dtype="float32", pixels=512, checkpoint=False)
    return replace(settings, parallel=Parallel(kind), caption_dropout=0.0)


def seconds(ranks: Ranks, kind: str, bare: bool) -> float:
    """Return the median seconds of a step with two images, of the trainer or of a bare loop."""
    torch.manual_seed(0)
    settings = speed_settings(kind)
    learner = make_trainer(random_transformer(1152, BLOCKS), 3.0, settings, ranks=ranks)
    batch, empty = fake_batch(1, 16, torch.float32), empty_prompt(torch.float32)
    data: Any = SimpleNamespace(cache=SimpleNamespace(load=lambda indices: batch, empty=empty), samples=SAMPLES)
    durations = []
    for step in range(STEPS + 2):
        began = time.perf_counter()
        if bare:
            bare_step(learner, batch)
        else:
            take_step(learner, data, [[0], [1]], TrainProgress(step), 1e-4)
        durations.append(time.perf_counter() - began)
    return statistics.median(durations[2:])


def bare_step(learner: Any, batch: Batch) -> None:
    """Run a step like torch's examples of DDP and FSDP, with the same images per rank."""
    noise, sigma = torch.randn_like(batch.latents), torch.rand(1)

    def loss() -> torch.Tensor:
        x = torch.lerp(batch.latents, noise, sigma.view(-1, 1, 1, 1))
        out = learner.transformer(x, batch.embeds, sigma * 1000, encoder_attention_mask=batch.mask, return_dict=False)
        return (out[0] - (noise - batch.latents)).square().mean()

    (learner.layout.replica(loss) if learner.layout.replica is not None else loss()).backward()
    owners = learner.parameters if learner.layout.shards is None else learner.layout.shards.trained
    torch.nn.utils.clip_grad_norm_(list(owners.values()), 0.1)
    if learner.layout.shards is not None:
        for name, parameter in learner.parameters.items():
            parameter.grad = owners[name].grad.to_local()
            owners[name].grad = None
    learner.optimizer.step()
    learner.optimizer.zero_grad()


def of_ranks(count: int, function: Callable[[Ranks], float]) -> float:
    """Return the result of the slowest rank."""
    return max(results_of(count, function, deadline=1200))


def overhead() -> dict[str, Any]:
    figures = {}
    for kind in ("ddp", "fsdp"):
        # In turns, because other work on the machine varies.
        pairs = [[of_ranks(2, partial(seconds, kind=kind, bare=bare)) for bare in (False, True)] for _ in range(2)]
        run, bare = (min(pair[index] for pair in pairs) for index in (0, 1))
        figures[kind] = {"run_seconds": round(run, 4), "bare_seconds": round(bare, 4), "ratio": round(run / bare, 3)}
    return figures


def speed() -> dict[str, Any]:
    torch.set_num_threads(1)
    one = min(seconds(ALONE, "ddp", False) for _ in range(2))
    figures: dict[str, Any] = {"one_rank_seconds": round(one, 4)}
    for kind in ("ddp", "fsdp"):
        two = min(of_ranks(2, partial(seconds, kind=kind, bare=False)) for _ in range(2))
        figures[kind] = {"two_ranks_seconds": round(two, 4), "times_one": round(one / two, 2)}
    return figures


def on_paper() -> list[dict[str, Any]]:
    """Return, for 1 to 64 cards with PICTURES pictures each a step, what sends and what computes, all weights in AdamW.

    Within a machine over NVLink, between machines over their one 100 GbE, which the cards share. "at_most" is the share
    of the cards that computes if all that is sent hides behind it, "at_least" if nothing does.
    """
    base, rows = released_base("1.6B"), []
    parameters = 1_604_462_752
    computing = PASSES * 2 * parameters * POSITIONS * PICTURES / (FLOPS * REACHED)
    for cards in (1, 2, 4, 8, 16, 32, 64):
        row: dict[str, Any] = {"cards": cards, "computing_seconds": round(computing, 3)}
        settings = make_settings(method=FULL, batch=PICTURES, accumulate=cards)
        for kind in ("ddp", "fsdp"):
            parallel = replace(settings, parallel=Parallel(kind))
            sent = training_stage(parallel, base, cards=cards).sent / ring(cards) if cards > 1 else 0.0
            machines, inside = max(1, cards // MACHINE), min(cards, MACHINE)
            sending = sent * ring(inside) / NVLINK + sent * ring(machines) / ETHERNET
            row[kind] = {
                "sending_seconds": round(sending, 3),
                "at_most": round(computing / max(computing, sending), 2),
                "at_least": round(computing / (computing + sending), 2),
            }
        rows.append(row)
    return rows


def main() -> None:
    """Measure the parts on the command line, by default all. Older figures of the other parts are not changed."""
    parts = {"memory": memory, "overhead": overhead, "speed": speed, "on_paper": on_paper}
    file = ROOT / "benchmarks" / "train_parallel.json"
    old = json.loads(file.read_text()) if file.exists() else {}
    figures: dict[str, Any] = {name: old[name] for name in parts if name in old}
    for name in sys.argv[1:] or parts:
        figures[name] = parts[name]()  # type: ignore[operator]
        sys.stderr.write(f"{name}: {figures[name]}\n")
        note = "memory counted on fake tensors; times on a CPU over gloo; nothing of this has run on a card"
        file.write_text(json.dumps({**description(), "note": note, **figures}, indent=2) + "\n")


if __name__ == "__main__":
    main()
