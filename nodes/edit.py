"""The node that prepares the edit of an image."""

from inspect import cleandoc

from comfy_api.latest import io

from ..sana_core.model.known_models import VIBE
from ..sana_core.runtime.checks import check_number
from ..sana_core.sampling.guidance import LARGEST_GUIDANCE


class SanaNodesEdit(io.ComfyNode):
    """
    Prepares an image to be changed by a sentence, such as "make it winter", with VIBE.

    Connect all three outputs to SANA Sampler or KSampler. The image is edited in the nearest size that VIBE was trained
    for. To generate an image without one, use CLIP Text Encode and SANA Empty Latent.
    """

    @classmethod
    def define_schema(cls):
        return io.Schema(
            node_id="SanaNodesEdit",
            display_name="SANA Edit",
            category="SANA",
            has_intermediate_output=True,
            description=cleandoc(cls.__doc__),
            search_aliases=["vibe", "image edit", "instruct", "pix2pix", "qwen"],
            inputs=[
                io.Clip.Input("clip", tooltip="The CLIP of SANA Loader with VIBE-Image-Edit."),
                io.Vae.Input("vae", tooltip="The VAE of SANA Loader with VIBE-Image-Edit."),
                io.Image.Input("image", tooltip="The image to change."),
                io.String.Input(
                    "text", multiline=True, dynamic_prompts=True, tooltip="What to change, in one sentence."
                ),
                io.Float.Input(
                    "image_guidance",
                    default=VIBE.image_guidance,
                    min=0.0,
                    max=LARGEST_GUIDANCE,
                    step=0.1,
                    round=0.01,
                    tooltip="How closely to keep the image. At 1 and below, a step takes two thirds of the time.",
                ),
            ],
            outputs=[
                io.Conditioning.Output("positive", display_name="positive"),
                io.Conditioning.Output("negative", display_name="negative"),
                io.Latent.Output("latent", display_name="latent", tooltip="Empty, in the size of the edit."),
            ],
        )

    @classmethod
    def execute(cls, clip, vae, image, text: str, image_guidance: float) -> io.NodeOutput:
        from .host.links import check_links
        from .host.loading.edit_clip import encode_edit
        from .host.report import shown
        from .host.sampling.model import image_pixels

        check_links(clip=clip, vae=vae, image=image)
        check_number("image_guidance", image_guidance, 0, LARGEST_GUIDANCE)
        positive, negative, latent = encode_edit(clip, vae, image, text, image_guidance)
        width, height = image_pixels(latent["samples"])
        return io.NodeOutput(positive, negative, latent, ui=shown(f"{width} x {height}"))


NODES = [SanaNodesEdit]
