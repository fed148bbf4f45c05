"""The report of SANA Doctor inside ComfyUI: its version and flags, other packs, and the files in its models folders."""

from __future__ import annotations

import importlib
import json
import re
from pathlib import Path

import comfy.cli_args
import comfy.model_management
import comfyui_version

import nodes

from ...sana_core.doctor import Report, examine
from ...sana_core.doctor.machine import installed
from ...sana_core.doctor.report import SECONDS
from .folders import BUNDLED, find_file, list_files, list_models, model_path
from .report import status_under_running_node

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
