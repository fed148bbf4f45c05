"""Small CLIPs with random weights, as transformers saves them."""

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import CLIPConfig, CLIPImageProcessor, CLIPModel, PreTrainedTokenizerFast

PROMPT = "a red house and a blue boat"


def save_clip(folder, seed=0):
    """A small CLIP with random weights, its scale 100 as PickScore_v1's, saved by transformers."""
    words = {
        word: number for number, word in enumerate(["<pad>", "<start>", "<end>", "<unk>", *sorted({*PROMPT.split()})])
    }
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    ends = [("<start>", 1), ("<end>", words["<end>"])]
    tokenizer.post_processor = processors.TemplateProcessing(single="<start> $A <end>", special_tokens=ends)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<end>")
    torch.manual_seed(seed)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    tokens = {"vocab_size": len(words), "max_position_embeddings": 16, "eos_token_id": words["<end>"]}
    config = CLIPConfig(
        text_config={**sizes, **tokens, "pad_token_id": 0, "bos_token_id": 1},
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
