"""Texts to CONDITIONING: a prompt, a list of prompts, and the edit of an image."""

from inspect import cleandoc

from comfy_api.latest import io

from ..sana_core.batch.prompts import split_prompts
from ..sana_core.errors import InputError
from ..sana_core.model.known_models import MAX_TOKENS, VIBE
from ..sana_core.model.latents import LARGEST_BATCH
from ..sana_core.model.text import MOST_MOTION, with_motion
from ..sana_core.runtime.checks import check_number, check_text
from ..sana_core.sampling.guidance import LARGEST_GUIDANCE


class SanaNodesTextEncode(io.ComfyNode):
    """
    Encodes a prompt as SANA was trained to read it, with a fixed instruction before it.

    Turn the instruction off for the negative prompt.
    """

    @classmethod
    def define_schema(cls):
        return io.Schema(
            node_id="SanaNodesTextEncode",
            display_name="SANA Text Encode",
            category="SANA",
            has_intermediate_output=True,
            description=cleandoc(cls.__doc__),
            search_aliases=["sana prompt", "gemma", "complex human instruction", "chi"],
            inputs=[
                io.Clip.Input(
                    "clip", tooltip="From a SANA loader. CLIPLoader with type pixeldit gives slightly different images."
                ),
                io.String.Input(
                    "text",
                    multiline=True,
                    dynamic_prompts=True,
                    tooltip="Up to 300 tokens, about 200 words; the rest is cut. Weights like (word:1.2) have no "
                    "effect.",
                ),
                io.Boolean.Input(
                    "instruction",
                    default=True,
                    tooltip="On for the positive prompt, off for the negative one.",
                ),
                io.Int.Input(
                    "motion_score",
                    default=0,
                    min=0,
                    max=MOST_MOTION,
                    optional=True,
                    advanced=True,
                    tooltip="Videos only: ends the prompt with this score, unless it has one. NVIDIA uses 10, and "
                    "20 for 2.0; 30 is much motion. 0: none.",
                ),
            ],
            outputs=[io.Conditioning.Output()],
        )

    @classmethod
    def execute(cls, clip, text: str, instruction: bool, motion_score: int = 0) -> io.NodeOutput:
        from .host.links import check_links
        from .host.loading.clip import encode
        from .host.report import shown

        check_links(clip=clip)
        conditioning, reading = encode(clip, with_motion(text, motion_score), instruction)
        text = "" if reading.note else f"{reading.tokens} of {MAX_TOKENS} tokens"
        return io.NodeOutput(conditioning, ui=shown(text, reading.note))


class SanaNodesPromptList(io.ComfyNode):
    """
    Encodes one prompt per line, for a batch with one image of each.

    Image k of the batch shows prompt k; connect count to the batch size of SANA Empty Latent.
    """

    @classmethod
    def define_schema(cls):
        return io.Schema(
            node_id="SanaNodesPromptList",
            display_name="SANA Prompt List",
            category="SANA",
            has_intermediate_output=True,
            description=cleandoc(cls.__doc__),
            search_aliases=["batch prompts", "prompts to batch", "multi prompt"],
            is_input_list=True,
            inputs=[
                io.Clip.Input("clip", tooltip="The CLIP of SANA Loader."),
                io.String.Input(
                    "prompts",
                    default="a red lighthouse on the sea\na blue house in the snow",
                    multiline=True,
                    dynamic_prompts=True,
                    tooltip="One prompt per line, or a list of texts from another node. Empty lines don't count.",
                ),
                io.Boolean.Input(
                    "instruction",
                    default=True,
                    tooltip="On for positive prompts, off for negative ones.",
                ),
            ],
            outputs=[
                io.Conditioning.Output(),
                io.Int.Output("count", tooltip="The number of prompts, for the batch size."),
            ],
        )

    @classmethod
    def execute(cls, clip: list, prompts: list[str], instruction: list[bool]) -> io.NodeOutput:
        from .host.links import check_links
        from .host.loading.clip import encode_list
        from .host.report import shown

        check_links(clip=clip[0])
        lines = [line for text in prompts for line in split_prompts(text)]
        if not 1 <= len(lines) <= LARGEST_BATCH:
            raise InputError(f"prompts: got {len(lines)} prompts, expected 1 to {LARGEST_BATCH}; write one a line")
        for line in lines:
            check_text("prompts", line)
        conditioning, notes = encode_list(clip[0], lines, instruction[0])
        more = [f"{len(notes) - 1} more were cut"] if len(notes) > 1 else []
        return io.NodeOutput(
            conditioning, len(lines), ui=shown(f"{len(lines)} prompts", "; ".join([*notes[:1], *more]))
        )


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
        from .host.loading.clip import encode_edit
        from .host.report import shown
        from .host.sampling.model import image_pixels

        check_links(clip=clip, vae=vae, image=image)
        check_number("image_guidance", image_guidance, 0, LARGEST_GUIDANCE)
        positive, negative, latent = encode_edit(clip, vae, image, text, image_guidance)
        width, height = image_pixels(latent["samples"])
        return io.NodeOutput(positive, negative, latent, ui=shown(f"{width} x {height}"))


NODES = [SanaNodesTextEncode, SanaNodesPromptList, SanaNodesEdit]
