"""The templates: their nodes and columns, with the notes of notes.md. `scripts/lay_out.py` makes workflows/ of them."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import parts
from parts import DC_AE, GEMMA, INSIDE, K1, K2, K4, SPRINT, VIDEO_480, VIDEO_720
from setup import ROOT
from workflow import DOWNLOADS, NOTE, Columns, Graph, Node, Subgraph

# these need files that no switch replaces
DOWNLOADED = {"SANA Sprint", "SANA text to video", "SANA image to video", "SANA text to video 720p"}
# nodes that end a graph with an image on themselves
SHOWING = ("SaveImage", "SaveVideo", "PreviewImage", "SanaNodesPlan", "SanaNodesDoctor")
SOURCES = {"model": ("model", 0), "clip": ("model", 1), "vae": ("model", 2)}
FORMAT = {"format": "auto", "codec": "auto"}
COMPARED = ("Before and after", "before save"), ("Compare", "compare")
# pixels of the three nodes of a template that is one subgraph
WIDE = 430
NOTES = {
    "RUN": "Press **Run** when the files are in place. Without them, choose the demo model, *sana-posters "
    "(bundled)*, in **use**: it makes 512 px images on any computer.",
    "SLIDER": "**Compare Images** has its slider in Nodes 2.0 (in the settings).",
}


class Template(NamedTuple):
    """A workflow; `app` are the widgets that App Mode shows, (name of a node, widget)."""

    graph: Graph
    app: tuple[tuple[str, str], ...] = (("image", "prompt"), ("image", "seed"))


def note(name: str, more: str = "", width: int = 310) -> dict[str, Node]:
    """The note of a template, and `more` below it."""
    text = (ROOT / "scripts" / "notes.md").read_text(encoding="utf-8")
    (own,) = re.findall(rf"^# {name}\n(.*?)\n(?=# |\Z)", text, re.M | re.S)
    for key, value in NOTES.items():
        own = own.replace(key, value)
    return {"note": Node(NOTE, {"text": own.strip() + more}, None, width)}


def save(images: tuple[str, int], name: str, title: str | None = None, width: int | None = None) -> Node:
    return Node("SaveImage", {"images": images, "filename_prefix": name}, title, width)


def one_node(name: str, subgraph: Subgraph, prefix: str, more: str = "") -> dict[str, Template]:
    """A note, the subgraph with all that one sets, and the image."""
    shown = {"image": Node(subgraph, {}, None, WIDE), "save": save(("image", 0), prefix, None, WIDE)}
    nodes = {**note(name, more, WIDE), **shown}
    return {name: Template(Graph(nodes, (("", "note"), ("", "image"), ("", "save"))))}


def released(name: str, subgraph: Subgraph, prefix: str, model: str) -> dict[str, Template]:
    """As `one_node`, with a table of the files."""
    rows = [
        f"| [{file}]({DOWNLOADS[file].url}) | {DOWNLOADS[file].gigabytes} GB | {DOWNLOADS[file].folder} |"
        for file in (model, GEMMA, DC_AE)
    ]
    table = "\n".join(["| file | size | folder in models |", "|---|---|---|", *rows])
    return one_node(name, subgraph, prefix, f"\n\n{table}\n\nSave each file under the name in this table.")


def video(name: str, subgraph: Subgraph, folder: str, image: str | None = None) -> Template:
    """A note that says where the folder is, an image to begin with if there is one, the subgraph, and the video."""
    where = f"\n\nDownload the folder [{folder}]({DOWNLOADS[folder].url}), whole, into *models/diffusers*."
    first = {} if image is None else {"first": Node("LoadImage", {"image": image}, "First image", WIDE)}
    links = {} if image is None else {"first image": ("first", 0)}
    nodes = {
        **note(name, where, WIDE),
        **first,
        "video": Node(subgraph, links, None, WIDE),
        "save": Node("SaveVideo", {"video": ("video", 0), "filename_prefix": "video/sana", **FORMAT}, None, WIDE),
    }
    columns = ("", " ".join(("note", *first))), ("", "video"), ("", "save")
    return Template(Graph(nodes, columns), (("video", "prompt"), ("video", "seed")))


def before_and_after(before: tuple[str, int], after: tuple[str, int], name: str) -> dict[str, Node]:
    return {
        "before": Node("PreviewImage", {"images": before}, "Before"),
        "save": save(after, name, "After"),
        "compare": Node("ImageCompare", {"image_a": before, "image_b": after}, None, 330),
    }


def second_pass(name: str) -> Template:
    nodes = {
        **note(name),
        **parts.bundled(),
        "image": Node(parts.two_passes(), SOURCES),
        **before_and_after(("image", 0), ("image", 1), "sana-second-pass"),
    }
    return Template(Graph(nodes, (("", "note model"), ("Two passes", "image"), *COMPARED)))


def from_an_image(name: str, prompt: str, subgraph: Subgraph, prefix: str, **more: Node) -> Template:
    """An image, drawn first so that nothing must be uploaded, and what `subgraph` makes of it."""
    links = {"image": ("first", 0), **{key: (key, 0) for key in more}}
    nodes = {
        **note(name),
        **parts.bundled(),
        "first": Node(parts.first_image(prompt), SOURCES),
        **more,
        "image": Node(subgraph, {**SOURCES, **links}),
        **before_and_after(("first", 0), ("image", 0), prefix),
    }
    columns = ("", "note model"), ("First image", " ".join(("first", *more))), ("New image", "image"), *COMPARED
    return Template(Graph(nodes, columns))


def image_to_image(name: str) -> Template:
    first = "a flat drawing of a red balloon among green hills at noon"
    anew = parts.image_to_image("a watercolour of a red balloon on the sea at dusk", 0.85, 1)
    return from_an_image(name, first, anew, "sana-image")


def inpaint(name: str) -> Template:
    redrawn = parts.inpaint("a watercolour of a yellow boat on the left on the sea at dusk", 8)
    return from_an_image(name, parts.PROMPT, redrawn, "sana-inpaint", mask=Node(parts.left_half(), {}))


def controlnet(name: str) -> Template:
    drawn = "a flat drawing of a yellow car in the snow at noon"
    links = {"control_net": ("control", 0), "image": ("edges", 0)}
    nodes = {
        **note(name),
        **parts.bundled(),
        "control": Node("SanaNodesControlNetLoader", {"control_net_name": "sana-posters-edges (bundled)"}),
        "first": Node(parts.first_image(drawn), SOURCES),
        "edges": Node("Canny", {"image": ("first", 0), "low_threshold": 0.1, "high_threshold": 0.2}),
        "image": Node(parts.controlled("a watercolour of a purple car in the desert at dusk", 1), {**SOURCES, **links}),
        "seen": Node("PreviewImage", {"images": ("edges", 0)}, "Edges"),
        "save": save(("image", 0), "sana-controlnet"),
    }
    columns = ("", "note model"), ("First image", "first control"), ("Edges", "edges"), ("New image", "image")
    return Template(Graph(nodes, (*columns, ("Result", "seen save"))))


def lora(name: str) -> Template:
    own = {"lora_name": "sana-posters-cyanotype (bundled)", "strength_model": 1.0, "strength_clip": 1.0}
    links = {"model": ("model", 0), "model with LoRA": ("lora", 0), "clip": ("lora", 1), "vae": ("model", 2)}
    nodes = {
        **note(name),
        **parts.bundled(),
        "lora": Node("SanaNodesLoraLoader", {"model": ("model", 0), "clip": ("model", 1), **own}),
        "image": Node(parts.with_and_without("a cyanotype of two green trees in the snow at dawn"), links),
        **before_and_after(("image", 0), ("image", 1), "sana-lora"),
    }
    app = ("lora", "strength_model"), ("image", "prompt"), ("image", "seed")
    return Template(Graph(nodes, (("", "note model"), ("LoRA", "lora"), ("Image", "image"), *COMPARED)), app)


def train(name: str) -> Template:
    drawn = "a cyanotype of two green trees in the snow at dawn"
    settings = {
        "name": "cyanotype",
        "steps": 200,
        "learning_rate": 0.0015,
        "batch_size": 4,
        "validation_prompts": drawn,
    }
    links = {"model": ("model", 0), "model with LoRA": ("train", 2), "clip": ("model", 1), "vae": ("model", 2)}
    nodes = {
        **note(name),
        **parts.bundled(),
        "data": Node("SanaNodesDataset", {"folder": "cyanotypes (bundled)", "resolution": 512}),
        "train": Node("SanaNodesTrain", {"model": ("model", 0), "dataset": ("data", 0), **settings}),
        "sheet": Node("PreviewImage", {"images": ("data", 1)}, "Contact sheet"),
        "loss": Node("LossGraphNode", {"loss": ("train", 1), "filename_prefix": "sana-loss"}, "Loss"),
        "image": Node(parts.with_and_without(drawn), links),
        **before_and_after(("image", 0), ("image", 1), "sana-trained"),
    }
    columns = ("", "note model data"), ("Training", "train"), ("Image", "image sheet"), COMPARED[0]
    app = ("train", "name"), ("train", "steps"), ("image", "prompt")
    return Template(Graph(nodes, (*columns, ("Compare", "compare loss"))), app)


def many(name: str, nodes: dict[str, Node], prompts: str, columns: Columns, node: str) -> Template:
    """Prompts, one a line, on the bundled model; `prompts` are the nodes of their column."""
    model, clip, _ = INSIDE
    whole = {
        **note(name),
        **parts.bundled(),
        "prompt": parts.prompt_list(clip),
        "negative": parts.texts("", clip)["negative"],
        "empty": parts.empty(512, model)["empty"]._replace(width=200),
        **nodes,
    }
    app = ("prompt", "prompts"), (node, "seed")
    return Template(Graph(whole, (("", "note model"), ("Prompt", prompts), *columns)), app)


def prompt_list(name: str) -> Template:
    nodes = {
        "sampler": parts.sampler(("empty", 0), INSIDE[0]),
        "decode": parts.decode("sampler", INSIDE[2])._replace(width=235),
        "save": save(("decode", 0), "sana-list", None, 235),
    }
    columns = ("Size", "empty"), ("Sampling", "sampler"), ("Decode", "decode"), ("Result", "save")
    made = many(name, nodes, "prompt negative", columns, "sampler")
    made.graph.nodes["empty"].inputs["batch_size"] = ("prompt", 1)
    return made


def batch(name: str) -> Template:
    nodes = {"batch": parts.batch_sampler(), "save": save(("batch", 1), "sana-batch")}
    return many(name, nodes, "prompt negative empty", (("Sampling", "batch"), ("Result", "save")), "batch")


def best_of_many(name: str) -> Template:
    nodes = {
        **note(name),
        "image": Node(parts.best_of_many(), {}, None, 330),
        "sheet": Node("PreviewImage", {"images": ("image", 1)}, "All images"),
        "save": save(("image", 0), "sana-best"),
    }
    return Template(Graph(nodes, (("", "note"), ("Images", "image"), ("Result", "sheet save"))))


def custom_sampling(name: str) -> Template:
    model, clip, vae = INSIDE
    guided = {"model": ("guidance", 0)}
    conditioning = {"positive": ("prompt", 0), "negative": ("negative", 0)}
    links = {"noise": ("noise", 0), "guider": ("guider", 0), "sampler": ("select", 0), "sigmas": ("sigmas", 0)}
    nodes = {
        "guidance": Node(parts.guidance(), {"model": model}),
        **parts.texts("a line drawing of a yellow house in the desert at dawn", clip),
        **parts.empty(512, model),
        "guider": Node("CFGGuider", {**guided, **conditioning, "cfg": 4.5}),
        "sigmas": Node("SanaNodesScheduler", {**guided, "sampler": "flow_dpmpp_2m", "steps": 20}),
        "noise": Node("RandomNoise", {"noise_seed": 0}),
        "select": Node("SanaNodesSamplerSelect", {"sampler": "flow_dpmpp_2m"}),
        "sampler": Node("SamplerCustomAdvanced", {**links, "latent_image": ("empty", 0)}, "Sampler"),
        "decode": parts.decode("sampler", vae),
        "save": save(("decode", 0), "sana-custom"),
    }
    narrow = {key: node._replace(width=242) for key, node in nodes.items()}
    columns = (
        ("", "note model"),
        ("Prompt", "guidance prompt negative"),
        ("Settings", "guider sigmas noise select empty"),
        ("Sampling", "sampler"),
        ("Decode", "decode"),
        ("Result", "save"),
    )
    app = ("prompt", "text"), ("noise", "noise_seed")
    return Template(Graph({**note(name), **parts.bundled(), **narrow}, columns), app)


def gemma(name: str) -> Template:
    asked: dict[str, Any] = {"prompt": "a watercolour of a", "max_length": 16, "use_default_template": False}
    asked |= {"sampling_mode": "on", "sampling_mode.seed": 4}
    nodes = {
        **note(name),
        **parts.bundled(),
        "writer": Node("TextGenerate", {"clip": ("model", 1), **asked}, "Gemma writes the prompt"),
        "image": Node(parts.first_image(""), {**SOURCES, "prompt": ("writer", 0)}, "Image of the prompt"),
        "written": Node("PreviewAny", {"source": ("writer", 0)}, "What it wrote"),
        "save": save(("image", 0), "sana-gemma"),
    }
    columns = ("", "note model"), ("Prompt", "writer"), ("Image", "written image"), ("Result", "save")
    return Template(Graph(nodes, columns), (("writer", "prompt"), ("image", "seed")))


def cards(name: str) -> Template:
    wanted = {"0.6B": 1024, "1.6B": 1024, "1.5-4.8B": 1024, "4K": 4096}
    nodes = {
        variant: Node("SanaNodesPlan", {"variant": variant.replace("4K", "1.6B"), "width": side, "height": side})
        for variant, side in wanted.items()
    }
    return Template(Graph({**note(name), **nodes}, (("", "note"), ("", "0.6B 1.6B"), ("", "1.5-4.8B 4K"))), ())


def doctor(name: str) -> Template:
    report = Node("PreviewAny", {"source": ("doctor", 0)}, "Report", 670, 700)
    nodes = {**note(name), "doctor": Node("SanaNodesDoctor", {}), "report": report}
    return Template(Graph(nodes, (("", "note doctor"), ("", "report"))), (("doctor", "files"),))


def templates() -> dict[str, Template]:
    """Return the templates by the name that the browser shows, which is that of the file."""
    drawing = parts.text_to_image
    strips = {"method": "strips", "budget_gb": 2.0}
    others = {
        "SANA second pass": second_pass,
        "SANA image to image": image_to_image,
        "SANA inpaint": inpaint,
        "SANA LoRA": lora,
        "SANA train a LoRA": train,
        "SANA ControlNet": controlnet,
        "SANA prompt list": prompt_list,
        "SANA batch on all GPUs": batch,
        "SANA best of many": best_of_many,
        "SANA custom sampling": custom_sampling,
        "SANA Gemma writes the prompt": gemma,
        "SANA best settings for this card": cards,
        "SANA check this computer": doctor,
    }
    large = parts.video("SANA text to video 720p", VIDEO_720, (1280, 704), parts.VIDEO_PROMPT)
    videos: dict[str, tuple] = {
        "SANA text to video": (parts.text_to_video(), VIDEO_480),
        "SANA image to video": (parts.image_to_video(), VIDEO_480, "example.png"),
        "SANA text to video 720p": (large, VIDEO_720),
    }
    return {
        **one_node("SANA first image", parts.bundled_image(), "sana-first"),
        **released("SANA 1K", drawing("SANA text to image", K1, 1024), "sana-1024", K1),
        **released("SANA 2K", drawing("SANA 2K text to image", K2, 2048), "sana-2048", K2),
        **released("SANA 4K", drawing("SANA 4K text to image", K4, 4096), "sana-4096", K4),
        **released("SANA 4K on 8 GB", drawing("SANA 4K on 8 GB", K4, 4096, **strips), "sana-4096", K4),
        **released("SANA 4K on all GPUs", parts.on_all_gpus("SANA 4K on all GPUs", K4, 4096), "sana-4096", K4),
        **released("SANA 8K", parts.large_8k(), "sana-8192", K4),
        **released("SANA Sprint", parts.sprint(), "sana-sprint", SPRINT),
        **{name: made(name) for name, made in others.items()},
        **{name: video(name, *made) for name, made in videos.items()},
    }
