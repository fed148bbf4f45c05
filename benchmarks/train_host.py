"""The host's time of a LoRA step: with checkpointing, without, and with compiled blocks. Needs no GPU.

`OMP_NUM_THREADS=1 python -m benchmarks.train_host` writes benchmarks/train_host.json.

The model has the twenty blocks of 1.6B and a width of 64, so that its products take little time. `milliseconds` is the
processor time of the thread in forward, backward, clipping and AdamW, the median of the rounds. Each round measures all
ways in turn, and a ratio is the median of the ratios of the rounds. `launches` are the operations of a step that
compute something: torch's own without views and new tensors, and the compiler's fused loops. A GPU has one kernel or
more for each, except that it clips all gradients with a few.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import torch._inductor.config
from trainers import make_trainer, take_step

from benchmarks.machine import host_speed, thread_seconds, write
from sana_core.model.known_models import MAX_TOKENS, VARIANTS
from sana_core.training.cache import Batch
from sana_core.training.schedule import TrainProgress
from sana_core.training.settings import Method, Phase, TrainingSettings, check_settings

WIDTH, SIDE, CAPTION = 64, 4, 64
# Operations of torch that launch no kernel: views, new tensors, and those that only call others.
VIEWS = (
    "_local_scalar_dense _reshape_alias _unsafe_view alias as_strided chunk contiguous detach detach_ empty empty_like "
    "empty_permuted empty_strided expand expand_as flatten is_nonzero item lift_fresh linear matmul movedim narrow "
    "new_empty new_empty_strided permute reshape resize_ resolve_conj resolve_neg result_type select set_ slice split "
    "split_with_sizes squeeze swapaxes t to transpose unbind unflatten unsqueeze view view_as"
)
WAYS = {"checkpointing": (True, False), "all values kept": (False, False), "compiled": (False, True)}


def step_of(checkpoint: bool, compiled: bool) -> Callable[[], object]:
    """Return a function that takes a step."""
    from diffusers import SanaTransformer2DModel

    torch.manual_seed(0)
    heads = {"num_attention_heads": 2, "num_cross_attention_heads": 2, "cross_attention_head_dim": WIDTH // 2}
    model = SanaTransformer2DModel(
        num_layers=VARIANTS["1.6B"].layers, cross_attention_dim=WIDTH, caption_channels=CAPTION, **heads
    )
    model.to(torch.bfloat16).register_to_config(reference="nvidia")
    phase = Phase(("data",), 32 * SIDE, steps=1)
    settings = TrainingSettings("model", "out", (phase,), method=Method(rank=16), checkpoint_gradients=checkpoint)
    trainer = make_trainer(model, 3.0, check_settings(settings))
    if compiled:
        trainer.is_compiled = True
        for block in model.transformer_blocks:
            block.compile(dynamic=False)

    def load(indices: list[int]) -> Batch:
        embeds, mask = torch.randn(1, MAX_TOKENS, CAPTION).bfloat16(), torch.ones(1, MAX_TOKENS, dtype=torch.int64)
        return Batch(torch.randn(1, 32, SIDE, SIDE), embeds, mask, None, ["image"])

    empty = {"embeds": torch.zeros(MAX_TOKENS, CAPTION).bfloat16(), "mask": torch.ones(MAX_TOKENS)}
    sample = SimpleNamespace(prior=False, weight=1.0)
    data = SimpleNamespace(cache=SimpleNamespace(load=load, empty=empty), samples=[sample])
    return lambda: take_step(trainer, data, [[0]], TrainProgress(), 1e-4)


def launches(step: Callable[[], object]) -> int:
    """Return the number of operations of a step that compute something. Inductor must profile its kernels."""
    from torch.profiler import ProfilerActivity, profile

    for _ in range(3):
        step()
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        step()

    views = set(VIEWS.split())

    def is_launch(event: Any) -> bool:
        name = event.name.removeprefix("aten::")
        return "cpp_fused" in name or (name != event.name and name not in views)

    def launches_below(event: Any) -> bool:
        return any(is_launch(child) or launches_below(child) for child in event.cpu_children)

    return sum(is_launch(event) and not launches_below(event) for event in profiled.events())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--show", action="store_true", help="only print the figures, and do not write them")
    options = parser.parse_args()
    torch.set_num_threads(1)
    steps = {way: step_of(*settings) for way, settings in WAYS.items()}
    for step in steps.values():
        for _ in range(3):
            step()
    seconds = thread_seconds(steps, options.rounds)

    def ratio(way: str, base: str) -> float:
        return round(statistics.median(map(lambda one, other: one / other, seconds[way], seconds[base])), 3)

    figures: dict[str, Any] = host_speed() | {"rounds": options.rounds}
    figures["milliseconds"] = {way: round(1e3 * statistics.median(values), 1) for way, values in seconds.items()}
    figures["compiled / checkpointing"] = ratio("compiled", "checkpointing")
    figures["compiled / all values kept"] = ratio("compiled", "all values kept")
    # Without the code of the measured steps, whose fused loops are not recorded.
    torch._dynamo.reset()
    torch._inductor.config.cpp.enable_kernel_profile = True
    figures["launches"] = {way: launches(step_of(*settings)) for way, settings in WAYS.items()}
    write(__file__, figures, only_print=options.show)


if __name__ == "__main__":
    main()
