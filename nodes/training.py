"""Images to a data set, and a data set to a LoRA."""

from inspect import cleandoc

from comfy_api.latest import io, ui

from ..sana_core.model.known_models import DEFAULT_RESOLUTION
from ..sana_core.model.latents import DOWNSCALE
from ..sana_core.runtime.checks import check_whole
from ..sana_core.training.images import LARGEST_SIDE
from ..sana_core.training.optimizers import NAMES
from ..sana_core.training.settings import ADAPTERS, BASES, SCHEDULES, TARGETS, Method
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

DATASET = io.Custom("SANA_DATASET")
# core's, of its own nodes for training
LORA_MODEL, LOSS_MAP = io.Custom("LORA_MODEL"), io.Custom("LOSS_MAP")
LARGEST_STEPS = 1_000_000
# as ComfyUI's own Train LoRA calls it
NO_LORA = "[None]"
# an input that is left at its default as a rule
ADVANCED = {"optional": True, "advanced": True}


class SanaNodesDataset(io.ComfyNode):
    """
    Gives the images and captions of a folder to SANA Train, and shows them on a contact sheet.

    Put the images into a folder in ComfyUI's input folder, and beside each a text file of the same name with its
    caption. "cyanotypes (bundled)" is an example.
    """

    @classmethod
    def define_schema(cls):
        return io.Schema(
            node_id="SanaNodesDataset",
            display_name="SANA Dataset",
            category="SANA/training",
            description=cleandoc(cls.__doc__),
            search_aliases=["training data", "images and captions", "aspect ratio buckets", "contact sheet"],
            inputs=[
                io.Combo.Input("folder", options=list_datasets(), tooltip="A folder in ComfyUI's input folder."),
                io.Int.Input(
                    "resolution",
                    default=DEFAULT_RESOLUTION,
                    min=DOWNSCALE,
                    max=LARGEST_SIDE,
                    step=DOWNSCALE,
                    tooltip="The training size of your model: 1024 for most, 512 for the demo model. Images are "
                    "cropped to the nearest of SANA's shapes of that area.",
                ),
            ],
            outputs=[
                DATASET.Output(display_name="dataset", tooltip="For SANA Train."),
                io.Image.Output(
                    display_name="contact_sheet", tooltip="The images as cropped, by shape, with captions."
                ),
            ],
            hidden=[io.Hidden.unique_id],
        )

    @classmethod
    def fingerprint_inputs(cls, folder: str | None = None, **inputs) -> str:
        from .host.file_stats import dataset_stat, linked_dataset_stat

        # ComfyUI passes None for a link.
        return linked_dataset_stat(dataset_paths) if folder is None else dataset_stat(lambda: dataset_path(folder))

    @classmethod
    def execute(cls, folder: str, resolution: int) -> io.NodeOutput:
        from .host.datasets import look_at
        from .host.report import show_under_node

        with without_places():
            dataset, sheet, text = look_at(dataset_path(folder), resolution)
        show_under_node(text, cls.hidden.unique_id)
        return io.NodeOutput(dataset, sheet)


def main_inputs(trained: str = "LoRA", name: str = "my-lora") -> list:
    """What people change, and what a MODEL of one file lacks; `trained` is what comes of it."""
    return [
        io.Model.Input("model", tooltip="The MODEL of SANA Loader, with no LoRA or other patch on it."),
        DATASET.Input("dataset", tooltip="The images of SANA Dataset."),
        io.String.Input(
            "name",
            default=name,
            tooltip=f"Name of the {trained} and of its folder in output/sana_training. The same name resumes a run; a "
            "new name starts one.",
        ),
        io.Combo.Input(
            "method",
            options=list(ADAPTERS),
            tooltip="Take lora, which every program reads. dora learns a little more per step and is slower, lokr is "
            "small.",
        ),
        io.Int.Input("rank", default=16, min=1, max=1024, tooltip="The size of the LoRA; 8 to 32 is usual."),
        io.Int.Input(
            "steps",
            default=500,
            min=1,
            max=LARGEST_STEPS,
            tooltip=f"In all, also when a run is resumed: raise it to train a finished {trained} further.",
        ),
        io.Float.Input(
            "learning_rate",
            default=1e-4,
            min=0.0,
            max=10.0,
            step=1e-6,
            tooltip="Not scaled by batch or rank. 1 for prodigy, 0.001 for the demo model.",
        ),
        io.Int.Input(
            "batch_size", default=1, min=1, max=4096, tooltip="Images per step; more is steadier and takes more memory."
        ),
        io.String.Input(
            "validation_prompts",
            default="",
            multiline=True,
            optional=True,
            tooltip="One per line, generated during training as SANA Sampler would with the LoRA; prompt i uses seed "
            "i.",
        ),
        io.Clip.Input("clip", optional=True, tooltip="Only for a MODEL of SANA Load Diffusion Model."),
        io.Vae.Input("vae", optional=True, tooltip="Only for a MODEL of SANA Load Diffusion Model."),
    ]


def whole(name: str, default: int, least: int, tooltip: str, most: int = LARGEST_STEPS) -> io.Int.Input:
    return io.Int.Input(name, default=default, min=least, max=most, tooltip=tooltip, **ADVANCED)


def number(name: str, default: float, most: float, step: float, tooltip: str, least: float = 0.0) -> io.Float.Input:
    return io.Float.Input(name, default=default, min=least, max=most, step=step, tooltip=tooltip, **ADVANCED)


def choice(name: str, options: tuple[str, ...], tooltip: str) -> io.Combo.Input:
    return io.Combo.Input(name, options=list(options), default=options[0], tooltip=tooltip, **ADVANCED)


def advanced_inputs() -> list:
    """What is left at its default as a rule."""
    return [
        choice("targets", TARGETS, "The layers that are trained. both learns more and needs more images."),
        number("alpha", 0.0, 1e5, 0.5, "The LoRA is scaled by alpha / rank; 0 means the rank, a scale of 1."),
        choice("optimizer", NAMES, "came needs half of adamw's memory, came8bit an eighth; both need a warmup."),
        choice("schedule", SCHEDULES, "How the learning rate changes after the warmup."),
        whole("warmup", 0, 0, "Steps in which the learning rate rises from 0."),
        whole("accumulate", 1, 1, "Batches per step: the effect of a larger batch without its memory.", 4096),
        whole("validate_every", 100, 0, "Steps between validations, with images of the prompts; 0 for none."),
        number("held_out", 0.0, 0.5, 0.01, "The share of images kept out of training to measure the loss."),
        number("caption_dropout", 0.1, 1.0, 0.01, "The share of images trained without caption, which guidance needs."),
        number("gradient_clip", 0.1, 1e6, 0.01, "The largest norm of a step's gradients."),
        number("weight_decay", 0.01, 1.0, 0.001, "How strongly the weights are pulled towards 0."),
        number(
            "ema", 0.0, 0.999999, 0.0001, "Decay of a moving average of the weights, which is then saved; 0 for none."
        ),
        io.Boolean.Input(
            "checkpoint_gradients", default=True, tooltip="On: needs far less memory, takes a third longer.", **ADVANCED
        ),
        whole("save_every", 500, 1, "Steps between saved states. Cancel saves too."),
        whole("keep", 3, 1, "How many states are kept, besides the best."),
        # not "seed", which the canvas would change with every run: another seed is another run
        whole("training_seed", 0, 0, "Seed of the noise and of the order of the images.", 2**63 - 1),
        io.String.Input("trigger", default="", tooltip="Words to note in the LoRA's file.", **ADVANCED),
        number("d0", 1e-6, 1.0, 1e-7, "Of prodigy: its first estimate of how far the weights have to go.", 1e-7),
        number("d_coef", 1.0, 1e3, 1e-3, "Of prodigy: a factor of the rate that it finds.", 1e-3),
        choice(
            "existing_lora",
            (NO_LORA, *list_files("loras")),
            "A LoRA to begin with. Set method, rank and targets to those of the file.",
        ),
        number("prior_loss_weight", 1.0, 1e3, 0.05, "How much the regularisation images count."),
        choice("base", BASES, "int8 keeps the model in 8 bits while a lora or lokr is trained: about half the memory."),
    ]


class SanaNodesTrain(io.ComfyNode):
    """
    Trains a LoRA on a SANA model, with previews while it trains.

    The node shows the loss and the validation images, and at the end all of them over time, the best marked. Cancel
    saves; queue again to resume. To train a finished LoRA further, raise steps. The LoRA is saved in
    output/sana_training.
    """

    @classmethod
    def define_schema(cls):
        return io.Schema(
            node_id="SanaNodesTrain",
            display_name="SANA Train",
            category="SANA/training",
            description=cleandoc(cls.__doc__),
            search_aliases=["train lora", "sana lora training", "fine-tune", "dora", "lokr", "dreambooth"],
            is_output_node=True,
            inputs=[
                *main_inputs(),
                *advanced_inputs(),
                DATASET.Input(
                    "regularisation",
                    optional=True,
                    tooltip="Other images of the same kind, such as other people, trained as often as yours so that "
                    "the model keeps them.",
                ),
            ],
            outputs=[
                LORA_MODEL.Output(display_name="lora", tooltip="For Save LoRA Weights and Load LoRA Model."),
                LOSS_MAP.Output(display_name="loss_map", tooltip="The loss of each step, for Plot Loss Graph."),
                io.Model.Output(tooltip="The model with the LoRA, for SANA Sampler."),
            ],
            hidden=[io.Hidden.unique_id],
        )

    @classmethod
    def validate_inputs(cls, existing_lora: str = NO_LORA):
        # a missing file is answered when it is read, as in SANA Load LoRA
        return True

    @classmethod
    def fingerprint_inputs(cls, existing_lora: str | None = NO_LORA, **inputs) -> str:
        from .host.file_stats import file_stat, linked_file_stat

        if existing_lora is None:
            # ComfyUI passes None for a link.
            return linked_file_stat(lambda: file_paths("loras"))
        return "" if existing_lora == NO_LORA else file_stat(lambda: find_file("loras", existing_lora))

    @classmethod
    def execute(cls, model, dataset, name: str, existing_lora: str = NO_LORA, **own) -> io.NodeOutput:
        from .host.report import show_under_node
        from .host.training import adapter_method, make_settings, train_lora

        check_sockets(model=model, dataset=dataset, **own)
        own = complete(cls, own)
        own["start"] = "" if existing_lora == NO_LORA else str(find_file("loras", existing_lora))
        with without_places():
            settings = make_settings(model, dataset, run_path(name), adapter_method(own), own)
            trained = train_lora(model, settings, cls.hidden.unique_id)
        show_under_node(trained.report, cls.hidden.unique_id)
        shown = None if trained.sheet is None else ui.PreviewImage(trained.sheet)
        return io.NodeOutput(trained.lora, {"loss": trained.losses}, trained.model, ui=shown)


class SanaNodesTrainControlNet(io.ComfyNode):
    """
    Trains a ControlNet for a SANA model, on images that each have a control image beside them.

    For cat.png put cat-control.png, with its edges, depth or pose, beside it. Cancel saves; queue again to resume. The
    ControlNet is saved in output/sana_training.
    """

    @classmethod
    def define_schema(cls):
        blocks = io.Int.Input(
            "blocks",
            default=7,
            min=1,
            max=255,
            tooltip="How many of the model's first blocks are copied and trained: 7 in NVIDIA's own; 3 for the demo "
            "model.",
        )
        lora_alone = ("method", "rank", "validation_prompts", "targets", "alpha", "trigger")
        lora_alone += ("existing_lora", "prior_loss_weight", "base")
        model, dataset, name, *others = main_inputs("ControlNet", "my-controlnet")
        inputs = [model, dataset, name, blocks, *others, *advanced_inputs()]
        return io.Schema(
            node_id="SanaNodesTrainControlNet",
            display_name="SANA Train ControlNet",
            category="SANA/training",
            description=cleandoc(cls.__doc__),
            search_aliases=["train control net", "sana controlnet training"],
            is_output_node=True,
            inputs=[each for each in inputs if each.id not in lora_alone],
            outputs=[
                io.ControlNet.Output(tooltip="For Apply ControlNet, with SANA's VAE."),
                LOSS_MAP.Output(display_name="loss_map", tooltip="The loss of each step, for Plot Loss Graph."),
            ],
            hidden=[io.Hidden.unique_id],
        )

    @classmethod
    def execute(cls, model, dataset, name: str, **own) -> io.NodeOutput:
        from .host.report import show_under_node
        from .host.training import make_settings, train_controlnet

        check_sockets(model=model, dataset=dataset, **own)
        own = complete(cls, own)
        with without_places():
            method = Method("controlnet", blocks=own["blocks"])
            settings = make_settings(model, dataset, run_path(name), method, own)
            control, losses, report = train_controlnet(model, settings, cls.hidden.unique_id)
        show_under_node(report, cls.hidden.unique_id)
        return io.NodeOutput(control, {"loss": losses})


def complete(node: type[io.ComfyNode], own: dict) -> dict:
    """Return the values `own` of the inputs of `node`, with those that the API leaves out.

    Raises InputError for whole numbers out of range, which widgets check, and links do not.
    """
    values = {"validation_prompts": "", **{each.id: each.default for each in advanced_inputs()}, **own}
    for each in node.define_schema().inputs:
        if isinstance(each, io.Int.Input):
            check_whole(each.id, values[each.id], each.min, each.max)
            values[each.id] = int(values[each.id])
    return values


def check_sockets(**inputs) -> None:
    """Raise InputError for the first link that is not of its socket's type."""
    from .host.links import check_links

    optional = ("clip", "vae", "regularisation")
    sockets = {name: inputs[name] for name in ("model", "dataset")}
    check_links(**sockets, **{name: inputs[name] for name in optional if inputs.get(name) is not None})


NODES = [SanaNodesDataset, SanaNodesTrain, SanaNodesTrainControlNet]
