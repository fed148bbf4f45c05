"""What a step and a decode launch and move inside ComfyUI: its MODEL and VAE, loaded by it, on a card without numbers.

The step is `sampling_function`, which ComfyUI's samplers call: it puts both prompts into one batch, casts, and guides.
"""

from __future__ import annotations

import torch
from fake_accelerator import Counter, fake_accelerators
from fake_cuda import CARD, TOKENS, load, no_numbers, pack

SCALARS = {torch.int64: TOKENS, torch.bool: False}


def trial():
    """The pack's module that tries the kernels."""
    return pack("sana_core.kernels.trial")


def guided_step(patch, file, pixels=1024, **options):
    """The counter of the second of two guided steps, with the peak of the first step, which fills the caches.

    `patch` is the value of `fake_card`. `options` are passed to the pack's loader.
    """
    import comfy.model_management
    import comfy.sampler_helpers
    import comfy.samplers

    first, second = Counter(SCALARS), Counter(SCALARS)
    with no_numbers(patch):
        patcher = load(patch, pack("nodes.host.loading.load_model").load_model, file, **options)
        comfy.model_management.load_models_gpu([patcher], 10**6)
        patcher.pre_run()
        model = patcher.model
        x, sigma = torch.empty(1, 32, pixels // 32, pixels // 32, device=CARD), torch.empty(1, device=CARD)
        text = [[torch.empty(1, TOKENS, 2304), {"attention_mask": torch.ones(1, TOKENS)}]]
        conds = {name: comfy.sampler_helpers.convert_cond(text) for name in ("positive", "negative")}
        conds = comfy.samplers.process_conds(model, x, conds, CARD)
        for counter in (first, second):
            with fake_accelerators(counter, trial=trial()):
                comfy.samplers.sampling_function(
                    model, x, sigma, conds["negative"], conds["positive"], 4.5, patcher.model_options
                )
    second.peak = first.peak
    return second


def decode(patch, file, pixels=1024):
    """The counter of ComfyUI's decode of a picture of `pixels` x `pixels`, in the plan for a card with much memory."""
    counter = Counter(SCALARS)
    with no_numbers(patch):
        vae = load(patch, pack("nodes.host.loading.vae").load_vae, file)
        pack("nodes.host.loading.vae").load_for_decode(vae, (1, 32, pixels // 32, pixels // 32))
        with fake_accelerators(counter, trial=trial()):
            picture = vae.decode(torch.empty(1, 32, pixels // 32, pixels // 32))
        assert picture.shape == (1, pixels, pixels, 3)
    return counter
