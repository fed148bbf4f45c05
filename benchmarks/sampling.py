"""Our sampling loop compared with diffusers' SanaPipeline, and ComfyUI's KSampler compared with our loop, on the CPU.

Writes benchmarks/sampling.json. The model is SANA-0.6B with 6 of its 28 blocks and random weights, so that a run takes
minutes. Prompts have 300 tokens. The two programs of a ratio run alternately, on the same weights, embeddings and
noise. The ratio is between medians.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from fake_cuda import pack
from in_process import Host

from benchmarks import ROOT
from benchmarks.machine import description, random_transformer
from sana_core.sampling.guidance import denoiser
from sana_core.sampling.samplers import SAMPLERS

BLOCKS = 6
STEPS = 20
GUIDANCE = 4.5
TOKENS = 300


def prompts(transformer: torch.nn.Module) -> tuple[tuple, tuple]:
    """Embeddings and masks of a positive and a negative prompt of 300 tokens."""
    mask = torch.ones(1, TOKENS, dtype=torch.long)
    width = transformer.config.caption_channels
    return (torch.randn(1, TOKENS, width), mask), (torch.randn(1, TOKENS, width), mask)


def in_turn(first: Callable[[], torch.Tensor], second: Callable[[], torch.Tensor], runs: int) -> dict:
    """Return the median seconds of both, the ratio in seconds and in CPU seconds, and the largest difference.

    CPU seconds are more reliable if other programs use the machine.
    """
    seconds: tuple[list, list] = ([], [])
    processor: tuple[list, list] = ([], [])
    # One or two runs have no warm-up.
    results = [first(), second()] if runs > 2 else [torch.empty(0), torch.empty(0)]
    for _ in range(runs):
        for k, call in enumerate((first, second)):
            started, busy = time.perf_counter(), time.process_time()
            results[k] = call()
            seconds[k].append(time.perf_counter() - started)
            processor[k].append(time.process_time() - busy)
    ours, theirs = map(statistics.median, seconds)
    our_work, their_work = map(statistics.median, processor)
    difference = (results[0] - results[1]).abs().max().item()
    return {
        "seconds": round(ours, 2),
        "baseline_seconds": round(theirs, 2),
        "ratio": round(ours / theirs, 3),
        "processor_ratio": round(our_work / their_work, 3),
        "largest_difference": float(f"{difference:.1e}"),
        "runs": runs,
    }


def loop_beside_pipeline(transformer: torch.nn.Module, pixels: int, runs: int) -> dict:
    from diffusers import DPMSolverMultistepScheduler, SanaPipeline

    scheduler = DPMSolverMultistepScheduler(flow_shift=3.0, use_flow_sigmas=True, prediction_type="flow_prediction")
    pipeline = SanaPipeline(tokenizer=None, text_encoder=None, vae=None, transformer=transformer, scheduler=scheduler)
    pipeline.set_progress_bar_config(disable=True)
    cond, uncond = prompts(transformer)
    noise = torch.randn(1, 32, pixels // 32, pixels // 32)
    flow = SAMPLERS["flow_dpmpp_2m"]

    def ours() -> torch.Tensor:
        model = denoiser(transformer, cond, uncond, GUIDANCE, flow.whole_timesteps)
        return flow.sample(model, noise, flow.sigmas(STEPS, 3.0))

    def theirs() -> torch.Tensor:
        return pipeline(
            prompt_embeds=cond[0],
            prompt_attention_mask=cond[1],
            negative_prompt=None,
            negative_prompt_embeds=uncond[0],
            negative_prompt_attention_mask=uncond[1],
            num_inference_steps=STEPS,
            guidance_scale=GUIDANCE,
            height=pixels,
            width=pixels,
            latents=noise,
            use_resolution_binning=False,
            output_type="latent",
        ).images

    return in_turn(ours, theirs, runs)


def load_in_comfyui(transformer: torch.nn.Module) -> Any:
    """Load `transformer` with the pack's loader in this process's ComfyUI. Returns the MODEL."""
    with tempfile.TemporaryDirectory() as base:
        Host(Path(base))
        folder = Path(base) / "model"
        transformer.save_pretrained(folder / "transformer")
        for part in (ROOT / "tests" / "models" / "sana-tiny").iterdir():
            if part.name != "transformer":
                (folder / part.name).symlink_to(part)
        return pack("nodes.host.loading.load_model").load_model(folder)


def ksampler_beside_loop(transformer: torch.nn.Module, pixels: int, runs: int) -> dict:
    """Compare ComfyUI's KSampler (euler, normal) on the MODEL of our loader with flow_euler in sana_core's loop."""
    model = load_in_comfyui(transformer)
    import comfy.sample

    cond, uncond = prompts(transformer)
    positive, negative = ([[embeds, {"attention_mask": mask}]] for embeds, mask in (cond, uncond))
    noise = torch.randn(1, 32, pixels // 32, pixels // 32)
    flow = SAMPLERS["flow_euler"]

    @torch.inference_mode()
    def core() -> torch.Tensor:
        how = (STEPS, GUIDANCE, "euler", "normal")
        empty = torch.zeros_like(noise)
        latent = comfy.sample.sample(model, noise, *how, positive, negative, empty, disable_pbar=True, seed=0)
        return model.model.latent_format.process_in(latent)

    @torch.inference_mode()
    def ours() -> torch.Tensor:
        loop_model = denoiser(transformer, cond, uncond, GUIDANCE)
        return flow.sample(loop_model, noise, flow.sigmas(STEPS, 3.0))

    return in_turn(core, ours, runs)


def main() -> None:
    transformer = random_transformer(1152, BLOCKS)
    figures = description() | {
        "model": f"SANA-0.6B with {BLOCKS} of 28 blocks, random weights, fp32, {STEPS} steps, guidance {GUIDANCE}",
        "threads": torch.get_num_threads(),
        "others_load": round(os.getloadavg()[0], 1),
        "loop_beside_pipeline": {},
        "ksampler_beside_loop": {},
    }

    def keep(part: str, row: str, result: dict) -> None:
        figures[part][row] = result
        # Write after each row, so that an interrupted run leaves its results.
        (ROOT / "benchmarks" / "sampling.json").write_text(json.dumps(figures, indent=2) + "\n")
        sys.stdout.write(f"{part}, {row}: {result}\n")
        sys.stdout.flush()

    keep("loop_beside_pipeline", "256 px, 300 tokens", loop_beside_pipeline(transformer, 256, 5))
    keep("ksampler_beside_loop", "256 px, 300 tokens", ksampler_beside_loop(transformer, 256, 5))
    keep("loop_beside_pipeline", "1024 px, 300 tokens", loop_beside_pipeline(transformer, 1024, 2))


if __name__ == "__main__":
    main()
