"""The templates: one for each task, with a note of notes.md. `scripts/lay_out.py` writes them to workflows/."""

from __future__ import annotations

import re
from typing import NamedTuple

import parts
from parts import DC_AE, GEMMA, INSIDE, MODEL_1K, MODEL_2K, MODEL_4K, MODEL_SPRINT, VIDEO_480, VIDEO_720
from setup import ROOT
from workflow import BYPASSED, CONTROL, MUTED, NOTE, Graph, Json, Node

from sana_core.checkpoints.generation import DOWNLOADS, download_command

# The demo model cannot replace the files of these templates.
DOWNLOADED = {"SANA Sprint", "SANA video from text or image"}
# Output nodes. App Mode shows their results.
SHOWING = ("SaveImage", "SaveVideo", "PreviewImage", "SanaNodesPlan", "SanaNodesDoctor")
# The lines of a tree of files: an entry, the last entry of a folder, and the space before the entries of a folder.
BRANCH, LAST, BESIDE = "\u251c\u2500\u2500 ", "\u2514\u2500\u2500 ", "\u2502   "


class Template(NamedTuple):
    graph: Graph
    # The widgets that App Mode shows: (name of a node, widget).
    app: tuple[tuple[str, str], ...] = (("prompt", "text"), ("sampler", "seed"))


def showing(workflow: Json) -> list[int]:
    """Return the ids of the nodes at which a run of the workflow ends."""
    return [node["id"] for node in workflow["nodes"] if node["type"] in SHOWING and node["mode"] == 0]


def note(template: str, *released: str, width: int = 310) -> Node:
    """The note of a template, with links to the released files that it needs and a tree of their folders."""
    text = (ROOT / "scripts" / "notes.md").read_text(encoding="utf-8")
    (words,) = re.findall(rf"^# {template}\n(.*?)\n(?=# |\Z)", text, re.M | re.S)
    for placeholder, folder in (("480P", VIDEO_480), ("720P", VIDEO_720)):
        # Nodes 2.0 draws code in a line with too little contrast, and does not break a block of code.
        words = words.replace(f"\n{placeholder}\n", f"\n> {download_command(folder)}\n")
    links = [f"- [{name}]({DOWNLOADS[name].url}), {DOWNLOADS[name].gigabytes} GB" for name in released]
    folders = list(dict.fromkeys(DOWNLOADS[name].folder for name in released))
    tree = ["", *links, "", "```", "ComfyUI/models/"] if released else []
    for folder in folders:
        names = [name for name in released if DOWNLOADS[name].folder == folder]
        branch, beside = (LAST, " " * len(BESIDE)) if folder == folders[-1] else (BRANCH, BESIDE)
        tree += [f"{branch}{folder}/", *(f"{beside}{LAST if name == names[-1] else BRANCH}{name}" for name in names)]
    return Node(NOTE, {"text": "\n".join([words.strip(), *tree, *(["```"] if released else [])])}, "Read me", width)


def save(images: tuple[str, int], prefix: str, title: str | None = None, width: int = 270) -> Node:
    # Two images that are compared are in one column.
    room = None if title is None else 220
    return Node("SaveImage", {"images": images, "filename_prefix": prefix}, title, width, room)


def own_image() -> dict[str, Node]:
    """An image of the user, in the size of the demo model. ComfyUI has this example in its input folder."""
    values = {"upscale_method": "lanczos", "megapixels": 0.25, "resolution_steps": 32}
    return {
        "own": Node("LoadImage", {"image": "example.png"}, "Your image"),
        "scale": Node("ImageScaleToTotalPixels", {"image": ("own", 0), **values}),
    }


def before(images: tuple[str, int], title: str = "Before") -> Node:
    return Node("PreviewImage", {"images": images}, title, room=220)


def randomized(nodes: dict[str, Node]) -> dict[str, Node]:
    """Let the seed change after each run, so that a second run gives another image."""
    nodes["sampler"].inputs[CONTROL] = "randomize"
    return nodes


def first_image(name: str) -> Template:
    nodes = {
        "note": note(name),
        "model": parts.demo_model(),
        **randomized(parts.image(parts.PROMPT, 512)),
        "save": save(("decode", 0), "sana-first", None, 330),
    }
    columns = "note | Model: model empty | Prompt: prompt negative | Sampling: sampler decode | save"
    return Template(Graph(nodes, columns))


def released(name: str) -> Template:
    nodes = {
        "note": note(name, MODEL_1K, MODEL_2K, GEMMA, DC_AE, width=430),
        **parts.files(MODEL_1K),
        "model": parts.switch(),
        **randomized(parts.image(parts.PROMPT)),
        "save": save(("decode", 0), "sana", None, 380),
    }
    # This column is the longest one.
    nodes["prompt"] = nodes["prompt"]._replace(room=90)
    columns = "note / Files: file gemma dc-ae | model / Prompt: prompt negative empty | Sampling: sampler decode | save"
    return Template(Graph(nodes, columns))


def large(name: str) -> Template:
    """4K, and a second pass to 8K that is muted."""
    nodes = {
        "note": note(name, MODEL_4K, GEMMA, DC_AE, width=430),
        **parts.files(MODEL_4K),
        "model": parts.switch(),
        "split": Node("SanaNodesSplitPicture", {"model": INSIDE[0], "devices": "all"}, mode=BYPASSED),
        **randomized(parts.image(parts.PROMPT)),
        "save": save(("decode", 0), "sana-4096", None, 250),
    }
    nodes["sampler"].inputs["model"] = ("split", 0)
    links = {"model": ("split", 0), "samples": ("sampler", 0), "vae": INSIDE[2]}
    conditioning = {"positive": ("prompt", 0), "negative": ("negative", 0)}
    nodes["second"] = Node(parts.second_pass(2.0), {**links, **conditioning}, width=250, mode=MUTED, room=120)
    nodes["save_8K"] = save(("second", 0), "sana-8192", None, 250)._replace(mode=MUTED, room=60)
    columns = (
        "note / Files: file gemma dc-ae | model prompt negative empty | 4K: split sampler decode | save | "
        "8K: second save_8K"
    )
    return Template(Graph(nodes, columns))


def sprint(name: str) -> Template:
    prompt = parts.texts("a lighthouse on a cliff at dusk, oil painting", ("gemma", 0))["prompt"]
    links = {"model": ("file", 0), "positive": ("prompt", 0), "latent_image": ("empty", 0)}
    values = {"seed": 0, "steps": 2, "guidance": 4.5, "strength": 1.0}
    nodes = {
        "note": note(name, MODEL_SPRINT, GEMMA, DC_AE, width=430),
        **parts.files(MODEL_SPRINT),
        "prompt": prompt,
        "size": Node("SanaNodesResolution", {"size": "auto", "ratio": "1:1", "model": ("file", 0)}),
        "empty": parts.empty(parts.MODEL_SIZE, ("file", 0)),
        "sampler": Node("SanaNodesSprint", {**links, **values}, width=325),
        "decode": parts.decode("sampler", ("dc-ae", 0)),
        "save": save(("decode", 0), "sana-sprint", None, 400),
    }
    nodes["empty"].inputs.update(width=("size", 0), height=("size", 1))
    columns = "note / Files: file gemma dc-ae | Prompt: prompt size empty | Sampling: sampler decode | save"
    return Template(Graph(randomized(nodes), columns))


def image_to_image(name: str) -> Template:
    """Image to image, and an inpainting of the left half of the image."""
    nodes = {
        "note": note(name, width=300),
        "model": parts.demo_model()._replace(width=300),
        **own_image(),
        "encode": Node("VAEEncode", {"pixels": ("scale", 0), "vae": INSIDE[2]}),
        **parts.texts("a flat drawing of a red balloon among green hills at noon"),
        "sampler": parts.sampler(("encode", 0), seed=1, denoise=0.85),
        "decode": Node("VAEDecode", {"samples": ("sampler", 0), "vae": INSIDE[2]}),
        "save": save(("decode", 0), "sana-i2i", "Image to image"),
        "inpaint_prompt": parts.texts("a watercolour of a yellow boat on the left on the sea at dusk")["prompt"],
        "mask": Node(parts.left_half(), {}),
        "masked": Node("SetLatentNoiseMask", {"samples": ("encode", 0), "mask": ("mask", 0)}),
        "soft": Node("DifferentialDiffusion", {"model": INSIDE[0], "strength": 1.0}),
        "inpaint": parts.sampler(("masked", 0), ("soft", 0), positive=("inpaint_prompt", 0), seed=8),
        "inpainted": Node("VAEDecode", {"samples": ("inpaint", 0), "vae": INSIDE[2]}),
        "save_inpainted": save(("inpainted", 0), "sana-fill", "Inpaint"),
    }
    columns = (
        "note model negative | Image: own scale encode | Image to image: prompt sampler decode | "
        "Inpaint: mask inpaint_prompt masked soft | Inpaint: inpaint inpainted | save save_inpainted"
    )
    # Six columns have to be narrow.
    for names, width, room in (
        ("negative sampler decode inpaint inpainted", 252, None),
        ("prompt inpaint_prompt", 225, 100),
        ("masked soft mask", 225, None),
        ("save save_inpainted", 231, 225),
    ):
        for node in names.split():
            nodes[node] = nodes[node]._replace(width=width, room=room)
    return Template(Graph(nodes, columns))


def second_pass(name: str) -> Template:
    nodes = {
        "note": note(name),
        "model": parts.demo_model(),
        **parts.image(parts.PROMPT, seed=3),
        "before": before(("decode", 0)),
        "upscale": Node("LatentUpscaleBy", {"samples": ("sampler", 0), "upscale_method": "bislerp", "scale_by": 1.5}),
        "second": parts.sampler(("upscale", 0), title="Second pass", seed=3, denoise=0.35),
        "decode_second": parts.decode("second"),
        "save": save(("decode_second", 0), "sana-second-pass", "After"),
    }
    columns = (
        "note model | Prompt: prompt negative empty | First pass: sampler decode | "
        "Second pass: upscale second decode_second | before save"
    )
    return Template(Graph(nodes, columns))


def controlnet(name: str) -> Template:
    links = {"positive": ("prompt", 0), "negative": ("negative", 0), "control_net": ("control", 0), "vae": INSIDE[2]}
    values = {"strength": 1.0, "start_percent": 0.0, "end_percent": 1.0}
    applied = {"positive": ("apply", 0), "negative": ("apply", 1)}
    nodes = {
        "note": note(name, width=380),
        "model": parts.demo_model(),
        "control": Node("SanaNodesControlNetLoader", {"control_net_name": "sana-posters-edges (bundled)"}),
        **own_image(),
        "canny": Node("Canny", {"image": ("scale", 0), "low_threshold": 0.1, "high_threshold": 0.2}),
        "edges": Node("PreviewImage", {"images": ("canny", 0)}, "Edges"),
        **parts.image("a watercolour of a purple car in the desert at dusk", seed=1, **applied),
        "apply": Node("ControlNetApplyAdvanced", {**links, "image": ("canny", 0), **values}),
        "save": save(("decode", 0), "sana-controlnet", "Result"),
    }
    # The newest frontend needs the width for the name of the image.
    nodes["own"] = nodes["own"]._replace(width=295)
    columns = (
        "note / model control empty | Image: own scale canny | edges / Prompt: prompt negative | "
        "ControlNet: apply sampler | decode save"
    )
    return Template(Graph(nodes, columns))


def lora(name: str) -> Template:
    """The same seed without and with a LoRA."""
    values = {"lora_name": "sana-posters-cyanotype (bundled)", "strength_model": 1.0, "strength_clip": 1.0}
    nodes = {
        "note": note(name, width=380),
        "model": parts.demo_model(),
        "lora": Node("SanaNodesLoraLoader", {"model": INSIDE[0], "clip": INSIDE[1], **values}),
        **parts.image("a cyanotype of two green trees in the snow at dawn"),
        "with_lora": parts.sampler(("empty", 0), ("lora", 0)),
        "decode_lora": parts.decode("with_lora"),
        "before": before(("decode", 0), "Without the LoRA"),
        "save": save(("decode_lora", 0), "sana-lora", "With the LoRA"),
    }
    columns = (
        "note model lora | Prompt: prompt negative empty | Without the LoRA: sampler decode | "
        "With the LoRA: with_lora decode_lora | before save"
    )
    return Template(Graph(nodes, columns), (("lora", "strength_model"), ("prompt", "text"), ("sampler", "seed")))


def train(name: str) -> Template:
    prompt = "a cyanotype of two green trees in the snow at dawn"
    settings = {
        "name": "cyanotype",
        "steps": 200,
        "learning_rate": 0.0015,
        "batch_size": 4,
        "validation_prompts": "a cyanotype of a tree",
    }
    nodes = {
        "note": note(name),
        "model": parts.demo_model(),
        "data": Node("SanaNodesDataset", {"folder": "cyanotypes (bundled)", "resolution": 512}),
        "sheet": Node("PreviewImage", {"images": ("data", 1)}, "Contact sheet"),
        "train": Node("SanaNodesTrain", {"model": INSIDE[0], "dataset": ("data", 0), **settings}, width=340),
        **parts.image(prompt),
        "loss": Node("LossGraphNode", {"loss": ("train", 1), "filename_prefix": "sana-loss"}, "Loss", room=210),
        "save": save(("decode", 0), "sana-trained", "Image with the LoRA")._replace(room=210),
    }
    nodes["sampler"].inputs["model"] = ("train", 2)
    columns = (
        "note model data | Training: sheet train | Prompt: prompt negative empty | Sampling: sampler decode | save loss"
    )
    return Template(Graph(nodes, columns), (("train", "name"), ("train", "steps"), ("prompt", "text")))


def batch(name: str) -> Template:
    nodes = {
        "note": note(name),
        "model": parts.demo_model(),
        **parts.texts(""),
        "prompt": parts.prompt_list(),
        "empty": parts.empty(parts.MODEL_SIZE),
        "sampler": parts.batch_sampler(2, vae=INSIDE[2]),
        "save": save(("sampler", 1), "sana-batch", None, 400),
    }
    columns = "note model | Prompt: prompt negative empty | Sampling: sampler | save"
    return Template(Graph(randomized(nodes), columns), (("prompt", "prompts"), ("sampler", "seed")))


def video(name: str) -> Template:
    saved = {"video": ("video", 0), "filename_prefix": "video/sana", "format": "auto", "codec": "auto"}
    nodes = {
        "note": note(name, width=400),
        **randomized(parts.video_nodes(("first_image", 0))),
        "first_image": Node("LoadImage", {"image": "example.png"}, "First image", 285, mode=BYPASSED),
        "save": Node("SaveVideo", saved, width=285, room=130),
        "second": Node(parts.video_2(), {"first image": ("first_image", 0)}, width=325, room=10, mode=MUTED),
    }
    saved_2 = {**saved, "video": ("second", 0), "filename_prefix": "video/sana-2.0"}
    nodes["save_2"] = Node("SaveVideo", saved_2, "Save SANA-Video 2.0", 285, 40, MUTED)
    for node in ("prompt", "negative"):
        nodes[node] = nodes[node]._replace(room=260)
    columns = (
        "note / model | First image and size: first_image empty | Prompt: prompt negative | "
        "sampler decode / SANA-Video 2.0: second | video save save_2"
    )
    return Template(Graph(nodes, columns))


def check(name: str) -> Template:
    nodes = {
        "note": note(name),
        "doctor": Node("SanaNodesDoctor", {}),
        "plan": Node("SanaNodesPlan", {"variant": "recommended"}, width=440),
        # Its text is Markdown, for an issue on GitHub.
        "report": Node("PreviewAny", {"source": ("doctor", 0)}, "Text for a bug report", 440, 180),
    }
    columns = "note doctor | plan report"
    return Template(Graph(nodes, columns), (("doctor", "files"),))


def templates() -> dict[str, Template]:
    """Return the templates by the name of their file, which the template browser shows."""
    functions = {
        "SANA 1 first image": first_image,
        "SANA 1K and 2K": released,
        "SANA 4K and 8K": large,
        "SANA Sprint": sprint,
        "SANA image to image and inpaint": image_to_image,
        "SANA second pass": second_pass,
        "SANA ControlNet": controlnet,
        "SANA LoRA": lora,
        "SANA train a LoRA": train,
        "SANA batch on all GPUs": batch,
        "SANA video from text or image": video,
        "SANA check this computer": check,
    }
    return {name: function(name) for name, function in functions.items()}
