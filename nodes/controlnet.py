"""A file to CONTROL_NET."""

from inspect import cleandoc

from comfy_api.latest import io

from .host.folders import find_file, list_files


class SanaControlNetLoader(io.ComfyNode):
    """
    Loads a SANA ControlNet, in diffusers' or NVIDIA's layout, for ComfyUI's Apply ControlNet.

    Connect SANA's VAE to Apply ControlNet: the control picture is encoded with it. The released one reads HED edges,
    which ControlNet preprocessor packs draw.
    """

    @classmethod
    def define_schema(cls):
        return io.Schema(
            node_id="SanaControlNetLoader",
            display_name="SANA Load ControlNet",
            category="SANA/loaders",
            description=cleandoc(cls.__doc__),
            search_aliases=["sana control net", "sana hed"],
            inputs=[
                io.Combo.Input(
                    "control_net_name", options=list_files("controlnet"), tooltip="A file in models/controlnet."
                )
            ],
            outputs=[io.ControlNet.Output(tooltip="For Apply ControlNet, with SANA's VAE.")],
        )

    @classmethod
    def execute(cls, control_net_name: str) -> io.NodeOutput:
        from .host.controlnet import load_controlnet

        return io.NodeOutput(load_controlnet(find_file("controlnet", control_net_name)))


NODES = [SanaControlNetLoader]
