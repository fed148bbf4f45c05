"""Test the pack in several versions of ComfyUI: `.venv/bin/python scripts/hosts.py 0.27 ~/ComfyUI`.

The arguments are versions or folders. Without arguments, all versions in requirements/host*.txt are tested. These use
the packages of .venv, including the frontend of 0.30. The requirements of a folder are installed into .venv. In a
supported version, the graph and server tests run. An older version must start without the pack, and its log must
contain one line with the reason. Prints the table of docs/developer/development.md.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

from host import get, start_server
from setup import CACHE, REQUIREMENTS, ROOT, install_packages, unpack_host

PINNED = "0.30"
PREFIX = "SanaNodes"
REFUSED = "SANA: got ComfyUI {}"


def pins() -> dict[str, Path]:
    """Return {version: requirements file}, the oldest version first."""
    older = {path.stem.removeprefix("host-"): path for path in sorted(REQUIREMENTS.glob("host-*.txt"))}
    return {**older, PINNED: REQUIREMENTS / "host.txt"}


def oldest() -> tuple[int, ...]:
    """Return the oldest version that the pack supports, according to pyproject.toml."""
    (version,) = re.findall(r'^requires-comfyui = ">=([\d.]+)"$', (ROOT / "pyproject.toml").read_text(), re.M)
    return numbers(version)[:2]


def numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))


def host_of(name: str) -> Path:
    """Return the folder of a ComfyUI. If `name` is a pinned version, it is unpacked there."""
    if name not in pins():
        return Path(name).resolve()
    folder = CACHE / ("ComfyUI" if name == PINNED else f"ComfyUI-{name}")
    unpack_host(pins()[name], folder)
    return folder


def full_version(host: Path) -> str:
    (version,) = re.findall(r'^__version__ = "([\d.]+)"$', (host / "comfyui_version.py").read_text(), re.M)
    return version


def run_tests() -> str:
    """Run the graph and server tests in the host at COMFYUI_PATH. Returns the cell of the table."""
    report = CACHE / "host.xml"
    command = [sys.executable, "-m", "pytest", "-c", "tests/pytest.ini", "-p", "no:cacheprovider", "-q"]
    command += ["-m", "not slow", f"--junitxml={report}"]
    passed = subprocess.run([*command, "tests/graph", "tests/server"], cwd=ROOT).returncode == 0
    suite = ElementTree.parse(report).find("testsuite")
    count = int(suite.get("tests")) - int(suite.get("skipped"))
    return f"{count} graph and server tests pass" if passed else "FAIL"


def check_refusal(version: str) -> str:
    """Start the host at COMFYUI_PATH, which must refuse the pack. Returns the cell of the table."""
    with start_server(f"host-{version}") as server:
        ours = [name for name in json.loads(get(server, "/object_info")) if name.startswith(PREFIX)]
        reasons = [line for line in server.log.read_text().splitlines() if REFUSED.format(version) in line]
    return "refused in one line" if not ours and len(reasons) == 1 else "FAIL"


def main() -> None:
    names = sys.argv[1:] or list(pins())
    if unknown := [name for name in names if name not in pins() and not (Path(name) / "main.py").is_file()]:
        sys.exit(f"hosts: got {', '.join(unknown)}, expected a folder of ComfyUI, or some of {', '.join(pins())}")
    rows = []
    for host in map(host_of, names):
        os.environ["COMFYUI_PATH"] = str(host)
        install_packages()
        full = full_version(host)
        outcome = run_tests() if numbers(full)[:2] >= oldest() else check_refusal(full)
        rows.append(f"| {full} | {outcome} |")
    sys.stdout.write("\n".join(["| ComfyUI | |", "|---|---|", *rows, ""]))
    if any("FAIL" in row for row in rows):
        sys.exit(1)


if __name__ == "__main__":
    main()
