"""Try the lowest versions that the pack declares, and the newest there are: `.venv/bin/python scripts/versions.py`.

Each in an environment of its own under .cache/envs: the unit tests, then pictures of the bundled checkpoint, which may
differ from those of .venv by LARGEST levels of 255. An environment whose Python is not on this machine is left out with
a line that says so. Prints the table of docs/developer/development.md.
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
# what the unit tests import besides
TOOLS = ("hypothesis", "matplotlib", "pytest", "pytest-timeout", "scipy", "tifffile", "tomli")
PROMPTS = (
    "a red circle on a blue background",
    "a blue square on a white background",
    "a small green triangle at the top left of a black background",
    "a large yellow star on a purple background",
)
# rounding: other kernels add in another order, and a value near the middle of two levels goes the other way
LARGEST = 1
TABLE = (
    "| versions | Python | torch | diffusers | transformers | unit tests | pictures differ by at most |\n|" + "---|" * 7
)


def lowest_versions() -> dict[str, str]:
    """Return the lowest version of each requirement, of torch and of peft, as the files that declare them say."""
    extra = re.findall(r'^(?:standalone|train) = \["(\w+>=[\d.]+)"', (ROOT / "pyproject.toml").read_text(), re.M)
    lines = (ROOT / "requirements.txt").read_text().split()
    return dict(line.split(">=") for line in [*lines, *extra])


def lowest_python() -> str:
    return re.findall(r'^requires-python = ">=(.+)"$', (ROOT / "pyproject.toml").read_text(), re.M)[0]


def find_python(version: str) -> Path | None:
    """Return an interpreter of that version which can make environments, from the path or from pyenv."""
    of_pyenv = sorted(Path.home().glob(f".pyenv/versions/{version}.*/bin/python"))
    for path in filter(None, (shutil.which(f"python{version}"), *of_pyenv)):
        code = f"import ensurepip, sys; sys.exit('%d.%d' % sys.version_info[:2] != {version!r})"
        if subprocess.run([path, "-c", code], capture_output=True).returncode == 0:
            return Path(path)
    return None


def make_environment(name: str, python: Path, requirements: Sequence[str]) -> Path:
    """Make the environment of that name hold `requirements`, what they need in its newest versions, and TOOLS."""
    own = ENVIRONMENTS / name / "bin" / "python"
    if not own.is_file():
        run(python, "-m", "venv", ENVIRONMENTS / name)
    options = ("--quiet", "--upgrade", "--upgrade-strategy", "eager")
    run(own, "-m", "pip", "install", *options, *requirements, *TOOLS)
    return own


def draw(python: Path, name: str) -> list[np.ndarray]:
    """Return the pictures of PROMPTS that the pack draws with that interpreter."""
    out = ENVIRONMENTS / "pictures" / name
    size = ("--width", "128", "--height", "128")
    checkpoint = ROOT / "tests" / "models" / "sana-tiny"
    run(python, "-m", "sana_core", "generate", *PROMPTS, "--checkpoint", checkpoint, *size, "--out", out, "--overwrite")
    return [np.asarray(Image.open(path), dtype=int) for path in sorted(out.glob("*.png"))]


def versions(python: Path) -> list[str]:
    """Return the versions that the table names: Python's, torch's, diffusers', transformers'."""
    code = (
        "import json, platform; from importlib.metadata import version; names = ('torch', 'diffusers', 'transformers');"
        "print(json.dumps([platform.python_version(), *map(version, names)]))"
    )
    return json.loads(subprocess.run([python, "-c", code], capture_output=True, check=True, text=True).stdout)


def try_environment(name: str, python: Path, expected: list[np.ndarray]) -> bool:
    """Run the unit tests and draw, write the table's row, and return whether all is well."""
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
    pictures = draw(python, name)
    largest = max(int(abs(one - other).max()) for one, other in zip(pictures, expected, strict=True))
    outcome = "pass" if passed else "FAIL"
    sys.stdout.write(f"| {name} | {' | '.join(versions(python))} | {outcome} | {largest} of 255 levels |\n")
    sys.stdout.flush()
    return passed and largest <= LARGEST


def main() -> None:
    lowest = lowest_versions()
    wanted = {
        "lowest": (lowest_python(), [f"{name}=={version}" for name, version in lowest.items()]),
        "newest": (NEWEST_PYTHON, list(lowest)),
    }
    expected = draw(Path(sys.executable), "pinned")
    sys.stdout.write(f"{TABLE}\n")
    sys.stdout.flush()
    failed = []
    for name, (version, requirements) in wanted.items():
        python = find_python(version)
        if python is None:
            sys.stdout.write(f"{name}: left out, for there is no Python {version} here; put one on the path\n")
        elif not try_environment(name, make_environment(name, python, requirements), expected):
            failed.append(name)
    if failed:
        sys.exit(f"versions: {' and '.join(failed)} failed; see above")


if __name__ == "__main__":
    main()
