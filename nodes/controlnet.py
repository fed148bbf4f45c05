"""A file to CONTROL_NET."""

from inspect import cleandoc

from comfy_api.latest import io

from .loader import AUTO, FileNode, reference_input


class SanaNodesControlNetLoader(FileNode, io.ComfyNode):
    """
    Loads a SANA ControlNet, in diffusers' or NVIDIA's layout, for ComfyUI's Apply ControlNet.

    Connect SANA's VAE to Apply ControlNet too. The released ControlNet reads HED edges, which packs of ControlNet
    preprocessors make.
    """

    field, kind = "control_net_name", "controlnet"

    @classmethod
    def define_schema(cls):
        return io.Schema(
            node_id="SanaNodesControlNetLoader",
            display_name="SANA Load ControlNet",
            category="SANA/loaders",
            has_intermediate_output=True,
            description=cleandoc(cls.__doc__),
            search_aliases=["sana control net", "sana hed"],
            inputs=[
                cls.file_input(),
                reference_input(),
            ],
            outputs=[io.ControlNet.Output(tooltip="For Apply ControlNet, with SANA's VAE.")],
        )

    @classmethod
    def execute(cls, control_net_name: str, reference: str = AUTO) -> io.NodeOutput:
        from .host.loading.controlnet import load_controlnet
        from .host.report import shown

        control, text = load_controlnet(cls.find(control_net_name), reference)
        return io.NodeOutput(control, ui=shown(text))


NODES = [SanaNodesControlNetLoader]
