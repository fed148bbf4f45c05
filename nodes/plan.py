"""An answer to "what fits my GPU?", with a chart of the memory of each stage."""

from inspect import cleandoc

from comfy_api.latest import io, ui

from ..sana_core.model.known_models import DECODERS, DEFAULT_RESOLUTION, GPU_SIZES, VARIANTS
from ..sana_core.model.latents import DOWNSCALE, LARGEST, LARGEST_BATCH
from ..sana_core.runtime.checks import check_name

RECOMMENDED, THIS_COMPUTER = "recommended", "this computer"
GPUS = tuple(f"{gigabytes} GB" for gigabytes in GPU_SIZES)


class SanaNodesPlan(io.ComfyNode):
    """
    Says which model and which settings fit your GPU, or another one that you choose, before anything is loaded. The
    chart shows the predicted memory of each stage beside the memory of the GPU.
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
                    "variant",
                    options=[RECOMMENDED, *VARIANTS],
                    default=RECOMMENDED,
                    tooltip="The model. recommended chooses it. The 2K and 4K models are 1.6B.",
                ),
                io.Int.Input("width", **side, tooltip="Pixels, a multiple of 32."),
                io.Int.Input("height", **side, tooltip="Pixels, a multiple of 32."),
                io.Int.Input("batch_size", default=1, min=1, max=LARGEST_BATCH, tooltip="Images generated together."),
                io.Combo.Input(
                    "vae", options=list(DECODERS), optional=True, advanced=True, tooltip="The VAE that decodes."
                ),
                io.Combo.Input(
                    "gpu",
                    options=[THIS_COMPUTER, *GPUS],
                    default=THIS_COMPUTER,
                    optional=True,
                    tooltip="The GPU to plan for. Without a GPU, this computer is planned as one of 8 GB.",
                ),
            ],
            outputs=[io.Image.Output(display_name="chart"), io.String.Output(display_name="figures")],
            is_output_node=True,
        )

    @classmethod
    def execute(
        cls,
        variant: str,
        width: int,
        height: int,
        batch_size: int,
        vae: str = "dc-ae-f32c32",
        gpu: str = THIS_COMPUTER,
    ) -> io.NodeOutput:
        from .host.plan import draw_plan

        check_name("gpu", gpu, (THIS_COMPUTER, *GPUS))
        gigabytes = None if gpu == THIS_COMPUTER else int(gpu.split()[0])
        model = None if variant == RECOMMENDED else variant
        chart, figures = draw_plan(model, width, height, batch_size, vae, gigabytes)
        return io.NodeOutput(chart, figures, ui=ui.PreviewImage(chart))


NODES = [SanaNodesPlan]
