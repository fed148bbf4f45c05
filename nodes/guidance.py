"""MODEL to MODEL: what leads the sampling to the prompt."""

from inspect import cleandoc

from comfy_api.latest import io

from ..sana_core.checks import check_number
from ..sana_core.guidance import LARGEST_GUIDANCE


class SanaNodesPAG(io.ComfyNode):
    """
    Adds perturbed-attention guidance: each step also leads away from a picture drawn with one self-attention cut.

    Shapes become firmer and details cleaner. A step takes half as long again. It works with SANA Sampler, KSampler and
    the guiders of one or two prompts, and a second SANA PAG replaces the first.
    """

    @classmethod
    def define_schema(cls):
        return io.Schema(
            node_id="SanaNodesPAG",
            display_name="SANA PAG",
            category="SANA",
            description=cleandoc(cls.__doc__),
            search_aliases=["perturbed attention guidance", "pag"],
            inputs=[
                io.Model.Input("model", tooltip="The MODEL of SANA Loader; SANA-Sprint has no place for it."),
                io.Float.Input(
                    "scale",
                    default=2.0,
                    min=0.0,
                    max=LARGEST_GUIDANCE,
                    step=0.1,
                    round=0.01,
                    tooltip="How strongly; 1 to 3 is usual, 0 is off. Lower the guidance a little with it.",
                ),
                io.String.Input(
                    "blocks",
                    optional=True,
                    default="",
                    tooltip="Blocks of the model to perturb, like 8 or 7, 8. Empty: one at two fifths of the depth, "
                    "block 8 of the 20 of SANA 1.6B, as NVIDIA does.",
                ),
            ],
            outputs=[io.Model.Output()],
        )

    @classmethod
    def execute(cls, model, scale: float, blocks: str = "") -> io.NodeOutput:
        from .host.guidance import add_perturbed_attention
        from .host.links import check_links

        check_links(model=model)
        return io.NodeOutput(add_perturbed_attention(model, scale, blocks))


class SanaNodesGuidanceInterval(io.ComfyNode):
    """
    Switches classifier-free guidance off at the beginning and the end of sampling.

    Outside the interval the negative prompt is not computed, so a step takes half the time; colours stay calmer at high
    guidance.
    """

    @classmethod
    def define_schema(cls):
        share = {"min": 0.0, "max": 1.0, "step": 0.01, "round": 0.001}
        return io.Schema(
            node_id="SanaNodesGuidanceInterval",
            display_name="SANA Guidance Interval",
            category="SANA",
            description=cleandoc(cls.__doc__),
            search_aliases=["cfg interval", "limited interval guidance", "cfg schedule"],
            inputs=[
                io.Model.Input("model", tooltip="The MODEL of SANA Loader."),
                io.Float.Input(
                    "start", default=0.0, **share, tooltip="Share of the sampling after which guidance begins."
                ),
                io.Float.Input("end", default=1.0, **share, tooltip="Share of the sampling after which it ends."),
            ],
            outputs=[io.Model.Output()],
        )

    @classmethod
    def execute(cls, model, start: float, end: float) -> io.NodeOutput:
        from .host.guidance import limit_guidance
        from .host.links import check_links

        check_links(model=model)
        check_number("start", start, 0, 1)
        check_number("end", end, start, 1)
        return io.NodeOutput(limit_guidance(model, start, end))


NODES = [SanaNodesPAG, SanaNodesGuidanceInterval]
