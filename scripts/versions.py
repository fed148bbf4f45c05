"""Test the lowest and the newest versions of the pack's requirements: `.venv/bin/python scripts/versions.py`.

Each set of versions is installed into an environment under .cache/envs. The unit tests run there, and the bundled
checkpoint generates images. They may differ from the images of .venv by LARGEST levels of 255. If this machine does not
have the right Python, the environment is left out with a line. Prints the table of docs/developer/development.md.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image
from setup import CACHE, ROOT, run

ENVIRONMENTS = CACHE / "envs"
NEWEST_PYTHON = "3.13"
# Packages that only the unit tests import.
TOOLS = ("hypothesis", "matplotlib", "pytest", "pytest-timeout", "scipy", "tifffile", "tomli")
PROMPTS = (
    "a red circle on a blue background",
    "a blue square on a white background",
    "a small green triangle at the top left of a black background",
    "a large yellow star on a purple background",
)
# Other kernels add in another order, so a value near the middle between two levels may be rounded to the other one.
LARGEST = 1
TABLE = (
    "| versions | Python | torch | diffusers | transformers | unit tests | images differ by at most |\n|" + "---|" * 7
)


def lowest_versions() -> dict[str, str]:
    """Return the lowest version of each requirement, of torch and of peft, from the files that declare them."""
    extra = re.findall(r'^(?:standalone|train) = \["(\w+>=[\d.]+)"', (ROOT / "pyproject.toml").read_text(), re.M)
    lines = (ROOT / "requirements.txt").read_text().split()
    return dict(line.split(">=") for line in [*lines, *extra])


def lowest_python() -> str:
    return re.findall(r'^requires-python = ">=(.+)"$', (ROOT / "pyproject.toml").read_text(), re.M)[0]


def find_python(version: str) -> Path | None:
    """Return an interpreter of that version with ensurepip, from the path or from pyenv."""
    pyenv_paths = sorted(Path.home().glob(f".pyenv/versions/{version}.*/bin/python"))
    for path in filter(None, (shutil.which(f"python{version}"), *pyenv_paths)):
        code = f"import ensurepip, sys; sys.exit('%d.%d' % sys.version_info[:2] != {version!r})"
        if subprocess.run([path, "-c", code], capture_output=True).returncode == 0:
            return Path(path)
    return None


def make_environment(name: str, python: Path, requirements: Sequence[str]) -> Path:
    """Install `requirements`, the newest versions of their dependencies, and TOOLS into the environment `name`."""
    interpreter = ENVIRONMENTS / name / "bin" / "python"
    if not interpreter.is_file():
        run(python, "-m", "venv", ENVIRONMENTS / name)
    options = ("--quiet", "--upgrade", "--upgrade-strategy", "eager")
    run(interpreter, "-m", "pip", "install", *options, *requirements, *TOOLS)
    return interpreter


def generate(python: Path, name: str) -> list[np.ndarray]:
    """Return the images of PROMPTS that the pack generates with that interpreter."""
    out = ENVIRONMENTS / "images" / name
    size = ("--width", "128", "--height", "128")
    checkpoint = ROOT / "tests" / "models" / "sana-tiny"
    run(python, "-m", "sana_core", "generate", *PROMPTS, "--checkpoint", checkpoint, *size, "--out", out, "--overwrite")
    return [np.asarray(Image.open(path), dtype=int) for path in sorted(out.glob("*.png"))]


def versions(python: Path) -> list[str]:
    """Return the versions for the table: of Python, torch, diffusers and transformers."""
    code = (
        "import json, platform; from importlib.metadata import version; names = ('torch', 'diffusers', 'transformers');"
        "print(json.dumps([platform.python_version(), *map(version, names)]))"
    )
    return json.loads(subprocess.run([python, "-c", code], capture_output=True, check=True, text=True).stdout)


def try_environment(name: str, python: Path, expected: list[np.ndarray]) -> bool:
    """Run the unit tests, generate images and write the row of the table. Returns whether all was right."""
    tests = [
        python,
        "-m",
        "pytest",
        "-c",
        ROOT / "tests" / "pytest.ini",
        "-p",
        "no:cacheprovider",
        ROOT / "tests" / "unit",
    ]
    passed = subprocess.run(tests).returncode == 0
    images = generate(python, name)
    largest = max(int(abs(image - other).max()) for image, other in zip(images, expected, strict=True))
    outcome = "pass" if passed else "FAIL"
    sys.stdout.write(f"| {name} | {' | '.join(versions(python))} | {outcome} | {largest} of 255 levels |\n")
    sys.stdout.flush()
    return passed and largest <= LARGEST


def main() -> None:
    lowest = lowest_versions()
    environments = {
        "lowest": (lowest_python(), [f"{name}=={version}" for name, version in lowest.items()]),
        "newest": (NEWEST_PYTHON, list(lowest)),
    }
    expected = generate(Path(sys.executable), "pinned")
    sys.stdout.write(f"{TABLE}\n")
    sys.stdout.flush()
    failed = []
    for name, (version, requirements) in environments.items():
        python = find_python(version)
        if python is None:
            sys.stdout.write(f"{name}: left out, because there is no Python {version}; put one on the path\n")
        elif not try_environment(name, make_environment(name, python, requirements), expected):
            failed.append(name)
    if failed:
        sys.exit(f"versions: {' and '.join(failed)} failed; see above")


if __name__ == "__main__":
    main()
