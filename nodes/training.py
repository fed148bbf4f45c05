"""Images to a data set, and a data set to a LoRA or a ControlNet."""

from inspect import cleandoc

from comfy_api.latest import io, ui

from ..sana_core.errors import InputError
from ..sana_core.model.known_models import DEFAULT_RESOLUTION
from ..sana_core.model.latents import DOWNSCALE
from ..sana_core.runtime.checks import check_number, check_text, check_whole
from ..sana_core.training.images import LARGEST_RESOLUTION
from ..sana_core.training.settings import describe_field, one_of
from .host.folders import (
    dataset_path,
    dataset_paths,
    file_paths,
    find_file,
    list_datasets,
    list_files,
    run_path,
    without_places,
)
from .host.training.fields import FIELDS, OPTIONAL, RunSettings, default_values, naming_widgets

DATASET, SETTINGS = io.Custom("SANA_DATASET"), io.Custom("SANA_TRAIN_SETTINGS")
# Types of ComfyUI's training nodes.
LORA_MODEL, LOSS_MAP = io.Custom("LORA_MODEL"), io.Custom("LOSS_MAP")
# ComfyUI's Train LoRA has the same name for it.
NO_LORA = "[None]"


class SanaNodesDataset(io.ComfyNode):
    """
    Gives the images and captions of a folder to SANA Train, and shows them on a contact sheet.

    Put the images into a folder in ComfyUI's input folder, and beside each a text file of the same name with its
    caption, or write one caption for all. "cyanotypes (bundled)" is an example.
    """

    @classmethod
    def define_schema(cls):
        return io.Schema(
            node_id="SanaNodesDataset",
            display_name="SANA Dataset",
            category="SANA/training",
            has_intermediate_output=True,
            description=cleandoc(cls.__doc__),
            search_aliases=["training data", "images and captions", "aspect ratio buckets", "contact sheet"],
            inputs=[
                io.Combo.Input("folder", options=list_datasets(), tooltip="A folder in ComfyUI's input folder."),
                io.Int.Input(
                    "resolution",
                    default=DEFAULT_RESOLUTION,
                    min=DOWNSCALE,
                    max=LARGEST_RESOLUTION,
                    step=DOWNSCALE,
                    tooltip="The training size of your model: 1024 for most, 512 for the demo model. Images are "
                    "cropped to the nearest of SANA's shapes of that area.",
                ),
                io.String.Input(
                    "caption",
                    default="",
                    optional=True,
                    tooltip="The caption of all images without a text file, for example a photo of sks cat. Use sks, a "
                    "word that you invent, in your prompts.",
                ),
            ],
            outputs=[
                DATASET.Output(display_name="dataset", tooltip="For SANA Train."),
                io.Image.Output(
                    display_name="contact_sheet", tooltip="The images as cropped, by shape, with captions."
                ),
            ],
        )

    @classmethod
    def fingerprint_inputs(cls, folder: str | None = None, **inputs) -> str:
        from .host.file_stats import dataset_stat, linked_dataset_stat

        # ComfyUI passes None for a link.
        return linked_dataset_stat(dataset_paths) if folder is None else dataset_stat(lambda: dataset_path(folder))

    @classmethod
    def execute(cls, folder: str, resolution: int, caption: str = "") -> io.NodeOutput:
        from .host.report import shown
        from .host.training.view import look_at

        if not isinstance(caption, str):
            raise InputError(f"caption: got {caption!r}, expected text")
        check_text("caption", caption)
        with without_places():
            dataset, sheet, text = look_at(dataset_path(folder), resolution, caption.strip())
        return io.NodeOutput(dataset, sheet, ui=shown(text))


def widget(name: str, optional: bool = False) -> io.Input:
    """Return the widget of a training setting. It has the range, default and help of the setting."""
    field = FIELDS[name]
    info = field.info()
    options = {"default": info.default, "tooltip": info.help}
    if optional:
        options |= {"optional": True, "advanced": field.advanced}
    if info.choices:
        return io.Combo.Input(name, options=list(info.choices), **options)
    if info.kind is bool:
        return io.Boolean.Input(name, **options)
    if info.kind is str:
        return io.String.Input(name, **options)
    kind = io.Int if info.kind is int else io.Float
    return kind.Input(name, min=info.low, max=info.high, step=field.step, **options)


def train_inputs(trained: str, name: str, size: str, *texts: io.Input) -> list[io.Input]:
    """Return the inputs of a node that trains a "LoRA" or "ControlNet", whose size the widget `size` sets."""
    single_file = "Connect it only if the MODEL comes from SANA Load Diffusion Model."
    return [
        io.Model.Input("model", tooltip="The MODEL of SANA Loader, without a LoRA or another patch."),
        DATASET.Input("dataset", tooltip="The images of SANA Dataset."),
        io.String.Input(
            "name",
            default=name,
            tooltip=f"The name of the {trained} in the lists of loaders, and of its folder in output/sana_training. A "
            "new name starts a new training, the same name resumes it.",
        ),
        widget("steps"),
        widget("learning_rate"),
        widget(size),
        widget("batch_size"),
        *texts,
        io.Clip.Input("clip", optional=True, tooltip=single_file),
        io.Vae.Input("vae", optional=True, tooltip=single_file),
        SETTINGS.Input("settings", optional=True, tooltip="SANA Train Settings. A first training does not need them."),
    ]


class SanaNodesTrainSettings(io.ComfyNode):
    """
    Settings for SANA Train and SANA Train ControlNet that a first training does not need.

    Each widget starts at the value that the training has without this node.
    """

    @classmethod
    def define_schema(cls):
        lora = io.Combo.Input(
            "existing_lora",
            options=[NO_LORA, *list_files("loras")],
            default=NO_LORA,
            optional=True,
            tooltip=describe_field("method.start").help,
        )
        images = describe_field("phase.regularisation").help
        regularisation = DATASET.Input("regularisation", optional=True, tooltip=f"A second SANA Dataset. {images}")
        return io.Schema(
            node_id="SanaNodesTrainSettings",
            display_name="SANA Train Settings",
            category="SANA/training",
            description=cleandoc(cls.__doc__),
            search_aliases=["training settings", "optimizer", "gradient clip", "regularisation"],
            inputs=[regularisation, *(widget(name, optional=True) for name in OPTIONAL), lora],
            outputs=[SETTINGS.Output(display_name="settings", tooltip="For SANA Train and SANA Train ControlNet.")],
        )

    @classmethod
    def validate_inputs(cls, existing_lora: str = NO_LORA):
        # A missing file is an error when the file is read, as in SANA Load LoRA.
        return True

    @classmethod
    def fingerprint_inputs(cls, existing_lora: str | None = NO_LORA, **inputs) -> str:
        from .host.file_stats import file_stat, linked_file_stat

        if existing_lora is None:
            # ComfyUI passes None for a link.
            return linked_file_stat(lambda: file_paths("loras"))
        return "" if existing_lora == NO_LORA else file_stat(lambda: find_file("loras", existing_lora, "existing_lora"))

    @classmethod
    def execute(cls, existing_lora: str = NO_LORA, regularisation=None, **widgets) -> io.NodeOutput:
        from .host.links import check_links

        if regularisation is not None:
            check_links(regularisation=regularisation)
        values = checked(cls, default_values() | widgets)
        with naming_widgets():
            start = "" if existing_lora == NO_LORA else str(find_file("loras", existing_lora, "existing_lora"))
        return io.NodeOutput(RunSettings(values, start, regularisation))


class SanaNodesTrain(io.ComfyNode):
    """
    Trains a LoRA on a SANA model, with previews while it trains.

    Afterwards the LoRA is in the list of SANA Load LoRA and of ComfyUI's LoRA loaders; press R first. Cancel saves;
    queue again to resume. The node shows the loss and images of the validation prompts.
    """

    @classmethod
    def define_schema(cls):
        prompts = io.String.Input(
            "validation_prompts",
            default="",
            optional=True,
            tooltip=f"{describe_field('validation.prompts').help} To use several, connect a text with one per line.",
        )
        return io.Schema(
            node_id="SanaNodesTrain",
            display_name="SANA Train",
            category="SANA/training",
            description=cleandoc(cls.__doc__),
            search_aliases=["train lora", "sana lora training", "fine-tune", "dora", "lokr", "dreambooth"],
            is_output_node=True,
            inputs=train_inputs("LoRA", "my-lora", "rank", prompts),
            outputs=[
                LORA_MODEL.Output(display_name="lora", tooltip="For Save LoRA Weights and Load LoRA Model."),
                LOSS_MAP.Output(display_name="loss_map", tooltip="The loss of each step, for Plot Loss Graph."),
                io.Model.Output(tooltip="The model with the LoRA, for SANA Sampler."),
            ],
            hidden=[io.Hidden.unique_id],
        )

    @classmethod
    def execute(
        cls, model, dataset, name: str, settings=None, clip=None, vae=None, validation_prompts: str = "", **widgets
    ) -> io.NodeOutput:
        from .host.report import shown
        from .host.training.run import make_settings, train_lora

        check_sockets(model=model, dataset=dataset, clip=clip, vae=vae, settings=settings)
        widgets = checked(cls, {**widgets, "validation_prompts": validation_prompts})
        chosen = settings or RunSettings(default_values())
        with naming_widgets(chosen.existing_lora), without_places():
            run = make_settings(model, dataset, run_path(name), chosen, widgets, clip, vae)
            trained = train_lora(model, run, cls.hidden.unique_id)
        preview = {} if trained.sheet is None else ui.PreviewImage(trained.sheet).as_dict()
        return io.NodeOutput(
            trained.lora, {"loss": trained.losses}, trained.model, ui={**preview, **shown(trained.report)}
        )


class SanaNodesTrainControlNet(io.ComfyNode):
    """
    Trains a ControlNet for a SANA model, on images that each have a control image beside them.

    For cat.png put cat-control.png, with its edges, depth or pose, beside it. Afterwards the ControlNet is in the list
    of SANA Load ControlNet; press R first. Cancel saves; queue again to resume.
    """

    @classmethod
    def define_schema(cls):
        return io.Schema(
            node_id="SanaNodesTrainControlNet",
            display_name="SANA Train ControlNet",
            category="SANA/training",
            description=cleandoc(cls.__doc__),
            search_aliases=["train control net", "sana controlnet training"],
            is_output_node=True,
            inputs=train_inputs("ControlNet", "my-controlnet", "blocks"),
            outputs=[
                io.ControlNet.Output(tooltip="For Apply ControlNet, with SANA's VAE."),
                LOSS_MAP.Output(display_name="loss_map", tooltip="The loss of each step, for Plot Loss Graph."),
            ],
            hidden=[io.Hidden.unique_id],
        )

    @classmethod
    def execute(cls, model, dataset, name: str, settings=None, clip=None, vae=None, **widgets) -> io.NodeOutput:
        from .host.report import shown
        from .host.training.run import make_settings, train_controlnet

        check_sockets(model=model, dataset=dataset, clip=clip, vae=vae, settings=settings)
        widgets = checked(cls, widgets)
        chosen = settings or RunSettings(default_values())
        with naming_widgets(), without_places():
            run = make_settings(model, dataset, run_path(name), chosen, widgets, clip, vae)
            control, losses, report = train_controlnet(model, run, cls.hidden.unique_id)
        return io.NodeOutput(control, {"loss": losses}, ui=shown(report))


def checked(node: type[io.ComfyNode], values: dict) -> dict:
    """Return the `values` of widgets, with whole numbers as int. The first wrong one raises InputError.

    ComfyUI checks only the values that a user enters, not the values of links.
    """
    values = dict(values)
    for node_input in node.define_schema().inputs:
        if node_input.id not in values:
            continue
        value = values[node_input.id]
        if isinstance(node_input, io.Int.Input):
            check_whole(node_input.id, value, node_input.min, node_input.max)
            values[node_input.id] = int(value)
        elif isinstance(node_input, io.Float.Input):
            check_number(node_input.id, value, node_input.min, node_input.max)
        elif isinstance(node_input, io.Combo.Input):
            one_of(node_input.id, value, tuple(node_input.options))
        elif isinstance(node_input, io.Boolean.Input) and not isinstance(value, bool):
            raise InputError(f"{node_input.id}: got {value!r:.40}, expected true or false; connect a BOOLEAN")
        elif isinstance(node_input, io.String.Input):
            if not isinstance(value, str):
                raise InputError(f"{node_input.id}: got {value!r:.40}, expected a text; connect a STRING")
            check_text(node_input.id, value)
    return values


def check_sockets(**inputs) -> None:
    """Raise InputError for the first link that is not of its socket's type; None where nothing is connected."""
    from .host.links import check_links

    optional = ("clip", "vae", "settings")
    check_links(**{name: value for name, value in inputs.items() if name not in optional or value is not None})


NODES = [SanaNodesDataset, SanaNodesTrain, SanaNodesTrainControlNet, SanaNodesTrainSettings]
