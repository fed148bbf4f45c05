"""The graph that a user builds by hand for each task: the obvious nodes and links, and the defaults of all widgets."""

import shutil

import pytest
import torch
import video_models
from expanded import WIDGETS, unfold
from pictures import write_pictures
from PIL import Image

pytestmark = pytest.mark.usefixtures("one_thread", "one_load")
# No default can know these files. Training for the default 500 steps takes too long.
FILES = {
    "SanaNodesLoader": {"model": "sana-tiny"},
    "LoadImage": {"image": "example.png"},
    "LoadImageMask": {"image": "example.png"},
    "SanaNodesLoraLoader": {"lora_name": "sana-posters-cyanotype (bundled)"},
    "SanaNodesControlNetLoader": {"control_net_name": "sana-posters-edges (bundled)"},
    "SanaNodesTrain": {"steps": 2},
    "SanaNodesTrainControlNet": {"steps": 2},
}
# These files belong to the demo model.
DEMO = {"model": "sana-posters (bundled)"}
CLIP, VAE = ["load", 1], ["load", 2]
CONDITIONING = {"positive": ["positive", 0], "negative": ["negative", 0]}
IMAGE = {
    "load": ("SanaNodesLoader", {}),
    "positive": ("SanaNodesTextEncode", {"clip": CLIP}),
    "negative": ("SanaNodesTextEncode", {"clip": CLIP}),
    "empty": ("SanaNodesEmptyLatent", {}),
    "sample": ("SanaNodesSampler", {"model": ["load", 0], **CONDITIONING, "latent_image": ["empty", 0]}),
    "decode": ("SanaNodesDecode", {"samples": ["sample", 0], "vae": VAE}),
    "save": ("SaveImage", {"images": ["decode", 0]}),
}
SIZED = {**IMAGE, "empty": ("SanaNodesEmptyLatent", {"model": ["load", 0]})}
OWN_IMAGE = {
    **{name: node for name, node in IMAGE.items() if name != "empty"},
    "image": ("LoadImage", {}),
    "encode": ("VAEEncode", {"pixels": ["image", 0], "vae": VAE}),
}


def sampled(graph, name="sample", **links):
    """`graph` with other links of its node `name`."""
    kind, inputs = graph[name]
    return {**graph, name: (kind, {**inputs, **links})}


GRAPHS = {
    "text to image": IMAGE,
    "text to image at the model's size": SIZED,
    "image to image": sampled(OWN_IMAGE, latent_image=["encode", 0]),
    "inpaint": sampled(
        {**OWN_IMAGE, "masked": ("SetLatentNoiseMask", {"samples": ["encode", 0], "mask": ["image", 1]})},
        latent_image=["masked", 0],
    ),
    "LoRA": sampled(
        {
            **SIZED,
            "load": ("SanaNodesLoader", DEMO),
            "lora": ("SanaNodesLoraLoader", {"model": ["load", 0], "clip": CLIP}),
        },
        model=["lora", 0],
    ),
    "ControlNet": sampled(
        {
            **SIZED,
            "load": ("SanaNodesLoader", DEMO),
            "image": ("LoadImage", {}),
            "canny": ("Canny", {"image": ["image", 0]}),
            "control": ("SanaNodesControlNetLoader", {}),
            "apply": (
                "ControlNetApplyAdvanced",
                {**CONDITIONING, "control_net": ["control", 0], "image": ["canny", 0], "vae": VAE},
            ),
        },
        positive=["apply", 0],
        negative=["apply", 1],
    ),
    "second pass": {
        **SIZED,
        "upscale": ("LatentUpscaleBy", {"samples": ["sample", 0]}),
        "second": (SIZED["sample"][0], {**SIZED["sample"][1], "latent_image": ["upscale", 0]}),
        "decode": ("SanaNodesDecode", {"samples": ["second", 0], "vae": VAE}),
    },
    "batch": {
        **{name: node for name, node in SIZED.items() if name not in ("sample", "decode")},
        "positive": ("SanaNodesPromptList", {"clip": CLIP}),
        "batch": (
            "SanaNodesBatchSampler",
            {"model": ["load", 0], **CONDITIONING, "latent_image": ["empty", 0], "vae": VAE},
        ),
        "save": ("SaveImage", {"images": ["batch", 1]}),
    },
    "Sprint": {
        **SIZED,
        "load": ("SanaNodesLoader", {"model": "sprint"}),
        "sample": (
            "SanaNodesSprint",
            {"model": ["load", 0], "positive": ["positive", 0], "latent_image": ["empty", 0]},
        ),
    },
    "training": sampled(
        {
            **SIZED,
            "data": ("SanaNodesDataset", {"folder": "controlled"}),
            "train": ("SanaNodesTrain", {"model": ["load", 0], "dataset": ["data", 0]}),
        },
        model=["train", 2],
    ),
    "training of a ControlNet": {
        "load": ("SanaNodesLoader", DEMO),
        "data": ("SanaNodesDataset", {"folder": "controlled"}),
        "train": ("SanaNodesTrainControlNet", {"model": ["load", 0], "dataset": ["data", 0]}),
    },
    "video": {
        **{name: IMAGE[name] for name in ("positive", "negative", "sample")},
        "load": ("SanaNodesLoader", {"model": "video-480p"}),
        "empty": ("SanaNodesVideoLatent", {"model": ["load", 0]}),
        "decode": ("VAEDecode", {"samples": ["sample", 0], "vae": VAE}),
        "create": ("CreateVideo", {"images": ["decode", 0]}),
        "save": ("SaveVideo", {"video": ["create", 0]}),
    },
}


def first_value(kind, *options):
    """The value that the canvas gives a widget of a new node."""
    info = options[0] if options else {}
    if "default" in info:
        return info["default"]
    choices = kind if isinstance(kind, list) else info.get("options")
    if choices:
        return choices[0]["key"] if isinstance(choices[0], dict) else choices[0]
    return {"STRING": "", "BOOLEAN": False}.get(kind, 0)


def from_defaults(host, graph):
    """`graph` with the default of each widget, as the canvas queues it."""
    built = {}
    for name, (kind, inputs) in graph.items():
        schema = host.nodes.NODE_CLASS_MAPPINGS[kind].INPUT_TYPES()
        fields = unfold({**schema.get("required", {}), **schema.get("optional", {})})
        widgets = {
            field: first_value(*options)
            for field, options in fields.items()
            if isinstance(options[0], list) or options[0] in WIDGETS
        }
        built[name] = (kind, {**widgets, **FILES.get(kind, {}), **inputs})
    return built


@pytest.fixture
def files(host, variants, checkpoint):
    """An image of a usual size with a mask, images to train on, and a video model."""
    folder = host.models.parent / "input"
    folder.mkdir(exist_ok=True)
    photo = Image.linear_gradient("L").resize((300, 200))
    Image.merge("RGBA", [photo] * 4).save(folder / "example.png")
    write_pictures(folder / "controlled", 3, controls=True)
    video = video_models.save_folder("480p", host.models / "diffusers" / "video-480p")
    yield
    (folder / "example.png").unlink()
    for path in (folder / "controlled", video, *(host.output / name for name in ("sana_training", "loras", "video"))):
        shutil.rmtree(path, ignore_errors=True)


@pytest.mark.parametrize("task", GRAPHS)
def test_a_graph_of_defaults_runs(host, files, task):
    graph = from_defaults(host, GRAPHS[task])
    if task == "video":
        # The default size and length take minutes on a CPU.
        graph["empty"][1].update(width=64, height=64, frames=5)
    last = {"batch": ["batch", 1], "training of a ControlNet": ["train", 1]}.get(task, ["decode", 0])
    result = host.run({**graph, "catch": ("Catch", {"value": last, "name": "result"})})["result"]
    assert len(result["loss"]) == 2 if isinstance(result, dict) else torch.isfinite(result).all()
