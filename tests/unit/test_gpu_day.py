"""`make gpu`: the bundle for a machine without a network, and the figures of failed, hung and killed parts."""

import json
import os
import signal
import subprocess
import sys
import time
import zipfile

import gpu_bundle
import pytest
from setup import ROOT

from benchmarks import gpu, gpu_parts

# Two pretended GPUs, which compute on the CPU.
PRETENDED = {"PYTHONPATH": str(ROOT / "tests" / "pretended_day"), "OMP_NUM_THREADS": "1"}


def rehearse(out, *arguments):
    """Run benchmarks/gpu.py without a bundle."""
    command = [sys.executable, "benchmarks/gpu.py", "--small", "--out", str(out), "--bundle", str(out / "none")]
    environment = os.environ | PRETENDED
    return subprocess.run([*command, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True)


def figures_of(out, part):
    lines = [json.loads(line) for line in (out / "figures.jsonl").read_text().splitlines()]
    return {line["what"]: line for line in lines if line["part"] == part}


def test_every_part_has_a_function_and_the_first_seven_fit_into_eight_minutes():
    assert list(gpu.PARTS) == list(gpu_parts.PART_FUNCTIONS)
    assert sum(part.seconds for part in list(gpu.PARTS.values())[:7]) <= 480
    # Within the first minute the day shows whether steps can be recorded.
    first = next(iter(gpu.PARTS))
    assert first == "recording" and gpu.PARTS[first].seconds <= 60


@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    "part", ["recording", *(pytest.param(part, marks=pytest.mark.slow) for part in list(gpu.PARTS)[1:])]
)
def test_every_part_runs_on_pretended_gpus(tmp_path, part):
    result = rehearse(tmp_path, "--minutes", "50", "--parts", part)
    figures = figures_of(tmp_path, part)
    assert result.returncode == 0, (result.stdout, (tmp_path / "log.txt").read_text()[-4000:])
    assert len(figures) > 1 and figures["machine"]["gpus"] == 2
    document = json.loads((tmp_path / "pretended.json").read_text())
    assert document["gpu"] == "pretended" and document["parts"][part]["ended"] == "passed"
    assert document["parts"][part]["figures"].keys() == figures.keys() - {"machine"}


def test_a_part_that_fails_or_hangs_stops_no_other_and_leaves_its_output(tmp_path):
    environment, log = dict(os.environ), tmp_path / "log.txt"
    child = "import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', sys.argv[1]]); time.sleep(60)"
    late = f"import time; time.sleep(4); open({str(tmp_path / 'late')!r}, 'w')"
    hang = "import time; print('so far', flush=True); time.sleep(60)"
    assert gpu.run([sys.executable, "-c", "print('why'); raise SystemExit(3)"], environment, log, 60) == "failed with 3"
    assert gpu.run([sys.executable, "-c", hang], environment, log, 2) == "stopped after 2 s"
    assert gpu.run([sys.executable, "-c", child, late], environment, log, 2) == "stopped after 2 s"
    assert gpu.run([sys.executable, "-c", "print('measured')"], environment, log, 60) == "passed"
    assert gpu.run([sys.executable, "-c", "print('never')"], environment, log, 0) == "no time left"
    assert log.read_text().split() == ["why", "so", "far", "measured"]
    time.sleep(3)
    assert not (tmp_path / "late").exists()


def test_a_killed_part_leaves_the_figures_it_had(tmp_path):
    environment = os.environ | PRETENDED
    command = [sys.executable, "benchmarks/gpu.py", "--small", "--part", "begin", "--out", str(tmp_path)]
    process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    lines = tmp_path / "figures.jsonl"
    end = time.monotonic() + 120
    while not (lines.is_file() and lines.read_text().count("\n") >= 2):
        assert time.monotonic() < end and process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert "machine" in figures_of(tmp_path, "begin")
    file = gpu.write_summary(tmp_path, {"begin": {"ended": "stopped after 1 s", "seconds": 1.0}})
    document = json.loads(file.read_text())
    assert document["parts"]["begin"]["ended"] == "stopped after 1 s" and document["parts"]["begin"]["figures"]


def test_a_failed_figure_fails_its_part(tmp_path, monkeypatch):
    def part(recorder):
        recorder.attempt("broken", lambda: 1 / 0)
        recorder.attempt("works", lambda: {"ms": 1})

    monkeypatch.setitem(gpu_parts.PART_FUNCTIONS, "begin", part)
    monkeypatch.setattr(
        gpu_parts.torch.cuda,
        "get_device_properties",
        lambda device: gpu_parts.SimpleNamespace(name="any", total_memory=1),
    )
    assert gpu_parts.run_part("begin", tmp_path, False) == 1
    assert figures_of(tmp_path, "begin")["broken"]["failed"] == "ZeroDivisionError: division by zero"
    assert figures_of(tmp_path, "begin")["works"]["ms"] == 1


def test_results_go_to_out_and_not_into_the_source_tree(tmp_path, monkeypatch):
    monkeypatch.setenv("OUT", str(tmp_path / "results"))
    result = subprocess.run(
        [sys.executable, "benchmarks/gpu.py", "--minutes", "0", "--parts", "begin"],
        cwd=ROOT,
        env=dict(os.environ),
        capture_output=True,
        text=True,
    )
    assert result.returncode == 1 and "no time left" in result.stdout and not result.stderr
    assert (tmp_path / "results" / "unknown.json").is_file()


def wheel(folder, name, *requirements):
    path = folder / f"{name}-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as file:
        file.writestr(f"{name}.py", "")
        lines = ["Metadata-Version: 2.1", f"Name: {name}", "Version: 1.0"]
        lines += [f"Requires-Dist: {requirement}" for requirement in requirements]
        file.writestr(f"{name}-1.0.dist-info/METADATA", "\n".join(lines) + "\n")
    return path


def test_the_bundle_names_requirements_that_the_machine_lacks(tmp_path):
    wheels = [
        wheel(tmp_path, "one", "two>=1", "Three_3", "four; extra == 'more'", "five; python_version < '3.9'"),
        wheel(tmp_path, "two", "numpy", "torch"),
    ]
    assert gpu_bundle.unmet(wheels, {"numpy"}, "3.12") == ["three-3 (needed by one)"]
    assert gpu_bundle.unmet(wheels, {"numpy"}, "3.8") == ["five (needed by one)", "three-3 (needed by one)"]


def test_what_is_packed_is_pinned_with_hashes():
    lines = (ROOT / "requirements" / "gpu.in").read_text().splitlines()
    names = {line for line in lines if line and not line.startswith("#")}
    text = gpu_bundle.pinned(names)
    pinned = {line.partition("==")[0] for line in text.splitlines() if "==" in line.split(" ")[0]}
    assert pinned == names and text.count("--hash=sha256:") > len(names)
    with pytest.raises(SystemExit, match="got nothing-such"):
        gpu_bundle.pinned({"nothing-such"})


def test_a_bundle_is_unpacked_for_the_parts(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_bundle, "BUNDLE", tmp_path / "bundle")
    (tmp_path / "bundle").mkdir()
    gpu_bundle.pack_site([wheel(tmp_path, "one")], with_av=True)
    host = tmp_path / "host"
    (host / "comfy" / "text_encoders").mkdir(parents=True)
    (host / "main.py").write_text("")
    (host / "comfy" / "text_encoders" / "large.json").write_text("x" * (gpu_bundle.LARGE_TOKENIZER + 1))
    gpu_bundle.pack_host(host)
    gpu_bundle.pack_repository()
    environment = gpu.unpack(tmp_path / "bundle", tmp_path / "unpacked")
    assert environment["COMFYUI_PATH"] == str(tmp_path / "unpacked" / "ComfyUI")
    assert [file.name for file in (tmp_path / "unpacked" / "ComfyUI").rglob("*") if file.is_file()] == ["main.py"]
    code = "import one, av, av.video; from av.container import InputContainer; print(av.open)"
    result = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
