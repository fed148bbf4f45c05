"""Pack what `make gpu` needs on a machine without a network: `python scripts/gpu_bundle.py 3.12 2.11 [packages.txt]`.

The arguments are the Python and the torch of that machine, a Linux on x86_64, and a file that lists its packages, as
`pip list --format=freeze` prints them there. Writes all that has to be copied into .cache/gpu/bundle: repository.tar
with this repository, site.tar.xz with the packages of requirements/gpu.in that the machine lacks, in the versions and
with the hashes of lock.txt, and comfyui.tar.xz with ComfyUI. Prints which requirements the machine still lacks.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from email.parser import Parser
from pathlib import Path

from setup import CACHE, REQUIREMENTS, ROOT, run

BUNDLE = CACHE / "gpu" / "bundle"
PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64", "linux_x86_64")
# torchaudio 2.11 is the last version, and works with every later torch.
LAST_TORCHAUDIO = 11
# Paths of this repository that no part of `make gpu` reads.
NOT_NEEDED = (
    "docs/gallery",
    "docs/*.jpg",
    "demo/*.py",
    "demo/*.toml",
    "demo/judge.*",
    "demo/report",
    "workflows/*.jpg",
)
# No image needs these files of packages and of ComfyUI. comfy-kitchen falls back to torch without its compiled code.
UNUSED = re.compile(
    r"comfy_kitchen/backends/\w+/_C\.|(^|/)(tests|tests-unit|blueprints|script_examples|\.github|__pycache__)(/|$)"
)
LARGE_TOKENIZER = 300_000  # bytes; tokenizers of other models in ComfyUI


def plain(name: str) -> str:
    """Return a package's name as indexes compare it (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name).lower()


def pinned(names: set[str]) -> str:
    """Return the entries of lock.txt for `names`. Exits if a name has no entry."""
    entries = re.split(r"^(?=[\w.-]+==)", (REQUIREMENTS / "lock.txt").read_text(), flags=re.M)
    if missing := names - {entry.partition("==")[0] for entry in entries}:
        sys.exit(f"requirements/gpu.in: got {', '.join(sorted(missing))}, expected names of lock.txt; see `make lock`")
    return "".join(entry for entry in entries if entry.partition("==")[0] in names)


def download(python: str, minor: int, present: set[str], folder: str) -> list[Path]:
    """Download the wheels of requirements/gpu.in that are not `present`, and torch's companions."""
    lines = (REQUIREMENTS / "gpu.in").read_text().splitlines()
    names = {line.strip() for line in lines if line and not line.startswith("#")} - present
    options = ["--quiet", "--no-deps", "--only-binary", ":all:", "--python-version", python, "--dest", folder]
    options += [word for platform in PLATFORMS for word in ("--platform", platform)]
    # PyAV has 35 MB. ComfyUI imports it, but only video needs it.
    downloads = names - {"av"}
    if downloads:
        with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
            file.write(pinned(downloads))
            file.flush()
            run(sys.executable, "-m", "pip", "download", *options, "--require-hashes", "-r", file.name)
    # Each torch has one torchvision, whose minor version is 15 higher.
    companions = {"torchvision": f"0.{minor + 15}", "torchaudio": f"2.{min(minor, LAST_TORCHAUDIO)}"}
    missing = [f"{name}=={version}.*" for name, version in companions.items() if name not in present]
    if missing:
        run(sys.executable, "-m", "pip", "download", *options, *missing)
    return sorted(Path(folder).glob("*.whl"))


def unmet(wheels: list[Path], present: set[str], python: str) -> list[str]:
    """Return "package (needed by wheel)" for each requirement that is in no wheel and not `present`.

    Requirements may depend on the machine's `python`, such as "3.12".
    """
    from packaging.requirements import Requirement

    bundled = present | {plain(wheel.name.split("-")[0]) for wheel in wheels} | {"av", "torch"}
    machine = {"extra": "", "python_version": python, "python_full_version": f"{python}.0"}
    lines = []
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as file:
            (name,) = [name for name in file.namelist() if re.fullmatch(r"[^/]+\.dist-info/METADATA", name)]
            metadata = Parser().parsestr(file.read(name).decode())
        for text in metadata.get_all("Requires-Dist") or ():
            requirement = Requirement(text)
            needed = requirement.marker is None or requirement.marker.evaluate(machine)
            if needed and plain(requirement.name) not in bundled:
                lines.append(f"{plain(requirement.name)} (needed by {wheel.name.split('-')[0]})")
    return sorted(set(lines))


def pack_site(wheels: list[Path], with_av: bool) -> None:
    with tempfile.TemporaryDirectory() as folder:
        site = Path(folder) / "site"
        site.mkdir()
        for wheel in wheels:
            with zipfile.ZipFile(wheel) as file:
                file.extractall(site, [name for name in file.namelist() if not UNUSED.search(name)])
        if with_av:
            (site / "av").mkdir()
            shutil.copy(ROOT / "tests" / "av_stub.py", site / "av" / "__init__.py")
        with tarfile.open(BUNDLE / "site.tar.xz", "w:xz") as tar:
            tar.add(site, "site")


def pack_host(host: Path) -> None:
    with tarfile.open(BUNDLE / "comfyui.tar.xz", "w:xz") as tar:
        for path in sorted(host.rglob("*")):
            name = path.relative_to(host).as_posix()
            is_text = path.suffix in (".json", ".txt", ".model") and "text_encoders/" in name
            too_large = path.is_file() and is_text and path.stat().st_size > LARGE_TOKENIZER
            if path.is_file() and not too_large and not UNUSED.search(name):
                tar.add(path, f"ComfyUI/{name}")


def pack_repository() -> None:
    """Pack the tracked files with their uncommitted changes, without NOT_NEEDED."""
    command = ["git", "ls-files", "-z", "--", ".", *(f":!{path}" for path in NOT_NEEDED)]
    names = subprocess.run(command, cwd=ROOT, capture_output=True, check=True, text=True).stdout.split("\0")
    with tarfile.open(BUNDLE / "repository.tar", "w") as tar:
        for name in filter(None, names):
            if (ROOT / name).is_file():
                tar.add(ROOT / name, f"sana-nodes/{name}")


def main() -> None:
    if len(sys.argv) not in (3, 4):
        sys.exit(__doc__)
    python, minor = sys.argv[1], int(sys.argv[2].split(".")[1])
    present = set()
    if len(sys.argv) == 4:
        present = {plain(re.split(r"[=@ ]", line)[0]) for line in Path(sys.argv[3]).read_text().splitlines() if line}
    shutil.rmtree(BUNDLE, ignore_errors=True)
    BUNDLE.mkdir(parents=True)
    with tempfile.TemporaryDirectory() as folder:
        wheels = download(python, minor, present, folder)
        pack_site(wheels, "av" not in present)
        lacking = unmet(wheels, present, python) if present else []
    pack_host(CACHE / "ComfyUI")
    pack_repository()
    for file in sorted(BUNDLE.iterdir()):
        sys.stdout.write(f"{file.name}: {file.stat().st_size / 2**20:.1f} MiB\n")
    total = sum(file.stat().st_size for file in BUNDLE.iterdir())
    sys.stdout.write(f"{total / 2**20:.1f} MiB in {BUNDLE}, {len(wheels)} packages\n")
    for line in lacking:
        sys.stdout.write(f"missing on that machine: {line}\n")


if __name__ == "__main__":
    main()
