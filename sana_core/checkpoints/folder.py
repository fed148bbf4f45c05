"""The diffusers layout: a folder with model_index.json and one folder of config and weights a component."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ..text import TextEncoder

if TYPE_CHECKING:
    from diffusers import AutoencoderDC, SanaTransformer2DModel

CLASSES = {"transformer": "SanaTransformer2DModel", "vae": "AutoencoderDC", "text_encoder": "Gemma2Model"}
REMEDY = "download the model folder again, whole, in the diffusers layout"
# .bin files are pickles, and a hub is never asked
FROM_DISK: dict[str, Any] = {"use_safetensors": True, "local_files_only": True}


def component_folder(path: str | Path, name: str) -> Path:
    """Return the folder of component `name` of the checkpoint at `path`, or `path` itself if it is that component.

    Raises FileNotFoundError if the folder, its config.json or its safetensors weights are not there, ValueError if
    the config is no JSON or names another class than SANA's.
    """
    path = Path(path)
    if not path.is_dir():
        raise FileNotFoundError(f"model: got {path.name!r}, which is no folder; {REMEDY}")
    folder = path if (path / "config.json").is_file() else path / name
    shown = f"{path.name}/{name}" if folder != path else path.name
    config_file = folder / "config.json"
    if not config_file.is_file():
        raise FileNotFoundError(f"model: no config.json in {shown}; {REMEDY}")
    try:
        config = json.loads(config_file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"model: {shown}/config.json is not JSON ({error}); {REMEDY}") from None
    found = config.get("_class_name") or (config.get("architectures") or ["no class"])[0]
    if found != CLASSES[name]:
        raise ValueError(f"model: {shown} holds {found}, expected {CLASSES[name]}; choose a SANA model")
    if not any(folder.glob("*.safetensors")):
        raise FileNotFoundError(f"model: no .safetensors file in {shown}; {REMEDY}")
    return folder


def stored_dtype(path: str | Path, name: str) -> torch.dtype:
    """Return the dtype of the first tensor of component `name`. Raises as `component_folder` does."""
    from safetensors import safe_open

    with safe_open(min(component_folder(path, name).glob("*.safetensors")), framework="pt") as file:
        return file.get_tensor(next(iter(file.keys()))).dtype


def scaling_factor(path: str | Path) -> float:
    """Return what the latents of the checkpoint's VAE are multiplied by. Raises as `component_folder` does."""
    config = json.loads((component_folder(path, "vae") / "config.json").read_text(encoding="utf-8"))
    return config["scaling_factor"]


def load_transformer(
    path: str | Path, device: str | torch.device = "cpu", dtype: torch.dtype = torch.float32
) -> SanaTransformer2DModel:
    """Return the transformer of a diffusers folder in evaluation mode.

    Raises as `component_folder` does.
    """
    from diffusers import SanaTransformer2DModel

    folder = component_folder(path, "transformer")
    model = SanaTransformer2DModel.from_pretrained(folder, torch_dtype=dtype, **FROM_DISK)
    return model.to(device).requires_grad_(False)


def load_autoencoder(
    path: str | Path, device: str | torch.device = "cpu", dtype: torch.dtype = torch.float32
) -> AutoencoderDC:
    """Return the DC-AE of a diffusers folder in evaluation mode.

    Raises as `component_folder` does.
    """
    from diffusers import AutoencoderDC

    folder = component_folder(path, "vae")
    model = AutoencoderDC.from_pretrained(folder, torch_dtype=dtype, **FROM_DISK)
    return model.to(device).requires_grad_(False)


def load_text_encoder(
    path: str | Path, device: str | torch.device = "cpu", dtype: torch.dtype = torch.float32
) -> TextEncoder:
    """Return tokenizer and Gemma 2 of a diffusers folder in evaluation mode.

    Raises as `component_folder` does.
    """
    from transformers import AutoTokenizer, Gemma2Model

    folder = component_folder(path, "text_encoder")
    tokenizer = folder.parent / "tokenizer"
    if not (tokenizer / "tokenizer.json").is_file():
        raise FileNotFoundError(f"model: no tokenizer.json in {Path(path).name}/tokenizer; {REMEDY}")
    model = Gemma2Model.from_pretrained(folder, dtype=dtype, **FROM_DISK)
    return TextEncoder(
        AutoTokenizer.from_pretrained(tokenizer, local_files_only=True), model.to(device).requires_grad_(False)
    )
