"""One command for a day with a GPU: is it right, and how fast is it? `make gpu [MINUTES=8]`

Runs with any Python that has torch, transformers, accelerate and safetensors, offline. What else is needed comes from
the wheels in .cache/gpu/wheels, which `make gpu-wheels` puts there on a machine with a network, and ComfyUI
from .cache.
Writes benchmarks/gpu/<card>.json after each stage: what was checked, what was measured, what there was no time for.
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
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
WHEELS, SITE = ROOT / ".cache" / "gpu" / "wheels", ROOT / ".cache" / "gpu" / "site"
RESULTS = ROOT / "benchmarks" / "gpu"
PYTEST = ("-m", "pytest", "-c", "tests/pytest.ini", "-p", "no:cacheprovider", "-q", "--tb=short")
# seconds of the doctor, which begins nothing later
DOCTOR = 240
# of the end of what a stage wrote, in characters
TAIL = 6000


def plain(name: str) -> str:
    """Return the name of a package as indexes compare it (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name).lower()


def add_wheels() -> list[str]:
    """Install those wheels into SITE whose package this Python lacks; return their names."""
    installed = {plain(each.metadata["Name"]) for each in distributions() if each.metadata["Name"]}
    missing = [wheel for wheel in sorted(WHEELS.glob("*.whl")) if plain(wheel.name.split("-")[0]) not in installed]
    if missing:
        options = ("--quiet", "--no-index", "--no-deps", "--upgrade", "--target", SITE)
        subprocess.run([sys.executable, "-m", "pip", "install", *options, *missing], check=True)
    return ["-".join(wheel.name.split("-")[:2]) for wheel in missing]


def run(words: tuple[str, ...], seconds: float) -> tuple[str, str]:
    """Return how this Python ended with `words`, and what it wrote."""
    paths = [str(SITE), *filter(None, [os.environ.get("PYTHONPATH")])]
    # in a file, for a pipe would be waited for until all that was started has ended
    with tempfile.TemporaryFile() as written:
        process = subprocess.Popen(
            [sys.executable, *words],
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
            stdout=written,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code = process.wait(seconds)
            ended = "passed" if code == 0 else f"failed with {code}"
        except subprocess.TimeoutExpired:
            ended = f"took more than {seconds:.0f} s"
        finally:
            # with all that it has started, which would go on on the card, after Ctrl-C too
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        written.seek(0)
        return ended, written.read().decode(errors="replace")


def rates() -> dict[str, Any]:
    """What the card can do at most: a product of matrices, and a copy within its memory, read and written."""
    import torch

    from benchmarks.sampling_gpu import SIDE, peak_rate, seconds
    from sana_core.runtime.accelerator import current_accelerator

    device = current_accelerator() or torch.device("cpu")
    source = torch.randn(8 * SIDE**2, device=device, dtype=torch.bfloat16)
    target = torch.empty_like(source)
    copy = 2 * source.nbytes / seconds(lambda: target.copy_(source))
    return {"teraflops_bf16": round(2 * peak_rate(device) / 1e12, 1), "gigabytes_copied_a_second": round(copy / 1e9)}


def doctor() -> dict[str, Any]:
    """What `python -m sana_core doctor --time` says: checks, and seconds and memory beside the plan and diffusers."""
    from sana_core.doctor import Report, examine

    report = Report(seconds=DOCTOR)
    examine(report, figures=True)
    return report.as_json()


def compiled_step() -> dict[str, Any]:
    """Milliseconds of a guided step beside diffusers' and the floor of its arithmetic, compiled and not."""
    import torch

    from benchmarks.sampling_gpu import measure, peak_rate
    from sana_core.runtime.accelerator import current_accelerator

    device = current_accelerator() or torch.device("cpu")
    return {"1.6B, 1024 px": measure("1.6B", 1024, peak_rate(device), device)}


def graphs() -> dict[str, Any]:
    """Milliseconds of guided steps, launched one by one and as CUDA graphs, which must have the same bits."""
    import torch

    from benchmarks.sampling_gpu import measure_graph
    from sana_core.runtime.accelerator import current_accelerator

    device = current_accelerator()
    if device is None or device.type != "cuda":
        return {"left out": "graphs are those of CUDA and ROCm"}
    steps = (("0.6B", 512), ("0.6B", 1024), ("1.6B", 1024))
    return {f"{name}, {pixels} px": measure_graph(name, pixels, torch.device("cuda", 0)) for name, pixels in steps}


FIGURES: dict[str, Callable[[], dict[str, Any]]] = {
    "rates": rates,
    "doctor": doctor,
    "graphs": graphs,
    "compiled step": compiled_step,
}
# what it is worst not to know comes first; seconds at most, of which a stage that hangs takes all
STAGES = (
    ("correctness", (*PYTEST, "tests/gpu"), 180),
    ("kernels", (*PYTEST, "tests/unit/kernel_numbers.py"), 120),
    ("rates", (__file__, "--figure", "rates"), 40),
    ("doctor", (__file__, "--figure", "doctor"), DOCTOR + 30),
    ("templates in ComfyUI", (*PYTEST, "tests/graph/test_templates.py"), 120),
    ("graphs", (__file__, "--figure", "graphs"), 90),
    ("compiled step", (__file__, "--figure", "compiled step"), 200),
)


def card() -> dict[str, Any]:
    """Which card, with which versions."""
    import torch

    from sana_core.runtime.accelerator import current_accelerator

    device = current_accelerator()
    if device is None:
        return {"card": "cpu", "cards": 0, "torch": torch.__version__, "python": platform.python_version()}
    module = torch.get_device_module(device)
    return {
        "card": module.get_device_name(),
        "cards": torch.accelerator.device_count(),
        "memory_gigabytes": round(module.get_device_properties(device).total_memory / 1e9, 1),
        "torch": torch.__version__,
        "driver": torch.version.cuda or torch.version.hip or device.type,
        "python": platform.python_version(),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=8, help="begin no stage after so long")
    parser.add_argument("--stages", nargs="+", choices=[name for name, _, _ in STAGES], help="these alone")
    parser.add_argument("--out", type=Path, default=RESULTS, help="the folder for the results")
    parser.add_argument("--figure", choices=FIGURES, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.figure:
        sys.path.insert(0, str(ROOT))
        sys.stdout.write("\n" + json.dumps(FIGURES[arguments.figure]()))
        return 0
    began = time.monotonic()
    added = add_wheels()
    sys.path[:0] = [str(ROOT), str(SITE)]
    document = {"date": time.strftime("%Y-%m-%d"), **card(), "wheels": added, "stages": {}}
    arguments.out.mkdir(parents=True, exist_ok=True)
    file = arguments.out / (re.sub(r"\W+", "-", document["card"]).strip("-").lower() + ".json")
    for name, words, most in STAGES:
        if arguments.stages and name not in arguments.stages:
            continue
        left = 60 * arguments.minutes - (time.monotonic() - began)
        started = time.monotonic()
        ended, text = run(words, min(most, left)) if left > 0 else ("no time left", "")
        stage: dict[str, Any] = {"ended": ended, "seconds": round(time.monotonic() - started, 1)}
        if ended == "passed" and "--figure" in words:
            # a library may say something after them
            stage["figures"] = json.loads(next(line for line in reversed(text.splitlines()) if line[:1] == "{"))
        else:
            stage["said"] = text[-TAIL:].splitlines()[-1:] if ended == "passed" else text[-TAIL:].splitlines()
        document["stages"][name] = stage
        file.write_text(json.dumps(document, indent=1) + "\n")
        sys.stdout.write(f"{name}: {ended}, {stage['seconds']} s\n")
        sys.stdout.flush()
    sys.stdout.write(f"{file}\n")
    return sum(stage["ended"] != "passed" for stage in document["stages"].values())


if __name__ == "__main__":
    sys.exit(main())
