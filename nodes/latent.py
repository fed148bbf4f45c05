"""Sizes to LATENT."""

from inspect import cleandoc

from comfy_api.latest import io

from ..sana_core.latents import DOWNSCALE, LARGEST, LARGEST_BATCH
from .host.latents import empty_latent


class SanaEmptyLatent(io.ComfyNode):
    """
    The empty latent that SANA draws into: 32 channels, one cell for 32 x 32 pixels.

    Use the size that the model was trained at: 512, 1024, 2048 or 4096, and 128 for the bundled model.
    """

    @classmethod
    def define_schema(cls):
        side = {"default": 1024, "min": DOWNSCALE, "max": LARGEST, "step": DOWNSCALE}
        return io.Schema(
            node_id="SanaEmptyLatent",
            display_name="SANA Empty Latent",
            category="SANA",
            description=cleandoc(cls.__doc__),
            search_aliases=["sana size", "empty dc-ae latent", "resolution"],
            inputs=[
                io.Int.Input("width", **side, tooltip="Pixels, a multiple of 32."),
                io.Int.Input("height", **side, tooltip="Pixels, a multiple of 32."),
                io.Int.Input(
                    "batch_size",
                    default=1,
                    min=1,
                    max=LARGEST_BATCH,
                    tooltip="Pictures drawn together; picture k of SANA Sampler uses seed + k.",
                ),
            ],
            outputs=[io.Latent.Output()],
        )

    @classmethod
    def execute(cls, width: int, height: int, batch_size: int) -> io.NodeOutput:
        return io.NodeOutput(empty_latent(width, height, batch_size))


NODES = [SanaEmptyLatent]
