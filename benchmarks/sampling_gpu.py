"""Seconds of one guided step on a CUDA machine, beside diffusers and beside the floor of the arithmetic.

Writes benchmarks/sampling_gpu.json. SANA 0.6B and 1.6B in bf16 with random weights, one picture, two rows (guidance),
300 tokens. The floor is the step's multiplications at the rate of a large bf16 matrix product in the same run.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from machine import description

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT))

from sana_core.forward import prepare, velocity  # noqa: E402

SIZES = (512, 1024, 2048, 4096)
TOKENS = 300
RUNS = 20
COMMON = {"attention_head_dim": 32}
MODELS = {
    "0.6B": {"num_attention_heads": 36, "num_layers": 28, "num_cross_attention_heads": 16}
    | {"cross_attention_head_dim": 72, "cross_attention_dim": 1152},
    "1.6B": {"num_attention_heads": 70, "num_layers": 20, "num_cross_attention_heads": 20}
    | {"cross_attention_head_dim": 112, "cross_attention_dim": 2240},
}


def seconds(call: Callable[[], torch.Tensor]) -> float:
    """Median seconds of `call`, warm, each run waited for."""
    for _ in range(3):
        call()
    times = []
    for _ in range(RUNS):
        torch.cuda.synchronize()
        started = time.perf_counter()
        call()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - started)
    return statistics.median(times)


def peak_rate(device: torch.device) -> float:
    """Multiply-adds a second of a bf16 matrix product of 8192 x 8192 x 8192."""
    a, b = (torch.randn(8192, 8192, device=device, dtype=torch.bfloat16) for _ in range(2))
    return 8192**3 / seconds(lambda: a @ b)


def multiply_adds(config: dict, pixels: int, rows: int = 2) -> float:
    """Of one step whose prompt is prepared: projections, attentions and feed-forwards (SANA paper, section 2.2)."""
    width = config["num_attention_heads"] * 32
    hidden = int(2.5 * width)
    positions = (pixels // 32) ** 2
    block = 4 * width**2  # query, key, value, out
    block += 2 * 33 * width  # linear attention: two products of 32 x 33 a head
    block += 2 * width**2 + 2 * TOKENS * width  # cross-attention
    block += 2 * width * hidden + 9 * 2 * hidden + hidden * width
    return rows * positions * (config["num_layers"] * block + 64 * width)


@torch.inference_mode()
def measure(name: str, pixels: int, rate: float, device: torch.device) -> dict:
    from diffusers import SanaTransformer2DModel

    torch.manual_seed(0)
    with device:
        transformer = SanaTransformer2DModel(**COMMON, **MODELS[name]).to(torch.bfloat16).requires_grad_(False)
        cells = pixels // 32
        x = torch.randn(2, 32, cells, cells, dtype=torch.bfloat16)
        embeds = torch.randn(2, TOKENS, 2304, dtype=torch.bfloat16)
        mask = torch.ones(2, TOKENS, dtype=torch.long)
        timestep = torch.full((2,), 500.0)
    constants = prepare(transformer, embeds, mask, cells, cells)
    theirs = torch.compile(transformer, mode="reduce-overhead")
    ours = torch.compile(velocity, mode="reduce-overhead")
    calls = {
        "diffusers_eager": lambda: transformer(x, embeds, timestep, encoder_attention_mask=mask).sample,
        "diffusers_compiled": lambda: theirs(x, embeds, timestep, encoder_attention_mask=mask).sample,
        "eager": lambda: velocity(transformer, x, timestep, constants),
        "compiled": lambda: ours(transformer, x, timestep, constants),
    }
    found = {key: seconds(call) for key, call in calls.items()}
    floor = multiply_adds(MODELS[name], pixels) / rate
    torch.compiler.reset()
    return {
        "milliseconds": {key: round(1000 * value, 2) for key, value in found.items()},
        "floor_milliseconds": round(1000 * floor, 2),
        "times_the_floor": {key: round(value / floor, 2) for key, value in found.items()},
        "of_diffusers_eager": {key: round(value / found["diffusers_eager"], 3) for key, value in found.items()},
    }


def main() -> None:
    if not torch.cuda.is_available():
        sys.exit("this benchmark needs a CUDA device; benchmarks/sampling.py measures the CPU")
    device = torch.device("cuda")
    rate = peak_rate(device)
    figures = description() | {
        "device": torch.cuda.get_device_name(),
        "multiply_adds_per_second": float(f"{rate:.3g}"),
        "steps": {name: {f"{pixels} px": measure(name, pixels, rate, device) for pixels in SIZES} for name in MODELS},
    }
    text = json.dumps(figures, indent=2) + "\n"
    (ROOT / "benchmarks" / "sampling_gpu.json").write_text(text)
    sys.stdout.write(text)


if __name__ == "__main__":
    main()
