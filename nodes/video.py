"""Sizes and a first image to the LATENT of a video."""

from inspect import cleandoc

from comfy_api.latest import io

from ..sana_core.model.known_models import LARGEST_FRAMES
from ..sana_core.model.latents import LARGEST, LARGEST_BATCH


class SanaNodesVideoLatent(io.ComfyNode):
    """
    Sets the size and the length of a SANA-Video video, and the image it begins with, if any.

    At 0 the video gets the size and the length of the model: 832 x 480 for 480p, 1280 x 704 for 720p, 1280 x 736 for
    2.0; 81 frames, 193 for 2.0. A line under the node says if the model was not trained for other numbers. Connect fps
    to Create Video: 16 frames a second, 24 for 2.0.
    """

    @classmethod
    def define_schema(cls):
        side = {"default": 0, "min": 0, "max": LARGEST, "step": 16}
        tooltip = "Pixels, a multiple of 16; of 32 for 720p and 2.0. 0: the size that the model was trained for."
        return io.Schema(
            node_id="SanaNodesVideoLatent",
            display_name="SANA Video Latent",
            category="SANA",
            has_intermediate_output=True,
            description=cleandoc(cls.__doc__),
            search_aliases=["sana video size", "image to video", "empty latent video", "i2v", "t2v"],
            inputs=[
                io.Model.Input("model", tooltip="A SANA-Video model from SANA Loader."),
                io.Int.Input("width", **side, tooltip=tooltip),
                io.Int.Input("height", **side, tooltip=tooltip),
                io.Int.Input(
                    "frames",
                    default=0,
                    min=0,
                    max=LARGEST_FRAMES,
                    tooltip="A multiple of 4 and one more; of 8 and one more for 720p and 2.0. 0: the model's length.",
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
            outputs=[
                io.Latent.Output(tooltip="For SANA Sampler or KSampler."),
                io.Float.Output("fps", display_name="fps", tooltip="Frames a second of the model, for Create Video."),
            ],
        )

    @classmethod
    def execute(
        cls, model, width: int, height: int, frames: int, batch_size: int, vae=None, first_image=None
    ) -> io.NodeOutput:
        from .host.links import check_links
        from .host.report import shown
        from .host.sampling.latents import image_or_model_size, size_text
        from .host.sampling.video_model import require_video, video_latent

        optional = {"vae": vae, "first_image": first_image}
        check_links(model=model, **{name: value for name, value in optional.items() if value is not None})
        base = require_video(model.model)
        size = image_or_model_size(width, height, base)
        length = base.facts.frames if frames == 0 else frames
        latent = video_latent(base, size, length, batch_size, vae, first_image)
        return io.NodeOutput(latent, float(base.facts.rate), ui=shown(size_text(*size, base)))


NODES = [SanaNodesVideoLatent]
