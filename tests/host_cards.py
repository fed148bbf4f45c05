"""ComfyUI on pretended GPUs that compute: `pretend_card` below ComfyUI's own memory management.

`fake_cuda` has a GPU without numbers, for models of released sizes. Here the tiny model runs, so that images can be
compared with the CPU's images.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from fake_cuda import pack
from loaded_models import empty_model_list
from pretend_card import Cards, pretend_cards


@contextmanager
def host_cards(
    host: Any,
    count: int = 2,
    state: str = "NORMAL_VRAM",
    exact: bool = True,
    gpu_only: bool = False,
    cpu_vae: bool = False,
    **cards: Any,
) -> Iterator[Cards]:
    """Run ComfyUI on `count` pretended GPUs. `cards`: more options of `pretend_cards`.

    `state` is a name in comfy.model_management.VRAMState. `gpu_only` and `cpu_vae` are ComfyUI's options. `exact`:
    models compute in fp32, so that images are the CPU's images within rounding.
    """
    import comfy.cli_args
    import comfy.model_management as management

    # Imported before `pretend_cards`, which replaces its processes.
    pack("sana_core.engine.process")
    with pretend_cards(count, **cards) as pretended, empty_model_list(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(host, "loaded", None)
        patch.setattr(management, "cpu_state", management.CPUState.GPU)
        patch.setattr(management, "vram_state", management.VRAMState[state])
        patch.setattr(management, "lowvram_available", True)
        # A torch without CUDA would list one device.
        patch.setattr(management, "is_nvidia", lambda: True)
        patch.setattr(management, "FORCE_FP32", exact)
        patch.setattr(management, "LORA_COMPUTE_DTYPES", {})
        patch.setattr(comfy.cli_args.args, "gpu_only", gpu_only)
        patch.setattr(comfy.cli_args.args, "cpu_vae", cpu_vae)
        host.executor.reset()
        try:
            yield pretended
        finally:
            # ComfyUI's cache must not keep these models for the next test.
            host.executor.reset()
            gc.collect()
