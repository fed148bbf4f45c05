"""Nodes that several templates share, and the blueprints: graphs in one node that the node library offers."""

from __future__ import annotations

from typing import Any

from workflow import Graph, Node, Subgraph

from sana_core.model.known_models import VIDEO_NEGATIVE

Link = tuple[str, int]

DEMO_MODEL = "sana-posters (bundled)"
GEMMA, DC_AE = "gemma_2_2b_it_elm_bf16.safetensors", "dc-ae-f32c32-sana-1.1.safetensors"
MODEL_1K, MODEL_2K, MODEL_4K = (f"Sana_1600M_{size}_BF16.safetensors" for size in ("1024px", "2Kpx", "4Kpx"))
MODEL_SPRINT = "Sana_Sprint_1.6B_1024px.safetensors"
VIDEO_480, VIDEO_720 = (f"SANA-Video_2B_{size}_diffusers" for size in ("480p", "720p"))
VIDEO_2 = "SANA-Video_2.0_5B_720p"
VIBE = "VIBE-Image-Edit"
# The demo model and the released models can generate this.
PROMPT = "a watercolour of a red lighthouse on the sea at dusk"
PROMPTS = "\n".join(
    (
        PROMPT,
        "a flat drawing of a blue house in the snow at night",
        "a line drawing of a green tree among green hills at noon",
    )
)
# The prompts of diffusers' SanaVideoPipeline end with this score. 30 is much motion.
VIDEO_PROMPT = (
    "Evening light, soft colours, wide shot. A red lighthouse stands on a rock in the sea, waves roll against it and "
    "break into foam, gulls circle above, clouds drift slowly across the sky. motion score: 30."
)
# MODEL, CLIP and VAE of the node "model" of the same graph, and of the sockets of a subgraph.
INSIDE: tuple[Link, Link, Link] = ("model", 0), ("model", 1), ("model", 2)
OUTSIDE: tuple[Link, Link, Link] = ("model", 0), ("clip", 0), ("vae", 0)
# As width and height: the size that the model was trained for. As frames: its length.
MODEL_SIZE = MODEL_LENGTH = 0
# Widgets of subgraphs.
TEXTS = {"prompt": "prompt.text", "negative prompt": "negative.text"}
SIZE = {"width": "empty.width", "height": "empty.height"}
SETTINGS = {name: f"sampler.{name}" for name in ("seed", "steps", "guidance")}
# The demo model, so that a blueprint runs at once. Loaders of other files are connected to its sockets.
MODEL = {"use": "model.use"}


def demo_model() -> Node:
    return Node("SanaNodesLoader", {"model": DEMO_MODEL}, width=310)


def files(model: str) -> dict[str, Node]:
    """Loaders of the three files of a released model."""
    return {
        "file": Node("SanaNodesModelLoader", {"model_name": model}),
        "gemma": Node("SanaNodesTextEncoderLoader", {"text_encoder_name": GEMMA}),
        "dc-ae": Node("SanaNodesVAELoader", {"vae_name": DC_AE}),
    }


def switch() -> Node:
    """Chooses between the three files and the demo model."""
    links = {"model": ("file", 0), "clip": ("gemma", 0), "vae": ("dc-ae", 0)}
    return Node("SanaNodesModelSwitch", {"use": "the loaders' files", **links}, width=310)


def switch_outside() -> Node:
    """Chooses between the demo model and the model that is connected to the sockets of a blueprint."""
    links = {"model": ("MODEL", 0), "clip": ("CLIP", 0), "vae": ("VAE", 0)}
    return Node("SanaNodesModelSwitch", {"use": DEMO_MODEL, **links}, width=310)


def texts(prompt: str, clip: Link = INSIDE[1]) -> dict[str, Node]:
    negative = {"clip": clip, "text": "", "instruction": False}
    return {
        "prompt": Node("SanaNodesTextEncode", {"clip": clip, "text": prompt, "instruction": True}, "Prompt", room=110),
        "negative": Node("SanaNodesTextEncode", negative, "Negative prompt", room=60),
    }


def empty(side: int, model: Link = INSIDE[0]) -> Node:
    return Node("SanaNodesEmptyLatent", {"width": side, "height": side, "batch_size": 1, "model": model})


def sampler(latent: Link, model: Link = INSIDE[0], title: str | None = None, **settings: Any) -> Node:
    links = {"model": model, "positive": ("prompt", 0), "negative": ("negative", 0), "latent_image": latent}
    defaults = {"seed": 0, "steps": 20, "guidance": 4.5, "sampler": "flow_dpmpp_2m", "denoise": 1.0}
    return Node("SanaNodesSampler", {**links, **defaults, **settings}, title, 325)


def decode(samples: str, vae: Link = INSIDE[2], **settings: Any) -> Node:
    return Node("SanaNodesDecode", {"samples": (samples, 0), "vae": vae, **settings})


def image(
    prompt: str, side: int = MODEL_SIZE, source: tuple[Link, Link, Link] = INSIDE, **settings: Any
) -> dict[str, Node]:
    """The nodes from a prompt to an image. `settings` are values of the sampler."""
    model, clip, vae = source
    return {
        **texts(prompt, clip),
        "empty": empty(side, model),
        "sampler": sampler(("empty", 0), model, **settings),
        "decode": decode("sampler", vae),
    }


def left_half() -> Subgraph:
    join = {"destination": ("keep", 0), "source": ("half", 0), "x": 0, "y": 0, "operation": "add"}
    nodes = {
        "keep": Node("SolidMask", {"value": 0.0, "width": 512, "height": 512}, "Keep"),
        "half": Node("SolidMask", {"value": 1.0, "width": 256, "height": 512}, "Inpaint"),
        "mask": Node("MaskComposite", join),
    }
    widgets = {"image width": "keep.width", "mask width": "half.width", "height": "keep.height half.height"}
    columns = "Parts: keep half | Mask: mask"
    return Subgraph("Mask", Graph(nodes, columns), widgets, {"MASK": ("mask", 0)})


def second_pass(scale: float = 1.5) -> Subgraph:
    upscale = {"samples": ("samples", 0), "upscale_method": "bislerp", "scale_by": scale}
    conditioning = {"positive": ("positive", 0), "negative": ("negative", 0)}
    nodes = {
        "upscale": Node("LatentUpscaleBy", upscale),
        "sampler": sampler(("upscale", 0), OUTSIDE[0], denoise=0.35, **conditioning),
        "decode": decode("sampler", OUTSIDE[2]),
    }
    columns = "Enlarged: upscale | Second pass: sampler | Result: decode"
    widgets = {"scale_by": "upscale.scale_by", "denoise": "sampler.denoise", **SETTINGS}
    about = "Enlarges the latent of an image and samples the last steps again at the new size, for finer details."
    outputs: dict[str, Link] = {"IMAGE": ("decode", 0), "LATENT": ("sampler", 0)}
    return Subgraph("SANA second pass", Graph(nodes, columns), widgets, outputs, about)


def any_image() -> Subgraph:
    """Enlarges an image of any model to the size of this model, and samples its last steps again."""
    enlarge = {"image": ("image", 0), "upscale_method": "lanczos", "width": ("size", 0), "height": ("size", 1)}
    nodes = {
        "model": switch_outside(),
        **texts(PROMPT),
        "size": Node("SanaNodesResolution", {"size": "auto", "ratio": "1:1", "model": INSIDE[0]}),
        "enlarge": Node("ImageScale", {**enlarge, "crop": "center"}),
        "encode": Node("VAEEncode", {"pixels": ("enlarge", 0), "vae": INSIDE[2]}),
        # The last 6 of 20 steps.
        "sampler": sampler(("encode", 0), steps=6, denoise=0.3),
        "decode": decode("sampler"),
    }
    columns = "model size enlarge | Prompt: prompt negative encode | Sampling: sampler | decode"
    widgets = {"prompt": "prompt.text", "ratio": "size.ratio", "denoise": "sampler.denoise", **SETTINGS}
    widgets |= {"budget_gb": "decode.budget_gb", **MODEL}
    about = (
        "Enlarges an image of any model to the size of SANA's model and samples its last steps again. The model is the "
        "demo model, or the loaders that are connected and chosen in use."
    )
    return Subgraph("SANA any image", Graph(nodes, columns), widgets, {"IMAGE": ("decode", 0)}, about)


def text_to_image() -> Subgraph:
    nodes = {"model": switch_outside(), **image(PROMPT)}
    columns = "model | Prompt: prompt negative empty | Sampling: sampler | decode"
    widgets = {**TEXTS, **SIZE, **SETTINGS, "budget_gb": "decode.budget_gb", **MODEL}
    about = (
        "Generates an image from a prompt with the demo model, or with the loaders that are connected and chosen in "
        "use. 0 x 0 is the size of the model."
    )
    outputs: dict[str, Link] = {"IMAGE": ("decode", 0), "LATENT": ("sampler", 0)}
    return Subgraph("SANA text to image", Graph(nodes, columns), widgets, outputs, about)


def prompt_list() -> Node:
    values = {"clip": INSIDE[1], "prompts": PROMPTS, "instruction": True}
    return Node("SanaNodesPromptList", values, "Prompts, one per line")


def batch_sampler(count: int, **links: Link) -> Node:
    links = {"model": INSIDE[0], "positive": ("prompt", 0), "negative": ("negative", 0), **links}
    values = {"count": count, "seed": 0, "steps": 20, "guidance": 4.5, "sampler": "flow_dpmpp_2m", "devices": "all"}
    return Node("SanaNodesBatchSampler", {**links, "latent_image": ("empty", 0), **values, "chunk": 0}, width=325)


def batch() -> Subgraph:
    nodes = {
        "model": switch_outside(),
        **texts(""),
        "prompt": prompt_list(),
        "empty": empty(MODEL_SIZE),
        "sampler": batch_sampler(2, vae=INSIDE[2]),
    }
    columns = "model | Prompt: prompt negative empty | Sampling: sampler"
    widgets = {"prompts": "prompt.prompts", "count": "sampler.count", **SETTINGS, "devices": "sampler.devices", **MODEL}
    about = "Generates several images per line of a list, on all GPUs of this computer, with the demo model or loaders."
    return Subgraph("SANA batch", Graph(nodes, columns), widgets, {"IMAGE": ("sampler", 1)}, about)


def best_of_many() -> Subgraph:
    scorer = Node("SanaNodesScorerLoader", {"scorer_name": "sana-posters-scorer (bundled)"})
    links = {"samples": ("sampler", 0), "vae": OUTSIDE[2], "scorer": ("scorer", 0)}
    nodes = {
        "scorer": scorer,
        **texts(PROMPT, OUTSIDE[1]),
        "empty": empty(MODEL_SIZE, OUTSIDE[0]),
        "sampler": batch_sampler(4),
        "best": Node("SanaNodesPickBest", {**links, "prompt": PROMPT, "best": 1}),
    }
    columns = "Prompt: scorer prompt negative empty | Sampling: sampler | Result: best"
    widgets = {"prompt": "prompt.text best.prompt", "count": "sampler.count", "best": "best.best", **SETTINGS}
    widgets |= {"devices": "sampler.devices", "scorer": "scorer.scorer_name"}
    about = "Generates several images of one prompt, and keeps those that a scorer ranks first. The sheet shows all."
    outputs: dict[str, Link] = {"IMAGE": ("best", 1), "sheet": ("best", 2)}
    return Subgraph("SANA best of many", Graph(nodes, columns), widgets, outputs, about)


def video_nodes(first_image: Link, model: str = VIDEO_480, guidance: float = 6.0) -> dict[str, Node]:
    """The nodes from a prompt, and from an image if there is one, to a video."""
    size = {"width": MODEL_SIZE, "height": MODEL_SIZE, "frames": MODEL_LENGTH, "batch_size": 1}
    nodes = {
        "model": Node("SanaNodesLoader", {"model": model}),
        **texts(VIDEO_PROMPT),
        "empty": Node(
            "SanaNodesVideoLatent", {"model": INSIDE[0], "vae": INSIDE[2], "first_image": first_image, **size}
        ),
        # The model's defaults sample by Euler if the video begins with an image.
        "sampler": sampler(("empty", 0), steps=50, guidance=guidance, model_defaults=True),
        "decode": Node("VAEDecode", {"samples": ("sampler", 0), "vae": INSIDE[2]}),
        "video": Node("CreateVideo", {"images": ("decode", 0), "fps": ("empty", 1)}),
    }
    nodes["negative"].inputs["text"] = VIDEO_NEGATIVE
    return nodes


def video() -> Subgraph:
    columns = "Model: model | Prompt: prompt negative empty | Sampling: sampler | Result: decode video"
    widgets = {**TEXTS, **SIZE, "frames": "empty.frames", **SETTINGS, "model": "model.model"}
    about = "Generates a video of 5 seconds from a prompt, and from an image if one is connected, with SANA-Video."
    outputs: dict[str, Link] = {"VIDEO": ("video", 0), "IMAGE": ("decode", 0)}
    return Subgraph("SANA video", Graph(video_nodes(("first image", 0)), columns), widgets, outputs, about)


def video_2() -> Subgraph:
    """SANA-Video 2.0 with its settings. The video template has it as a muted node."""
    nodes = video_nodes(("first image", 0), VIDEO_2, 8.0)
    # The prompt fits into the node. NVIDIA's example of 2.0 has this score.
    nodes["prompt"].inputs["text"] = "Waves roll against a red lighthouse. motion score: 20."
    columns = "Model: model | Prompt: prompt negative empty | Sampling: sampler | Result: decode video"
    widgets = {"prompt": "prompt.text", "frames": "empty.frames", "seed": "sampler.seed"}
    widgets["model"] = "model.model"
    about = "Generates a video of 8 seconds from a prompt, and from an image if one is connected, with SANA-Video 2.0."
    outputs: dict[str, Link] = {"VIDEO": ("video", 0)}
    return Subgraph("SANA-Video 2.0", Graph(nodes, columns), widgets, outputs, about, preview=False)


def edit() -> Subgraph:
    """Changes an image by a sentence, and gives it the size that it had."""
    links = {"clip": INSIDE[1], "vae": INSIDE[2], "image": ("image", 0)}
    conds = {"positive": ("edit", 0), "negative": ("edit", 1)}
    back = {"image": ("decode", 0), "upscale_method": "lanczos", "width": ("size", 0), "height": ("size", 1)}
    nodes = {
        "model": Node("SanaNodesLoader", {"model": VIBE}),
        "edit": Node("SanaNodesEdit", {**links, "text": "make it winter", "image_guidance": 1.2}, room=110),
        "sampler": sampler(("edit", 2), **conds),
        "decode": decode("sampler"),
        "size": Node("GetImageSize", {"image": ("image", 0)}),
        "back": Node("ImageScale", {**back, "crop": "disabled"}),
    }
    columns = "model size | Instruction: edit | Sampling: sampler | Result: decode back"
    widgets = {"text": "edit.text", "image_guidance": "edit.image_guidance", **SETTINGS, "model": "model.model"}
    about = (
        "Changes an image by a sentence with VIBE. Download the folder VIBE-Image-Edit by iitolstykh on Hugging Face "
        "into models/diffusers."
    )
    return Subgraph("SANA change by a sentence", Graph(nodes, columns), widgets, {"IMAGE": ("back", 0)}, about)


def blueprints() -> list[Subgraph]:
    return [text_to_image(), second_pass(), any_image(), batch(), best_of_many(), video(), edit()]
