"""The node that decodes latents."""

from inspect import cleandoc

from comfy_api.latest import io

from ..sana_core.decode.plan import LARGEST_BUDGET, METHODS
from ..sana_core.runtime.checks import check_name, check_number

DEVICES = ["one", "all"]


class SanaNodesDecode(io.ComfyNode):
    """
    Decodes latents to images, in horizontal strips that fit into the free memory, without seams.

    For SANA's VAE, VAE Decode does the same without the settings. The VAEs of SD, SDXL, SD3, FLUX and PixArt work too,
    where VAE Decode would need much memory or tiles. The report shows the method, the time and the memory.
    """

    @classmethod
    def define_schema(cls):
        return io.Schema(
            node_id="SanaNodesDecode",
            display_name="SANA Decode",
            category="SANA",
            has_intermediate_output=True,
            description=cleandoc(cls.__doc__),
            search_aliases=["dc-ae decode", "sana vae decode", "tiled decode", "4k decode"],
            inputs=[
                io.Latent.Input("samples", tooltip="From SANA Sampler, KSampler or any other sampler."),
                io.Vae.Input("vae", tooltip="The VAE of SANA Loader, or the VAE of the model that sampled."),
                io.Combo.Input(
                    "method",
                    options=list(METHODS),
                    default="auto",
                    optional=True,
                    tooltip="Leave at auto, the fastest without seams. whole decodes the image at once. tiles shows "
                    "tone shifts.",
                ),
                io.Float.Input(
                    "budget_gb",
                    default=0.0,
                    min=0.0,
                    max=LARGEST_BUDGET,
                    step=0.1,
                    round=0.001,
                    optional=True,
                    tooltip="Memory that decoding may use beyond the weights, in GB. 0: the free memory. The image "
                    "stays the same.",
                ),
                io.Combo.Input(
                    "devices",
                    options=DEVICES,
                    default="one",
                    optional=True,
                    tooltip="all shares the rows of each image among all GPUs.",
                ),
            ],
            outputs=[io.Image.Output(), io.String.Output("report", display_name="report")],
        )

    @classmethod
    def execute(
        cls, samples: dict, vae, method: str = "auto", budget_gb: float = 0.0, devices: str = "one"
    ) -> io.NodeOutput:
        from .host.links import check_links
        from .host.loading.kl_vae import decode_exactly, has_group_norms
        from .host.loading.vae import check_decodable, decode
        from .host.report import shown

        check_links(samples=samples, vae=vae)
        # ComfyUI checks the values of widgets, but not of links.
        check_number("budget_gb", budget_gb, 0, LARGEST_BUDGET)
        check_name("devices", devices, DEVICES)
        latents = samples["samples"]
        if has_group_norms(vae):
            image, report = decode_exactly(vae, latents, method, budget_gb, devices)
        else:
            check_decodable(latents, vae)
            image, report = decode(vae, latents, method, budget_gb, devices)
        return io.NodeOutput(image, report, ui=shown(report))


NODES = [SanaNodesDecode]
