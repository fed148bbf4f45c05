"""LATENT to IMAGE, the choice of the best of many images, and the loader of its scorer."""

from inspect import cleandoc

from comfy_api.latest import io

from ..sana_core.decode.plan import LARGEST_BUDGET, METHODS
from ..sana_core.model.latents import LARGEST_BATCH
from ..sana_core.runtime.checks import check_name, check_number, check_whole
from .host.folders import scorer_folders, scorer_path
from .loader import FileNode

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
        from .host.loading.vae import check_decodable, decode, decode_other_vae, has_group_norms
        from .host.report import shown

        check_links(samples=samples, vae=vae)
        # ComfyUI checks the values of widgets, but not of links.
        check_number("budget_gb", budget_gb, 0, LARGEST_BUDGET)
        check_name("devices", devices, DEVICES)
        latents = samples["samples"]
        if has_group_norms(vae):
            image, report = decode_other_vae(vae, latents, method, budget_gb, devices)
        else:
            check_decodable(latents, vae)
            image, report = decode(vae, latents, method, budget_gb, devices)
        return io.NodeOutput(image, report, ui=shown(report))


SCORER = io.Custom("SANA_SCORER")


class SanaNodesScorerLoader(FileNode, io.ComfyNode):
    """
    Loads a CLIP that rates how well an image fits a prompt, such as PickScore_v1.

    Put its whole folder into models/clip_vision.
    """

    field = "scorer_name"

    @classmethod
    def find(cls, name: str):
        return scorer_path(name)

    @classmethod
    def paths(cls):
        return scorer_folders().values()

    @classmethod
    def define_schema(cls):
        return io.Schema(
            node_id="SanaNodesScorerLoader",
            display_name="SANA Load Scorer",
            category="SANA",
            description=cleandoc(cls.__doc__),
            search_aliases=["pickscore", "clip score", "reward model"],
            inputs=[
                io.Combo.Input(
                    "scorer_name",
                    options=list(scorer_folders()),
                    tooltip="A folder in models/clip_vision. The bundled one works only for the demo model's subjects.",
                ),
            ],
            outputs=[SCORER.Output("scorer", display_name="scorer")],
        )

    @classmethod
    def execute(cls, scorer_name: str) -> io.NodeOutput:
        from .host.loading.scorer import load

        return io.NodeOutput(load(cls.find(scorer_name)))


class SanaNodesPickBest(io.ComfyNode):
    """
    Keeps the images of a batch that fit the prompt best. All images of the batch must have the same prompt.

    The sheet shows every image with its score and seed. With this seed, SANA Sampler generates the image again.
    """

    @classmethod
    def define_schema(cls):
        return io.Schema(
            node_id="SanaNodesPickBest",
            display_name="SANA Pick Best",
            category="SANA",
            description=cleandoc(cls.__doc__),
            search_aliases=["best of n", "rerank", "pickscore", "choose image"],
            inputs=[
                io.Latent.Input(
                    "samples", tooltip="The images to choose from, generated by SANA Batch Sampler or SANA Sampler."
                ),
                io.Vae.Input("vae", tooltip="The VAE of SANA Loader."),
                SCORER.Input("scorer", tooltip="From SANA Load Scorer."),
                io.String.Input(
                    "prompt",
                    multiline=True,
                    tooltip="What the images should show: the prompt they were generated with.",
                ),
                io.Int.Input("best", default=1, min=1, max=LARGEST_BATCH, tooltip="Images to keep, the best first."),
            ],
            outputs=[
                io.Latent.Output(),
                io.Image.Output(),
                io.Image.Output("sheet", display_name="sheet", tooltip="All images, with scores and seeds."),
                io.Int.Output("seeds", display_name="seeds", is_output_list=True, tooltip="Seeds of the best images."),
            ],
        )

    @classmethod
    def execute(cls, samples: dict, vae, scorer, prompt: str, best: int) -> io.NodeOutput:
        from .host.links import check_links
        from .host.loading.scorer import pick

        check_links(samples=samples, vae=vae, scorer=scorer)
        check_whole("best", best, 1, LARGEST_BATCH)
        return io.NodeOutput(*pick(samples, vae, scorer, prompt, best))


NODES = [SanaNodesDecode, SanaNodesScorerLoader, SanaNodesPickBest]
