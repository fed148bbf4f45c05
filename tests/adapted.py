"""Adapters that have learnt something."""

import torch

import sana_core
from sana_core.training.settings import Method
from sana_core.training.trained_model import adapter_tensors, add_adapter, write_adapter


def learn_something(model, much=0.05):
    """Change the trainable parameters of a model in place. Returns the model."""
    numbers = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data += much * torch.randn(parameter.shape, generator=numbers).to(parameter.dtype)
    return model


def save_adapter(checkpoint, file, method=None, seed=7, much=0.05):
    """Write an adapter, a LoRA of rank 4 unless said, as a training does; return the transformer with it."""
    method, transformer = method or Method(rank=4), sana_core.load_transformer(checkpoint)
    add_adapter(transformer, method, seed)
    learn_something(transformer, much)
    write_adapter(file, transformer, adapter_tensors(transformer, torch.float32), method, {})
    return transformer
