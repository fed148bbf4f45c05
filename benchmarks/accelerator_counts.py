"""Launches, bytes and peaks of steps, decodes and encodes on an accelerator, counted without one: `make bench`.

Writes benchmarks/accelerator_counts.json. tests/fake_accelerator.py counts them for the real configurations in bf16.
Each peak is compared with the planner's prediction. No GPU has run this. There are no times, and the memory does not
include cuDNN's workspace and fragmentation.
"""

from __future__ import annotations

import functools
import importlib
import tempfile
from pathlib import Path
from threading import Barrier
from types import SimpleNamespace
from typing import Any, NamedTuple

import decoders
import torch
from fake_accelerator import FIRST, SECOND, Counter, default_dtype, fake_accelerators

from benchmarks.machine import write
from benchmarks.train_memory import transformer as build
from sana_core.decode import devices
from sana_core.decode.encode import in_strips
from sana_core.decode.oom import OomRetry
from sana_core.decode.plan import Planner
from sana_core.decode.stages import decoder_stages, encoder_stages
from sana_core.memory import count_passes, transformer_bytes
from sana_core.model.forward import prepare, velocity
from sana_core.model.known_models import VARIANTS
from sana_core.model.layers import arrange_convolutions, join_projections
from sana_core.model.row_shards import ShardedOps
from sana_core.runtime.cancellation import no_poll
from sana_core.sampling.guidance import denoiser, perturbed_attention
from sana_core.split.generate import ExchangeBoard, ThreadExchange

DTYPE = torch.bfloat16
TOKENS = 300
# (variant, side of the image in pixels).
STEPS = (("1.6B", 1024), ("1.6B", 2048), ("1.6B", 4096), ("1.6B", 8192), ("0.6B", 1024), ("1.5-4.8B", 1024))
SIDES = (1024, 2048, 4096, 8192)
# For the smallest plans, which have a hundred thousand launches at 8192 px.
SMALL_SIDES = (1024, 2048, 4096)


def figures(counter: Counter, predicted: int | None = None) -> dict[str, Any]:
    values = counter.figures()
    if predicted is not None:
        peaks = counter.peak.values()
        values["predicted_megabytes"] = round(predicted / 1e6, 1)
        values["predicted_of_peak"] = [round(predicted / peak, 3) for peak in peaks]
    return values


def transformer(variant: str, pixels: int) -> Any:
    """Return a transformer of that variant with empty weights on the first accelerator."""
    with torch.device(FIRST):
        model = build(VARIANTS[variant], DTYPE, pixels).requires_grad_(False)
    # As in `load_models`.
    join_projections(model)
    return model


def step(variant: str, pixels: int, perturbed: bool = False) -> dict[str, Any]:
    """Return the counts of a guided step with a short negative prompt and a long prompt.

    The launches are from the second step, and the peak is from the first step.
    """
    # Values that `prepare` reads: the length of the longest prompt, and whether all have this length.
    scalars = {torch.int64: TOKENS, torch.bool: False}
    first, second = Counter(scalars), Counter(scalars)
    with fake_accelerators(), torch.no_grad():
        model = transformer(variant, pixels)
        prompt = torch.empty(1, TOKENS, 2304, dtype=DTYPE, device=FIRST), torch.ones(1, TOKENS)
        x = torch.empty(1, 32, pixels // 32, pixels // 32, device=FIRST)
        attention = perturbed_attention(model.config, 3.0, "") if perturbed else None
    with torch.no_grad():
        with fake_accelerators(first):
            call = denoiser(model, prompt, prompt, 4.5, perturbed=attention)
            call(x, 0.5)
        with fake_accelerators(second):
            call(x, 0.5)
    side = pixels // 32
    passes = count_passes(4.5, perturbed)
    predicted = transformer_bytes(VARIANTS[variant], side, side, 1, DTYPE, True, passes=passes)
    second.peak = first.peak
    return figures(second, predicted)


def share(variant: str, pixels: int, passes: int, members: int) -> dict[str, Any]:
    """Return the counts of one of `members` devices that share the rows of a step.

    The tensors of the other members are on another device. With three or more members, this one has two neighbours.
    """

    class FinishedExchange(ThreadExchange):
        """An exchange to which the other members have already contributed."""

        def all_reduce(self, sums: torch.Tensor) -> torch.Tensor:
            self.board.sums = [torch.empty_like(sums, device=SECOND)] * members
            return super().all_reduce(sums)

        def halo(self, first: torch.Tensor, last: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None]:
            edges = torch.empty_like(first, device=SECOND), torch.empty_like(last, device=SECOND)
            self.board.edges = [edges] * members
            return super().halo(first, last)

    side, counter = pixels // 32, Counter()
    with fake_accelerators(Counter({torch.int64: TOKENS, torch.bool: False})), torch.no_grad():
        model = transformer(variant, pixels)
        prompts = torch.empty(passes, TOKENS, 2304, dtype=DTYPE, device=FIRST)
        constants = prepare(model, prompts, torch.ones(passes, TOKENS, device=FIRST), side // members, side)
        x = torch.empty(passes, 32, side // members, side, dtype=DTYPE, device=FIRST)
        timestep = torch.empty(passes, device=FIRST)
    board = ExchangeBoard(members)
    board.barrier = Barrier(1)
    ops = ShardedOps(FinishedExchange(board, min(1, members - 2), FIRST), side) if members > 1 else None
    with fake_accelerators(counter), torch.no_grad():
        velocity(model, x, timestep, constants, ops=ops)
    return figures(counter)


def shares() -> dict[str, Any]:
    """Return the counts of one device for the ways in which `sana_core.split` shares a guided step, and by rows."""
    figures_of_shares = {}
    for variant, pixels in STEPS[:3]:
        for name, passes, members in (
            ("one", 2, 1), ("one of two", 1, 1), ("one of two, by rows", 2, 2), ("one of four", 1, 2)
        ):  # fmt: skip
            figures_of_shares[f"{variant}, {pixels} px, {name}"] = share(variant, pixels, passes, members)
    return figures_of_shares


@functools.cache
def autoencoder(device: torch.device = FIRST, kind: str = "f32c32") -> Any:
    with fake_accelerators(), torch.device(device), default_dtype(DTYPE):
        model = getattr(decoders, kind)(1)
        # As in `load_autoencoder`.
        arrange_convolutions(model)
    return model


def decode(pixels: int, smallest: bool = False, triton: bool = True, kind: str = "f32c32") -> dict[str, Any]:
    """Return the counts of a decode with the plan for a GPU with much memory, or with the smallest plan."""
    model = autoencoder(kind=kind)
    decoder, stages = model.decoder, decoder_stages(model)
    planner, plan = plan_for(stages, pixels, smallest)
    with fake_accelerators(), torch.no_grad():
        latents = torch.empty(1, 32, pixels // 32, pixels // 32, dtype=DTYPE, device=FIRST)
        if not stages.attends:
            # As in `planned_rows`.
            latents = latents.contiguous(memory_format=torch.channels_last)
        out = torch.empty(1, 3, pixels, pixels, dtype=DTYPE)
    counter = Counter()
    with fake_accelerators(counter, triton), torch.no_grad():
        retry = OomRetry(planner, plan, {})
        boundary = retry.global_stage(decoder, stages, latents, no_poll)
        for row, part in retry.local_stage(decoder, stages, boundary, no_poll):
            out[:, :, row : row + part.shape[2]] = part
            decoded = row + part.shape[2]
            del part
    assert decoded == pixels and retry.plan is plan
    return {"plan": plan.words(stages), **figures(counter, plan.peak_bytes)}


def encode(pixels: int, smallest: bool = False) -> dict[str, Any]:
    """Return the counts of an encode with the plan for a GPU with much memory, or with the smallest plan."""
    encoder, stages = autoencoder().encoder, encoder_stages(autoencoder())
    planner, plan = plan_for(stages, pixels, smallest)
    with fake_accelerators(), torch.no_grad():
        image = torch.empty(1, 3, pixels, pixels)
        like = torch.empty(1, dtype=DTYPE, device=FIRST)
    counter = Counter()
    with fake_accelerators(counter), torch.no_grad():
        in_strips(encoder, stages, plan, image, like, no_poll)
    return {"plan": plan.words(stages), **figures(counter, plan.peak_bytes)}


def plan_for(stages: Any, pixels: int, smallest: bool) -> tuple[Any, Any]:
    planner = Planner(stages, pixels // 32, pixels // 32, DTYPE, True)
    plan = planner.floor() if smallest else planner.fitting(float("inf"))
    assert plan is not None
    return planner, plan


class Thread(NamedTuple):
    """In place of a DeviceThread, in whose thread there would be no fake mode."""

    device: torch.device


def decode_on_two(pixels: int) -> dict[str, Any]:
    """Return the counts of one image on two devices. Here the devices work one after the other."""
    stages = decoder_stages(autoencoder())
    planner, plan = plan_for(stages, pixels, False)
    with fake_accelerators(), torch.no_grad():
        # Fake modules cannot be copied to another device.
        threads = [Thread(device) for device in (FIRST, SECOND)]
        workers = [devices.Worker(thread, autoencoder(thread.device).decoder, plan=plan) for thread in threads]
        latents = torch.empty(1, 32, pixels // 32, pixels // 32, dtype=DTYPE)
    counter = Counter()
    # Threads would leave the fake mode.
    in_turn = SimpleNamespace(run=lambda jobs: [work() for _, work in jobs], synchronize=lambda: None, check=no_poll)
    with fake_accelerators(counter), torch.no_grad():
        rows = devices.divided([(0, pixels // 32 * stages.scale)], stages.stride, 2)
        tasks = [devices.Task(worker, *span) for worker, span in zip(workers, rows, strict=True)]
        for strips in devices.decode_together(in_turn, workers, planner, latents, tasks, {}).values():
            for _, pixels_done in strips:
                del pixels_done
    return {"plan": plan.words(stages), **figures(counter, plan.peak_bytes)}


def in_host() -> dict[str, Any]:
    """Return the counts of the same step and decode inside ComfyUI, with its loading, casting and guidance."""
    import layouts
    import pytest
    from diffusers import SanaTransformer2DModel
    from in_process import Host

    host_counts = importlib.import_module("host_counts")
    from fake_cuda import fake_card

    with tempfile.TemporaryDirectory() as folder:
        Host(Path(folder))
        with torch.device("meta"):
            model = layouts.sparse(SanaTransformer2DModel(), Path(folder, "1.6B.safetensors"))
            vae = layouts.sparse(layouts.released_autoencoder(), Path(folder, "dc-ae.safetensors"))
        with fake_card(pytest.MonkeyPatch()) as patch:
            steps = {f"1.6B, {pixels} px": host_counts.guided_step(patch, model, pixels) for pixels in (1024, 4096)}
        with fake_card(pytest.MonkeyPatch()) as patch:
            decodes = {f"{pixels} px": host_counts.decode(patch, vae, pixels) for pixels in (1024, 4096)}
    return {
        "guided_step_in_host": {name: figures(counter) for name, counter in steps.items()},
        "decode_in_host": {name: figures(counter) for name, counter in decodes.items()},
    }


def main() -> None:
    result = {
        "note": "counted on fake tensors, in bf16; nothing of this has run on a card",
        "guided_step": {f"{name}, {pixels} px": step(name, pixels) for name, pixels in STEPS}
        | {"1.6B, 1024 px, PAG": step("1.6B", 1024, perturbed=True)},
        "guided_step_of_a_share": shares(),
        "decode": {f"{pixels} px": decode(pixels) for pixels in SIDES},
        "decode_smallest": {f"{pixels} px": decode(pixels, smallest=True) for pixels in SMALL_SIDES},
        "decode_lite": {f"{pixels} px": decode(pixels, kind="lite") for pixels in SIDES},
        "decode_lite_smallest": {f"{pixels} px": decode(pixels, smallest=True, kind="lite") for pixels in SMALL_SIDES},
        "decode_two_devices": {"2048 px": decode_on_two(2048)},
        "encode": {f"{pixels} px": encode(pixels) for pixels in SIDES},
        "encode_smallest": {f"{pixels} px": encode(pixels, smallest=True) for pixels in SMALL_SIDES},
        **in_host(),
    }
    write(__file__, result)


if __name__ == "__main__":
    main()
