"""SANA Plan: what fits a GPU, with a chart. SANA Doctor: the report about this computer and its files."""

from __future__ import annotations

import importlib
import json
import re
from pathlib import Path

import comfy.cli_args
import comfy.model_management
import comfyui_version
import torch

import nodes

from ...sana_core.advice import Gpu, answer, as_seconds, gpu_of, image_seconds, sold_gpu, usual_gpu
from ...sana_core.doctor import Report, examine
from ...sana_core.doctor.machine import installed
from ...sana_core.doctor.report import SECONDS
from ...sana_core.memory import ImagePlan, StagePlan, plan_memory
from ...sana_core.model.known_models import VARIANTS
from .charts import BLUE, ORANGE, Bar, as_image, draw_bars
from .folders import BUNDLED, find_file, list_files, list_models, model_path
from .report import status_under_running_node

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
        size = plan["variant"], plan["width"], plan["height"], plan["batch"]
        needed = plan_memory(*size, "float32", accelerator=False, vae=vae)["smallest"]
        ram = comfy.model_management.get_total_memory(torch.device("cpu"))
        lines.append(
            f"This computer has no GPU. Its CPU computes in fp32, where the largest stage takes {needed / 1e9:.1f} GB "
            f"of its {ram / 1e9:.1f} GB of RAM."
        )
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


SECTION = "ComfyUI"
KINDS = ("diffusion_models", "text_encoders", "vae", "controlnet", "loras")
# Options about memory, dtypes and attention. None of them contains a path or an address.
FLAGS = re.compile(r"vram|cpu|gpu|bf16|fp16|fp32|fp8|memory|cache|attention|fast|offload|pinned|precision")
# Functions that SANA uses for generation, and that other packs are known to replace.
REPLACEABLE = {
    "comfy.ldm.modules.attention": ("optimized_attention",),
    "comfy.model_management": ("load_models_gpu", "get_torch_device", "soft_empty_cache"),
    "comfy.sample": ("sample", "sample_custom"),
    "comfy.samplers": ("sampling_function", "calc_cond_batch"),
    "comfy.sd": ("load_lora_for_models",),
}


def examine_host(files: bool) -> tuple[str, str, str]:
    """Return the report about this server as Markdown and as JSON, and lines with its summary and its faults.

    `files`: also check the SANA files in the models folders.
    """
    management = comfy.model_management
    show_status = status_under_running_node()
    report = Report(
        management.throw_exception_if_processing_interrupted,
        SECONDS,
        lambda subject: show_status(f"checking {subject}"),
    )
    describe_host(report)
    examine(report, model_files() if files else ())
    faults = (f"{line.subject}: got {line.got}, expected {line.expected}" for line in report.faults)
    return report.markdown(), json.dumps(report.as_json(), indent=1), "\n".join([report.summary(), *faults])


def describe_host(report: Report) -> None:
    """Add lines about ComfyUI, its command line options and other packs."""
    report.note(SECTION, "version", comfyui_version.__version__)
    for package in ("comfyui-frontend-package", "comfy-kitchen", "comfy-aimdo"):
        if version := installed(package):
            report.note(SECTION, package, version)
    report.note(SECTION, "memory", comfy.model_management.vram_state.name)
    options = vars(comfy.cli_args.args)
    changed = {name: value for name, value in options.items() if FLAGS.search(name) and is_changed(name, value)}
    report.note(SECTION, "options", ", ".join(f"{name} {value}" for name, value in sorted(changed.items())) or "none")
    # Entries for ComfyUI's extra nodes may be paths.
    names = {Path(name).name for name in nodes.LOADED_MODULE_DIRS}
    packs = sorted(name for name in names if not name.startswith(("nodes_", "comfy_")))
    report.note(SECTION, "packs", ", ".join(packs))
    for home, names in REPLACEABLE.items():
        module = importlib.import_module(home)
        for name in names:
            origin = getattr(getattr(module, name, None), "__module__", home)
            if origin != home:
                report.note(SECTION, f"{home}.{name}", f"replaced by {origin}")


def is_changed(name: str, value: object) -> bool:
    """Whether a number or switch differs from its default."""
    return isinstance(value, (bool, int, float)) and value != comfy.cli_args.parser.get_default(name)


def model_files() -> list[Path]:
    """Return the files that SANA's loaders list, except the bundled ones."""
    bundled_names = {name for bundled in BUNDLED.values() for name in bundled}
    paths = [model_path(name) for name in list_models() if name not in bundled_names]
    paths += [find_file(kind, name, kind) for kind in KINDS for name in list_files(kind) if name not in bundled_names]
    return list(dict.fromkeys(paths))
