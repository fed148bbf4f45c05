"""MODEL to MODEL: one image over several devices."""

from inspect import cleandoc

from comfy_api.latest import io

from .host.folders import list_splits


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


NODES = [SanaNodesSplitPicture]
