"""The node that encodes a prompt."""

from inspect import cleandoc

from comfy_api.latest import io

from ..sana_core.model.known_models import MAX_TOKENS
from ..sana_core.model.text import MOST_MOTION, with_motion


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


NODES = [SanaNodesTextEncode]
