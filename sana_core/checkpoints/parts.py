"""The kinds of a checkpoint's parts: their names, where a folder has them, and how one is found."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..errors import CheckpointError, MissingFileError

if TYPE_CHECKING:
    from .detect import CheckpointInfo

TRANSFORMERS = ("transformer", "video_transformer")
FOLDERS = {
    "transformer": "transformer",
    "video_transformer": "transformer",
    "autoencoder": "vae",
    "video_autoencoder": "vae",
    "text_encoder": "text_encoder",
}
KINDS = {
    "transformer": "SANA transformer",
    "video_transformer": "SANA-Video transformer",
    "controlnet": "SANA ControlNet",
    "autoencoder": "DC-AE",
    "video_autoencoder": "video VAE",
    "text_encoder": "Gemma 2 text encoder",
    "lora": "LoRA",
    "pipeline": "SANA pipeline",
}
WANTED = {
    "transformer": "a SANA transformer",
    "video_transformer": "a SANA-Video transformer",
    "controlnet": "a SANA ControlNet",
    "autoencoder": "SANA's VAE, DC-AE f32c32",
    "video_autoencoder": "SANA-Video's VAE",
    "text_encoder": "SANA's text encoder, Gemma-2-2b-it",
    "lora": "a LoRA",
}
WHERE = {
    "transformer": "get one from Efficient-Large-Model on Hugging Face, such as Sana_1600M_1024px_BF16_diffusers",
    "video_transformer": "get SANA-Video_2B_480p_diffusers from Efficient-Large-Model on Hugging Face",
    "controlnet": "get Sana_1600M_1024px_BF16_ControlNet_HED from Efficient-Large-Model on Hugging Face",
    "autoencoder": "get dc-ae-f32c32-sana-1.1-diffusers from mit-han-lab on Hugging Face",
    "video_autoencoder": "get SANA-Video_2B_480p_diffusers from Efficient-Large-Model on Hugging Face, whole",
    "text_encoder": "get gemma-2-2b-it from Efficient-Large-Model on Hugging Face; no account is needed",
    "lora": "choose a LoRA trained on SANA",
}


def find_part(info: CheckpointInfo, kind: str) -> CheckpointInfo:
    """Return the component of that kind.

    Raises CheckpointError that names what was found and where to get the right one, MissingFileError for a component's
    folder that is not whole.
    """
    for part in info.parts or (info,):
        if part.kind == kind:
            return part
    if (info.path / "model_index.json").is_file() and kind in FOLDERS:
        found_there = [part for part in info.parts if part.path.parent == info.path / FOLDERS[kind]]
        if not found_there:
            raise MissingFileError(
                f"{info.name}: no config.json in {info.name}/{FOLDERS[kind]}; download the folder again, whole"
            )
        info = found_there[0]
    found = ", ".join(describe(part) for part in info.parts or (info,))
    raise CheckpointError(f"{info.name}: not {WANTED[kind]}: found {found}; {WHERE[kind]}")


def find_transformer(info: CheckpointInfo) -> CheckpointInfo:
    """Return the transformer in `info`, of images or of videos. Raises as `find_part` does."""
    videos = [part for part in info.parts or (info,) if part.kind == "video_transformer"]
    return videos[0] if videos else find_part(info, "transformer")


def describe(info: CheckpointInfo) -> str:
    """Return `info`'s kind and variant as text."""
    if info.kind == "other":
        return info.variant
    return f"a {KINDS[info.kind]} ({info.variant})" if info.variant else f"a {KINDS[info.kind]}"
