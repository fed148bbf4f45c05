"""A file to CONTROL_NET."""

from inspect import cleandoc

from comfy_api.latest import io

from .host.folders import find_file, list_files
from .loader import AUTO, reference_input


class SanaNodesControlNetLoader(io.ComfyNode):
    """
    Loads a SANA ControlNet, in diffusers' or NVIDIA's layout, for ComfyUI's Apply ControlNet.

    Connect SANA's VAE to Apply ControlNet too. The released ControlNet reads HED edges, which packs of ControlNet
    preprocessors make.
    """

    @classmethod
    def define_schema(cls):
        return io.Schema(
            node_id="SanaNodesControlNetLoader",
            display_name="SANA Load ControlNet",
            category="SANA/loaders",
            description=cleandoc(cls.__doc__),
            search_aliases=["sana control net", "sana hed"],
            inputs=[
                io.Combo.Input(
                    "control_net_name", options=list_files("controlnet"), tooltip="A file in models/controlnet."
                ),
                reference_input(),
            ],
            outputs=[io.ControlNet.Output(tooltip="For Apply ControlNet, with SANA's VAE.")],
            hidden=[io.Hidden.unique_id],
        )

    @classmethod
    def validate_inputs(cls, control_net_name: str | None = None):
        # a missing file is answered when it is loaded, with its size and link, and not where nothing wants it
        return True

    @classmethod
    def fingerprint_inputs(cls, control_net_name: str | None = None, **others) -> str:
        from .host.file_stats import file_stat

        return file_stat(lambda: find_file("controlnet", control_net_name))

    @classmethod
    def execute(cls, control_net_name: str, reference: str = AUTO) -> io.NodeOutput:
        from .host.controlnet import load_controlnet
        from .host.report import show_under_node

        control, text = load_controlnet(find_file("controlnet", control_net_name), reference)
        show_under_node(text, cls.hidden.unique_id)
        return io.NodeOutput(control)


NODES = [SanaNodesControlNetLoader]
