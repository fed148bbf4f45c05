"""Trains a small Gemma 2 to continue a caption with a description, so that its states contain the scene's facts."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers
from transformers import Gemma2Config, Gemma2ForCausalLM, Gemma2Model, GemmaTokenizer

from sana_core.model.reference import DIFFUSERS
from sana_core.model.text import instruction_text

from .captions import counted, random_caption
from .steps import take_step
from .world import training_scenes

VOCABULARY = 1024
SPECIAL = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>"]
BATCH, LEARNING_RATE = 16, 2e-3


class Size(NamedTuple):
    """Sizes of the language model."""

    hidden: int
    intermediate: int
    layers: int
    # Training steps.
    steps: int


SIZE = Size(hidden=128, intermediate=320, layers=3, steps=3000)


def documents(rng: random.Random) -> Iterator[tuple[str, str]]:
    """Yield an endless sequence of (caption, description) of training scenes.

    The description lists all facts in simple words and random order. It also contains facts that the caption omits. Of
    these the model can only learn the frequencies.
    """
    for scene in training_scenes(rng):
        facts = [f"it is {scene.time}.", f"it is {scene.weather}.", f"the place is {scene.place}."]
        facts += [f"it is a {scene.style}."]
        for group in scene.groups:
            properties = ", ".join(filter(None, (group.colour, group.side, group.distance)))
            facts.append(f"{counted(group.count, group.kind)}: {properties}.")
        rng.shuffle(facts)
        yield random_caption(rng, scene), "\n" + " ".join(facts)


def train_tokenizer() -> GemmaTokenizer:
    """Train byte-pair merges on captions and the instruction, in Gemma's format. Unknown characters become bytes."""
    stream = documents(random.Random(3))
    corpus = ["".join(next(stream)) for _ in range(4000)] + [instruction_text(DIFFUSERS)] * 40
    raw = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    # Gemma replaces spaces by U+2581. Split before each of them, so that merges do not cross words.
    raw.normalizer = normalizers.Replace(" ", "\u2581")
    raw.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split("\u2581", behavior="merged_with_next"), pre_tokenizers.Punctuation()]
    )
    special = SPECIAL + [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(vocab_size=VOCABULARY, special_tokens=special, show_progress=False)
    raw.train_from_iterator(corpus, trainer)
    model = json.loads(raw.to_str())["model"]
    tokenizer = GemmaTokenizer(vocab=model["vocab"], merges=[tuple(pair) for pair in model["merges"]])
    bos = ("<bos>", tokenizer.bos_token_id)
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing("<bos> $A", "<bos> $A <bos> $B", [bos])
    return tokenizer


def build(tokenizer: GemmaTokenizer, size: Size) -> Gemma2ForCausalLM:
    return Gemma2ForCausalLM(
        Gemma2Config(
            vocab_size=len(tokenizer),
            hidden_size=size.hidden,
            intermediate_size=size.intermediate,
            num_hidden_layers=size.layers,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=16,
            query_pre_attn_scalar=16,
            max_position_embeddings=2048,
            sliding_window=1024,
            pad_token_id=tokenizer.pad_token_id,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
        )
    )


def train(report: Callable[[int, float], None], size: Size) -> tuple[GemmaTokenizer, Gemma2Model]:
    """Train on captions and descriptions, every second time with the instruction before them.

    Returns the tokenizer and the decoder stack.
    """
    torch.manual_seed(3)
    tokenizer = train_tokenizer()
    model = build(tokenizer, size)
    stream = documents(random.Random(4))
    prefix = instruction_text(DIFFUSERS)
    optimizer = torch.optim.AdamW(model.parameters(), LEARNING_RATE, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, LEARNING_RATE, total_steps=size.steps, pct_start=0.05)
    for step in range(size.steps):
        before = prefix if step % 2 else ""
        skip = len(tokenizer(before).input_ids) if before else 0
        texts = [
            before + prompt + description + "<eos>" for prompt, description in (next(stream) for _ in range(BATCH))
        ]
        batch = tokenizer(texts, padding=True, padding_side="right", return_tensors="pt")
        labels = batch.input_ids.masked_fill(batch.attention_mask == 0, -100)
        # Do not train on the instruction, which is always the same.
        labels[:, :skip] = -100
        loss = model(**batch, labels=labels).loss
        take_step(model, optimizer, schedule, loss)
        if step % 20 == 0:
            report(step, loss.item())
    return tokenizer, model.model.train(False)
