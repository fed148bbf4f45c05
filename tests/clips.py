"""Small CLIPs with random weights, as transformers saves them."""

import torch
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import CLIPConfig, CLIPImageProcessor, CLIPModel, CLIPTokenizer, PreTrainedTokenizerFast

PROMPT = "a red house and a blue boat"
START, END = "<|startoftext|>", "<|endoftext|>"


def word_tokenizer():
    """A tokenizer of the words in PROMPT, as the scorer of the demo model has."""
    words = {word: number for number, word in enumerate(["<pad>", START, END, "<unk>", *sorted({*PROMPT.split()})])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.normalizer, tokenizer.pre_tokenizer = normalizers.Lowercase(), pre_tokenizers.Whitespace()
    ends = [(token, words[token]) for token in (START, END)]
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{START} $A {END}", special_tokens=ends)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", bos_token=START, eos_token=END)


def byte_tokenizer():
    """CLIP's tokenizer with few pieces: all bytes, within and at the end of a word, and some merges."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("h", "o"), ("ho", "u"), ("hou", "s"), ("hous", "e</w>"), ("r", "e"), ("re", "d</w>"), ("'", "s</w>")]
    merges += [
        ("l", "l</w>"),
        ("l", "l"),
        ("b", "o"),
        ("bo", "a"),
        ("a", "t</w>"),
        ("\u00c3", "\u00a9"),
        ("1", "2</w>"),
    ]
    pieces = [*letters, *(f"{letter}</w>" for letter in letters), *map("".join, merges), START, END]
    return CLIPTokenizer(vocab={piece: number for number, piece in enumerate(pieces)}, merges=merges)


def save_clip(folder, seed=0, tokenizer=None):
    """A small CLIP with random weights, its scale 100 as PickScore_v1's, saved by transformers."""
    fast = tokenizer or word_tokenizer()
    torch.manual_seed(seed)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    tokens = {"vocab_size": len(fast), "max_position_embeddings": 16, "eos_token_id": fast.eos_token_id}
    config = CLIPConfig(
        text_config={**sizes, **tokens, "pad_token_id": fast.pad_token_id, "bos_token_id": fast.bos_token_id},
        vision_config={**sizes, "image_size": 32, "patch_size": 8},
        projection_dim=16,
    )
    model = CLIPModel(config)
    with torch.no_grad():
        model.logit_scale.fill_(torch.tensor(100.0).log())
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.normal_(0, 0.2)
    model.save_pretrained(folder)
    # Not by CLIPProcessor: transformers 4.50 accepts no other tokenizer than CLIP's there.
    fast.save_pretrained(folder)
    CLIPImageProcessor(size={"shortest_edge": 32}, crop_size=32).save_pretrained(folder)
    return model
