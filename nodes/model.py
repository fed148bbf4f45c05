"""MODEL to MODEL: guidance, and one image over several devices."""

from inspect import cleandoc

from comfy_api.latest import io

from ..sana_core.runtime.checks import check_number
from ..sana_core.sampling.guidance import LARGEST_GUIDANCE
from .host.folders import list_splits


class SanaNodesPAG(io.ComfyNode):
    """
    Makes shapes firmer and details cleaner with perturbed-attention guidance. Each step takes 50 % longer.

    It works with SANA Sampler, KSampler and the guiders of one or two prompts. A second SANA PAG replaces the first.
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
                io.Model.Input("model", tooltip="The MODEL of SANA Loader; not for SANA-Sprint."),
                io.Float.Input(
                    "scale",
                    default=2.0,
                    min=0.0,
                    max=LARGEST_GUIDANCE,
                    step=0.1,
                    round=0.01,
                    tooltip="1 to 3 is usual, 0 is off. With a high scale, lower the guidance a little.",
                ),
                io.String.Input(
                    "blocks",
                    optional=True,
                    default="",
                    tooltip="The blocks to perturb, such as 8 or 7, 8. Empty: NVIDIA's choice, which is block 8 in "
                    "SANA 1.6B.",
                ),
            ],
            outputs=[io.Model.Output()],
        )

    @classmethod
    def execute(cls, model, scale: float, blocks: str = "") -> io.NodeOutput:
        from .host.links import check_links
        from .host.sampling.guidance import add_perturbed_attention

        check_links(model=model)
        return io.NodeOutput(add_perturbed_attention(model, scale, blocks))


class SanaNodesGuidanceInterval(io.ComfyNode):
    """
    Applies guidance only during part of the sampling.

    The other steps take half the time, and colours stay calmer at high guidance.
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
                    "start", default=0.0, **share, tooltip="Guidance is on from here, as a fraction of the sampling."
                ),
                io.Float.Input("end", default=1.0, **share, tooltip="Guidance is on until here; 0.7 is a good start."),
            ],
            outputs=[io.Model.Output()],
        )

    @classmethod
    def execute(cls, model, start: float, end: float) -> io.NodeOutput:
        from .host.links import check_links
        from .host.sampling.guidance import limit_guidance

        check_links(model=model)
        check_number("start", start, 0, 1)
        check_number("end", end, start, 1)
        return io.NodeOutput(limit_guidance(model, start, end))


class SanaNodesSplitPicture(io.ComfyNode):
    """
    Lets several GPUs compute one image together; the image is the one of a single GPU.

    It is faster from about 2048 x 2048 on. It works with SANA Sampler, KSampler and the custom samplers, with LoRAs and
    SANA PAG. Each GPU holds the whole model.
    """

    @classmethod
    def define_schema(cls):
        return io.Schema(
            node_id="SanaNodesSplitPicture",
            display_name="SANA Split Image",
            category="SANA",
            has_intermediate_output=True,
            description=cleandoc(cls.__doc__),
            search_aliases=["split picture", "multi gpu", "two gpus one image", "all gpus", "sequence parallel"],
            inputs=[
                io.Model.Input("model", tooltip="The MODEL of SANA Loader; LoRAs may come before or after."),
                io.Combo.Input(
                    "devices",
                    options=list_splits(),
                    tooltip="all: every GPU of this computer. gpu x 2: the model's own and one more. cpu x 2: the CPU "
                    "in two halves, to try it out.",
                ),
            ],
            outputs=[io.Model.Output()],
        )

    @classmethod
    def validate_inputs(cls, devices: str = "all"):
        # a workflow from a machine with more devices runs here too
        return True

    @classmethod
    def execute(cls, model, devices: str) -> io.NodeOutput:
        from .host.links import check_links
        from .host.report import shown
        from .host.sampling.split import split_model

        check_links(model=model)
        patched, text = split_model(model, devices)
        return io.NodeOutput(patched, ui=shown(text))


NODES = [SanaNodesPAG, SanaNodesGuidanceInterval, SanaNodesSplitPicture]
