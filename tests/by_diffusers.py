"""What a pipeline of diffusers draws with the settings of the tests."""

import torch


def drawn_by(pipeline, prompt, scheduler=None, seed=3, **options):
    """Latents as nodes have them, or images in [0, 1] where `output_type` is "pt"."""
    pipeline.scheduler = scheduler or pipeline.scheduler
    pipeline.set_progress_bar_config(disable=True)
    settings = {"guidance_scale": 4.5, "width": 128, "height": 128, "output_type": "latent", **options}
    generator = torch.Generator().manual_seed(seed)
    created = pipeline(prompt, generator=generator, use_resolution_binning=False, **settings).images
    return created / pipeline.vae.config.scaling_factor if settings["output_type"] == "latent" else created
