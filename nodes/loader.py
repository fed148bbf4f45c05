"""Files to MODEL, CLIP, VAE, CONTROL_NET and LoRA, and the choice of the demo model."""

from inspect import cleandoc

from comfy_api.latest import io

from ..sana_core.checkpoints.keys import LARGEST_STRENGTH
from ..sana_core.model.known_models import AUTO_SIZE, SIZES
from ..sana_core.model.reference import AUTO, READINGS, REFERENCES
from ..sana_core.runtime.checks import check_name, check_number
from .host.folders import MODELS, file_paths, find_file, list_files, list_models, model_path, model_paths


def reference_input() -> io.Combo.Input:
    return io.Combo.Input(
        "reference",
        options=list(REFERENCES),
        optional=True,
        advanced=True,
        tooltip="NVIDIA's code and diffusers give slightly different images from the same weights. Leave at auto: it "
        "follows the code the file was made for.",
    )


def model_options() -> list[io.Combo.Input]:
    """Return the optional inputs of the nodes that load a MODEL."""
    from .host.loading.quantise import choices

    return [
        io.Combo.Input(
            "weight_dtype",
            options=["default", "fp8_e4m3fn", "fp8_e4m3fn_fast", "fp8_e5m2"],
            optional=True,
            advanced=True,
            tooltip="Leave at default, the precision of the file. To save VRAM, use quantise int8: it loses less than "
            "fp8.",
        ),
        io.Combo.Input(
            "resolution",
            options=[AUTO_SIZE, *SIZES],
            optional=True,
            advanced=True,
            tooltip="The size the model was trained at. Leave at auto unless the line under the node is wrong.",
        ),
        reference_input(),
        io.Combo.Input(
            "quantise",
            options=choices(),
            optional=True,
            advanced=True,
            tooltip="Quantise while loading: half the model's memory or less. int8 loses least, then fp8. Only formats "
            "that work on this computer are listed.",
        ),
    ]


def pixels(resolution: str) -> int | None:
    # widgets check their options, links do not
    check_name("resolution", resolution, (AUTO_SIZE, *SIZES))
    return None if resolution == AUTO_SIZE else int(resolution)


def load_whole(
    name: str,
    weight_dtype: str = "default",
    resolution: int | None = None,
    reference: str = AUTO,
    quantise: str = "off",
) -> io.NodeOutput:
    """Return MODEL, CLIP and VAE of the whole model of that name, and describe the MODEL under the node.

    The options are the options of `load_model`.
    """
    from ..sana_core.checkpoints import find_part, inspect_checkpoint
    from ..sana_core.checkpoints.generation import checkpoint_notes
    from ..sana_core.checkpoints.load import config_of
    from ..sana_core.model.known_models import edits_images
    from ..sana_core.video.generate import check_vae
    from .host.loading.clip import load_clip, load_edit_clip
    from .host.loading.load_model import load_model
    from .host.loading.vae import load_vae
    from .host.report import shown

    checkpoint = inspect_checkpoint(model_path(name))
    transformer = checkpoint.transformer
    if transformer is not None and transformer.is_video:
        check_vae(find_part(checkpoint, "video_autoencoder"), transformer)
    patcher = load_model(checkpoint, weight_dtype, resolution, reference, quantise)
    # The demo model was trained on prompts in lower case without such marks.
    notes = [] if name in MODELS else checkpoint_notes(checkpoint, reference)
    lines = [patcher.model.model_config.text, *notes]
    is_edit = transformer is not None and edits_images(config_of(transformer))
    clip = load_edit_clip(checkpoint) if is_edit else load_clip(checkpoint, reference)
    return io.NodeOutput(patcher, clip, load_vae(checkpoint), ui=shown("\n".join(lines)))


class FileNode:
    """A node whose input `field` is the name of a file in ComfyUI's folder `kind`."""

    field: str
    kind: str

    @classmethod
    def find(cls, name: str):
        return find_file(cls.kind, name, cls.field)

    @classmethod
    def paths(cls):
        """Return all files and folders that `find` can return."""
        return file_paths(cls.kind)

    @classmethod
    def file_input(cls) -> io.Combo.Input:
        return io.Combo.Input(cls.field, options=list_files(cls.kind), tooltip=f"A file in models/{cls.kind}.")

    @classmethod
    def validate_inputs(
        cls,
        model=None,
        model_name=None,
        text_encoder_name=None,
        vae_name=None,
        control_net_name=None,
        lora_name=None,
        scorer_name=None,
    ):
        # ComfyUI does not compare inputs that are parameters here with the widget's list. So a missing file is reported
        # when it is loaded, with its size and link, and only if the graph needs it.
        return True

    @classmethod
    def fingerprint_inputs(cls, **inputs) -> str:
        from .host.file_stats import file_stat, linked_file_stat

        name = inputs.get(cls.field)
        # ComfyUI passes None for a link.
        return linked_file_stat(cls.paths) if name is None else file_stat(lambda: cls.find(name))


class SanaNodesLoader(FileNode, io.ComfyNode):
    """
    Loads a whole SANA model: the model itself, the text encoder Gemma 2 as CLIP, and the VAE.

    Put diffusers folders into models/diffusers, all-in-one files into models/checkpoints. "sana-posters (bundled)"
    is the demo model of the pack: simple scenes at 512 x 512 on any computer.
    """

    field = "model"

    @classmethod
    def find(cls, name: str):
        return model_path(name)

    @classmethod
    def paths(cls):
        return model_paths()

    @classmethod
    def define_schema(cls):
        return io.Schema(
            node_id="SanaNodesLoader",
            display_name="SANA Loader",
            category="SANA/loaders",
            has_intermediate_output=True,
            description=cleandoc(cls.__doc__),
            search_aliases=["sana", "sana checkpoint", "load sana", "gemma", "dc-ae"],
            inputs=[
                io.Combo.Input(
                    "model",
                    options=list_models(),
                    tooltip="A folder in models/diffusers, a file in models/checkpoints, or the demo model.",
                ),
                *model_options(),
            ],
            outputs=[
                io.Model.Output(tooltip="For SANA Sampler, KSampler, LoRA loaders."),
                io.Clip.Output(tooltip="For SANA Text Encode or CLIP Text Encode."),
                io.Vae.Output(tooltip="For SANA Decode, VAE Decode, VAE Encode."),
            ],
        )

    @classmethod
    def execute(
        cls,
        model: str,
        weight_dtype: str = "default",
        resolution: str = AUTO_SIZE,
        reference: str = AUTO,
        quantise: str = "off",
    ) -> io.NodeOutput:
        return load_whole(model, weight_dtype, pixels(resolution), reference, quantise)


class SanaNodesModelLoader(FileNode, io.ComfyNode):
    """
    Loads a SANA model from one file, .safetensors or .pth, in diffusers' or NVIDIA's layout.

    If a model comes in several files, choose the first. A config.json in the same folder is read.
    """

    field, kind = "model_name", "diffusion_models"

    @classmethod
    def define_schema(cls):
        return io.Schema(
            node_id="SanaNodesModelLoader",
            display_name="SANA Load Diffusion Model",
            category="SANA/loaders",
            has_intermediate_output=True,
            description=cleandoc(cls.__doc__),
            search_aliases=["sana unet", "sana transformer", "load sana model", "sana pth"],
            inputs=[
                cls.file_input(),
                *model_options(),
            ],
            outputs=[io.Model.Output(tooltip="For SANA Sampler, KSampler, LoRA loaders.")],
        )

    @classmethod
    def execute(
        cls,
        model_name: str,
        weight_dtype: str = "default",
        resolution: str = AUTO_SIZE,
        reference: str = AUTO,
        quantise: str = "off",
    ) -> io.NodeOutput:
        from ..sana_core.checkpoints import inspect_checkpoint
        from ..sana_core.checkpoints.generation import checkpoint_notes
        from .host.loading.load_model import load_model
        from .host.report import shown

        checkpoint = inspect_checkpoint(cls.find(model_name))
        model = load_model(checkpoint, weight_dtype, pixels(resolution), reference, quantise)
        lines = [model.model.model_config.text, *checkpoint_notes(checkpoint)]
        return io.NodeOutput(model, ui=shown("\n".join(lines)))


class SanaNodesTextEncoderLoader(FileNode, io.ComfyNode):
    """
    Loads SANA's text encoder, Gemma-2-2b-it, from one file with its tokenizer inside or from a downloaded folder.

    Take gemma_2_2b_it_elm_bf16: gemma_2_2b_fp16 of Lumina 2 is another Gemma. ComfyUI's CLIPLoader with type pixeldit
    gives nearly the same.
    """

    field, kind = "text_encoder_name", "text_encoders"

    @classmethod
    def define_schema(cls):
        return io.Schema(
            node_id="SanaNodesTextEncoderLoader",
            display_name="SANA Load Text Encoder",
            category="SANA/loaders",
            has_intermediate_output=True,
            description=cleandoc(cls.__doc__),
            search_aliases=["gemma loader", "sana clip", "load gemma 2"],
            inputs=[
                cls.file_input(),
                io.Combo.Input(
                    "reference",
                    options=list(READINGS),
                    optional=True,
                    advanced=True,
                    tooltip="Whose reading of prompts to follow: choose that of the MODEL. auto: NVIDIA's.",
                ),
            ],
            outputs=[io.Clip.Output(tooltip="For SANA Text Encode or CLIP Text Encode.")],
        )

    @classmethod
    def execute(cls, text_encoder_name: str, reference: str = AUTO) -> io.NodeOutput:
        from ..sana_core.checkpoints import inspect_checkpoint
        from ..sana_core.checkpoints.generation import checkpoint_notes
        from .host.loading.clip import load_clip
        from .host.report import shown

        checkpoint = inspect_checkpoint(cls.find(text_encoder_name))
        notes = checkpoint_notes(checkpoint, reference)
        return io.NodeOutput(load_clip(checkpoint, reference), ui=shown("\n".join(notes)))


class SanaNodesVAELoader(FileNode, io.ComfyNode):
    """
    Loads SANA's VAE, DC-AE f32c32 1.0, 1.1 or Lite, in diffusers' or the original layout.

    Take 1.1. Lite needs less memory and time; details differ slightly. Any of them fits every SANA model.
    """

    field, kind = "vae_name", "vae"

    @classmethod
    def define_schema(cls):
        return io.Schema(
            node_id="SanaNodesVAELoader",
            display_name="SANA Load VAE",
            category="SANA/loaders",
            has_intermediate_output=True,
            description=cleandoc(cls.__doc__),
            search_aliases=["dc-ae", "sana vae", "load dc-ae", "dc-ae-lite"],
            inputs=[cls.file_input()],
            outputs=[io.Vae.Output(tooltip="For SANA Decode, VAE Decode, VAE Encode.")],
        )

    @classmethod
    def execute(cls, vae_name: str) -> io.NodeOutput:
        from ..sana_core.checkpoints import inspect_checkpoint
        from ..sana_core.checkpoints.generation import checkpoint_notes
        from .host.loading.vae import load_vae
        from .host.report import shown

        checkpoint = inspect_checkpoint(cls.find(vae_name))
        notes = checkpoint_notes(checkpoint)
        return io.NodeOutput(load_vae(checkpoint), ui=shown("\n".join(notes)))


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
        from .host.loading.load_model import apply_lora
        from .host.report import shown

        check_links(model=model)
        if clip is not None:
            check_links(clip=clip)
        for field, value in (("strength_model", strength_model), ("strength_clip", strength_clip)):
            check_number(field, value, -LARGEST_STRENGTH, LARGEST_STRENGTH)
        model, clip, *lines = apply_lora(model, clip, cls.find(lora_name), strength_model, strength_clip)
        return io.NodeOutput(model, clip, ui=shown(*lines))


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


NODES = [
    SanaNodesLoader,
    SanaNodesModelLoader,
    SanaNodesTextEncoderLoader,
    SanaNodesVAELoader,
    SanaNodesModelSwitch,
    SanaNodesLoraLoader,
    SanaNodesControlNetLoader,
]
