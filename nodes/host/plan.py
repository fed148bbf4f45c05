"""The memory plan as a picture: bars for each stage beside the card's memory."""

from __future__ import annotations

import comfy.model_management
import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont

from ...sana_core.memory import CONTEXT, fitting_cards, plan_memory

SIZE, LEFT, RIGHT, TOP, STEP, BAR = (900, 430), 190, 150, 70, 50, 28
WEIGHTS, ACTIVATIONS, CARD, TEXT, PAPER = (91, 122, 166), (226, 150, 74), (190, 50, 50), (40, 40, 40), (250, 250, 248)
Row = tuple[str, int, "int | None"]


def memory_rows(plan: dict) -> list[Row]:
    """Return (name, weights, bytes beyond them) of each bar."""
    rows: list[Row] = [(name, plan[name]["weights"], plan[name]["activations"]) for name in ("text", "transformer")]
    methods = plan["decode"]["methods"]
    return rows + [(f"decode, {name}", plan["decode"]["weights"], size) for name, size in methods.items()]


def draw_plan(variant: str, width: int, height: int, batch_size: int, vae: str) -> tuple[torch.Tensor, str]:
    """Return an IMAGE [1, H, W, 3] of the plan, and its figures as text."""
    device = comfy.model_management.get_torch_device()
    accelerator = device.type != "cpu"
    dtype = "bfloat16" if comfy.model_management.should_use_bf16(device) else "float32"
    plan = plan_memory(variant, width, height, batch_size, dtype, accelerator, vae)
    card = comfy.model_management.get_total_memory(device)
    rows = memory_rows(plan)
    title = f"SANA {variant}, {width} x {height}, {batch_size} at once, {dtype}: {fitting_cards(plan)}"
    pixels = np.asarray(chart(rows, card, title), np.float32) / 255
    lines = [
        title,
        f"this computer's memory: {card / 1e9:.1f} GB, of which the driver takes about {CONTEXT / 1e9:.1f} GB",
    ]
    lines += [f"{name}: {amount(weights, size)}" for name, weights, size in rows]
    return torch.from_numpy(pixels)[None], "\n".join(lines)


def amount(weights: int, size: int | None) -> str:
    if size is None:
        return "not possible, a tensor of 2^31 elements"
    return f"{weights / 1e9:.2f} + {size / 1e9:.2f} GB"


def chart(rows: list[Row], card: int, title: str) -> Image.Image:
    """Return the bars of `rows`, weights first, with a line at `card` bytes."""
    picture = Image.new("RGB", SIZE, PAPER)
    draw = ImageDraw.Draw(picture)
    font = ImageFont.load_default(15)
    most = max(weights + (size or 0) for _, weights, size in rows)
    # a card much larger than the bars is off the chart
    scale = (SIZE[0] - LEFT - RIGHT) / max(most, min(card, 1.5 * most))
    draw.text((20, 20), title, TEXT, font)
    for index, (name, weights, size) in enumerate(rows):
        y = TOP + index * STEP
        draw.text((20, y + 5), name, TEXT, font)
        middle, end = LEFT + weights * scale, LEFT + (weights + (size or 0)) * scale
        draw.rectangle((LEFT, y, middle, y + BAR), WEIGHTS)
        if size:
            draw.rectangle((middle, y, end, y + BAR), ACTIVATIONS)
        draw.text((end + 8, y + 5), amount(weights, size).split(",")[0], TEXT, font)
    bottom = TOP + len(rows) * STEP
    if card <= 1.5 * most:
        x = LEFT + card * scale
        draw.line((x, TOP - 12, x, bottom), CARD, 2)
        draw.text((x - 60, bottom), f"{card / 1e9:.1f} GB here", CARD, font)
    draw.text((20, bottom), "weights", WEIGHTS, font)
    draw.text((90, bottom), "beyond them", ACTIVATIONS, font)
    return picture
