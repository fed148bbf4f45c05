"""The ComfyUI graph in the PNGs of a batch. Dropped on the canvas, a PNG brings back the nodes that generate its image.

ComfyUI's API format has no notes, so the title of a node names the settings that the graph cannot contain.
"""

from __future__ import annotations

from pathlib import Path

from ..model.known_models import DEMO_MODEL, DEMO_MODEL_LISTED
from ..runtime.text import Json

# the PNG's text entry that ComfyUI reads
ENTRY = "prompt"
# A widget, not an input. "fixed": the next run generates the same image.
FIXED = {"control_after_generate": "fixed"}

Link = list[str | int]


def graph_of(prompt: str, seed: int, settings: Json, checkpoint: str) -> dict[str, Json]:
    """Return the graph, in ComfyUI's API format, that generates an image with `settings` from a manifest.

    Its loader has the name of `checkpoint` as ComfyUI lists it in models/diffusers or models/checkpoints.
    """
    name = Path(checkpoint).name
    loader = {
        "model": DEMO_MODEL_LISTED if name == DEMO_MODEL else name,
        "weight_dtype": "default",
        "resolution": "auto",
        "reference": settings["reference"],
    }
    # ComfyUI chooses the dtype of text encoder, transformer and VAE by the device, and a graph cannot choose it.
    title = f"SANA Loader (the batch computed in {settings['dtype']}; other types change details)"
    nodes: dict[str, tuple[str, str, Json]] = {"1": ("SanaNodesLoader", title, loader)}
    model: Link = ["1", 0]
    clip: Link = ["1", 1]
    if settings["pag_scale"]:
        inputs_of_node = {"model": model, "scale": settings["pag_scale"], "blocks": settings["pag_blocks"]}
        nodes["2"] = ("SanaNodesPAG", "SANA PAG", inputs_of_node)
        model = ["2", 0]
    for number, lora in enumerate(settings.get("loras", ()), 10):
        strengths = {"strength_model": lora["strength"], "strength_clip": lora["strength"]}
        inputs_of_node = {"model": model, "clip": clip, "lora_name": lora["file"], **strengths}
        nodes[str(number)] = ("SanaNodesLoraLoader", "SANA Load LoRA", inputs_of_node)
        model, clip = [str(number), 0], [str(number), 1]
    start, end = settings["guidance_interval"]
    if (start, end) != (0, 1):
        inputs_of_node = {"model": model, "start": start, "end": end}
        nodes["3"] = ("SanaNodesGuidanceInterval", "SANA Guidance Interval", inputs_of_node)
        model = ["3", 0]
    negative = settings["negative_prompt"]
    size = {"width": settings["width"], "height": settings["height"], "batch_size": 1}
    sampling = {name: settings[name] for name in ("steps", "guidance", "sampler")}
    links = {"model": model, "positive": ["4", 0], "negative": ["5", 0], "latent_image": ["6", 0]}
    nodes |= {
        "4": ("SanaNodesTextEncode", "Prompt", {"clip": clip, "text": prompt, "instruction": True}),
        "5": ("SanaNodesTextEncode", "Negative prompt", {"clip": clip, "text": negative, "instruction": False}),
        "6": ("SanaNodesEmptyLatent", "SANA Empty Latent", size),
        "7": ("SanaNodesSampler", "SANA Sampler", {**links, "seed": seed, **sampling, "denoise": 1.0, **FIXED}),
        "8": ("SanaNodesDecode", "SANA Decode", {"samples": ["7", 0], "vae": ["1", 2], "method": "auto"}),
        "9": ("SaveImage", "Save Image", {"images": ["8", 0], "filename_prefix": "batch"}),
    }
    return {
        key: {"class_type": kind, "inputs": inputs, "_meta": {"title": title}}
        for key, (kind, title, inputs) in nodes.items()
    }
