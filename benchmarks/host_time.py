"""The host's time of a guided step without the launches: eager, replayed, in ComfyUI, and in diffusers. Needs no GPU.

`OMP_NUM_THREADS=1 python -m benchmarks.host_time` writes benchmarks/host_time.json.

A step is one guided call of the model: both prompts in one batch, then the guidance. The sampler's arithmetic is
excluded. Models have the blocks of a released model and tiny tensors. Triton's launcher does nothing. Products,
convolutions and attentions return a tensor from an earlier call. Other operations of torch compute on tiny tensors, so
they cost little more than their dispatch. A replayed step runs all of its Python, but its graph launches nothing.

`milliseconds` is the processor time of the thread, the median of the rounds. Each round measures all ways in turn, and
a ratio is the median of the ratios of the rounds. `calls` counts the calls of Python and C functions in one step.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from fake_cuda import pack
from in_process import Host

from benchmarks.fake_triton import KERNELS
from benchmarks.host_bound import BLOCKS, PIXELS, TOKENS, save_transformer
from benchmarks.machine import host_speed, thread_seconds, write
from sana_core.sampling.guidance import denoiser
from sana_core.sampling.step_graph import EAGER_CALLS, Recorder, Recording, StepGraph, Work

GUIDANCE, SIGMA = 4.5, 0.5
# Kernels whose launcher is replaced, by module of sana_core.kernels.
MODULES = ("channels", "gated_depthwise", "linear_attention", "modulation")
# Calls of each way in a round.
REPEATS = 5


class EmptyRecorder(Recorder):
    """Its graphs launch nothing: a replay leaves the result of the recorded call in place."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def run(self, work: Work) -> torch.Tensor:
        return work()

    def waits_for_host(self) -> bool:
        return True

    def capture(self, work: Work) -> Recording:
        return Recording(lambda: None, work())


def prepared(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Return a function that computes once for each combination of shapes, and then returns that result again."""
    results: dict[Any, torch.Tensor] = {}

    def call(a: torch.Tensor, b: torch.Tensor, *arguments: Any, **options: Any) -> torch.Tensor:
        out = results.get((a.shape, b.shape))
        if out is None:
            out = results[a.shape, b.shape] = function(a, b, *arguments, **options)
        return out

    return call


@contextmanager
def no_launches(module_of: Callable[[str], Any]) -> Iterator[None]:
    """Inside, products, convolutions, attentions and the pack's kernels launch nothing.

    `module_of` imports a module of sana_core by its name. ComfyUI has its own copy of the pack's modules.
    """
    with ExitStack() as stack:
        for name in ("linear", "conv2d", "scaled_dot_product_attention"):
            stack.enter_context(mock.patch.object(F, name, prepared(getattr(F, name))))
        stack.enter_context(mock.patch.object(torch, "matmul", prepared(torch.matmul)))
        for name in MODULES:
            module = module_of(f"sana_core.kernels.{name}")
            stack.enter_context(mock.patch.object(module, "launch", lambda *arguments, **options: None))
        kernels = mock.patch.object(module_of("sana_core.model.forward"), "kernels_on", lambda *arguments: KERNELS)
        stack.enter_context(kernels)
        yield


def own_module(name: str) -> Any:
    __import__(name)
    return sys.modules[name]


def join(transformer: Any) -> None:
    """Give each self-attention one product for query, key and value, as accelerators have. A CPU has three."""
    for block in transformer.transformer_blocks:
        width = block.attn1.to_q.in_features
        block.attn1.to_qkv = torch.nn.Linear(width, 3 * width, bias=False).requires_grad_(False)


def prompts(width: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [(torch.randn(1, TOKENS, width), torch.ones(1, TOKENS)) for _ in range(2)]


def steps_of(folder: Path) -> dict[str, Callable[[], torch.Tensor]]:
    """Return a function for each way, which computes a guided step of the transformer in `folder`."""
    from diffusers import SanaTransformer2DModel

    model = SanaTransformer2DModel.from_pretrained(folder).eval().requires_grad_(False)
    cond, uncond = prompts(model.config.caption_channels)
    x = torch.randn(1, 32, PIXELS // 32, PIXELS // 32)
    embeds, mask = (torch.cat(pair) for pair in zip(uncond, cond, strict=True))
    timestep = torch.tensor(1000 * SIGMA)

    def diffusers() -> torch.Tensor:
        # As in SanaPipeline.__call__.
        both = torch.cat([x] * 2)
        options = {"encoder_attention_mask": mask, "return_dict": False}
        noise = model(both, embeds, timestep.expand(2), **options)[0].float()
        negative, positive = noise.chunk(2)
        return negative + GUIDANCE * (positive - negative)

    joined = SanaTransformer2DModel.from_pretrained(folder).eval().requires_grad_(False)
    join(joined)
    eager = denoiser(joined, cond, uncond, GUIDANCE)
    graph = StepGraph(EmptyRecorder(x.device), Counter())
    replayed = denoiser(joined, cond, uncond, GUIDANCE, graph=graph)
    return {
        "eager": lambda: eager(x, SIGMA),
        "replayed": lambda: replayed(x, SIGMA),
        "diffusers": diffusers,
        "canvas": step_in_comfyui(folder, x, cond, uncond),
    }


def step_in_comfyui(
    folder: Path, x: torch.Tensor, cond: Any, uncond: Any, **options: Any
) -> Callable[[], torch.Tensor]:
    """Return the call that ComfyUI's samplers make in each step. Our loader loads the MODEL with `options`."""
    import comfy.model_management
    import comfy.sampler_helpers
    import comfy.samplers

    patcher = pack("nodes.host.loading.load_model").load_model(folder, **options)
    comfy.model_management.load_models_gpu([patcher], 10**6)
    patcher.pre_run()
    texts = {"negative": uncond, "positive": cond}
    conds = {
        name: comfy.sampler_helpers.convert_cond([[embeds, {"attention_mask": mask}]])
        for name, (embeds, mask) in texts.items()
    }
    conds = comfy.samplers.process_conds(patcher.model, x, conds, x.device)
    sigma = torch.tensor([SIGMA], device=x.device)

    def step() -> torch.Tensor:
        return comfy.samplers.sampling_function(
            patcher.model, x, sigma, conds["negative"], conds["positive"], GUIDANCE, patcher.model_options
        )

    return step


def calls_of(step: Callable[[], Any]) -> int:
    """Return the number of calls of Python and C functions in `step`."""
    events: Counter[str] = Counter()
    sys.setprofile(lambda frame, event, argument: events.update([event]))
    try:
        step()
    finally:
        sys.setprofile(None)
    # The call of sys.setprofile itself is counted too.
    return events["call"] + events["c_call"] - 1


def compare(folder: Path, rounds: int) -> dict[str, Any]:
    """Measure all ways in each round."""
    steps = steps_of(folder)
    with torch.inference_mode(), no_launches(own_module), no_launches(pack):
        for step in steps.values():
            for _ in range(EAGER_CALLS + 2):
                step()
        calls = {way: calls_of(step) for way, step in steps.items()}
        seconds = thread_seconds(steps, rounds, REPEATS)

    def ratio(way: str, base: str) -> dict[str, float]:
        times = [one / other for one, other in zip(seconds[way], seconds[base], strict=True)]
        return {"time": round(statistics.median(times), 3), "calls": round(calls[way] / calls[base], 3)}

    return {
        "milliseconds": {way: round(1e3 * statistics.median(values), 2) for way, values in seconds.items()},
        "calls": calls,
        "replayed / eager": ratio("replayed", "eager"),
        "eager / diffusers": ratio("eager", "diffusers"),
        "canvas / eager": ratio("canvas", "eager"),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--show", action="store_true", help="only print the figures, and do not write them")
    options = parser.parse_args()
    torch.set_num_threads(1)
    figures: dict[str, Any] = host_speed() | {"rounds": options.rounds}
    with tempfile.TemporaryDirectory() as base:
        host = Path(base) / "host"
        host.mkdir()
        Host(host)
        for name, blocks in BLOCKS.items():
            save_transformer(Path(base) / name, blocks)
            figures[f"{name}, {blocks} blocks"] = compare(Path(base) / name, options.rounds)
    write(__file__, figures, only_print=options.show)


if __name__ == "__main__":
    main()
