"""Choose the best of many images with a scorer."""

from inspect import cleandoc

from comfy_api.latest import io

from ..sana_core.model.latents import LARGEST_BATCH
from ..sana_core.runtime.checks import check_whole
from .host.folders import list_scorers, scorer_path, scorer_paths
from .loader import FileNode

SCORER = io.Custom("SANA_SCORER")


class SanaNodesScorerLoader(FileNode, io.ComfyNode):
    """
    Loads a CLIP that says how well an image fits a prompt, such as PickScore_v1.

    Put its whole folder into models/clip_vision.
    """

    field = "scorer_name"

    @classmethod
    def find(cls, name: str):
        return scorer_path(name)

    @classmethod
    def paths(cls):
        return scorer_paths()

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
                    options=list_scorers(),
                    tooltip="A folder in models/clip_vision; the bundled one only knows the demo model's subjects.",
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
    Keeps the images that fit the prompt best, of a batch of one prompt.

    The sheet shows every image with its score and seed. SANA Sampler generates one of them again from its seed alone.
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
                io.Latent.Input("samples", tooltip="The images to choose from, by SANA Batch Sampler or SANA Sampler."),
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
                io.Int.Output("seeds", display_name="seeds", is_output_list=True, tooltip="Of the images kept."),
            ],
        )

    @classmethod
    def execute(cls, samples: dict, vae, scorer, prompt: str, best: int) -> io.NodeOutput:
        from .host.links import check_links
        from .host.loading.scorer import pick

        check_links(samples=samples, vae=vae, scorer=scorer)
        check_whole("best", best, 1, LARGEST_BATCH)
        return io.NodeOutput(*pick(samples, vae, scorer, prompt, best))


NODES = [SanaNodesScorerLoader, SanaNodesPickBest]
