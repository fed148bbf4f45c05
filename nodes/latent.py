"""The size of an image or a video, and the image that a video begins with, to LATENT."""

from inspect import cleandoc

from comfy_api.latest import io

from ..sana_core.model.known_models import (
    AUTO_SIZE,
    DEFAULT_RESOLUTION,
    LARGEST_FRAMES,
    RATIOS,
    SIZES,
    image_size,
    read_size,
)
from ..sana_core.model.latents import DOWNSCALE, LARGEST, LARGEST_BATCH
from .host.sampling.latents import empty_latent, image_or_model_size, size_text


def image_model(patcher):
    """Return the SanaModel of a MODEL, or None if no MODEL is connected."""
    from .host.links import check_links
    from .host.sampling.guidance import require_images

    if patcher is None:
        return None
    check_links(model=patcher)
    return require_images(patcher.model)


class SanaNodesEmptyLatent(io.ComfyNode):
    """
    Sets the size of the image, as an empty latent.

    At width and height 0 the image gets the size that the connected MODEL was trained for, or 1024 x 1024 without a
    MODEL. Other numbers are used as they are. A line under the node warns if the MODEL was not trained for them.
    """

    @classmethod
    def define_schema(cls):
        side = {"default": 0, "min": 0, "max": LARGEST, "step": DOWNSCALE}
        tooltip = "Pixels, a multiple of 32. 0: the size that the connected model was trained for, or 1024."
        return io.Schema(
            node_id="SanaNodesEmptyLatent",
            display_name="SANA Empty Latent",
            category="SANA",
            has_intermediate_output=True,
            description=cleandoc(cls.__doc__),
            search_aliases=["sana size", "empty dc-ae latent", "resolution"],
            inputs=[
                io.Int.Input("width", **side, tooltip=tooltip),
                io.Int.Input("height", **side, tooltip=tooltip),
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
                    tooltip="Its size is used if width and height are 0. Otherwise the node warns if the model was not "
                    "trained for your size.",
                ),
            ],
            outputs=[io.Latent.Output()],
        )

    @classmethod
    def execute(cls, width: int, height: int, batch_size: int, model=None) -> io.NodeOutput:
        from .host.report import shown

        base = image_model(model)
        size = image_or_model_size(width, height, base)
        latent = empty_latent(*size, batch_size)
        return io.NodeOutput(latent, ui=shown(size_text(*size, base)))


class SanaNodesResolution(io.ComfyNode):
    """
    Gives width and height of an aspect ratio, such as 16:9, as SANA was trained for it. Connect them to SANA Empty
    Latent.
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
                    options=[AUTO_SIZE, *SIZES],
                    default=AUTO_SIZE,
                    tooltip="auto: the size of the connected model, or 1024. Others: the side in pixels of a square "
                    "with the image's area.",
                ),
                io.Combo.Input(
                    "ratio",
                    options=list(RATIOS),
                    default="1:1",
                    tooltip="Width : height. The result is the nearest of the 40 shapes that SANA was trained for.",
                ),
                io.Model.Input("model", optional=True, tooltip="Its size is used if size is auto."),
            ],
            outputs=[io.Int.Output("width", tooltip="Pixels."), io.Int.Output("height", tooltip="Pixels.")],
        )

    @classmethod
    def validate_inputs(cls, size: str | None = None, ratio: str | None = None):
        # Workflows of ComfyUI_ExtraModels contain 1024px and 1.00. Wrong values are refused when the node runs.
        return True

    @classmethod
    def execute(cls, size: str, ratio: str, model=None) -> io.NodeOutput:
        base = image_model(model)
        if size != AUTO_SIZE:
            return io.NodeOutput(*image_size(read_size(size), ratio))
        return io.NodeOutput(*image_size(DEFAULT_RESOLUTION if base is None else base.resolution, ratio))


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
        from .host.sampling.video_model import require_video, video_latent

        optional = {"vae": vae, "first_image": first_image}
        check_links(model=model, **{name: value for name, value in optional.items() if value is not None})
        base = require_video(model.model)
        size = image_or_model_size(width, height, base)
        length = base.facts.frames if frames == 0 else frames
        latent = video_latent(base, size, length, batch_size, vae, first_image)
        return io.NodeOutput(latent, float(base.facts.rate), ui=shown(size_text(*size, base)))


NODES = [SanaNodesEmptyLatent, SanaNodesResolution, SanaNodesVideoLatent]
