"""One choice for a whole workflow: the models of its loaders, or the demo model."""

from inspect import cleandoc

from comfy_api.latest import io

from ..sana_core.runtime.checks import check_name
from .host.folders import MODELS, model_path
from .loader import load_whole

CONNECTED = "the loaders' files"


class SanaNodesModelSwitch(io.ComfyNode):
    """
    Chooses which model a workflow uses: the one of its loaders, or the demo model of the pack.

    The demo model needs no download and generates simple scenes on any computer. What you do not choose is not loaded.
    """

    @classmethod
    def define_schema(cls):
        return io.Schema(
            node_id="SanaNodesModelSwitch",
            display_name="SANA Model Switch",
            category="SANA/loaders",
            has_intermediate_output=True,
            description=cleandoc(cls.__doc__),
            search_aliases=["try without download", "bundled model", "demo model", "choose model"],
            inputs=[
                io.Combo.Input(
                    "use",
                    options=[CONNECTED, *MODELS],
                    tooltip="The connected loaders, or the demo model, which needs no download.",
                ),
                io.Model.Input(
                    "model", lazy=True, optional=True, tooltip="From SANA Load Diffusion Model, or any SANA model."
                ),
                io.Clip.Input("clip", lazy=True, optional=True, tooltip="From SANA Load Text Encoder."),
                io.Vae.Input("vae", lazy=True, optional=True, tooltip="From SANA Load VAE."),
            ],
            outputs=[
                io.Model.Output(tooltip="For SANA Sampler, KSampler, LoRA loaders."),
                io.Clip.Output(tooltip="For SANA Text Encode or CLIP Text Encode."),
                io.Vae.Output(tooltip="For SANA Decode, VAE Decode, VAE Encode."),
            ],
        )

    @classmethod
    def validate_inputs(cls, use: str | None = CONNECTED):
        choices = [CONNECTED, *MODELS]
        # ComfyUI passes None for a link, whose value is checked when the node runs.
        is_known = use is None or use in choices
        return is_known or f"use: got {use!r:.40}, expected one of {', '.join(choices)}"

    @classmethod
    def fingerprint_inputs(cls, use: str | None = CONNECTED, **inputs) -> str:
        from .host.file_stats import file_stat, linked_file_stat

        # ComfyUI passes None for a link.
        if use is None:
            return linked_file_stat(MODELS.values)
        return file_stat(lambda: model_path(use)) if use in MODELS else ""

    @classmethod
    def check_lazy_status(cls, use: str, **links) -> list[str]:
        check_name("use", use, (CONNECTED, *MODELS))
        return [] if use in MODELS else [name for name, value in links.items() if value is None]

    @classmethod
    def execute(cls, use: str, model=None, clip=None, vae=None) -> io.NodeOutput:
        check_name("use", use, (CONNECTED, *MODELS))
        if use not in MODELS:
            from .host.links import check_links

            check_links(model=model, clip=clip, vae=vae)
            return io.NodeOutput(model, clip, vae)
        return load_whole(use)


NODES = [SanaNodesModelSwitch]
