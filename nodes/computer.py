"""What fits a GPU, and the check of this computer and its model files."""

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
        from .host.computer import draw_plan

        check_name("gpu", gpu, (THIS_COMPUTER, *GPUS))
        gigabytes = None if gpu == THIS_COMPUTER else int(gpu.split()[0])
        model = None if variant == RECOMMENDED else variant
        chart, figures = draw_plan(model, width, height, batch_size, vae, gigabytes)
        return io.NodeOutput(chart, figures, ui=ui.PreviewImage(chart))


class SanaNodesDoctor(io.ComfyNode):
    """
    Checks this machine and its SANA files, and writes one block to paste into a bug report: versions, the GPU, its
    kernels, and the kind of each file. It takes up to two minutes.
    """

    @classmethod
    def define_schema(cls):
        return io.Schema(
            node_id="SanaNodesDoctor",
            display_name="SANA Doctor",
            category="SANA",
            description=cleandoc(cls.__doc__),
            search_aliases=["sana check", "bug report", "diagnose"],
            inputs=[
                io.Boolean.Input(
                    "files",
                    default=True,
                    tooltip="Also check the SANA files in ComfyUI's models folders.",
                ),
                io.Boolean.Input(
                    "always",
                    default=False,
                    optional=True,
                    tooltip="Check again at each run. Off: only if a model file has changed or ComfyUI was restarted.",
                ),
            ],
            outputs=[io.String.Output(display_name="report"), io.String.Output(display_name="json")],
            is_output_node=True,
        )

    @classmethod
    def fingerprint_inputs(cls, files: bool | None = True, always: bool | None = False) -> float | str:
        from .host.computer import model_files
        from .host.file_stats import linked_file_stat

        # ComfyUI passes None for a link. NaN differs from itself, so the node runs.
        if always is not False:
            return float("nan")
        return "" if files is False else linked_file_stat(model_files)

    @classmethod
    def execute(cls, files: bool, always: bool = False) -> io.NodeOutput:
        from .host.computer import examine_host
        from .host.report import shown

        markdown, json, summary = examine_host(files)
        return io.NodeOutput(markdown, json, ui={**ui.PreviewText(markdown).as_dict(), **shown(summary)})


NODES = [SanaNodesPlan, SanaNodesDoctor]
