"""MODEL to MODEL: one picture over several devices."""

from inspect import cleandoc

from comfy_api.latest import io

from .host.folders import list_splits


class SanaNodesSplitPicture(io.ComfyNode):
    """
    Lets several GPUs draw one picture together: each computes some rows of it in every step, and the picture is the
    same as on one.

    Pays from about 2048 x 2048 pixels. Works with SANA Sampler, KSampler and the custom samplers, with LoRAs and SANA
    PAG. Each GPU holds the whole model.
    """

    @classmethod
    def define_schema(cls):
        return io.Schema(
            node_id="SanaNodesSplitPicture",
            display_name="SANA Split Picture",
            category="SANA",
            description=cleandoc(cls.__doc__),
            search_aliases=["multi gpu", "two gpus one image", "parallel", "all gpus", "sequence parallel"],
            inputs=[
                io.Model.Input("model", tooltip="The MODEL of SANA Loader; LoRAs may come before or after."),
                io.Combo.Input(
                    "devices",
                    options=list_splits(),
                    tooltip="all: every accelerator of this machine. gpu x 2: the model's own and one more. "
                    "cpu x 2: the cores in two halves, to try it out. "
                    "cluster: every GPU of the cluster that this server's operator has configured.",
                ),
            ],
            outputs=[io.Model.Output()],
            hidden=[io.Hidden.unique_id],
        )

    @classmethod
    def validate_inputs(cls, devices: str = "all"):
        # a workflow from a machine with more devices runs here too
        return True

    @classmethod
    def execute(cls, model, devices: str) -> io.NodeOutput:
        from .host.links import check_links
        from .host.report import show_under_node
        from .host.split import split_model

        check_links(model=model)
        patched, text = split_model(model, devices)
        show_under_node(text, cls.hidden.unique_id)
        return io.NodeOutput(patched)


NODES = [SanaNodesSplitPicture]
