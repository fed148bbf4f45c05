"""What this machine is: versions, GPUs, which kernels run on them, and what others have replaced in torch."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

import torch

from ..kernels.trial import refused_kernels
from ..runtime.accelerator import current_accelerator, has_bf16, memory_info
from .report import Report

HERE = Path(__file__).parents[2]
SECTION = "This machine"
OLDEST_TORCH = "2.6"
# beside those in requirements.txt, for what they decide
OTHERS = ("triton", "triton-windows", "xformers", "sageattention", "peft", "ray", "torchao")
# functions of torch that packs are known to replace, and that SANA computes with
REPLACEABLE = ("scaled_dot_product_attention", "layer_norm", "rms_norm", "silu", "conv2d", "linear")


def describe_machine(report: Report) -> None:
    """Add lines on versions, and on functions of torch that have been replaced."""
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
    """Compare the installed packages with the requirements of this one."""
    from packaging.requirements import Requirement

    for line in (f"torch>={OLDEST_TORCH}", *requirements()):
        wanted = Requirement(line)
        found = torch.__version__ if wanted.name == "torch" else installed(wanted.name)
        right = bool(found) and wanted.specifier.contains(found, prereleases=True)
        report.judge(SECTION, wanted.name, str(wanted.specifier), found or "not installed", right)
    for name in OTHERS:
        if found := installed(name):
            report.note(SECTION, name, found)


def requirements() -> list[str]:
    """Return the requirements of this package, of its checkout or of its installation."""
    file = HERE / "requirements.txt"
    if file.is_file():
        return file.read_text().split()
    # pip does not install the file, but records its lines. Those of extras have a marker.
    return [line for line in requires("sana-nodes") or () if ";" not in line]


def installed(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


def commit() -> str:
    """Return the commit of this checkout, empty where there is none."""
    git = HERE / ".git"
    if git.is_file():
        # a worktree's file says where its own folder is
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
    """Add a line on each accelerator, or on the CPU, and on the fused kernels of each type that it computes in."""
    own = current_accelerator()
    if own is None:
        free, total = memory_info(torch.device("cpu"))
        words = f"{torch.get_num_threads()} threads, {total / 1e9:.0f} GB, {free / 1e9:.0f} free"
        report.note(SECTION, "no accelerator: CPU", words)
        return
    for index in range(torch.accelerator.device_count()):
        device = torch.device(own.type, index)
        with report.checking(SECTION, str(device)):
            report.note(SECTION, str(device), describe_card(device))
    for dtype in accelerator_dtypes(own):
        with report.checking(SECTION, f"fused kernels, {dtype}"):
            check_kernels(report, own, dtype)


def check_kernels(report: Report, device: torch.device, dtype: torch.dtype) -> None:
    """Add a line on the fused kernels that do not build or run on `device`, and why."""
    refused = refused_kernels(device, dtype)
    got = "; ".join(f"not {kernel} ({why})" for kernel, why in refused.items()) or "all"
    report.judge(SECTION, f"fused kernels, {named(dtype)}", "all", got, not refused)


def named(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def accelerator_dtypes(device: torch.device) -> list[torch.dtype]:
    """Return the 16-bit types that `device` computes in."""
    return [torch.bfloat16, torch.float16] if has_bf16(device) else [torch.float16]


def describe_card(device: torch.device) -> str:
    """Return name, architecture, memory and types of one accelerator."""
    free, total = memory_info(device)
    words = [device.type]
    if device.type != "mps":
        own = torch.get_device_module(device)
        properties = own.get_device_properties(device)
        words = [own.get_device_name(device)]
        words += [str(getattr(properties, "gcnArchName", ""))] if torch.version.hip else []
        if own is torch.cuda and torch.version.hip is None:
            words.append(f"compute {properties.major}.{properties.minor}")
            # float8 products since Ada (CUDA's documentation of cuBLASLt)
            words.append("fp8" if (properties.major, properties.minor) >= (8, 9) else "no fp8")
    words.append("bf16" if has_bf16(device) else "no bf16")
    words.append(f"{total / 1e9:.1f} GB, {free / 1e9:.1f} free")
    driver = torch.version.cuda or torch.version.hip
    return ", ".join([*filter(None, words), *([f"driver of torch {driver}"] if driver else [])])
