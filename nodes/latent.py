"""Sizes to LATENT."""

from inspect import cleandoc

from comfy_api.latest import io

from ..sana_core.model.known_models import DEFAULT_RESOLUTION, SHAPES, SIZES, image_size, own_size
from ..sana_core.model.latents import DOWNSCALE, LARGEST, LARGEST_BATCH, check_side
from .host.latents import empty_latent


class SanaNodesEmptyLatent(io.ComfyNode):
    """
    Sets the size of the image, as an empty latent.

    Connect the MODEL to get its training size; width and height then set only the aspect ratio. Without it stay near
    the training size: 512 (the demo model too), 1024, 2048 or 4096.
    """

    @classmethod
    def define_schema(cls):
        side = {"default": DEFAULT_RESOLUTION, "min": DOWNSCALE, "max": LARGEST, "step": DOWNSCALE}
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
                    tooltip="Images generated together; image k uses seed + k.",
                ),
                io.Model.Input(
                    "model",
                    optional=True,
                    tooltip="Optional. When connected, the model's own size is used; width and height set only the "
                    "aspect ratio.",
                ),
            ],
            outputs=[io.Latent.Output()],
        )

    @classmethod
    def execute(cls, width: int, height: int, batch_size: int, model=None) -> io.NodeOutput:
        check_side("width", width)
        check_side("height", height)
        if model is not None:
            from .host.links import check_links
            from .host.report import show_under_running_node
            from .host.sampling import resolution_of

            check_links(model=model)
            width, height = own_size(width, height, resolution_of(model))
            show_under_running_node(f"{width} x {height}")
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
                    default=str(DEFAULT_RESOLUTION),
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
    def validate_inputs(cls, size: str | None = None, ratio: str | None = None):
        # workflows of ComfyUI_ExtraModels write 1024px and 1.00; what is neither is refused when it runs
        return True

    @classmethod
    def execute(cls, size: str, ratio: str) -> io.NodeOutput:
        return io.NodeOutput(*image_size(size, ratio))


NODES = [SanaNodesEmptyLatent, SanaNodesResolution]
