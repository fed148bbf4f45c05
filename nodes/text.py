"""Text to CONDITIONING."""

from inspect import cleandoc

from comfy_api.latest import io

from ..sana_core.errors import InputError


class SanaTextEncode(io.ComfyNode):
    """
    Encodes a prompt as SANA was trained to read it: with an instruction before it that asks for a rich description.

    Turn the instruction off for the negative prompt, which may be empty.
    """

    @classmethod
    def define_schema(cls):
        return io.Schema(
            node_id="SanaTextEncode",
            display_name="SANA Text Encode",
            category="SANA",
            description=cleandoc(cls.__doc__),
            search_aliases=["sana prompt", "gemma", "complex human instruction", "chi"],
            inputs=[
                io.Clip.Input("clip", tooltip="The CLIP of a SANA loader, or of CLIPLoader with type pixeldit."),
                io.String.Input(
                    "text",
                    multiline=True,
                    dynamic_prompts=True,
                    tooltip="Up to 300 tokens, about 200 words. Brackets have no meaning to SANA.",
                ),
                io.Boolean.Input(
                    "instruction",
                    default=True,
                    label_on="on (positive)",
                    label_off="off (negative)",
                    tooltip="On for the positive prompt, off for the negative one.",
                ),
            ],
            outputs=[io.Conditioning.Output()],
        )

    @classmethod
    def execute(cls, clip, text: str, instruction: bool) -> io.NodeOutput:
        from .host.clip import encode

        if instruction and not text.strip():
            raise InputError("text: got an empty prompt; write one, or turn the instruction off for a negative prompt")
        return io.NodeOutput(encode(clip, text, instruction))


NODES = [SanaTextEncode]
