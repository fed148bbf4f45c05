"""Build folders that try to run code, and read them under an audit hook: `python hostile_folders.py FOLDER`.

A folder named clip-* is a scorer, another one a model. An audit hook notes code of a folder, imports of the modules
that the folders name, processes, sockets, and files outside of the folders. Prints {folder: notes} as JSON.
"""

import json
import os
import shutil
import sys
import traceback
from pathlib import Path

ROOT = Path(__file__).parents[2]
MODEL, CLIP = ROOT / "tests" / "models" / "sana-tiny", ROOT / "demo" / "sana-posters-scorer"
KERNEL, EVIL = "somebody/kernel", ["evil", "Evil"]
CODE_FILES = (
    "evil.py",
    "pipeline.py",
    "modeling_evil.py",
    "tokenization_evil.py",
    "image_processing_evil.py",
    "__init__.py",
    "custom_generate/generate.py",
)
MODULES = ("evil", "kernels", "antigravity", "diffusers_modules", "transformers_modules", "bitsandbytes", "flash_attn")
EVENTS = ("subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "socket.connect", "socket.getaddrinfo")
AUTO = {
    "auto_map": {
        "AutoConfig": "evil.Evil",
        "AutoModel": "evil.Evil",
        "AutoTokenizer": ["evil.Evil", "evil.Evil"],
        "AutoImageProcessor": "evil.Evil",
        "AutoFeatureExtractor": "evil.Evil",
        "AutoProcessor": "evil.Evil",
    }
}
INDEX, TEXT, VAE, TRANSFORMER = (
    "model_index.json",
    "text_encoder/config.json",
    "vae/config.json",
    "transformer/config.json",
)
TOKENIZER, SCHEDULER = "tokenizer/tokenizer_config.json", "scheduler/scheduler_config.json"
QUANTISED = {"quantization_config": {"quant_method": "bitsandbytes", "load_in_8bit": True}}
ADAPTER = {"base_model_name_or_path": "../outside", "peft_type": "LORA", "auto_mapping": {"parent_library": "evil"}}
PARTS = ("scheduler", "transformer", "vae", "tokenizer", "text_encoder")
# {folder: {file: fields to add}}
MODELS = {
    "plain": {},
    **{f"part-{part}": {INDEX: {part: EVIL}} for part in PARTS},
    "pipeline-list": {INDEX: {"_class_name": EVIL}},
    "pipeline-name": {INDEX: {"_class_name": "evil"}},
    "custom-pipeline": {INDEX: {"custom_pipeline": "evil"}},
    "installed-module": {INDEX: {"scheduler": ["antigravity", "fly"]}},
    "popen": {INDEX: {"scheduler": ["subprocess", "Popen"]}},
    "submodule": {INDEX: {"scheduler": ["diffusers.pipelines.ip_adapter", "x"]}},
    "tokenizer-auto-map": {TOKENIZER: AUTO, INDEX: {"tokenizer": ["transformers", "AutoTokenizer"]}},
    "attention": {TEXT: {"attn_implementation": KERNEL}},
    "attention-inner": {TEXT: {"_attn_implementation": KERNEL}},
    "extra-part": {INDEX: {"evil": EVIL}, "evil/config.json": AUTO},
    "scheduler-class": {SCHEDULER: {"_class_name": "Evil"}},
    "chat-template": {TOKENIZER: {"chat_template": "{% for i in range(10**9) %}x{% endfor %}"}},
    "scheduler-class-list": {SCHEDULER: {"_class_name": EVIL, **AUTO}},
    "feature-extractor": {INDEX: {"feature_extractor": EVIL}, "feature_extractor/preprocessor_config.json": AUTO},
    "image-processor": {
        INDEX: {"image_processor": ["transformers", "AutoImageProcessor"]},
        "image_processor/x.json": AUTO,
    },
    "safety-checker": {INDEX: {"safety_checker": EVIL}, "safety_checker/config.json": AUTO},
    "text-auto-map": {TEXT: AUTO},
    "text-architecture": {TEXT: {"architectures": ["Evil"], "model_type": "evil", "processor_class": "Evil"}},
    "text-quantised": {TEXT: QUANTISED},
    "text-adapter": {"text_encoder/adapter_config.json": ADAPTER},
    "text-attention-internal": {TEXT: {"_attn_implementation_internal": KERNEL, "experts_implementation": KERNEL}},
    "text-kernels": {TEXT: {"use_kernels": True, "kernel_config": {"RMSNorm": f"{KERNEL}:Evil"}}},
    "text-generation": {"text_encoder/generation_config.json": {"custom_generate": "evil", "trust_remote_code": True}},
    "tokenizer-class": {TOKENIZER: {"tokenizer_class": "Evil", "processor_class": "Evil", "trust_remote_code": True}},
    "tokenizer-class-auto": {TOKENIZER: {"tokenizer_class": "EvilTokenizer", **AUTO}},
    "transformer-class": {TRANSFORMER: {"_class_name": EVIL}},
    "transformer-pipeline": {TRANSFORMER: {"_class_name": "DiffusionPipeline", "_name_or_path": "../outside"}},
    "transformer-auto-map": {TRANSFORMER: AUTO},
    "transformer-quantised": {TRANSFORMER: QUANTISED},
    "transformer-adapter": {"transformer/adapter_config.json": ADAPTER},
    "vae-class": {VAE: {"_class_name": "Evil", "custom_pipeline": "evil"}},
    "vae-class-list": {VAE: {"_class_name": EVIL}},
    "vae-auto-map": {VAE: AUTO},
    "modular": {"modular_model_index.json": {"_class_name": EVIL, **AUTO}, "modular_config.json": AUTO},
    "index-outside-transformer": {"transformer/diffusion_pytorch_model.safetensors": "../../outside/it.safetensors"},
    "index-outside-text": {"text_encoder/model.safetensors": "/etc/hostname.safetensors"},
    "pickle-text": {"text_encoder/model.safetensors": None},
    "pickle-transformer": {"transformer/diffusion_pytorch_model.safetensors": None},
}
CONFIG, IMAGES, WORDS = "config.json", "preprocessor_config.json", "tokenizer_config.json"
CLIPS = {
    "clip-plain": {},
    "clip-auto-map": {CONFIG: AUTO},
    "clip-auto-map-text": {CONFIG: {"text_config": AUTO}},
    "clip-auto-map-words": {WORDS: AUTO},
    "clip-auto-map-images": {IMAGES: AUTO},
    "clip-attention": {CONFIG: {"attn_implementation": KERNEL}},
    "clip-attention-inner": {CONFIG: {"_attn_implementation": KERNEL, "_attn_implementation_internal": KERNEL}},
    "clip-attention-sections": {
        CONFIG: {"text_config": {"_attn_implementation": KERNEL}, "vision_config": {"attn_implementation": KERNEL}}
    },
    "clip-kernels": {CONFIG: {"use_kernels": True, "kernel_config": {"LayerNorm": f"{KERNEL}:Evil"}}},
    "clip-quantised": {CONFIG: QUANTISED},
    "clip-quantised-text": {CONFIG: {"text_config": QUANTISED}},
    "clip-architecture": {CONFIG: {"architectures": ["Evil"], "transformers_weights": "../outside/it.safetensors"}},
    "clip-adapter": {"adapter_config.json": ADAPTER},
    "clip-processor": {"processor_config.json": {"processor_class": "Evil", "image_processor": AUTO, **AUTO}},
    "clip-tokenizer-class": {WORDS: {"tokenizer_class": "Evil", "processor_class": "Evil"}},
    "clip-image-class": {IMAGES: {"image_processor_type": "Evil", "feature_extractor_type": "Evil"}},
    "clip-generation": {"generation_config.json": {"custom_generate": "evil", "trust_remote_code": True}},
    "clip-index-outside": {"model.safetensors": "../outside/it.safetensors"},
    "clip-pickle": {"model.safetensors": None},
}


class Payload:
    """An object whose pickle runs code when it is read."""

    def __init__(self, code):
        self.code = code

    def __reduce__(self):
        return exec, (self.code,)


def make(folder: Path, changes: dict, marker: Path) -> Path:
    """Copy a model or scorer to `folder`, put code everywhere, which writes `marker`, and make `changes`."""
    import torch

    shutil.copytree(CLIP if folder.name.startswith("clip-") else MODEL, folder)
    code = f"open({str(marker)!r}, 'a').write(__name__)\nclass Evil:\n    from_pretrained = lambda *a, **k: 1\n"
    for file, fields in changes.items():
        path = folder / file
        path.parent.mkdir(exist_ok=True)
        if not isinstance(fields, dict):
            # An index of files elsewhere, or a pickle, takes the place of these weights.
            names = json.loads(path.read_bytes()[8 : 8 + int.from_bytes(path.read_bytes()[:8], "little")])
            path.unlink()
            if fields is None:
                torch.save(Payload(code), path.with_name("pytorch_model.bin"))
                torch.save(Payload(code), path.with_name("model.pth"))
                continue
            path, fields = (
                Path(f"{path}.index.json"),
                {"weight_map": dict.fromkeys(names.keys() - {"__metadata__"}, fields)},
            )
        content = json.loads(path.read_text()) if path.exists() else {}
        for name, value in fields.items():
            content[name] = {**content[name], **value} if name.endswith("_config") and name in content else value
        path.write_text(json.dumps(content))
    for place in [folder, *(path for path in folder.iterdir() if path.is_dir())]:
        for name in CODE_FILES:
            (place / name).parent.mkdir(exist_ok=True)
            (place / name).write_text(code)
    return folder


def use(folder: Path) -> list[str]:
    """Read `folder` in every way that this package has, and return the errors that are not its own."""
    import torch

    import sana_core
    from sana_core.checkpoints.fingerprint import fingerprint
    from sana_core.doctor import Report
    from sana_core.doctor.files import check_files

    def score():
        sana_core.load_scorer(folder).score(torch.zeros(1, 3, 32, 32), "a red house")

    ways = [score, lambda: check_files(Report(seconds=1000), [folder])]
    if not folder.name.startswith("clip-"):
        size = {"width": 64, "height": 64, "steps": 1}
        ways += [
            lambda: sana_core.load_transformer(folder),
            lambda: sana_core.load_autoencoder(folder),
            lambda: sana_core.load_text_encoder(folder),
            lambda: fingerprint(folder),
            lambda: sana_core.generate(["a red house"], folder, **size),
        ]
    bare = []
    for way in ways:
        try:
            way()
        except sana_core.SanaError:
            pass
        except Exception:
            bare.append(traceback.format_exc(limit=-1))
    return bare


def main(root: Path) -> None:
    folders = sorted(path for path in root.iterdir() if path.name in MODELS or path.name in CLIPS)
    notes: dict[str, list[str]] = {}
    current = ""

    def hook(event, arguments):
        if not current:
            return
        said = ""
        if event == "import" and str(arguments[0]).split(".")[0] in MODULES:
            said = f"import {arguments[0]}"
        elif event == "exec" and str(root) in str(getattr(arguments[0], "co_filename", "")):
            said = f"exec {arguments[0].co_filename}"
        elif event == "open" and isinstance(arguments[0], str | bytes):
            path = os.path.abspath(os.fsdecode(arguments[0]))
            if path.endswith(".py") and path.startswith(str(root)) or "/outside/" in path or "/etc/" in path:
                said = f"open {path}"
        elif event in EVENTS:
            said = f"{event} {arguments}"
        if said:
            notes[current].append(said[:200])

    sys.path.insert(0, str(root / "packages"))
    import sana_core.generate  # noqa: F401

    # Good folders make the libraries import their modules before the hook watches.
    shutil.copytree(MODEL, root / "first")
    shutil.copytree(CLIP, root / "clip-first")
    for folder in (root / "first", root / "clip-first"):
        assert not use(folder), use(folder)
    sys.addaudithook(hook)
    for folder in folders:
        current = folder.name
        notes[current] = []
        bare = use(folder)
        notes[current] += bare
        marker = root / "markers" / folder.name
        notes[current] += [f"ran: {marker.read_text()}"] if marker.exists() else []
        current = ""
    sys.stdout.write(json.dumps(notes))


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    main(Path(sys.argv[1]))
