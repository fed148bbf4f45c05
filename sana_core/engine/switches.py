"""Switches of torch that change the speed or the last bits of results. A worker process gets those of its parent.

The environment needs no such copy, because a process inherits it.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import torch

# How to read a switch: how to set it. Below torch. Versions of torch lack some.
FUNCTIONS = {
    "are_deterministic_algorithms_enabled": "use_deterministic_algorithms",
    "get_float32_matmul_precision": "set_float32_matmul_precision",
    "backends.cuda.flash_sdp_enabled": "backends.cuda.enable_flash_sdp",
    "backends.cuda.mem_efficient_sdp_enabled": "backends.cuda.enable_mem_efficient_sdp",
    "backends.cuda.math_sdp_enabled": "backends.cuda.enable_math_sdp",
    "backends.cuda.cudnn_sdp_enabled": "backends.cuda.enable_cudnn_sdp",
    "backends.cuda.fp16_bf16_reduction_math_sdp_allowed": "backends.cuda.allow_fp16_bf16_reduction_math_sdp",
}
ATTRIBUTES = (
    "backends.cuda.matmul.allow_fp16_reduced_precision_reduction",
    "backends.cuda.matmul.allow_bf16_reduced_precision_reduction",
    "backends.cuda.matmul.allow_fp16_accumulation",
    "backends.cudnn.enabled",
    "backends.cudnn.benchmark",
    "backends.cudnn.deterministic",
    "backends.cudnn.allow_tf32",
)


def read_switches() -> dict[str, Any]:
    """Return the switches of this process by name, without those that this version of torch lacks."""
    switches = {}
    for name in (*FUNCTIONS, *ATTRIBUTES):
        # torch raises RuntimeError if a program uses its old and its new switches for TF32 together.
        with suppress(AttributeError, RuntimeError):
            module, last = find_module(name)
            value = getattr(module, last)
            switches[name] = value() if name in FUNCTIONS else value
    return switches


def set_switches(switches: Mapping[str, Any]) -> None:
    """Set the switches of this process that differ."""
    present = read_switches()
    for name, value in switches.items():
        if name not in present or present[name] == value:
            continue
        module, last = find_module(FUNCTIONS.get(name, name))
        if name in FUNCTIONS:
            getattr(module, last)(value)
        else:
            setattr(module, last, value)


def find_module(name: str) -> tuple[Any, str]:
    """Return the module that has the switch `name`, and the last part of its name."""
    *folders, last = name.split(".")
    module: Any = torch
    for folder in folders:
        module = getattr(module, folder)
    return module, last
