"""Graphs of many kinds, as a script sends them: each a function of a source of random numbers.

Some are wrong on purpose, and some are to be cancelled. The model files that they need are written by `write_models`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import layouts
import torch
from checkpoints import link_tiny
from diffusers import SanaControlNetModel
from safetensors.torch import load_file
from setup import ROOT
from variants import SPRINT, make_variant

Graph = dict[str, dict[str, Any]]

CHECKPOINT = ROOT / "tests" / "models" / "sana-tiny"
MODEL = "sana-tiny"
COLOURS, SHAPES = ("red", "green", "blue", "yellow"), ("circle", "square", "triangle")
# Few sizes, because torch's libraries cache kernels for each new shape. With more, memory grows for hundreds of graphs.
SIZES = ((128, 128), (256, 192), (32, 256))
RANK = 4


class Kind(NamedTuple):
    """How to make a graph, what becomes of it (drawn, refused, failed, cancelled), and how often it is sent."""

    make: Callable[[Random], Graph]
    ends: str = "drawn"
    share: int = 4


def node(kind: str, **inputs: Any) -> dict[str, Any]:
    return {"class_type": kind, "inputs": inputs}


def prompt(random: Random) -> str:
    return f"a {random.choice(COLOURS)} {random.choice(SHAPES)} on a {random.choice(COLOURS)} background"


def loaded(random: Random, model: str = MODEL) -> Graph:
    """Model, prompts and an empty latent."""
    width, height = random.choice(SIZES)
    return {
        "load": node("SanaNodesLoader", model=model),
        "positive": node("SanaNodesTextEncode", clip=["load", 1], text=prompt(random), instruction=True),
        "negative": node("SanaNodesTextEncode", clip=["load", 1], text="", instruction=False),
        "empty": node("SanaNodesEmptyLatent", width=width, height=height, batch_size=random.choice((1, 2))),
    }


def conditioned(random: Random, model: str = "load", **inputs: Any) -> dict[str, Any]:
    links = {"positive": ["positive", 0], "negative": ["negative", 0], "latent_image": ["empty", 0]}
    return {"model": [model, 0], **links, "seed": random.getrandbits(64), "steps": random.randint(1, 4), **inputs}


def sampled(random: Random, model: str = "load", **inputs: Any) -> dict[str, Any]:
    options = {"guidance": random.choice((1.0, 2.5, 4.5)), "sampler": random.choice(("flow_euler", "flow_dpmpp_2m"))}
    return node("SanaNodesSampler", **conditioned(random, model, **{**options, **inputs}))


DECODES = (
    *(node("SanaNodesDecode", method=method) for method in ("auto", "whole", "strips", "tiles")),
    node("SanaNodesDecode", budget_gb=0.01),
    node("SanaNodesDecode", devices="all"),
    node("VAEDecode"),
    node("VAEDecodeTiled", tile_size=64, overlap=0, temporal_size=8, temporal_overlap=4),
)


def saved(random: Random, graph: Graph) -> Graph:
    """The graph with its pictures decoded and written, by one of the ways that there are."""
    way = random.choice(DECODES)
    decode = node(way["class_type"], samples=["sample", 0], vae=["load", 2], **way["inputs"])
    save = random.choice((node("SaveImage", filename_prefix="soak"), node("PreviewImage")))
    return {**graph, "decode": decode, "save": node(save["class_type"], images=["decode", 0], **save["inputs"])}


def picture(random: Random) -> Graph:
    return saved(random, {**loaded(random), "sample": sampled(random)})


def every_shape() -> Iterator[Graph]:
    """Graphs that decode each size in each way, and sample it in batches of both sizes with and without guidance."""
    for number, (width, height) in enumerate(SIZES):
        for step, way in enumerate(DECODES):
            graph = picture(Random(0))
            graph["empty"]["inputs"].update(width=width, height=height, batch_size=1 + step % 2)
            graph["sample"]["inputs"].update(guidance=(1.0, 4.5)[step // 2 % 2], seed=number)
            graph["decode"] = node(way["class_type"], samples=["sample", 0], vae=["load", 2], **way["inputs"])
            yield graph


def core_sampler(random: Random) -> Graph:
    options = {"cfg": 4.5, "sampler_name": random.choice(("euler", "dpmpp_2m")), "scheduler": "simple", "denoise": 1.0}
    return saved(random, {**loaded(random), "sample": node("KSampler", **conditioned(random, **options))})


def custom_sampler(random: Random) -> Graph:
    name = random.choice(("flow_euler", "flow_dpmpp_2m"))
    links = {"noise": ["noise", 0], "guider": ["guider", 0], "sampler": ["select", 0], "sigmas": ["sigmas", 0]}
    graph = {
        **loaded(random),
        "noise": node("RandomNoise", noise_seed=random.getrandbits(64)),
        "guider": node("CFGGuider", model=["load", 0], positive=["positive", 0], negative=["negative", 0], cfg=3.0),
        "select": node("SanaNodesSamplerSelect", sampler=name),
        "sigmas": node("SanaNodesScheduler", model=["load", 0], sampler=name, steps=3),
        "sample": node("SamplerCustomAdvanced", **links, latent_image=["empty", 0]),
    }
    return saved(random, graph)


def image_to_image(random: Random) -> Graph:
    graph = loaded(random)
    graph["grey"] = node("EmptyImage", width=128, height=96, batch_size=1, color=random.getrandbits(24))
    graph["empty"] = node("VAEEncode", pixels=["grey", 0], vae=["load", 2])
    return saved(random, {**graph, "sample": sampled(random, denoise=0.5)})


def guided(random: Random) -> Graph:
    graph = loaded(random)
    graph["pag"] = node("SanaNodesPAG", model=["load", 0], scale=2.0, blocks=random.choice(("", "1", "1, 3")))
    graph["interval"] = node("SanaNodesGuidanceInterval", model=["pag", 0], start=0.2, end=0.8)
    return saved(random, {**graph, "sample": sampled(random, "interval", guidance=4.5)})


def with_lora(random: Random) -> Graph:
    graph, model = loaded(random), "load"
    for number in range(random.randint(1, 2)):
        name, strength = f"style{random.randint(0, 1)}.safetensors", random.choice((-0.5, 0.7, 1.0))
        graph[f"lora {number}"] = node("SanaNodesLoraLoader", model=[model, 0], lora_name=name, strength_model=strength)
        model = f"lora {number}"
    return saved(random, {**graph, "sample": sampled(random, model)})


def with_controlnet(random: Random) -> Graph:
    graph = loaded(random)
    links = {"positive": ["positive", 0], "negative": ["negative", 0], "control_net": ["control", 0]}
    strength = {"strength": random.uniform(0.2, 1.0), "start_percent": 0.0, "end_percent": 1.0}
    graph |= {
        "edges": node("EmptyImage", width=128, height=128, batch_size=1, color=random.getrandbits(24)),
        "control": node("SanaNodesControlNetLoader", control_net_name="control.safetensors"),
        "apply": node("ControlNetApplyAdvanced", **links, image=["edges", 0], vae=["load", 2], **strength),
    }
    return saved(random, {**graph, "sample": sampled(random, positive=["apply", 0], negative=["apply", 1])})


def batch(random: Random) -> Graph:
    graph = loaded(random)
    graph["empty"]["inputs"]["batch_size"] = 1
    text = "\n".join(prompt(random) for _ in range(random.randint(1, 3)))
    graph["positive"] = node("SanaNodesPromptList", clip=["load", 1], prompts=text, instruction=True)
    options = {"count": random.randint(1, 3), "guidance": 4.5, "sampler": "flow_euler", "vae": ["load", 2]}
    options |= {"devices": random.choice(("default", "all", "cpu x 2")), "chunk": random.randint(0, 2)}
    graph["sample"] = node("SanaNodesBatchSampler", **conditioned(random, **options))
    return {**graph, "save": node("PreviewImage", images=["sample", 1])}


def sprint(random: Random) -> Graph:
    graph = loaded(random, "sprint")
    del graph["negative"]
    inputs = conditioned(random, guidance=4.5)
    del inputs["negative"]
    return saved(random, {**graph, "sample": node("SanaNodesSprint", **inputs)})


def single_file(random: Random) -> Graph:
    """A model from a single file in one of the precisions. A change of precision replaces the cached model."""
    dtype = random.choice(("default", "fp8_e4m3fn"))
    graph = {**loaded(random), "model": node("SanaNodesModelLoader", model_name="sana.safetensors", weight_dtype=dtype)}
    return saved(random, {**graph, "sample": sampled(random, "model")})


def text(random: Random) -> Graph:
    sampling = {"temperature": 0.7, "top_k": 64, "top_p": 0.95, "min_p": 0.05, "repetition_penalty": 1.05}
    sampling |= {"presence_penalty": 0.0, "seed": random.getrandbits(32)}
    inputs = {"prompt": prompt(random), "max_length": random.randint(4, 40), "use_default_template": False}
    inputs |= {"sampling_mode": "on"} | {f"sampling_mode.{key}": value for key, value in sampling.items()}
    graph = {
        "load": node("SanaNodesLoader", model=MODEL),
        "write": node("TextGenerate", clip=["load", 1], **inputs),
    }
    return {**graph, "show": node("PreviewAny", source=["write", 0])}


def plan(random: Random) -> Graph:
    size = {"width": 32 * random.randint(1, 128), "height": 32 * random.randint(1, 128), "batch_size": 1}
    plan_node = node("SanaNodesPlan", variant=random.choice(("0.6B", "1.6B")), **size)
    return {"plan": plan_node, "save": node("PreviewImage", images=["plan", 0])}


def refused(random: Random) -> Graph:
    """What core refuses before anything runs."""
    graph = picture(random)
    key, field, value = random.choice(
        (
            ("empty", "width", 100_000),
            ("empty", "batch_size", "many"),
            ("sample", "sampler", "none of these"),
            ("sample", "latent_image", ["nowhere", 0]),
            ("load", "model", "../../secret"),
        )
    )
    graph[key]["inputs"][field] = value
    return graph


def failed(random: Random) -> Graph:
    """What a node refuses while the graph runs."""
    graph = picture(random)
    fault = random.choice(("size", "channels", "lora", "budget", "sampler", "Sprint", "broken"))
    if fault == "size":
        graph["empty"]["inputs"]["width"] = 100
    elif fault == "channels":
        graph["empty"] = node("SanaNodesEmptyLatent", width=64, height=64, batch_size=1)
        graph["other"] = node("EmptyHunyuanLatentVideo", width=64, height=64, length=1, batch_size=1)
        graph["sample"]["inputs"]["latent_image"] = ["other", 0]
    elif fault == "lora":
        graph["lora"] = node(
            "SanaNodesLoraLoader", model=["load", 0], lora_name="other.safetensors", strength_model=1.0
        )
        graph["sample"]["inputs"]["model"] = ["lora", 0]
    elif fault == "budget":
        graph["empty"]["inputs"].update(width=256, height=192)
        graph["decode"] = node("SanaNodesDecode", samples=["sample", 0], vae=["load", 2], budget_gb=0.001)
    elif fault == "sampler":
        graph["sample"]["inputs"]["sampler"] = "scm"
    elif fault == "Sprint":
        graph["load"]["inputs"]["model"] = "sprint"
        graph["sample"]["inputs"]["sampler"] = "flow_euler"
    else:
        graph["load"]["inputs"]["model"] = "broken"
    return graph


def long_sampling(random: Random) -> Graph:
    graph = {**loaded(random), "sample": sampled(random, steps=200, guidance=4.5)}
    return saved(random, graph)


def long_batch(random: Random) -> Graph:
    graph = batch(random)
    graph["sample"]["inputs"].update(count=8, steps=50)
    return graph


def long_text(random: Random) -> Graph:
    graph = text(random)
    # any token is as likely as another, so that the one that ends a text is rare
    even = {"temperature": 2.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "presence_penalty": 5.0}
    graph["write"]["inputs"] |= {"max_length": 2000} | {f"sampling_mode.{key}": value for key, value in even.items()}
    return graph


KINDS = {
    "picture": Kind(picture, share=8),
    "core's sampler": Kind(core_sampler),
    "custom sampler": Kind(custom_sampler),
    "image to image": Kind(image_to_image),
    "PAG and interval": Kind(guided),
    "LoRA": Kind(with_lora, share=6),
    "ControlNet": Kind(with_controlnet),
    "batch": Kind(batch, share=6),
    "Sprint": Kind(sprint),
    "single file": Kind(single_file),
    "text": Kind(text),
    "plan": Kind(plan, share=2),
    "refused": Kind(refused, "refused"),
    "failed": Kind(failed, "failed", share=6),
    "cancelled sampling": Kind(long_sampling, "cancelled"),
    "cancelled batch": Kind(long_batch, "cancelled"),
    "cancelled text": Kind(long_text, "cancelled", share=2),
}


def mixed(random: Random, count: int) -> list[str]:
    """Return `count` names of kinds in random order. Each occurs at least once, and in proportion to its share."""
    shares = {name: kind.share for name, kind in KINDS.items()}
    names = [*shares, *random.choices(list(shares), list(shares.values()), k=count - len(shares))]
    random.shuffle(names)
    return names


def write_lora(path: Path, seed: int, width: int = 160) -> None:
    """A random LoRA on the cross-attention of every block of the bundled model, or of one of another width."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for block in range(5):
        for part, shape in (("lora_A", (RANK, width)), ("lora_B", (width, RANK))):
            name = f"transformer.transformer_blocks.{block}.attn2.to_q.{part}.weight"
            tensors[name] = torch.randn(shape, generator=generator) * 0.2
    layouts.save(tensors, path)


def write_transformer(path: Path, scale: float) -> None:
    """The bundled transformer in one file, its numbers times `scale`."""
    folder = CHECKPOINT / "transformer"
    tensors = {k: scale * v for k, v in load_file(next(folder.glob("*.safetensors"))).items()}
    layouts.save(tensors, path, config=(folder / "config.json").read_text(encoding="utf-8"))


def write_models(models: Path) -> None:
    """Write the models that the graphs load."""
    link_tiny(models.parent)
    for seed in (0, 1):
        write_lora(models / "loras" / f"style{seed}.safetensors", seed)
    write_lora(models / "loras" / "other.safetensors", 0, width=96)
    write_transformer(models / "diffusion_models" / "sana.safetensors", 1.0)
    torch.manual_seed(5)
    config = json.loads((CHECKPOINT / "transformer" / "config.json").read_text(encoding="utf-8"))
    same = ("num_attention_heads", "num_cross_attention_heads", "cross_attention_head_dim", "cross_attention_dim")
    same += ("caption_channels", "interpolation_scale", "sample_size")
    control = SanaControlNetModel(num_layers=3, **{key: config[key] for key in same})
    for layer in (control.input_block, *control.controlnet_blocks):
        torch.nn.init.normal_(layer.weight, std=0.03)
    layouts.save(
        control.state_dict(), models / "controlnet" / "control.safetensors", config=layouts.with_config(control)
    )
    make_variant(CHECKPOINT, models / "diffusers" / "sprint", **SPRINT)
    broken = make_variant(CHECKPOINT, models / "diffusers" / "broken")
    file = next((broken / "transformer").glob("*.safetensors"))
    file.write_bytes(file.read_bytes()[:1000])


def replace_files(models: Path, random: Random) -> None:
    """Rewrite the LoRAs and the single file in place while models loaded from them are in use."""
    for number in (0, 1):
        write_lora(models / "loras" / f"style{number}.safetensors", random.getrandbits(31))
    write_transformer(models / "diffusion_models" / "sana.safetensors", random.choice((0.97, 0.98, 0.99, 1.0)))
