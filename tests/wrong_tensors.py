"""Latents, images, masks and embeddings of wrong shapes and types, and the graphs that give them to ComfyUI's nodes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from in_process import AnyValue
from setup import ROOT

Graph = dict[str, tuple[str, dict[str, Any]]]
SHAPES = [
    (),
    (0,),
    (32,),
    (32, 4),
    (32, 4, 4),
    (1, 32, 4),
    (1, 32, 4, 4),
    (0, 32, 4, 4),
    (1, 0, 4, 4),
    (1, 32, 0, 4),
    (1, 32, 4, 0),
    (1, 32, 1, 1),
    (1, 4, 4, 4),
    (1, 16, 4, 4),
    (1, 31, 4, 4),
    (1, 64, 4, 4),
    (1, 32, 1, 4, 4),
    (1, 32, 2, 4, 4),
    (1, 32, 0, 4, 4),
    (1, 16, 1, 4, 4),
    (1, 32, 1, 1, 4, 4),
    (0, 0, 0, 0),
]
DTYPES = [torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.uint8, torch.bool, torch.complex64]
PIXELS = [
    (),
    (3,),
    (64, 3),
    (64, 64, 3),
    (0, 64, 64, 3),
    (1, 0, 64, 3),
    (1, 64, 0, 3),
    (1, 64, 64, 0),
    (1, 1, 1, 3),
    (1, 31, 64, 3),
    (1, 64, 31, 3),
    (1, 8, 8, 3),
    (1, 33, 63, 3),
    (1, 64, 64, 1),
    (1, 64, 64, 2),
    (1, 64, 64, 4),
    (1, 64, 64, 5),
    (1, 3, 64, 64),
    (1, 1, 64, 64, 3),
    (2, 64, 32, 3),
]
MASKS = [
    (),
    (0,),
    (8,),
    (8, 8),
    (1, 8, 8),
    (0, 8, 8),
    (1, 0, 8),
    (1, 8, 0),
    (3, 8, 8),
    (1, 1, 8, 8),
    (1, 3, 8, 8),
    (1, 1, 1, 8, 8),
]
EMBEDS = [(), (32,), (300, 32), (1, 300, 31), (1, 0, 32), (0, 300, 32), (1, 300, 32), (3, 300, 32), (1, 1, 300, 32)]


class WrongPrompt(AnyValue):
    """A CONDITIONING of the embeddings in a table. ComfyUI would take a list for a link."""

    RETURN_TYPES = ("CONDITIONING",)

    def give(self, value):
        return ([[value["embeddings"], {"attention_mask": torch.ones(1, 300)}]],)


class Case(NamedTuple):
    """A graph with one wrong value."""

    name: str
    graph: Graph


def wrong_values(shapes: list[tuple[int, ...]], good: tuple[int, ...]) -> Iterator[tuple[str, Any]]:
    """Yield (name, value): zeros and noise of each of `shapes`, tensors of `good` in other dtypes and ranges, and
    values that are no tensors."""
    generator = torch.Generator().manual_seed(0)
    for shape in shapes:
        yield f"zeros {list(shape)}", torch.zeros(shape)
        yield f"noise {list(shape)}", torch.rand(shape, generator=generator)
    for dtype in DTYPES:
        yield f"{dtype} ones", torch.ones(good, dtype=dtype)
    for value in (float("nan"), float("inf"), 1e30, -1e38):
        yield f"{value}", torch.full(good, value)
    yield "not contiguous", torch.ones(good).transpose(-1, -2)
    yield from [("None", None), ("a number", 3), ("text", "latent"), ("a list", [1.0, 2.0])]


def base(sampler: str = "KSampler", **inputs: Any) -> Graph:
    """The graph of a small image in one step. `value` is a node for the wrong value."""
    links = {"model": ["load", 0], "positive": ["prompt", 0], "negative": ["negative", 0], "latent_image": ["empty", 0]}
    values = {"cfg": 4.5, "sampler_name": "euler", "scheduler": "normal"}
    if sampler.startswith("SanaNodes"):
        values = {"guidance": 4.5, "sampler": "flow_dpmpp_2m"}
    if sampler == "KSamplerAdvanced":
        values |= {"add_noise": "enable", "start_at_step": 0, "end_at_step": 1, "return_with_leftover_noise": "disable"}
    seed = {"noise_seed" if sampler == "KSamplerAdvanced" else "seed": 3, "steps": 1}
    if sampler == "KSampler":
        values |= {"denoise": 1.0}
    if sampler == "SanaNodesBatchSampler":
        values |= {"count": 1, "devices": "default", "chunk": 0}
    graph = {
        "load": ("SanaNodesLoader", {"model": "sana-tiny"}),
        "prompt": ("CLIPTextEncode", {"clip": ["load", 1], "text": "a red circle"}),
        "negative": ("CLIPTextEncode", {"clip": ["load", 1], "text": ""}),
        "empty": ("SanaNodesEmptyLatent", {"width": 128, "height": 128, "batch_size": 1}),
        "sample": (sampler, {**links, **values, **seed, **inputs}),
        "catch": ("Catch", {"value": ["sample", 0], "name": "out"}),
    }
    if sampler == "SamplerCustomAdvanced":
        guided = {"model": ["load", 0], "positive": ["prompt", 0], "negative": ["negative", 0], "cfg": 4.5}
        schedule = {"model": ["load", 0], "scheduler": "simple", "steps": 1, "denoise": 1.0}
        graph |= {
            "noise": ("RandomNoise", {"noise_seed": 3}),
            "guider": ("CFGGuider", guided),
            "select": ("SanaNodesSamplerSelect", {"sampler": "flow_dpmpp_2m"}),
            "sigmas": ("BasicScheduler", schedule),
        }
        links = {"noise": ["noise", 0], "guider": ["guider", 0], "sampler": ["select", 0], "sigmas": ["sigmas", 0]}
        graph["sample"] = (sampler, {**links, "latent_image": ["empty", 0], **inputs})
    return graph


SAMPLERS = ("KSampler", "KSamplerAdvanced", "SamplerCustomAdvanced", "SanaNodesSampler", "SanaNodesBatchSampler")
DECODES = {
    "VAEDecode": {},
    "VAEDecodeTiled": {"tile_size": 64, "overlap": 0, "temporal_size": 8, "temporal_overlap": 4},
    "SanaNodesDecode": {},
}
ENCODES = {
    "VAEEncode": {},
    "VAEEncodeTiled": {"tile_size": 64, "overlap": 0, "temporal_size": 8, "temporal_overlap": 4},
    "VAEEncodeForInpaint": {"grow_mask_by": 6, "mask": ["mask", 0]},
    "InpaintModelConditioning": {
        "mask": ["mask", 0],
        "noise_mask": True,
        "positive": ["prompt", 0],
        "negative": ["negative", 0],
    },
}


def cases() -> Iterator[Case]:
    """Yield each wrong value with each node that takes such values."""
    for name, value in wrong_values(SHAPES, (1, 32, 4, 4)):
        malformed = {"value": ("AnyValue", {"value": {"samples": value}})}
        for sampler in SAMPLERS:
            yield Case(f"{sampler}: latent, {name}", {**base(sampler, latent_image=["value", 0]), **malformed})
        for decode, inputs in DECODES.items():
            node = (decode, {"samples": ["value", 0], "vae": ["load", 2], **inputs})
            yield Case(f"{decode}: latent, {name}", {**base(), **malformed, "sample": node})
    for name, value in wrong_values(PIXELS, (1, 64, 64, 3)):
        malformed = {
            "value": ("AnyValue", {"value": value}),
            "mask": ("SolidMask", {"value": 1.0, "width": 64, "height": 64}),
        }
        for encode, inputs in ENCODES.items():
            node = (encode, {"pixels": ["value", 0], "vae": ["load", 2], **inputs})
            yield Case(f"{encode}: pixels, {name}", {**base(), **malformed, "sample": node})
    for name, value in wrong_values(MASKS, (1, 8, 8)):
        for sampler in SAMPLERS:
            latent = {"samples": torch.zeros(1, 32, 4, 4), "noise_mask": value}
            malformed = {"value": ("AnyValue", {"value": latent})}
            yield Case(f"{sampler}: noise_mask, {name}", {**base(sampler, latent_image=["value", 0]), **malformed})
    for name, value in wrong_values(EMBEDS, (1, 300, 32)):
        for sampler in SAMPLERS[:4]:
            prompt = ("WrongPrompt", {"value": {"embeddings": value}})
            yield Case(f"{sampler}: embeddings, {name}", {**base(sampler), "prompt": prompt})


# Tracebacks name the files of the pack by its folder in custom_nodes or by their own path.
PACK = ("sana.nodes-1", str(ROOT / "nodes"), str(ROOT / "sana_core"))


def outcome(host, case: Case) -> tuple[str, str]:
    """Run a case. Returns its end and the message.

    "image": no error. "refused": one of the pack's errors. "bare": another error while the pack's code was running.
    "ComfyUI's": an error of ComfyUI before it called the pack, which other models have too.
    """
    host.nodes.NODE_CLASS_MAPPINGS.setdefault("WrongPrompt", WrongPrompt)
    try:
        host.run(case.graph)
    except Exception as error:
        for event, data in host.executor.status_messages:
            if event == "execution_error":
                kind, trace = data["exception_type"], "".join(data["traceback"])
                message = f"{kind}: {data['exception_message'].strip()}"
                if kind.endswith(("InputError", "CheckpointError")):
                    return "refused", message
                return ("bare" if any(name in trace for name in PACK) else "ComfyUI's"), message
        return "ComfyUI's", str(error)
    return "image", ""
