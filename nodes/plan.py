"""Sizes to a chart of the memory they take."""

from inspect import cleandoc

from comfy_api.latest import io, ui

from ..sana_core.model.known_models import DECODERS, DEFAULT_RESOLUTION, VARIANTS
from ..sana_core.model.latents import DOWNSCALE, LARGEST, LARGEST_BATCH


class SanaNodesPlan(io.ComfyNode):
    """
    Predicts how much memory an image needs, before any model is loaded: a bar for each stage and each way to decode,
    beside the memory of this computer's GPU.
    """

    @classmethod
    def define_schema(cls):
        side = {"default": DEFAULT_RESOLUTION, "min": DOWNSCALE, "max": LARGEST, "step": DOWNSCALE}
        return io.Schema(
            node_id="SanaNodesPlan",
            display_name="SANA Plan",
            category="SANA",
            description=cleandoc(cls.__doc__),
            search_aliases=["sana memory", "vram", "does it fit"],
            inputs=[
                io.Combo.Input(
                    "variant", options=list(VARIANTS), default="1.6B", tooltip="The model; 2K and 4K are 1.6B."
                ),
                io.Int.Input("width", **side, tooltip="Pixels, a multiple of 32."),
                io.Int.Input("height", **side, tooltip="Pixels, a multiple of 32."),
                io.Int.Input("batch_size", default=1, min=1, max=LARGEST_BATCH, tooltip="Images generated together."),
                io.Combo.Input(
                    "vae", options=list(DECODERS), optional=True, advanced=True, tooltip="The VAE that decodes."
                ),
            ],
            outputs=[io.Image.Output(display_name="chart"), io.String.Output(display_name="figures")],
            is_output_node=True,
        )

    @classmethod
    def execute(
        cls, variant: str, width: int, height: int, batch_size: int, vae: str = "dc-ae-f32c32"
    ) -> io.NodeOutput:
        from .host.plan import draw_plan

        chart, figures = draw_plan(variant, width, height, batch_size, vae)
        return io.NodeOutput(chart, figures, ui=ui.PreviewImage(chart))


NODES = [SanaNodesPlan]
