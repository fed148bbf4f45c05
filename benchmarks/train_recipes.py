"""The validation losses of the recipes that run on the bundled model, and of the canvas's template.

`python -m benchmarks.train_recipes [NAME ...]` writes benchmarks/train_recipes.json. It has the validation loss of each
of RECIPES before the first step, of the LoRA that the run publishes, and after the last step. A recipe runs unchanged
in a temporary folder, but without validation images.
"""

from __future__ import annotations

import json
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks import ROOT
from benchmarks.machine import description
from sana_core.training.settings import Method, Optimizer, Phase, TrainingSettings, Validation, check_settings
from sana_core.training.settings_file import read_settings
from sana_core.training.trainer import train

FILE = ROOT / "benchmarks" / "train_recipes.json"
TEMPLATE = ROOT / "workflows" / "SANA train a LoRA.json"
RECIPES = {
    "lora_bundled": ROOT / "recipes" / "lora_bundled.toml",
    "style": ROOT / "demo" / "style.toml",
    TEMPLATE.stem: TEMPLATE,
}


def settings_of(file: Path) -> TrainingSettings:
    """Return the settings in a recipe, or those that the node of the template has."""
    if file.suffix == ".toml":
        return read_settings(file)
    document = json.loads(file.read_text(encoding="utf-8"))
    graphs = [document, *document.get("definitions", {}).get("subgraphs", [])]
    nodes = {node["type"]: node for graph in graphs for node in graph["nodes"]}
    own: dict[str, Any] = {}
    for node in (nodes["SanaNodesDataset"], nodes["SanaNodesTrain"]):
        names = [each["name"] for each in node["inputs"] if "widget" in each]
        own |= zip(names, node["widgets_values"], strict=True)
    phase = Phase(
        (str(ROOT / "recipes" / "cyanotypes"),),
        own["resolution"],
        batch=own["batch_size"],
        accumulate=own["accumulate"],
        steps=own["steps"],
        learning_rate=own["learning_rate"],
        schedule=own["schedule"],
        warmup=own["warmup"],
    )
    return TrainingSettings(
        str(ROOT / "demo" / "sana-posters"),
        "",
        (phase,),
        seed=own["training_seed"],
        dtype="float32",
        caption_dropout=own["caption_dropout"],
        checkpoint_gradients=own["checkpoint_gradients"],
        method=Method(own["method"], own["rank"], own["alpha"] or None, own["targets"]),
        optimizer=Optimizer(own["optimizer"], own["weight_decay"], own["gradient_clip"], own["ema"]),
        validation=Validation(own["validate_every"], own["held_out"]),
    )


def figures_of(settings: TrainingSettings) -> dict[str, Any]:
    """Train as `settings` say, and return the losses of the validations."""
    lines: list[Any] = []

    def report(line: Any) -> None:
        lines.append(line)
        if "validation_loss" in line:
            sys.stderr.write(f"{line}\n")

    with tempfile.TemporaryDirectory() as folder:
        train(check_settings(replace(settings, out=folder, cache="", keep=1)), report)
    *validations, published = (line for line in lines if "validation_loss" in line)

    def found(line: Any) -> dict[str, Any]:
        return {"step": line["step"], "validation_loss": round(line["validation_loss"], 4)}

    return {"before": found(validations[0]), "published": found(published), "last": found(validations[-1])}


def main() -> None:
    document = json.loads(FILE.read_text()) if FILE.exists() else {}
    names = sys.argv[1:] or [*RECIPES]
    for name in names:
        settings = settings_of(RECIPES[name])
        settings = replace(settings, validation=replace(settings.validation, prompts=(), control=()))
        recipes = {**document.get("recipes", {}), name: figures_of(settings)}
        document = {**description(), "recipes": {each: recipes[each] for each in RECIPES if each in recipes}}
        FILE.write_text(json.dumps(document, indent=2) + "\n")


if __name__ == "__main__":
    main()
