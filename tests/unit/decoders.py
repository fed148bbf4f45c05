"""DC-AE as SANA has it, with random weights, and the latents and distances that its tests use."""

import torch
from layouts import f32c32


def lite(divisor, **changes):
    """DC-AE-Lite in its authors' configuration, with the channels divided by `divisor`."""
    decoder = {
        "decoder_block_types": "ResBlock",
        "decoder_layers_per_block": (0, 3, 5, 4, 4, 4),
        "decoder_qkv_multiscales": ((),) * 6,
        "decoder_conv_act_fn": "silu",
        "upsample_block_type": "pixel_shuffle",
    }
    return f32c32(divisor, **decoder | changes)


def noise(*shape, seed=0):
    """The same numbers on every device."""
    generator = torch.Generator("cpu").manual_seed(seed)
    return torch.randn(shape, generator=generator, device="cpu").to(torch.get_default_device())


def relative(got, expected):
    return ((got - expected).norm() / expected.norm()).item()


def f32c32_layout():
    with torch.device("meta"):
        return f32c32(1)


def decode_in_strips(model, latents, strip, columns=None, attention_rows=None):
    """Decode in strips of `strip` rows of the boundary map, and panels and attention as said."""
    from sana_core.decode.oom import OomRetry
    from sana_core.decode.plan import Planner
    from sana_core.decode.stages import decoder_stages
    from sana_core.decode.strips import StripSize
    from sana_core.runtime.cancellation import no_poll

    stages, accelerator = decoder_stages(model), latents.device.type != "cpu"
    planner = Planner(stages, *latents.shape[2:], latents.dtype, accelerator)
    plan = planner.of(StripSize(strip, columns), attention_rows)
    retry = OomRetry(planner, plan, {})
    boundary = retry.global_stage(model.decoder, stages, latents, no_poll)
    return torch.cat([rows for _, rows in retry.local_stage(model.decoder, stages, boundary, no_poll)], dim=2)
