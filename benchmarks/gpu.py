"""Check and measure the pack on a machine with a GPU: `make gpu`.

    python3 benchmarks/gpu.py [--minutes 8] [--parts step kernels] [--out FOLDER]

Needs a Python that has torch, transformers, accelerate and safetensors, and no network. `make gpu-bundle`, on a machine
with a network, packs what else is needed; this script unpacks that bundle.

The parts run in the order of PARTS, each in a process of its own, until the minutes are over. Each figure is written to
FOLDER/figures.jsonl as soon as it is known, and the output of all parts to FOLDER/log.txt, so a part that is stopped
keeps its figures so far. FOLDER/<name of the GPU>.json has all figures. FOLDER is $OUT if set, else benchmarks/gpu.
The exit status is the number of parts that failed, were stopped, or had no time left.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import re
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
BUNDLE = ROOT / ".cache" / "gpu" / "bundle"


class Part(NamedTuple):
    seconds: int  # the part is stopped after this time
    question: str


# The most valuable parts come first. Up to "quantised" they fit into the 8 minutes of `make gpu`.
PARTS = {
    "recording": Part(60, "Does the step record as a CUDA graph, with the same bits, and leave no graph alive?"),
    "graph": Part(90, "Milliseconds of whole samplings with and without the CUDA graph of a step"),
    "processes": Part(80, "Steps per second of two threads and of two processes on this GPU"),
    "rows": Part(50, "Milliseconds and memory of decodes with strips of 256, 512 and 1024 px"),
    "loading": Part(60, "GB/s of reading a file, checking its numbers, and copying them to the GPU"),
    "train": Part(80, "Seconds and memory of a LoRA step beside the prediction"),
    "quantised": Part(50, "A step inside ComfyUI in bf16 and with quantise, eager and as a CUDA graph"),
    "canvas": Part(90, "Does ComfyUI generate with the shipped workflows?"),
    "correctness": Part(90, "Is the GPU as close to fp32 on the CPU as the libraries are?"),
    "begin": Part(30, "Do the kernels build and run? How fast are a copy and matrix products?"),
    "trained": Part(45, "Does the bundled model generate its committed image in three dtypes?"),
    "step": Part(60, "Milliseconds of a guided step beside diffusers, and where they go"),
    "decode": Part(70, "Milliseconds and memory of decodes beside diffusers, warm"),
    "kernels": Part(20, "Each fused kernel beside plain torch and beside the bytes that it must move"),
    "pipeline": Part(100, "A whole 1.6B pipeline: seconds, memory, and memory that runs out"),
    "compile": Part(120, "Does a step compile with the kernels, and is it faster?"),
    "train_compiled": Part(120, "Seconds and memory of a LoRA step whose blocks are compiled"),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=8, help="stop after this time")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="only these parts")
    default = Path(os.environ.get("OUT") or ROOT / "benchmarks" / "gpu")
    parser.add_argument("--out", type=Path, default=default, help="folder for the results")
    parser.add_argument("--bundle", type=Path, default=BUNDLE, help="what `make gpu-bundle` has packed")
    parser.add_argument("--small", action="store_true", help="tiny sizes, to rehearse without a GPU")
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    out = arguments.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    if arguments.part:
        sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "tests" / "unit")]
        from benchmarks.gpu_parts import run_part

        return run_part(arguments.part, out, arguments.small)

    end = time.monotonic() + 60 * arguments.minutes
    with tempfile.TemporaryDirectory() as folder:
        environment = unpack(arguments.bundle, Path(folder))
        (out / "figures.jsonl").unlink(missing_ok=True)
        ended: dict[str, dict[str, Any]] = {}
        for name in arguments.parts:
            started = time.monotonic()
            seconds = min(PARTS[name].seconds * (30 if arguments.small else 1), end - started)
            command = [sys.executable, "-u", __file__, "--part", name, "--out", str(out)]
            status = run(command + ["--small"] * arguments.small, environment, out / "log.txt", seconds)
            ended[name] = {"ended": status, "seconds": round(time.monotonic() - started, 1)}
            sys.stdout.write(f"{name}: {status}, {ended[name]['seconds']} s\n")
            file = write_summary(out, ended)
    for line in read_lines(out):
        sys.stdout.write(line[:300] + "\n")
    sys.stdout.write(f"{file}\n")
    return sum(part["ended"] != "passed" for part in ended.values())


def unpack(bundle: Path, folder: Path) -> dict[str, str]:
    """Unpack the archives in `bundle` into `folder`. Returns the environment in which parts find them."""
    for archive in sorted(bundle.glob("*.tar.xz")):
        with tarfile.open(archive) as tar:
            tar.extractall(folder, filter="data")
    paths = [str(folder / "site"), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    if (folder / "ComfyUI").is_dir():
        environment["COMFYUI_PATH"] = str(folder / "ComfyUI")
    return environment


def run(command: list[str], environment: dict[str, str], log: Path, seconds: float) -> str:
    """Run `command` for at most `seconds`, append its output to `log`, and return how it ended."""
    if seconds <= 0:
        return "no time left"
    with log.open("ab") as output:
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            status = process.wait(seconds)
            return "passed" if status == 0 else f"failed with {status}"
        except subprocess.TimeoutExpired:
            return f"stopped after {seconds:.0f} s"
        finally:
            # Children of the part would otherwise keep using the GPU, also after Ctrl+C.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def read_lines(out: Path) -> list[str]:
    file = out / "figures.jsonl"
    return file.read_text().splitlines() if file.is_file() else []


def write_summary(out: Path, ended: dict[str, dict[str, Any]]) -> Path:
    """Write how the parts ended and all figures so far to one file named after the GPU."""
    figures: dict[str, dict[str, Any]] = {}
    for line in read_lines(out):
        figure = json.loads(line)
        figures.setdefault(figure.pop("part"), {})[figure.pop("what")] = figure
    machine = next((part.pop("machine") for part in figures.values()), {"gpu": "unknown"})
    for part in figures.values():
        part.pop("machine", None)
    parts = {name: part | {"figures": figures.get(name, {})} for name, part in ended.items()}
    document = {"date": time.strftime("%Y-%m-%d"), "python": platform.python_version(), **machine, "parts": parts}
    file = out / (re.sub(r"\W+", "-", machine["gpu"]).strip("-").lower() + ".json")
    file.write_text(json.dumps(document, indent=1) + "\n")
    return file


if __name__ == "__main__":
    sys.exit(main())
