"""The memory plan as an image: bars for each stage beside the GPU's memory."""

from __future__ import annotations

import comfy.model_management
import torch

from ...sana_core.memory import CONTEXT, fitting_cards, plan_memory
from ...sana_core.model.known_models import VARIANTS
from .bars import BLUE, ORANGE, Bar, as_image, draw_bars

LEGEND = (("weights", BLUE), ("beyond them", ORANGE))


def draw_plan(variant: str, width: int, height: int, batch_size: int, vae: str) -> tuple[torch.Tensor, str]:
    """Return an IMAGE [1, H, W, 3] of the plan, and its figures as text."""
    device = comfy.model_management.get_torch_device()
    accelerator = device.type != "cpu"
    dtype = "bfloat16" if comfy.model_management.should_use_bf16(device) else "float32"
    plan = plan_memory(variant, width, height, batch_size, dtype, accelerator, vae)

    def with_settings(prompts: int, pag: bool) -> tuple[int, int]:
        sized = plan_memory(variant, width, height, batch_size, dtype, accelerator, vae, prompts, pag)["transformer"]
        return sized["weights"], sized["activations"]

    card = comfy.model_management.get_total_memory(device)
    decode = plan["decode"]
    rows: list[tuple[str, int, int | None]] = [
        (name, stage["weights"], stage["activations"])
        for name, stage in (("text", plan["text"]), ("transformer", plan["transformer"]))
    ]
    if batch_size > 1:
        rows.append((f"{batch_size} prompts", *with_settings(batch_size, False)))
    if not VARIANTS[variant].guidance_embeds:
        rows.append(("with PAG", *with_settings(1, True)))
        if batch_size > 1:
            rows.append((f"PAG, {batch_size} prompts", *with_settings(batch_size, True)))
    rows += [(f"decode, {name}", decode["weights"], size) for name, size in decode["methods"].items()]
    title = f"SANA {variant}, {width} x {height}, {batch_size} at once, {dtype}: {fitting_cards(plan)}"
    bars = [
        Bar(name, ((weights, BLUE), (size or 0, ORANGE)), amount(weights, size).split(",")[0])
        for name, weights, size in rows
    ]
    image = as_image(draw_bars(title.replace(": ", "\n"), bars, LEGEND, (card, f"{card / 1e9:.1f} GB here")))
    lines = [
        title,
        f"this computer's memory: {card / 1e9:.1f} GB, of which the driver takes about {CONTEXT / 1e9:.1f} GB",
    ]
    lines += [f"{name}: {amount(weights, size)}" for name, weights, size in rows]
    return image, "\n".join(lines)


def amount(weights: int, size: int | None) -> str:
    if size is None:
        return "not possible, a tensor of 2^31 elements"
    return f"{weights / 1e9:.2f} + {size / 1e9:.2f} GB"
