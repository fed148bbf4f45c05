"""Every option of every command that takes a path, and every path in a training's settings."""

import io
import json
import os
import re
import shutil
from contextlib import redirect_stderr, redirect_stdout
from typing import NamedTuple

import torch
import vibe_models
import video_models
from bounded import bounded
from checkpoints import TINY
from clips import save_clip
from pictures import write_pictures
from safetensors.torch import load_file, save_file
from wrong_paths import permissions_count

from sana_core.__main__ import main

WEIGHTS = "diffusion_pytorch_model.safetensors"
SMALL = "--width 32 --height 32 --steps 1 --devices cpu"
SMALL_VIDEO = "--width 64 --height 64 --steps 1 --devices cpu"
IMAGE = f"--checkpoint TINY {SMALL}"
VIDEO = f"--frames 5 --checkpoint VIDEO {SMALL_VIDEO}"
BEST = "--best 1 --of 2 --scorer PATH"
MODEL_NAMES = (".safetensors", ".pth", "")


class Row(NamedTuple):
    """A path that a command takes. In `words`, PATH is the wrong path. The other options are right."""

    words: str
    suffixes: tuple[str, ...] = ("",)
    # Kinds of paths that this option accepts.
    right: tuple[str, ...] = ()
    # The kind of file that this option reads, of those that `make_good` makes. "": none, or it writes a file.
    reads: str = ""


# A missing folder is created, and a folder may have any name.
NEW = ("missing", "in a missing folder")
FILE = ("missing",)
FOLDERS = (*NEW, "a folder", "a folder with files")
# With --overwrite a file or a link is replaced.
REPLACED = (*NEW, "a text", "empty", "a loop", "a link to nowhere", "unreadable")
TEXT = ("a text", "a folder's name as a file's")
ROWS = {
    "generate checkpoint": Row(f"generate x --checkpoint PATH --out out {SMALL}", MODEL_NAMES, reads="model"),
    "generate checkpoint, video": Row(
        f"generate x --frames 5 --checkpoint PATH --out clip.mp4 {SMALL_VIDEO}", MODEL_NAMES, reads="video model"
    ),
    "generate checkpoint, cluster": Row("generate x --cluster 127.0.0.1:9 --checkpoint PATH --out out", MODEL_NAMES),
    "generate out": Row(f"generate x {IMAGE} --out PATH", right=FOLDERS),
    "generate out, overwrite": Row(f"generate x {IMAGE} --overwrite --out PATH", right=FOLDERS),
    "generate out, video": Row(f"generate x {VIDEO} --out PATH", (".mp4",), NEW),
    "generate out, no video": Row(f"generate x {VIDEO} --out PATH", (".webm", "")),
    "generate out, overwritten video": Row(f"generate x {VIDEO} --overwrite --out PATH", (".mp4",), REPLACED),
    "generate lora": Row(f"generate x {IMAGE} --lora PATH", MODEL_NAMES, reads="LoRA"),
    "generate lora, strength": Row(f"generate x {IMAGE} --lora PATH=0.5", MODEL_NAMES, reads="LoRA"),
    "generate scorer": Row(f"generate x {IMAGE} {BEST}", reads="scorer"),
    "generate first": Row(f"generate x {VIDEO} --out clip.mp4 --first PATH", (".png", ""), reads="image"),
    "generate edit": Row(
        "generate x --checkpoint VIBE --edit PATH --out out --steps 1 --devices cpu", (".png", ""), reads="image"
    ),
    "batch prompts": Row(f"batch PATH {IMAGE}", (".txt", ""), TEXT, "prompts"),
    "batch checkpoint": Row(f"batch PROMPTS --checkpoint PATH {SMALL}", MODEL_NAMES, reads="model"),
    "batch out": Row(f"batch PROMPTS {IMAGE} --out PATH", right=FOLDERS),
    "batch lora": Row(f"batch PROMPTS {IMAGE} --lora PATH", MODEL_NAMES, reads="LoRA"),
    "batch scorer": Row(f"batch PROMPTS {IMAGE} {BEST}", reads="scorer"),
    "decode latents": Row("decode PATH --checkpoint TINY", (".safetensors", ".latent", ""), reads="latents"),
    "decode checkpoint": Row("decode LATENTS --checkpoint PATH", MODEL_NAMES, reads="VAE"),
    "decode vae": Row("decode LATENTS --vae PATH"),
    "decode out": Row("decode LATENTS --checkpoint TINY --out PATH", right=FOLDERS),
    "decode out, file": Row("decode LATENTS --checkpoint TINY --out PATH", (".png", ".tif"), NEW),
    "decode out, overwritten": Row("decode LATENTS --checkpoint TINY --overwrite --out PATH", (".png",), REPLACED),
    "convert source": Row("convert PATH out.safetensors", MODEL_NAMES, reads="VAE"),
    "convert target": Row("convert VAE PATH", (".safetensors", ".sft"), FILE),
    "convert target, no name": Row("convert VAE PATH"),
    "inspect paths": Row("inspect PATH", (*MODEL_NAMES, ".json"), reads="VAE"),
    "doctor json": Row("doctor --seconds 0 --json PATH", (".json",), FILE),
    "train settings": Row("train PATH", (".toml", ""), reads="settings"),
    "train settings, plan": Row("train PATH --plan", (".toml", ""), reads="settings"),
}
# Paths in a training's settings. An empty path means the default, if there is one.
UNSET = ("nothing",)
PLACES = {
    "model": Row("train SETTINGS", MODEL_NAMES, reads="model"),
    "out": Row("train SETTINGS", right=FOLDERS),
    "text_encoder": Row("train SETTINGS", MODEL_NAMES, UNSET, "model"),
    "autoencoder": Row("train SETTINGS", MODEL_NAMES, UNSET, "model"),
    "cache": Row("train SETTINGS", right=(*FOLDERS, *UNSET)),
    "method.start": Row("train SETTINGS", MODEL_NAMES, UNSET, "LoRA"),
    "validation.control": Row("train SETTINGS", (".png",), reads="image"),
    "phase.data": Row("train SETTINGS", reads="images"),
    "phase.regularisation": Row("train SETTINGS", reads="images"),
}
# A plan reads only the models, the text encoder and the autoencoder as the model.
READ_BY_PLAN = ("model", "method.start")
# Lines that a command writes while it works, and lines of the log beside an error.
PROGRESS = re.compile(
    r"\s*|checking .*|estimating .*|.*\d+ of \d+.*|step \d.*|dataset: left out .*|.* left out.*|.*is not an image.*"
)


def make_inputs(folder):
    """Return {placeholder in ROWS: a valid path}, all in `folder`."""
    (folder / "prompts.txt").write_text("a red circle")
    save_file({"latents": torch.zeros(1, 32, 2, 2)}, folder / "latents.safetensors")
    write_pictures(folder / "images", 2, controls=True)
    save_clip(folder / "clip")
    paths = {"PROMPTS": folder / "prompts.txt", "LATENTS": folder / "latents.safetensors", "TINY": TINY}
    paths |= {"VIDEO": video_models.save_folder("480p", folder / "video"), "VAE": TINY / "vae"}
    vibe_models.save_vibe(folder / "vibe")
    paths |= {"VIBE": folder / "vibe"}
    paths |= {"images": folder / "images", "latent cache": folder / "cache", "clip": folder / "clip"}
    shutil.copytree(TINY, folder / "model")
    shutil.copy(TINY / "vae" / WEIGHTS, folder / "vae.safetensors")
    shutil.copy(TINY / "vae" / "config.json", folder / "config.json")
    lora = {}
    for name, weight in load_file(TINY / "transformer" / WEIGHTS).items():
        if re.search(r"attn\d\.to_(q|k|v|out\.0)\.weight", name):
            layer, (rows, columns) = f"transformer.{name.removesuffix('.weight')}", weight.shape
            lora[f"{layer}.lora_A.weight"] = torch.ones(2, columns)
            lora[f"{layer}.lora_B.weight"] = torch.zeros(rows, 2)
    save_file(lora, folder / "lora.safetensors")
    return paths


def make_good(kind, path, inputs):
    """Make a good file or folder of this kind at `path`.

    It consists of links to `inputs`. Links to the files of the repository would change their times, and a process that
    reads them would take them for changed.
    """
    sources = {"LoRA": "lora.safetensors", "VAE": "vae.safetensors", "latents": "latents.safetensors"}
    folders = {
        "model": inputs["PROMPTS"].parent / "model",
        "video model": inputs["VIDEO"],
        "scorer": inputs["clip"],
        "images": inputs["images"],
    }
    if kind in folders:
        shutil.copytree(folders[kind], path, copy_function=os.link)
    elif kind == "settings":
        shutil.move(write_settings(path.parent, "out", "out", inputs), path)
    elif kind == "image":
        os.link(sorted(inputs["images"].glob("*-control.png"))[0], path)
    else:
        os.link(inputs["PROMPTS"].parent / sources.get(kind, "prompts.txt"), path)


def quoted(value):
    """Return `value` as TOML."""
    return json.dumps(value, default=str, ensure_ascii=False).replace("\x7f", "\\u007f")


def write_settings(folder, name, entered, inputs):
    """The settings of a training of one step in which the path `name` is `entered`."""
    kind = "controlnet" if name == "validation.control" else "lora"
    control = sorted(inputs["images"].glob("*-control.png"))[0]
    values = {"model": TINY, "out": "out", "cache": inputs["latent cache"], "dtype": "float32", "device": "cpu"}
    values |= {"method.kind": kind, "method.blocks": 2} if kind == "controlnet" else {"method.rank": 2}
    values |= {"validation.every": 1, "validation.steps": 1, "validation.width": 32, "validation.height": 32}
    values |= {"validation.prompts": ["a red circle"]}
    values |= {"validation.control": control} if kind == "controlnet" else {}
    phase = {"data": inputs["images"], "resolution": 32, "steps": 1, "learning_rate": 1e-3}
    table, _, key = name.rpartition(".")
    if table == "phase":
        phase[key] = entered
    else:
        values[name] = entered
    lines = [f"{key} = {quoted(value)}" for key, value in values.items()]
    lines += ["[[phase]]", *(f"{key} = {quoted(value)}" for key, value in phase.items())]
    (folder / "settings.toml").write_bytes("\n".join(lines).encode("utf-8", "surrogateescape"))
    return folder / "settings.toml"


def run(words):
    """Run a command in a bounded time and memory. Returns its status, its output and the lines that are no progress."""
    out, err = io.StringIO(), io.StringIO()
    with bounded(20, 4 * 10**9), permissions_count(), redirect_stdout(out), redirect_stderr(err):
        try:
            status = main([str(word) for word in words])
        except SystemExit as ended:
            status = ended.code
    return status, out.getvalue(), without_progress(err.getvalue())


def without_progress(text):
    return [line for line in re.split(r"[\r\n]", text) if not PROGRESS.fullmatch(line)]
