"""The answer to "what fits my GPU?", and its chart: the memory of each stage beside the GPU's."""

from __future__ import annotations

import comfy.model_management
import torch

from ...sana_core.advice import Gpu, answer, as_seconds, gpu_of, image_seconds, sold_gpu, usual_gpu
from ...sana_core.memory import ImagePlan, StagePlan, plan_memory
from ...sana_core.model.known_models import VARIANTS
from .bars import BLUE, ORANGE, Bar, as_image, draw_bars

LEGEND = (("weights", BLUE), ("everything else", ORANGE))


def draw_plan(
    variant: str | None, width: int, height: int, batch_size: int, vae: str, gigabytes: int | None
) -> tuple[torch.Tensor, str]:
    """Return the answer above its chart as an IMAGE [1, H, W, 3], and the answer with all figures as text.

    `variant` None recommends a model. `gigabytes` None is the GPU of this computer.
    """
    device = comfy.model_management.get_torch_device()
    if gigabytes is not None:
        gpu = sold_gpu(gigabytes)
    elif device.type == "cpu":
        gpu = usual_gpu()
    else:
        memory = comfy.model_management.get_total_memory(device)
        gpu = gpu_of(memory, comfy.model_management.should_use_bf16(device))
    sentence, fitting = answer(gpu, variant, width, height, batch_size, vae)
    plan = fitting.plan
    # SANA Decode uses strips of the usual size if they fit, else smaller strips.
    decode = plan["decode"]
    if decode["weights"] + decode["activations"] > gpu.usable:
        decode = {**decode, "activations": decode["methods"]["smallest"] or 0}
    stages: list[tuple[str, StagePlan]] = [
        ("text encoder", plan["text"]),
        *(("encode", stage) for stage in (plan["encode"],) if stage is not None),
        ("sampling step", plan["transformer"]),
        ("decode", decode),
    ]
    bars = [
        Bar(name, ((stage["weights"], BLUE), (stage["activations"], ORANGE)), f"{total(stage):.1f} GB")
        for name, stage in stages
    ]
    image = as_image(draw_bars(sentence, bars, LEGEND, (gpu.usable, f"GPU: {gpu.usable / 1e9:.1f} GB usable")))
    lines = [sentence, "", *figures(gpu, plan, vae)]
    if gigabytes is None and device.type == "cpu":
        lines.append(on_this_cpu(plan, vae))
    return image, "\n".join(lines)


def total(stage: StagePlan) -> float:
    """Return GB (10^9 bytes)."""
    return (stage["weights"] + stage["activations"]) / 1e9


def figures(gpu: Gpu, plan: ImagePlan, vae: str) -> list[str]:
    """Return a line for each stage of `plan`, and for each way to decode."""
    variant, width, height, batch = plan["variant"], plan["width"], plan["height"], plan["batch"]
    lines = [
        "Predicted GB (10^9 bytes): weights + everything else. The stages run one after another.",
        f"text encoder: {amount(plan['text'])}",
        f"sampling step of {variant}, {batch} prompt{'s' * (batch > 1)}: {amount(plan['transformer'])}",
    ]
    if not VARIANTS[variant].guidance_embeds:
        perturbed = plan_memory(variant, width, height, batch, gpu.dtype, vae=vae, prompts=batch, pag=True)
        lines.append(f"the same with SANA PAG: {amount(perturbed['transformer'])}")
    if plan["encode"] is not None:
        two = plan_memory(variant, width, height, batch, gpu.dtype, vae=vae, prompts=batch, image_guidance=1.0)
        lines.append(f"the same with image_guidance of 1 and below: {amount(two['transformer'])}")
        lines.append(f"encode, strips: {amount(plan['encode'])}")
    for name, size in plan["decode"]["methods"].items():
        stage: StagePlan = {"weights": plan["decode"]["weights"], "activations": size or 0}
        lines.append(f"decode, {name}: " + (amount(stage) if size is not None else "not possible, too many numbers"))
    lines.append(gpu.describe())
    if gpu.example is not None:
        seconds = as_seconds(image_seconds(gpu.example, variant, width, height))
        lines.append(f"Predicted time of an image on a GPU such as {gpu.example.name}: {seconds}, with loaded models.")
    return lines


def amount(stage: StagePlan) -> str:
    return f"{stage['weights'] / 1e9:.2f} + {stage['activations'] / 1e9:.2f} GB"


def on_this_cpu(plan: ImagePlan, vae: str) -> str:
    """Return a line about the same image on this computer's CPU."""
    size = plan["variant"], plan["width"], plan["height"], plan["batch"]
    needed = plan_memory(*size, "float32", accelerator=False, vae=vae)["smallest"]
    memory = comfy.model_management.get_total_memory(torch.device("cpu"))
    return (
        f"This computer has no GPU. Its CPU computes in fp32, where the largest stage takes {needed / 1e9:.1f} GB "
        f"of its {memory / 1e9:.1f} GB of RAM."
    )
