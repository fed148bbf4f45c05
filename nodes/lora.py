"""MODEL and a LoRA file to MODEL."""

from inspect import cleandoc

from comfy_api.latest import io

from ..sana_core.runtime.checks import check_number
from .loader import FileNode

LARGEST_STRENGTH = 100.0


class SanaNodesLoraLoader(FileNode, io.ComfyNode):
    """
    Puts a LoRA on a SANA model and says how much of it fits. Chain several for several LoRAs.

    It reads the files of diffusers and PEFT, kohya, OneTrainer, SimpleTuner and ComfyUI. ComfyUI's own LoRA loaders
    work too, but do not say so when nothing fits.
    """

    field, kind = "lora_name", "loras"

    @classmethod
    def define_schema(cls):
        strength = {"default": 1.0, "min": -LARGEST_STRENGTH, "max": LARGEST_STRENGTH, "step": 0.01}
        return io.Schema(
            node_id="SanaNodesLoraLoader",
            display_name="SANA Load LoRA",
            category="SANA/loaders",
            has_intermediate_output=True,
            description=cleandoc(cls.__doc__),
            search_aliases=["sana lora", "apply lora", "peft"],
            inputs=[
                io.Model.Input("model", tooltip="The MODEL of a SANA loader, or of another SANA Load LoRA."),
                cls.file_input(),
                io.Float.Input("strength_model", **strength, tooltip="0 changes nothing; negative values are allowed."),
                io.Clip.Input("clip", optional=True, tooltip="For a LoRA that was trained on the text encoder too."),
                io.Float.Input("strength_clip", **strength, optional=True, tooltip="The strength on the text encoder."),
            ],
            outputs=[
                io.Model.Output(tooltip="The model with the LoRA."),
                io.Clip.Output(tooltip="The text encoder with the LoRA, where one was connected."),
            ],
        )

    @classmethod
    def execute(
        cls, model, lora_name: str, strength_model: float, clip=None, strength_clip: float = 1.0
    ) -> io.NodeOutput:
        from .host.links import check_links
        from .host.loading.lora import apply_lora
        from .host.report import shown

        check_links(model=model)
        if clip is not None:
            check_links(clip=clip)
        for field, value in (("strength_model", strength_model), ("strength_clip", strength_clip)):
            check_number(field, value, -LARGEST_STRENGTH, LARGEST_STRENGTH)
        model, clip, *lines = apply_lora(model, clip, cls.find(lora_name), strength_model, strength_clip)
        return io.NodeOutput(model, clip, ui=shown(*lines))


NODES = [SanaNodesLoraLoader]
