"""Trains a small CLIP that rates how well an image fits a prompt. It is saved in the format of transformers.

`python -m demo.scorer` trains it on paintings and their captions and writes sana-posters-scorer/. It ranks the images
of a prompt. The judge does not rank. It measures how much the ranking helps.
"""

from __future__ import annotations

import random
from itertools import islice
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from torch.nn import functional
from transformers import CLIPConfig, CLIPImageProcessor, CLIPModel, PreTrainedTokenizerFast

from .captions import NUMBERS, SAID, counted, random_caption
from .judge import scenes_to_judge, shrink, soften
from .painting import paint
from .steps import log_losses, take_step
from .world import ALL_COLOURS, ALL_KINDS, PLACES, STYLES, TIMES, Scene, belongs

HERE = Path(__file__).parent
FOLDER, CURVE = HERE / "sana-posters-scorer", HERE / "build" / "scorer.jsonl"
SIDE, PATCH, WIDTH, JOINT, LENGTH = 96, 16, 128, 64, 48
POOL, STEPS, BATCH, LEARNING_RATE = 4000, 900, 48, 2e-3
# Special tokens in the order of their ids.
PAD, UNKNOWN, START, END = "<|pad|>", "<|unknown|>", "<|startoftext|>", "<|endoftext|>"


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer of the captions' words."""
    ways = [*ALL_COLOURS, *(way for said in SAID.values() for way in said)]
    ways += [counted(count, way) for kind in ALL_KINDS for way in SAID[kind] for count in (1, *NUMBERS)]
    ways += ["of", "and"]
    split = pre_tokenizers.Whitespace()
    words = sorted({word for way in ways for word, _ in split.pre_tokenize_str(f"{way}, {way}.".lower())})
    vocabulary = {word: number for number, word in enumerate((PAD, UNKNOWN, START, END, *words))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    tokenizer.normalizer, tokenizer.pre_tokenizer = normalizers.Lowercase(), split
    ends = [(token, vocabulary[token]) for token in (START, END)]
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{START} $A {END}", special_tokens=ends)
    named = {"pad_token": PAD, "unk_token": UNKNOWN, "bos_token": START, "eos_token": END}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=LENGTH, **named)


def build(tokenizer: PreTrainedTokenizerFast) -> CLIPModel:
    sizes = {"hidden_size": WIDTH, "intermediate_size": 3 * WIDTH, "num_attention_heads": 4, "projection_dim": JOINT}
    tokens = {
        "vocab_size": len(tokenizer),
        "max_position_embeddings": LENGTH,
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
    }
    text = {**sizes, **tokens, "num_hidden_layers": 1}
    vision = {**sizes, "num_hidden_layers": 4, "image_size": SIDE, "patch_size": PATCH}
    return CLIPModel(CLIPConfig(text_config=text, vision_config=vision, projection_dim=JOINT))


def changed(rng: random.Random, scene: Scene) -> Scene:
    """Return `scene` with one change: of time, place or style, or of kind, colour or number of its first group."""
    first, *other_groups = scene.groups
    scene_kinds = {group.kind for group in scene.groups}
    kinds = [kind for kind in ALL_KINDS if kind not in scene_kinds and belongs(kind, scene.place)]
    places = [place for place in PLACES if all(belongs(kind, place) for kind in scene_kinds) and place != scene.place]
    field = rng.choice(["time", "place", "style", "kind", "colour", "colour", "number", "number"])
    if field == "place" and places:
        return scene._replace(place=rng.choice(places))
    if field == "style":
        return scene._replace(style=rng.choice([style for style in STYLES if style != scene.style]))
    if field == "kind":
        return scene._replace(groups=(first._replace(kind=rng.choice(kinds)), *other_groups))
    if field == "colour":
        other = rng.choice([colour for colour in ALL_COLOURS if colour != first.colour])
        return scene._replace(groups=(first._replace(colour=other), *other_groups))
    if field == "number":
        other = rng.choice([count for count in (1, *NUMBERS) if count != first.count])
        return scene._replace(groups=(first._replace(count=other), *other_groups))
    return scene._replace(time=rng.choice([time for time in TIMES if time != scene.time]))


def captions(rng: random.Random, scenes: list[Scene]) -> list[str]:
    """Return a right caption of each scene, then a wrong caption of each scene, which differs in one fact."""
    seeds = [rng.random() for _ in scenes]
    wrong = [changed(rng, scene) for scene in scenes]
    return [random_caption(random.Random(s), scene) for s, scene in zip(2 * seeds, [*scenes, *wrong], strict=True)]


def contrastive_loss(model: CLIPModel, pixels: torch.Tensor, tokens: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return CLIP's loss. The wrong captions, which follow the right ones, are additional negatives of the images."""
    out = model(pixel_values=pixels, **tokens)
    right, count = torch.arange(len(pixels)), len(pixels)
    by_text = functional.cross_entropy(out.logits_per_text[:count], right)
    return (functional.cross_entropy(out.logits_per_image, right) + by_text) / 2


def train() -> None:
    torch.manual_seed(11)
    rng, tokenizer = random.Random(11), make_tokenizer()
    scenes = list(islice(scenes_to_judge(rng), POOL))
    pool = torch.cat([(shrink(paint(scene)[None]) * 255).round().byte() for scene in scenes])
    model, processor = build(tokenizer).train(), CLIPImageProcessor(size={"shortest_edge": SIDE}, crop_size=SIDE)
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in (processor.image_mean, processor.image_std))
    optimizer = torch.optim.AdamW(model.parameters(), LEARNING_RATE, weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, LEARNING_RATE, total_steps=STEPS, pct_start=0.1)
    CURVE.parent.mkdir(parents=True, exist_ok=True)
    report = log_losses(CURVE)
    for step in range(STEPS):
        pick = torch.randint(POOL, (BATCH,))
        words = captions(rng, [scenes[number] for number in pick.tolist()])
        tokens = tokenizer(words, padding=True, return_tensors="pt", return_token_type_ids=False)
        pixels = soften(pool[pick].float() / 255, rng).clamp(0, 1)
        pixels = (functional.interpolate(pixels, (SIDE, SIDE), mode="area") - mean) / std
        loss = contrastive_loss(model, pixels, dict(tokens))
        take_step(model, optimizer, schedule, loss)
        if step % 20 == 0:
            report(step, loss.item())
    for component in (model.half(), processor, tokenizer):
        component.save_pretrained(FOLDER)


if __name__ == "__main__":
    train()
