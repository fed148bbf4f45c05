"""What text and transformer take beyond their weights, beside what sana_core.memory predicts: `make bench`.

Writes benchmarks/memory.json. Real widths, two blocks or layers of each, random weights, each measurement a process of
its own; the figures of the decode are in decode.json.
"""

from __future__ import annotations

import json
import sys

import torch
from transformers import Gemma2Config, Gemma2Model

from benchmarks.machine import last_line, random_transformer, write
from sana_core.decode.workspace import PeakMemory
from sana_core.memory import INSTRUCTION_TOKENS, text_bytes, transformer_bytes
from sana_core.model.known_models import MAX_TOKENS, Architecture
from sana_core.sampling.guidance import denoiser

BLOCKS = 2
DTYPES = ("float32", "bfloat16")
TRANSFORMERS = [(width, pixels, dtype) for width in (1152, 2240) for pixels in (512, 1024) for dtype in DTYPES]


def measure_transformer(width: int, pixels: int, dtype: torch.dtype) -> tuple[int, int]:
    """Return measured and predicted bytes of a guided step."""
    model = random_transformer(width, BLOCKS).to(dtype)
    side = pixels // 32
    prompt = torch.randn(1, 300, 2304, dtype=dtype), torch.ones(1, 300)
    x = torch.randn(1, 32, side, side)
    with torch.inference_mode():
        denoiser(model, prompt, prompt, 4.5)(x[..., :2, :2].contiguous(), 0.5)  # buffers made once
        with PeakMemory(torch.device("cpu")) as peak:
            denoiser(model, prompt, prompt, 4.5)(x, 0.5)
    return peak.bytes, transformer_bytes(Architecture(width, BLOCKS), side, side, 1, dtype, accelerator=False)


def measure_text(dtype: torch.dtype) -> tuple[int, int]:
    """Return measured and predicted bytes of one prompt behind the instruction."""
    model = Gemma2Model(Gemma2Config(num_hidden_layers=BLOCKS, vocab_size=1000)).requires_grad_(False).to(dtype)
    ids = torch.randint(3, 1000, (1, INSTRUCTION_TOKENS + MAX_TOKENS))
    with torch.inference_mode():
        model(ids[:, :8], attention_mask=torch.ones(1, 8))
        with PeakMemory(torch.device("cpu")) as peak:
            model(ids, attention_mask=torch.ones_like(ids))
    return peak.bytes, text_bytes(1, dtype.itemsize)


def child(arguments: list[str]) -> dict:
    # glibc keeps much freed memory, up to twice the used memory, unless each tensor is mapped separately.
    measured, predicted = last_line("-m", "benchmarks.memory", *arguments, MALLOC_MMAP_THRESHOLD_="1000000")
    return {
        "measured_megabytes": round(measured / 1e6, 1),
        "predicted_megabytes": round(predicted / 1e6, 1),
        "measured_of_predicted": round(measured / predicted, 3),
    }


def main() -> None:
    if len(sys.argv) > 1:
        *size, dtype = sys.argv[1:]
        kind = getattr(torch, dtype)
        result = measure_transformer(*map(int, size), kind) if size else measure_text(kind)
        sys.stdout.write(f"\n{json.dumps(result)}")
        return
    figures = {
        "text": {dtype: child([dtype]) for dtype in DTYPES},
        "transformer": {
            f"width {width}, {pixels} px, {dtype}": child([str(width), str(pixels), dtype])
            for width, pixels, dtype in TRANSFORMERS
        },
    }
    write(__file__, figures)


if __name__ == "__main__":
    main()
