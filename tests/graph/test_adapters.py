"""Adapters of all trainers through every way of generating: the merged weights equal the trainer's own merge, or every
way refuses the file.

The trainers' code wrote the files of tests/adapters and the weights beside them (make.py). peft writes its files here.
A difference is the Frobenius norm of the error divided by the norm of the adapter's change to a layer's weight. The
largest layer counts. The files that ComfyUI's loaders merge differently are listed here and on the help page.
"""

import json
import re
import sys

import layouts
import pytest
import torch
from diffusers import SanaPipeline
from in_process import NodeError
from peft import LoHaConfig, LoKrConfig, LoraConfig, get_peft_model
from peft.utils import get_peft_model_state_dict
from safetensors.torch import load_file
from setup import ROOT

import sana_core
from sana_core.__main__ import main
from sana_core.batch.pipeline import SamplingSettings, resolve_settings
from sana_core.checkpoints.fingerprint import fingerprint
from sana_core.engine import body
from sana_core.split import generate

BOUND = 1e-6
FILES = ROOT / "tests" / "adapters"
LAYERS = ("transformer_blocks.2.attn2.to_q", "proj_out", "patch_embed.proj")
RANK = 4
PROMPT, SIZE = "a red circle", {"width": 64, "height": 64, "steps": 1}
MADE = sorted(file.stem for file in FILES.glob("*-*.safetensors"))
LORA = {"r": RANK, "lora_alpha": RANK, "target_modules": list(LAYERS), "init_lora_weights": False}
PATTERNS = {"alpha_pattern": {"attn2.to_q": 7, r"patch_.*\.proj": 2}, "rank_pattern": {"proj_out": 2}}
KRONECKER = {"r": RANK, "alpha": 6, "target_modules": list(LAYERS), "init_weights": False}
PEFT = {
    "peft-lora": LoraConfig(**LORA),
    "peft-lora-2r": LoraConfig(**{**LORA, "lora_alpha": 2 * RANK}),
    "peft-lora-rs": LoraConfig(**LORA, use_rslora=True),
    "peft-lora-alpha-pattern": LoraConfig(**LORA, alpha_pattern=PATTERNS["alpha_pattern"]),
    "peft-lora-rank-pattern": LoraConfig(**LORA, rank_pattern=PATTERNS["rank_pattern"]),
    "peft-dora": LoraConfig(**{**LORA, "lora_alpha": 2 * RANK}, use_dora=True),
    "peft-folder-lora": LoraConfig(**LORA, **PATTERNS, use_rslora=True),
    "peft-folder-dora": LoraConfig(**LORA, **PATTERNS, use_dora=True),
    "peft-folder-loha": LoHaConfig(**KRONECKER),
    "peft-folder-lokr": LoKrConfig(**KRONECKER, decompose_factor=8),
    "peft-folder-lokr-whole": LoKrConfig(**{**KRONECKER, "r": 100}),
}
NONE = "none of its 1 layers fit this model, among them lora_unet_mid; choose a LoRA trained on this SANA"
PISSA = "init_lora_weights is pissa, expected true, or a way that leaves the model as it is; use another file"
ADALORA = "peft_type is ADALORA, expected LORA, LOHA or LOKR; use another file"
REFUSED = {"another-model": NONE, "peft-folder-pissa": PISSA, "peft-folder-adalora": ADALORA}
# Files that ComfyUI's loaders merge differently. They ignore PEFT's settings and PEFT's names of magnitudes, and
# divide the rows of a DoRA by the norms of the model's weight.
NOT_CORES = {*PEFT, *(name for name in MADE if re.search("-(dora|doha|dokr)", name) and "columns" not in name)}
NOT_CORES = NOT_CORES - {"peft-lora"} | {"onetrainer-loha"}

pytestmark = pytest.mark.usefixtures("one_thread")


def show(name, way, result):
    """For benchmarks/reference.py."""
    sys.stdout.write(f"{name} x {way}: {result}\n")


def by_peft(checkpoint, folder, name):
    """Write peft's adapter in its own or in diffusers' layout. Returns the file and the change of each weight."""
    transformer = sana_core.load_transformer(checkpoint)
    before = {layer: transformer.get_submodule(layer).weight.double() for layer in LAYERS}
    model = get_peft_model(transformer, PEFT[name])
    numbers = torch.Generator().manual_seed(3)
    for key, parameter in model.named_parameters():
        if parameter.requires_grad:
            drawn = torch.randn(parameter.shape, generator=numbers)
            parameter.data = parameter * (1 + 0.1 * drawn) if "magnitude" in key else (0.4 * drawn)
    model.save_pretrained(folder)
    file = folder / "adapter_model.safetensors"
    if "folder" not in name:
        layers, settings = get_peft_model_state_dict(model), model.peft_config["default"].to_dict()
        SanaPipeline.save_lora_weights(folder, layers, transformer_lora_adapter_metadata=settings)
        file.unlink()
        file = folder / "pytorch_lora_weights.safetensors"
    merged = model.double().merge_and_unload()
    return file, {layer: merged.get_submodule(layer).weight - weight for layer, weight in before.items()}


def by_maker(folder, name):
    file = folder / f"{name}.safetensors"
    file.write_bytes((FILES / file.name).read_bytes())
    changes = load_file(FILES / "weights.safetensors").items()
    return file, {key.removeprefix(f"{name}/"): change for key, change in changes if key.startswith(f"{name}/")}


@pytest.fixture
def folder(host):
    """A folder in ComfyUI's of LoRAs, for one test."""
    path = host.models / "loras" / "own"
    path.mkdir(parents=True)
    yield path
    for file in path.iterdir():
        file.unlink()
    path.rmdir()


def caught_models(monkeypatch):
    """A list that collects the models which each way of generating loads."""
    caught = []

    def caught_by(load):
        def load_and_keep(*args, **options):
            caught.append(load(*args, **options))
            return caught[-1]

        return load_and_keep

    for module in (body, generate):
        monkeypatch.setattr(module, "load_models", caught_by(module.load_models))
    return caught


@pytest.fixture
def ways(host, checkpoint, tmp_path, monkeypatch, capsys):
    """{way of drawing: a function of a file that gives the transformer's weights}."""
    caught = caught_models(monkeypatch)

    def weights():
        return dict(caught.pop().transformer.named_parameters())

    def canvas(file, loader="SanaNodesLoraLoader"):
        from comfy.lora import calculate_weight

        graph = {"load": ("SanaNodesLoader", {"model": "sana-tiny"})}
        graph["lora"] = (loader, {"model": ["load", 0], "lora_name": f"own/{file.name}", "strength_model": 1.0})
        graph["catch"] = ("Catch", {"value": ["lora", 0], "name": "model"})
        # The model stays loaded between the files, which come off it again.
        patcher = host.run(graph, keep_cache=True)["model"]
        result = patcher.get_key_patches("diffusion_model.").items()
        return {
            key.removeprefix("diffusion_model."): calculate_weight(patches, weight.clone(), key)
            for key, ((weight, _), *patches) in result
        }

    def generate(file, **options):
        sana_core.generate([PROMPT], checkpoint, loras=[(str(file), 1.0)], **SIZE, **options)
        return weights()

    def batch(file):
        prompts = tmp_path / "prompts.txt"
        prompts.write_text(PROMPT)
        size = [word for name, value in SIZE.items() for word in (f"--{name}", str(value))]
        words = ["batch", str(prompts), "--checkpoint", str(checkpoint), *size, "--out", str(tmp_path / "out")]
        if main([*words, "--lora", str(file)]):
            said, error = capsys.readouterr()
            sys.stdout.write(said)
            raise ValueError(error.strip().removeprefix("error: "))
        return weights()

    def actor(file):
        path = str(checkpoint)
        settings = resolve_settings(SamplingSettings(64, 64, steps=1), path)._replace(loras=((str(file), 1.0),))
        described = {item: fingerprint(item) for item in (path, str(file))}
        worker = body.Body("cpu", lambda *event: None, lambda: None)
        worker.begin(body.Job(settings, path, path, path, described).pack())
        worker.load()
        return weights()

    def split(file):
        return generate(file, split=True, devices=["cpu", "cpu"])

    def core(file):
        return canvas(file, "LoraLoaderModelOnly")

    ours = {"canvas": canvas, "generate": generate, "batch": batch, "cluster actor": actor, "split": split}
    return ours, core


@pytest.fixture(scope="module")
def plain(checkpoint):
    """The transformer without any file."""
    return sana_core.load_transformer(checkpoint)


def difference(weights, plain, changes):
    """How far `weights` are from those to which the maker's `changes` make `plain`."""
    results = []
    for layer, change in changes.items():
        before = plain.get_submodule(layer).weight.double()
        added = (weights[f"{layer}.weight"].double() - before)[:: len(before) // len(change)]
        results.append(float((added - change.double()).norm() / change.double().norm()))
    return max(results)


@pytest.mark.parametrize("name", [*PEFT, *MADE])
def test_the_weights_are_those_of_the_maker(checkpoint, plain, folder, ways, name):
    file, changes = by_peft(checkpoint, folder, name) if name in PEFT else by_maker(folder, name)
    ours, core = ways
    for way, weights_of in ours.items():
        weights = weights_of(file)
        show(name, way, f"{difference(weights, plain, changes):.1e}")
        assert difference(weights, plain, changes) < BOUND, way
        changed = {key for key, weight in plain.named_parameters() if not torch.equal(weight, weights[key])}
        assert changed == {f"{layer}.weight" for layer in changes}
    try:
        cores = difference(core(file), plain, changes)
        show(name, "ComfyUI's own loader", f"{cores:.1e}")
    except RuntimeError:  # its LoHa takes matrices alone, and OneTrainer writes convolutions
        cores = float("inf")
        show(name, "ComfyUI's own loader", "fails")
    assert (cores > BOUND) == (name in NOT_CORES)


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_is_refused_in_one_line_by_all(folder, ways, name):
    tensors = {f"lora_unet_mid.lora_{end}.weight": torch.ones(4, 4) for end in ("up", "down")}
    if "folder" in name:
        tensors = {
            f"base_model.model.{LAYERS[0]}.lora_A.weight": torch.ones(4, 160),
            f"base_model.model.{LAYERS[0]}.lora_B.weight": torch.ones(160, 4),
        }
        options = {"peft_type": "LORA", "init_lora_weights": "pissa"} if "pissa" in name else {"peft_type": "ADALORA"}
        (folder / "adapter_config.json").write_text(json.dumps({"r": 4, "lora_alpha": 8, **options}))
    file = layouts.save(tensors, folder / "adapter_model.safetensors")
    for way, weights_of in ways[0].items():
        with pytest.raises((ValueError, NodeError)) as caught:
            weights_of(file)
        assert str(caught.value) == f"own/adapter_model.safetensors: {REFUSED[name]}", way
        show(name, way, "refused")
