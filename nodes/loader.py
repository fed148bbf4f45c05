"""Model folder to MODEL, CLIP and VAE."""

from inspect import cleandoc

from comfy_api.latest import io

from .host.folders import list_models, model_folder


class SanaLoader(io.ComfyNode):
    """
    Loads a SANA model: transformer, Gemma text encoder and DC-AE.

    Put diffusers folders into models/diffusers. "sana-tiny (bundled)" comes with the pack: it draws coloured shapes
    at 128 x 128 on any computer.
    """

    @classmethod
    def define_schema(cls):
        return io.Schema(
            node_id="SanaLoader",
            display_name="SANA Loader",
            category="SANA",
            description=cleandoc(cls.__doc__),
            search_aliases=["sana checkpoint", "load sana", "gemma", "dc-ae"],
            inputs=[
                io.Combo.Input(
                    "model",
                    options=list_models(),
                    tooltip="A folder with model_index.json under models/diffusers, or the bundled one.",
                )
            ],
            outputs=[
                io.Model.Output(tooltip="For SANA Sampler, KSampler, LoRA loaders."),
                io.Clip.Output(tooltip="For SANA Text Encode or CLIP Text Encode."),
                io.Vae.Output(tooltip="For SANA Decode, VAE Decode, VAE Encode."),
            ],
        )

    @classmethod
    def execute(cls, model: str) -> io.NodeOutput:
        # these import diffusers and transformers
        from .host.clip import load_clip
        from .host.model import load_model
        from .host.vae import load_vae

        folder = model_folder(model)
        return io.NodeOutput(load_model(folder), load_clip(folder), load_vae(folder))


NODES = [SanaLoader]
