"""What ComfyUI knows besides: its version and flags, other packs, and where the model files are."""

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
# options that decide on memory, types and attention; none of them holds a place or an address
FLAGS = re.compile(r"vram|cpu|gpu|bf16|fp16|fp32|fp8|memory|cache|attention|fast|offload|pinned|precision")
# functions that packs are known to replace, and that generating with SANA calls
REPLACEABLE = {
    "comfy.ldm.modules.attention": ("optimized_attention",),
    "comfy.model_management": ("load_models_gpu", "get_torch_device", "soft_empty_cache"),
    "comfy.sample": ("sample", "sample_custom"),
    "comfy.samplers": ("sampling_function", "calc_cond_batch"),
    "comfy.sd": ("load_lora_for_models",),
}


def examine_host(files: bool) -> tuple[str, str]:
    """Return the report on this server as Markdown and as JSON, with `files` also on SANA's files in models folders."""
    management = comfy.model_management
    management.unload_all_models()
    tell = status_under_running_node()
    report = Report(
        management.throw_exception_if_processing_interrupted,
        SECONDS,
        lambda what: tell(f"checking {what}"),
    )
    describe_host(report)
    examine(report, model_files() if files else (), str(management.get_torch_device()))
    tell(report.summary())
    return report.markdown(), json.dumps(report.as_json(), indent=1)


def describe_host(report: Report) -> None:
    """Add lines on ComfyUI, the options that it was started with, and other packs."""
    report.note(SECTION, "version", comfyui_version.__version__)
    for package in ("comfyui-frontend-package", "comfy-kitchen", "comfy-aimdo"):
        if found := installed(package):
            report.note(SECTION, package, found)
    report.note(SECTION, "memory", comfy.model_management.vram_state.name)
    given = vars(comfy.cli_args.args)
    chosen = {name: value for name, value in given.items() if FLAGS.search(name) and changed(name, value)}
    report.note(SECTION, "options", ", ".join(f"{name} {value}" for name, value in sorted(chosen.items())) or "none")
    # those of ComfyUI's own extras may be paths
    names = {Path(name).name for name in nodes.LOADED_MODULE_DIRS}
    packs = sorted(name for name in names if not name.startswith(("nodes_", "comfy_")))
    report.note(SECTION, "packs", ", ".join(packs))
    for home, names in REPLACEABLE.items():
        module = importlib.import_module(home)
        for name in names:
            own = getattr(getattr(module, name, None), "__module__", home)
            if own != home:
                report.note(SECTION, f"{home}.{name}", f"replaced by {own}")


def changed(name: str, value: object) -> bool:
    """Whether an option is not as it is without one."""
    return isinstance(value, (bool, int, float)) and value != comfy.cli_args.parser.get_default(name)


def model_files() -> list[Path]:
    """Return what SANA's loaders offer, without what comes with the pack."""
    own = {name for bundled in BUNDLED.values() for name in bundled}
    paths = [model_path(name) for name in list_models() if name not in own]
    paths += [find_file(kind, name, kind) for kind in KINDS for name in list_files(kind) if name not in own]
    return list(dict.fromkeys(paths))
