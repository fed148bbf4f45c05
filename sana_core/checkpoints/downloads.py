"""The released files that templates and errors name: file names, sizes and URLs."""

from __future__ import annotations

from typing import NamedTuple

from .headers import SUFFIXES

HOST = "https://huggingface.co"


class Download(NamedTuple):
    """A file of `gigabytes` (None: not known) for `folder` in models, at `url`, under another name there."""

    folder: str
    gigabytes: float | None
    url: str


def transformer(repository: str, gigabytes: float, variant: str = "") -> Download:
    path = f"transformer/diffusion_pytorch_model{variant}.safetensors"
    return Download("diffusion_models", gigabytes, f"{HOST}/Efficient-Large-Model/{repository}/resolve/main/{path}")


# sizes from the repositories' listings; diffusers writes bf16 and fp16 variants beside fp32
DOWNLOADS = {
    "Sana_600M_1024px.safetensors": transformer("Sana_600M_1024px_diffusers", 1.2, ".fp16"),
    "Sana_1600M_1024px_BF16.safetensors": transformer("Sana_1600M_1024px_BF16_diffusers", 3.2, ".bf16"),
    "Sana_1600M_2Kpx_BF16.safetensors": transformer("Sana_1600M_2Kpx_BF16_diffusers", 3.2, ".bf16"),
    "Sana_1600M_4Kpx_BF16.safetensors": transformer("Sana_1600M_4Kpx_BF16_diffusers", 3.2, ".bf16"),
    "Sana_Sprint_1.6B_1024px.safetensors": transformer("Sana_Sprint_1.6B_1024px_diffusers", 3.2),
    "gemma_2_2b_it_elm_bf16.safetensors": Download(
        "text_encoders",
        5.2,
        f"{HOST}/Comfy-Org/PixelDiT/resolve/main/text_encoders/gemma_2_2b_it_elm_bf16.safetensors",
    ),
    "dc-ae-f32c32-sana-1.1.safetensors": Download(
        "vae",
        1.25,
        f"{HOST}/mit-han-lab/dc-ae-f32c32-sana-1.1-diffusers/resolve/main/diffusion_pytorch_model.safetensors",
    ),
    "Sana_600M_1024px_ControlNet_HED.pth": Download(
        "controlnet",
        None,
        f"{HOST}/Efficient-Large-Model/Sana_600M_1024px_ControlNet_HED/resolve/main/checkpoints/"
        "Sana_600M_1024px_ControlNet_HED.pth",
    ),
    # whole folders
    "SANA-Video_2B_480p_diffusers": Download(
        "diffusers", None, f"{HOST}/Efficient-Large-Model/SANA-Video_2B_480p_diffusers"
    ),
    "SANA-Video_2B_720p_diffusers": Download(
        "diffusers", None, f"{HOST}/Efficient-Large-Model/SANA-Video_2B_720p_diffusers"
    ),
    "VIBE-Image-Edit": Download("diffusers", None, f"{HOST}/iitolstykh/VIBE-Image-Edit"),
}


GEMMA_FILE = "gemma_2_2b_it_elm_bf16.safetensors"
# Names in the lists of ComfyUI_ExtraModels and its fork: a repository, and the file that takes its place.
REPOSITORIES = {
    "Efficient-Large-Model/gemma-2-2b-it": GEMMA_FILE,
    "google/gemma-2-2b-it": GEMMA_FILE,
    "unsloth/gemma-2-2b-it-bnb-4bit": GEMMA_FILE,
    "mit-han-lab/dc-ae-f32c32-sana-1.1-diffusers": "dc-ae-f32c32-sana-1.1.safetensors",
    "mit-han-lab/dc-ae-f32c32-sana-1.0-diffusers": "dc-ae-f32c32-sana-1.0.safetensors",
    "Efficient-Large-Model/Sana_1600M_1024px": "Sana_1600M_1024px_BF16.safetensors",
}
# The .pth in a repository has the repository's name, with these exceptions.
ORIGINALS = {f"Sana_600M_{pixels}px": f"Sana_600M_{pixels}px_MultiLing" for pixels in (512, 1024)}


def file_names(name: str) -> list[str]:
    """Return the names under which the file that a workflow calls `name` may be stored, the best first.

    `name` is a file's, or a repository's from which ComfyUI_ExtraModels downloads. The repository's own file comes
    before a file that takes its place.
    """
    owner, _, repository = name.partition("/")
    is_file = name.lower().endswith(SUFFIXES)
    if is_file or (name not in REPOSITORIES and owner != "Efficient-Large-Model"):
        return [name]
    stems = dict.fromkeys((ORIGINALS.get(repository, repository), repository))
    names = [f"{stem}{suffix}" for stem in stems for suffix in (".pth", ".safetensors")]
    return [*names, *([REPOSITORIES[name]] if name in REPOSITORIES else [])]


def where_to_get(name: str) -> str:
    """Return the remedy for a missing file or folder: for a released one its size and link, or the download command."""
    if name not in DOWNLOADS:
        return "put it there and refresh"
    released = DOWNLOADS[name]
    if released.folder == "diffusers":
        return f"run {download_command(name)} in ComfyUI's folder and refresh"
    size = "" if released.gigabytes is None else f" ({released.gigabytes} GB)"
    return f"get it{size} from {released.url}, save it there under this name and refresh"


def download_command(folder: str) -> str:
    """Return the command line that downloads a released folder, to be run in ComfyUI's folder.

    The command hf is not on the PATH of ComfyUI's portable version.
    """
    repository = DOWNLOADS[folder].url.removeprefix(f"{HOST}/")
    return f"python -m huggingface_hub.cli.hf download {repository} --local-dir models/diffusers/{folder}"
