"""What a MODEL, CLIP or VAE adds to the file that ComfyUI's nodes for saving write, so that it loads again as it was.

Those nodes take tensors and write no metadata of a pack. So the configuration goes beside the weights as a tensor of
bytes, as the tokenizers of ComfyUI's own text encoders do.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

import torch

from ...sana_core.checkpoints.detect import CLASSES, SAVED_CONFIG


def config_tensor(kind: str, config: Mapping[str, object]) -> dict[str, torch.Tensor]:
    """Return {name: bytes} of a component's configuration, for its state dict; `kind` is one of CLASSES."""
    known = {key: value for key, value in config.items() if key != "_name_or_path"}
    named = {"architectures": [CLASSES[kind][0]]} if kind == "text_encoder" else {"_class_name": CLASSES[kind][0]}
    content = json.dumps({**known, **named}).encode()
    return {SAVED_CONFIG: torch.frombuffer(bytearray(content), dtype=torch.uint8)}
