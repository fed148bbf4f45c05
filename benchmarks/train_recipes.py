"""The validation losses of the recipes that run on the bundled model.

`python -m benchmarks.train_recipes [NAME ...]` writes benchmarks/train_recipes.json. It has the validation loss of each
of RECIPES before the first step, of the LoRA that the run publishes, and after the last step. A recipe runs unchanged
in a temporary folder, but without validation images.
"""

from __future__ import annotations

import json
import sys
import tempfile
from dataclasses import replace
from typing import Any

from benchmarks import ROOT
from benchmarks.machine import description
from sana_core.training.settings import TrainingSettings, check_settings, read_settings
from sana_core.training.trainer import train

FILE = ROOT / "benchmarks" / "train_recipes.json"
RECIPES = {
    "lora_bundled": ROOT / "recipes" / "lora_bundled.toml",
    "style": ROOT / "demo" / "style.toml",
}


def figures_of(settings: TrainingSettings) -> dict[str, Any]:
    """Train with `settings`, and return the validation losses."""
    lines: list[Any] = []

    def report(line: Any) -> None:
        lines.append(line)
        if "validation_loss" in line:
            sys.stderr.write(f"{line}\n")

    with tempfile.TemporaryDirectory() as folder:
        train(check_settings(replace(settings, out=folder, cache="", keep=1)), report)
    *validations, published = (line for line in lines if "validation_loss" in line)

    def entry(line: Any) -> dict[str, Any]:
        return {"step": line["step"], "validation_loss": round(line["validation_loss"], 4)}

    return {"before": entry(validations[0]), "published": entry(published), "last": entry(validations[-1])}


def main() -> None:
    document = json.loads(FILE.read_text()) if FILE.exists() else {}
    names = sys.argv[1:] or [*RECIPES]
    for name in names:
        settings = read_settings(RECIPES[name])
        settings = replace(settings, validation=replace(settings.validation, prompts=(), control=()))
        recipes = {**document.get("recipes", {}), name: figures_of(settings)}
        document = {**description(), "recipes": {recipe: recipes[recipe] for recipe in RECIPES if recipe in recipes}}
        FILE.write_text(json.dumps(document, indent=2) + "\n")


if __name__ == "__main__":
    main()
