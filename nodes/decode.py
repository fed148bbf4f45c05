"""LATENT to IMAGE."""

from inspect import cleandoc

from comfy_api.latest import io

from ..sana_core.latents import CHANNELS, check_channels


class SanaDecode(io.ComfyNode):
    """
    Turns SANA's latents into pictures.
    """

    @classmethod
    def define_schema(cls):
        return io.Schema(
            node_id="SanaDecode",
            display_name="SANA Decode",
            category="SANA",
            description=cleandoc(cls.__doc__),
            search_aliases=["dc-ae decode", "sana vae decode"],
            inputs=[
                io.Latent.Input("samples", tooltip="32 channels, from SANA Sampler or KSampler."),
                io.Vae.Input("vae", tooltip="The VAE of SANA Loader."),
            ],
            outputs=[io.Image.Output()],
        )

    @classmethod
    def execute(cls, samples: dict, vae) -> io.NodeOutput:
        if vae.latent_channels != CHANNELS:
            raise ValueError(f"vae: got one of {vae.latent_channels} channels, expected {CHANNELS}; use SANA Loader's")
        check_channels("samples", samples["samples"].shape)
        return io.NodeOutput(vae.decode(samples["samples"]))


NODES = [SanaDecode]
