"""The nodes and the subgraphs that templates and blueprints are made of."""

from __future__ import annotations

from typing import Any

from workflow import Graph, Node, Subgraph

Link = tuple[str, int]

BUNDLED = "sana-posters (bundled)"
OWN = "the loaders' files"
GEMMA, DC_AE = "gemma_2_2b_it_elm_bf16.safetensors", "dc-ae-f32c32-sana-1.1.safetensors"
K1, K2, K4 = (f"Sana_1600M_{size}_BF16.safetensors" for size in ("1024px", "2Kpx", "4Kpx"))
VIDEO_480, VIDEO_720 = (f"SANA-Video_2B_{size}_diffusers" for size in ("480p", "720p"))
SPRINT = "Sana_Sprint_1.6B_1024px.safetensors"
# one that the bundled model knows, and a released one draws as well
PROMPT = "a watercolour of a red lighthouse on the sea at dusk"
PROMPTS = "\n".join(
    (
        PROMPT,
        "a flat drawing of a blue house in the snow at night",
        "a line drawing of a green tree among green hills at noon",
    )
)
# the example of diffusers' pipeline, and of its prompts how they end; 30 is much motion
NO_VIDEO = (
    "A chaotic sequence with misshapen, deformed limbs in heavy motion blur, sudden disappearance, jump cuts, jerky "
    "movements, rapid shot changes, frames out of sync, inconsistent character shapes, temporal artifacts, jitter, and "
    "ghosting effects, creating a disorienting visual experience."
)
MOTION = " motion score: 30."
VIDEO_PROMPT = (
    "Evening light, soft colours, wide shot. A red lighthouse stands on a rock in the sea, waves roll against it and "
    "break into foam, gulls circle above, clouds drift slowly across the sky." + MOTION
)
# where MODEL, CLIP and VAE come from: a node of the graph that is named model, or from outside of a subgraph
INSIDE: tuple[Link, Link, Link] = ("model", 0), ("model", 1), ("model", 2)
OUTSIDE: tuple[Link, Link, Link] = ("model", 0), ("clip", 0), ("vae", 0)
# widgets of subgraphs
TEXTS = {"prompt": "prompt.text", "negative prompt": "negative.text"}
SIZE = {"width": "empty.width", "height": "empty.height"}
SETTINGS = {name: f"sampler.{name}" for name in ("seed", "steps", "guidance")}
FILES = {
    "model": "file.model_name",
    "text encoder": "gemma.text_encoder_name",
    "VAE": "dc-ae.vae_name",
    "use": "model.use",
}
LOADERS = ("Files", "file gemma dc-ae"), ("Model", "model")
DRAWING = ("Prompt", "prompt negative empty"), ("Sampling", "sampler"), ("Result", "decode")
IMAGE: dict[str, Link] = {"IMAGE": ("decode", 0)}
LATENT: dict[str, Link] = {"LATENT": ("sampler", 0)}


def bundled(model: str = BUNDLED) -> dict[str, Node]:
    return {"model": Node("SanaNodesLoader", {"model": model})}


def files(model: str) -> dict[str, Node]:
    """Loaders of three files, and the switch to the bundled model behind them."""
    links = {"model": ("file", 0), "clip": ("gemma", 0), "vae": ("dc-ae", 0)}
    return {
        "file": Node("SanaNodesModelLoader", {"model_name": model}),
        "gemma": Node("SanaNodesTextEncoderLoader", {"text_encoder_name": GEMMA}),
        "dc-ae": Node("SanaNodesVAELoader", {"vae_name": DC_AE}),
        "model": Node("SanaNodesModelSwitch", {"use": OWN, **links}),
    }


def texts(prompt: str, clip: Link) -> dict[str, Node]:
    none = {"clip": clip, "text": "", "instruction": False}
    return {
        "prompt": Node("SanaNodesTextEncode", {"clip": clip, "text": prompt, "instruction": True}, "Prompt"),
        "negative": Node("SanaNodesTextEncode", none, "Negative prompt"),
    }


def empty(side: int, model: Link) -> dict[str, Node]:
    """The empty latent, in the size that `model` was trained for: the templates run with the demo model too."""
    return {"empty": Node("SanaNodesEmptyLatent", {"width": 0, "height": 0, "batch_size": 1, "model": model})}


def sampler(latent: Link, model: Link, title: str | None = None, **own: Any) -> Node:
    links = {"model": model, "positive": ("prompt", 0), "negative": ("negative", 0), "latent_image": latent}
    values = {"seed": 0, "steps": 20, "guidance": 4.5, "sampler": "flow_dpmpp_2m", "denoise": 1.0}
    return Node("SanaNodesSampler", {**links, **values, **own}, title)


def decode(samples: str, vae: Link, **own: Any) -> Node:
    return Node("SanaNodesDecode", {"samples": (samples, 0), "vae": vae, **own})


def image(
    prompt: str = PROMPT,
    side: int = 512,
    source: tuple[Link, Link, Link] = OUTSIDE,
    seed: int = 0,
    denoise: float = 1.0,
    **own: Any,
) -> dict[str, Node]:
    """The nodes from a prompt to an image; `own` are values of the decode."""
    model, clip, vae = source
    return {
        **empty(side, model),
        **texts(prompt, clip),
        "sampler": sampler(("empty", 0), model, seed=seed, denoise=denoise),
        "decode": decode("sampler", vae, **own),
    }


def bundled_image() -> Subgraph:
    nodes = {**bundled(), **image(source=INSIDE)}
    columns = ("Model", "model"), *DRAWING
    widgets = {**TEXTS, "model": "model.model", **SIZE, **SETTINGS}
    return Subgraph("SANA image", Graph(nodes, columns), widgets, IMAGE)


def text_to_image(name: str, file: str, side: int, description: str = "", **own: Any) -> Subgraph:
    """A released model at its own size; `own` are values of its decode."""
    nodes = {**files(file), **image(side=side, source=INSIDE, **own)}
    limit = {"budget_gb": "decode.budget_gb"} if "method" in own else {}
    widgets = {**TEXTS, **SIZE, **SETTINGS, **limit, **FILES}
    return Subgraph(name, Graph(nodes, (*LOADERS, *DRAWING)), widgets, {**IMAGE, **LATENT}, description)


def on_all_gpus(name: str, file: str, side: int) -> Subgraph:
    """An image that all GPUs sample and decode together."""
    alone = text_to_image(name, file, side, devices="all")
    nodes = {**alone.graph.nodes, "split": Node("SanaNodesSplitPicture", {"model": ("model", 0), "devices": "all"})}
    nodes["sampler"] = sampler(("empty", 0), ("split", 0))
    columns = (*LOADERS, ("Prompt", "split prompt negative empty"), *DRAWING[1:])
    return alone._replace(graph=Graph(nodes, columns))


def second_pass(scale: float = 1.5, seed: int = 0, **own: Any) -> Subgraph:
    """The second pass alone, on a latent from outside; `own` are values of its decode."""
    upscale = {"samples": ("samples", 0), "upscale_method": "bislerp", "scale_by": scale}
    conditioning = {"positive": ("positive", 0), "negative": ("negative", 0)}
    nodes = {
        "upscale": Node("LatentUpscaleBy", upscale),
        "sampler": sampler(("upscale", 0), OUTSIDE[0], seed=seed, denoise=0.35, **conditioning),
        "decode": decode("sampler", OUTSIDE[2], **own),
    }
    columns = ("Enlarged", "upscale"), ("Second pass", "sampler"), ("Result", "decode")
    widgets = {"scale_by": "upscale.scale_by", "denoise": "sampler.denoise", **SETTINGS}
    about = "Enlarges the latent of an image and samples the last steps again at the new size, for finer details."
    return Subgraph("SANA second pass", Graph(nodes, columns), widgets, {**IMAGE, **LATENT}, about)


def with_second_pass(first: Subgraph, second: Subgraph, vae: Link) -> Subgraph:
    """`first` and, in the place of its decode, `second`."""
    conditioning = {"positive": ("prompt", 0), "negative": ("negative", 0)}
    nodes = {name: node for name, node in first.graph.nodes.items() if name != "decode"}
    links = {"model": ("model", 0), "samples": ("sampler", 0), "vae": vae}
    nodes["second"] = Node(second, {**links, **conditioning})
    columns = *first.graph.columns[:-1], ("Second pass", "second")
    again = {name: f"sampler.{name} second.{name}" for name in SETTINGS}
    widgets = {**first.widgets, **again, "scale": "second.scale_by", "denoise": "second.denoise"}
    return first._replace(graph=Graph(nodes, columns), widgets=widgets, outputs={"IMAGE": ("second", 0)})


def large_8k() -> Subgraph:
    second = second_pass(2.0, method="strips", budget_gb=4.0)
    return with_second_pass(text_to_image("SANA 8K text to image", K4, 4096), second, INSIDE[2])


def two_passes() -> Subgraph:
    """Both passes on a model from outside, with the image of each."""
    first = Subgraph("SANA two passes", Graph(image(seed=3), DRAWING), {**TEXTS, **SETTINGS}, {})
    made = with_second_pass(first, second_pass(seed=3), OUTSIDE[2])
    nodes = {**made.graph.nodes, "before": first.graph.nodes["decode"]}
    columns = *DRAWING[:2], ("Result", "before second")
    outputs = {"first pass": ("before", 0), "second pass": ("second", 0)}
    return made._replace(graph=Graph(nodes, columns), outputs=outputs)


def first_image(prompt: str, side: int = 512) -> Subgraph:
    widgets = {"prompt": "prompt.text", "seed": "sampler.seed", "steps": "sampler.steps"}
    return Subgraph("First image", Graph(image(prompt, side), DRAWING), widgets, IMAGE)


def image_to_image(prompt: str, denoise: float, seed: int) -> Subgraph:
    nodes = image(prompt, seed=seed, denoise=denoise)
    del nodes["empty"]
    nodes["encode"] = Node("VAEEncode", {"pixels": ("image", 0), "vae": OUTSIDE[2]})
    nodes["sampler"].inputs["latent_image"] = ("encode", 0)
    columns = ("Prompt", "encode prompt negative"), *DRAWING[1:]
    widgets = {**TEXTS, **SETTINGS, "denoise": "sampler.denoise"}
    return Subgraph("SANA image to image", Graph(nodes, columns), widgets, IMAGE)


def inpaint(prompt: str, seed: int) -> Subgraph:
    whole = image_to_image(prompt, 1.0, seed)
    nodes = whole.graph.nodes
    nodes["masked"] = Node("SetLatentNoiseMask", {"samples": ("encode", 0), "mask": ("mask", 0)})
    nodes["soft"] = Node("DifferentialDiffusion", {"model": OUTSIDE[0], "strength": 1.0})
    nodes["sampler"].inputs.update(latent_image=("masked", 0), model=("soft", 0))
    columns = ("Prompt", "encode prompt negative"), ("Mask", "masked soft"), *DRAWING[1:]
    return whole._replace(name="SANA inpaint", graph=Graph(nodes, columns))


def left_half() -> Subgraph:
    join = {"destination": ("keep", 0), "source": ("half", 0), "x": 0, "y": 0, "operation": "add"}
    nodes = {
        "keep": Node("SolidMask", {"value": 0.0, "width": 512, "height": 512}, "Keep"),
        "half": Node("SolidMask", {"value": 1.0, "width": 256, "height": 512}, "Inpaint"),
        "mask": Node("MaskComposite", join),
    }
    columns = ("Parts", "keep half"), ("Mask", "mask")
    widgets = {"image width": "keep.width", "mask width": "half.width", "height": "keep.height half.height"}
    return Subgraph("Mask", Graph(nodes, columns), widgets, {"MASK": ("mask", 0)})


def controlled(prompt: str, seed: int) -> Subgraph:
    nodes = image(prompt, seed=seed)
    conditioning = {"positive": ("prompt", 0), "negative": ("negative", 0), "control_net": ("control_net", 0)}
    values = {"strength": 1.0, "start_percent": 0.0, "end_percent": 1.0}
    apply = {**conditioning, "image": ("image", 0), "vae": OUTSIDE[2], **values}
    nodes["apply"] = Node("ControlNetApplyAdvanced", apply)
    nodes["sampler"].inputs.update(positive=("apply", 0), negative=("apply", 1))
    columns = DRAWING[0], ("ControlNet", "apply"), *DRAWING[1:]
    widgets = {**TEXTS, **SETTINGS, "strength": "apply.strength"}
    return Subgraph("SANA with ControlNet", Graph(nodes, columns), widgets, IMAGE)


def with_and_without(prompt: str) -> Subgraph:
    """One image of a model, and one of the same seed of the model with a LoRA."""
    nodes = image(prompt)
    nodes["sampler"] = sampler(("empty", 0), OUTSIDE[0], "Without the LoRA")
    nodes["with"] = sampler(("empty", 0), ("model with LoRA", 0), "With the LoRA")
    nodes["after"] = decode("with", OUTSIDE[2])
    columns = DRAWING[0], ("Without the LoRA", "sampler"), ("With the LoRA", "with"), ("Result", "decode after")
    both = {name: f"sampler.{name} with.{name}" for name in SETTINGS}
    outputs = {"without": ("decode", 0), "with": ("after", 0)}
    return Subgraph("Without and with the LoRA", Graph(nodes, columns), {**TEXTS, **both}, outputs)


def video(
    name: str, model: str, size: tuple[int, int], prompt: str, first: Link | None = None, description: str = ""
) -> Subgraph:
    """A video of a released model from a prompt, and with `first` from an image too."""
    given = {} if first is None else {"vae": INSIDE[2], "first_image": first}
    latent = {"model": INSIDE[0], "width": size[0], "height": size[1], "frames": 81, "batch_size": 1, **given}
    nodes = {
        "model": Node("SanaNodesLoader", {"model": model}),
        **texts(prompt, INSIDE[1]),
        "empty": Node("SanaNodesVideoLatent", latent),
        "sampler": sampler(("empty", 0), INSIDE[0], steps=50, guidance=6.0),
        "decode": Node("VAEDecode", {"samples": ("sampler", 0), "vae": INSIDE[2]}),
        "video": Node("CreateVideo", {"images": ("decode", 0), "fps": 16.0}),
    }
    nodes["negative"].inputs["text"] = NO_VIDEO
    columns = ("Model", "model"), *DRAWING[:2], ("Result", "decode"), ("Video", "video")
    widgets = {**TEXTS, **SIZE, "frames": "empty.frames", "fps": "video.fps", **SETTINGS, "model": "model.model"}
    return Subgraph(name, Graph(nodes, columns), widgets, {"VIDEO": ("video", 0), **IMAGE}, description)


def text_to_video() -> Subgraph:
    about = "Generates a video of 5 seconds from a prompt with SANA-Video."
    return video("SANA text to video", VIDEO_480, (832, 480), VIDEO_PROMPT, None, about)


def image_to_video() -> Subgraph:
    about = "Generates a video of 5 seconds that begins with an image, from a prompt, with SANA-Video."
    prompt = "The subject of the image comes to life and moves, the camera moves slowly to the right." + MOTION
    return video("SANA image to video", VIDEO_480, (832, 480), prompt, ("first image", 0), about)


def guidance() -> Subgraph:
    nodes = {
        "pag": Node("SanaNodesPAG", {"model": OUTSIDE[0], "scale": 1.0, "blocks": ""}),
        "interval": Node("SanaNodesGuidanceInterval", {"model": ("pag", 0), "start": 0.0, "end": 0.8}),
    }
    columns = ("Perturbed attention", "pag"), ("Interval", "interval")
    widgets = {"PAG scale": "pag.scale", "start": "interval.start", "end": "interval.end"}
    return Subgraph("Guidance", Graph(nodes, columns), widgets, {"MODEL": ("interval", 0)})


def sprint() -> Subgraph:
    links = {"model": ("file", 0), "positive": ("prompt", 0), "latent_image": ("empty", 0)}
    nodes = files(SPRINT)
    del nodes["model"]
    nodes |= {
        "prompt": texts("a lighthouse on a cliff at dusk, oil painting", ("gemma", 0))["prompt"],
        "size": Node("SanaNodesResolution", {"size": "1024", "ratio": "1:1"}),
        "empty": Node("SanaNodesEmptyLatent", {"width": ("size", 0), "height": ("size", 1), "batch_size": 1}),
        "sampler": Node("SanaNodesSprint", {**links, "seed": 0, "steps": 2, "guidance": 4.5, "strength": 1.0}),
        "decode": decode("sampler", ("dc-ae", 0)),
    }
    columns = LOADERS[0], ("Prompt", "prompt size"), ("Latent", "empty"), *DRAWING[1:]
    own = {name: end for name, end in FILES.items() if name != "use"}
    widgets = {"prompt": TEXTS["prompt"], "size": "size.size", "ratio": "size.ratio", **SETTINGS, **own}
    return Subgraph("SANA Sprint", Graph(nodes, columns), widgets, IMAGE)


def prompt_list(clip: Link) -> Node:
    return Node("SanaNodesPromptList", {"clip": clip, "prompts": PROMPTS, "instruction": True}, "Prompts, one a line")


def batch_sampler() -> Node:
    links = {"model": ("model", 0), "positive": ("prompt", 0), "negative": ("negative", 0), "vae": ("model", 2)}
    values = {"count": 2, "seed": 0, "steps": 20, "guidance": 4.5, "sampler": "flow_dpmpp_2m", "devices": "all"}
    return Node("SanaNodesBatchSampler", {**links, "latent_image": ("empty", 0), **values, "chunk": 0})


def best_of_many() -> Subgraph:
    """Several images of one prompt on the bundled model, the best of them, and a sheet of all."""
    nodes = {**bundled(), **texts(PROMPT, INSIDE[1]), **empty(512, INSIDE[0])}
    nodes["sampler"] = batch_sampler()
    del nodes["sampler"].inputs["vae"]
    nodes["sampler"].inputs["count"] = 4
    nodes["scorer"] = Node("SanaNodesScorerLoader", {"scorer_name": "sana-posters-scorer (bundled)"})
    links = {"samples": ("sampler", 0), "vae": INSIDE[2], "scorer": ("scorer", 0)}
    nodes["best"] = Node("SanaNodesPickBest", {**links, "prompt": PROMPT, "best": 1})
    columns = ("Model", "model scorer"), *DRAWING[:2], ("Result", "best")
    own = {name: f"sampler.{name}" for name in ("seed", "steps", "guidance", "devices")}
    widgets = {"prompt": "prompt.text best.prompt", "negative prompt": TEXTS["negative prompt"]}
    widgets |= {"count": "sampler.count", "best": "best.best", **own}
    widgets |= {"model": "model.model", "scorer": "scorer.scorer_name"}
    outputs: dict[str, Link] = {"IMAGE": ("best", 1), "sheet": ("best", 2)}
    return Subgraph("SANA best of many", Graph(nodes, columns), widgets, outputs)


def batch() -> Subgraph:
    nodes = {**files(K1), **texts("", INSIDE[1]), **empty(1024, INSIDE[0])}
    nodes |= {"prompt": prompt_list(INSIDE[1]), "sampler": batch_sampler()}
    columns = *LOADERS, *DRAWING[:2]
    own = {name: f"sampler.{name}" for name in ("count", "seed", "devices", "steps", "guidance")}
    widgets = {"prompts": "prompt.prompts", **own, **FILES}
    about = "Generates several images per line of a list, on all GPUs of this computer."
    return Subgraph("SANA batch", Graph(nodes, columns), widgets, {"IMAGE": ("sampler", 1)}, about)


def blueprints() -> list[Subgraph]:
    """Return the graphs that the node library offers, each under its name."""
    return [
        text_to_image(
            "SANA text to image",
            K1,
            1024,
            "Generates an image from a prompt with SANA 1.6B or the demo model.",
        ),
        text_to_image(
            "SANA 4K text to image",
            K4,
            4096,
            "Generates an image of 4096 px with SANA 1.6B 4K and decodes it without seams, in the free memory or in "
            "budget_gb.",
            method="strips",
        ),
        second_pass(),
        batch(),
        text_to_video(),
        image_to_video(),
    ]
