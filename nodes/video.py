"""Sizes and a first image to the LATENT of a video."""

from inspect import cleandoc

from comfy_api.latest import io

from ..sana_core.model.known_models import LARGEST_FRAMES, VIDEO_FRAMES, VIDEOS
from ..sana_core.model.latents import LARGEST, LARGEST_BATCH


class SanaNodesVideoLatent(io.ComfyNode):
    """
    Sets the size and the length of a SANA-Video video, and the image it begins with, if any.

    The 480p model was trained at 832 x 480 and shapes of that area, the 720p model at 1280 x 704; both at 81 frames,
    which are 5 seconds at 16 frames a second.
    """

    @classmethod
    def define_schema(cls):
        width, height = VIDEOS[16].size
        side = {"min": 32, "max": LARGEST, "step": 16}
        return io.Schema(
            node_id="SanaNodesVideoLatent",
            display_name="SANA Video Latent",
            category="SANA",
            description=cleandoc(cls.__doc__),
            search_aliases=["sana video size", "image to video", "empty latent video", "i2v", "t2v"],
            inputs=[
                io.Model.Input("model", tooltip="A SANA-Video model from SANA Loader."),
                io.Int.Input("width", default=width, **side, tooltip="Pixels, a multiple of 16; of 32 for 720p."),
                io.Int.Input("height", default=height, **side, tooltip="Pixels, a multiple of 16; of 32 for 720p."),
                io.Int.Input(
                    "frames",
                    default=VIDEO_FRAMES,
                    min=1,
                    max=LARGEST_FRAMES,
                    step=4,
                    tooltip="A multiple of 4 and one more; of 8 and one more for 720p.",
                ),
                io.Int.Input(
                    "batch_size",
                    default=1,
                    min=1,
                    max=LARGEST_BATCH,
                    tooltip="Videos generated together; video k uses seed + k.",
                ),
                io.Vae.Input("vae", optional=True, tooltip="The VAE of the model; only the first image needs it."),
                io.Image.Input(
                    "first_image",
                    optional=True,
                    tooltip="The image that the video begins with, cut to its shape. Without it, the text decides.",
                ),
            ],
            outputs=[io.Latent.Output(tooltip="For SANA Sampler or KSampler.")],
        )

    @classmethod
    def execute(
        cls, model, width: int, height: int, frames: int, batch_size: int, vae=None, first_image=None
    ) -> io.NodeOutput:
        from .host.links import check_links
        from .host.video_model import video_latent

        optional = {"vae": vae, "first_image": first_image}
        check_links(model=model, **{name: value for name, value in optional.items() if value is not None})
        return io.NodeOutput(video_latent(model, (width, height), frames, batch_size, vae, first_image))


NODES = [SanaNodesVideoLatent]
