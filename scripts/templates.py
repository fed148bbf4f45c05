"""What the templates are: nodes, values, notes and groups. `scripts/lay_out.py` makes workflows/ of it."""

from __future__ import annotations

from typing import Any, NamedTuple

BUNDLED = "sana-scenes (bundled)"
OWN = "the loaders' files"
GEMMA, DC_AE = "gemma_2_2b_it_elm_bf16.safetensors", "dc-ae-f32c32-sana-1.1.safetensors"
# these need files that no switch replaces
DOWNLOADED = {"SANA Sprint"}
# nodes that end a graph with a picture on themselves
SHOWING = ("SaveImage", "PreviewImage", "SanaNodesPlan")
# one that the bundled model knows, and a released one draws as well
PROMPT = "a watercolour of a red lighthouse on the sea at dusk"
SNOW = "a flat drawing of a blue house in the snow at night"
LIST = "\n".join((PROMPT, SNOW, "a line drawing of a green tree among green hills at noon"))


class Node(NamedTuple):
    """A node: its class, the column of its group, its inputs (a link is (name of a node, output)), and its title."""

    kind: str
    group: str
    inputs: dict[str, Any]
    title: str | None = None
    bypassed: bool = False


class Template(NamedTuple):
    """A workflow. `note` stands beside it; `app` are the widgets that App Mode shows, (name of a node, widget)."""

    nodes: dict[str, Node]
    note: str
    app: tuple[tuple[str, str], ...] = (("prompt", "text"), ("sampler", "seed"))


def bundled() -> dict[str, Node]:
    """The loader of a whole model, with the bundled one chosen."""
    own = {"model": BUNDLED, "weight_dtype": "default", "resolution": "auto"}
    return {"model": Node("SanaNodesLoader", "Model", own)}


def switched(file: str) -> dict[str, Node]:
    """Loaders of three files, and the switch to the bundled model behind them."""
    own = {"model_name": file, "weight_dtype": "default", "resolution": "auto"}
    links = {"model": ("file", 0), "clip": ("gemma", 0), "vae": ("dc-ae", 0)}
    return {
        "file": Node("SanaNodesModelLoader", "Files", own),
        "gemma": Node("SanaNodesTextEncoderLoader", "Files", {"text_encoder_name": GEMMA}),
        "dc-ae": Node("SanaNodesVAELoader", "Files", {"vae_name": DC_AE}),
        "model": Node("SanaNodesModelSwitch", "Model", {"use": OWN, **links}),
    }


def prompts(positive: str = PROMPT, clip: tuple[str, int] = ("model", 1)) -> dict[str, Node]:
    text = {"clip": clip, "text": positive, "instruction": True}
    none = {"clip": clip, "text": "", "instruction": False}
    return {
        "prompt": Node("SanaNodesTextEncode", "Prompt", text, "Prompt"),
        "negative": Node("SanaNodesTextEncode", "Prompt", none, "Negative prompt"),
    }


def empty(side: int = 1024, model: tuple[str, int] | None = ("model", 0)) -> dict[str, Node]:
    """The empty latent, which with `model` has that one's size."""
    link = {"model": model} if model else {}
    return {
        "empty": Node("SanaNodesEmptyLatent", "Prompt", {"width": side, "height": side, "batch_size": 1, **link}),
    }


def sampler(latent: str = "empty", model: tuple[str, int] = ("model", 0), **own: Any) -> Node:
    group, title = own.pop("group", "Picture"), own.pop("title", None)
    links = {"model": model, "positive": ("prompt", 0), "negative": ("negative", 0), "latent_image": (latent, 0)}
    values = {"seed": 0, "steps": 20, "guidance": 4.5, "sampler": "flow_dpmpp_2m", "denoise": 1.0}
    return Node("SanaNodesSampler", group, {**links, **values, "model_defaults": False, **own}, title)


def result(name: str, samples: str = "sampler", method: str = "auto", budget: float = 0.0) -> dict[str, Node]:
    decode = {"samples": (samples, 0), "vae": ("model", 2), "method": method, "budget_gb": budget, "devices": "one"}
    return {
        "decode": Node("SanaNodesDecode", "Result", decode),
        "save": Node("SaveImage", "Result", {"images": ("decode", 0), "filename_prefix": name}),
    }


def picture_of_size(file: str, side: int, note: str, **decode: Any) -> Template:
    """A released model at its own size, with the plan of the memory that it takes."""
    nodes = {
        **switched(file),
        **prompts(),
        **empty(side),
        "sampler": sampler(),
        **result(f"sana-{side}", **decode),
        **plan("1.6B", side),
    }
    return Template(nodes, note, (("model", "use"), ("prompt", "text"), ("sampler", "seed")))


def shared(file: str, side: int, note: str) -> Template:
    """A picture that all GPUs sample and decode together."""
    alone = picture_of_size(file, side, note)
    split = Node("SanaNodesSplitPicture", "Model", {"model": ("model", 0), "devices": "all"})
    nodes = {**alone.nodes, "split": split}
    nodes["sampler"].inputs["model"] = ("split", 0)
    nodes["decode"].inputs["devices"] = "all"
    return alone._replace(nodes=nodes)


def plan(variant: str, side: int, name: str = "plan", group: str = "Memory") -> dict[str, Node]:
    sizes = {"variant": variant, "width": side, "height": side, "batch_size": 1}
    return {name: Node("SanaNodesPlan", group, sizes)}


def plain(seed: int = 0, prompt: str = PROMPT) -> dict[str, Node]:
    return {**bundled(), **prompts(prompt), **empty(), "sampler": sampler(seed=seed)}


TRY = "Without the files, choose *sana-scenes (bundled)* in SANA Model Switch: it draws at 256 px on any computer."


def second_pass(note: str, scale: float, denoise: float, nodes: dict[str, Node], **decode: Any) -> Template:
    upscale = {"samples": ("sampler", 0), "upscale_method": "bislerp", "scale_by": scale}
    nodes = {
        **nodes,
        "upscale": Node("LatentUpscaleBy", "Second pass", upscale),
        "second": sampler("upscale", group="Second pass", title="Second pass", denoise=denoise),
        **result("sana-second-pass", "second", **decode),
    }
    return Template(nodes, note)


def image_to_image() -> Template:
    nodes = plain(prompt="a flat drawing of a red balloon among green hills at noon")
    text = "a flat drawing of a red balloon among green hills at night"
    again = {"clip": ("model", 1), "text": text, "instruction": True}
    nodes |= {
        "picture": Node("SanaNodesDecode", "Picture", {"samples": ("sampler", 0), "vae": ("model", 2)}, "The picture"),
        "encode": Node("VAEEncode", "Drawn anew", {"pixels": ("picture", 0), "vae": ("model", 2)}),
        "wanted": Node("SanaNodesTextEncode", "Drawn anew", again, "What it should become"),
        "anew": sampler("encode", group="Drawn anew", denoise=0.85, positive=("wanted", 0), seed=1),
        **result("sana-image", "anew"),
    }
    note = (
        "A picture is encoded, and drawn anew from 0.85 of noise by another prompt. Put **Load Image** in the "
        "place of the three nodes that draw the first one; a lower **denoise** keeps more of it."
    )
    return Template(nodes, note, (("wanted", "text"), ("anew", "denoise"), ("anew", "seed")))


def inpaint() -> Template:
    text = "a watercolour of a yellow boat on the left on the sea at dusk"
    anew = {"clip": ("model", 1), "text": text, "instruction": True}
    half = {"value": 1.0, "width": 128, "height": 256}
    join = {"destination": ("keep", 0), "source": ("half", 0), "x": 0, "y": 0, "operation": "add"}
    nodes = plain() | {
        "keep": Node("SolidMask", "Mask", {"value": 0.0, "width": 256, "height": 256}, "Keep"),
        "half": Node("SolidMask", "Mask", half, "Draw anew: the left half"),
        "mask": Node("MaskComposite", "Mask", join),
        "masked": Node("SetLatentNoiseMask", "Drawn anew", {"samples": ("sampler", 0), "mask": ("mask", 0)}),
        "soft": Node("DifferentialDiffusion", "Drawn anew", {"model": ("model", 0), "strength": 1.0}),
        "there": Node("SanaNodesTextEncode", "Drawn anew", anew, "What to draw there"),
        "anew": sampler("masked", ("soft", 0), group="Drawn anew 2", positive=("there", 0), seed=5),
        **result("sana-inpaint", "anew"),
    }
    note = (
        "The left half of a picture is drawn anew and the rest stays. For a picture of your own, encode one from "
        "**Load Image** and take its mask."
    )
    return Template(nodes, note, (("there", "text"), ("anew", "seed")))


def many(kind: str) -> Template:
    texts = {"clip": ("model", 1), "prompts": LIST, "instruction": True}
    nodes = {
        **bundled(),
        "prompt": Node("SanaNodesPromptList", "Prompt", texts, "Prompts, one a line"),
        "negative": prompts()["negative"],
        **empty(),
    }
    if kind == "list":
        nodes["empty"].inputs["batch_size"] = ("prompt", 1)
        nodes |= {"sampler": sampler(), **result("sana-list")}
        note = "Three prompts, drawn together in one batch. One line more is one picture more: the list sets the batch."
        return Template(nodes, note, (("prompt", "prompts"), ("sampler", "seed")))
    links = {
        "model": ("model", 0),
        "positive": ("prompt", 0),
        "negative": ("negative", 0),
        "latent_image": ("empty", 0),
    }
    values = {"count": 2, "seed": 0, "steps": 20, "guidance": 4.5, "sampler": "flow_dpmpp_2m", "devices": "all"}
    batch = {**links, **values, "chunk": 0, "vae": ("model", 2)}
    nodes |= {
        "batch": Node("SanaNodesBatchSampler", "Picture", batch),
        "save": Node("SaveImage", "Result", {"images": ("batch", 1), "filename_prefix": "sana-batch"}),
    }
    note = (
        "Two pictures of each of three prompts, shared out over all GPUs of this machine. A picture depends on "
        "prompt and seed alone, not on the GPU that draws it."
    )
    return Template(nodes, note, (("prompt", "prompts"), ("batch", "count"), ("batch", "seed")))


def custom_sampling() -> Template:
    model = ("interval", 0)
    links = {"noise": ("noise", 0), "guider": ("guider", 0), "sampler": ("select", 0), "sigmas": ("sigmas", 0)}
    guided = {"model": model, "positive": ("prompt", 0), "negative": ("negative", 0), "cfg": 4.5}
    schedule = {"model": model, "sampler": "flow_dpmpp_2m", "steps": 20, "denoise": 1.0}
    nodes = {
        **bundled(),
        **prompts("a line drawing of a yellow house in the desert at dawn"),
        **empty(),
        "pag": Node("SanaNodesPAG", "Guidance", {"model": ("model", 0), "scale": 1.0, "blocks": ""}),
        "interval": Node("SanaNodesGuidanceInterval", "Guidance", {"model": ("pag", 0), "start": 0.0, "end": 0.8}),
        "guider": Node("CFGGuider", "Guidance", guided),
        "noise": Node("RandomNoise", "Sampling", {"noise_seed": 0}),
        "select": Node("SanaNodesSamplerSelect", "Sampling", {"sampler": "flow_dpmpp_2m"}),
        "sigmas": Node("SanaNodesScheduler", "Sampling", schedule),
        "sampler": Node("SamplerCustomAdvanced", "Picture", {**links, "latent_image": ("empty", 0)}),
        **result("sana-custom"),
    }
    note = (
        "SANA's sampler and schedule in ComfyUI's SamplerCustomAdvanced, with perturbed attention. Guidance ends "
        "after 0.8 of the sampling, which saves a tenth of the time."
    )
    return Template(nodes, note, (("prompt", "text"), ("noise", "noise_seed")))


def gemma() -> Template:
    asked = {"clip": ("model", 1), "prompt": "a watercolour of a", "max_length": 16, "sampling_mode": "on"}
    more = {"temperature": 0.7, "top_k": 64, "top_p": 0.95, "min_p": 0.05, "repetition_penalty": 1.05, "seed": 4}
    asked |= {"thinking": False, "use_default_template": False}
    own = {**asked, **{f"sampling_mode.{name}": value for name, value in more.items()}}
    nodes = plain()
    nodes["prompt"].inputs["text"] = ("writer", 0)
    nodes |= {
        "writer": Node("TextGenerate", "Gemma", own, "Gemma writes the prompt"),
        "written": Node("PreviewAny", "Gemma", {"source": ("writer", 0)}, "What it wrote"),
        **result("sana-gemma"),
    }
    note = (
        "SANA's text encoder is the language model Gemma 2, and writes the prompt that it then encodes. The "
        "bundled one only goes on with the text; ask a released one in words, with **use_default_template** on "
        "and **max_length** 300: *Write one detailed prompt for a picture of a lighthouse in a storm. Answer "
        "with the prompt alone.*"
    )
    return Template(nodes, note, (("writer", "prompt"), ("sampler", "seed")))


def train() -> Template:
    drawn = "a cyanotype of a lighthouse on the sea at noon"
    settings = {
        "name": "cyanotype",
        "method": "lora",
        "rank": 16,
        "steps": 200,
        "learning_rate": 0.0015,
        "batch_size": 4,
        "validation_prompts": drawn,
        "checkpoint_gradients": False,
        "validate_every": 50,
    }
    links = {"model": ("model", 0), "dataset": ("data", 0)}
    nodes = {
        **bundled(),
        "data": Node("SanaNodesDataset", "Pictures", {"folder": "cyanotypes (bundled)", "resolution": 256}),
        "sheet": Node("PreviewImage", "Pictures", {"images": ("data", 1)}, "Contact sheet"),
        "train": Node("SanaNodesTrain", "Training", {**links, **settings}),
        "loss": Node("LossGraphNode", "Training 2", {"loss": ("train", 1), "filename_prefix": "sana-loss"}, "Loss"),
        **prompts(drawn),
        **empty(model=("train", 2)),
        "sampler": sampler(model=("train", 2), title="With the LoRA"),
        **result("sana-trained"),
    }
    note = (
        "A LoRA learns a style that the bundled model does not know, from twenty pictures, and the last nodes draw "
        "with it. For your own: pictures with captions (`cat.png`, `cat.txt`) in a folder in ComfyUI's `input`, a name "
        "of its own, resolution 1024, 500 steps, learning rate 0.0001, batch size 1; Cancel saves, and the same name "
        "goes on."
    )
    return Template(nodes, note, (("train", "name"), ("train", "steps"), ("prompt", "text")))


def lora() -> Template:
    own = {"model": ("model", 0), "clip": ("model", 1), "lora_name": "sana-scenes-cyanotype (bundled)"}
    nodes = {
        **bundled(),
        "lora": Node("SanaNodesLoraLoader", "Model", {**own, "strength_model": 1.0, "strength_clip": 1.0}),
        **prompts("a cyanotype of a house among green hills at noon", ("lora", 1)),
        **empty(model=("lora", 0)),
        "sampler": sampler(model=("lora", 0)),
        **result("sana-lora"),
    }
    note = (
        "The bundled LoRA gives the bundled model a fourth style, the blue of cyanotypes. For your own, put a file "
        "into models/loras and choose it there, with its model in SANA Loader. A line under the node says how much of "
        "the file fits the model."
    )
    return Template(nodes, note, (("lora", "strength_model"), ("prompt", "text"), ("sampler", "seed")))


def controlnet() -> Template:
    apply = {
        "positive": ("wanted", 0),
        "negative": ("negative", 0),
        "control_net": ("control", 0),
        "image": ("edges", 0),
        "vae": ("model", 2),
        "strength": 1.0,
        "start_percent": 0.0,
        "end_percent": 1.0,
    }
    again = {"clip": ("model", 1), "text": "a watercolour of a purple car in the desert at dusk", "instruction": True}
    nodes = plain(prompt="a flat drawing of a yellow car in the snow at noon") | {
        "picture": Node("SanaNodesDecode", "Picture", {"samples": ("sampler", 0), "vae": ("model", 2)}, "The picture"),
        "edges": Node("Canny", "Edges", {"image": ("picture", 0), "low_threshold": 0.1, "high_threshold": 0.2}),
        "seen": Node("PreviewImage", "Edges", {"images": ("edges", 0)}, "Edges"),
        "control": Node("SanaNodesControlNetLoader", "Edges", {"control_net_name": "sana-scenes-edges (bundled)"}),
        "wanted": Node("SanaNodesTextEncode", "Drawn anew", again, "What it should become"),
        "apply": Node("ControlNetApplyAdvanced", "Drawn anew", apply),
        "anew": sampler(group="Drawn anew", positive=("apply", 0), negative=("apply", 1), seed=1),
        **result("sana-controlnet", "anew"),
    }
    note = (
        "The edges of a picture decide where things stand, the prompt what they are. Put **Load Image** in the place "
        "of the nodes that draw the first one. The released ControlNet, *Sana_600M_1024px_ControlNet_HED.pth* with the "
        "0.6B model, learnt soft HED edges: the HED preprocessor of a ControlNet pack in the place of **Canny** "
        "follows it more closely."
    )
    return Template(nodes, note, (("wanted", "text"), ("anew", "seed")))


def sprint() -> Template:
    links = {"model": ("file", 0), "positive": ("prompt", 0), "latent_image": ("empty", 0)}
    values = {"seed": 0, "steps": 2, "guidance": 4.5, "strength": 1.0}
    shape = {"size": "1024", "ratio": "1.0"}
    files = switched("Sana_Sprint_1.6B_1024px.safetensors")
    del files["model"]
    nodes = {
        **files,
        "prompt": prompts("a lighthouse on a cliff at dusk, oil painting", ("gemma", 0))["prompt"],
        "shape": Node("SanaNodesResolution", "Prompt", shape),
        "empty": Node(
            "SanaNodesEmptyLatent", "Prompt", {"width": ("shape", 0), "height": ("shape", 1), "batch_size": 1}
        ),
        "sampler": Node("SanaNodesSprint", "Picture", {**links, **values}),
        **result("sana-sprint"),
    }
    nodes["decode"].inputs["vae"] = ("dc-ae", 0)
    note = (
        "SANA-Sprint draws in one, two or four steps, and needs no negative prompt. Its guidance is an input of "
        "the model and costs no time."
    )
    return Template(nodes, note)


def cards() -> Template:
    wanted = {"0.6B": 1024, "1.6B": 1024, "1.5-4.8B": 1024, "1.6B 4K": 4096}
    nodes: dict[str, Node] = {}
    for name, side in wanted.items():
        nodes |= plan(name.partition(" ")[0], side, name, f"SANA {name}, {side} px")
    note = (
        "The red line is this computer's card: a stage whose bar ends before it fits, one after another. Below "
        "**8 GB** take 0.6B or 1.6B with *fp8* in weight_dtype; with **8 GB** 1.6B, up to 4K by strips; with "
        "**12 GB** and more 1.6B at every size, and SANA-1.5 4.8B in fp8; with **16 GB** and more 4.8B as it is."
    )
    return Template(nodes, note, ())


def templates() -> dict[str, Template]:
    """Return the templates by the name that the browser shows, which is that of the file."""
    lands = "The size follows the model of SANA Model Switch, in the shape of SANA Empty Latent."
    k4 = "Sana_1600M_4Kpx_BF16.safetensors"
    first = {**plain(), **result("sana-first")}
    return {
        "SANA first picture": Template(
            first,
            "Press Run: the model that comes with the pack draws small scenes, and needs no download. For "
            "SANA itself open *SANA 1K*, which names its files, or choose your own folder in SANA Loader.",
        ),
        "SANA 1K": picture_of_size("Sana_1600M_1024px_BF16.safetensors", 1024, f"{lands} {TRY}"),
        "SANA 2K": picture_of_size("Sana_1600M_2Kpx_BF16.safetensors", 2048, f"{lands} {TRY}"),
        "SANA 4K": picture_of_size(
            k4, 4096, f"The decode takes the memory that is free and gives the pixels of an undivided one. {TRY}"
        ),
        "SANA 4K on 8 GB": picture_of_size(
            k4,
            4096,
            f"The decode is held to 2 GB beyond its weights, and gives the same pixels as without a limit. {TRY}",
            method="strips",
            budget=2.0,
        ),
        "SANA 4K on all GPUs": shared(
            k4,
            4096,
            "All GPUs of this computer sample and decode one picture together, each some rows of it; it is the picture "
            f"of one GPU. {TRY}",
        ),
        "SANA 8K": second_pass(
            "The 4K model draws its own size, and a second pass twice that, where it only adds detail; the "
            f"decode is held to 4 GB. {TRY}",
            2.0,
            0.35,
            {**switched(k4), **prompts(), **empty(4096), "sampler": sampler(title="First pass")},
            method="strips",
            budget=4.0,
        ),
        "SANA second pass": second_pass(
            "The latent of a picture is enlarged by half, and a second sampling draws the last third of the "
            "steps at the new size. Details become finer, and the picture stays what it is.",
            1.5,
            0.35,
            plain(1, SNOW),
        ),
        "SANA image to image": image_to_image(),
        "SANA inpaint": inpaint(),
        "SANA LoRA": lora(),
        "SANA train a LoRA": train(),
        "SANA ControlNet": controlnet(),
        "SANA Sprint": sprint(),
        "SANA prompt list": many("list"),
        "SANA batch on all GPUs": many("batch"),
        "SANA custom sampling": custom_sampling(),
        "SANA Gemma writes the prompt": gemma(),
        "SANA best settings for this card": cards(),
    }
