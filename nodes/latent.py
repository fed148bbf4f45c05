"""Sizes to LATENT."""

from inspect import cleandoc

from comfy_api.latest import io

from ..sana_core.latents import DOWNSCALE, LARGEST, LARGEST_BATCH
from ..sana_core.resolutions import SHAPES, SIZES, picture_size
from .host.latents import empty_latent


class SanaNodesEmptyLatent(io.ComfyNode):
    """
    The empty latent that SANA draws into: 32 channels, one cell for 32 x 32 pixels.

    Use the size that the model was trained at: 512, 1024, 2048 or 4096, and 128 for the bundled model.
    """

    @classmethod
    def define_schema(cls):
        side = {"default": 1024, "min": DOWNSCALE, "max": LARGEST, "step": DOWNSCALE}
        return io.Schema(
            node_id="SanaNodesEmptyLatent",
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


class SanaNodesResolution(io.ComfyNode):
    """
    Width and height of a shape that SANA was trained at, for SANA Empty Latent.
    """

    @classmethod
    def define_schema(cls):
        return io.Schema(
            node_id="SanaNodesResolution",
            display_name="SANA Resolution",
            category="SANA",
            description=cleandoc(cls.__doc__),
            search_aliases=["aspect ratio", "sana size", "resolution select"],
            inputs=[
                io.Combo.Input(
                    "size",
                    options=list(SIZES),
                    default="1024",
                    tooltip="The size of the model: each has the area of a square with this side, in pixels.",
                ),
                io.Combo.Input(
                    "ratio",
                    options=list(SHAPES),
                    default="1.0",
                    tooltip="Height / width: below 1 is wide, 1.0 is square, above 1 is tall.",
                ),
            ],
            outputs=[io.Int.Output("width", tooltip="Pixels."), io.Int.Output("height", tooltip="Pixels.")],
        )

    @classmethod
    def execute(cls, size: str, ratio: str) -> io.NodeOutput:
        return io.NodeOutput(*picture_size(size, ratio))


NODES = [SanaNodesEmptyLatent, SanaNodesResolution]
