"""Several texts to one CONDITIONING."""

from inspect import cleandoc

from comfy_api.latest import io

from ..sana_core.batch.prompts import split_prompts
from ..sana_core.errors import InputError
from ..sana_core.model.latents import LARGEST_BATCH
from ..sana_core.runtime.checks import check_text


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


NODES = [SanaNodesPromptList]
