"""Bring along what `make gpu` needs on a machine without a network: `python scripts/gpu_wheels.py 3.12 2.11`.

The arguments are the Python and the torch of that machine, a Linux on x86_64. Downloads into .cache/gpu/wheels: the
wheels of requirements/gpu.in in the versions and with the hashes of lock.txt, and the torchvision and torchaudio that
belong to that torch. What the machine has already is left alone there.
"""

from __future__ import annotations

import re
import shutil
import sys
import tempfile
from pathlib import Path

from setup import CACHE, REQUIREMENTS, run

WHEELS = CACHE / "gpu" / "wheels"
PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64", "linux_x86_64")
# the last one there is goes with every later torch
LAST_TORCHAUDIO = 11


def pinned(names: set[str]) -> str:
    """Return the entries of lock.txt for `names`. Raises SystemExit for a name that it lacks."""
    entries = re.split(r"^(?=[\w.-]+==)", (REQUIREMENTS / "lock.txt").read_text(), flags=re.M)
    if missing := names - {entry.partition("==")[0] for entry in entries}:
        sys.exit(f"requirements/gpu.in: got {', '.join(sorted(missing))}, expected names of lock.txt; see `make lock`")
    return "".join(entry for entry in entries if entry.partition("==")[0] in names)


def main() -> None:
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    python, minor = sys.argv[1], int(sys.argv[2].split(".")[1])
    lines = (REQUIREMENTS / "gpu.in").read_text().splitlines()
    names = {line.strip() for line in lines if line and not line.startswith("#")}
    shutil.rmtree(WHEELS, ignore_errors=True)
    options = ["--quiet", "--no-deps", "--only-binary", ":all:", "--python-version", python, "--dest", WHEELS]
    options += [word for platform in PLATFORMS for word in ("--platform", platform)]
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
        file.write(pinned(names))
        file.flush()
        run(sys.executable, "-m", "pip", "download", *options, "--require-hashes", "-r", file.name)
    # of each torch there is one torchvision, 15 minor versions apart
    own = [f"torchvision==0.{minor + 15}.*", f"torchaudio==2.{min(minor, LAST_TORCHAUDIO)}.*"]
    run(sys.executable, "-m", "pip", "download", *options, *own)
    files = list(Path(WHEELS).glob("*.whl"))
    sys.stdout.write(f"{len(files)} wheels, {sum(file.stat().st_size for file in files) / 1e6:.0f} MB in {WHEELS}\n")


if __name__ == "__main__":
    main()
