"""Lines about this machine: versions, GPUs, the kernels that run on them, and torch functions that were replaced."""

from __future__ import annotations

import platform
from importlib.metadata import requires
from pathlib import Path

import torch

from ..cluster.connection import OLDEST_RAY
from ..kernels.trial import refused_kernels
from ..runtime.accelerator import current_accelerator, has_bf16, memory_info
from ..runtime.libraries import COMPANIONS, import_failure, installed
from .report import Report

HERE = Path(__file__).parents[2]
SECTION = "This machine"
OLDEST_TORCH = "2.7"
# Packages that are not in requirements.txt, but change how SANA runs.
OPTIONAL = ("triton", "triton-windows", "xformers", "sageattention", "peft", "torchao")
# Functions of torch that SANA uses, and that other packs are known to replace.
REPLACEABLE = ("scaled_dot_product_attention", "layer_norm", "rms_norm", "silu", "conv2d", "linear")


def describe_machine(report: Report) -> None:
    system = f"Python {platform.python_version()}, {platform.system()} {platform.machine()}"
    report.note(SECTION, "system", system)
    with report.checking(SECTION, "sana-nodes"):
        report.note(SECTION, "sana-nodes", commit() or "no git checkout")
    with report.checking(SECTION, "versions"):
        check_versions(report)
    for name in REPLACEABLE:
        function = getattr(torch.nn.functional, name, None)
        home = str(getattr(function, "__module__", None) or "torch")
        if not home.startswith("torch"):
            report.note(SECTION, f"torch's {name}", f"replaced by {home}")


def check_versions(report: Report) -> None:
    from packaging.requirements import Requirement

    companions = filter(installed, COMPANIONS)
    ray = (f"ray>={OLDEST_RAY}",) if installed("ray") else ()
    # {why a package cannot be imported: its name}. Packages that import it fail for the same reason.
    failures: dict[str, str] = {}
    for line in (f"torch>={OLDEST_TORCH}", *companions, *requirements(), *ray):
        requirement = Requirement(line)
        actual = torch.__version__ if requirement.name == "torch" else installed(requirement.name)
        right = bool(actual) and requirement.specifier.contains(actual, prereleases=True)
        got = actual or "not installed"
        if right and (failure := import_failure(requirement.name)):
            right, got = False, str(failure)
            broken = failures.setdefault(got, requirement.name)
            if broken != requirement.name:
                got = f"{actual}, which needs {broken}"
        report.judge(SECTION, requirement.name, str(requirement.specifier) or "any", got, right)
    for name in OPTIONAL:
        if actual := installed(name):
            report.note(SECTION, name, actual)


def requirements() -> list[str]:
    """Return the requirements of this package, from its checkout or its installation."""
    file = HERE / "requirements.txt"
    if file.is_file():
        return file.read_text().split()
    # pip does not install the file, but records its lines. The requirements of extras have a marker.
    return [line for line in requires("sana-nodes") or () if ";" not in line]


def commit() -> str:
    """Return the commit of this checkout, or an empty text without a checkout."""
    git = HERE / ".git"
    if git.is_file():
        # In a worktree, .git is a file with the path of the worktree's git folder.
        git = HERE / git.read_text().removeprefix("gitdir: ").strip()
    if not (git / "HEAD").is_file():
        return ""
    head = (git / "HEAD").read_text().strip()
    if not head.startswith("ref: "):
        return head[:12]
    name = head.removeprefix("ref: ")
    common = git / (git / "commondir").read_text().strip() if (git / "commondir").is_file() else git
    if (common / name).is_file():
        return (common / name).read_text()[:12]
    packed = common / "packed-refs"
    lines = packed.read_text().splitlines() if packed.is_file() else []
    return next((line[:12] for line in lines if line.endswith(f" {name}")), "")


def describe_devices(report: Report) -> None:
    """Add a line for each accelerator, or for the CPU, and a line about the fused kernels for each 16-bit dtype."""
    accelerator = current_accelerator()
    if accelerator is None:
        free, total = memory_info(torch.device("cpu"))
        words = f"{torch.get_num_threads()} threads, {total / 1e9:.0f} GB, {free / 1e9:.0f} free"
        report.note(SECTION, "no accelerator: CPU", words)
        return
    for index in range(torch.accelerator.device_count()):
        device = torch.device(accelerator.type, index)
        with report.checking(SECTION, str(device)):
            report.note(SECTION, str(device), describe_card(device))
    for dtype in (torch.bfloat16, torch.float16) if has_bf16(accelerator) else (torch.float16,):
        subject = f"fused kernels, {str(dtype).removeprefix('torch.')}"
        with report.checking(SECTION, subject):
            refused = refused_kernels(accelerator, dtype)
            got = "; ".join(f"not {kernel} ({why})" for kernel, why in refused.items()) or "all"
            report.judge(SECTION, subject, "all", got, not refused)


def describe_card(device: torch.device) -> str:
    free, total = memory_info(device)
    words = [device.type]
    if device.type != "mps":
        module = torch.get_device_module(device)
        properties = module.get_device_properties(device)
        words = [module.get_device_name(device)]
        words += [str(getattr(properties, "gcnArchName", ""))] if torch.version.hip else []
        if module is torch.cuda and torch.version.hip is None:
            words.append(f"compute {properties.major}.{properties.minor}")
            # GPUs multiply float8 since Ada (documentation of cuBLASLt).
            words.append("fp8" if (properties.major, properties.minor) >= (8, 9) else "no fp8")
    words.append("bf16" if has_bf16(device) else "no bf16")
    words.append(f"{total / 1e9:.1f} GB, {free / 1e9:.1f} free")
    driver = torch.version.cuda or torch.version.hip
    return ", ".join([*filter(None, words), *([f"driver of torch {driver}"] if driver else [])])
